//! The index of a store: the times in its records, so that no record is read twice. The index has
//! no data of its own, and is made anew if it is missing, broken or of another version.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::indexed_run::IndexedRun;
use kernelgate::record::file;

/// Version of the index file.
const INDEX_VERSION: u32 = 1;
/// Largest index file that is read.
const MAX_INDEX_BYTES: u64 = 4 << 30;

/// The process runs of a store, by the folder that holds their records.
#[derive(Debug, Serialize, Deserialize)]
pub struct HistoryIndex {
    version: u32,
    /// Folders by name: "runs/2026-01-01".
    pub folders: BTreeMap<String, IndexedFolder>,
}

/// A folder of records as it was when it was indexed.
#[derive(Debug, Serialize, Deserialize)]
pub struct IndexedFolder {
    /// Time of the last change, nanoseconds since 1970.
    pub modified: i64,
    /// Process runs in the files of the folder.
    pub runs: Vec<IndexedRun>,
    /// Files that hold no run, with the reason.
    pub skipped: Vec<(String, String)>,
}

impl Default for HistoryIndex {
    fn default() -> Self {
        Self { version: INDEX_VERSION, folders: BTreeMap::new() }
    }
}

impl HistoryIndex {
    /// Reads an index file; `None` if the file is missing, broken or of another version.
    pub fn read(path: &Path) -> Option<HistoryIndex> {
        let text = file::read_untrusted_text(path, MAX_INDEX_BYTES).ok()?;
        let index: Self = serde_json::from_str(&text).ok()?;
        (index.version == INDEX_VERSION).then_some(index)
    }

    /// Writes the index; returns whether the file can be written.
    pub fn write(&self, path: &Path) -> bool {
        let text = serde_json::to_string(self);
        text.is_ok_and(|text| file::write_text(path, &text).is_ok())
    }

    /// All process runs, in the order of their folders.
    pub fn runs(&self) -> impl Iterator<Item = &IndexedRun> {
        self.folders.values().flat_map(|folder| &folder.runs)
    }

    /// Number of process runs of each package; those without a recorded package are absent.
    pub fn packages(&self) -> BTreeMap<String, usize> {
        let mut packages = BTreeMap::new();
        for package in self.runs().filter_map(|run| run.package.clone()) {
            *packages.entry(package).or_default() += 1;
        }
        packages
    }
}
