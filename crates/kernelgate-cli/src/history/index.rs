//! The index of a store: the times in its records, by case, so that one case of a hundred thousand
//! runs is found at once. The index has no data of its own, and is made anew if it is missing,
//! broken or of another version.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{
    Connection, OptionalExtension, Statement, Transaction, TransactionBehavior, params,
};

use super::HistoryError;
use super::indexed_run::IndexedRun;
use kernelgate::record::Provenance;

/// Version of the tables.
const INDEX_VERSION: i64 = 2;
/// Longest wait of a writer for another one, whose transactions take less than a second.
const SQLITE_WRITE_TIMEOUT: Duration = Duration::from_secs(60);
const CREATE_TABLES: &str = "
    CREATE TABLE folder(
        id INTEGER PRIMARY KEY, part TEXT NOT NULL, name TEXT NOT NULL, modified INTEGER NOT NULL,
        UNIQUE(part, name));
    CREATE TABLE skipped(folder INTEGER NOT NULL, file TEXT NOT NULL, problem TEXT NOT NULL);
    CREATE TABLE run(
        id INTEGER PRIMARY KEY, folder INTEGER NOT NULL, key TEXT NOT NULL, process TEXT NOT NULL,
        started INTEGER NOT NULL, model TEXT NOT NULL, card TEXT NOT NULL, device TEXT NOT NULL,
        hash TEXT, dirty INTEGER NOT NULL, package TEXT);
    CREATE TABLE named(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
    CREATE TABLE point(
        named INTEGER NOT NULL, run INTEGER NOT NULL, revision INTEGER NOT NULL,
        median REAL NOT NULL, PRIMARY KEY(named, run)) WITHOUT ROWID;
    CREATE INDEX run_folder ON run(folder);
    CREATE INDEX point_run ON point(run);
    CREATE INDEX skipped_folder ON skipped(folder);";

/// Name of a folder with records: the part of the store, and the folder's name.
pub type RunFolderName = (String, String);

/// An open index.
pub struct HistoryIndex {
    path: PathBuf,
    connection: Connection,
    kept: bool,
}

/// Whether the error means that the index file cannot be written.
fn is_write_error(error: &rusqlite::Error) -> bool {
    use rusqlite::ErrorCode::{CannotOpen, PermissionDenied, ReadOnly};
    let code = error.sqlite_error_code();
    code.is_some_and(|code| [CannotOpen, PermissionDenied, ReadOnly].contains(&code))
}

/// A time of a case in the index, with its process run.
#[derive(Debug, Clone, PartialEq)]
pub struct IndexedTime {
    /// Id of the case, as the record has it.
    pub case: String,
    /// Revision of the workload's definition.
    pub revision: u32,
    /// Nanoseconds a launch.
    pub median_ns: f64,
    /// `<session>/<process>`.
    pub key: String,
    /// Name of the bench process, with its shard.
    pub process: String,
    /// Name of the package, if the record has one.
    pub package: Option<String>,
    /// Start of the run, milliseconds since 1970.
    pub started_ms: i64,
    /// Equals [`IndexedRun::model`].
    pub model: String,
    /// Equals [`IndexedRun::card`].
    pub card: String,
    /// Equals [`IndexedRun::device`].
    pub device: String,
    /// Code that was measured.
    pub provenance: Provenance,
}

/// A process run in a folder, for retention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexedFolderRun {
    /// Folder that holds the run's record.
    pub folder: RunFolderName,
    /// The group in which runs are counted: the bench of its package on its device.
    pub among: BenchOnDevice,
    /// Start of the run, milliseconds since 1970.
    pub started_ms: i64,
}

/// A bench on a device, whose runs are counted together.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct BenchOnDevice {
    /// The package, if the record has one.
    pub package: Option<String>,
    /// The bench binary, with its shard.
    pub process: String,
    /// Fingerprint that all comparable environments share.
    pub model: String,
    /// Identifier of the card or host among those of the same model.
    pub card: String,
}

impl HistoryIndex {
    /// Opens the history index in an SQLite file. A file that cannot be used is renamed, so that
    /// its name shows the reason, and made anew. Without permission to write, the index is made in
    /// memory.
    pub fn open(path: &Path) -> Result<HistoryIndex, HistoryError> {
        match Self::open_if_usable(path) {
            Ok(Some(index)) => return Ok(index),
            Ok(None) => {}
            Err(error) if is_write_error(&error) && !path.is_dir() => {
                return Self::in_memory(path);
            }
            Err(error) => return Err(Self::problem(path, &error.to_string())),
        }
        let aside = path.with_extension("sqlite.unusable");
        std::fs::rename(path, &aside).map_err(|cause| HistoryError::io("move", path, cause))?;
        let journal = path.with_extension("sqlite-journal");
        let _ = std::fs::remove_file(journal);
        let problem = || Self::problem(path, "it cannot be made");
        let anew = Self::open_if_usable(path);
        anew.map_err(|error| Self::problem(path, &error.to_string()))?.ok_or_else(problem)
    }

