//! Paths of all files: baselines in the package, runs and Criterion's data in the target folder.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::record::baseline::Baseline;
use crate::record::files::file::{self, RecordFileError};
use crate::record::files::text::{
    MAX_FILE_NAME_CHARACTERS, is_plain_file_name, start_of_quotation,
};
use crate::record::numerics::Numerics;
use crate::record::origin::package::CargoPackage;
use crate::record::origin::process;
use crate::record::run::ProcessRun;

/// Names that Windows reserves for devices, with any extension.
const RESERVED_WINDOWS_NAMES: [&str; 22] = [
    "con", "prn", "aux", "nul", "com1", "com2", "com3", "com4", "com5", "com6", "com7", "com8",
    "com9", "lpt1", "lpt2", "lpt3", "lpt4", "lpt5", "lpt6", "lpt7", "lpt8", "lpt9",
];
/// Name of a device's calibration, next to its baselines.
const CALIBRATION_NAME: &str = "calibration";

/// The folders in which a package keeps its runs and baselines.
#[derive(Debug, Clone)]
pub struct BaselineStore {
    /// Root of the package.
    pub root: PathBuf,
    /// The package; absent at the root of a workspace that has none, and outside of packages.
    pub package: Option<CargoPackage>,
    /// Committed baselines: `<device>/<name>.json`.
    pub baselines: PathBuf,
    /// Runs: Folder of recorded runs, `<session>/<bench>.json`; outside the target folder if
    /// `KERNELGATE_HISTORY` names a folder for them.
    pub runs: PathBuf,
    /// Folder of derived files that may be deleted: comparisons, calibrations.
    pub work: PathBuf,
    /// Folder of output errors that were recorded for several seeds: `<bench>.json`.
    pub numerics: PathBuf,
    /// Folder of stored references, kept between processes; safe to delete.
    pub references: PathBuf,
    /// Criterion's folder.
    pub criterion: PathBuf,
}

/// The reason why a run or baseline cannot be found.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A record file is unreadable or broken.
    #[error(transparent)]
    File(#[from] RecordFileError),
    /// The text is not valid as a file name.
    #[error(
        "baseline name `{0}`: use letters, digits, `.`, `_` and `-`, starting with a letter or \
         digit, at most {MAX_FILE_NAME_CHARACTERS} of them"
    )]
    Name(String),
    /// The name is reserved on Windows (such as `con`), where a clone could not create the file.
    #[error("baseline name `{0}`: Windows has a device of that name, so that it is no file there")]
    Device(String),
    /// The name is reserved for another file.
    #[error("baseline name `{CALIBRATION_NAME}`: that file is the calibration of the device")]
    Reserved,
    /// The device has no baseline of this name.
    #[error("no baseline `{name}` for {device} in {folder}{}", found_others_text(.others))]
    NoBaseline {
        /// The name asked for.
        name: String,
        /// The device's folder.
        device: String,
        /// Folder of the baselines.
        folder: PathBuf,
        /// Baselines that exist instead of the requested one, as `<device>/<name>`.
        others: Vec<String>,
    },
    /// The folder of runs has no run yet.
    #[error("no run in {0}: run `cargo bench` first")]
    NoRun(PathBuf),
    /// All recorded runs are of other packages.
    #[error(
        "no run of package {package} in {}, only of {}: run `cargo bench` in the package first, or \
         call the program where the other package lies", .folder.display(), package_list(.others)
    )]
    OtherPackages {
        /// Package in whose folder the program was started.
        package: CargoPackage,
        /// Folder of the runs.
        folder: PathBuf,
        /// The packages that the runs belong to.
        others: BTreeSet<CargoPackage>,
    },
    /// There are fewer recorded invocations than requested.
    #[error("{found} sessions in {folder}, not {wanted}: run `cargo bench` again")]
    FewRuns {
        /// How many there are.
        found: usize,
        /// Number of requested invocations.
        wanted: usize,
        /// Folder of the runs.
        folder: PathBuf,
    },
    /// Two record files hold the same run.
    #[error("{first} and {second} hold the same run, which counts once: remove one")]
    Twice {
        /// The record file that was read first.
        first: PathBuf,
        /// The record file that was read later.
        second: PathBuf,
    },
    /// The most recent session cannot be determined, because it starts in the future.
    #[error(
        "the last session, {folder}, starts in the future ({started}): the clock was changed; \
         name the one that is meant with --session, or remove it"
    )]
    Future {
        /// The session.
        folder: PathBuf,
        /// Recorded start of the session.
        started: jiff::Timestamp,
    },
}

