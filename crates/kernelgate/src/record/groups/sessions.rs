//! Finds and reads sessions: a session is the process runs of one cargo invocation, stored in one
//! folder.
//!
//! Sessions are ordered by the start times in their names or records. Modification times of files
//! are used only if a session's name and records contain no start time, because a restored cache or
//! a wrong clock changes them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;

use super::store::{
    RecordFoldersOfPackage, RecordLookupError, file_name_as_text, sorted_entries_of_folder,
    sorted_json_files_in_folder,
};
use crate::record::files::file;
use crate::record::origin::package::CargoPackageId;
use crate::record::run::BenchProcessRun;

/// Largest difference that is accepted between the clocks of machines which write sessions into one
/// folder.
const MAX_CLOCK_DIFFERENCE_OF_MACHINES: Duration = Duration::from_secs(300);

/// The process runs of one invocation of the benches, with their folder.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionOfRuns {
    /// Folder that contains the session's run records.
    pub session_folder: PathBuf,
    /// Process runs of the session, one for each bench process; at least one.
    pub runs: Vec<BenchProcessRun>,
}

impl RecordFoldersOfPackage {
    /// Reads the last `count` sessions with runs of this package, oldest first; sessions of every
    /// package if the store belongs to none. A session may contain runs of other packages too.
    ///
    /// # Errors
    /// Fails if there are fewer sessions, a run is invalid, or the last session starts in the
    /// future.
    pub fn read_last_sessions(
        &self,
        count: usize,
    ) -> Result<Vec<SessionOfRuns>, RecordLookupError> {
        let mut sessions: Vec<(Timestamp, PathBuf)> = sorted_entries_of_folder(&self.runs_folder)
            .into_iter()
            .filter_map(|folder| Some((start_time_of_session_in_folder(&folder)?, folder)))
            .collect();
        sessions.sort();
        let (mut last, mut others) = (Vec::new(), BTreeSet::new());
        for (started, folder) in sessions.into_iter().rev() {
            if !self.may_contain_runs_of_own_package(&folder, &mut others) {
                continue;
            }
            if last.is_empty() && started > Timestamp::now() + MAX_CLOCK_DIFFERENCE_OF_MACHINES {
                return Err(RecordLookupError::SessionStartsInFuture {
                    session_folder: folder,
                    session_start: started,
                });
            }
            last.push(folder);
            if last.len() == count {
                return self.read_sessions_in_folders(last.iter().rev().map(PathBuf::as_path));
            }
        }
        Err(match (&self.package, last.len()) {
            (Some(package), 0) if !others.is_empty() => {
                RecordLookupError::RunsOnlyOfOtherPackages {
                    current_package: package.clone(),
                    runs_folder: self.runs_folder.clone(),
                    other_packages: others,
                }
            }
            (_, 0) => RecordLookupError::NoRunRecorded(self.runs_folder.clone()),
            (_, found) => RecordLookupError::FewerSessionsThanRequested {
                recorded_sessions: found,
                requested_invocations: count,
                runs_folder: self.runs_folder.clone(),
            },
        })
    }

    /// Returns whether a session's folder may contain runs of the store's package; a file that
    /// cannot be read counts as such a run. Adds the names of other packages with runs in the
    /// folder to `others`.
    fn may_contain_runs_of_own_package(
        &self,
        folder: &Path,
        others: &mut BTreeSet<CargoPackageId>,
    ) -> bool {
        let Some(own) = &self.package else { return true };
        let mut may = false;
        for path in sorted_json_files_in_folder(folder) {
            match file::read_package_of_run(&path) {
                Ok(Some(other)) if other != *own => {
                    others.insert(other);
                }
                _ => may = true,
            }
        }
        may
    }

    /// Reads the session whose process runs are in a folder.
    ///
    /// # Errors
    /// Fails if the session has no run, or a run is broken.
    pub fn read_session_in_folder(
        &self,
        folder: &Path,
    ) -> Result<SessionOfRuns, RecordLookupError> {
        let mut sessions = self.read_sessions_in_folders([folder])?;
        sessions.pop().ok_or_else(|| RecordLookupError::NoRunRecorded(folder.to_owned()))
    }

    /// Reads the sessions whose process runs are in these folders.
    ///
    /// # Errors
    /// Fails if a folder has no run, a run is broken, or a run appears twice: its copy would count
    /// as another process run.
    pub fn read_sessions_in_folders<'a>(
        &self,
        folders: impl IntoIterator<Item = &'a Path>,
    ) -> Result<Vec<SessionOfRuns>, RecordLookupError> {
        let mut sessions: Vec<SessionOfRuns> = Vec::new();
        let mut read: BTreeMap<(String, String), PathBuf> = BTreeMap::new();
        for folder in folders {
            let files = sorted_json_files_in_folder(folder);
            if files.is_empty() {
                return Err(RecordLookupError::NoRunRecorded(folder.to_owned()));
            }
            let mut runs = Vec::new();
            for path in files {
                let run: BenchProcessRun = file::read_record(&path)?;
                // Runs are identified by key and start time, because sessions in several checkouts
                // may have equal names.
                let identity = (run.key_in_baseline(), run.start_time.clone());
                if let Some(first) = read.insert(identity, path.clone()) {
                    return Err(RecordLookupError::SameRunInTwoFiles {
                        first_record_file: first,
                        second_record_file: path,
                    });
                }
                runs.push(run);
            }
            sessions.push(SessionOfRuns { session_folder: folder.to_owned(), runs });
        }
        Ok(sessions)
    }
}

/// Makes the name of a session from its start time and the id of the process that starts it.
pub fn session_name_from_start_and_process(started: Timestamp, process: u32) -> String {
    format!("{}-{process}", started.strftime(START_TIME_FORMAT_IN_SESSION_NAMES))
}

