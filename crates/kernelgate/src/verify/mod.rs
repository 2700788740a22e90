//! Compares an implementation's outputs with the fp64 reference: every element that the reference
//! contains must agree.

mod error;
pub mod precision;

use std::collections::BTreeMap;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3Default;

use crate::backend::{BackendError, LaunchableProblem, host_timeout};
use crate::workload::{Dtype, Expected, Tensor, TensorData, Tensors, Tolerance};
pub use error::OutputVerificationError;
pub use precision::{ErrorBoundsOfOutputs, PrecisionErrorLimits};

/// Largest error that a record file may contain; the product of two such errors is finite.
const MAX_PLAUSIBLE_OUTPUT_ERROR: f64 = 1e100;

/// Errors relative to the reference, of one output or the largest over all outputs of a case.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct ErrorsRelativeToReference {
    /// Largest absolute error, |out - ref|, divided by the largest |ref| of the same output; for
    /// several outputs the largest of these.
    pub max_error: f64,
    /// Relative L2 error ‖out - ref‖₂ / ‖ref‖₂; for several outputs the largest of these.
    pub relative_l2: f64,
    /// Relative error from rounding to the output's dtype (its unit roundoff, for several outputs
    /// the largest); 0 for integers.
    #[serde(default, skip_serializing_if = "is_zero_error")]
    #[serde(rename = "rounding")]
    pub rounding_error: f64,
}

/// Returns whether an error is 0, which record files omit.
#[allow(clippy::trivially_copy_pass_by_ref)]
pub(crate) fn is_zero_error(error: &f64) -> bool {
    *error == 0.0
}

impl ErrorsRelativeToReference {
    /// Returns, for each kind of error, the larger one of the two values.
    pub const fn larger_of_each_kind_of_error(self, other: Self) -> Self {
        Self {
            max_error: self.max_error.max(other.max_error),
            relative_l2: self.relative_l2.max(other.relative_l2),
            rounding_error: self.rounding_error.max(other.rounding_error),
        }
    }

    /// Fails if an error is negative, not a number or implausibly large.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn check_errors_plausible(&self) -> Result<(), String> {
        let all = [self.max_error, self.relative_l2, self.rounding_error];
        match all.into_iter().find(|error| !(0.0..=MAX_PLAUSIBLE_OUTPUT_ERROR).contains(error)) {
            Some(error) => Err(format!("an error of {error}")),
            None => Ok(()),
        }
    }
}

/// Result of comparing outputs with the reference.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ComparisonWithReference {
    /// Errors over all outputs.
    pub errors: ErrorsRelativeToReference,
    /// Errors of each output by name, if several floating-point outputs were compared; integers
    /// must be equal and have none.
    pub by_output: BTreeMap<String, ErrorsRelativeToReference>,
    /// Number of output elements that were compared with the reference.
    pub compared_elements: u64,
    /// Number of all output elements; those that are not compared only have to be finite.
    pub all_elements: u64,
    /// Whether the outputs were compared with those of the base build, because the case has no
    /// reference.
    pub compared_with_base: bool,
}

/// Launches, poisons the outputs, launches again, and compares the outputs with the reference.
///
/// Only the second launch is compared, because every timed launch also finds the scratch memory of
/// an earlier launch.
///
/// # Errors
/// Fails if a launch fails or an output is wrong.
pub fn launch_twice_and_compare_with_reference(
    executable: &mut dyn LaunchableProblem,
    expected: &[Expected],
    bounds: impl Into<ErrorBoundsOfOutputs>,
) -> Result<ComparisonWithReference, OutputVerificationError> {
    launch_again_on_poisoned_outputs(executable)?;
    compare_outputs_with_reference(executable.outputs_on_host()?, expected, bounds)
}

/// Launches, poisons the outputs and launches again, so that the outputs can be compared with the
/// reference.
pub fn launch_again_on_poisoned_outputs(
    executable: &mut dyn LaunchableProblem,
) -> Result<(), BackendError> {
    let _watched = host_timeout::start_timeout_of_host_launches();
    executable.reset_state()?;
    executable.launch_once()?;
    executable.wait_for_launches()?;
    executable.poison_outputs()?;
    executable.reset_state()?;
    executable.launch_once()?;
    executable.wait_for_launches()
}

