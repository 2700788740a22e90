//! Arguments in, exit code out.

use std::process::ExitCode;

use clap::Parser;
use kernelgate::cli::Cli;
use kernelgate::exit::Exit;

fn main() -> ExitCode {
    match Cli::parse().run() {
        Ok(exit) => exit.into(),
        Err(error) => {
            eprintln!("error: {error:#}");
            Exit::Usage.into()
        }
    }
}
