//! The error with which a kernelgate verb ends if its records, or base and head, cannot be
//! compared.

use std::fmt::Display;

use kernelgate::exit::ProcessExitReason;
use kernelgate::record::text::clean_message_for_terminal;

use crate::compare::CompareError;

/// A refusal: the reason why records, or base and head, cannot be compared. The program prints a
/// refusal without the word "error" and ends with the exit code of refusals, 4.
#[derive(Debug, thiserror::Error)]
#[error("{refusal_message}")]
pub struct RefusalToCompare {
    refusal_message: String,
    /// Whether the refusal is the result of the verb, which is printed on standard output;
    /// otherwise it goes to standard error.
    prints_to_stdout: bool,
}

impl RefusalToCompare {
    /// A refusal that is the result of the verb and is printed on standard output.
    pub fn refusal_printed_on_stdout(why: impl Display) -> Self {
        Self { refusal_message: format!("refused: {why}"), prints_to_stdout: true }
    }

    /// A refusal that is printed on standard error.
    pub fn refusal_printed_on_stderr(why: impl Display) -> Self {
        Self { refusal_message: format!("refused: {why}"), prints_to_stdout: false }
    }

    /// Turns the error of a comparison into a refusal, if the sides cannot be compared, or else
    /// into an ordinary error.
    pub fn from_compare_error(error: CompareError) -> anyhow::Error {
        match error.exit_reason() {
            ProcessExitReason::ResultsNotComparable => {
                Self { refusal_message: error.to_string(), prints_to_stdout: false }.into()
            }
            _ => error.into(),
        }
    }

    /// Prints the reason.
    pub fn print_and_return_exit_reason(&self) -> ProcessExitReason {
        let text = clean_message_for_terminal(&self.refusal_message);
        match self.prints_to_stdout {
            true => println!("{text}"),
            false => eprintln!("{text}"),
        }
        ProcessExitReason::ResultsNotComparable
    }
}
