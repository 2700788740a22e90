//! Keeps references on disk: computing the fp64 reference of a problem takes seconds, reading it a
//! fraction of a second.
//!
//! A file is named by workload, revision, point and a hash of the inputs; a workload without a
//! declared revision also by the bench executable. Each stored reference file holds a hash of its
//! content. A file that is missing, cut or altered costs a computation, nothing else. The folder
//! lies in the target folder and is safe to delete. References that are read from a file
//! ([`Problem::reads_files`]) are not kept.
//!
//! [`Problem::reads_files`]: crate::workload::Problem::reads_files

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::harness::phase_timer;
use crate::harness::selection::cases::ProblemGroup;
use crate::record::{file, tensors};
use crate::verify::{self, PrecisionLimit, precision};
use crate::workload::{Expected, ReferenceSource, Tensor, TensorData, Tensors};

/// References that are computed faster are not worth a file.
const MIN_COMPUTING_TIME_TO_SAVE: Duration = Duration::from_millis(50);
/// Largest reference that is kept on disk, bytes.
const MAX_STORED_BYTES: usize = 1 << 30;
/// Maximum bytes of all stored references; if they exceed it, the oldest files are removed.
const MAX_REFERENCE_FOLDER_BYTES: u64 = 8 << 30;
/// Version of the format of stored references, and of stored error limits.
const REFERENCE_FORMAT_VERSION: &str = "2";
/// Name of the tensor that holds the hash of the other tensors.
const HASH_TENSOR: &str = "hash";

/// The folder that holds the references of problems.
#[derive(Debug, Clone)]
pub struct StoredReferences {
    folder: PathBuf,
    /// Content hash of the running executable; `None` if its file cannot be read.
    executable: Option<String>,
}

/// Returns the reference of a problem for these inputs: read from disk if it is stored, else
/// computed and stored.
pub fn get(
    kept: Option<&StoredReferences>,
    group: &ProblemGroup<'_>,
    inputs: &Tensors,
) -> Vec<Expected> {
    let path = kept.and_then(|kept| kept.path(group, inputs, "outputs"));
    let reading = phase_timer::start_activity("references read");
    if let Some(expected) = path.as_deref().and_then(read) {
        return expected;
    }
    drop(reading);
    let _activity = phase_timer::start_activity("references");
    let started = Instant::now();
    let expected = group.bound.problem().reference(inputs);
    let worthwhile = started.elapsed() >= MIN_COMPUTING_TIME_TO_SAVE
        && stored_reference_bytes(&expected) <= MAX_STORED_BYTES;
    if let Some((path, kept)) = path.zip(kept).filter(|_| worthwhile) {
        // If the file cannot be written, the next process only takes longer.
        let _ = write_reference(&path, &expected);
        delete_oldest_files(&kept.folder, MAX_REFERENCE_FOLDER_BYTES);
    }
    expected
}

/// Error limit for the precision that a problem declares; `None` if it declares none or has no
/// reference of its own, or if a lower precision rounds nothing in the inputs. Returns the error
/// limit of a declared precision, which is stored on disk like a reference.
pub fn error_limit_for_precision(
    kept: Option<&StoredReferences>,
    group: &ProblemGroup<'_>,
    inputs: &Tensors,
    expected: &[Expected],
) -> Option<PrecisionLimit> {
    let problem = group.bound.problem();
    if problem.reference_from() != ReferenceSource::Definition {
        return None;
    }
    let declared = problem.precision()?;
    let bits = precision::next_lower_precision_bits(declared)?;
    let what = format!("limits of {bits} bits, by output");
    let path = kept.and_then(|kept| kept.path(group, inputs, &what));
    if let Some(known) = path.as_deref().and_then(read) {
        let limits = known.into_iter().filter_map(|one| match one.values {
            TensorData::F64(values) => Some((one.name, *values.first()?)),
            _ => None,
        });
        let relative_l2: BTreeMap<String, f64> = limits.collect();
        return (!relative_l2.is_empty()).then_some(PrecisionLimit { declared, relative_l2 });
    }
    let of_rounded = problem.reference(&precision::round_inputs(inputs, bits));
    let found = precision::precision_error_limit(declared, expected, &of_rounded);
    if let Some(path) = path {
        let limits = found.iter().flat_map(|found| &found.relative_l2);
        let limits: Vec<Expected> =
            limits.map(|(name, limit)| Expected::all(name, [1], vec![*limit])).collect();
        // If the file cannot be written, the next process only takes longer.
        let _ = write_reference(&path, &limits);
    }
    found
}

impl StoredReferences {
    /// Makes a store of references in `folder`, which is created when the first reference is
    /// written.
    pub fn at(folder: PathBuf, executable: Option<String>) -> StoredReferences {
        Self { folder, executable }
    }

    /// Path of the file that stores `what` for these inputs; `None` if references of the problem
    /// may change under the same name.
    fn path(&self, group: &ProblemGroup<'_>, inputs: &Tensors, what: &str) -> Option<PathBuf> {
        if group.bound.problem().reads_files() {
            return None;
        }
        let code = match group.suite.declared_revision() {
            Some(revision) => format!("revision {revision}"),
            None => self.executable.clone()?,
        };
        let parts = [
            REFERENCE_FORMAT_VERSION,
            &group.id(),
            &code,
            &verify::digest_of_outputs(inputs),
            what,
        ];
        Some(self.folder.join(format!("{}.reference", file::hash_of_all(parts))))
    }
}

