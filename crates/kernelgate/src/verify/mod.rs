//! An implementation's output against the fp64 reference: every element that the reference holds,
//! none excused.

mod error;
pub mod precision;

use std::collections::BTreeMap;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3Default;

use crate::backend::{BackendError, Executable, host_timeout};
use crate::workload::{Dtype, Expected, Tensor, TensorData, Tensors, Tolerance};
pub use error::VerifyError;
pub use precision::{ErrorBounds, PrecisionLimit};

/// Largest relative error that a file may hold: products of two are finite.
const MAX_RECORDED_ERROR: f64 = 1e100;

/// Errors of all outputs, or of one output, against the reference.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct OutputErrors {
    /// Largest |out - ref| over the largest |ref| of the same output; of several, the worst.
    pub max_error: f64,
    /// Relative L2 error ‖out - ref‖₂ / ‖ref‖₂; of several outputs, the largest.
    pub relative_l2: f64,
    /// Unit roundoff of the outputs' dtype (the largest one of several outputs): the relative error
    /// from rounding; 0 for integers.
    #[serde(default, skip_serializing_if = "is_zero_error")]
    pub rounding: f64,
}

/// Returns whether an error is 0, which files do not store.
#[allow(clippy::trivially_copy_pass_by_ref)]
pub(crate) fn is_zero_error(error: &f64) -> bool {
    *error == 0.0
}

impl OutputErrors {
    /// Returns the larger value of each kind of error.
    pub const fn larger_of_each_error(self, other: Self) -> Self {
        Self {
            max_error: self.max_error.max(other.max_error),
            relative_l2: self.relative_l2.max(other.relative_l2),
            rounding: self.rounding.max(other.rounding),
        }
    }

    /// Checks the facts that deserialising does not enforce.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn validate(&self) -> Result<(), String> {
        let all = [self.max_error, self.relative_l2, self.rounding];
        match all.into_iter().find(|error| !(0.0..=MAX_RECORDED_ERROR).contains(error)) {
            Some(error) => Err(format!("an error of {error}")),
            None => Ok(()),
        }
    }
}

/// How outputs compared.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct OutputComparison {
    /// Errors over all outputs.
    pub errors: OutputErrors,
    /// Errors of each output, by name, if several are compared within bounds; integers are exact.
    pub by_output: BTreeMap<String, OutputErrors>,
    /// Number of elements that were compared with the reference.
    pub checked: u64,
    /// Number of elements in the outputs; those that are not compared are only checked to be
    /// finite.
    pub total: u64,
    /// Whether the elements were compared with the base build's outputs because there is no
    /// reference.
    pub with_base: bool,
}

/// Launches, poisons the outputs, launches again and compares.
///
/// Only the second launch is compared: every timed launch also finds the scratch memory of an
/// earlier one.
///
/// # Errors
/// Fails if a launch fails or an output is wrong.
pub fn launch_and_verify(
    executable: &mut dyn Executable,
    expected: &[Expected],
    bounds: impl Into<ErrorBounds>,
) -> Result<OutputComparison, VerifyError> {
    launch_on_poisoned_outputs(executable)?;
    compare_outputs(executable.outputs()?, expected, bounds)
}

/// Launches, poisons the outputs and launches again; the outputs are then ready to be compared.
pub fn launch_on_poisoned_outputs(executable: &mut dyn Executable) -> Result<(), BackendError> {
    let _watched = host_timeout::watch_host_launches();
    executable.reset()?;
    executable.launch()?;
    executable.synchronize()?;
    executable.poison_outputs()?;
    executable.reset()?;
    executable.launch()?;
    executable.synchronize()
}

/// Checks outputs without a reference: every element must be finite. No element is compared.
///
/// # Errors
/// Fails with [`VerifyError::NotFinite`] if an output was not written, or overflowed.
pub fn check_finite_outputs(outputs: &Tensors) -> Result<OutputComparison, VerifyError> {
    let mut comparison = OutputComparison::default();
    for (name, output) in outputs.iter() {
        check_finite(name, output)?;
        check_not_poison(name, output)?;
        comparison.total += output.len() as u64;
    }
    Ok(comparison)
}

/// Outputs as a reference: of another row, or of the row itself.
pub fn outputs_as_reference(outputs: &Tensors) -> Vec<Expected> {
    let values = |output: &Tensor| match output.tensor_data() {
        TensorData::I8(values) => TensorData::I8(values.clone()),
        _ => TensorData::F64(output.to_f64(0, output.len())),
    };
    let each = |(name, output): (&str, &Tensor)| {
        Expected::all(name, output.shape().to_vec(), values(output))
    };
    outputs.iter().map(each).collect()
}

