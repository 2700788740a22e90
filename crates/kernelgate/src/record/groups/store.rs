//! Defines the paths of all record files: baselines in the package's folder; runs and Criterion's
//! data in Cargo's target folder.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::record::baseline::BaselineFile;
use crate::record::files::file::{self, RecordFileError};
use crate::record::files::text::{
    MAX_FILE_NAME_CHARACTERS, is_portable_file_name, shortened_quotation,
};
use crate::record::numerics::OutputErrorsOfExecutable;
use crate::record::origin::package::CargoPackageId;
use crate::record::origin::process;
use crate::record::run::BenchProcessRun;

/// File names that Windows reserves for devices, with any extension.
const FILE_NAMES_RESERVED_BY_WINDOWS: [&str; 22] = [
    "con", "prn", "aux", "nul", "com1", "com2", "com3", "com4", "com5", "com6", "com7", "com8",
    "com9", "lpt1", "lpt2", "lpt3", "lpt4", "lpt5", "lpt6", "lpt7", "lpt8", "lpt9",
];
/// Name, without extension, of a device's calibration file, which lies next to the device's
/// baselines.
const CALIBRATION_FILE_NAME: &str = "calibration";

/// The folders in which a Cargo package keeps its run records and baselines.
#[derive(Debug, Clone)]
pub struct RecordFoldersOfPackage {
    /// Root folder of the Cargo package.
    pub package_root: PathBuf,
    /// The Cargo package; absent outside of packages, and at the root of a workspace that has no
    /// package.
    pub package: Option<CargoPackageId>,
    /// Committed baselines: `<device>/<name>.json`.
    pub baselines_folder: PathBuf,
    /// Folder of recorded runs, `<session>/<bench>.json`; in the target folder unless
    /// `KERNELGATE_HISTORY` names another one.
    pub runs_folder: PathBuf,
    /// Folder of generated files that may be deleted: comparisons, calibrations.
    pub generated_files_folder: PathBuf,
    /// Folder of output errors that `kernelgate verify` recorded for several seeds. `<bench>.json`.
    pub output_errors_folder: PathBuf,
    /// Folder of reference outputs that are kept between processes; it may be deleted.
    pub references_folder: PathBuf,
    /// Criterion's folder.
    pub criterion_folder: PathBuf,
}

/// The reason why a run record or a baseline cannot be found or used.
#[derive(Debug, thiserror::Error)]
pub enum RecordLookupError {
    /// A record file cannot be read or has invalid content.
    #[error(transparent)]
    File(#[from] RecordFileError),
    /// The requested baseline name is not valid as a file name.
    #[error(
        "baseline name `{0}`: use letters, digits, `.`, `_` and `-`, starting with a letter or \
         digit, at most {MAX_FILE_NAME_CHARACTERS} of them"
    )]
    InvalidBaselineName(String),
    /// The requested baseline name is reserved on Windows (such as `con`), where git could not
    /// create the file.
    #[error("baseline name `{0}`: Windows has a device of that name, so that it is no file there")]
    BaselineNameReservedByWindows(String),
    /// The requested baseline name is the name of the calibration file.
    #[error("baseline name `{CALIBRATION_FILE_NAME}`: that file is the calibration of the device")]
    ReservedBaselineName,
    /// The device has no baseline of this name.
    #[error("no baseline `{requested_baseline}` for {device_folder} in {baselines_folder}{}", existing_baselines_in_message(.existing_baselines))]
    NoBaseline {
        /// Name of the baseline that the user requested.
        requested_baseline: String,
        /// The device's folder.
        device_folder: String,
        /// Folder of the baselines.
        baselines_folder: PathBuf,
        /// Existing baselines, as `<device>/<name>`.
        existing_baselines: Vec<String>,
    },
    /// The folder of runs does not contain any run yet.
    #[error("no run in {0}: run `cargo bench` first")]
    NoRunRecorded(PathBuf),
    /// All recorded runs belong to other packages.
    #[error(
        "no run of package {current_package} in {}, only of {}: run `cargo bench` in the package first, or \
         call the program where the other package lies", .runs_folder.display(), comma_separated_packages(.other_packages)
    )]
    RunsOnlyOfOtherPackages {
        /// Package in whose folder the program `kernelgate` was started.
        current_package: CargoPackageId,
        /// Folder of the runs.
        runs_folder: PathBuf,
        /// The packages to which the recorded runs belong.
        other_packages: BTreeSet<CargoPackageId>,
    },
    /// There are fewer recorded sessions than requested.
    #[error(
        "{recorded_sessions} sessions in {runs_folder}, not {requested_invocations}: run `cargo bench` again"
    )]
    FewerSessionsThanRequested {
        /// Number of recorded sessions.
        recorded_sessions: usize,
        /// Number of requested sessions.
        requested_invocations: usize,
        /// Folder of the runs.
        runs_folder: PathBuf,
    },
    /// Two record files contain the same process run.
    #[error(
        "{first_record_file} and {second_record_file} hold the same run, which counts once: remove one"
    )]
    SameRunInTwoFiles {
        /// The record file of the run that was read first.
        first_record_file: PathBuf,
        /// The second record file that holds the same run.
        second_record_file: PathBuf,
    },
    /// The most recent session cannot be determined, because the start of one is in the future.
    #[error(
        "the last session, {session_folder}, starts in the future ({session_start}): the clock was changed; \
         name the one that is meant with --session, or remove it"
    )]
    SessionStartsInFuture {
        /// The session.
        session_folder: PathBuf,
        /// Recorded start of the session.
        session_start: jiff::Timestamp,
    },
}

