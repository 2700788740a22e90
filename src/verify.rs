//! An implementation's output against the fp64 reference: every element that the reference holds, none excused.

use std::collections::BTreeSet;

use rayon::prelude::*;
use xxhash_rust::xxh3::Xxh3Default;

use crate::backend::{BackendError, Executable};
use crate::workload::{Data, Dtype, Expected, Tensor, Tensors, Tolerance};

/// How an output compared. Everything is over all outputs of the case.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Comparison {
    /// Largest |out - ref| over the largest |ref| of the same output; the worst output.
    pub max_error: f64,
    /// ‖out - ref‖₂ / ‖ref‖₂; the worst output.
    pub relative_l2: f64,
    /// Elements compared with the reference.
    pub checked: u64,
    /// Elements of the outputs; those not compared are checked finite.
    pub total: u64,
}

/// Why a case is wrong.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum VerifyError {
    /// Elements that are NaN or infinite (or still poisoned).
    #[error("output `{output}`: {count} of {total} elements are not finite, first at {first}: not written, or overflowed")]
    NotFinite {
        /// The output.
        output: String,
        /// How many.
        count: u64,
        /// Of how many.
        total: u64,
        /// Index of the first, row-major.
        first: usize,
    },
    /// Further from the reference than allowed.
    #[error(
        "output `{output}`: max error {max_error:.2e} (allowed {:.0e}), relative L2 {relative_l2:.2e} (allowed {:.0e}); \
         worst at {worst}: {actual} against {expected}", tolerance.max_error, tolerance.relative_l2
    )]
    TooFar {
        /// The output.
        output: String,
        /// Largest |out - ref| over the largest |ref|.
        max_error: f64,
        /// ‖out - ref‖₂ / ‖ref‖₂.
        relative_l2: f64,
        /// What was allowed.
        tolerance: Tolerance,
        /// Index of the worst element, row-major.
        worst: usize,
        /// Its value.
        actual: f64,
        /// The reference.
        expected: f64,
    },
    /// Integers that differ.
    #[error("output `{output}`: {count} of {checked} elements differ, first at {first}: {actual} against {expected}")]
    Differs {
        /// The output.
        output: String,
        /// How many.
        count: u64,
        /// Of how many compared.
        checked: u64,
        /// Index of the first, row-major.
        first: usize,
        /// Its value.
        actual: f64,
        /// The reference.
        expected: f64,
    },
    /// The implementation does not produce what the workload defines.
    #[error("output `{output}`: {problem}")]
    Shape {
        /// The output.
        output: String,
        /// What is wrong.
        problem: String,
    },
    /// The workload's reference contradicts itself.
    #[error("reference of output `{output}`: {problem}")]
    Reference {
        /// The output.
        output: String,
        /// What is wrong.
        problem: String,
    },
    /// A reference without elements: nothing would be verified.
    #[error("the reference holds no element: nothing was compared")]
    Nothing,
    /// The implementation did not get that far.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// Launches, poisons the outputs, launches again and compares.
///
/// The second launch is the one that counts: every timed launch finds the scratch memory of an earlier one.
///
/// # Errors
/// When a launch fails or an output is wrong.
pub fn verify(executable: &mut dyn Executable, expected: &[Expected], tolerance: Tolerance) -> Result<Comparison, VerifyError> {
    launch_on_poison(executable)?;
    compare(executable.outputs()?, expected, tolerance)
}

/// Launches, poisons the outputs and launches again; the outputs are then ready to be compared.
///
/// # Errors
/// When a launch fails.
pub fn launch_on_poison(executable: &mut dyn Executable) -> Result<(), BackendError> {
    executable.launch()?;
    executable.synchronize()?;
    executable.poison_outputs()?;
    executable.launch()?;
    executable.synchronize()
}

/// Hash of names, shapes, dtypes and bits of all outputs: 32 hexadecimal digits.
pub fn digest(outputs: &Tensors) -> String {
    let mut hasher = Xxh3Default::new();
    for (name, tensor) in outputs.iter() {
        hasher.update(format!("{name} {:?} {} ", tensor.shape(), tensor.dtype().name()).as_bytes());
        hasher.update(tensor.as_bytes());
    }
    format!("{:032x}", hasher.digest128())
}

/// Launches once more and compares bits with the outputs of the last launch: whether the order of additions is fixed.
///
/// # Errors
/// When the launch fails.
pub fn repeats(executable: &mut dyn Executable) -> Result<bool, BackendError> {
    let before = executable.outputs()?.clone();
    executable.poison_outputs()?;
    executable.launch()?;
    executable.synchronize()?;
    let after = executable.outputs()?;
    Ok(before.iter().all(|(name, tensor)| after.get(name).is_some_and(|again| again.as_bytes() == tensor.as_bytes())))
}