/// Checks outputs that have no reference: every element must be finite. The result states that no
/// element was compared.
///
/// # Errors
/// Fails with [`OutputVerificationError::NotFinite`] if an output was not written, or overflowed.
pub fn check_outputs_without_reference(
    outputs: &Tensors,
) -> Result<ComparisonWithReference, OutputVerificationError> {
    let mut comparison = ComparisonWithReference::default();
    for (name, output) in outputs.iter() {
        check_output_is_finite(name, output)?;
        check_integers_are_not_all_poison(name, output)?;
        comparison.all_elements += output.len() as u64;
    }
    Ok(comparison)
}

/// Makes a reference of the outputs of another implementation, or of another launch.
pub fn reference_from_outputs(outputs: &Tensors) -> Vec<Expected> {
    let values = |output: &Tensor| match output.tensor_data() {
        TensorData::I8(values) => TensorData::I8(values.clone()),
        _ => TensorData::F64(output.elements_to_f64(0, output.len())),
    };
    let each = |(name, output): (&str, &Tensor)| {
        Expected::all(name, output.shape().to_vec(), values(output))
    };
    outputs.iter().map(each).collect()
}

/// Returns a hash of names, shapes, dtypes and bits of all outputs, as 32 hexadecimal digits.
pub fn output_bits_hash_hex(outputs: &Tensors) -> String {
    let mut hasher = Xxh3Default::new();
    for (name, tensor) in outputs.iter() {
        hasher.update(
            format!("{name} {:?} {} ", tensor.shape(), tensor.dtype().dtype_name()).as_bytes(),
        );
        hasher.update(tensor.as_bytes());
    }
    format!("{:032x}", hasher.digest128())
}

/// Launches once more and returns whether the output bits equal those of the last launch, which
/// shows that the order of additions is fixed.
pub fn launch_again_and_compare_bits(
    executable: &mut dyn LaunchableProblem,
) -> Result<bool, BackendError> {
    let before = executable.outputs_on_host()?.clone();
    let _watched = host_timeout::start_timeout_of_host_launches();
    executable.poison_outputs()?;
    executable.reset_state()?;
    executable.launch_once()?;
    executable.wait_for_launches()?;
    let after = executable.outputs_on_host()?;
    Ok(before.iter().all(|(name, tensor)| {
        after.get(name).is_some_and(|again| again.as_bytes() == tensor.as_bytes())
    }))
}

/// Compares the outputs of a launch with the reference, within the given error bounds.
///
/// # Errors
/// Fails if an output is missing, misshapen, unknown to the reference, not finite, or further away
/// than the tolerance or the declared precision, or if the reference itself is empty or malformed.
pub fn compare_outputs_with_reference(
    outputs: &Tensors,
    expected: &[Expected],
    bounds: impl Into<ErrorBoundsOfOutputs>,
) -> Result<ComparisonWithReference, OutputVerificationError> {
    let bounds = bounds.into();
    check_reference_is_well_formed(expected)?;
    if expected.is_empty() {
        return Err(OutputVerificationError::NothingCompared);
    }
    for (name, _) in outputs.iter() {
        if expected.iter().all(|one| one.output_name != name) {
            return Err(OutputVerificationError::MissingOrOfWrongShape {
                output: name.to_owned(),
                reason: "the reference does not hold it".to_owned(),
            });
        }
    }
    let mut comparison = ComparisonWithReference::default();
    for (i, one) in expected.iter().enumerate() {
        let output = output_matching_reference(outputs, one)?;
        // An output may have several references, each for some of its rows; its finiteness is
        // checked only once.
        if expected[..i].iter().all(|earlier| earlier.output_name != one.output_name) {
            check_output_is_finite(&one.output_name, output)?;
            comparison.all_elements += output.len() as u64;
        }
        let found = compare_rows_of_one_reference(
            output,
            one,
            bounds.tolerance_of_output(&one.output_name),
        )?;
        comparison.errors = comparison.errors.larger_of_each_kind_of_error(found);
        if output.dtype() != Dtype::I8 {
            let errors = comparison.by_output.entry(one.output_name.clone()).or_default();
            *errors = errors.larger_of_each_kind_of_error(found);
        }
        comparison.compared_elements += one.expected_values.len() as u64;
    }
    if comparison.compared_elements == 0 {
        return Err(OutputVerificationError::NothingCompared);
    }
    for (name, &ErrorsRelativeToReference { relative_l2, .. }) in &comparison.by_output {
        if let Some((declared, relative_l2_allowed)) =
            bounds.declared_precision_and_limit_of_output(name)
            && relative_l2 > relative_l2_allowed
        {
            let (output, bits) = (
                name.clone(),
                precision::significant_bits_of_next_lower_precision(declared).unwrap_or_default(),
            );
            return Err(OutputVerificationError::LowerPrecisionThanDeclared {
                output,
                relative_l2,
                relative_l2_allowed,
                declared,
                significant_bits: bits,
            });
        }
    }
    if comparison.by_output.len() < 2 {
        comparison.by_output.clear();
    }
    Ok(comparison)
}

