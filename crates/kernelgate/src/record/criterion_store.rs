//! Criterion's store: the results that a process wrote for each case.
//!
//! A case has a folder, whose name is its id in a form that is valid, short and unique in a file
//! system. In the folder, `new/benchmark.json` has the original id and `new/sample.json` the
//! samples. Criterion's store does not state the unit of its times: nanoseconds are assumed, unless
//! the bench set another measurement. Deliberately absent: Criterion's own estimates are not read,
//! because they resample one process.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::files::file as record_file;
use super::files::text::on_one_line;
use super::{CaseRecord, CaseSamples};
use crate::verify::OutputComparison;
use crate::workload::{SampleUnit, Work};

/// Implementation name in records of benches that use Criterion alone.
pub const CRITERION_IMPLEMENTATION: &str = "criterion";

/// Folders within folders that are looked into: group, function and parameter are three.
const MAX_FOLDER_DEPTH: usize = 6;
/// Largest file of Criterion's store that is read, bytes.
const MAX_CRITERION_FILE_BYTES: u64 = 64 << 20;

/// Samples of a case, with an iteration count for each time.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredCriterionCase {
    /// Name of the case's benchmark group in Criterion.
    pub group: String,
    /// Iterations in each sample.
    pub iterations: Vec<u64>,
    /// Time of each sample, all its iterations together, in the unit of the bench's measurement.
    pub times: Vec<f64>,
    /// Time at which Criterion wrote the case's samples, if the file system reports it.
    pub written: Option<SystemTime>,
}

impl StoredCriterionCase {
    /// Makes the record of a case that Criterion stored: no work is declared, no output was
    /// compared.
    pub fn record(&self, samples: CaseSamples) -> CaseRecord {
        CaseRecord {
            workload: on_one_line(&self.group),
            revision: 0,
            problem: BTreeMap::new(),
            implementation: CRITERION_IMPLEMENTATION.to_owned(),
            cache: "hot".to_owned(),
            work: (&Work::default()).into(),
            computed_samples: None,
            sample_unit: SampleUnit::default(),
            limit: None,
            verification: OutputComparison::default().into(),
            kernels: BTreeMap::new(),
            samples,
        }
    }
}

/// Results of one process, read from Criterion's store. The key of a case is its id, with a number
/// added if an earlier case has the same id.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CriterionStoreResults {
    /// Cases by id.
    pub cases: BTreeMap<String, StoredCriterionCase>,
    /// Cases whose samples are of no use, with the reason.
    pub unusable: BTreeMap<String, String>,
    /// Titles of all.
    pub titles: BTreeSet<String>,
}

/// The reason why the samples in Criterion's store cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// An operation of the file system failed.
    #[error("failed to read {0}: {1}")]
    Io(PathBuf, std::io::Error),
    /// A file of Criterion's store does not have Criterion's format.
    #[error("failed to read {0}: not as Criterion writes it ({1})")]
    Json(PathBuf, serde_json::Error),
}

#[derive(Deserialize)]
struct CriterionBenchmarkFile {
    group_id: String,
    full_id: String,
    title: String,
}

#[derive(Deserialize)]
struct CriterionSampleFile {
    iters: Vec<f64>,
    times: Vec<f64>,
}