fn comma_separated_packages(packages: &BTreeSet<CargoPackageId>) -> String {
    packages.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn existing_baselines_in_message(others: &[String]) -> String {
    if others.is_empty() {
        " (found none)".to_owned()
    } else {
        format!(" (found: {})", others.join(", "))
    }
}

impl RecordFoldersOfPackage {
    /// Returns the folders of the package whose bench or program runs. The package is in
    /// `CARGO_MANIFEST_DIR` if cargo sets it; otherwise
    /// [`Self::record_folders_of_package_around_folder`] searches from the working folder.
    pub fn record_folders_of_running_package() -> RecordFoldersOfPackage {
        let package =
            process::nonempty_environment_variable("CARGO_MANIFEST_DIR").map(PathBuf::from);
        package.filter(|folder| folder.is_dir()).map_or_else(
            || Self::record_folders_of_package_around_folder(&process::working_folder_of_process()),
            Self::record_folders_of_package_in_root,
        )
    }

    /// Returns the folders of the package that contains a folder: the nearest parent with a
    /// `Cargo.toml`, otherwise the folder itself.
    pub fn record_folders_of_package_around_folder(folder: &Path) -> RecordFoldersOfPackage {
        Self::record_folders_of_package_in_root(
            folder
                .ancestors()
                .find(|folder| folder.join("Cargo.toml").is_file())
                .unwrap_or(folder)
                .to_owned(),
        )
    }

    fn record_folders_of_package_in_root(root: PathBuf) -> RecordFoldersOfPackage {
        Self::for_package_root(&root, &target_folder_of_cargo(&root))
    }

    /// Returns the folders of the package in `root`, with the Cargo target folder `target`.
    pub fn for_package_root(root: &Path, target: &Path) -> RecordFoldersOfPackage {
        let work = target.join("kernelgate");
        let history = process::nonempty_environment_variable("KERNELGATE_HISTORY");
        Self {
            baselines_folder: root.join("baselines"),
            runs_folder: history
                .map_or_else(|| work.clone(), |folder| root.join(folder))
                .join("runs"),
            output_errors_folder: work.join("numerics"),
            references_folder: work.join("references"),
            generated_files_folder: work,
            criterion_folder: process::nonempty_environment_variable("CRITERION_HOME")
                .map_or_else(|| target.join("criterion"), PathBuf::from),
            package: CargoPackageId::in_folder(root),
            package_root: root.to_owned(),
        }
    }

    /// Returns the path of the page that `kernelgate report` writes by default.
    pub fn default_report_page_path(&self) -> PathBuf {
        self.generated_files_folder.join("report").join("index.html")
    }

    /// Returns the path of a baseline file; a symbolic link is resolved.
    ///
    /// # Errors
    /// Fails if the name is not a plain file name.
    pub fn path_of_baseline(&self, device: &str, name: &str) -> Result<PathBuf, RecordLookupError> {
        check_baseline_file_name(name)?;
        Ok(file::resolve_symbolic_link(
            &self.baselines_folder.join(device).join(format!("{name}.json")),
        ))
    }

    /// Reads the baseline of a device with a given name.
    ///
    /// # Errors
    /// Fails if the name is invalid, or the file is missing (the error lists the existing
    /// baselines) or invalid.
    pub fn read_baseline(
        &self,
        device: &str,
        name: &str,
    ) -> Result<BaselineFile, RecordLookupError> {
        let path = self.path_of_baseline(device, name)?;
        match file::read_record(&path) {
            Err(error) if error.is_because_file_is_missing() => {
                let files = self.list_baseline_files()?;
                let others =
                    files.iter().map(|(device, name, _)| format!("{device}/{name}")).collect();
                Err(RecordLookupError::NoBaseline {
                    requested_baseline: name.to_owned(),
                    device_folder: device.to_owned(),
                    baselines_folder: self.baselines_folder.clone(),
                    existing_baselines: others,
                })
            }
            read => Ok(read?),
        }
    }

    /// Lists every baseline file as (device, name, path), sorted; empty if the folder does not
    /// exist.
    ///
    /// # Errors
    /// Fails if the folder, or a subfolder that may belong to a device, cannot be read: a circle of
    /// links, for example.
    pub fn list_baseline_files(&self) -> Result<Vec<(String, String, PathBuf)>, RecordLookupError> {
        let mut found = Vec::new();
        let unreadable = |path: &Path, cause: std::io::Error| RecordFileError::Io {
            failed_operation: "read",
            record_path: path.to_owned(),
            cause,
        };
        match std::fs::read_dir(&self.baselines_folder) {
            Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => {
                return Err(unreadable(&self.baselines_folder, cause).into());
            }
            _ => {}
        }
        for entry in sorted_entries_of_folder(&self.baselines_folder) {
            std::fs::metadata(&entry).map_err(|cause| unreadable(&entry, cause))?;
        }
        for device in sorted_entries_of_folder(&self.baselines_folder)
            .into_iter()
            .filter(|path| path.is_dir() && file_name_as_text(path) != "resources")
        {
            for path in sorted_json_files_in_folder(&device) {
                let name = path
                    .file_stem()
                    .map(|stem| stem.to_string_lossy().into_owned())
                    .unwrap_or_default();
                if check_baseline_file_name(&name).is_ok() {
                    found.push((file_name_as_text(&device), name, path));
                }
            }
        }
        Ok(found)
    }

    /// Returns the path of the calibration file of a device.
    pub fn path_of_calibration(&self, device: &str) -> PathBuf {
        self.baselines_folder.join(device).join(format!("{CALIBRATION_FILE_NAME}.json"))
    }

    /// Lists the existing calibration files of all devices, sorted by path.
    pub fn list_calibration_files(&self) -> Vec<PathBuf> {
        let file_of = |device: PathBuf| device.join(format!("{CALIBRATION_FILE_NAME}.json"));
        sorted_entries_of_folder(&self.baselines_folder)
            .into_iter()
            .map(file_of)
            .filter(|path| path.is_file())
            .collect()
    }

    /// Returns the path of the file with the output errors that were recorded for a bench, by seed.
    pub fn path_of_output_errors(&self, bench: &str) -> PathBuf {
        self.output_errors_folder.join(format!("{bench}.json"))
    }

    /// Reads the output errors that were recorded for the executables of these runs; errors of
    /// other executables are ignored.
    ///
    /// # Errors
    /// Fails if a numerics record is broken.
    pub fn read_output_errors_of_executables(
        &self,
        runs: &[BenchProcessRun],
    ) -> Result<Vec<OutputErrorsOfExecutable>, RecordLookupError> {
        let benches: BTreeSet<&str> = runs.iter().map(|run| run.bench.as_str()).collect();
        let mut found = Vec::new();
        for bench in benches {
            match file::read_record::<OutputErrorsOfExecutable>(&self.path_of_output_errors(bench))
            {
                Err(error) if error.is_because_file_is_missing() => {}
                read => found.push(read?),
            }
        }
        let same = |record: &OutputErrorsOfExecutable| {
            let mut runs = runs.iter().filter(|run| run.bench == record.bench);
            runs.any(|run| run.executable_hash.as_ref() == Some(&record.executable_hash))
        };
        found.retain(same);
        Ok(found)
    }

    /// Returns the path of the record of a bench process's run.
    pub fn path_of_run_record(&self, session: &str, bench: &str) -> PathBuf {
        self.runs_folder.join(session).join(format!("{bench}.json"))
    }
}

/// Fails unless a name can be the file name of a baseline.
///
/// # Errors
/// Fails if the name could leave its folder, is hidden, has characters that a shell interprets, or
/// is that of the calibration.
pub fn check_baseline_file_name(name: &str) -> Result<(), RecordLookupError> {
    if name == CALIBRATION_FILE_NAME {
        return Err(RecordLookupError::ReservedBaselineName);
    }
    let stem = name.split('.').next().unwrap_or_default().to_ascii_lowercase();
    if FILE_NAMES_RESERVED_BY_WINDOWS.contains(&stem.as_str()) {
        return Err(RecordLookupError::BaselineNameReservedByWindows(name.to_owned()));
    }
    if is_portable_file_name(name) {
        Ok(())
    } else {
        Err(RecordLookupError::InvalidBaselineName(shortened_quotation(name).into_owned()))
    }
}

/// Returns Cargo's target folder: the folder in `CARGO_TARGET_DIR`, otherwise the target folder in
/// which this program was built, otherwise `<root>/target`.
fn target_folder_of_cargo(root: &Path) -> PathBuf {
    if let Some(folder) = process::nonempty_environment_variable("CARGO_TARGET_DIR") {
        return root.join(folder);
    }
    process::cargo_target_folder_of_program().unwrap_or_else(|| root.join("target"))
}

pub(in crate::record) fn sorted_entries_of_folder(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    paths
}

pub(in crate::record) fn sorted_json_files_in_folder(folder: &Path) -> Vec<PathBuf> {
    sorted_entries_of_folder(folder)
        .into_iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .collect()
}

pub(in crate::record) fn file_name_as_text(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_baseline_name_must_stay_in_its_folder() {
        for bad in ["CON", "nul", "aux.txt", "Lpt1.x.y"] {
            assert!(
                matches!(
                    check_baseline_file_name(bad),
                    Err(RecordLookupError::BaselineNameReservedByWindows(_))
                ),
                "{bad}"
            );
        }
        let message = check_baseline_file_name(&"x".repeat(65)).unwrap_err().to_string();
        assert_eq!(
            message,
            "baseline name `xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx`: use letters, digits, `.`, `_` and `-`, starting with a letter or digit, at most 64 of them"
        );
        for good in ["main", "a", "v1.2-rc_3", "2026-11-21", "console", "a.con"] {
            assert!(check_baseline_file_name(good).is_ok(), "{good}");
        }
        assert!(matches!(
            check_baseline_file_name(CALIBRATION_FILE_NAME),
            Err(RecordLookupError::ReservedBaselineName)
        ));
        let long = "x".repeat(65);
        for bad in ["", "..", ".hidden", "../x", "a/b", "a\\b", "-flag", "a b", "ä", "a\0", &long]
        {
            assert!(check_baseline_file_name(bad).is_err(), "{bad}");
        }
    }
}
