//! Copies bench executables into the folder of their side, and chooses the benches that are
//! compared.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::leftover_files;
use crate::benches::child_process::ChildProcess;
use crate::benches::harness_kind::{self, BenchHarnessKind};
use crate::benches::versions::{self, VersionQueryError};
use crate::compare::CompareError;
use kernelgate::protocol;
use kernelgate::record::file::content_hash_of_file;

/// How a bench executable gets its requests: by kernelgate's protocol or by Criterion's flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BenchDriver {
    /// The bench supports the protocol; the number is the newest version that this program supports
    /// too.
    Protocol(u64),
    /// The bench is driven by Criterion's flags, because it does not use kernelgate.
    Criterion,
}

impl BenchDriver {
    /// The driver of both sides of a bench: the older version where both speak the protocol, else
    /// the head's.
    pub fn for_both_sides(base: Self, head: Self) -> BenchDriver {
        match (base, head) {
            (Self::Protocol(base), Self::Protocol(head)) => Self::Protocol(base.min(head)),
            _ => head,
        }
    }
}

/// A bench executable that was copied into its side's folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstalledBench {
    /// Name of the executable's file below `bin/`, which is the bench's name.
    pub bench: String,
    /// Content hash.
    pub hash: String,
    /// Size and times of the file when it was hashed.
    pub stamp: FileSizeAndTimes,
    /// How the executable gets its requests.
    pub driver: BenchDriver,
}

/// The installed bench executables of one side.
#[derive(Debug, Clone, Default)]
pub struct InstalledBenches {
    /// Executables that can be driven, by name.
    pub driven: BTreeMap<String, InstalledBench>,
    /// Executables that cannot be driven, by name, with the reason.
    pub foreign: BTreeMap<String, String>,
    /// Every bench name that was found, requested or not.
    pub names: Vec<String>,
}

/// Decides which bench executables of a side are run.
#[derive(Clone, Copy)]
pub struct SideInstaller<'a> {
    /// The benches that were asked for by name; all if it is empty.
    pub wanted: &'a [String],
    /// Whether the executables were built from the user's package, so that running them is as safe
    /// as `cargo bench`.
    pub built: bool,
    /// Timeout of a process that is asked for its version.
    pub timeout: Duration,
    /// Handle by which an interrupt ends the running process.
    pub running: &'a ChildProcess,
}

/// Copies executables into `side/bin` and asks each for its version. Asking an executable for its
/// version runs it, so only files with this harness's mark and files that the user named are asked.
/// Plain Criterion benches are not asked for versions; executables that were not built here must be
/// named.
///
/// # Errors
/// Fails if a bench of this harness hangs or fails when it is asked, does not support trials
/// ([`CompareError::Refused`]) or cannot be copied.
pub fn install_benches(
    side: &Path,
    found: &BTreeMap<String, PathBuf>,
    label: &str,
    how: SideInstaller<'_>,
) -> Result<InstalledBenches, CompareError> {
    let bin = side.join("bin");
    leftover_files::make_folder(&bin).map_err(CompareError::io("write", &bin))?;
    let mut executables =
        InstalledBenches { names: found.keys().cloned().collect(), ..InstalledBenches::default() };
    for (bench, path) in
        found.iter().filter(|(bench, _)| how.wanted.is_empty() || how.wanted.contains(bench))
    {
        let kind = harness_kind::harness_kind_of_file(path);
        let named = !how.wanted.is_empty();
        let driver = match kind {
            Ok(BenchHarnessKind::Criterion) if how.built || named => BenchDriver::Criterion,
            Ok(BenchHarnessKind::Ours) => match ask_driver(path, bench, label, how)? {
                Some(driver) => driver,
                None => continue,
            },
            Ok(BenchHarnessKind::Unknown) | Err(_) if named => {
                match ask_driver(path, bench, label, how) {
                    Ok(Some(driver)) => driver,
                    Ok(None) => continue,
                    Err(_) => {
                        let why =
                            "asked by --bench, it did not answer as a bench of this harness does";
                        executables.foreign.insert(bench.clone(), why.to_owned());
                        continue;
                    }
                }
            }
            kind => {
                executables.foreign.insert(bench.clone(), not_run_reason(&kind, bench));
                continue;
            }
        };
        let at = bin.join(bench);
        // The file is copied, never hard-linked: a build or `cp` that writes to the original in
        // place must not change the executable that is timed.
        leftover_files::remove_path(&at).map_err(CompareError::io("write", &at))?;
        std::fs::copy(path, &at).map_err(CompareError::io("write", &at))?;
        // The stamp is taken first, so that a write in between is noticed.
        let stamp = FileSizeAndTimes::read(&at);
        let hash = content_hash_of_file(&at)?;
        executables
            .driven
            .insert(bench.clone(), InstalledBench { bench: bench.clone(), hash, stamp, driver });
    }
    Ok(executables)
}