/// Fails unless every reference is finite, has as many values as its shape and rows need, and no
/// row occurs twice.
fn check_reference_is_well_formed(expected: &[Expected]) -> Result<(), OutputVerificationError> {
    // The vector holds one mark for each row of an output: a list of rows would be slow for an
    // output of a hundred thousand rows.
    let mut seen: BTreeMap<&str, Vec<bool>> = BTreeMap::new();
    for one in expected {
        let error = |problem: String| OutputVerificationError::MalformedReference {
            output: one.output_name.clone(),
            reason: problem,
        };
        let (elements, row_len) = (one.output_shape.iter().product::<usize>(), one.row_elements());
        let in_shape = elements / row_len.max(1);
        let rows = one.row_indices.as_ref().map_or(in_shape, Vec::len);
        let held = match &one.expected_values {
            TensorData::F64(values) => {
                let finite = |piece: &[f64]| piece.iter().fold(true, |all, x| all & x.is_finite());
                if !values.par_chunks(ELEMENTS_PER_PARALLEL_TASK).all(finite) {
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
        let sampled = one.row_indices.as_deref().unwrap_or_default();
        if let Some(row) = sampled.iter().find(|row| **row >= in_shape) {
            return Err(error(format!("row {row} of {in_shape}")));
        }
        let whole_again = one.row_indices.is_none()
            && expected.iter().filter(|other| other.output_name == one.output_name).count() > 1;
        let marks = seen.entry(&one.output_name).or_default();
        marks.resize(if sampled.is_empty() { 0 } else { in_shape }.max(marks.len()), false);
        let twice = sampled.iter().any(|row| std::mem::replace(&mut marks[*row], true));
        if whole_again || twice {
            return Err(error("a row is there twice".to_owned()));
        }
    }
    Ok(())
}

/// Returns the output that a reference describes, and fails if its shape or dtype does not match.
fn output_matching_reference<'a>(
    outputs: &'a Tensors,
    expected: &Expected,
) -> Result<&'a Tensor, OutputVerificationError> {
    let error = |problem: String| OutputVerificationError::MissingOrOfWrongShape {
        output: expected.output_name.clone(),
        reason: problem,
    };
    let output = outputs.get(&expected.output_name).ok_or_else(|| error("missing".to_owned()))?;
    if output.shape() != expected.output_shape {
        return Err(error(format!(
            "shape {:?}, expected {:?}",
            output.shape(),
            expected.output_shape
        )));
    }
    let integer = matches!(expected.expected_values, TensorData::I8(_));
    if (output.dtype() == Dtype::I8) != integer {
        return Err(error(format!(
            "{}, expected {}",
            output.dtype().dtype_name(),
            if integer { "i8" } else { "floats" }
        )));
    }
    Ok(output)
}

/// Number of elements that one parallel task compares.
const ELEMENTS_PER_PARALLEL_TASK: usize = 1 << 16;

/// Consecutive expected elements of an output, from the row-major index `first_element_index` on.
struct ConsecutiveExpectedElements<'a, T> {
    first_element_index: usize,
    expected: &'a [T],
}

/// Divides a reference for parallel tasks: at row boundaries if only some rows are sampled,
/// otherwise into pieces of equal length.
fn divide_reference_for_tasks<'a, T>(
    expected: &Expected,
    values: &'a [T],
) -> Vec<ConsecutiveExpectedElements<'a, T>> {
    match &expected.row_indices {
        None => values
            .chunks(ELEMENTS_PER_PARALLEL_TASK)
            .enumerate()
            .map(|(i, expected)| ConsecutiveExpectedElements {
                first_element_index: i * ELEMENTS_PER_PARALLEL_TASK,
                expected,
            })
            .collect(),
        Some(rows) => {
            let row_len = expected.row_elements();
            rows.iter()
                .zip(values.chunks(row_len.max(1)))
                .map(|(row, expected)| ConsecutiveExpectedElements {
                    first_element_index: row * row_len,
                    expected,
                })
                .collect()
        }
    }
}

