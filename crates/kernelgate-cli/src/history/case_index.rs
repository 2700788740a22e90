//! The index file of a history store: it holds the median times of all records, so that no record
//! file is read twice. The index contains nothing that the records do not contain; it is rebuilt if
//! it is missing, broken or of another version.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::indexed_run::ProcessRunInIndex;
use kernelgate::record::file;

/// Format version of the history store's index file.
const HISTORY_INDEX_VERSION: u32 = 1;
/// Largest index file of a history store that is read, bytes.
const MAX_HISTORY_INDEX_BYTES: u64 = 4 << 30;

/// The process runs of a history store, by the folder that holds their record files.
#[derive(Debug, Serialize, Deserialize)]
pub struct HistoryStoreIndex {
    #[serde(rename = "version")]
    index_format_version: u32,
    /// Folders of run records by name: "runs/2026-01-01".
    pub folders: BTreeMap<String, IndexedRecordFolder>,
}

/// The runs in one folder of records, as they were when the folder was indexed.
#[derive(Debug, Serialize, Deserialize)]
pub struct IndexedRecordFolder {
    /// Modification time of the folder when it was indexed, nanoseconds since 1970.
    #[serde(rename = "modified")]
    pub folder_modified_ns: i64,
    /// The process runs in the record files of the folder.
    pub runs: Vec<ProcessRunInIndex>,
    /// Names of files in the folder that hold no run, each with the reason.
    #[serde(rename = "skipped")]
    pub files_without_run: Vec<(String, String)>,
}

impl Default for HistoryStoreIndex {
    fn default() -> Self {
        Self { index_format_version: HISTORY_INDEX_VERSION, folders: BTreeMap::new() }
    }
}

impl HistoryStoreIndex {
    /// Reads the index file of a history store; `None` if the file is missing, broken or of another
    /// version.
    pub fn read_index_file(path: &Path) -> Option<HistoryStoreIndex> {
        let text = file::read_untrusted_text_up_to(path, MAX_HISTORY_INDEX_BYTES).ok()?;
        let index: Self = serde_json::from_str(&text).ok()?;
        (index.index_format_version == HISTORY_INDEX_VERSION).then_some(index)
    }

    /// Writes the index file of a history store; returns whether the file could be written.
    pub fn write_index_file(&self, path: &Path) -> bool {
        let text = serde_json::to_string(self);
        text.is_ok_and(|text| file::write_text_atomically(path, &text).is_ok())
    }

    /// Returns all indexed process runs, in the order of their folders.
    pub fn all_indexed_runs(&self) -> impl Iterator<Item = &ProcessRunInIndex> {
        self.folders.values().flat_map(|folder| &folder.runs)
    }

    /// Returns the number of process runs of each package; runs without a recorded package are not
    /// counted.
    pub fn run_count_by_package(&self) -> BTreeMap<String, usize> {
        let mut packages = BTreeMap::new();
        for package in self.all_indexed_runs().filter_map(|run| run.package_name.clone()) {
            *packages.entry(package).or_default() += 1;
        }
        packages
    }
}