/// Hash of names, shapes, dtypes and bits of all outputs: 32 hexadecimal digits.
pub fn digest_of_outputs(outputs: &Tensors) -> String {
    let mut hasher = Xxh3Default::new();
    for (name, tensor) in outputs.iter() {
        hasher.update(format!("{name} {:?} {} ", tensor.shape(), tensor.dtype().name()).as_bytes());
        hasher.update(tensor.as_bytes());
    }
    format!("{:032x}", hasher.digest128())
}

/// Launches once more and compares bits with the outputs of the last launch: whether the order of
/// additions is fixed.
pub fn repeats_bit_by_bit(executable: &mut dyn Executable) -> Result<bool, BackendError> {
    let before = executable.outputs()?.clone();
    let _watched = host_timeout::watch_host_launches();
    executable.poison_outputs()?;
    executable.reset()?;
    executable.launch()?;
    executable.synchronize()?;
    let after = executable.outputs()?;
    Ok(before.iter().all(|(name, tensor)| {
        after.get(name).is_some_and(|again| again.as_bytes() == tensor.as_bytes())
    }))
}

/// Compares the outputs of a launch with the reference.
///
/// # Errors
/// Fails if an output is missing, misshapen, unknown to the reference, not finite, or further away
/// than the tolerance or the declared precision, or if the reference itself is empty or malformed.
pub fn compare_outputs(
    outputs: &Tensors,
    expected: &[Expected],
    bounds: impl Into<ErrorBounds>,
) -> Result<OutputComparison, VerifyError> {
    let bounds = bounds.into();
    check_reference(expected)?;
    if expected.is_empty() {
        return Err(VerifyError::Nothing);
    }
    for (name, _) in outputs.iter() {
        if expected.iter().all(|one| one.name != name) {
            return Err(VerifyError::Shape {
                output: name.to_owned(),
                problem: "the reference does not hold it".to_owned(),
            });
        }
    }
    let mut comparison = OutputComparison::default();
    for (i, one) in expected.iter().enumerate() {
        let output = output_with_expected_shape(outputs, one)?;
        // An output may be compared with several references, each for some of its rows.
        if expected[..i].iter().all(|earlier| earlier.name != one.name) {
            check_finite(&one.name, output)?;
            comparison.total += output.len() as u64;
        }
        let found = compare_expected_rows(output, one, bounds.tolerance_of_output(&one.name))?;
        comparison.errors = comparison.errors.larger_of_each_error(found);
        if output.dtype() != Dtype::I8 {
            let errors = comparison.by_output.entry(one.name.clone()).or_default();
            *errors = errors.larger_of_each_error(found);
        }
        comparison.checked += one.values.len() as u64;
    }
    if comparison.checked == 0 {
        return Err(VerifyError::Nothing);
    }
    for (name, &OutputErrors { relative_l2, .. }) in &comparison.by_output {
        if let Some((declared, relative_l2_allowed)) = bounds.declared_precision_of(name)
            && relative_l2 > relative_l2_allowed
        {
            let (output, bits) =
                (name.clone(), precision::next_lower_precision_bits(declared).unwrap_or_default());
            return Err(VerifyError::Precision {
                output,
                relative_l2,
                relative_l2_allowed,
                declared,
                bits,
            });
        }
    }
    if comparison.by_output.len() < 2 {
        comparison.by_output.clear();
    }
    Ok(comparison)
}

/// Checks that every reference is finite, holds the values that its shape and rows promise, and no
/// row twice.
fn check_reference(expected: &[Expected]) -> Result<(), VerifyError> {
    // Rows found per output, one mark for each: an output may have a hundred thousand rows.
    let mut seen: BTreeMap<&str, Vec<bool>> = BTreeMap::new();
    for one in expected {
        let error = |problem: String| VerifyError::Reference { output: one.name.clone(), problem };
        let (elements, row_len) = (one.shape.iter().product::<usize>(), one.row_elements());
        let in_shape = elements / row_len.max(1);
        let rows = one.rows.as_ref().map_or(in_shape, Vec::len);
        let held = match &one.values {
            TensorData::F64(values) => {
                let finite = |piece: &[f64]| piece.iter().fold(true, |all, x| all & x.is_finite());
                if !values.par_chunks(ELEMENTS_PER_TASK).all(finite) {
                    let at = values.iter().position(|value| !value.is_finite()).unwrap_or(0);
                    return Err(error(format!("value {at} is {}", values[at])));
                }
                values.len()
            }
            TensorData::I8(values) => values.len(),
            _ => return Err(error("neither f64 nor i8".to_owned())),
        };
        if held != rows * row_len {
            return Err(error(format!("{held} values for {rows} rows of {row_len}")));
        }
        let sampled = one.rows.as_deref().unwrap_or_default();
        if let Some(row) = sampled.iter().find(|row| **row >= in_shape) {
            return Err(error(format!("row {row} of {in_shape}")));
        }
        let whole_again = one.rows.is_none()
            && expected.iter().filter(|other| other.name == one.name).count() > 1;
        let marks = seen.entry(&one.name).or_default();
        marks.resize(if sampled.is_empty() { 0 } else { in_shape }.max(marks.len()), false);
        let twice = sampled.iter().any(|row| std::mem::replace(&mut marks[*row], true));
        if whole_again || twice {
            return Err(error("a row is there twice".to_owned()));
        }
    }
    Ok(())
}