fn compare_rows_of_one_reference(
    output: &Tensor,
    expected: &Expected,
    tolerance: Tolerance,
) -> Result<ErrorsRelativeToReference, OutputVerificationError> {
    let name = || expected.output_name.clone();
    match &expected.expected_values {
        TensorData::I8(values) => {
            let found: Vec<DifferingIntegers> = divide_reference_for_tasks(expected, values)
                .par_iter()
                .map(|piece| DifferingIntegers::count_differing_integers(output, piece))
                .collect();
            let checked = values.len() as u64;
            match found.iter().find_map(|differences| differences.first_difference) {
                None => Ok(ErrorsRelativeToReference::default()),
                Some((first, actual, wanted)) => Err(OutputVerificationError::IntegersDiffer {
                    output: name(),
                    failing_elements: found
                        .iter()
                        .map(|differences| differences.differing_elements)
                        .sum(),
                    compared_elements: checked,
                    first_failing_index: first,
                    actual,
                    expected: wanted,
                }),
            }
        }
        TensorData::F64(values) => {
            let parts: Vec<SumsAndMaximaOfErrors> = divide_reference_for_tasks(expected, values)
                .par_iter()
                .map(|piece| SumsAndMaximaOfErrors::sums_of_errors_in_piece(output, piece))
                .collect();
            // The error sums of the pieces are added in order, so that the number of threads does
            // not change any bit of the result.
            let sums = parts.into_iter().fold(
                SumsAndMaximaOfErrors::default(),
                SumsAndMaximaOfErrors::combine_with_next_piece,
            );
            let (max_error, relative_l2) = sums.max_error_and_relative_l2_error(values.len());
            // The comparison is written so that a NaN in either error fails.
            if max_error <= tolerance.max_error && relative_l2 <= tolerance.relative_l2 {
                let rounding = output.dtype().unit_roundoff();
                return Ok(ErrorsRelativeToReference {
                    max_error,
                    relative_l2,
                    rounding_error: rounding,
                });
            }
            Err(OutputVerificationError::ErrorsAboveTolerance {
                output: name(),
                max_error,
                relative_l2_error: relative_l2,
                max_error_allowed: tolerance.max_error,
                relative_l2_allowed: tolerance.relative_l2,
                index_of_largest_error: sums.index_of_largest_error,
                actual: sums.actual_at_largest_error,
                expected: sums.expected_at_largest_error,
            })
        }
        _ => unreachable!("check_reference_is_well_formed refuses other references"),
    }
}

fn check_output_is_finite(name: &str, output: &Tensor) -> Result<(), OutputVerificationError> {
    if matches!(output.tensor_data(), TensorData::I8(_)) {
        return Ok(());
    }
    let starts: Vec<usize> = (0..output.len()).step_by(ELEMENTS_PER_PARALLEL_TASK).collect();
    let found: Vec<(u64, Option<usize>)> = starts
        .par_iter()
        .map(|&from| {
            let len = ELEMENTS_PER_PARALLEL_TASK.min(output.len() - from);
            if output.are_elements_finite(from, len) {
                return (0, None);
            }
            let values = output.elements_to_f64(from, len);
            let count = values.iter().filter(|value| !value.is_finite()).count() as u64;
            (count, values.iter().position(|value| !value.is_finite()).map(|column| from + column))
        })
        .collect();
    match found.iter().find_map(|(_, first)| *first) {
        None => Ok(()),
        Some(first) => Err(OutputVerificationError::NotFinite {
            output_name: name.to_owned(),
            failing_elements: found.iter().map(|(count, _)| count).sum(),
            total_elements: output.len() as u64,
            first_failing_index: first,
        }),
    }
}

/// Checks that integers were written: integers are always finite, so only poison values show that a
/// write is missing.
fn check_integers_are_not_all_poison(
    name: &str,
    output: &Tensor,
) -> Result<(), OutputVerificationError> {
    match output.tensor_data() {
        TensorData::I8(values)
            if values.iter().all(|&value| value == i8::MIN) && !values.is_empty() =>
        {
            Err(OutputVerificationError::MissingOrOfWrongShape {
                output: name.to_owned(),
                reason: "not written".to_owned(),
            })
        }
        _ => Ok(()),
    }
}

