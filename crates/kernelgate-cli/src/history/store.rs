//! The folders of a history's records, and the update of its index.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::HistoryError;
use super::case_index::{HistoryIndex, IndexedFolder};
use super::indexed_run::{IndexedRecordFile, index_baseline, index_measurement};
use kernelgate::record::Measurement;

/// Name of the folder with records of bench processes.
pub(super) const RUNS_FOLDER: &str = "runs";
/// Folder of imported records, which never count as this machine's last run.
pub(super) const IMPORTED_FOLDER: &str = "imported";
const INDEX_FILE: &str = "history.index";
/// A folder that was changed less than this ago may change again within one tick of its file
/// system's clock: it is read again the next time.
const FILE_CLOCK_TICK: Duration = Duration::from_secs(2);

/// A folder of records with its index.
#[derive(Debug, Clone)]
pub struct HistoryStore {
    /// Root folder of the history store.
    root: PathBuf,
    /// Folder to which bench processes write their records: Path of [`RUNS_FOLDER`] in the store's
    /// folder, unless it is set otherwise.
    runs: PathBuf,
}

/// A file of the store that contains no run.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct SkippedRecordFile {
    /// The file.
    pub path: PathBuf,
    /// The reason.
    pub problem: String,
}

impl HistoryStore {
    /// Opens the history store in a folder.
    pub fn at(root: &Path) -> HistoryStore {
        Self { root: root.to_owned(), runs: root.join(RUNS_FOLDER) }
    }

    /// The store around the folder to which bench processes write their runs.
    pub fn around_run_folder(runs: &Path) -> HistoryStore {
        let root = runs.parent().unwrap_or(Path::new("")).to_owned();
        Self { root, runs: runs.to_owned() }
    }

    /// Returns whether a folder looks like a history store.
    pub fn is_store(root: &Path) -> bool {
        [RUNS_FOLDER, IMPORTED_FOLDER].iter().any(|part| root.join(part).is_dir())
    }

    /// Root folder of the history store.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Folder of imported records.
    pub fn imported(&self) -> PathBuf {
        self.root.join(IMPORTED_FOLDER)
    }

    /// Path of a folder that holds records, by its name in the index.
    pub(super) fn path_of(&self, folder: &str) -> PathBuf {
        match folder.split_once('/') {
            Some((RUNS_FOLDER, name)) => self.runs.join(name),
            _ => self.root.join(folder),
        }
    }

    /// The index, up to date: folders that are new, changed or removed since it was last used are
    /// read again. Also returns whether the index is stored in a file.
    pub fn index(&self) -> Result<(HistoryIndex, bool), HistoryError> {
        std::fs::create_dir_all(&self.root)
            .map_err(|cause| HistoryError::io("make", &self.root, cause))?;
        let path = self.root.join(INDEX_FILE);
        let mut index = HistoryIndex::read(&path).unwrap_or_default();
        let there = self.folders()?;
        let indexed = index.folders.len();
        index.folders.retain(|folder, _| there.contains_key(folder));
        let mut changed = index.folders.len() < indexed || indexed == 0;
        for (folder, modified) in there {
            let before = index.folders.get(&folder).map(|indexed| indexed.modified);
            if before != Some(modified) || modified == UNSETTLED_FOLDER_TIME {
                let read = self.read(&folder, modified);
                index.folders.insert(folder, read);
                changed = true;
            }
        }
        let kept = !changed || index.write(&path);
        Ok((index, kept))
    }

    /// Files of the store that contain no run.
    pub fn skipped(&self, index: &HistoryIndex) -> Vec<SkippedRecordFile> {
        let each = index.folders.iter().flat_map(|(folder, indexed)| {
            let path = self.path_of(folder);
            indexed.skipped.iter().map(move |(file, problem)| SkippedRecordFile {
                path: path.join(file),
                problem: problem.clone(),
            })
        });
        each.collect()
    }

    /// The folders on disk, with the time of their last change.
    fn folders(&self) -> Result<BTreeMap<String, i64>, HistoryError> {
        let mut found = BTreeMap::new();
        for (part, path) in [(RUNS_FOLDER, self.runs.clone()), (IMPORTED_FOLDER, self.imported())] {
            let entries = match std::fs::read_dir(&path) {
                Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => continue,
                entries => entries.map_err(|cause| HistoryError::io("read", &path, cause))?,
            };
            for entry in entries {
                let entry = entry.map_err(|cause| HistoryError::io("read", &path, cause))?;
                // Another process may have removed the file since the folder was read. All names
                // that the program makes are valid text.
                let Ok(facts) = entry.metadata() else { continue };
                let (true, Ok(name)) = (facts.is_dir(), entry.file_name().into_string()) else {
                    continue;
                };
                found.insert(format!("{part}/{name}"), settled_time(facts.modified().ok()));
            }
        }
        Ok(found)
    }

    fn read(&self, folder: &str, modified: i64) -> IndexedFolder {
        let mut indexed = IndexedFolder { modified, runs: Vec::new(), skipped: Vec::new() };
        let mut recorded = Vec::new();
        for file in json_files(&self.path_of(folder)) {
            match IndexedRecordFile::read(&file) {
                Ok(IndexedRecordFile::Run(run)) => recorded.push(*run),
                Ok(IndexedRecordFile::Baseline(baseline)) => {
                    indexed.runs.extend(index_baseline(&baseline));
                }
                Err(problem) => {
                    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    indexed.skipped.push((name, problem));
                }
            }
        }
        let measurements = Measurement::group_into_measurements(recorded);
        indexed.runs.extend(measurements.iter().flat_map(index_measurement));
        indexed
    }
}

/// Time that marks a folder whose next change may not show in its time.
const UNSETTLED_FOLDER_TIME: i64 = 0;

fn settled_time(modified: Option<SystemTime>) -> i64 {
    let Some(modified) = modified else { return UNSETTLED_FOLDER_TIME };
    match (modified.elapsed(), modified.duration_since(UNIX_EPOCH)) {
        (Ok(ago), Ok(since)) if ago > FILE_CLOCK_TICK => {
            i64::try_from(since.as_nanos()).unwrap_or(0)
        }
        // Changed just now, or in the future because the clock went backwards.
        _ => UNSETTLED_FOLDER_TIME,
    }
}

/// The files of a folder that may be records, sorted.
pub(super) fn json_files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        // Only regular files are opened, because opening a pipe would wait for its writer.
        .filter(|path| path.is_file())
        .collect();
    files.sort();
    files
}
