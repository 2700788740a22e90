//! Reads Criterion's store of results: the files that a bench process wrote for each case.
//!
//! Criterion gives each case a folder, named after the case id in a form that is valid, short and
//! unique in a file system. In a case's folder, `new/benchmark.json` contains the original case id
//! and `new/sample.json` the samples. Criterion's files do not state the unit of the times;
//! kernelgate assumes nanoseconds. Deliberately absent: Criterion's own estimates are not read,
//! because they describe the variation within a single process only.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::files::file as record_file;
use super::files::text::join_lines_with_spaces;
use super::{CaseRecordWithSamples, SamplesOfCase};
use crate::verify::ComparisonWithReference;
use crate::workload::{ThroughputItemUnit, Work};

/// Implementation name in the record of a case from a bench that uses only Criterion.
pub const IMPLEMENTATION_NAME_OF_CRITERION_CASES: &str = "criterion";

/// Depth of nested folders in which kernelgate searches cases in Criterion's store; group, function
/// and parameter make three.
const MAX_SEARCH_DEPTH_IN_CRITERION_STORE: usize = 6;
/// Size of the largest file of Criterion's store that kernelgate reads, bytes.
const MAX_CRITERION_FILE_BYTES: u64 = 64 << 20;

/// Samples of one case in Criterion's store: numbers of iterations and times.
#[derive(Debug, Clone, PartialEq)]
pub struct CaseInCriterionStore {
    /// Name of the case's Criterion benchmark group.
    pub criterion_group_name: String,
    /// Iterations in each sample.
    pub iterations_per_sample: Vec<u64>,
    /// Time of each sample with all its iterations, in the unit of the bench's Criterion
    /// measurement.
    pub sample_times: Vec<f64>,
    /// Time at which Criterion wrote the samples' file, if the file system reports it.
    pub samples_file_write_time: Option<SystemTime>,
}

impl CaseInCriterionStore {
    /// Makes the record of a case that Criterion stored, with no declared work and no verified
    /// outputs.
    pub fn to_case_record(&self, samples: SamplesOfCase) -> CaseRecordWithSamples {
        CaseRecordWithSamples {
            workload: join_lines_with_spaces(&self.criterion_group_name),
            workload_revision: 0,
            axis_values: BTreeMap::new(),
            implementation: IMPLEMENTATION_NAME_OF_CRITERION_CASES.to_owned(),
            cache_state: "hot".to_owned(),
            work: (&Work::default()).into(),
            data_items_per_launch: None,
            data_item_unit: ThroughputItemUnit::default(),
            limit: None,
            verification: ComparisonWithReference::default().into(),
            kernels: BTreeMap::new(),
            samples,
        }
    }
}

/// All results of one bench process, read from Criterion's store. The key of a case is its id, with
/// a number added if several cases have this id.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CriterionStoreResults {
    /// Cases by id.
    pub cases: BTreeMap<String, CaseInCriterionStore>,
    /// Case ids whose samples cannot be used, each with the reason.
    pub unusable_case_reasons: BTreeMap<String, String>,
    /// Titles of all.
    pub case_titles: BTreeSet<String>,
}

/// The reason why the files in Criterion's store cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum CriterionStoreReadError {
    /// A file or folder of Criterion's store cannot be read.
    #[error("failed to read {0}: {1}")]
    Io(PathBuf, std::io::Error),
    /// A file of Criterion's store does not have Criterion's JSON format.
    #[error("failed to read {0}: not as Criterion writes it ({1})")]
    Json(PathBuf, serde_json::Error),
}

#[derive(Deserialize)]
struct CriterionBenchmarkJson {
    group_id: String,
    full_id: String,
    title: String,
}

#[derive(Deserialize)]
struct CriterionSampleJson {
    iters: Vec<f64>,
    times: Vec<f64>,
}

