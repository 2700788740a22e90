//! Reasons why a case has no result, with conversions from errors and panics of workloads and
//! implementations.

use crate::backend::BackendError;
use crate::harness::panic_guard;
use crate::verify::OutputVerificationError;
use kernelgate_cuda::CaseFailureReason;

/// The reason why a problem or case has no result: skipped, failed, or the GPU was lost.
#[derive(Debug, Clone, PartialEq)]
pub enum WhyCaseHasNoResult {
    /// The case was skipped, because it cannot run on this machine.
    Skipped(String),
    /// The case failed with an error, or its outputs are wrong.
    Failed(CaseFailureReason),
    /// The case left the GPU unusable, so no later case can run.
    GpuLost(CaseFailureReason),
}

impl WhyCaseHasNoResult {
    /// Makes the failure of a case with this reason.
    pub fn failed_with(why: impl Into<CaseFailureReason>) -> WhyCaseHasNoResult {
        Self::Failed(why.into())
    }

    /// Returns the reason why the case has no result, as a whole sentence.
    pub fn reason_text(&self) -> &str {
        match self {
            Self::Skipped(why) => why,
            Self::Failed(why) | Self::GpuLost(why) => &why.failure_sentence,
        }
    }
}

impl From<BackendError> for WhyCaseHasNoResult {
    /// Converts an error of a case that was already verified; even an unsupported launch is then a
    /// failure instead of a skip.
    fn from(error: BackendError) -> Self {
        match error {
            BackendError::DeviceLost(_) => Self::GpuLost((&error).into()),
            other => Self::failed_with(&other),
        }
    }
}

impl From<OutputVerificationError> for WhyCaseHasNoResult {
    /// Converts an error during verification: insufficient memory and unsupported launches skip the
    /// case, wrong outputs fail it.
    fn from(error: OutputVerificationError) -> Self {
        match error {
            OutputVerificationError::Backend(
                reason @ (BackendError::OutOfMemory { .. } | BackendError::Unsupported(_)),
            ) => Self::Skipped(reason.to_string()),
            OutputVerificationError::Backend(lost @ BackendError::DeviceLost(_)) => lost.into(),
            wrong => Self::failed_with(&wrong),
        }
    }
}

/// Runs code of a workload or an implementation.
///
/// # Errors
/// Returns the error of the code; a panic becomes a failure of the case.
pub fn run_with_panics_as_case_failures<T, E: Into<WhyCaseHasNoResult>>(
    run: impl FnOnce() -> Result<T, E>,
) -> Result<T, WhyCaseHasNoResult> {
    panic_guard::catch_panic(run).map_err(WhyCaseHasNoResult::failed_with)?.map_err(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_is_a_skip_in_verification_and_a_failure_later() {
        let missing = BackendError::Unsupported("no cuDNN".to_owned());
        let reason = "no cuDNN".to_owned();
        let verifying = OutputVerificationError::Backend(missing.clone()).into();
        assert_eq!(WhyCaseHasNoResult::Skipped(reason.clone()), verifying);
        assert_eq!(
            WhyCaseHasNoResult::failed_with(CaseFailureReason::failure_with_kind_and_sentence(
                "unsupported",
                reason
            )),
            missing.into()
        );
    }

    #[test]
    fn a_lost_gpu_and_a_panic_keep_their_messages() {
        let lost = || Err::<(), _>(BackendError::DeviceLost("hung".to_owned()));
        let why =
            CaseFailureReason::failure_with_kind_and_sentence("lost", "the GPU was lost: hung");
        assert_eq!(run_with_panics_as_case_failures(lost), Err(WhyCaseHasNoResult::GpuLost(why)));
        let panics = || -> Result<(), BackendError> { panic!("index out of bounds") };
        let Err(WhyCaseHasNoResult::Failed(why)) = run_with_panics_as_case_failures(panics) else {
            panic!("not a failure")
        };
        assert_eq!(
            why,
            CaseFailureReason::failure_with_kind_and_sentence(
                "panicked",
                "panicked: index out of bounds"
            )
        );
    }
}