/// The integers of an output piece that differ from their expected values: their number and the
/// first of them.
struct DifferingIntegers {
    differing_elements: u64,
    /// Row-major index, value and expected value of the first differing integer.
    first_difference: Option<(usize, f64, f64)>,
}

impl DifferingIntegers {
    fn count_differing_integers(
        output: &Tensor,
        &ConsecutiveExpectedElements { first_element_index: from, expected }: &ConsecutiveExpectedElements<
            '_,
            i8,
        >,
    ) -> DifferingIntegers {
        let TensorData::I8(values) = output.tensor_data() else {
            unreachable!("`shaped` refuses other outputs")
        };
        let values = &values[from..][..expected.len()];
        if values == expected {
            return Self { differing_elements: 0, first_difference: None };
        }
        let mut wrong = values
            .iter()
            .zip(expected)
            .enumerate()
            .filter(|(_, (actual, expected))| actual != expected)
            .map(|(i, (actual, expected))| (from + i, f64::from(*actual), f64::from(*expected)));
        let first = wrong.next();
        Self {
            differing_elements: u64::from(first.is_some()) + wrong.count() as u64,
            first_difference: first,
        }
    }
}

#[derive(Default)]
struct SumsAndMaximaOfErrors {
    sum_of_squared_errors: f64,
    sum_of_squared_references: f64,
    largest_error: f64,
    largest_reference: f64,
    index_of_largest_error: usize,
    actual_at_largest_error: f64,
    expected_at_largest_error: f64,
}

impl SumsAndMaximaOfErrors {
    fn sums_of_errors_in_piece(
        output: &Tensor,
        piece: &ConsecutiveExpectedElements<'_, f64>,
    ) -> SumsAndMaximaOfErrors {
        let mut sums = Self::default();
        output.for_each_block_as_f64(
            piece.first_element_index,
            piece.expected.len(),
            &mut |start, actual| {
                sums.add_errors_of_elements(
                    piece.first_element_index + start,
                    actual,
                    &piece.expected[start..][..actual.len()],
                );
            },
        );
        sums
    }

    /// Adds the errors of consecutive output elements, the first of which has the row-major index
    /// `from`.
    fn add_errors_of_elements(&mut self, from: usize, actual: &[f64], expected: &[f64]) {
        let (mut error_squared, mut reference_squared) =
            (self.sum_of_squared_errors, self.sum_of_squared_references);
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
            (
                self.index_of_largest_error,
                self.actual_at_largest_error,
                self.expected_at_largest_error,
            ) = (from + worst, actual[worst], expected[worst]);
        }
        (self.sum_of_squared_errors, self.sum_of_squared_references) =
            (error_squared, reference_squared);
        (self.largest_error, self.largest_reference) = (largest_error, largest_reference);
    }

    fn combine_with_next_piece(self, next: Self) -> Self {
        let (error_squared, reference_squared) = (
            self.sum_of_squared_errors + next.sum_of_squared_errors,
            self.sum_of_squared_references + next.sum_of_squared_references,
        );
        let largest_reference = self.largest_reference.max(next.largest_reference);
        let worst = if next.largest_error > self.largest_error { next } else { self };
        Self {
            sum_of_squared_errors: error_squared,
            sum_of_squared_references: reference_squared,
            largest_reference,
            ..worst
        }
    }

    /// Returns the maximum error relative to the largest reference value, and the relative L2
    /// error, of `elements` elements. If the reference is all zero, for example because terms
    /// cancel, the errors are absolute: the maximum, and the root mean square, which is independent
    /// of the number of elements.
    fn max_error_and_relative_l2_error(&self, elements: usize) -> (f64, f64) {
        let over =
            |error: f64, reference: f64| if reference > 0.0 { error / reference } else { error };
        let relative_l2 = match self.sum_of_squared_references > 0.0 {
            true => self.sum_of_squared_errors.sqrt() / self.sum_of_squared_references.sqrt(),
            false => (self.sum_of_squared_errors / elements.max(1) as f64).sqrt(),
        };
        (over(self.largest_error, self.largest_reference), relative_l2)
    }
}

#[cfg(test)]
mod tests;
