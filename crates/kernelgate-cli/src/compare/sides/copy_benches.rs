//! Copies the bench executables of a side (base or head) into its folder, and selects the benches
//! that are compared.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::leftover_files;
use crate::benches::child_process::SharedChildProcess;
use crate::benches::harness_kind::{self, BenchHarnessKind};
use crate::benches::versions::{self, ProtocolVersionQueryError};
use crate::compare::CompareError;
use kernelgate::protocol;
use kernelgate::record::file::file_content_hash_hex;

/// How kernelgate controls a bench executable: by requests in kernelgate's bench protocol, or by
/// Criterion's command-line flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BenchControlMethod {
    /// The bench speaks kernelgate's bench protocol; the number is the newest version that the
    /// bench and this program both support.
    ProtocolVersion(u64),
    /// The bench uses Criterion without kernelgate, so kernelgate controls it by Criterion's flags.
    CriterionFlags,
}

impl BenchControlMethod {
    /// Returns how a bench is controlled on both sides: by the older of the two protocol versions
    /// if base and head speak the protocol, else as the head.
    pub fn common_to_both_sides(base: Self, head: Self) -> BenchControlMethod {
        match (base, head) {
            (Self::ProtocolVersion(base), Self::ProtocolVersion(head)) => {
                Self::ProtocolVersion(base.min(head))
            }
            _ => head,
        }
    }
}

/// A bench executable that was copied into the folder of its side (base or head).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopiedBenchExecutable {
    /// Name of the bench, which is also the name of its file in the folder `bin/`.
    pub bench_name: String,
    /// Content hash of the copied bench executable.
    pub executable_hash: String,
    /// Size and times of the executable's file when its content was hashed.
    pub size_and_times: FileSizeAndTimes,
    /// How kernelgate controls the executable: by its bench protocol or by Criterion's flags.
    pub control_method: BenchControlMethod,
}

/// The copied bench executables of one side (base or head), and those that are not run.
#[derive(Debug, Clone, Default)]
pub struct CopiedBenchesOfSide {
    /// Executables that kernelgate can control, by bench name.
    pub runnable_benches: BTreeMap<String, CopiedBenchExecutable>,
    /// Executables that are not run, by bench name, with the reason.
    pub benches_not_run: BTreeMap<String, String>,
    /// Names of all benches that the side (base or head) has, requested or not.
    pub names_of_all_benches: Vec<String>,
}

/// Settings that decide which bench executables of a side are copied and run.
#[derive(Clone, Copy)]
pub struct BenchCopySettings<'a> {
    /// Names of the benches that the user requested; if the list is empty, all benches are used.
    pub wanted_benches: &'a [String],
    /// Whether kernelgate built the executables from the user's package, so that running them is as
    /// safe as `cargo bench`.
    pub built_by_kernelgate: bool,
    /// Longest time for an executable to answer the query for its protocol versions.
    pub version_query_timeout: Duration,
    /// Handle of the queried process, which Ctrl-C kills.
    pub running_child: &'a SharedChildProcess,
}