/// Finds the output that a reference describes, if its shape and kind agree.
fn output_with_expected_shape<'a>(
    outputs: &'a Tensors,
    expected: &Expected,
) -> Result<&'a Tensor, VerifyError> {
    let error = |problem: String| VerifyError::Shape { output: expected.name.clone(), problem };
    let output = outputs.get(&expected.name).ok_or_else(|| error("missing".to_owned()))?;
    if output.shape() != expected.shape {
        return Err(error(format!("shape {:?}, expected {:?}", output.shape(), expected.shape)));
    }
    let integer = matches!(expected.values, TensorData::I8(_));
    if (output.dtype() == Dtype::I8) != integer {
        return Err(error(format!(
            "{}, expected {}",
            output.dtype().name(),
            if integer { "i8" } else { "floats" }
        )));
    }
    Ok(output)
}

/// Number of elements that one task compares.
const ELEMENTS_PER_TASK: usize = 1 << 16;

/// Consecutive elements of an output and their expected values.
struct ReferencePiece<'a, T> {
    from: usize,
    expected: &'a [T],
}

/// The reference in pieces: whole rows if only some are sampled, else any cut.
fn reference_pieces<'a, T>(expected: &Expected, values: &'a [T]) -> Vec<ReferencePiece<'a, T>> {
    match &expected.rows {
        None => values
            .chunks(ELEMENTS_PER_TASK)
            .enumerate()
            .map(|(i, expected)| ReferencePiece { from: i * ELEMENTS_PER_TASK, expected })
            .collect(),
        Some(rows) => {
            let row_len = expected.row_elements();
            rows.iter()
                .zip(values.chunks(row_len.max(1)))
                .map(|(row, expected)| ReferencePiece { from: row * row_len, expected })
                .collect()
        }
    }
}

