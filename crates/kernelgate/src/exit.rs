//! Exit codes, the same everywhere.

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Exit {
    /// Nothing wrong.
    Fine = 0,
    /// A case got slower, or failed verification.
    Regression = 1,
    /// Bad usage or broken input.
    Usage = 2,
    /// The measurement cannot decide.
    Inconclusive = 3,
    /// The results are not comparable.
    Refused = 4,
}

impl Exit {
    /// Ended by Ctrl-C or a termination signal: what shells report for SIGINT.
    pub const INTERRUPTED: i32 = 130;
    /// Broken pipe: what shells report for SIGPIPE.
    pub const BROKEN_PIPE: i32 = 141;
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}