/// Reads all cases in Criterion's store; a folder that does not exist has none.
///
/// # Errors
/// Fails if a file in the store differs from Criterion's format.
pub fn read_criterion_store(
    store: &Path,
) -> Result<CriterionStoreResults, CriterionStoreReadError> {
    let mut stored = CriterionStoreResults::default();
    let mut found = Vec::new();
    for folder in folders_new_of_all_cases(store)? {
        let benchmark: CriterionBenchmarkJson =
            read_criterion_json(&folder.join("benchmark.json"))?;
        let path = folder.join("sample.json");
        let sample: CriterionSampleJson = read_criterion_json(&path)?;
        let written = std::fs::metadata(&path).and_then(|metadata| metadata.modified()).ok();
        found.push((benchmark, sample, written));
    }
    let mut count: BTreeMap<String, usize> = BTreeMap::new();
    for (benchmark, ..) in &found {
        *count.entry(benchmark.full_id.clone()).or_default() += 1;
    }
    for (CriterionBenchmarkJson { group_id: group, full_id, title }, sample, written) in found {
        let number = title
            .strip_prefix(title_without_criterions_number(&title).unwrap_or(&title))
            .unwrap_or_default();
        let id = if count[&full_id] > 1 { format!("{full_id}{number}") } else { full_id };
        stored.case_titles.insert(title);
        if stored.cases.remove(&id).is_some() || stored.unusable_case_reasons.contains_key(&id) {
            stored.unusable_case_reasons.insert(id, "two cases have this id".to_owned());
            continue;
        }
        match plausible_iteration_counts(&sample) {
            Ok(iterations) => {
                let times = sample.times;
                stored.cases.insert(
                    id,
                    CaseInCriterionStore {
                        criterion_group_name: group,
                        iterations_per_sample: iterations,
                        sample_times: times,
                        samples_file_write_time: written,
                    },
                );
            }
            Err(why) => drop(stored.unusable_case_reasons.insert(id, why)),
        }
    }
    Ok(stored)
}

/// Removes the number that Criterion appends to a repeated benchmark title: "sum #2" becomes "sum";
/// `None` without such a number.
pub fn title_without_criterions_number(title: &str) -> Option<&str> {
    let (id, number) = title.rsplit_once(" #")?;
    number.parse::<u32>().is_ok().then_some(id)
}

/// Returns whether Criterion's store contains no files, so that the process left no result.
pub fn is_criterion_store_empty(store: &Path) -> bool {
    std::fs::read_dir(store).map_or(true, |mut entries| entries.next().is_none())
}

/// Returns the folders `new`, with the latest results, of all cases in Criterion's store.
fn folders_new_of_all_cases(store: &Path) -> Result<Vec<PathBuf>, CriterionStoreReadError> {
    let mut cases = Vec::new();
    let mut open = vec![(store.to_owned(), 0)];
    while let Some((folder, depth)) = open.pop() {
        let entries = match std::fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => continue,
            Err(cause) => return Err(CriterionStoreReadError::Io(folder, cause)),
        };
        for entry in entries.flatten() {
            // Symbolic links in Criterion's store are not followed.
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let path = entry.path();
            if entry.file_name() == "new" && path.join("benchmark.json").is_file() {
                cases.push(path.clone());
            }
            if depth < MAX_SEARCH_DEPTH_IN_CRITERION_STORE {
                open.push((path, depth + 1));
            }
        }
    }
    cases.sort();
    Ok(cases)
}

fn read_criterion_json<T: DeserializeOwned>(path: &Path) -> Result<T, CriterionStoreReadError> {
    let io = |cause| CriterionStoreReadError::Io(path.to_owned(), cause);
    let text =
        record_file::read_untrusted_text_up_to(path, MAX_CRITERION_FILE_BYTES).map_err(io)?;
    serde_json::from_str(&text)
        .map_err(|cause| CriterionStoreReadError::Json(path.to_owned(), cause))
}

