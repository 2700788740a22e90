//! The result of a verification, which may be incomplete.

use kernelgate::protocol::VerifiedCase;

/// Verified cases, and the error that ended the verification early: the cases are shown in any
/// case.
pub struct VerifiedCases {
    pub rows: Vec<VerifiedCase>,
    /// A bench that broke after others had answered, or a record that cannot be written.
    pub broken: Option<anyhow::Error>,
}

impl VerifiedCases {
    /// The cases with an error, or the error alone if nothing was verified.
    pub fn new(rows: Vec<VerifiedCase>, outcome: anyhow::Result<()>) -> anyhow::Result<Self> {
        match outcome {
            Err(error) if rows.is_empty() => Err(error),
            outcome => Ok(Self { rows, broken: outcome.err() }),
        }
    }
}