/// Reads a store; a folder that does not exist is empty.
///
/// # Errors
/// Fails if a file in the store differs from Criterion's format.
pub fn read(store: &Path) -> Result<CriterionStoreResults, StoreError> {
    let mut stored = CriterionStoreResults::default();
    let mut found = Vec::new();
    for folder in case_folders_below(store)? {
        let benchmark: CriterionBenchmarkFile = read_store_file(&folder.join("benchmark.json"))?;
        let path = folder.join("sample.json");
        let sample: CriterionSampleFile = read_store_file(&path)?;
        let written = std::fs::metadata(&path).and_then(|metadata| metadata.modified()).ok();
        found.push((benchmark, sample, written));
    }
    let mut count: BTreeMap<String, usize> = BTreeMap::new();
    for (benchmark, ..) in &found {
        *count.entry(benchmark.full_id.clone()).or_default() += 1;
    }
    for (CriterionBenchmarkFile { group_id: group, full_id, title }, sample, written) in found {
        let number = title
            .strip_prefix(title_without_repeat_suffix(&title).unwrap_or(&title))
            .unwrap_or_default();
        let id = if count[&full_id] > 1 { format!("{full_id}{number}") } else { full_id };
        stored.titles.insert(title);
        if stored.cases.remove(&id).is_some() || stored.unusable.contains_key(&id) {
            stored.unusable.insert(id, "two cases have this id".to_owned());
            continue;
        }
        match checked_iteration_counts(&sample) {
            Ok(iterations) => {
                let times = sample.times;
                stored.cases.insert(id, StoredCriterionCase { group, iterations, times, written });
            }
            Err(why) => drop(stored.unusable.insert(id, why)),
        }
    }
    Ok(stored)
}

/// Removes the number that Criterion appends to a repeated title: "sum #2" becomes "sum".
pub fn title_without_repeat_suffix(title: &str) -> Option<&str> {
    let (id, number) = title.rsplit_once(" #")?;
    number.parse::<u32>().is_ok().then_some(id)
}

/// Returns whether a process left no result in Criterion's store.
pub fn is_empty(store: &Path) -> bool {
    std::fs::read_dir(store).map_or(true, |mut entries| entries.next().is_none())
}

/// Returns the folders `new` of all cases in Criterion's store.
fn case_folders_below(store: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let mut cases = Vec::new();
    let mut open = vec![(store.to_owned(), 0)];
    while let Some((folder, depth)) = open.pop() {
        let entries = match std::fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => continue,
            Err(cause) => return Err(StoreError::Io(folder, cause)),
        };
        for entry in entries.flatten() {
            // Symbolic links in the store are not followed.
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let path = entry.path();
            if entry.file_name() == "new" && path.join("benchmark.json").is_file() {
                cases.push(path.clone());
            }
            if depth < MAX_FOLDER_DEPTH {
                open.push((path, depth + 1));
            }
        }
    }
    cases.sort();
    Ok(cases)
}

fn read_store_file<T: DeserializeOwned>(path: &Path) -> Result<T, StoreError> {
    let io = |cause| StoreError::Io(path.to_owned(), cause);
    let text = record_file::read_untrusted_text(path, MAX_CRITERION_FILE_BYTES).map_err(io)?;
    serde_json::from_str(&text).map_err(|cause| StoreError::Json(path.to_owned(), cause))
}