/// Compares outputs with the reference.
///
/// # Errors
/// When an output is missing, misshapen, unknown to the reference, not finite, or further away than the tolerance; when the
/// reference itself is empty or malformed.
pub fn compare(outputs: &Tensors, expected: &[Expected], tolerance: Tolerance) -> Result<Comparison, VerifyError> {
    check_reference(expected)?;
    if expected.is_empty() {
        return Err(VerifyError::Nothing);
    }
    for (name, _) in outputs.iter() {
        if expected.iter().all(|one| one.name != name) {
            return Err(VerifyError::Shape { output: name.to_owned(), problem: "the reference does not hold it".to_owned() });
        }
    }
    let mut comparison = Comparison::default();
    for (i, one) in expected.iter().enumerate() {
        let output = shaped(outputs, one)?;
        // An output may be held against several references, each for some of its rows.
        if expected[..i].iter().all(|earlier| earlier.name != one.name) {
            check_finite(&one.name, output)?;
            comparison.total += output.len() as u64;
        }
        let found = compare_rows(output, one, tolerance)?;
        comparison.max_error = comparison.max_error.max(found.max_error);
        comparison.relative_l2 = comparison.relative_l2.max(found.relative_l2);
        comparison.checked += found.checked;
    }
    if comparison.checked == 0 {
        return Err(VerifyError::Nothing);
    }
    Ok(comparison)
}

/// Whether every reference holds the values that its shape and rows promise, finite, and no row twice.
fn check_reference(expected: &[Expected]) -> Result<(), VerifyError> {
    let mut seen = BTreeSet::new();
    for one in expected {
        let error = |problem: String| VerifyError::Reference { output: one.name.clone(), problem };
        let (elements, row_len) = (one.shape.iter().product::<usize>(), one.row_len());
        let in_shape = elements / row_len.max(1);
        let rows = one.rows.as_ref().map_or(in_shape, Vec::len);
        let held = match &one.values {
            Data::F64(values) => {
                if let Some(at) = values.par_iter().position_first(|value| !value.is_finite()) {
                    return Err(error(format!("value {at} is {}", values[at])));
                }
                values.len()
            }
            Data::I8(values) => values.len(),
            _ => return Err(error("neither f64 nor i8".to_owned())),
        };
        if held != rows * row_len {
            return Err(error(format!("{held} values for {rows} rows of {row_len}")));
        }
        let sampled = one.rows.as_deref().unwrap_or_default();
        if let Some(row) = sampled.iter().find(|row| **row >= in_shape) {
            return Err(error(format!("row {row} of {in_shape}")));
        }
        let whole_again = one.rows.is_none() && expected.iter().filter(|other| other.name == one.name).count() > 1;
        if whole_again || !sampled.iter().all(|row| seen.insert((&one.name, row))) {
            return Err(error("a row is there twice".to_owned()));
        }
    }
    Ok(())
}

/// The output that a reference is about, if it is there in its shape and kind.
fn shaped<'a>(outputs: &'a Tensors, expected: &Expected) -> Result<&'a Tensor, VerifyError> {
    let error = |problem: String| VerifyError::Shape { output: expected.name.clone(), problem };
    let output = outputs.get(&expected.name).ok_or_else(|| error("missing".to_owned()))?;
    if output.shape() != expected.shape {
        return Err(error(format!("shape {:?}, expected {:?}", output.shape(), expected.shape)));
    }
    let integer = matches!(expected.values, Data::I8(_));
    if (output.dtype() == Dtype::I8) != integer {
        return Err(error(format!("{}, expected {}", output.dtype().name(), if integer { "i8" } else { "floats" })));
    }
    Ok(output)
}

/// Elements that one task compares.
const PIECE: usize = 1 << 16;

/// Consecutive elements of an output and what they should be.
struct Piece<'a, T> {
    from: usize,
    expected: &'a [T],
}

/// The reference in pieces: whole rows where some are sampled, any cut where all are there.
fn pieces<'a, T>(expected: &Expected, values: &'a [T]) -> Vec<Piece<'a, T>> {
    match &expected.rows {
        None => values.chunks(PIECE).enumerate().map(|(i, expected)| Piece { from: i * PIECE, expected }).collect(),
        Some(rows) => {
            let row_len = expected.row_len();
            rows.iter().zip(values.chunks(row_len.max(1))).map(|(row, expected)| Piece { from: row * row_len, expected }).collect()
        }
    }
}

