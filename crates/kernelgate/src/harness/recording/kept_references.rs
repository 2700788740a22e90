//! Stores references on disk: computing a problem's fp64 reference takes seconds, reading it a
//! fraction of a second.
//!
//! The file name is a hash of workload, revision, axis values and inputs; without a declared
//! revision, also of the bench executable. Each reference file contains a hash of its content. A
//! reference file that is missing, truncated or altered is ignored, and the reference is computed
//! again. The folder of stored references is in cargo's target folder and can be deleted safely.
//! References that are read from a file ([`Problem::reads_files`]) are not kept.
//!
//! [`Problem::reads_files`]: crate::workload::Problem::reads_files

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::harness::phase_timer;
use crate::harness::selection::cases::SelectedProblem;
use crate::record::{file, tensors};
use crate::verify::{self, PrecisionErrorLimits, precision};
use crate::workload::{Expected, SourceOfExpectedOutputs, Tensor, TensorData, Tensors};

/// References that took less time to compute are not stored.
const MIN_COMPUTING_TIME_TO_SAVE: Duration = Duration::from_millis(50);
/// Maximum size in bytes of one reference that is stored on disk.
const MAX_STORED_REFERENCE_BYTES: usize = 1 << 30;
/// Maximum size in bytes of the folder of stored references; the oldest files are deleted beyond
/// it.
const MAX_REFERENCE_FOLDER_BYTES: u64 = 8 << 30;
/// Version of the file format of stored references and stored error limits.
const REFERENCE_FORMAT_VERSION: &str = "2";
/// Name of the tensor that contains the hash of the file's other tensors.
const CONTENT_HASH_TENSOR_NAME: &str = "hash";

/// The folder in which references of problems are stored.
#[derive(Debug, Clone)]
pub struct StoredReferenceFolder {
    references_folder: PathBuf,
    /// Content hash of the running executable; `None` if its file could not be read.
    executable_hash: Option<String>,
}

/// Returns the expected outputs of a problem for these inputs: read from disk if stored, else
/// computed and stored.
pub fn read_or_compute_reference(
    kept: Option<&StoredReferenceFolder>,
    group: &SelectedProblem<'_>,
    inputs: &Tensors,
) -> Vec<Expected> {
    let path = kept.and_then(|kept| kept.path_of_stored_file(group, inputs, "outputs"));
    let reading = phase_timer::start_timed_activity("references read");
    if let Some(expected) = path.as_deref().and_then(read_reference_file) {
        return expected;
    }
    drop(reading);
    let _activity = phase_timer::start_timed_activity("references");
    let started = Instant::now();
    let expected = group.problem.problem().reference(inputs);
    let worthwhile = started.elapsed() >= MIN_COMPUTING_TIME_TO_SAVE
        && bytes_of_reference_as_fp64(&expected) <= MAX_STORED_REFERENCE_BYTES;
    if let Some((path, kept)) = path.zip(kept).filter(|_| worthwhile) {
        // If writing fails, the next process only computes the reference again.
        let _ = write_reference_file(&path, &expected);
        delete_oldest_reference_files(&kept.references_folder, MAX_REFERENCE_FOLDER_BYTES);
    }
    expected
}

/// Error limit that follows from the precision that a problem declares; `None` without a declared
/// precision or own reference, or if the next lower precision would not change the inputs. The
/// error limit is stored on disk like a reference.
pub fn read_or_compute_precision_error_limit(
    kept: Option<&StoredReferenceFolder>,
    group: &SelectedProblem<'_>,
    inputs: &Tensors,
    expected: &[Expected],
) -> Option<PrecisionErrorLimits> {
    let problem = group.problem.problem();
    if problem.source_of_expected_outputs() != SourceOfExpectedOutputs::ProblemReference {
        return None;
    }
    let declared = problem.required_precision()?;
    let bits = precision::significant_bits_of_next_lower_precision(declared)?;
    let what = format!("limits of {bits} bits, by output");
    let path = kept.and_then(|kept| kept.path_of_stored_file(group, inputs, &what));
    if let Some(known) = path.as_deref().and_then(read_reference_file) {
        let limits = known.into_iter().filter_map(|one| match one.expected_values {
            TensorData::F64(values) => Some((one.output_name, *values.first()?)),
            _ => None,
        });
        let relative_l2: BTreeMap<String, f64> = limits.collect();
        return (!relative_l2.is_empty())
            .then_some(PrecisionErrorLimits { declared, max_relative_l2_by_output: relative_l2 });
    }
    let of_rounded = problem.reference(&precision::round_inputs_to_significant_bits(inputs, bits));
    let found =
        precision::precision_error_limits_from_rounded_inputs(declared, expected, &of_rounded);
    if let Some(path) = path {
        let limits = found.iter().flat_map(|found| &found.max_relative_l2_by_output);
        let limits: Vec<Expected> =
            limits.map(|(name, limit)| Expected::all(name, [1], vec![*limit])).collect();
        // If writing fails, the next process only computes the error limit again.
        let _ = write_reference_file(&path, &limits);
    }
    found
}

