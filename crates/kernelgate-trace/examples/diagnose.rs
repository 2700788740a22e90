//! Prints the findings of one trace as text, or as JSON with the argument `json`. With the argument
//! `streamed`, the example reads an export without keeping its ranges and calls in memory.
//!
//! `cargo run --release -p kernelgate-trace --example diagnose -- TRACE [json] [streamed]`

use std::path::Path;
use std::process::ExitCode;

use kernelgate_trace::TraceError;
use kernelgate_trace::diagnose::{
    TraceDiagnosis, diagnose_export_while_reading, diagnose_trace_in_memory,
};
use kernelgate_trace::read::{self, WantedTraceParts};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(path) = arguments.first() else {
        eprintln!("usage: diagnose TRACE [json] [streamed]");
        return ExitCode::from(2);
    };
    let is = |word: &str| arguments[1..].iter().any(|argument| argument == word);
    match diagnose_trace_file(path.as_ref(), is("streamed")) {
        Ok(diagnosis) if is("json") => println!("{:#}", diagnosis.diagnosis_to_json()),
        Ok(diagnosis) => print!("{}", diagnosis.diagnosis_to_text()),
        Err(error) => {
            eprintln!("error: failed to {error}");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

fn diagnose_trace_file(path: &Path, streamed: bool) -> Result<TraceDiagnosis, TraceError> {
    let streamed = if streamed { diagnose_export_while_reading(path)? } else { None };
    match streamed {
        Some(diagnosis) => Ok(diagnosis),
        None => Ok(diagnose_trace_in_memory(&read::open_trace_file(path, &WantedTraceParts::ALL)?)),
    }
}