fn compare_expected_rows(
    output: &Tensor,
    expected: &Expected,
    tolerance: Tolerance,
) -> Result<OutputErrors, VerifyError> {
    let name = || expected.name.clone();
    match &expected.values {
        TensorData::I8(values) => {
            let found: Vec<IntegerDifferences> = reference_pieces(expected, values)
                .par_iter()
                .map(|piece| IntegerDifferences::count_differences(output, piece))
                .collect();
            let checked = values.len() as u64;
            match found.iter().find_map(|differences| differences.first) {
                None => Ok(OutputErrors::default()),
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
        TensorData::F64(values) => {
            let parts: Vec<ErrorSums> = reference_pieces(expected, values)
                .par_iter()
                .map(|piece| ErrorSums::compare(output, piece))
                .collect();
            // The sums are added in order, so that the thread count changes no bit of the result.
            let sums = parts.into_iter().fold(ErrorSums::default(), ErrorSums::plus);
            let (max_error, relative_l2) = sums.max_and_relative_l2(values.len());
            // The condition is written so that a NaN in either figure fails.
            if max_error <= tolerance.max_error && relative_l2 <= tolerance.relative_l2 {
                let rounding = output.dtype().unit_roundoff();
                return Ok(OutputErrors { max_error, relative_l2, rounding });
            }
            Err(VerifyError::TooFar {
                output: name(),
                max_error,
                relative_l2,
                max_error_allowed: tolerance.max_error,
                relative_l2_allowed: tolerance.relative_l2,
                worst: sums.worst,
                actual: sums.worst_actual,
                expected: sums.worst_expected,
            })
        }
        _ => unreachable!("check_reference refuses other references"),
    }
}

fn check_finite(name: &str, output: &Tensor) -> Result<(), VerifyError> {
    if matches!(output.tensor_data(), TensorData::I8(_)) {
        return Ok(());
    }
    let starts: Vec<usize> = (0..output.len()).step_by(ELEMENTS_PER_TASK).collect();
    let found: Vec<(u64, Option<usize>)> = starts
        .par_iter()
        .map(|&from| {
            let len = ELEMENTS_PER_TASK.min(output.len() - from);
            if output.are_all_finite(from, len) {
                return (0, None);
            }
            let values = output.to_f64(from, len);
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

/// Checks that integers were overwritten: they are always finite, so only the poison value shows a
/// missing write.
fn check_not_poison(name: &str, output: &Tensor) -> Result<(), VerifyError> {
    match output.tensor_data() {
        TensorData::I8(values)
            if values.iter().all(|&value| value == i8::MIN) && !values.is_empty() =>
        {
            Err(VerifyError::Shape { output: name.to_owned(), problem: "not written".to_owned() })
        }
        _ => Ok(()),
    }
}

/// Integers that differ from their expected values.
struct IntegerDifferences {
    count: u64,
    /// Index, value and expected value of the first difference.
    first: Option<(usize, f64, f64)>,
}

impl IntegerDifferences {
    fn count_differences(
        output: &Tensor,
        &ReferencePiece { from, expected }: &ReferencePiece<'_, i8>,
    ) -> IntegerDifferences {
        let TensorData::I8(values) = output.tensor_data() else {
            unreachable!("`shaped` refuses other outputs")
        };
        let values = &values[from..][..expected.len()];
        if values == expected {
            return Self { count: 0, first: None };
        }
        let mut wrong = values
            .iter()
            .zip(expected)
            .enumerate()
            .filter(|(_, (actual, expected))| actual != expected)
            .map(|(i, (actual, expected))| (from + i, f64::from(*actual), f64::from(*expected)));
        let first = wrong.next();
        Self { count: u64::from(first.is_some()) + wrong.count() as u64, first }
    }
}

#[derive(Default)]
struct ErrorSums {
    error_squared: f64,
    reference_squared: f64,
    largest_error: f64,
    largest_reference: f64,
    worst: usize,
    worst_actual: f64,
    worst_expected: f64,
}

impl ErrorSums {
    fn compare(output: &Tensor, piece: &ReferencePiece<'_, f64>) -> ErrorSums {
        let mut sums = Self::default();
        output.for_each_f64_block(piece.from, piece.expected.len(), &mut |start, actual| {
            sums.add(piece.from + start, actual, &piece.expected[start..][..actual.len()]);
        });
        sums
    }

    /// Adds the elements of a piece of the output, which begins at index `from`.
    fn add(&mut self, from: usize, actual: &[f64], expected: &[f64]) {
        let (mut error_squared, mut reference_squared) =
            (self.error_squared, self.reference_squared);
        let (mut largest_error, mut largest_reference) =
            (self.largest_error, self.largest_reference);
        for (&actual, &expected) in actual.iter().zip(expected) {
            let error = (actual - expected).abs();
            error_squared += error * error;
            reference_squared += expected * expected;
            largest_reference = largest_reference.max(expected.abs());
            largest_error = largest_error.max(error);
        }
        if largest_error > self.largest_error {
            let is_worst = |i: &usize| (actual[*i] - expected[*i]).abs() == largest_error;
            let worst = (0..actual.len()).find(is_worst).unwrap_or(0);
            (self.worst, self.worst_actual, self.worst_expected) =
                (from + worst, actual[worst], expected[worst]);
        }
        (self.error_squared, self.reference_squared) = (error_squared, reference_squared);
        (self.largest_error, self.largest_reference) = (largest_error, largest_reference);
    }

    fn plus(self, next: Self) -> Self {
        let (error_squared, reference_squared) = (
            self.error_squared + next.error_squared,
            self.reference_squared + next.reference_squared,
        );
        let largest_reference = self.largest_reference.max(next.largest_reference);
        let worst = if next.largest_error > self.largest_error { next } else { self };
        Self { error_squared, reference_squared, largest_reference, ..worst }
    }

    /// Maximum and relative L2 error of `elements` elements, relative to the reference. If the
    /// reference is all zero, for example because terms cancel, the errors are absolute, with the
    /// root mean square instead of the norm, which grows with the number of elements.
    fn max_and_relative_l2(&self, elements: usize) -> (f64, f64) {
        let over =
            |error: f64, reference: f64| if reference > 0.0 { error / reference } else { error };
        let relative_l2 = match self.reference_squared > 0.0 {
            true => self.error_squared.sqrt() / self.reference_squared.sqrt(),
            false => (self.error_squared / elements.max(1) as f64).sqrt(),
        };
        (over(self.largest_error, self.largest_reference), relative_l2)
    }
}

#[cfg(test)]
mod tests;
