//! The folders of a history store, and the update of its index file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::CaseHistoryError;
use super::case_index::{HistoryStoreIndex, IndexedRecordFolder};
use super::indexed_run::{
    RunOrBaselineFile, index_entries_of_baseline, index_entries_of_measurement,
};
use kernelgate::record::MeasurementOfRuns;

/// Name of the subfolder of a history store to which bench processes write their run records.
pub(super) const RUNS_FOLDER_NAME: &str = "runs";
/// Name of the subfolder of a history store for imported records; an imported run never counts as
/// the last run of this machine.
pub(super) const IMPORTED_FOLDER_NAME: &str = "imported";
const INDEX_FILE_NAME: &str = "history.index";
/// A folder that was modified less than this time ago may change again without a new modification
/// time, so it is read again at the next use.
const FOLDER_TIME_RESOLUTION: Duration = Duration::from_secs(2);

/// A history store: folders of run records with an index file.
#[derive(Debug, Clone)]
pub struct HistoryRecordStore {
    /// Root folder of the history store.
    store_folder: PathBuf,
    /// Folder to which bench processes write their run records: the folder [`RUNS_FOLDER_NAME`] in
    /// the store's root, unless another folder is set.
    runs_folder: PathBuf,
}

/// A file in a history store or an import that contains no process run, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct FileWithoutRun {
    /// Path of the file that contains no run.
    #[serde(rename = "path")]
    pub ignored_file: PathBuf,
    /// The reason.
    #[serde(rename = "problem")]
    pub why_no_run: String,
}

impl HistoryRecordStore {
    /// Makes a history store whose root is the given folder.
    pub fn in_folder(root: &Path) -> HistoryRecordStore {
        Self { store_folder: root.to_owned(), runs_folder: root.join(RUNS_FOLDER_NAME) }
    }

    /// Makes the history store whose run records lie in this folder; the store's root is the
    /// folder's parent.
    pub fn with_runs_folder(runs: &Path) -> HistoryRecordStore {
        let root = runs.parent().unwrap_or(Path::new("")).to_owned();
        Self { store_folder: root, runs_folder: runs.to_owned() }
    }

    /// Returns whether a folder has the subfolders of a history store.
    pub fn is_history_store_folder(root: &Path) -> bool {
        [RUNS_FOLDER_NAME, IMPORTED_FOLDER_NAME].iter().any(|part| root.join(part).is_dir())
    }

    /// Root folder of the history store.
    pub fn root_folder(&self) -> &Path {
        &self.store_folder
    }

    /// Returns the folder of a history store that holds imported records.
    pub fn imported_records_folder(&self) -> PathBuf {
        self.store_folder.join(IMPORTED_FOLDER_NAME)
    }

    /// Returns the path of a folder of records, from its name in the index such as
    /// "runs/2026-01-01".
    pub(super) fn path_of_indexed_folder(&self, folder: &str) -> PathBuf {
        match folder.split_once('/') {
            Some((RUNS_FOLDER_NAME, name)) => self.runs_folder.join(name),
            _ => self.store_folder.join(folder),
        }
    }

    /// Updates the index of the history store by reading all folders that are new, changed or
    /// removed since the last use, and returns the index. The second returned value states whether
    /// the index file is up to date or could be written.
    pub fn update_and_return_index(&self) -> Result<(HistoryStoreIndex, bool), CaseHistoryError> {
        std::fs::create_dir_all(&self.store_folder)
            .map_err(|cause| CaseHistoryError::file_error("make", &self.store_folder, cause))?;
        let path = self.store_folder.join(INDEX_FILE_NAME);
        let mut index = HistoryStoreIndex::read_index_file(&path).unwrap_or_default();
        let there = self.record_folders_on_disk()?;
        let indexed = index.folders.len();
        index.folders.retain(|folder, _| there.contains_key(folder));
        let mut changed = index.folders.len() < indexed || indexed == 0;
        for (folder, modified) in there {
            let before = index.folders.get(&folder).map(|indexed| indexed.folder_modified_ns);
            if before != Some(modified) || modified == TIME_OF_RECENTLY_MODIFIED_FOLDER {
                let read = self.index_folder_of_records(&folder, modified);
                index.folders.insert(folder, read);
                changed = true;
            }
        }
        let kept = !changed || index.write_index_file(&path);
        Ok((index, kept))
    }

