//! Exit codes of the program and of bench executables.

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum ExitReason {
    /// The command succeeded, and no case got slower.
    Fine = 0,
    /// A case got slower, or failed verification.
    Regression = 1,
    /// Exit code 2: wrong usage or broken input.
    Usage = 2,
    /// The measurement cannot decide.
    Inconclusive = 3,
    /// Exit code 4: the results are not comparable.
    Refused = 4,
}

impl ExitReason {
    /// All exits, in the order of their codes.
    pub const ALL: [Self; 5] =
        [Self::Fine, Self::Regression, Self::Usage, Self::Inconclusive, Self::Refused];

    /// Meaning of the code, for the help and the reference.
    pub const fn exit_code_meaning(self) -> &'static str {
        match self {
            Self::Fine => "fine",
            Self::Regression => "regression or failed verification",
            Self::Usage => "usage or broken input",
            Self::Inconclusive => "inconclusive",
            Self::Refused => "refused (not comparable)",
        }
    }

    /// Ended by Ctrl-C or a termination signal: what shells report for SIGINT.
    pub const INTERRUPTED_EXIT_CODE: i32 = 130;
    /// Exit code that shells report for a broken pipe (SIGPIPE).
    pub const BROKEN_PIPE_EXIT_CODE: i32 = 141;

    /// The exit that a code stands for; absent for the code of a signal or of another program.
    pub const fn from_code(code: i32) -> Option<ExitReason> {
        match code {
            0 => Some(Self::Fine),
            1 => Some(Self::Regression),
            2 => Some(Self::Usage),
            3 => Some(Self::Inconclusive),
            4 => Some(Self::Refused),
            _ => None,
        }
    }

    /// The more severe of two exit codes. With broken input nothing was judged, so it comes first;
    /// a refusal comes before a regression, which may be one of another definition.
    pub fn more_severe(self, other: Self) -> Self {
        let worst = [Self::Usage, Self::Refused, Self::Regression, Self::Inconclusive];
        let either = |exit: &Self| *exit == self || *exit == other;
        worst.into_iter().find(either).unwrap_or(Self::Fine)
    }
}

impl From<ExitReason> for std::process::ExitCode {
    fn from(exit: ExitReason) -> Self {
        Self::from(exit as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::ExitReason;

    #[test]
    fn the_worse_exit_of_two_parts_counts() {
        use ExitReason::{Fine, Inconclusive, Refused, Regression, Usage};
        let ascending = [Fine, Inconclusive, Regression, Refused, Usage];
        for (i, one) in ascending.into_iter().enumerate() {
            for (j, two) in ascending.into_iter().enumerate() {
                assert_eq!(one.more_severe(two), ascending[i.max(j)]);
            }
        }
    }
}