fn stored_reference_bytes(expected: &[Expected]) -> usize {
    expected.iter().map(|one| one.values.len() * size_of::<f64>()).sum()
}

/// Writes tensors: `<i>.values/<name>` with the shape of the whole output as `<i>.shape`, and
/// `<i>.rows` if only some rows are held. Row indices are stored as f64, which holds them exactly.
fn write_reference(path: &Path, expected: &[Expected]) -> std::io::Result<()> {
    let mut all = Tensors::new();
    let indices = |values: &[usize]| {
        Tensor::new([values.len()], TensorData::F64(values.iter().map(|&i| i as f64).collect()))
    };
    for (i, one) in expected.iter().enumerate() {
        let values = Tensor::new([one.values.len()], one.values.clone());
        all.insert(&format!("{i:04}.values/{}", one.name), values);
        all.insert(&format!("{i:04}.shape"), indices(&one.shape));
        if let Some(rows) = &one.rows {
            all.insert(&format!("{i:04}.rows"), indices(rows));
        }
    }
    let hash =
        verify::digest_of_outputs(&all).into_bytes().into_iter().map(|byte| byte as i8).collect();
    all.insert(HASH_TENSOR, Tensor::new([32], TensorData::I8(hash)));
    std::fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
    tensors::write(path, &all)
}

fn read(path: &Path) -> Option<Vec<Expected>> {
    let mut all = tensors::read(path)?;
    if all.take(HASH_TENSOR)?.as_bytes() != verify::digest_of_outputs(&all).as_bytes() {
        return None;
    }
    let indices = |tensor: Tensor| -> Vec<usize> {
        tensor.to_f64(0, tensor.len()).into_iter().map(|index| index as usize).collect()
    };
    let keys: Vec<String> = all.iter().map(|(key, _)| key.to_owned()).collect();
    let mut expected = Vec::new();
    for key in keys {
        let Some((number, name)) = key.split_once(".values/") else { continue };
        expected.push(Expected {
            name: name.to_owned(),
            shape: indices(all.take(&format!("{number}.shape"))?),
            rows: all.take(&format!("{number}.rows")).map(indices),
            values: all.take(&key)?.into_tensor_data(),
        });
    }
    Some(expected)
}

/// Deletes the oldest files of a folder until the rest has at most `most_bytes`.
fn delete_oldest_files(folder: &Path, most_bytes: u64) {
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
        At, Attached, OutputReference, ProblemDefinition, RowLaunches, Tolerances,
    };
    use crate::backend::BackendKind;
    use crate::harness::selection::backend_choice::BenchPlace;
    use crate::harness::selection::cases::select_cases;
    use crate::harness::selection::filter::CaseFilter;
    use crate::suite::Suite;
    use crate::workload::{Effort, Point, Work};

    fn example_reference() -> Vec<Expected> {
        vec![
            Expected::sampled_rows("y", [3, 2], vec![0, 2], vec![1.0, -0.5, 2.0, 1e-300]),
            Expected::all("s", [1, 3], vec![1i8, 0, -1]),
            Expected::sampled_rows("y", [3, 2], vec![1], vec![4.0, 5.0]),
        ]
    }

    #[test]
    fn references_round_trip_and_altered_files_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep").join("x.reference");
        write_reference(&path, &example_reference()).unwrap();
        assert_eq!(read(&path), Some(example_reference()));
        let whole = std::fs::read(&path).unwrap();
        // The test changes one bit of the last value, which lies before or after the hash in the
        // order of names.
        for at in [whole.len() - 40, whole.len() - 1, whole.len() / 2] {
            let mut altered = whole.clone();
            altered[at] ^= 1;
            std::fs::write(&path, altered).unwrap();
            assert_eq!(read(&path), None, "byte {at} of {}", whole.len());
        }
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert_eq!(read(&path), None);
    }

    #[test]
    fn references_from_files_are_not_stored() {
        let define = |reference: OutputReference| -> Suite {
            let define = move |_: &Point| {
                Ok(ProblemDefinition {
                    inputs: Vec::new(),
                    outputs: Vec::new(),
                    reference: reference.clone(),
                    work: Work::default(),
                    tolerance: Tolerances::by_dtype(),
                })
            };
            let row = |_: &At<'_>, _| Ok(RowLaunches::new(|| Ok::<_, String>(())));
            Attached::new("kept/golden", &["n=1"], define).row("cuda/row", [], row).into()
        };
        let kept = StoredReferences::at(PathBuf::from("kept"), Some("executable".to_owned()));
        let path = |suite: Suite| {
            let place = BenchPlace {
                kind: BackendKind::Cuda,
                otherwise: String::new(),
                l2_bytes: 0,
                gpus: 1,
            };
            let selection =
                select_cases([&suite], Effort::Default, &place, &[], &CaseFilter::All).unwrap();
            kept.path(&selection.groups[0], &Tensors::new(), "outputs")
        };
        assert_eq!(path(define(OutputReference::Golden("changes.safetensors".into()))), None);
        assert!(path(define(OutputReference::from_function(|_| Vec::new()))).is_some());
    }

    #[test]
    fn the_oldest_stored_references_are_removed_first_and_foreign_files_stay() {
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
        delete_oldest_files(folder.path(), 250);
        let there = |name| path(name).exists();
        assert_eq!(
            ["a.reference", "b.reference", "c.reference", "kept.txt"].map(there),
            [false, true, true, true]
        );
    }
}
