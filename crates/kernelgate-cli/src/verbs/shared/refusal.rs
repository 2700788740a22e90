//! The end of a verb that gives no result because its records or sides do not belong together.

use std::fmt::Display;

use kernelgate::exit::ExitReason;
use kernelgate::record::text::printable_on_terminal;

use crate::compare::CompareError;

/// The reason for a refusal. The program prints it in place of an error and ends with the exit
/// code of refusals.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct Refusal {
    text: String,
    /// Whether it is the verb's result, which goes to standard output.
    is_result: bool,
}

impl Refusal {
    /// A refusal that is the verb's result.
    pub fn result(why: impl Display) -> Self {
        Self { text: format!("refused: {why}"), is_result: true }
    }

    /// A refusal on standard error.
    pub fn message(why: impl Display) -> Self {
        Self { text: format!("refused: {why}"), is_result: false }
    }

    /// The error of a comparison, which may be a refusal.
    pub fn or_error(error: CompareError) -> anyhow::Error {
        match error.exit() {
            ExitReason::Refused => Self { text: error.to_string(), is_result: false }.into(),
            _ => error.into(),
        }
    }

    /// Prints the reason.
    pub fn print(&self) -> ExitReason {
        let text = printable_on_terminal(&self.text);
        match self.is_result {
            true => println!("{text}"),
            false => eprintln!("{text}"),
        }
        ExitReason::Refused
    }
}
