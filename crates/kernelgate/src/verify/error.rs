//! Reasons why a case fails verification and gets no time.

use crate::backend::BackendError;
use crate::workload::{Dtype, Tolerance};
use kernelgate_cuda::CaseFailure;

/// The reason why a case is wrong.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum VerifyError {
    /// Elements that are NaN or infinite (or still poisoned).
    #[error(
        "output `{output}`: {count} of {total} elements are not finite, first at {first}: not \
         written, or overflowed"
    )]
    NotFinite {
        /// The output.
        output: String,
        /// How many.
        count: u64,
        /// Total number of elements.
        total: u64,
        /// Row-major index of the first element that is wrong.
        first: usize,
    },
    /// An output differs from the reference by more than the tolerance.
    #[error(
        "output `{output}`: max error {max_error:.2e} (allowed {:.0e}), \
         relative L2 {relative_l2:.2e} (allowed {:.0e}); \
         worst at {worst}: {actual} against {expected}",
        tolerance.max_error, tolerance.relative_l2
    )]
    TooFar {
        /// The output.
        output: String,
        /// Largest |out - ref| over the largest |ref| of the output.
        max_error: f64,
        /// Relative L2 error Relative L2 error ‖out - ref‖₂ / ‖ref‖₂ of the output.
        relative_l2: f64,
        /// Allowed errors.
        tolerance: Tolerance,
        /// Row-major index of the output element with the largest error.
        worst: usize,
        /// Value of the element with the largest error.
        actual: f64,
        /// The reference.
        expected: f64,
    },
    /// The output's errors are within the tolerance, but about as large as those of a lower
    /// precision than the declared one.
    #[error(
        "output `{output}`: relative L2 {relative_l2:.2e} (the declared {} allows {allowed:.1e}: a \
         quarter of what rounding the inputs to {bits} significant bits costs): it computes in a \
         lower precision than {}",
        declared.name(), declared.name()
    )]
    Precision {
        /// The output.
        output: String,
        /// ‖out - ref‖₂ / ‖ref‖₂ of the output.
        relative_l2: f64,
        /// Allowed error.
        allowed: f64,
        /// The declared precision.
        declared: Dtype,
        /// Significant bits of the next lower precision.
        bits: u32,
    },
    /// Integers that differ.
    #[error(
        "output `{output}`: {count} of {checked} elements differ, first at {first}: {actual} \
         against {expected}"
    )]
    Differs {
        /// The output.
        output: String,
        /// How many.
        count: u64,
        /// Number of compared elements.
        checked: u64,
        /// Row-major index of the first element that is not finite.
        first: usize,
        /// Value of the first wrong element.
        actual: f64,
        /// The reference.
        expected: f64,
    },
    /// The shape of an output differs from the workload's definition.
    #[error("output `{output}`: {problem}")]
    Shape {
        /// The output.
        output: String,
        /// Reason, as a fragment.
        problem: String,
    },
    /// The workload's reference contradicts its own shape.
    #[error("reference of output `{output}`: {problem}")]
    Reference {
        /// The output.
        output: String,
        /// Reason, as a fragment.
        problem: String,
    },
    /// The outputs differ from those of the base build, and there is no reference to compare with.
    #[error("against the outputs of the base's build: {0}")]
    UnlikeBase(Box<VerifyError>),
    /// The reference has no elements, so nothing would be verified.
    #[error("the reference holds no element: nothing was compared")]
    Nothing,
    /// The implementation failed before its outputs could be compared.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

impl From<&VerifyError> for CaseFailure {
    fn from(error: &VerifyError) -> Self {
        let failure = |kind: &str, output: &str| Self::new(kind, error).with_name("output", output);
        match error {
            VerifyError::NotFinite { output, count, total, first } => failure("not_finite", output)
                .with_count("count", *count)
                .with_count("total", *total)
                .with_count("first", *first),
            VerifyError::TooFar {
                output,
                max_error,
                relative_l2,
                tolerance,
                worst,
                actual,
                expected,
            } => failure("too_far", output)
                .with_number("max_error", *max_error)
                .with_number("max_error_allowed", tolerance.max_error)
                .with_number("relative_l2", *relative_l2)
                .with_number("relative_l2_allowed", tolerance.relative_l2)
                .with_count("worst", *worst)
                .with_number("actual", *actual)
                .with_number("expected", *expected),
            VerifyError::Precision { output, relative_l2, allowed, declared, bits } => {
                failure("precision", output)
                    .with_number("relative_l2", *relative_l2)
                    .with_number("relative_l2_allowed", *allowed)
                    .with_name("declared", declared.name())
                    .with_count("bits", *bits)
            }
            VerifyError::Differs { output, count, checked, first, actual, expected } => {
                failure("differs", output)
                    .with_count("count", *count)
                    .with_count("checked", *checked)
                    .with_count("first", *first)
                    .with_number("actual", *actual)
                    .with_number("expected", *expected)
            }
            VerifyError::Shape { output, .. } => failure("shape", output),
            VerifyError::Reference { output, .. } => failure("reference", output),
            VerifyError::UnlikeBase(inner) => Self::from(&**inner).with_text(error.to_string()),
            VerifyError::Nothing => Self::new("nothing_compared", error),
            VerifyError::Backend(inner) => inner.into(),
        }
    }
}