fn compare_rows(output: &Tensor, expected: &Expected, tolerance: Tolerance) -> Result<Comparison, VerifyError> {
    let name = || expected.name.clone();
    match &expected.values {
        Data::I8(values) => {
            let found: Vec<Differences> = pieces(expected, values)
                .par_iter()
                .map(|piece| Differences::of(piece.from, &output.to_f64(piece.from, piece.expected.len()), piece.expected))
                .collect();
            let checked = values.len() as u64;
            match found.iter().find_map(|differences| differences.first) {
                None => Ok(Comparison { checked, ..Comparison::default() }),
                Some((first, actual, wanted)) => Err(VerifyError::Differs {
                    output: name(),
                    count: found.iter().map(|differences| differences.count).sum(),
                    checked,
                    first,
                    actual,
                    expected: wanted,
                }),
            }
        }
        Data::F64(values) => {
            let parts: Vec<Sums> = pieces(expected, values)
                .par_iter()
                .map(|piece| Sums::of(piece.from, &output.to_f64(piece.from, piece.expected.len()), piece.expected))
                .collect();
            // In order, so that the thread count changes no bit of the result.
            let sums = parts.into_iter().fold(Sums::default(), Sums::plus);
            let (max_error, relative_l2) = sums.errors();
            // Written so that a NaN in either figure fails.
            if max_error <= tolerance.max_error && relative_l2 <= tolerance.relative_l2 {
                return Ok(Comparison { max_error, relative_l2, checked: values.len() as u64, total: 0 });
            }
            Err(VerifyError::TooFar {
                output: name(),
                max_error,
                relative_l2,
                tolerance,
                worst: sums.worst,
                actual: sums.worst_actual,
                expected: sums.worst_expected,
            })
        }
        _ => unreachable!("check_reference refuses other references"),
    }
}

fn check_finite(name: &str, output: &Tensor) -> Result<(), VerifyError> {
    if matches!(output.data(), Data::I8(_)) {
        return Ok(());
    }
    let starts: Vec<usize> = (0..output.len()).step_by(PIECE).collect();
    let found: Vec<(u64, Option<usize>)> = starts
        .par_iter()
        .map(|&from| {
            let values = output.to_f64(from, PIECE.min(output.len() - from));
            let count = values.iter().filter(|value| !value.is_finite()).count() as u64;
            (count, values.iter().position(|value| !value.is_finite()).map(|column| from + column))
        })
        .collect();
    match found.iter().find_map(|(_, first)| *first) {
        None => Ok(()),
        Some(first) => Err(VerifyError::NotFinite {
            output: name.to_owned(),
            count: found.iter().map(|(count, _)| count).sum(),
            total: output.len() as u64,
            first,
        }),
    }
}

/// Integers that are not what they should be.
struct Differences {
    count: u64,
    /// Index, value and reference of the first.
    first: Option<(usize, f64, f64)>,
}

impl Differences {
    fn of(from: usize, actual: &[f64], expected: &[i8]) -> Self {
        let mut wrong = actual
            .iter()
            .zip(expected)
            .enumerate()
            .filter(|(_, (actual, expected))| **actual != f64::from(**expected))
            .map(|(i, (actual, expected))| (from + i, *actual, f64::from(*expected)));
        let first = wrong.next();
        Self { count: u64::from(first.is_some()) + wrong.count() as u64, first }
    }
}

#[derive(Default)]
struct Sums {
    error_squared: f64,
    reference_squared: f64,
    largest_error: f64,
    largest_reference: f64,
    worst: usize,
    worst_actual: f64,
    worst_expected: f64,
}

impl Sums {
    fn of(from: usize, actual: &[f64], expected: &[f64]) -> Self {
        let mut sums = Self::default();
        for (i, (&actual, &expected)) in actual.iter().zip(expected).enumerate() {
            let error = (actual - expected).abs();
            sums.error_squared += error * error;
            sums.reference_squared += expected * expected;
            sums.largest_reference = sums.largest_reference.max(expected.abs());
            if error > sums.largest_error {
                sums.largest_error = error;
                (sums.worst, sums.worst_actual, sums.worst_expected) = (from + i, actual, expected);
            }
        }
        sums
    }

    fn plus(self, next: Self) -> Self {
        let (error_squared, reference_squared) =
            (self.error_squared + next.error_squared, self.reference_squared + next.reference_squared);
        let largest_reference = self.largest_reference.max(next.largest_reference);
        let worst = if next.largest_error > self.largest_error { next } else { self };
        Self { error_squared, reference_squared, largest_reference, ..worst }
    }

