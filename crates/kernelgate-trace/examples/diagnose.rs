//! The findings of a trace as text, or, with `json` behind it, as JSON. With `streamed`, ranges and
//! calls of an export are not kept.
//!
//! `cargo run --release -p kernelgate-trace --example diagnose -- TRACE [json] [streamed]`

use std::path::Path;
use std::process::ExitCode;

use kernelgate_trace::TraceError;
use kernelgate_trace::diagnose::{TraceDiagnosis, diagnose, diagnose_streamed};
use kernelgate_trace::read::{self, WantedTraceParts};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(path) = arguments.first() else {
        eprintln!("usage: diagnose TRACE [json] [streamed]");
        return ExitCode::from(2);
    };
    let is = |word: &str| arguments[1..].iter().any(|argument| argument == word);
    match diagnose_file(path.as_ref(), is("streamed")) {
        Ok(diagnosis) if is("json") => println!("{:#}", diagnosis.to_json()),
        Ok(diagnosis) => print!("{}", diagnosis.to_text()),
        Err(error) => {
            eprintln!("error: failed to {error}");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

fn diagnose_file(path: &Path, streamed: bool) -> Result<TraceDiagnosis, TraceError> {
    let streamed = if streamed { diagnose_streamed(path)? } else { None };
    match streamed {
        Some(diagnosis) => Ok(diagnosis),
        None => Ok(diagnose(&read::open_trace_file(path, &WantedTraceParts::ALL)?)),
    }
}
