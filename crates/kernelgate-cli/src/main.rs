//! Arguments in, exit code out.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_cli::main(std::env::args_os())
}