    /// Returns the files of the history store that contain no run, each with the reason.
    pub fn files_without_runs(&self, index: &HistoryStoreIndex) -> Vec<FileWithoutRun> {
        let each = index.folders.iter().flat_map(|(folder, indexed)| {
            let path = self.path_of_indexed_folder(folder);
            indexed.files_without_run.iter().map(move |(file, problem)| FileWithoutRun {
                ignored_file: path.join(file),
                why_no_run: problem.clone(),
            })
        });
        each.collect()
    }

    /// Lists the folders of records on disk, each with its modification time in nanoseconds since
    /// 1970.
    fn record_folders_on_disk(&self) -> Result<BTreeMap<String, i64>, CaseHistoryError> {
        let mut found = BTreeMap::new();
        for (part, path) in [
            (RUNS_FOLDER_NAME, self.runs_folder.clone()),
            (IMPORTED_FOLDER_NAME, self.imported_records_folder()),
        ] {
            let entries = match std::fs::read_dir(&path) {
                Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => continue,
                entries => {
                    entries.map_err(|cause| CaseHistoryError::file_error("read", &path, cause))?
                }
            };
            for entry in entries {
                let entry =
                    entry.map_err(|cause| CaseHistoryError::file_error("read", &path, cause))?;
                // An entry is skipped if another process has removed it since the folder was
                // listed. An entry with a name that is not valid Unicode is skipped, because
                // kernelgate makes no such names.
                let Ok(facts) = entry.metadata() else { continue };
                let (true, Ok(name)) = (facts.is_dir(), entry.file_name().into_string()) else {
                    continue;
                };
                found.insert(
                    format!("{part}/{name}"),
                    modification_time_unless_recent(facts.modified().ok()),
                );
            }
        }
        Ok(found)
    }

    fn index_folder_of_records(&self, folder: &str, modified: i64) -> IndexedRecordFolder {
        let mut indexed = IndexedRecordFolder {
            folder_modified_ns: modified,
            runs: Vec::new(),
            files_without_run: Vec::new(),
        };
        let mut recorded = Vec::new();
        for file in json_files_in_folder(&self.path_of_indexed_folder(folder)) {
            match RunOrBaselineFile::read_run_or_baseline(&file) {
                Ok(RunOrBaselineFile::Run(run)) => recorded.push(*run),
                Ok(RunOrBaselineFile::Baseline(baseline)) => {
                    indexed.runs.extend(index_entries_of_baseline(&baseline));
                }
                Err(problem) => {
                    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    indexed.files_without_run.push((name, problem));
                }
            }
        }
        let measurements = MeasurementOfRuns::group_matching_runs_into_measurements(recorded);
        indexed.runs.extend(measurements.iter().flat_map(index_entries_of_measurement));
        indexed
    }
}

/// Stands for the modification time of a folder that was modified so recently that its next change
/// may not change the time.
const TIME_OF_RECENTLY_MODIFIED_FOLDER: i64 = 0;

fn modification_time_unless_recent(modified: Option<SystemTime>) -> i64 {
    let Some(modified) = modified else { return TIME_OF_RECENTLY_MODIFIED_FOLDER };
    match (modified.elapsed(), modified.duration_since(UNIX_EPOCH)) {
        (Ok(ago), Ok(since)) if ago > FOLDER_TIME_RESOLUTION => {
            i64::try_from(since.as_nanos()).unwrap_or(0)
        }
        // The folder was modified just now, or its time lies in the future because the clock went
        // backwards.
        _ => TIME_OF_RECENTLY_MODIFIED_FOLDER,
    }
}

/// Lists the regular `.json` files in a folder, sorted; these may be records.
pub(super) fn json_files_in_folder(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        // Only regular files are listed, because opening a FIFO would wait for its writer.
        .filter(|path| path.is_file())
        .collect();
    files.sort();
    files
}
