//! Entry point of the Cargo subcommand `cargo kernelgate VERB`: it drops the first argument
//! `kernelgate`, which cargo adds, and runs the program kernelgate.

#![allow(clippy::disallowed_methods, reason = "the boundary: arguments")]

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments: Vec<_> = std::env::args_os().collect();
    if arguments.get(1).is_some_and(|argument| argument == "kernelgate") {
        arguments.remove(1);
    }
    kernelgate_cli::main(arguments)
}
