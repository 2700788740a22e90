//! Entry point of the executable `kernelgate`: passes the arguments to the library and ends with
//! its exit code.

#![allow(clippy::disallowed_methods, reason = "the boundary: arguments")]

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_cli::main(std::env::args_os())
}