    fn in_memory(path: &Path) -> Result<HistoryIndex, HistoryError> {
        let open = || {
            let connection = Connection::open_in_memory()?;
            let index = Self { path: path.to_owned(), connection, kept: false };
            index.prepare()?;
            Ok(index)
        };
        open().map_err(|error: rusqlite::Error| Self::problem(path, &error.to_string()))
    }

    /// Whether the index is in a file, so that no record is read twice.
    pub const fn is_kept(&self) -> bool {
        self.kept
    }

    /// Returns `None` if the file is not an index, or one of another version.
    fn open_if_usable(path: &Path) -> rusqlite::Result<Option<Self>> {
        let connection = Connection::open(path)?;
        let index = Self { path: path.to_owned(), connection, kept: true };
        match index.prepare() {
            Ok(usable) => Ok(usable.then_some(index)),
            Err(rusqlite::Error::SqliteFailure(error, _))
                if [rusqlite::ErrorCode::NotADatabase, rusqlite::ErrorCode::DatabaseCorrupt]
                    .contains(&error.code) =>
            {
                Ok(None)
            }
            Err(cause) => Err(cause),
        }
    }

    fn prepare(&self) -> rusqlite::Result<bool> {
        self.connection.busy_timeout(SQLITE_WRITE_TIMEOUT)?;
        let transaction =
            Transaction::new_unchecked(&self.connection, TransactionBehavior::Immediate)?;
        let version: i64 = transaction.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        let tables: i64 =
            transaction.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
        if tables == 0 {
            transaction.execute_batch(CREATE_TABLES)?;
            transaction.pragma_update(None, "user_version", INDEX_VERSION)?;
            transaction.commit()?;
            return Ok(true);
        }
        // The file may be readable but not writable: a first change, which is rolled back, shows
        // that.
        transaction.pragma_update(None, "user_version", version)?;
        // A database of another program may have the same version number, but not these tables.
        Ok(version == INDEX_VERSION && FolderWriter::new(&transaction).is_ok())
    }

    fn problem(path: &Path, cause: &str) -> HistoryError {
        HistoryError::Index { path: path.to_owned(), cause: cause.to_owned() }
    }

    fn with_index_path<T>(&self, outcome: rusqlite::Result<T>) -> Result<T, HistoryError> {
        outcome.map_err(|cause| Self::problem(&self.path, &cause.to_string()))
    }

    /// Recorded time of the last change of each folder in the index.
    pub fn folders(&self) -> Result<BTreeMap<RunFolderName, i64>, HistoryError> {
        let read = || {
            let mut statement =
                self.connection.prepare("SELECT part, name, modified FROM folder")?;
            let rows = statement.query_map([], |row| {
                Ok(((row.get::<_, String>(0)?, row.get::<_, String>(1)?), row.get(2)?))
            })?;
            rows.collect()
        };
        self.with_index_path(read())
    }

    /// Replaces the index entries of some folders, all or none of them; a folder without a time is
    /// removed.
    pub fn replace(&mut self, folders: &[IndexedFolder]) -> Result<(), HistoryError> {
        let write = |connection: &mut Connection| {
            let transaction =
                connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let mut writer = FolderWriter::new(&transaction)?;
            folders.iter().try_for_each(|folder| writer.replace(folder))?;
            drop(writer);
            transaction.commit()
        };
        let outcome = write(&mut self.connection);
        self.with_index_path(outcome)
    }

    /// Files without data for a history, with the reason.
    pub fn skipped(&self) -> Result<Vec<(RunFolderName, String, String)>, HistoryError> {
        let read = || {
            let mut statement = self.connection.prepare(
                "SELECT part, name, file, problem FROM skipped JOIN folder ON folder = folder.id
                 ORDER BY part, name, file",
            )?;
            let rows = statement
                .query_map([], |row| Ok(((row.get(0)?, row.get(1)?), row.get(2)?, row.get(3)?)))?;
            rows.collect()
        };
        self.with_index_path(read())
    }

    /// Every name that a case has in the records.
    pub fn names(&self) -> Result<Vec<String>, HistoryError> {
        let read = || {
            let mut statement = self.connection.prepare("SELECT name FROM named ORDER BY name")?;
            statement.query_map([], |row| row.get(0))?.collect()
        };
        self.with_index_path(read())
    }

    /// Reads all recorded times of the cases with this name.
    pub fn rows(&self, case: &str) -> Result<Vec<IndexedTime>, HistoryError> {
        let read = || {
            let mut statement = self.connection.prepare(
                "SELECT revision, median, key, process, started, model, card, device, hash, dirty,
                 package FROM point JOIN run ON run = run.id
                 WHERE named = (SELECT id FROM named WHERE name = ?1)",
            )?;
            let rows = statement.query_map([case], |row| {
                Ok(IndexedTime {
                    case: case.to_owned(),
                    revision: row.get(0)?,
                    median_ns: row.get(1)?,
                    key: row.get(2)?,
                    process: row.get(3)?,
                    started_ms: row.get(4)?,
                    model: row.get(5)?,
                    card: row.get(6)?,
                    device: row.get(7)?,
                    provenance: Provenance { commit: row.get(8)?, dirty: row.get(9)? },
                    package: row.get(10)?,
                })
            })?;
            rows.collect()
        };
        self.with_index_path(read())
    }

