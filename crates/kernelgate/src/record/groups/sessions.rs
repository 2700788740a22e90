//! Sessions: the process runs of one invocation, on disk a folder.
//!
//! Sessions are ordered by their recorded starts. File times are not used to order sessions,
//! because a restored cache or a wrong clock changes them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;

use super::store::{BaselineStore, StoreError, file_name_text, folder_entries, json_files_in};
use crate::record::files::file;
use crate::record::origin::package::CargoPackage;
use crate::record::run::ProcessRun;

/// Clocks of machines that share a folder differ by less.
const MAX_CLOCK_DIFFERENCE: Duration = Duration::from_secs(300);

/// A session: the process runs of one invocation of the benches.
#[derive(Debug, Clone, PartialEq)]
pub struct Session {
    /// Folder of the session.
    pub folder: PathBuf,
    /// Runs of the session, at least one: one for each bench process.
    pub runs: Vec<ProcessRun>,
}

impl BaselineStore {
    /// The last `count` sessions with runs of this package, oldest first; sessions of every package
    /// if this store has no package. A session may also hold runs of other packages.
    ///
    /// # Errors
    /// Fails if there are fewer sessions, a run is invalid, or the last session starts in the
    /// future.
    pub fn last_sessions(&self, count: usize) -> Result<Vec<Session>, StoreError> {
        let mut sessions: Vec<(Timestamp, PathBuf)> = folder_entries(&self.runs)
            .into_iter()
            .filter_map(|folder| Some((start_of_session(&folder)?, folder)))
            .collect();
        sessions.sort();
        let (mut last, mut others) = (Vec::new(), BTreeSet::new());
        for (started, folder) in sessions.into_iter().rev() {
            if !self.may_hold_runs_of(&folder, &mut others) {
                continue;
            }
            if last.is_empty() && started > Timestamp::now() + MAX_CLOCK_DIFFERENCE {
                return Err(StoreError::Future { folder, started });
            }
            last.push(folder);
            if last.len() == count {
                return self.sessions_in_folders(last.iter().rev().map(PathBuf::as_path));
            }
        }
        Err(match (&self.package, last.len()) {
            (Some(package), 0) if !others.is_empty() => StoreError::OtherPackages {
                package: package.clone(),
                folder: self.runs.clone(),
                others,
            },
            (_, 0) => StoreError::NoRun(self.runs.clone()),
            (_, found) => StoreError::FewRuns { found, wanted: count, folder: self.runs.clone() },
        })
    }

    /// Returns whether a session's folder may hold runs of this package; a file that cannot be read
    /// counts as a run of it. The names of other packages with runs in the folder are added to
    /// `others`.
    fn may_hold_runs_of(&self, folder: &Path, others: &mut BTreeSet<CargoPackage>) -> bool {
        let Some(own) = &self.package else { return true };
        let mut may = false;
        for path in json_files_in(folder) {
            match file::package_of_run(&path) {
                Ok(Some(other)) if other != *own => {
                    others.insert(other);
                }
                _ => may = true,
            }
        }
        may
    }

    /// Reads the session whose runs lie in a folder.
    ///
    /// # Errors
    /// Fails if the session has no run, or a run is broken.
    pub fn open_session(&self, folder: &Path) -> Result<Session, StoreError> {
        let mut sessions = self.sessions_in_folders([folder])?;
        sessions.pop().ok_or_else(|| StoreError::NoRun(folder.to_owned()))
    }

    /// Reads the sessions in these folders.
    ///
    /// # Errors
    /// Fails if a folder has no run, a run is broken, or a run appears twice: its copy would count
    /// as another process run.
    pub fn sessions_in_folders<'a>(
        &self,
        folders: impl IntoIterator<Item = &'a Path>,
    ) -> Result<Vec<Session>, StoreError> {
        let mut sessions: Vec<Session> = Vec::new();
        let mut read: BTreeMap<(String, String), PathBuf> = BTreeMap::new();
        for folder in folders {
            let files = json_files_in(folder);
            if files.is_empty() {
                return Err(StoreError::NoRun(folder.to_owned()));
            }
            let mut runs = Vec::new();
            for path in files {
                let run: ProcessRun = file::read(&path)?;
                // Sessions in several checkouts may have equal names.
                let identity = (run.baseline_key(), run.started.clone());
                if let Some(first) = read.insert(identity, path.clone()) {
                    return Err(StoreError::Twice { first, second: path });
                }
                runs.push(run);
            }
            sessions.push(Session { folder: folder.to_owned(), runs });
        }
        Ok(sessions)
    }
}

/// Makes a session's name from its start time and from the process that starts it.
pub fn session_name(started: Timestamp, process: u32) -> String {
    format!("{}-{process}", started.strftime(SESSION_NAME_FORMAT))
}