/// The iteration counts of a sample that can be true.
fn checked_iteration_counts(sample: &CriterionSampleFile) -> Result<Vec<u64>, String> {
    if sample.iters.is_empty() || sample.iters.len() != sample.times.len() {
        let (iterations, times) = (sample.iters.len(), sample.times.len());
        return Err(format!("its store has {iterations} iteration counts and {times} times"));
    }
    let possible = |each: f64| (1e-6..1e18).contains(&each);
    let mut pairs = sample.iters.iter().zip(&sample.times);
    match pairs.find(|(iterations, time)| **iterations < 1.0 || !possible(*time / *iterations)) {
        Some((iterations, time)) => {
            Err(format!("its store has a time of {time} for {iterations} iterations"))
        }
        None => Ok(sample.iters.iter().map(|iterations| iterations.round() as u64).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_case(store: &Path, folder: &str, id: &str, sample: &str) {
        write_criterion_case(store, folder, (id, id), sample);
    }

    fn write_criterion_case(store: &Path, folder: &str, (id, title): (&str, &str), sample: &str) {
        let folder = store.join(folder);
        std::fs::create_dir_all(&folder).unwrap();
        // Writes a result in the format of Criterion 0.5, which 0.8 also writes.
        let benchmark = format!(
            "{{\"group_id\":\"grüppe/β ?*\",\"function_id\":\"with/slash\",\"value_str\":\"1000\",\
             \"throughput\":{{\"Elements\":1000}},\"full_id\":\"{id}\",\
             \"directory_name\":\"grüppe_β __/with_slash/1000\",\"title\":\"{title}\"}}"
        );
        std::fs::write(folder.join("benchmark.json"), benchmark).unwrap();
        std::fs::write(folder.join("sample.json"), sample).unwrap();
    }

    #[test]
    fn criterions_samples_are_found_by_their_ids_in_any_folder() {
        let store = tempfile::tempdir().unwrap();
        let store = store.path();
        assert_eq!(read(&store.join("none")).unwrap(), CriterionStoreResults::default());
        assert!(is_empty(store));
        let linear = "{\"sampling_mode\":\"Linear\",\"iters\":[3.0,6.0],\"times\":[30.0,66.5]}";
        write_case(store, "grüppe_β __/with_slash/1000/new", "grüppe/β ?*/with/slash/1000", linear);
        // Writes the copies that Criterion keeps for comparisons, and a case whose name equals a
        // folder's name.
        write_case(store, "grüppe_β __/with_slash/1000/base", "base", linear);
        write_case(store, "new/new", "new", linear);
        std::fs::create_dir_all(store.join("report/new")).unwrap();
        let stored = read(store).unwrap();
        assert_eq!(stored.cases.keys().collect::<Vec<_>>(), ["grüppe/β ?*/with/slash/1000", "new"]);
        let case = &stored.cases["new"];
        assert_eq!((&*case.iterations, &*case.times), (&[3, 6][..], &[30.0, 66.5][..]));
        assert!(stored.unusable.is_empty() && !is_empty(store));
    }

    #[test]
    fn an_impossible_sample_is_reported_with_its_field() {
        let folder = tempfile::tempdir().unwrap();
        let store = folder.path();
        for (id, sample, words) in [
            (
                "uneven",
                "{\"iters\":[1.0],\"times\":[]}",
                "its store has 1 iteration counts and 0 times",
            ),
            (
                "negative",
                "{\"iters\":[1.0],\"times\":[-2.0]}",
                "its store has a time of -2 for 1 iterations",
            ),
            (
                "never",
                "{\"iters\":[0.0],\"times\":[2.0]}",
                "its store has a time of 2 for 0 iterations",
            ),
        ] {
            write_case(store, &format!("{id}/new"), id, sample);
            let stored = read(store).unwrap();
            assert_eq!(stored.unusable[id], words);
        }
        let sample = "{\"iters\":[1.0],\"times\":[2.0]}";
        write_case(store, "one/new", "same", sample);
        write_case(store, "one_2/new", "same", sample);
        let stored = read(store).unwrap();
        assert!(stored.cases.is_empty(), "{:?}", stored.cases);
        assert_eq!(stored.unusable["same"], "two cases have this id");
        // These titles were numbered by Criterion, or are equal only because Criterion cut them.
        for (folder, id, title) in [
            ("a", "numbered", "numbered"),
            ("a_2", "numbered", "numbered #2"),
            ("b", "long 1", "long..."),
            ("b_2", "long 2", "long... #2"),
        ] {
            write_criterion_case(store, &format!("{folder}/new"), (id, title), sample);
        }
        let stored = read(store).unwrap();
        let ids: Vec<&str> = stored.cases.keys().map(String::as_str).collect();
        assert_eq!(ids, ["long 1", "long 2", "numbered", "numbered #2"]);
        write_case(store, "cut/new", "cut", "{\"iters\":[1.0");
        let error = read(store).unwrap_err();
        assert!(
            matches!(&error, StoreError::Json(path, _) if path.ends_with("cut/new/sample.json")),
            "{error}"
        );
    }

    #[test]
    fn a_device_file_in_place_of_a_sample_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        write_case(folder.path(), "a/new", "a", "");
        let sample = folder.path().join("a/new/sample.json");
        std::fs::remove_file(&sample).unwrap();
        std::os::unix::fs::symlink("/dev/null", &sample).unwrap();
        let error = read(folder.path()).unwrap_err().to_string();
        let reason = "it is no file but a device, a pipe or a socket";
        assert_eq!(error, format!("failed to read {}: {reason}", sample.display()));
    }
}
