//! The result of a verification of cases, which may have ended early.

use kernelgate::protocol::CaseVerificationResponse;

/// The verified cases, and the error that ended the verification early, if any; the cases are
/// printed even with an error.
pub struct PartialVerification {
    pub rows: Vec<CaseVerificationResponse>,
    /// Error that ended the verification early: a bench broke after other benches had answered, or
    /// a record file cannot be written.
    pub error_that_ended_early: Option<anyhow::Error>,
}

impl PartialVerification {
    /// Returns the verified cases together with the error, or only the error if no case was
    /// verified.
    pub fn from_rows_and_outcome(
        rows: Vec<CaseVerificationResponse>,
        outcome: anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        match outcome {
            Err(error) if rows.is_empty() => Err(error),
            outcome => Ok(Self { rows, error_that_ended_early: outcome.err() }),
        }
    }
}