const SESSION_NAME_FORMAT: &str = "%Y%m%dT%H%M%SZ";

/// Start of a session: from its name, which is cheap, else from its records. Returns the recorded
/// start of a session; `None` if it has no record.
fn start_of_session(folder: &Path) -> Option<Timestamp> {
    let files = json_files_in(folder);
    let by_name = || {
        let name = file_name_text(folder);
        let (time, process) = name.split_once('-')?;
        process.parse::<u32>().ok()?;
        let at = jiff::civil::DateTime::strptime(SESSION_NAME_FORMAT, time).ok()?;
        Some(at.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp())
    };
    let by_record = || {
        files
            .iter()
            .filter_map(|path| file::start_time_of_record(path)?.parse::<Timestamp>().ok())
            .min()
    };
    // An unreadable record also counts, because reading it reports the problem.
    let by_file = || {
        let written = |path: &PathBuf| std::fs::metadata(path).and_then(|it| it.modified()).ok();
        Timestamp::try_from(files.iter().filter_map(written).max()?).ok()
    };
    (!files.is_empty()).then(|| by_name().or_else(by_record).or_else(by_file)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Environment, Provenance, RecordFileError};

    fn write_session_record(store: &BaselineStore, session: &str, started: &str) {
        let run = ProcessRun {
            started: started.to_owned(),
            ..ProcessRun::start_now("b", session, Environment::cpu(), Provenance::default())
        };
        file::write(&store.run_record_path(session, "b"), &run).unwrap();
    }

    #[test]
    fn the_last_session_is_the_one_with_the_latest_recorded_start() {
        let folder = tempfile::tempdir().unwrap();
        let store = BaselineStore::at(folder.path(), folder.path());
        let named = session_name("2026-01-02T03:04:05Z".parse().unwrap(), 77);
        assert_eq!(named, "20260102T030405Z-77");
        write_session_record(&store, "newer", "2026-01-02T03:04:06.250Z");
        write_session_record(&store, "new", "2026-01-02T03:04:06Z");
        // This file is written later than its recorded start, as a restored cache does.
        write_session_record(&store, &named, "2026-01-02T03:04:08Z");
        write_session_record(&store, "old", "2025-01-02T03:04:05Z");
        let last = |count| -> Vec<String> {
            let sessions = store.last_sessions(count).unwrap();
            sessions.into_iter().map(|session| session.runs[0].session.clone()).collect()
        };
        assert_eq!(last(1), ["newer"]);
        assert_eq!(last(4), ["old", &named, "new", "newer"]);
        // A copied file counts as the same process run, whatever its name is.
        for copy in [
            store.run_record_path("newer", "copy"),
            store.run_record_path("20260102T030407Z-1", "b"),
        ] {
            std::fs::create_dir_all(copy.parent().unwrap()).unwrap();
            std::fs::copy(store.run_record_path("newer", "b"), &copy).unwrap();
            let twice = store.last_sessions(5).or_else(|_| store.last_sessions(4)).unwrap_err();
            assert!(matches!(twice, StoreError::Twice { .. }), "{twice:?}");
            std::fs::remove_file(copy).unwrap();
        }
        // Runs of another package that shares the folder do not count.
        let package =
            |name: &str| CargoPackage { name: name.to_owned(), manifest: "Cargo.toml".to_owned() };
        let store_of = |name: &str| BaselineStore { package: Some(package(name)), ..store.clone() };
        let other = ProcessRun {
            package: Some(package("other")),
            started: "2026-01-02T03:04:09Z".to_owned(),
            ..ProcessRun::start_now("b", "other", Environment::cpu(), Provenance::default())
        };
        file::write(&store.run_record_path("other", "b"), &other).unwrap();
        let last_of =
            |name: &str| store_of(name).last_sessions(1).unwrap()[0].runs[0].session.clone();
        assert_eq!(last(1), ["other"]);
        assert_eq!((&*last_of("other"), &*last_of("own")), ("other", "newer"));
        let few = store_of("own").last_sessions(5).unwrap_err();
        assert!(matches!(few, StoreError::FewRuns { found: 4, wanted: 5, .. }), "{few:?}");
        std::fs::remove_dir_all(store.runs.join("other")).unwrap();
        write_session_record(&store, "ahead", "2226-01-02T03:04:05Z");
        match store.last_sessions(1).unwrap_err() {
            StoreError::Future { folder, .. } => assert!(folder.ends_with("ahead")),
            other => panic!("{other:?}"),
        }
        // A session that cannot be read counts as the newest one, and the error names it.
        std::fs::remove_dir_all(store.runs.join("ahead")).unwrap();
        std::fs::write(store.run_record_path("old", "b"), "{").unwrap();
        let broken = store.last_sessions(1).unwrap_err();
        assert!(matches!(broken, StoreError::File(RecordFileError::Json { .. })), "{broken:?}");
    }
}