    /// Relative to the reference; absolute where the reference is all zero.
    fn errors(&self) -> (f64, f64) {
        let over = |error: f64, reference: f64| if reference > 0.0 { error / reference } else { error };
        (over(self.largest_error, self.largest_reference), over(self.error_squared.sqrt(), self.reference_squared.sqrt()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::Task;

    const LOOSE: Tolerance = Tolerance { max_error: 1e-3, relative_l2: 1e-3 };

    fn check(actual: Vec<f32>, expected: Vec<f64>) -> Result<Comparison, VerifyError> {
        let shape = [actual.len() / 2, 2];
        compare(&Tensors::new().with("y", shape, actual), &[Expected::all("y", shape, expected)], LOOSE)
    }

    #[test]
    fn close_outputs_pass_with_their_errors() {
        let comparison = check(vec![1.0, 2.0, 3.0, 4.002], vec![1.0, 2.0, 3.0, 4.0]).unwrap();
        assert!((comparison.max_error - 0.0005).abs() < 1e-6, "{comparison:?}");
        assert_eq!((comparison.checked, comparison.total), (4, 4));
    }

    #[test]
    fn a_digest_is_of_names_shapes_and_bits() {
        let outputs = |name: &str, shape: [usize; 2], values: [f32; 4]| digest(&Tensors::new().with(name, shape, values.to_vec()));
        let first = outputs("y", [2, 2], [1.0, 2.0, 3.0, 0.0]);
        assert_eq!(first, outputs("y", [2, 2], [1.0, 2.0, 3.0, 0.0]));
        assert_eq!(first.len(), 32);
        for other in [
            outputs("z", [2, 2], [1.0, 2.0, 3.0, 0.0]),
            outputs("y", [4, 1], [1.0, 2.0, 3.0, 0.0]),
            outputs("y", [2, 2], [1.0, 2.0, 3.0, -0.0]),
        ] {
            assert_ne!(first, other);
        }
    }

    #[test]
    fn nan_and_infinity_never_pass() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = check(vec![1.0, 2.0, bad, 4.0], vec![1.0, 2.0, 3.0, 4.0]).unwrap_err();
            assert!(matches!(error, VerifyError::NotFinite { count: 1, first: 2, .. }), "{error}");
        }
        // A reference that is itself NaN must not pass either.
        let error = check(vec![1.0, 2.0], vec![1.0, f64::NAN]).unwrap_err();
        assert_eq!(error.to_string(), "reference of output `y`: value 1 is NaN");
    }

    #[test]
    fn one_wrong_element_among_many_is_found_and_named() {
        let mut actual = vec![1.0f32; 10_000];
        actual[7777] = 1.01;
        let error = check(actual, vec![1.0; 10_000]).unwrap_err();
        assert!(matches!(error, VerifyError::TooFar { worst: 7777, .. }), "{error}");
    }

    #[test]
    fn sampled_rows_are_compared_and_the_rest_is_checked_finite() {
        let sampled = |actual: Vec<f32>| {
            let expected = Expected::sampled("y", [3, 2], vec![1], vec![3.0, 4.0]);
            compare(&Tensors::new().with("y", [3, 2], actual), &[expected], LOOSE)
        };
        let comparison = sampled(vec![9.0, 9.0, 3.0, 4.0, 9.0, 9.0]).unwrap();
        assert_eq!((comparison.checked, comparison.total), (2, 6));
        assert!(matches!(sampled(vec![9.0, 9.0, 3.0, 5.0, 9.0, 9.0]), Err(VerifyError::TooFar { worst: 3, .. })));
        assert!(matches!(sampled(vec![9.0, f32::NAN, 3.0, 4.0, 9.0, 9.0]), Err(VerifyError::NotFinite { .. })));
    }

    #[test]
    fn several_references_of_one_output_count_its_elements_once() {
        let outputs = Tensors::new().with("y", [2, 2], vec![1.0f32, 2.0, 3.0, 4.0]);
        let part = |row: usize, values: Vec<f64>| Expected::sampled("y", [2, 2], vec![row], values);
        let comparison = compare(&outputs, &[part(0, vec![1.0, 2.0]), part(1, vec![3.0, 4.0])], LOOSE).unwrap();
        assert_eq!((comparison.checked, comparison.total), (4, 4));
        assert!(compare(&outputs, &[part(0, vec![1.0, 2.0]), part(1, vec![3.0, 5.0])], LOOSE).is_err());
    }

    #[test]
    fn integers_are_exact_and_poison_is_a_mismatch() {
        let spikes = |actual: Vec<i8>| {
            let expected = Expected::all("s", [1, 3], vec![0i8, 1, -1]);
            compare(&Tensors::new().with("s", [1, 3], actual), &[expected], LOOSE)
        };
        assert!(spikes(vec![0, 1, -1]).is_ok());
        let error = spikes(vec![0, 0x7f, -1]).unwrap_err();
        assert!(matches!(error, VerifyError::Differs { count: 1, first: 1, .. }), "{error}");
    }

    #[test]
    fn missing_and_misshapen_outputs_are_errors() {
        let expected = [Expected::all("y", [2, 1], vec![1.0, 2.0])];
        for outputs in [Tensors::new(), Tensors::new().with("y", [1, 2], vec![1.0f32, 2.0])] {
            assert!(matches!(compare(&outputs, &expected, LOOSE), Err(VerifyError::Shape { .. })));
        }
    }
    #[test]
    fn outputs_of_another_kind_or_unknown_to_the_reference_are_errors() {
        let message = |outputs: Tensors, expected: Expected| compare(&outputs, &[expected], LOOSE).unwrap_err().to_string();
        let floats = || Tensors::new().with("y", [1, 2], vec![1.0f32, 0.0]);
        let integers = || Tensors::new().with("y", [1, 2], vec![1i8, 0]);
        assert_eq!(message(floats(), Expected::all("y", [1, 2], vec![1i8, 0])), "output `y`: f32, expected i8");
        assert_eq!(message(integers(), Expected::all("y", [1, 2], vec![1.0, 0.0])), "output `y`: i8, expected floats");
        let more = floats().with("z", [1, 1], vec![1.0f32]);
        assert_eq!(message(more, Expected::all("y", [1, 2], vec![1.0, 0.0])), "output `z`: the reference does not hold it");
    }

    #[test]
    fn a_reference_that_checks_less_than_it_seems_to_is_an_error() {
        let outputs = Tensors::new().with("y", [2, 2], vec![1.0f32, 2.0, 3.0, 4.0]);
        let message = |expected: &[Expected]| compare(&outputs, expected, LOOSE).unwrap_err().to_string();
        let sampled = |rows: Vec<usize>, values: Vec<f64>| Expected::sampled("y", [2, 2], rows, values);
        assert_eq!(compare(&Tensors::new(), &[], LOOSE), Err(VerifyError::Nothing));
        assert_eq!(message(&[sampled(vec![], vec![])]), VerifyError::Nothing.to_string());
        assert!(message(&[Expected::all("y", [2, 2], vec![1.0])]).ends_with("1 values for 2 rows of 2"));
        assert!(message(&[sampled(vec![0, 1], vec![1.0, 2.0])]).ends_with("2 values for 2 rows of 2"));
        assert!(message(&[sampled(vec![2], vec![1.0, 2.0])]).ends_with("row 2 of 2"));
        assert!(message(&[sampled(vec![0, 0], vec![1.0, 2.0, 1.0, 2.0])]).ends_with("a row is there twice"));
        let whole = || Expected::all("y", [2, 2], vec![1.0, 2.0, 3.0, 4.0]);
        assert!(message(&[whole(), sampled(vec![0], vec![1.0, 2.0])]).ends_with("a row is there twice"));
        assert!(message(&[Expected::all("y", [2, 2], vec![1.0f32; 4])]).ends_with("neither f64 nor i8"));
    }

    #[test]
    fn an_implementation_that_writes_nothing_or_only_once_fails() {
        let expected = [Expected::all("y", [1, 2], vec![1.0, 2.0])];
        let outputs = || Tensors::new().with_output("y", [1, 2], Dtype::F32);
        let mut idle = Task::new(outputs(), |_| {});
        assert!(matches!(verify(&mut idle, &expected, LOOSE), Err(VerifyError::NotFinite { count: 2, .. })));
        let mut launches = 0;
        let mut once = Task::new(outputs(), move |outputs| {
            launches += 1;
            if launches == 1 {
                outputs.f32_mut("y").copy_from_slice(&[1.0, 2.0]);
            }
        });
        assert!(matches!(verify(&mut once, &expected, LOOSE), Err(VerifyError::NotFinite { count: 2, .. })));
        let mut sound = Task::new(outputs(), |outputs| outputs.f32_mut("y").copy_from_slice(&[1.0, 2.0]));
        assert_eq!(verify(&mut sound, &expected, LOOSE).unwrap().checked, 2);
    }
}
