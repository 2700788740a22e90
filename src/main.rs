//! Arguments in, exit code out.

use std::process::ExitCode;

use clap::Parser;
use kernelgate::cli::Cli;
use kernelgate::exit::Exit;
use kernelgate::harness::guard;
use kernelgate::record::text::printable;

fn main() -> ExitCode {
    guard::keep_panics();
    match guard::catch(|| Cli::parse().run())
        .unwrap_or_else(|panic| Err(anyhow::anyhow!("internal error, please report it: {panic}")))
    {
        Ok(exit) => exit.into(),
        Err(error) => {
            eprintln!("error: {}", printable(&format!("{error:#}")));
            Exit::Usage.into()
        }
    }
}