impl StoredReferenceFolder {
    /// Uses `folder` for stored references; the folder is created when the first reference is
    /// written.
    pub fn new(folder: PathBuf, executable: Option<String>) -> StoredReferenceFolder {
        Self { references_folder: folder, executable_hash: executable }
    }

    /// Path of the file that stores `what` for these inputs; `None` if the problem reads files,
    /// whose content may change.
    fn path_of_stored_file(
        &self,
        group: &SelectedProblem<'_>,
        inputs: &Tensors,
        what: &str,
    ) -> Option<PathBuf> {
        if group.problem.problem().reads_files() {
            return None;
        }
        let code = match group.suite.declared_workload_revision() {
            Some(revision) => format!("revision {revision}"),
            None => self.executable_hash.clone()?,
        };
        let parts = [
            REFERENCE_FORMAT_VERSION,
            &group.workload_and_problem_id(),
            &code,
            &verify::output_bits_hash_hex(inputs),
            what,
        ];
        Some(self.references_folder.join(format!("{}.reference", file::hash_of_texts_hex(parts))))
    }
}

fn bytes_of_reference_as_fp64(expected: &[Expected]) -> usize {
    expected.iter().map(|one| one.expected_values.len() * size_of::<f64>()).sum()
}

/// Writes tensors: `<i>.values/<name>` contains the values of reference `<i>`, `<i>.shape` the
/// shape of the whole output, and `<i>.rows` the row indices if only some rows are stored. Row
/// indices are stored as f64, which represents them exactly.
fn write_reference_file(path: &Path, expected: &[Expected]) -> std::io::Result<()> {
    let mut all = Tensors::new();
    let indices = |values: &[usize]| {
        Tensor::new([values.len()], TensorData::F64(values.iter().map(|&i| i as f64).collect()))
    };
    for (i, one) in expected.iter().enumerate() {
        let values = Tensor::new([one.expected_values.len()], one.expected_values.clone());
        all.insert(&format!("{i:04}.values/{}", one.output_name), values);
        all.insert(&format!("{i:04}.shape"), indices(&one.output_shape));
        if let Some(rows) = &one.row_indices {
            all.insert(&format!("{i:04}.rows"), indices(rows));
        }
    }
    let hash = verify::output_bits_hash_hex(&all)
        .into_bytes()
        .into_iter()
        .map(|byte| byte as i8)
        .collect();
    all.insert(CONTENT_HASH_TENSOR_NAME, Tensor::new([32], TensorData::I8(hash)));
    std::fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
    tensors::write_tensor_file_atomically(path, &all)
}

fn read_reference_file(path: &Path) -> Option<Vec<Expected>> {
    let mut all = tensors::read_tensor_file(path)?;
    if all.take(CONTENT_HASH_TENSOR_NAME)?.as_bytes()
        != verify::output_bits_hash_hex(&all).as_bytes()
    {
        return None;
    }
    let indices = |tensor: Tensor| -> Vec<usize> {
        tensor.elements_to_f64(0, tensor.len()).into_iter().map(|index| index as usize).collect()
    };
    let keys: Vec<String> = all.iter().map(|(key, _)| key.to_owned()).collect();
    let mut expected = Vec::new();
    for key in keys {
        let Some((number, name)) = key.split_once(".values/") else { continue };
        expected.push(Expected {
            output_name: name.to_owned(),
            output_shape: indices(all.take(&format!("{number}.shape"))?),
            row_indices: all.take(&format!("{number}.rows")).map(indices),
            expected_values: all.take(&key)?.into_tensor_data(),
        });
    }
    Some(expected)
}

