//! Retention: chooses and removes old records of a store.

use std::collections::{BTreeMap, BTreeSet};

use super::HistoryError;
use super::index::{IndexedFolderRun, RunFolderName};
use super::indexed_run::IndexedRecordFile;
use super::store::{HistoryStore, json_files};

/// Removes the folders of records in which no process run is among the last `keep` of its bench,
/// package and device, by the recorded start; returns how many folders. Files that are not records
/// stay, and so do their folders. With `dry`, nothing is removed from the store.
pub fn prune_store(store: &HistoryStore, keep: usize, dry: bool) -> Result<usize, HistoryError> {
    let removed = runs_to_prune(store.index()?.folder_runs()?, keep);
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
        // A folder that holds something else stays.
        let _ = std::fs::remove_dir(&path);
    }
    store.index()?;
    Ok(removed.len())
}

/// The folders without a run among the last ones.
fn runs_to_prune(runs: Vec<IndexedFolderRun>, keep: usize) -> BTreeSet<RunFolderName> {
    let mut among: BTreeMap<_, Vec<(i64, RunFolderName)>> = BTreeMap::new();
    let mut all = BTreeSet::new();
    for run in runs {
        all.insert(run.folder.clone());
        among.entry(run.among).or_default().push((run.started_ms, run.folder));
    }
    for runs in among.into_values() {
        let mut runs = runs;
        runs.sort();
        for (_, folder) in runs.iter().rev().take(keep) {
            all.remove(folder);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::index::BenchOnDevice;
    use super::*;

    #[test]
    fn benches_of_two_packages_with_one_name_are_counted_apart() {
        let run = |name: &str, package: &str, started_ms| IndexedFolderRun {
            folder: ("runs".to_owned(), name.to_owned()),
            among: BenchOnDevice {
                package: Some(package.to_owned()),
                process: "b".to_owned(),
                model: "model".to_owned(),
                card: "card".to_owned(),
            },
            started_ms,
        };
        let runs = vec![run("old", "one", 1), run("other", "two", 2), run("new", "one", 3)];
        let removed = runs_to_prune(runs, 1);
        assert_eq!(removed.into_iter().map(|(_, name)| name).collect::<Vec<_>>(), ["old"]);
    }

    #[test]
    fn the_last_of_each_bench_and_device_stay() {
        let run = |name: &str, bench: &str, started_ms| IndexedFolderRun {
            folder: ("runs".to_owned(), name.to_owned()),
            among: BenchOnDevice {
                package: None,
                process: bench.to_owned(),
                model: "model".to_owned(),
                card: "card".to_owned(),
            },
            started_ms,
        };
        let runs = vec![
            run("first", "a", 1),
            run("second", "a", 2),
            run("third", "a", 3),
            run("first", "b", 1),
            run("fourth", "c", 0),
        ];
        let names = |keep| -> Vec<String> {
            runs_to_prune(runs.clone(), keep).into_iter().map(|(_, name)| name).collect()
        };
        assert_eq!(names(1), ["second"]);
        assert_eq!(names(0), ["first", "fourth", "second", "third"]);
        assert_eq!(names(2), [""; 0]);
    }
}
