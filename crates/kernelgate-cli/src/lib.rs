//! The program `kernelgate`: it decides whether kernels got slower, and runs the bench executables
//! that measure them.
//!
//! - [`gate`]: judgement. Runs against a baseline, two builds by interleaved processes,
//!   calibrations, compiled kernels.
//! - [`report`]: verdicts as text, Markdown, JUnit XML and metrics.
//! - [`benches`]: finds, builds and asks bench executables.
//! - [`commands`]: prints the commands that the program runs, for `--verbose`.
//! - [`compare`]: prepares two builds and interleaves their processes.
//! - [`fleet`]: merges shards, and makes jobs for schedulers.
//! - [`bisect`]: finds the first slower commit.
//! - [`history`]: every run that was kept, by commit, and where a case's level changed.
//! - [`plot`]: charts as data, drawn as SVG and PNG.
//! - [`pages`]: HTML pages of measurements, verdicts and traces.
//! - [`verbs`]: the command line, with one file for each verb.
//!
//! The crate `kernelgate` measures, and bench executables link it; this crate links it for the
//! record formats. A library beside the program so that both of its names share one `main` and its
//! tests reach the parts.

#![allow(
    missing_docs,
    reason = "nobody links this library; a name that says it all has no comment"
)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "variables of tests"))]

pub mod benches;
pub mod bisect;
pub mod commands;
pub mod compare;
pub mod fleet;
pub mod gate;
pub mod history;
pub mod pages;
pub mod plot;
pub mod report;
pub mod verbs;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::FromArgMatches as _;
use kernelgate::exit::ExitReason;
use kernelgate::harness::{panic_guard, variables};
use kernelgate::protocol;
use kernelgate::record::text::printable_on_terminal;

use crate::verbs::Refusal;

#[expect(clippy::disallowed_methods, reason = "the boundary: the question of a bench's parent")]
/// Runs the program with these arguments, the first of which is the program's own name.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    if std::env::var_os(protocol::REQUEST_VARIABLE)
        .is_some_and(|value| value == protocol::VERSION_QUESTION)
    {
        // The program lies beside bench executables, and contains the marks by which these are
        // found.
        println!("{}", benches::PROGRAM_MARK);
        return ExitReason::Fine.into();
    }
    panic_guard::keep_panic_messages(variables::wants_backtrace());
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let command = || variables::ignore_empty_variables(verbs::command());
    let parsed = command()
        .try_get_matches_from(&arguments)
        .and_then(|matches| verbs::CliArguments::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            eprint!(
                "{}",
                printable_on_terminal(&variables::explain_command_line_error(
                    &error,
                    &command(),
                    &arguments
                ))
            );
            return ExitReason::Usage.into();
        }
        Err(help) => help.exit(),
    };
    variables::unread_variable_warnings()
        .iter()
        .for_each(|warning| eprintln!("{}", printable_on_terminal(warning)));
    match panic_guard::catch_panic(|| cli.run())
        .unwrap_or_else(|panic| Err(anyhow::anyhow!("internal error, please report it: {panic}")))
    {
        Ok(exit) => exit.into(),
        Err(error) => match error.downcast_ref::<Refusal>() {
            Some(refusal) => refusal.print().into(),
            None => {
                eprintln!("error: {}", printable_on_terminal(&error_with_causes(&error)));
                ExitReason::Usage.into()
            }
        },
    }
}

/// An error with its causes, each once, because some errors quote their cause.
fn error_with_causes(error: &anyhow::Error) -> String {
    let causes = error.chain().map(ToString::to_string);
    causes.fold(String::new(), |text, cause| match text.contains(&cause) {
        true => text,
        false if text.is_empty() => cause,
        false => format!("{text}: {cause}"),
    })
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    #[test]
    fn an_error_message_names_each_cause_once() {
        let error = anyhow!("read a.json: broken").context("failed to read a.json: broken");
        let error = error.context("merge");
        assert_eq!(super::error_with_causes(&error), "merge: failed to read a.json: broken");
    }
}
