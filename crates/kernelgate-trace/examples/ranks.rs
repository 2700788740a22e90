//! Joins the traces of all ranks of one distributed job, and prints the result as text, or as JSON
//! with `json` as first argument. Standard error gets the seconds that the run took.
//!
//! `cargo run --release -p kernelgate-trace --example ranks -- [json] TRACE…`

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use kernelgate_trace::diagnose::ranks;

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let json = arguments.first().is_some_and(|word| word == "json");
    if json {
        arguments.remove(0);
    }
    if arguments.is_empty() {
        eprintln!("usage: ranks [json] TRACE…");
        return ExitCode::from(2);
    }
    let traces: Vec<(String, PathBuf)> =
        arguments.into_iter().map(|name| (name.clone(), PathBuf::from(name))).collect();
    let start = Instant::now();
    let job = match ranks::read_traces_of_ranks(&traces) {
        Ok(parts) => ranks::join_ranks_to_job(parts),
        Err(error) => {
            eprintln!("error: failed to {error}");
            return ExitCode::from(2);
        }
    };
    eprintln!("{:.2} s", start.elapsed().as_secs_f64());
    match json {
        true => println!("{:#}", job.job_to_json()),
        false => print!("{}", job.job_to_text()),
    }
    ExitCode::SUCCESS
}
