//! `cargo kernelgate VERB`: cargo passes its subcommand's own name as the first argument.

#![allow(clippy::disallowed_methods, reason = "the boundary: arguments")]

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments: Vec<_> = std::env::args_os().collect();
    if arguments.get(1).is_some_and(|argument| argument == "kernelgate") {
        arguments.remove(1);
    }
    kernelgate_cli::main(arguments)
}