/// Copies the bench executables of a side into `side/bin`, and queries each one's protocol
/// versions. The version query runs the executable, so only files with the mark of kernelgate's
/// harness and files that the user named are queried. Benches that use Criterion without kernelgate
/// are not queried; prebuilt ones are used only if the user names them.
///
/// # Errors
/// Fails if a bench with kernelgate's harness hangs or fails at the version query, speaks no
/// supported version ([`CompareError::UnsupportedProtocolVersion`]), or cannot be copied.
pub fn copy_and_query_benches(
    side: &Path,
    found: &BTreeMap<String, PathBuf>,
    label: &str,
    how: BenchCopySettings<'_>,
) -> Result<CopiedBenchesOfSide, CompareError> {
    let bin = side.join("bin");
    leftover_files::make_folder_replacing_file(&bin)
        .map_err(CompareError::file_error("write", &bin))?;
    let mut executables = CopiedBenchesOfSide {
        names_of_all_benches: found.keys().cloned().collect(),
        ..CopiedBenchesOfSide::default()
    };
    for (bench, path) in found
        .iter()
        .filter(|(bench, _)| how.wanted_benches.is_empty() || how.wanted_benches.contains(bench))
    {
        let kind = harness_kind::harness_kind_of_file(path);
        let named = !how.wanted_benches.is_empty();
        let driver = match kind {
            Ok(BenchHarnessKind::CriterionOnly) if how.built_by_kernelgate || named => {
                BenchControlMethod::CriterionFlags
            }
            Ok(BenchHarnessKind::Kernelgate) => {
                match query_bench_control_method(path, bench, label, how)? {
                    Some(driver) => driver,
                    None => continue,
                }
            }
            Ok(BenchHarnessKind::UnknownHarness) | Err(_) if named => {
                match query_bench_control_method(path, bench, label, how) {
                    Ok(Some(driver)) => driver,
                    Ok(None) => continue,
                    Err(_) => {
                        let why =
                            "asked by --bench, it did not answer as a bench of this harness does";
                        executables.benches_not_run.insert(bench.clone(), why.to_owned());
                        continue;
                    }
                }
            }
            kind => {
                executables
                    .benches_not_run
                    .insert(bench.clone(), reason_executable_is_not_run(&kind, bench));
                continue;
            }
        };
        let at = bin.join(bench);
        // The executable is copied and not hard-linked: a build or `cp` that overwrites the
        // original in place must not change the executable that is timed.
        leftover_files::remove_file_or_folder_if_present(&at)
            .map_err(CompareError::file_error("write", &at))?;
        std::fs::copy(path, &at).map_err(CompareError::file_error("write", &at))?;
        // Size and times are read before the content is hashed, so that a write in between is
        // detected later.
        let stamp = FileSizeAndTimes::read_from_metadata(&at);
        let hash = file_content_hash_hex(&at)?;
        executables.runnable_benches.insert(
            bench.clone(),
            CopiedBenchExecutable {
                bench_name: bench.clone(),
                executable_hash: hash,
                size_and_times: stamp,
                control_method: driver,
            },
        );
    }
    Ok(executables)
}

/// Size and times of a file, which show that the file was written to without reading its content.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileSizeAndTimes {
    size_bytes: u64,
    modified: Option<SystemTime>,
    /// Inode and ctime: the time of the last change of contents or attributes, as seconds and
    /// nanoseconds.
    inode_and_ctime: (u64, i64, i64),
}

impl FileSizeAndTimes {
    fn read_from_metadata(path: &Path) -> FileSizeAndTimes {
        let Ok(facts) = std::fs::metadata(path) else { return Self::default() };
        use std::os::unix::fs::MetadataExt as _;
        Self {
            size_bytes: facts.len(),
            modified: facts.modified().ok(),
            inode_and_ctime: (facts.ino(), facts.ctime(), facts.ctime_nsec()),
        }
    }
}

impl CopiedBenchExecutable {
    /// Returns whether base's and head's executables have equal content hashes and are controlled
    /// in the same way.
    pub fn has_same_contents_and_driver(&self, other: &Self) -> bool {
        self.executable_hash == other.executable_hash && self.control_method == other.control_method
    }

    /// Checks that the copied executable is unchanged; its content is hashed only if its size or
    /// times changed.
    pub fn check_unchanged_by_size_and_times(&self, side: &Path) -> Result<(), CompareError> {
        if FileSizeAndTimes::read_from_metadata(&side.join("bin").join(&self.bench_name))
            == self.size_and_times
        {
            return Ok(());
        }
        self.check_unchanged_by_hash(side)
    }

    /// Hashes the copied executable in `side/bin` again to find changes of its content.
    ///
    /// # Errors
    /// Fails with [`CompareError::ExecutableChanged`] if the executable's content differs from when
    /// it was copied, because its times then belong to unknown code.
    pub fn check_unchanged_by_hash(&self, side: &Path) -> Result<(), CompareError> {
        let path = side.join("bin").join(&self.bench_name);
        let found = match path.try_exists() {
            Ok(false) => "missing".to_owned(),
            _ => file_content_hash_hex(&path)?,
        };
        if found == self.executable_hash {
            return Ok(());
        }
        Err(CompareError::ExecutableChanged {
            changed_executable: path,
            installed_hash: self.executable_hash.clone(),
            found_hash: found,
        })
    }
}

