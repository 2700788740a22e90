//! Prints one report table of one trace and nothing else, so that reading and summing can be
//! benchmarked.
//!
//! `cargo run --release -p kernelgate-trace --example table -- TRACE REPORT [streamed]`
//!
//! With `streamed`, ranges and calls are not kept. Standard error gets the seconds for reading and
//! for summing, and the number of rows of the table.

use std::process::ExitCode;
use std::time::Instant;

use kernelgate_trace::read;
use kernelgate_trace::stats::{self, StatsReport};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (path, name, streamed) = match &arguments[..] {
        [path, name] => (path, name, false),
        [path, name, word] if word == "streamed" => (path, name, true),
        _ => {
            eprintln!("usage: table TRACE REPORT [streamed]");
            return ExitCode::from(2);
        }
    };
    let Some(report) = StatsReport::from_nsys_report_name(name) else {
        eprintln!("error: no table is called {name}");
        return ExitCode::from(2);
    };
    let start = Instant::now();
    if streamed {
        let table = match stats::table_from_streamed_export(path.as_ref(), report) {
            Ok(Some(streamed)) => streamed.table,
            Ok(None) => {
                eprintln!("error: {name} of {path} cannot be streamed");
                return ExitCode::from(2);
            }
            Err(error) => {
                eprintln!("error: failed to {error}");
                return ExitCode::from(2);
            }
        };
        print!("{}", table.to_csv());
        let seconds = start.elapsed().as_secs_f64();
        eprintln!("{name}: {seconds:.2} s, {} rows", table.rows.len());
        return ExitCode::SUCCESS;
    }
    let trace = match read::open_trace_file(path.as_ref(), &report.trace_parts_for_report()) {
        Ok(trace) => trace,
        Err(error) => {
            eprintln!("error: failed to {error}");
            return ExitCode::from(2);
        }
    };
    let read = start.elapsed();
    let table = stats::make_table(&trace, report);
    let all = start.elapsed();
    print!("{}", table.to_csv());
    eprintln!(
        "{name}: read {:.2} s, summed {:.2} s, {} rows",
        read.as_secs_f64(),
        (all - read).as_secs_f64(),
        table.rows.len()
    );
    ExitCode::SUCCESS
}
