//! Reasons why a case has no result; panics and errors of workloads and rows are converted into
//! them.

use crate::backend::BackendError;
use crate::harness::panic_guard;
use crate::verify::VerifyError;
use kernelgate_cuda::CaseFailure;

/// The reason why a problem or case has no result.
#[derive(Debug, Clone, PartialEq)]
pub enum CaseError {
    /// The case cannot run on this machine.
    Skip(String),
    /// The outputs are wrong, or the case failed with an error.
    Fail(CaseFailure),
    /// The case broke the device: no later case can run.
    Lost(CaseFailure),
}

impl CaseError {
    /// A case that failed.
    pub fn failed(why: impl Into<CaseFailure>) -> CaseError {
        Self::Fail(why.into())
    }

    /// The sentence.
    pub fn text(&self) -> &str {
        match self {
            Self::Skip(why) => why,
            Self::Fail(why) | Self::Lost(why) => &why.text,
        }
    }
}

impl From<BackendError> for CaseError {
    /// Converts an error of a case that passed verification before, so that it can run on this
    /// machine.
    fn from(error: BackendError) -> Self {
        match error {
            BackendError::Lost(_) => Self::Lost((&error).into()),
            other => Self::failed(&other),
        }
    }
}

impl From<VerifyError> for CaseError {
    /// Converts a wrong output, or the error of a launch that verifies.
    fn from(error: VerifyError) -> Self {
        match error {
            VerifyError::Backend(
                reason @ (BackendError::OutOfMemory { .. } | BackendError::Unsupported(_)),
            ) => Self::Skip(reason.to_string()),
            VerifyError::Backend(lost @ BackendError::Lost(_)) => lost.into(),
            wrong => Self::failed(&wrong),
        }
    }
}

/// Runs code of a workload or a row.
///
/// # Errors
/// Returns the error of the code, or turns its panic into a failure of the case.
pub fn guard_panics<T, E: Into<CaseError>>(
    run: impl FnOnce() -> Result<T, E>,
) -> Result<T, CaseError> {
    panic_guard::catch_panic(run).map_err(CaseError::failed)?.map_err(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unsupported_row_is_skipped_during_verification_and_fails_afterwards() {
        let missing = BackendError::Unsupported("no cuDNN".to_owned());
        let reason = "no cuDNN".to_owned();
        let verifying = VerifyError::Backend(missing.clone()).into();
        assert_eq!(CaseError::Skip(reason.clone()), verifying);
        assert_eq!(CaseError::failed(CaseFailure::new("unsupported", reason)), missing.into());
    }

    #[test]
    fn a_lost_device_and_a_panic_keep_their_messages() {
        let lost = || Err::<(), _>(BackendError::Lost("hung".to_owned()));
        let why = CaseFailure::new("lost", "the GPU was lost: hung");
        assert_eq!(guard_panics(lost), Err(CaseError::Lost(why)));
        let panics = || -> Result<(), BackendError> { panic!("index out of bounds") };
        let Err(CaseError::Fail(why)) = guard_panics(panics) else { panic!("not a failure") };
        assert_eq!(why, CaseFailure::new("panicked", "panicked: index out of bounds"));
    }
}
