//! The error with which a kernelgate verb ends if its records, or base and head, cannot be
//! compared.

use std::fmt::Display;

use kernelgate::exit::ProcessExitReason;
use kernelgate::record::text::clean_message_for_terminal;

use crate::compare::CompareError;

/// A refusal: the reason why records, or base and head, cannot be compared. The program prints a
/// refusal without the word "error" and ends with the exit code of refusals, 4.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct RefusalToCompare {
    text: String,
    /// Whether the refusal is the result of the verb, which is printed on standard output;
    /// otherwise it goes to standard error.
    is_result: bool,
}

impl RefusalToCompare {
    /// A refusal that is the result of the verb and is printed on standard output.
    pub fn on_standard_output(why: impl Display) -> Self {
        Self { text: format!("refused: {why}"), is_result: true }
    }

    /// A refusal that is printed on standard error.
    pub fn on_standard_error(why: impl Display) -> Self {
        Self { text: format!("refused: {why}"), is_result: false }
    }

    /// Turns the error of a comparison into a refusal, if the sides cannot be compared, or else
    /// into an ordinary error.
    pub fn from_compare_error(error: CompareError) -> anyhow::Error {
        match error.exit_reason() {
            ProcessExitReason::Refused => Self { text: error.to_string(), is_result: false }.into(),
            _ => error.into(),
        }
    }

    /// Prints the reason.
    pub fn print_and_return_exit_reason(&self) -> ProcessExitReason {
        let text = clean_message_for_terminal(&self.text);
        match self.is_result {
            true => println!("{text}"),
            false => eprintln!("{text}"),
        }
        ProcessExitReason::Refused
    }
}
