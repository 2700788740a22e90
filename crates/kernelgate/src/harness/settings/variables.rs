//! Names of the environment variables that set command-line flags, in a bench executable and in the
//! program `kernelgate`.
//!
//! An empty environment variable counts as unset, because CI systems set an absent value to an
//! empty string.
#![allow(clippy::disallowed_methods, reason = "the boundary: variables are read here")]

use std::ffi::OsString;

use clap::Command;

/// Environment variables that set a command-line flag of kernelgate if the command line does not
/// contain it.
const VARIABLES_THAT_SET_FLAGS: &[&str] = &[
    "KERNELGATE_AXIS",
    "KERNELGATE_BACKEND",
    "KERNELGATE_BUDGET",
    "KERNELGATE_DELAY",
    "KERNELGATE_DEVICE",
    "KERNELGATE_DEVICES",
    "KERNELGATE_EFFORT",
    "KERNELGATE_ENERGY",
    "KERNELGATE_LAYOUT",
    "KERNELGATE_ORDER",
    "KERNELGATE_POWER",
    "KERNELGATE_PYTHON",
    "KERNELGATE_REQUEST",
    "KERNELGATE_SEED",
    "KERNELGATE_SHARD",
    "KERNELGATE_TIMEOUT",
];

/// Environment variables that correspond to no command-line flag, each with an explanation for the
/// documentation.
pub const VARIABLES_WITHOUT_FLAG_AND_THEIR_MEANINGS: &[(&str, &str)] = &[
    ("KERNELGATE_ARCH", "run as a card of that architecture, such as `sm_80`"),
    ("KERNELGATE_BISECTIONS", "number of simulated bisections in tests"),
    ("KERNELGATE_CACHE", "folder of compiled kernels; only you may write there"),
    (
        "KERNELGATE_COMMIT",
        "commit of an executable that was copied elsewhere; `HEX+changes` if tracked files differed",
    ),
    ("KERNELGATE_CUDA_LIBS", "folders with NVIDIA's libraries, searched first"),
    ("KERNELGATE_GEMMS", "GEMMs under compute-sanitizer: `seen` or `none`"),
    ("KERNELGATE_HISTORY", "folder that keeps all runs"),
    ("KERNELGATE_LINE_INFO", "compile kernels with line numbers, for profilers"),
    ("KERNELGATE_RECORD", "file for the record of a process that the program starts"),
    ("KERNELGATE_REQUIRE_GPU", "a GPU test fails where it would skip"),
    ("KERNELGATE_SESSION", "name of a session"),
    ("KERNELGATE_SHARD_COUNT", "number of parts, for `--shard auto`"),
    ("KERNELGATE_SHARD_INDEX", "part from 1, for `--shard auto`"),
    ("KERNELGATE_SIMULATIONS", "number of simulated comparisons in tests"),
    ("KERNELGATE_TERSE", "quiet output of a bench that the program starts"),
    ("KERNELGATE_UNFILLED", "leave device memory unfilled, for compute-sanitizer"),
];

/// Names of all `KERNELGATE_` environment variables that the harness reads.
pub fn kernelgate_variable_names() -> impl Iterator<Item = &'static str> {
    VARIABLES_THAT_SET_FLAGS
        .iter()
        .copied()
        .chain(VARIABLES_WITHOUT_FLAG_AND_THEIR_MEANINGS.iter().map(|(name, _)| *name))
}

/// Changes a clap command and its subcommands so that a flag ignores its environment variable if
/// the variable is empty.
pub fn ignore_empty_flag_variables(command: Command) -> Command {
    let ignoring = |arg: clap::Arg| {
        let empty = arg.get_env().and_then(std::env::var_os).is_some_and(|value| value.is_empty());
        if empty { arg.env(clap::builder::Resettable::Reset) } else { arg }
    };
    command.mut_args(ignoring).mut_subcommands(ignore_empty_flag_variables)
}

/// Turns a command-line error into an error message. If a wrong flag value came from an environment
/// variable, the error message names that variable instead of the flag.
pub fn command_line_error_naming_the_variable(
    error: &clap::Error,
    command: &Command,
    arguments: &[OsString],
) -> String {
    let mut text = error.to_string();
    let written = |flag: &str| {
        arguments.iter().any(|argument| {
            let argument = argument.to_string_lossy();
            argument == flag || argument.strip_prefix(flag).is_some_and(|it| it.starts_with('='))
        })
    };
    for (flag, variable) in flags_and_their_variables(command) {
        let named = format!("for '{flag} <");
        if let Some(start) = text.find(&named).filter(|_| !written(&flag))
            && let Some(end) = text[start + named.len()..].find('\'')
        {
            let end = start + named.len() + end + 1;
            text.replace_range(start..end, &format!("in the variable {variable}"));
        }
    }
    text
}

/// Returns each flag that an environment variable can set, with the variable's name, for a command
/// and its subcommands.
fn flags_and_their_variables(command: &Command) -> Vec<(String, String)> {
    let own = command.get_arguments().filter_map(|arg| {
        let variable = arg.get_env()?.to_string_lossy().into_owned();
        Some((format!("--{}", arg.get_long()?), variable))
    });
    own.chain(command.get_subcommands().flat_map(flags_and_their_variables)).collect()
}

/// Returns whether `RUST_BACKTRACE` is set and not 0, so that a panic shall print Rust's own
/// message.
pub fn is_rust_backtrace_enabled() -> bool {
    std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0")
}

/// Returns a warning for each set environment variable that begins with `KERNELGATE_` and that
/// kernelgate does not read.
pub fn warnings_of_unread_kernelgate_variables() -> Vec<String> {
    let set = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let mut unknown: Vec<String> = set
        .filter(|name| {
            name.starts_with("KERNELGATE_")
                && !kernelgate_variable_names().any(|known| known == name)
        })
        .collect();
    unknown.sort();
    unknown.iter().map(|name| warning_of_unread_variable(name)).collect()
}

fn warning_of_unread_variable(name: &str) -> String {
    let close = |known: &&str| strsim::normalized_damerau_levenshtein(name, known);
    // A long misspelt variable name is not compared with known names less than half as long.
    let nearest = kernelgate_variable_names()
        .filter(|known| name.len() <= 2 * known.len())
        .max_by(|a, b| close(a).total_cmp(&close(b)));
    let hint = nearest
        .filter(|known| close(known) >= 0.8)
        .map_or(String::new(), |known| format!(": did you mean {known}?"));
    format!("warning: nothing reads the variable {name}{hint}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_variable_gets_the_nearest_variable_as_suggestion() {
        for (name, wanted) in [
            ("KERNELGATE_EFORT", ": did you mean KERNELGATE_EFFORT?"),
            ("KERNELGATE_BACKENDS", ": did you mean KERNELGATE_BACKEND?"),
            ("KERNELGATE_COFFEE_MACHINE", ""),
        ] {
            let warning = warning_of_unread_variable(name);
            assert_eq!(warning, format!("warning: nothing reads the variable {name}{wanted}"));
        }
        assert!(warning_of_unread_variable(&"KERNELGATE_".repeat(10_000)).ends_with('_'));
    }
}
