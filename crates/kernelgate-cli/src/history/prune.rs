//! Removes old run records from a history store.

use std::collections::{BTreeMap, BTreeSet};

use super::CaseHistoryError;
use super::case_index::HistoryStoreIndex;
use super::indexed_run::RunOrBaselineFile;
use super::store::{HistoryRecordStore, json_files_in_folder};

/// Removes the record folders that contain none of the last `keep` process runs of any bench,
/// package and device, by start time, and returns their number. Files that are not records are
/// never removed, and neither are their folders. With `dry`, the function only counts the folders
/// and removes nothing.
pub fn prune_old_record_folders(
    store: &HistoryRecordStore,
    keep: usize,
    dry: bool,
) -> Result<usize, CaseHistoryError> {
    let (index, _) = store.update_and_return_index()?;
    let removed = folders_without_recent_runs(&index, keep);
    if dry {
        return Ok(removed.len());
    }
    for folder in &removed {
        let path = store.path_of_indexed_folder(folder);
        for record in json_files_in_folder(&path)
            .iter()
            .filter(|path| RunOrBaselineFile::read_run_or_baseline(path).is_ok())
        {
            std::fs::remove_file(record)
                .map_err(|cause| CaseHistoryError::file_error("remove", record, cause))?;
        }
        // A folder that still contains other files is not removed.
        let _ = std::fs::remove_dir(&path);
    }
    store.update_and_return_index()?;
    Ok(removed.len())
}

/// Returns the folders that contain runs, but none of the last `keep` runs of any bench, package
/// and device.
fn folders_without_recent_runs(index: &HistoryStoreIndex, keep: usize) -> BTreeSet<&str> {
    let mut benches: BTreeMap<_, Vec<(i64, &str)>> = BTreeMap::new();
    let mut all = BTreeSet::new();
    for (folder, indexed) in &index.folders {
        for run in &indexed.runs {
            all.insert(folder.as_str());
            let bench = (
                &run.package_name,
                &run.bench_and_shard_name,
                &run.environment_fingerprint,
                &run.card_or_host_id,
            );
            benches.entry(bench).or_default().push((run.process_start_unix_ms, folder));
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
    use super::super::case_index::IndexedRecordFolder;
    use super::super::indexed_run::ProcessRunInIndex;
    use super::*;
    use kernelgate::record::CommitAndChanges;

    /// Makes a test index from runs, each given as folder, package, bench and start time.
    fn test_index_of_runs(runs: &[(&str, Option<&str>, &str, i64)]) -> HistoryStoreIndex {
        let mut index = HistoryStoreIndex::default();
        for (folder, package, bench, started_ms) in runs {
            let empty = IndexedRecordFolder {
                folder_modified_ns: 1,
                runs: Vec::new(),
                files_without_run: Vec::new(),
            };
            index.folders.entry((*folder).to_owned()).or_insert(empty).runs.push(
                ProcessRunInIndex {
                    bench_and_shard_name: (*bench).to_owned(),
                    package_name: package.map(str::to_owned),
                    process_start_unix_ms: *started_ms,
                    environment_fingerprint: "model".to_owned(),
                    card_or_host_id: "card".to_owned(),
                    device: "device".to_owned(),
                    provenance: CommitAndChanges::default(),
                    revision_and_median_ns_by_case: BTreeMap::new(),
                },
            );
        }
        index
    }

    #[test]
    fn equally_named_benches_of_two_packages_are_counted_separately() {
        let index = test_index_of_runs(&[
            ("runs/old", Some("one"), "b", 1),
            ("runs/other", Some("two"), "b", 2),
            ("runs/new", Some("one"), "b", 3),
        ]);
        assert_eq!(folders_without_recent_runs(&index, 1), ["runs/old"].into());
    }

    #[test]
    fn pruning_keeps_the_last_runs_of_each_bench_and_device() {
        let index = test_index_of_runs(&[
            ("first", None, "a", 1),
            ("second", None, "a", 2),
            ("third", None, "a", 3),
            ("first", None, "b", 1),
            ("fourth", None, "c", 0),
        ]);
        let folders =
            |keep| folders_without_recent_runs(&index, keep).into_iter().collect::<Vec<_>>();
        assert_eq!(folders(1), ["second"]);
        assert_eq!(folders(0), ["first", "fourth", "second", "third"]);
        assert_eq!(folders(2), [""; 0]);
    }
}
