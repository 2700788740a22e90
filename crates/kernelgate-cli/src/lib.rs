//! The program `kernelgate`: it decides whether kernels got slower, and runs the bench executables
//! that measure them.
//!
//! - [`gate`] judges runs against a baseline, two builds, calibrations and compiled kernels.
//! - [`report`] writes verdicts as text, Markdown, JUnit XML and metrics.
//! - [`benches`] finds and builds bench executables, and sends requests to them.
//! - [`commands`] prints the external commands that the program runs, for `--verbose`.
//! - [`compare`] builds base and head, and runs their processes in alternation.
//! - [`fleet`] merges shard records, and writes jobs for cluster schedulers.
//! - [`bisect`] finds the first commit at which a case is slower.
//! - [`history`] stores runs by commit, and finds the commits at which a case's time changed.
//! - [`plot`] lays out charts and draws them as SVG and PNG.
//! - [`pages`] makes HTML pages of measurements, verdicts and traces.
//! - [`verbs`] defines the command line, with one file for each subcommand.
//!
//! Bench executables link the crate `kernelgate`, which measures; this crate `kernelgate_cli` links
//! it for the record formats. The program is a library so that the executables `kernelgate` and
//! `cargo-kernelgate` share one `main`, and tests reach its modules.

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
use kernelgate::exit::ProcessExitReason;
use kernelgate::harness::{panic_guard, variables};
use kernelgate::protocol;
use kernelgate::record::text::clean_message_for_terminal;

use crate::verbs::RefusalToCompare;

#[expect(clippy::disallowed_methods, reason = "the boundary: the question of a bench's parent")]
/// Runs the program kernelgate with these command-line arguments, the first of which is the
/// program's own name, and returns its exit code.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    if std::env::var_os(protocol::REQUEST_PATH_VARIABLE)
        .is_some_and(|value| value == protocol::PROTOCOL_VERSION_QUESTION)
    {
        // The program kernelgate may lie in a folder of bench executables and contains their marks,
        // so it answers the version query to identify itself.
        println!("{}", benches::KERNELGATE_PROGRAM_VERSION_ANSWER);
        return ProcessExitReason::Success.into();
    }
    panic_guard::install_hook_that_stores_panic_messages(variables::is_rust_backtrace_enabled());
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let command = || variables::ignore_empty_flag_variables(verbs::command_line_definition());
    let parsed = command()
        .try_get_matches_from(&arguments)
        .and_then(|matches| verbs::KernelgateCommandLine::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            eprint!(
                "{}",
                clean_message_for_terminal(&variables::command_line_error_naming_the_variable(
                    &error,
                    &command(),
                    &arguments
                ))
            );
            return ProcessExitReason::InvalidUsageOrInput.into();
        }
        Err(help) => help.exit(),
    };
    variables::warnings_of_unread_kernelgate_variables()
        .iter()
        .for_each(|warning| eprintln!("{}", clean_message_for_terminal(warning)));
    match panic_guard::catch_panic(|| cli.run_verb())
        .unwrap_or_else(|panic| Err(anyhow::anyhow!("internal error, please report it: {panic}")))
    {
        Ok(exit) => exit.into(),
        Err(error) => match error.downcast_ref::<RefusalToCompare>() {
            Some(refusal) => refusal.print_and_return_exit_reason().into(),
            None => {
                eprintln!("error: {}", clean_message_for_terminal(&error_text_with_causes(&error)));
                ProcessExitReason::InvalidUsageOrInput.into()
            }
        },
    }
}

/// Formats an error and its causes on one line; a cause that the text already contains is not
/// repeated.
fn error_text_with_causes(error: &anyhow::Error) -> String {
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
        assert_eq!(super::error_text_with_causes(&error), "merge: failed to read a.json: broken");
    }
}
