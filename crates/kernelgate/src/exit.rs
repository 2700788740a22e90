//! Exit codes of the program `kernelgate` and of bench executables.

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum ProcessExitReason {
    /// Exit code 0: the command succeeded, and no case became slower.
    Success = 0,
    /// Exit code 1: a case became slower, or failed verification.
    Regression = 1,
    /// Exit code 2: wrong usage or invalid input.
    InvalidUsageOrInput = 2,
    /// Exit code 3: the measurement cannot decide whether a case became slower.
    Inconclusive = 3,
    /// Exit code 4: the results are not comparable.
    ResultsNotComparable = 4,
}

impl ProcessExitReason {
    /// All exit reasons, in the order of their exit codes.
    pub const ALL_EXIT_REASONS: [Self; 5] = [
        Self::Success,
        Self::Regression,
        Self::InvalidUsageOrInput,
        Self::Inconclusive,
        Self::ResultsNotComparable,
    ];

    /// Meaning of the exit code in words, for help texts and the reference.
    pub const fn exit_code_meaning(self) -> &'static str {
        match self {
            Self::Success => "fine",
            Self::Regression => "regression or failed verification",
            Self::InvalidUsageOrInput => "usage or broken input",
            Self::Inconclusive => "inconclusive",
            Self::ResultsNotComparable => "refused (not comparable)",
        }
    }

    /// Exit code after Ctrl-C or a termination signal, as shells report SIGINT.
    pub const INTERRUPTED_EXIT_CODE: i32 = 130;
    /// Exit code after writing to a closed pipe, as shells report SIGPIPE.
    pub const BROKEN_PIPE_EXIT_CODE: i32 = 141;

    /// The exit reason for an exit code; `None` for codes of signals and of other programs.
    pub const fn from_exit_code(code: i32) -> Option<ProcessExitReason> {
        match code {
            0 => Some(Self::Success),
            1 => Some(Self::Regression),
            2 => Some(Self::InvalidUsageOrInput),
            3 => Some(Self::Inconclusive),
            4 => Some(Self::ResultsNotComparable),
            _ => None,
        }
    }

    /// Returns the more severe of two exit reasons. Invalid input is the most severe, because
    /// nothing was judged; a refused comparison is more severe than a regression, which may compare
    /// different definitions.
    pub fn more_severe(self, other: Self) -> Self {
        let worst = [
            Self::InvalidUsageOrInput,
            Self::ResultsNotComparable,
            Self::Regression,
            Self::Inconclusive,
        ];
        let either = |exit: &Self| *exit == self || *exit == other;
        worst.into_iter().find(either).unwrap_or(Self::Success)
    }
}

impl From<ProcessExitReason> for std::process::ExitCode {
    fn from(exit: ProcessExitReason) -> Self {
        Self::from(exit as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::ProcessExitReason;

    #[test]
    fn the_more_severe_exit_reason_wins() {
        use ProcessExitReason::{
            Inconclusive, InvalidUsageOrInput, Regression, ResultsNotComparable, Success,
        };
        let ascending =
            [Success, Inconclusive, Regression, ResultsNotComparable, InvalidUsageOrInput];
        for (i, one) in ascending.into_iter().enumerate() {
            for (j, two) in ascending.into_iter().enumerate() {
                assert_eq!(one.more_severe(two), ascending[i.max(j)]);
            }
        }
    }
}