/// Deletes the oldest reference files of a folder until the others have at most `most_bytes` in
/// total.
fn delete_oldest_reference_files(folder: &Path, most_bytes: u64) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    let mut files: Vec<_> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let facts = entry.metadata().ok()?;
            Some((facts.modified().ok()?, facts.len(), entry.path()))
        })
        .filter(|(_, _, path)| path.extension().is_some_and(|extension| extension == "reference"))
        .collect();
    files.sort();
    let mut total: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
    for (_, bytes, path) in files {
        if total <= most_bytes {
            break;
        }
        if std::fs::remove_file(path).is_ok() {
            total -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::{
        AttachedWorkload, OutputReference, ProblemDefinition, RowContext, RowLaunchClosures,
        Tolerances,
    };
    use crate::backend::BackendKind;
    use crate::harness::selection::backend_choice::ChosenBackend;
    use crate::harness::selection::cases::select_cases;
    use crate::harness::selection::filter::CaseIdFilter;
    use crate::suite::WorkloadSuite;
    use crate::workload::{BenchEffort, Point, Work};

    fn test_reference_of_sampled_rows() -> Vec<Expected> {
        vec![
            Expected::sampled_rows("y", [3, 2], vec![0, 2], vec![1.0, -0.5, 2.0, 1e-300]),
            Expected::all("s", [1, 3], vec![1i8, 0, -1]),
            Expected::sampled_rows("y", [3, 2], vec![1], vec![4.0, 5.0]),
        ]
    }

    #[test]
    fn references_are_read_back_and_altered_files_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep").join("x.reference");
        write_reference_file(&path, &test_reference_of_sampled_rows()).unwrap();
        assert_eq!(read_reference_file(&path), Some(test_reference_of_sampled_rows()));
        let whole = std::fs::read(&path).unwrap();
        // The test flips bits of values before and after the stored hash.
        for at in [whole.len() - 40, whole.len() - 1, whole.len() / 2] {
            let mut altered = whole.clone();
            altered[at] ^= 1;
            std::fs::write(&path, altered).unwrap();
            assert_eq!(read_reference_file(&path), None, "byte {at} of {}", whole.len());
        }
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert_eq!(read_reference_file(&path), None);
    }

    #[test]
    fn golden_references_are_not_stored_again() {
        let define = |reference: OutputReference| -> WorkloadSuite {
            let define = move |_: &Point| {
                Ok(ProblemDefinition {
                    inputs: Vec::new(),
                    outputs: Vec::new(),
                    reference: reference.clone(),
                    work: Work::default(),
                    tolerance: Tolerances::by_dtype(),
                })
            };
            let row = |_: &RowContext<'_>, _| Ok(RowLaunchClosures::new(|| Ok::<_, String>(())));
            AttachedWorkload::new("kept/golden", &["n=1"], define)
                .add_stream_row("cuda/row", [], row)
                .into()
        };
        let kept = StoredReferenceFolder::new(PathBuf::from("kept"), Some("executable".to_owned()));
        let path = |suite: WorkloadSuite| {
            let place = ChosenBackend {
                kind: BackendKind::Cuda,
                reason_against_other_backend: String::new(),
                l2_bytes: 0,
                gpu_count: 1,
            };
            let selection =
                select_cases([&suite], BenchEffort::Default, &place, &[], &CaseIdFilter::AllCases)
                    .unwrap();
            kept.path_of_stored_file(&selection.problems_with_cases[0], &Tensors::new(), "outputs")
        };
        assert_eq!(path(define(OutputReference::GoldenFile("changes.safetensors".into()))), None);
        assert!(path(define(OutputReference::from_function(|_| Vec::new()))).is_some());
    }

    #[test]
    fn the_oldest_reference_files_are_deleted_and_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for (age, name) in
            ["a.reference", "b.reference", "c.reference", "kept.txt"].iter().enumerate()
        {
            std::fs::write(path(name), [0; 100]).unwrap();
            let file = std::fs::File::options().write(true).open(path(name)).unwrap();
            let time = std::time::UNIX_EPOCH + Duration::from_secs(1000 + age as u64);
            file.set_modified(time).unwrap();
        }
        delete_oldest_reference_files(folder.path(), 250);
        let there = |name| path(name).exists();
        assert_eq!(
            ["a.reference", "b.reference", "c.reference", "kept.txt"].map(there),
            [false, true, true, true]
        );
    }
}