/// Returns the iteration counts of a sample file, after checking that counts and times are
/// plausible.
fn plausible_iteration_counts(sample: &CriterionSampleJson) -> Result<Vec<u64>, String> {
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

    fn write_criterion_case_with_id_as_title(store: &Path, folder: &str, id: &str, sample: &str) {
        write_criterion_case_with_title(store, folder, (id, id), sample);
    }

    fn write_criterion_case_with_title(
        store: &Path,
        folder: &str,
        (id, title): (&str, &str),
        sample: &str,
    ) {
        let folder = store.join(folder);
        std::fs::create_dir_all(&folder).unwrap();
        // Writes a case's result in the format of Criterion 0.5, which Criterion 0.8 also writes.
        let benchmark = format!(
            "{{\"group_id\":\"grüppe/β ?*\",\"function_id\":\"with/slash\",\"value_str\":\"1000\",\
             \"throughput\":{{\"Elements\":1000}},\"full_id\":\"{id}\",\
             \"directory_name\":\"grüppe_β __/with_slash/1000\",\"title\":\"{title}\"}}"
        );
        std::fs::write(folder.join("benchmark.json"), benchmark).unwrap();
        std::fs::write(folder.join("sample.json"), sample).unwrap();
    }

    #[test]
    fn criterion_samples_are_found_by_case_id_in_any_folder() {
        let store = tempfile::tempdir().unwrap();
        let store = store.path();
        assert_eq!(
            read_criterion_store(&store.join("none")).unwrap(),
            CriterionStoreResults::default()
        );
        assert!(is_criterion_store_empty(store));
        let linear = "{\"sampling_mode\":\"Linear\",\"iters\":[3.0,6.0],\"times\":[30.0,66.5]}";
        write_criterion_case_with_id_as_title(
            store,
            "grüppe_β __/with_slash/1000/new",
            "grüppe/β ?*/with/slash/1000",
            linear,
        );
        // Adds the copies of results that Criterion keeps for comparisons, and a case whose name is
        // that of such a folder.
        write_criterion_case_with_id_as_title(
            store,
            "grüppe_β __/with_slash/1000/base",
            "base",
            linear,
        );
        write_criterion_case_with_id_as_title(store, "new/new", "new", linear);
        std::fs::create_dir_all(store.join("report/new")).unwrap();
        let stored = read_criterion_store(store).unwrap();
        assert_eq!(stored.cases.keys().collect::<Vec<_>>(), ["grüppe/β ?*/with/slash/1000", "new"]);
        let case = &stored.cases["new"];
        assert_eq!(
            (&*case.iterations_per_sample, &*case.sample_times),
            (&[3, 6][..], &[30.0, 66.5][..])
        );
        assert!(stored.unusable_case_reasons.is_empty() && !is_criterion_store_empty(store));
    }

    #[test]
    fn an_implausible_criterion_sample_is_reported_with_its_field() {
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
            write_criterion_case_with_id_as_title(store, &format!("{id}/new"), id, sample);
            let stored = read_criterion_store(store).unwrap();
            assert_eq!(stored.unusable_case_reasons[id], words);
        }
        let sample = "{\"iters\":[1.0],\"times\":[2.0]}";
        write_criterion_case_with_id_as_title(store, "one/new", "same", sample);
        write_criterion_case_with_id_as_title(store, "one_2/new", "same", sample);
        let stored = read_criterion_store(store).unwrap();
        assert!(stored.cases.is_empty(), "{:?}", stored.cases);
        assert_eq!(stored.unusable_case_reasons["same"], "two cases have this id");
        // These equal case ids got a number in their titles from Criterion, or their titles are
        // equal because Criterion cut them.
        for (folder, id, title) in [
            ("a", "numbered", "numbered"),
            ("a_2", "numbered", "numbered #2"),
            ("b", "long 1", "long..."),
            ("b_2", "long 2", "long... #2"),
        ] {
            write_criterion_case_with_title(store, &format!("{folder}/new"), (id, title), sample);
        }
        let stored = read_criterion_store(store).unwrap();
        let ids: Vec<&str> = stored.cases.keys().map(String::as_str).collect();
        assert_eq!(ids, ["long 1", "long 2", "numbered", "numbered #2"]);
        write_criterion_case_with_id_as_title(store, "cut/new", "cut", "{\"iters\":[1.0");
        let error = read_criterion_store(store).unwrap_err();
        assert!(
            matches!(&error, CriterionStoreReadError::Json(path, _) if path.ends_with("cut/new/sample.json")),
            "{error}"
        );
    }

    #[test]
    fn a_device_file_instead_of_a_criterion_sample_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        write_criterion_case_with_id_as_title(folder.path(), "a/new", "a", "");
        let sample = folder.path().join("a/new/sample.json");
        std::fs::remove_file(&sample).unwrap();
        std::os::unix::fs::symlink("/dev/null", &sample).unwrap();
        let error = read_criterion_store(folder.path()).unwrap_err().to_string();
        let reason = "it is no file but a device, a pipe or a socket";
        assert_eq!(error, format!("failed to read {}: {reason}", sample.display()));
    }
}
