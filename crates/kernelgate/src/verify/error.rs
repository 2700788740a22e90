//! Defines the reasons why a case fails verification and is not timed.

use kernelgate_cuda::CaseFailureReason;
use serde::{Serialize, Serializer};

use crate::backend::BackendError;
use crate::backend::failure_facts::case_failure_with_error_fields;
use crate::workload::Dtype;

/// The reason why the outputs of a case are wrong or could not be verified.
#[derive(Debug, Clone, PartialEq, Serialize, thiserror::Error)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum OutputVerificationError {
    /// The output contains elements that are NaN or infinite, or that were not written and still
    /// contain poison.
    #[error(
        "output `{output_name}`: {failing_elements} of {total_elements} elements are not finite, first at {first_failing_index}: not \
         written, or overflowed"
    )]
    NotFinite {
        /// Name of the output that failed verification.
        #[serde(rename = "output")]
        output_name: String,
        /// Number of elements that fail.
        #[serde(rename = "count")]
        failing_elements: u64,
        /// Total number of elements.
        #[serde(rename = "total")]
        total_elements: u64,
        /// Row-major index of the first output element that fails.
        #[serde(rename = "first")]
        first_failing_index: usize,
    },
    /// An output differs from the reference by more than the tolerance allows.
    #[error(
        "output `{output}`: max error {max_error:.2e} (allowed {max_error_allowed:e}), \
         relative L2 {relative_l2_error:.2e} (allowed {relative_l2_allowed:e}); \
         worst at {index_of_largest_error}: {actual} against {expected}"
    )]
    #[serde(rename = "too_far")]
    ErrorsAboveTolerance {
        /// Name of the output that failed verification.
        output: String,
        /// Largest absolute error of the output, |out - ref|, divided by its largest |ref|.
        max_error: f64,
        /// Relative L2 error of the output, ‖out - ref‖₂ / ‖ref‖₂.
        #[serde(rename = "relative_l2")]
        relative_l2_error: f64,
        /// Allowed largest error.
        max_error_allowed: f64,
        /// Allowed relative L2 error.
        relative_l2_allowed: f64,
        /// Row-major index of the output element with the largest error.
        #[serde(rename = "worst")]
        index_of_largest_error: usize,
        /// Value of the element with the largest error.
        actual: f64,
        /// Value of the element in the reference.
        expected: f64,
    },
    /// The output's errors are within the tolerance, but so large that the computation used a lower
    /// precision than the problem declares.
    #[error(
        "output `{output}`: relative L2 {relative_l2:.2e} (the declared {} allows {relative_l2_allowed:.1e}: a \
         quarter of what rounding the inputs to {significant_bits} significant bits costs): it computes in a \
         lower precision than {}",
        declared.dtype_name(), declared.dtype_name()
    )]
    #[serde(rename = "precision")]
    LowerPrecisionThanDeclared {
        /// Name of the output that failed verification.
        output: String,
        /// ‖out - ref‖₂ / ‖ref‖₂ of the output.
        relative_l2: f64,
        /// Allowed relative L2 error.
        relative_l2_allowed: f64,
        /// Precision that the problem declares.
        #[serde(serialize_with = "serialize_dtype_name")]
        declared: Dtype,
        /// Significant bits of the format with the next lower precision.
        #[serde(rename = "bits")]
        significant_bits: u32,
    },
    /// Integer elements of an output differ from the reference.
    #[error(
        "output `{output}`: {failing_elements} of {compared_elements} elements differ, first at {first_failing_index}: {actual} \
         against {expected}"
    )]
    #[serde(rename = "differs")]
    IntegersDiffer {
        /// Name of the output that failed verification.
        output: String,
        /// Number of elements that fail.
        #[serde(rename = "count")]
        failing_elements: u64,
        /// Number of compared elements.
        #[serde(rename = "checked")]
        compared_elements: u64,
        /// Row-major index of the first output element that fails.
        #[serde(rename = "first")]
        first_failing_index: usize,
        /// Value of the first element that differs.
        actual: f64,
        /// Value of the element in the reference.
        expected: f64,
    },
    /// An output is missing, or its shape or dtype differs from the reference.
    #[error("output `{output}`: {reason}")]
    #[serde(rename = "shape")]
    MissingOrOfWrongShape {
        /// Name of the output that failed verification.
        output: String,
        /// Reason as a fragment of a sentence.
        #[serde(skip)]
        reason: String,
    },
    /// The workload's reference is malformed: its values do not match its shape or rows, or are not
    /// finite.
    #[error("reference of output `{output}`: {reason}")]
    #[serde(rename = "reference")]
    MalformedReference {
        /// Name of the output that failed verification.
        output: String,
        /// Reason as a fragment of a sentence.
        #[serde(skip)]
        reason: String,
    },
    /// The outputs differ from those of the base build, with which they were compared because the
    /// case has no reference.
    #[error("against the outputs of the base's build: {0}")]
    #[serde(skip)]
    #[serde(rename = "unlike_base")]
    DiffersFromBaseBuild(Box<OutputVerificationError>),
    /// The reference contains no elements, so nothing was compared.
    #[error("the reference holds no element: nothing was compared")]
    #[serde(rename = "nothing_compared")]
    NothingCompared,
    /// The implementation failed before its outputs could be compared.
    #[error(transparent)]
    #[serde(skip)]
    Backend(#[from] BackendError),
}

impl From<&OutputVerificationError> for CaseFailureReason {
    fn from(error: &OutputVerificationError) -> Self {
        match error {
            OutputVerificationError::DiffersFromBaseBuild(inner) => {
                Self::from(&**inner).with_failure_sentence(error.to_string())
            }
            OutputVerificationError::Backend(inner) => inner.into(),
            _ => case_failure_with_error_fields(error),
        }
    }
}

fn serialize_dtype_name<S: Serializer>(dtype: &Dtype, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(dtype.dtype_name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_output_is_recorded_as_reason_with_its_fields() {
        let precision = OutputVerificationError::LowerPrecisionThanDeclared {
            output: "out".to_owned(),
            relative_l2: 0.5,
            relative_l2_allowed: 0.25,
            declared: Dtype::F32,
            significant_bits: 11,
        };
        let error = OutputVerificationError::DiffersFromBaseBuild(Box::new(precision));
        let failure = CaseFailureReason::from(&error);
        assert_eq!(failure.failure_kind, "precision");
        let names = [("declared", "f32"), ("output", "out")];
        assert_eq!(
            failure.names_in_failure_sentence,
            names.map(|(name, it)| (name.to_owned(), it.to_owned())).into()
        );
        let numbers = [("bits", 11.0), ("relative_l2", 0.5), ("relative_l2_allowed", 0.25)];
        assert_eq!(
            failure.numbers_in_failure_sentence,
            numbers.map(|(name, it)| (name.to_owned(), it)).into()
        );
        assert_eq!(failure.failure_sentence, error.to_string());
        assert_eq!(
            CaseFailureReason::from(&OutputVerificationError::NothingCompared).failure_kind,
            "nothing_compared"
        );
        let problem = "not written".to_owned();
        let shape = CaseFailureReason::from(&OutputVerificationError::MissingOrOfWrongShape {
            output: "out".to_owned(),
            reason: problem,
        });
        assert_eq!(
            (shape.failure_kind.as_str(), shape.names_in_failure_sentence.len()),
            ("shape", 1)
        );
    }
}
