//! What verification gives, also where it does not come to its end.

use kernelgate::protocol::VerifiedCase;

/// What was verified, and what went wrong besides: the one is shown whatever the other is.
pub struct Verified {
    /// The cases.
    pub rows: Vec<VerifiedCase>,
    /// A bench that broke after others had answered, or a record that cannot be written.
    pub broken: Option<anyhow::Error>,
}

impl Verified {
    /// An error alone where nothing was verified.
    pub fn of(rows: Vec<VerifiedCase>, asked: anyhow::Result<()>) -> anyhow::Result<Self> {
        match asked {
            Err(error) if rows.is_empty() => Err(error),
            asked => Ok(Self { rows, broken: asked.err() }),
        }
    }
}
