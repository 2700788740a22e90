//! The findings of a trace as text, or, with `json` behind it, as JSON.
//!
//! `cargo run --release -p kernelgate-trace --example diagnose -- TRACE [json]`

use std::process::ExitCode;

use kernelgate_trace::diagnose::diagnose;
use kernelgate_trace::read::{self, Wanted};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(path) = arguments.first() else {
        eprintln!("usage: diagnose TRACE [json]");
        return ExitCode::from(2);
    };
    match read::open(path.as_ref(), &Wanted::ALL) {
        Ok(trace) if arguments.len() > 1 => println!("{:#}", diagnose(&trace).to_json()),
        Ok(trace) => print!("{}", diagnose(&trace).to_text()),
        Err(error) => {
            eprintln!("error: failed to {error}");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