/// Size and times of a file; writing to the file changes at least one of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileSizeAndTimes {
    bytes: u64,
    modified: Option<SystemTime>,
    /// Inode and time of the last change of contents or attributes.
    changed: (u64, i64, i64),
}

impl FileSizeAndTimes {
    fn read(path: &Path) -> FileSizeAndTimes {
        let Ok(facts) = std::fs::metadata(path) else { return Self::default() };
        use std::os::unix::fs::MetadataExt as _;
        Self {
            bytes: facts.len(),
            modified: facts.modified().ok(),
            changed: (facts.ino(), facts.ctime(), facts.ctime_nsec()),
        }
    }
}

impl InstalledBench {
    /// Returns whether both sides' executables have equal contents and are driven alike.
    pub fn has_same_contents(&self, other: &Self) -> bool {
        self.hash == other.hash && self.driver == other.driver
    }

    /// Hashes the installed file again if its size or times changed.
    pub fn check_untouched(&self, side: &Path) -> Result<(), CompareError> {
        if FileSizeAndTimes::read(&side.join("bin").join(&self.bench)) == self.stamp {
            return Ok(());
        }
        self.check_unchanged(side)
    }

    /// Hashes the installed file in `side/bin` again to find changes.
    ///
    /// # Errors
    /// Fails with [`CompareError::Changed`] if the file is not the installed one: its times belong
    /// to unknown code.
    pub fn check_unchanged(&self, side: &Path) -> Result<(), CompareError> {
        let path = side.join("bin").join(&self.bench);
        let found = match path.try_exists() {
            Ok(false) => "missing".to_owned(),
            _ => content_hash_of_file(&path)?,
        };
        if found == self.hash {
            return Ok(());
        }
        Err(CompareError::Changed { path, installed: self.hash.clone(), found })
    }
}

/// Asks an executable for its version; `None` for the program itself, which may lie beside benches.
fn ask_driver(
    path: &Path,
    bench: &str,
    label: &str,
    how: SideInstaller<'_>,
) -> Result<Option<BenchDriver>, CompareError> {
    let refused = |found: String| CompareError::Refused {
        field: "protocol".to_owned(),
        side: format!("{label}, bench `{bench}`"),
        found,
        needed: format!("{} to {}", protocol::SUPPORTED_VERSIONS.0, protocol::SUPPORTED_VERSIONS.1),
    };
    match versions::ask_version_range(path, how.timeout, how.running) {
        Ok(spoken) => match protocol::newest_common_version(spoken) {
            Some(version) => Ok(Some(BenchDriver::Protocol(version))),
            None => Err(refused(format!("{} to {}", spoken.0, spoken.1))),
        },
        Err(VersionQueryError::IsProgram) => Ok(None),
        Err(VersionQueryError::None) => Err(refused("unknown".to_owned())),
        Err(why) => {
            let (side, bench) = (label.to_owned(), bench.to_owned());
            Err(CompareError::NoProtocol { side, bench, cause: why })
        }
    }
}