    /// Number of process runs of each package; those without a recorded package are absent.
    pub fn packages(&self) -> Result<BTreeMap<String, u32>, HistoryError> {
        let read = || {
            let mut statement = self.connection.prepare(
                "SELECT package, count(*) FROM run WHERE package IS NOT NULL GROUP BY package",
            )?;
            statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
        };
        self.with_index_path(read())
    }

    /// Reads every process run with its folder.
    pub fn folder_runs(&self) -> Result<Vec<IndexedFolderRun>, HistoryError> {
        let read = || {
            let mut statement = self.connection.prepare(
                "SELECT part, name, process, model, card, started, package
                 FROM run JOIN folder ON folder = folder.id",
            )?;
            let rows = statement.query_map([], |row| {
                Ok(IndexedFolderRun {
                    folder: (row.get(0)?, row.get(1)?),
                    among: BenchOnDevice {
                        process: row.get(2)?,
                        model: row.get(3)?,
                        card: row.get(4)?,
                        package: row.get(6)?,
                    },
                    started_ms: row.get(5)?,
                })
            })?;
            rows.collect()
        };
        self.with_index_path(read())
    }
}

/// A folder of records, as it was read.
pub struct IndexedFolder {
    /// Name of the folder.
    pub folder: RunFolderName,
    /// Time of the last change, nanoseconds since 1970; `None` if the folder was removed.
    pub modified: Option<i64>,
    /// Process runs in the files of the folder.
    pub runs: Vec<IndexedRun>,
    /// Files that hold no run, with the reason.
    pub skipped: Vec<(String, String)>,
}

/// The prepared statements that write a folder.
struct FolderWriter<'t> {
    transaction: &'t Transaction<'t>,
    find: Statement<'t>,
    remove: [Statement<'t>; 4],
    folder: Statement<'t>,
    skipped: Statement<'t>,
    run: Statement<'t>,
    name: Statement<'t>,
    point: Statement<'t>,
}

impl<'t> FolderWriter<'t> {
    fn new(transaction: &'t Transaction<'t>) -> rusqlite::Result<Self> {
        let prepare = |text| transaction.prepare(text);
        Ok(Self {
            transaction,
            find: prepare("SELECT id FROM folder WHERE part = ?1 AND name = ?2")?,
            remove: [
                prepare("DELETE FROM point WHERE run IN (SELECT id FROM run WHERE folder = ?1)")?,
                prepare("DELETE FROM run WHERE folder = ?1")?,
                prepare("DELETE FROM skipped WHERE folder = ?1")?,
                prepare("DELETE FROM folder WHERE id = ?1")?,
            ],
            folder: prepare("INSERT INTO folder(part, name, modified) VALUES (?1, ?2, ?3)")?,
            skipped: prepare("INSERT INTO skipped VALUES (?1, ?2, ?3)")?,
            run: prepare("INSERT INTO run VALUES (NULL, ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)")?,
            name: prepare("INSERT OR IGNORE INTO named(name) VALUES (?1)")?,
            point: prepare("INSERT INTO point SELECT id, ?2, ?3, ?4 FROM named WHERE name = ?1")?,
        })
    }

    fn replace(&mut self, indexed: &IndexedFolder) -> rusqlite::Result<()> {
        let (part, name) = &indexed.folder;
        let existing: Option<i64> =
            self.find.query_row([part, name], |row| row.get(0)).optional()?;
        if let Some(id) = existing {
            self.remove.iter_mut().try_for_each(|remove| remove.execute([id]).map(drop))?;
        }
        let Some(modified) = indexed.modified else { return Ok(()) };
        self.folder.execute(params![part, name, modified])?;
        let folder = self.transaction.last_insert_rowid();
        for (file, problem) in &indexed.skipped {
            self.skipped.execute(params![folder, file, problem])?;
        }
        for indexed_run in &indexed.runs {
            let IndexedRun { key, process, package, started_ms, .. } = indexed_run;
            let IndexedRun { model, card, device, provenance, cases, .. } = indexed_run;
            let Provenance { commit, dirty } = provenance;
            self.run.execute(params![
                folder, key, process, started_ms, model, card, device, commit, dirty, package
            ])?;
            let run = self.transaction.last_insert_rowid();
            for (case, (revision, of)) in cases {
                self.name.execute([case])?;
                self.point.execute(params![case, run, revision, of.median_ns])?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rusqlite::OpenFlags;

    use super::*;

    #[test]
    fn an_index_that_may_be_read_only_is_known_before_anything_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("history.sqlite");
        assert!(HistoryIndex::open(&path).unwrap().is_kept());
        let connection = Connection::open_with_flags(&path, OpenFlags::SQLITE_OPEN_READ_ONLY);
        let index = HistoryIndex { path, connection: connection.unwrap(), kept: true };
        assert!(is_write_error(&index.prepare().unwrap_err()));
    }
}