fn package_list(packages: &BTreeSet<CargoPackage>) -> String {
    packages.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn found_others_text(others: &[String]) -> String {
    if others.is_empty() {
        " (found none)".to_owned()
    } else {
        format!(" (found: {})", others.join(", "))
    }
}

impl BaselineStore {
    /// Finds the store of the package whose bench binary runs: The store lies in
    /// `CARGO_MANIFEST_DIR`, as cargo sets it, else as [`Self::around_folder`] finds it from the
    /// working folder.
    pub fn discover() -> BaselineStore {
        let package = process::nonempty_variable("CARGO_MANIFEST_DIR").map(PathBuf::from);
        package
            .filter(|folder| folder.is_dir())
            .map_or_else(|| Self::around_folder(&process::working_folder()), Self::for_package)
    }

    /// The store of the package that a folder belongs to: the nearest folder upwards with a
    /// `Cargo.toml`, else the folder itself.
    pub fn around_folder(folder: &Path) -> BaselineStore {
        Self::for_package(
            folder
                .ancestors()
                .find(|folder| folder.join("Cargo.toml").is_file())
                .unwrap_or(folder)
                .to_owned(),
        )
    }

    fn for_package(root: PathBuf) -> BaselineStore {
        Self::at(&root, &cargo_target_folder(&root))
    }

    /// The store of a package in that folder, with that target folder.
    pub fn at(root: &Path, target: &Path) -> BaselineStore {
        let work = target.join("kernelgate");
        let history = process::nonempty_variable("KERNELGATE_HISTORY");
        Self {
            baselines: root.join("baselines"),
            runs: history.map_or_else(|| work.clone(), |folder| root.join(folder)).join("runs"),
            numerics: work.join("numerics"),
            references: work.join("references"),
            work,
            criterion: process::nonempty_variable("CRITERION_HOME")
                .map_or_else(|| target.join("criterion"), PathBuf::from),
            package: CargoPackage::at(root),
            root: root.to_owned(),
        }
    }

    /// Path of the page that `kernelgate report` writes by default.
    pub fn report_page(&self) -> PathBuf {
        self.work.join("report").join("index.html")
    }

    /// File of a baseline; for a link, the file that it leads to.
    ///
    /// # Errors
    /// Fails if the name is not a plain file name.
    pub fn baseline_path(&self, device: &str, name: &str) -> Result<PathBuf, StoreError> {
        check_path_component(name)?;
        Ok(file::follow_link(&self.baselines.join(device).join(format!("{name}.json"))))
    }

    /// Reads a baseline of a device by its name.
    ///
    /// # Errors
    /// Fails if the name is invalid, or the file is missing (the error lists the existing
    /// baselines) or invalid.
    pub fn baseline(&self, device: &str, name: &str) -> Result<Baseline, StoreError> {
        let path = self.baseline_path(device, name)?;
        match file::read(&path) {
            Err(error) if error.is_not_found() => {
                let files = self.baseline_files()?;
                let others =
                    files.iter().map(|(device, name, _)| format!("{device}/{name}")).collect();
                Err(StoreError::NoBaseline {
                    name: name.to_owned(),
                    device: device.to_owned(),
                    folder: self.baselines.clone(),
                    others,
                })
            }
            read => Ok(read?),
        }
    }

    /// Every baseline file as (device, name, path), sorted; empty if the folder does not exist.
    ///
    /// # Errors
    /// Fails if the folder, or a subfolder that may belong to a device, cannot be read: a circle of
    /// links, for example.
    pub fn baseline_files(&self) -> Result<Vec<(String, String, PathBuf)>, StoreError> {
        let mut found = Vec::new();
        let unreadable = |path: &Path, cause: std::io::Error| RecordFileError::Io {
            action: "read",
            path: path.to_owned(),
            cause,
        };
        match std::fs::read_dir(&self.baselines) {
            Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => {
                return Err(unreadable(&self.baselines, cause).into());
            }
            _ => {}
        }
        for entry in folder_entries(&self.baselines) {
            std::fs::metadata(&entry).map_err(|cause| unreadable(&entry, cause))?;
        }
        for device in folder_entries(&self.baselines)
            .into_iter()
            .filter(|path| path.is_dir() && file_name_text(path) != "resources")
        {
            for path in json_files_in(&device) {
                let name = path
                    .file_stem()
                    .map(|stem| stem.to_string_lossy().into_owned())
                    .unwrap_or_default();
                if check_path_component(&name).is_ok() {
                    found.push((file_name_text(&device), name, path));
                }
            }
        }
        Ok(found)
    }

    /// Path of the calibration file of a device.
    pub fn calibration_path(&self, device: &str) -> PathBuf {
        self.baselines.join(device).join(format!("{CALIBRATION_NAME}.json"))
    }

    /// Paths of the calibration files of all devices, sorted.
    pub fn calibration_files(&self) -> Vec<PathBuf> {
        let file_of = |device: PathBuf| device.join(format!("{CALIBRATION_NAME}.json"));
        folder_entries(&self.baselines)
            .into_iter()
            .map(file_of)
            .filter(|path| path.is_file())
            .collect()
    }

    /// Path of the file that records a bench binary's errors by seed.
    pub fn seed_errors_path(&self, bench: &str) -> PathBuf {
        self.numerics.join(format!("{bench}.json"))
    }

    /// Output errors recorded for the executables in these runs; errors of other executables do not
    /// apply.
    ///
    /// # Errors
    /// Fails if a numerics record is broken.
    pub fn numerics(&self, runs: &[ProcessRun]) -> Result<Vec<Numerics>, StoreError> {
        let benches: BTreeSet<&str> = runs.iter().map(|run| run.bench.as_str()).collect();
        let mut found = Vec::new();
        for bench in benches {
            match file::read::<Numerics>(&self.seed_errors_path(bench)) {
                Err(error) if error.is_not_found() => {}
                read => found.push(read?),
            }
        }
        let same = |record: &Numerics| {
            let mut runs = runs.iter().filter(|run| run.bench == record.bench);
            runs.any(|run| run.executable.as_ref() == Some(&record.executable))
        };
        found.retain(same);
        Ok(found)
    }

    /// Path of the file that records a bench process' run.
    pub fn run_record_path(&self, session: &str, bench: &str) -> PathBuf {
        self.runs.join(session).join(format!("{bench}.json"))
    }
}

/// Accepts names that are one plain path component.
///
/// # Errors
/// Fails if the name could leave its folder, is hidden, has characters that a shell interprets, or
/// is that of the calibration.
pub fn check_path_component(name: &str) -> Result<(), StoreError> {
    if name == CALIBRATION_NAME {
        return Err(StoreError::Reserved);
    }
    let stem = name.split('.').next().unwrap_or_default().to_ascii_lowercase();
    if RESERVED_WINDOWS_NAMES.contains(&stem.as_str()) {
        return Err(StoreError::Device(name.to_owned()));
    }
    if is_plain_file_name(name) {
        Ok(())
    } else {
        Err(StoreError::Name(start_of_quotation(name).into_owned()))
    }
}

/// The target folder: Returns `CARGO_TARGET_DIR`, else the target folder in which this program was
/// built, else `<root>/target`.
fn cargo_target_folder(root: &Path) -> PathBuf {
    if let Some(folder) = process::nonempty_variable("CARGO_TARGET_DIR") {
        return root.join(folder);
    }
    process::target_folder_of_program().unwrap_or_else(|| root.join("target"))
}

pub(in crate::record) fn folder_entries(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    paths
}

pub(in crate::record) fn json_files_in(folder: &Path) -> Vec<PathBuf> {
    folder_entries(folder)
        .into_iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .collect()
}

pub(in crate::record) fn file_name_text(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_baseline_name_cannot_leave_its_folder() {
        for bad in ["CON", "nul", "aux.txt", "Lpt1.x.y"] {
            assert!(matches!(check_path_component(bad), Err(StoreError::Device(_))), "{bad}");
        }
        let message = check_path_component(&"x".repeat(65)).unwrap_err().to_string();
        assert_eq!(
            message,
            "baseline name `xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx`: use letters, digits, `.`, `_` and `-`, starting with a letter or digit, at most 64 of them"
        );
        for good in ["main", "a", "v1.2-rc_3", "2026-11-21", "console", "a.con"] {
            assert!(check_path_component(good).is_ok(), "{good}");
        }
        assert!(matches!(check_path_component(CALIBRATION_NAME), Err(StoreError::Reserved)));
        let long = "x".repeat(65);
        for bad in ["", "..", ".hidden", "../x", "a/b", "a\\b", "-flag", "a b", "ä", "a\0", &long]
        {
            assert!(check_path_component(bad).is_err(), "{bad}");
        }
    }
}