const START_TIME_FORMAT_IN_SESSION_NAMES: &str = "%Y%m%dT%H%M%SZ";

/// Returns the start time of a session from its name, which is fast, otherwise from its records.
/// The result is `None` if the session's folder contains no record.
fn start_time_of_session_in_folder(folder: &Path) -> Option<Timestamp> {
    let files = sorted_json_files_in_folder(folder);
    let by_name = || {
        let name = file_name_as_text(folder);
        let (time, process) = name.split_once('-')?;
        process.parse::<u32>().ok()?;
        let at = jiff::civil::DateTime::strptime(START_TIME_FORMAT_IN_SESSION_NAMES, time).ok()?;
        Some(at.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp())
    };
    let by_record = || {
        files
            .iter()
            .filter_map(|path| file::read_start_time_of_run(path)?.parse::<Timestamp>().ok())
            .min()
    };
    // If no record can be read, the newest file time is used, so that the session is read and the
    // error reported.
    let by_file = || {
        let written = |path: &PathBuf| std::fs::metadata(path).and_then(|it| it.modified()).ok();
        Timestamp::try_from(files.iter().filter_map(written).max()?).ok()
    };
    (!files.is_empty()).then(|| by_name().or_else(by_record).or_else(by_file)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{CommitAndChanges, RecordFileError, RunEnvironment};

    fn write_run_record_of_session(store: &RecordFoldersOfPackage, session: &str, started: &str) {
        let run = BenchProcessRun {
            start_time: started.to_owned(),
            ..BenchProcessRun::empty_run_starting_now(
                "b",
                session,
                RunEnvironment::environment_of_process_on_cpu(),
                CommitAndChanges::default(),
            )
        };
        file::write_record_atomically(&store.path_of_run_record(session, "b"), &run).unwrap();
    }

    #[test]
    fn the_last_session_has_the_latest_recorded_start() {
        let folder = tempfile::tempdir().unwrap();
        let store = RecordFoldersOfPackage::for_package_root(folder.path(), folder.path());
        let named =
            session_name_from_start_and_process("2026-01-02T03:04:05Z".parse().unwrap(), 77);
        assert_eq!(named, "20260102T030405Z-77");
        write_run_record_of_session(&store, "newer", "2026-01-02T03:04:06.250Z");
        write_run_record_of_session(&store, "new", "2026-01-02T03:04:06Z");
        // This record file is written later than its recorded start, as in a restored cache.
        write_run_record_of_session(&store, &named, "2026-01-02T03:04:08Z");
        write_run_record_of_session(&store, "old", "2025-01-02T03:04:05Z");
        let last = |count| -> Vec<String> {
            let sessions = store.read_last_sessions(count).unwrap();
            sessions.into_iter().map(|session| session.runs[0].session_name.clone()).collect()
        };
        assert_eq!(last(1), ["newer"]);
        assert_eq!(last(4), ["old", &named, "new", "newer"]);
        // A copied record file is the same process run, whatever the copy's name is.
        for copy in [
            store.path_of_run_record("newer", "copy"),
            store.path_of_run_record("20260102T030407Z-1", "b"),
        ] {
            std::fs::create_dir_all(copy.parent().unwrap()).unwrap();
            std::fs::copy(store.path_of_run_record("newer", "b"), &copy).unwrap();
            let twice =
                store.read_last_sessions(5).or_else(|_| store.read_last_sessions(4)).unwrap_err();
            assert!(matches!(twice, RecordLookupError::SameRunInTwoFiles { .. }), "{twice:?}");
            std::fs::remove_file(copy).unwrap();
        }
        // Runs of another package that shares the session folder are not returned.
        let package = |name: &str| CargoPackageId {
            name: name.to_owned(),
            manifest_path: "Cargo.toml".to_owned(),
        };
        let store_of =
            |name: &str| RecordFoldersOfPackage { package: Some(package(name)), ..store.clone() };
        let other = BenchProcessRun {
            package: Some(package("other")),
            start_time: "2026-01-02T03:04:09Z".to_owned(),
            ..BenchProcessRun::empty_run_starting_now(
                "b",
                "other",
                RunEnvironment::environment_of_process_on_cpu(),
                CommitAndChanges::default(),
            )
        };
        file::write_record_atomically(&store.path_of_run_record("other", "b"), &other).unwrap();
        let last_of = |name: &str| {
            store_of(name).read_last_sessions(1).unwrap()[0].runs[0].session_name.clone()
        };
        assert_eq!(last(1), ["other"]);
        assert_eq!((&*last_of("other"), &*last_of("own")), ("other", "newer"));
        let few = store_of("own").read_last_sessions(5).unwrap_err();
        assert!(
            matches!(
                few,
                RecordLookupError::FewerSessionsThanRequested {
                    recorded_sessions: 4,
                    requested_invocations: 5,
                    ..
                }
            ),
            "{few:?}"
        );
        std::fs::remove_dir_all(store.runs_folder.join("other")).unwrap();
        write_run_record_of_session(&store, "ahead", "2226-01-02T03:04:05Z");
        match store.read_last_sessions(1).unwrap_err() {
            RecordLookupError::SessionStartsInFuture { session_folder: folder, .. } => {
                assert!(folder.ends_with("ahead"))
            }
            other => panic!("{other:?}"),
        }
        // A session that cannot be read counts as the newest one, so that the error names it.
        std::fs::remove_dir_all(store.runs_folder.join("ahead")).unwrap();
        std::fs::write(store.path_of_run_record("old", "b"), "{").unwrap();
        let broken = store.read_last_sessions(1).unwrap_err();
        assert!(
            matches!(broken, RecordLookupError::File(RecordFileError::InvalidJson { .. })),
            "{broken:?}"
        );
    }
}