/// Queries the protocol versions of an executable; returns `None` for the program kernelgate
/// itself, which may lie beside the benches.
fn query_bench_control_method(
    path: &Path,
    bench: &str,
    label: &str,
    how: BenchCopySettings<'_>,
) -> Result<Option<BenchControlMethod>, CompareError> {
    let refused = |found: String| CompareError::UnsupportedProtocolVersion {
        field: "protocol".to_owned(),
        side: format!("{label}, bench `{bench}`"),
        found,
        needed: format!(
            "{} to {}",
            protocol::SUPPORTED_PROTOCOL_VERSIONS.0,
            protocol::SUPPORTED_PROTOCOL_VERSIONS.1
        ),
    };
    match versions::query_bench_protocol_versions(
        path,
        how.version_query_timeout,
        how.running_child,
    ) {
        Ok(spoken) => match protocol::newest_common_protocol_version(spoken) {
            Some(version) => Ok(Some(BenchControlMethod::ProtocolVersion(version))),
            None => Err(refused(format!("{} to {}", spoken.0, spoken.1))),
        },
        Err(ProtocolVersionQueryError::IsKernelgateProgram) => Ok(None),
        Err(ProtocolVersionQueryError::NoVersionsInAnswer) => Err(refused("unknown".to_owned())),
        Err(why) => {
            let (side, bench) = (label.to_owned(), bench.to_owned());
            Err(CompareError::NoBenchProtocol { side, bench, cause: why })
        }
    }
}

/// Returns the reason why a bench executable is not run, for the user.
fn reason_executable_is_not_run(kind: &std::io::Result<BenchHarnessKind>, bench: &str) -> String {
    let why = match kind {
        Ok(BenchHarnessKind::CriterionOnly) => {
            "it uses Criterion alone and was not built here".to_owned()
        }
        Ok(kind @ BenchHarnessKind::Divan) => {
            return format!("{}, so it cannot be driven", kind.harness_description());
        }
        Ok(kind @ BenchHarnessKind::Libtest) => {
            return format!(
                "{}, so it cannot be driven; if it is one of Criterion, `harness = false` is \
                 missing under its [[bench]]",
                kind.harness_description()
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
    use crate::benches::prebuilt::prebuilt_benches_in_folder;
    use kernelgate::exit::ProcessExitReason;

    #[test]
    fn an_executable_that_changed_after_installation_is_refused() {
        let side = tempfile::tempdir().unwrap();
        std::fs::create_dir(side.path().join("bin")).unwrap();
        let path = side.path().join("bin/b");
        std::fs::write(&path, "one").unwrap();
        let (hash, stamp) =
            (file_content_hash_hex(&path).unwrap(), FileSizeAndTimes::read_from_metadata(&path));
        let driver = BenchControlMethod::CriterionFlags;
        let bench = CopiedBenchExecutable {
            bench_name: "b".to_owned(),
            executable_hash: hash,
            size_and_times: stamp,
            control_method: driver,
        };
        assert!(bench.check_unchanged_by_size_and_times(side.path()).is_ok());
        // If only the file's modification time changed and its contents are equal, the executable
        // counts as unchanged.
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        assert!(bench.check_unchanged_by_size_and_times(side.path()).is_ok());
        std::fs::write(&path, "two").unwrap();
        let changed = bench.check_unchanged_by_size_and_times(side.path()).unwrap_err();
        assert_eq!(changed.exit_reason(), ProcessExitReason::ResultsNotComparable);
        let text =
            |error: CompareError| error.to_string().replace(side.path().to_str().unwrap(), "SIDE");
        insta::assert_snapshot!(text(changed), @"refused: SIDE/bin/b changed while it was compared (hash 0a1c6d4cf41eb499911faba7321fe1a0 when it was installed, now 35d5c8cc887e4da96c0560bdcb29998b): its times belong to unknown code; run the comparison again without --resume");
        std::fs::remove_file(&path).unwrap();
        let missing = bench.check_unchanged_by_hash(side.path()).unwrap_err();
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
        let found = prebuilt_benches_in_folder(folder.path()).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), ["innocent"]);
        let running = SharedChildProcess::default();
        let how = |wanted| BenchCopySettings {
            wanted_benches: wanted,
            built_by_kernelgate: false,
            version_query_timeout: versions::PROTOCOL_VERSION_QUERY_TIMEOUT,
            running_child: &running,
        };
        let installed = copy_and_query_benches(&side, &found, "base", how(&[])).unwrap();
        assert!(!ran.exists() && installed.runnable_benches.is_empty());
        let why = &installed.benches_not_run["innocent"];
        insta::assert_snapshot!(why, @"its file has no mark of this harness, so it was not run; `--bench innocent` runs it all the same");
        let installed =
            copy_and_query_benches(&side, &found, "base", how(&["innocent".to_owned()])).unwrap();
        assert!(ran.exists() && installed.runnable_benches.is_empty());
        insta::assert_snapshot!(installed.benches_not_run["innocent"], @"asked by --bench, it did not answer as a bench of this harness does");
    }
}
