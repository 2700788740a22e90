//! Retention: chooses and removes old records of a store.

use std::collections::{BTreeMap, BTreeSet};

use super::HistoryError;
use super::case_index::HistoryIndex;
use super::indexed_run::IndexedRecordFile;
use super::store::{HistoryStore, json_files};

/// Removes the folders of records in which no process run is among the last `keep` of its bench,
/// package and device, by the recorded start; returns how many folders. Files that are not records
/// stay, and so do their folders. With `dry`, the function removes nothing from the store.
pub fn prune_store(store: &HistoryStore, keep: usize, dry: bool) -> Result<usize, HistoryError> {
    let (index, _) = store.index()?;
    let removed = runs_to_prune(&index, keep);
    if dry {
        return Ok(removed.len());
    }
    for folder in &removed {
        let path = store.path_of(folder);
        for record in json_files(&path).iter().filter(|path| IndexedRecordFile::read(path).is_ok())
        {
            std::fs::remove_file(record)
                .map_err(|cause| HistoryError::io("remove", record, cause))?;
        }
        // A folder that contains anything else is not removed.
        let _ = std::fs::remove_dir(&path);
    }
    store.index()?;
    Ok(removed.len())
}

/// The folders with runs, but without one of the last ones.
fn runs_to_prune(index: &HistoryIndex, keep: usize) -> BTreeSet<&str> {
    let mut benches: BTreeMap<_, Vec<(i64, &str)>> = BTreeMap::new();
    let mut all = BTreeSet::new();
    for (folder, indexed) in &index.folders {
        for run in &indexed.runs {
            all.insert(folder.as_str());
            let bench = (&run.package, &run.process, &run.model, &run.card);
            benches.entry(bench).or_default().push((run.started_ms, folder));
        }
    }
    for mut runs in benches.into_values() {
        runs.sort_unstable();
        for (_, folder) in runs.iter().rev().take(keep) {
            all.remove(folder);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::case_index::IndexedFolder;
    use super::super::indexed_run::IndexedRun;
    use super::*;
    use kernelgate::record::Provenance;

    /// An index of runs: folder, package, bench and start.
    fn index_of(runs: &[(&str, Option<&str>, &str, i64)]) -> HistoryIndex {
        let mut index = HistoryIndex::default();
        for (folder, package, bench, started_ms) in runs {
            let empty = IndexedFolder { modified: 1, runs: Vec::new(), skipped: Vec::new() };
            index.folders.entry((*folder).to_owned()).or_insert(empty).runs.push(IndexedRun {
                process: (*bench).to_owned(),
                package: package.map(str::to_owned),
                started_ms: *started_ms,
                model: "model".to_owned(),
                card: "card".to_owned(),
                device: "device".to_owned(),
                provenance: Provenance::default(),
                cases: BTreeMap::new(),
            });
        }
        index
    }

    #[test]
    fn benches_of_two_packages_with_equal_names_are_counted_separately() {
        let index = index_of(&[
            ("runs/old", Some("one"), "b", 1),
            ("runs/other", Some("two"), "b", 2),
            ("runs/new", Some("one"), "b", 3),
        ]);
        assert_eq!(runs_to_prune(&index, 1), ["runs/old"].into());
    }

    #[test]
    fn pruning_keeps_the_last_runs_of_each_bench_and_device() {
        let index = index_of(&[
            ("first", None, "a", 1),
            ("second", None, "a", 2),
            ("third", None, "a", 3),
            ("first", None, "b", 1),
            ("fourth", None, "c", 0),
        ]);
        let folders = |keep| runs_to_prune(&index, keep).into_iter().collect::<Vec<_>>();
        assert_eq!(folders(1), ["second"]);
        assert_eq!(folders(0), ["first", "fourth", "second", "third"]);
        assert_eq!(folders(2), [""; 0]);
    }
}
