//! Sessions: the process runs of one invocation, on disk a folder.
//!
//! Sessions are ordered by their recorded starts. File times are not used, because a restored cache
//! or a wrong clock changes them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;

use super::store::{Store, StoreError, entries, file_name, json_files};
use crate::record::files::file;
use crate::record::origin::package::Package;
use crate::record::run::ProcessRun;

/// Clocks of machines that share a folder differ by less.
const CLOCKS_DIFFER: Duration = Duration::from_secs(300);

/// The process runs of one invocation.
#[derive(Debug, Clone, PartialEq)]
pub struct Session {
    /// Folder of the session.
    pub folder: PathBuf,
    /// One run a bench process, at least one.
    pub runs: Vec<ProcessRun>,
}

impl Store {
    /// The last `count` sessions with runs of this package, oldest first; sessions of every package
    /// if this store has no package. A session may hold runs of other packages too.
    ///
    /// # Errors
    /// When there are fewer sessions, a run is invalid, or the last session starts in the future.
    pub fn last_sessions(&self, count: usize) -> Result<Vec<Session>, StoreError> {
        let mut sessions: Vec<(Timestamp, PathBuf)> = entries(&self.runs)
            .into_iter()
            .filter_map(|folder| Some((session_start(&folder)?, folder)))
            .collect();
        sessions.sort();
        let (mut last, mut others) = (Vec::new(), BTreeSet::new());
        for (started, folder) in sessions.into_iter().rev() {
            if !self.may_have_runs(&folder, &mut others) {
                continue;
            }
            if last.is_empty() && started > Timestamp::now() + CLOCKS_DIFFER {
                return Err(StoreError::Future { folder, started });
            }
            last.push(folder);
            if last.len() == count {
                return self.sessions(last.iter().rev().map(PathBuf::as_path));
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

    /// Whether a session's folder may hold runs of this package: a file that cannot be read may be
    /// one. Other packages that it holds runs of go into `others`.
    fn may_have_runs(&self, folder: &Path, others: &mut BTreeSet<Package>) -> bool {
        let Some(own) = &self.package else { return true };
        let mut may = false;
        for path in json_files(folder) {
            match file::package(&path) {
                Ok(Some(other)) if other != *own => {
                    others.insert(other);
                }
                _ => may = true,
            }
        }
        may
    }

    /// The session in a folder.
    ///
    /// # Errors
    /// When it has no run, or a run is broken.
    pub fn session(&self, folder: &Path) -> Result<Session, StoreError> {
        let mut sessions = self.sessions([folder])?;
        sessions.pop().ok_or_else(|| StoreError::NoRun(folder.to_owned()))
    }

    /// The sessions in these folders.
    ///
    /// # Errors
    /// When a folder has no run, a run is broken, or a run appears twice: its copy would count as
    /// another process run.
    pub fn sessions<'a>(
        &self,
        folders: impl IntoIterator<Item = &'a Path>,
    ) -> Result<Vec<Session>, StoreError> {
        let mut sessions: Vec<Session> = Vec::new();
        let mut read: BTreeMap<(String, String), PathBuf> = BTreeMap::new();
        for folder in folders {
            let files = json_files(folder);
            if files.is_empty() {
                return Err(StoreError::NoRun(folder.to_owned()));
            }
            let mut runs = Vec::new();
            for path in files {
                let run: ProcessRun = file::read(&path)?;
                // Sessions may be given the same name in several checkouts.
                let identity = (run.key(), run.started.clone());
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

/// The name of a session that starts at a time, by the process that starts it.
pub fn session_name(started: Timestamp, process: u32) -> String {
    format!("{}-{process}", started.strftime(SESSION_NAME_FORMAT))
}

const SESSION_NAME_FORMAT: &str = "%Y%m%dT%H%M%SZ";

/// Start of a session: from its name, which is cheap, else from its records. `None` if it has no
/// record.
fn session_start(folder: &Path) -> Option<Timestamp> {
    let files = json_files(folder);
    let by_name = || {
        let name = file_name(folder);
        let (time, process) = name.split_once('-')?;
        process.parse::<u32>().ok()?;
        let at = jiff::civil::DateTime::strptime(SESSION_NAME_FORMAT, time).ok()?;
        Some(at.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp())
    };
    let by_record =
        || files.iter().filter_map(|path| file::started(path)?.parse::<Timestamp>().ok()).min();
    // An unreadable record is found too, because reading it reports the problem.
    let by_file = || {
        let written = |path: &PathBuf| std::fs::metadata(path).and_then(|it| it.modified()).ok();
        Timestamp::try_from(files.iter().filter_map(written).max()?).ok()
    };
    (!files.is_empty()).then(|| by_name().or_else(by_record).or_else(by_file)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Environment, FileError, Provenance};

    fn record(store: &Store, session: &str, started: &str) {
        let run = ProcessRun {
            started: started.to_owned(),
            ..ProcessRun::start("b", session, Environment::cpu(), Provenance::default())
        };
        file::write(&store.run_path(session, "b"), &run).unwrap();
    }

    #[test]
    fn the_last_session_is_the_one_that_started_last_whenever_its_file_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::at(folder.path(), folder.path());
        let named = session_name("2026-01-02T03:04:05Z".parse().unwrap(), 77);
        assert_eq!(named, "20260102T030405Z-77");
        record(&store, "newer", "2026-01-02T03:04:06.250Z");
        record(&store, "new", "2026-01-02T03:04:06Z");
        // Written later, as by a cache that is restored.
        record(&store, &named, "2026-01-02T03:04:08Z");
        record(&store, "old", "2025-01-02T03:04:05Z");
        let last = |count| -> Vec<String> {
            let sessions = store.last_sessions(count).unwrap();
            sessions.into_iter().map(|session| session.runs[0].session.clone()).collect()
        };
        assert_eq!(last(1), ["newer"]);
        assert_eq!(last(4), ["old", &named, "new", "newer"]);
        // A copy counts as the same process run, whatever its file name.
        for copy in [store.run_path("newer", "copy"), store.run_path("20260102T030407Z-1", "b")] {
            std::fs::create_dir_all(copy.parent().unwrap()).unwrap();
            std::fs::copy(store.run_path("newer", "b"), &copy).unwrap();
            let twice = store.last_sessions(5).or_else(|_| store.last_sessions(4)).unwrap_err();
            assert!(matches!(twice, StoreError::Twice { .. }), "{twice:?}");
            std::fs::remove_file(copy).unwrap();
        }
        // Runs of another package that shares the folder do not count.
        let package =
            |name: &str| Package { name: name.to_owned(), manifest: "Cargo.toml".to_owned() };
        let store_of = |name: &str| Store { package: Some(package(name)), ..store.clone() };
        let other = ProcessRun {
            package: Some(package("other")),
            started: "2026-01-02T03:04:09Z".to_owned(),
            ..ProcessRun::start("b", "other", Environment::cpu(), Provenance::default())
        };
        file::write(&store.run_path("other", "b"), &other).unwrap();
        let last_of =
            |name: &str| store_of(name).last_sessions(1).unwrap()[0].runs[0].session.clone();
        assert_eq!(last(1), ["other"]);
        assert_eq!((&*last_of("other"), &*last_of("own")), ("other", "newer"));
        let few = store_of("own").last_sessions(5).unwrap_err();
        assert!(matches!(few, StoreError::FewRuns { found: 4, wanted: 5, .. }), "{few:?}");
        std::fs::remove_dir_all(store.runs.join("other")).unwrap();
        record(&store, "ahead", "2226-01-02T03:04:05Z");
        match store.last_sessions(1).unwrap_err() {
            StoreError::Future { folder, .. } => assert!(folder.ends_with("ahead")),
            other => panic!("{other:?}"),
        }
        // An unreadable session counts as the last one written, and the error names it.
        std::fs::remove_dir_all(store.runs.join("ahead")).unwrap();
        std::fs::write(store.run_path("old", "b"), "{").unwrap();
        let broken = store.last_sessions(1).unwrap_err();
        assert!(matches!(broken, StoreError::File(FileError::Json { .. })), "{broken:?}");
    }
}
