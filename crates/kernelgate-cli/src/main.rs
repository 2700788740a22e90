//! Passes the arguments to the library, and ends with its exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_cli::main(std::env::args_os())
}
