//! The environment variables that stand for flags, for the bench binary and the program.
//!
//! An empty variable counts as none: that is how CI systems pass on what was not given.
#![allow(clippy::disallowed_methods, reason = "the boundary: variables are read here")]

use std::ffi::OsString;

use clap::Command;

/// Every variable that something here reads.
const KNOWN: &[&str] = &[
    "KERNELGATE_ARCH",
    "KERNELGATE_AXIS",
    "KERNELGATE_BACKEND",
    "KERNELGATE_BISECTIONS",
    "KERNELGATE_BUDGET",
    "KERNELGATE_CACHE",
    "KERNELGATE_COMMIT",
    "KERNELGATE_CUDA_LIBS",
    "KERNELGATE_DELAY",
    "KERNELGATE_DEVICE",
    "KERNELGATE_EFFORT",
    "KERNELGATE_GEMMS",
    "KERNELGATE_HISTORY",
    "KERNELGATE_LAYOUT",
    "KERNELGATE_LINE_INFO",
    "KERNELGATE_ENERGY",
    "KERNELGATE_ORDER",
    "KERNELGATE_POWER",
    "KERNELGATE_PYTHON",
    "KERNELGATE_RECORD",
    "KERNELGATE_REQUEST",
    "KERNELGATE_REQUIRE_GPU",
    "KERNELGATE_SEED",
    "KERNELGATE_SESSION",
    "KERNELGATE_SHARD",
    "KERNELGATE_SHARD_COUNT",
    "KERNELGATE_SHARD_INDEX",
    "KERNELGATE_SIMULATIONS",
    "KERNELGATE_TERSE",
    "KERNELGATE_TIMEOUT",
    "KERNELGATE_UNFILLED",
];

/// Every variable that something here reads.
pub const fn names() -> &'static [&'static str] {
    KNOWN
}

/// A command line whose flags ignore empty variables, subcommands included.
pub fn without_empty(command: Command) -> Command {
    let ignoring = |arg: clap::Arg| {
        let empty = arg.get_env().and_then(std::env::var_os).is_some_and(|value| value.is_empty());
        if empty { arg.env(clap::builder::Resettable::Reset) } else { arg }
    };
    command.mut_args(ignoring).mut_subcommands(without_empty)
}

/// Explains a command-line error. If the value came from a variable, the message names that
/// variable, because nobody wrote the flag.
pub fn explain(error: &clap::Error, command: &Command, arguments: &[OsString]) -> String {
    let mut text = error.to_string();
    let written = |flag: &str| {
        arguments.iter().any(|argument| {
            let argument = argument.to_string_lossy();
            argument == flag || argument.strip_prefix(flag).is_some_and(|it| it.starts_with('='))
        })
    };
    for (flag, variable) in flags_with_variables(command) {
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

/// Flags that have a variable, with it.
fn flags_with_variables(command: &Command) -> Vec<(String, String)> {
    let own = command.get_arguments().filter_map(|arg| {
        let variable = arg.get_env()?.to_string_lossy().into_owned();
        Some((format!("--{}", arg.get_long()?), variable))
    });
    own.chain(command.get_subcommands().flat_map(flags_with_variables)).collect()
}

/// Whether a panic prints its own message, as the user asked.
pub fn has_backtrace() -> bool {
    std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0")
}

/// A warning for each variable that looks like ours and that nothing reads.
pub fn warnings() -> Vec<String> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let mut unknown: Vec<String> = names
        .filter(|name| name.starts_with("KERNELGATE_") && !KNOWN.contains(&name.as_str()))
        .collect();
    unknown.sort();
    unknown.iter().map(|name| unknown_variable(name)).collect()
}

fn unknown_variable(name: &str) -> String {
    let close = |known: &&str| strsim::normalized_damerau_levenshtein(name, known);
    // A name may be of any length.
    let nearest = KNOWN
        .iter()
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
    fn a_mistyped_variable_gets_the_nearest_name() {
        for (name, wanted) in [
            ("KERNELGATE_EFORT", ": did you mean KERNELGATE_EFFORT?"),
            ("KERNELGATE_BACKENDS", ": did you mean KERNELGATE_BACKEND?"),
            ("KERNELGATE_COFFEE_MACHINE", ""),
        ] {
            let warning = unknown_variable(name);
            assert_eq!(warning, format!("warning: nothing reads the variable {name}{wanted}"));
        }
        assert!(unknown_variable(&"KERNELGATE_".repeat(10_000)).ends_with('_'));
    }
}