/// Returns the reason why an executable is not run.
fn not_run_reason(kind: &std::io::Result<BenchHarnessKind>, bench: &str) -> String {
    let why = match kind {
        Ok(BenchHarnessKind::Criterion) => {
            "it uses Criterion alone and was not built here".to_owned()
        }
        Ok(kind @ BenchHarnessKind::Divan) => {
            return format!("{}, so it cannot be driven", kind.words());
        }
        Ok(kind @ BenchHarnessKind::Libtest) => {
            return format!(
                "{}, so it cannot be driven; if it is one of Criterion, `harness = false` is \
                 missing under its [[bench]]",
                kind.words()
            );
        }
        Ok(_) => "its file has no mark of this harness".to_owned(),
        Err(cause) => format!("its file cannot be read ({cause})"),
    };
    format!("{why}, so it was not run; `--bench {bench}` runs it all the same")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::benches::prebuilt::prebuilt_benches;
    use kernelgate::exit::ExitReason;

    #[test]
    fn an_executable_that_changed_after_installation_is_refused() {
        let side = tempfile::tempdir().unwrap();
        std::fs::create_dir(side.path().join("bin")).unwrap();
        let path = side.path().join("bin/b");
        std::fs::write(&path, "one").unwrap();
        let (hash, stamp) = (content_hash_of_file(&path).unwrap(), FileSizeAndTimes::read(&path));
        let driver = BenchDriver::Criterion;
        let bench = InstalledBench { bench: "b".to_owned(), hash, stamp, driver };
        assert!(bench.check_untouched(side.path()).is_ok());
        // A new time with equal contents counts as an unchanged executable.
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        assert!(bench.check_untouched(side.path()).is_ok());
        std::fs::write(&path, "two").unwrap();
        let changed = bench.check_untouched(side.path()).unwrap_err();
        assert_eq!(changed.exit(), ExitReason::Refused);
        let text =
            |error: CompareError| error.to_string().replace(side.path().to_str().unwrap(), "SIDE");
        insta::assert_snapshot!(text(changed), @"refused: SIDE/bin/b changed while it was compared (hash 0a1c6d4cf41eb499911faba7321fe1a0 when it was installed, now 35d5c8cc887e4da96c0560bdcb29998b): its times belong to unknown code; run the comparison again without --resume");
        std::fs::remove_file(&path).unwrap();
        let missing = bench.check_unchanged(side.path()).unwrap_err();
        insta::assert_snapshot!(text(missing), @"refused: SIDE/bin/b changed while it was compared (hash 0a1c6d4cf41eb499911faba7321fe1a0 when it was installed, now missing): its times belong to unknown code; run the comparison again without --resume");
    }

    #[test]
    fn an_executable_without_the_harness_mark_runs_only_if_the_user_names_it() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (side, ran) = (folder.path().join("side"), folder.path().join("ran"));
        let script = folder.path().join("innocent");
        let text = format!("#!/bin/sh\necho > {}\n", ran.display());
        std::fs::write(&script, text).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        let found = prebuilt_benches(folder.path()).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), ["innocent"]);
        let running = ChildProcess::default();
        let how = |wanted| SideInstaller {
            wanted,
            built: false,
            timeout: versions::VERSION_TIMEOUT,
            running: &running,
        };
        let installed = install_benches(&side, &found, "base", how(&[])).unwrap();
        assert!(!ran.exists() && installed.driven.is_empty());
        let why = &installed.foreign["innocent"];
        insta::assert_snapshot!(why, @"its file has no mark of this harness, so it was not run; `--bench innocent` runs it all the same");
        let installed =
            install_benches(&side, &found, "base", how(&["innocent".to_owned()])).unwrap();
        assert!(ran.exists() && installed.driven.is_empty());
        insta::assert_snapshot!(installed.foreign["innocent"], @"asked by --bench, it did not answer as a bench of this harness does");
    }
}
