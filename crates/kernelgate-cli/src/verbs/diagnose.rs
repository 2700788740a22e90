//! `kernelgate diagnose`: what is wrong with a trace, with evidence.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kernelgate::exit::Exit;
use kernelgate::record::text::printable;
use kernelgate_trace::analyze::restrict;
use kernelgate_trace::diagnose::{Diagnosis, diagnose};
use kernelgate_trace::read::{self, Wanted};
use serde_json::{Value, json};

use super::output::print_json;

/// The version of the JSON around the diagnoses, which have one of their own.
const SCHEMA: u32 = 1;

#[derive(Debug, Args)]
pub struct Arguments {
    /// Traces: SQLite exports or reports of Nsight Systems, CSV or reports of Nsight Compute, JSON
    /// of PyTorch's profiler (.gz too)
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Only what was launched inside the ranges of this path, or end of one; `*` is any text
    #[arg(long, value_name = "PATH")]
    range: Option<String>,
    /// How the result is printed
    #[arg(long, value_enum, default_value_t)]
    format: DiagnosisFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum DiagnosisFormat {
    /// For a terminal
    #[default]
    Text,
    /// For programs
    Json,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Exit> {
    let mut all: Vec<Value> = Vec::new();
    for (index, path) in arguments.traces.iter().enumerate() {
        let diagnosis = of(path, arguments)?;
        if arguments.format == DiagnosisFormat::Json {
            let path = path.display().to_string();
            all.push(json!({ "trace": path, "diagnosis": diagnosis.to_json() }));
            continue;
        }
        if arguments.traces.len() > 1 {
            println!("{}{}", if index > 0 { "\n" } else { "" }, path.display());
        }
        // Names come from the file: what a terminal would obey is made harmless.
        diagnosis.to_text().lines().for_each(|line| println!("{}", printable(line)));
    }
    if arguments.format == DiagnosisFormat::Json {
        print_json(&json!({ "schema_version": SCHEMA, "traces": all }))?;
    }
    Ok(Exit::Fine)
}

fn of(path: &std::path::Path, arguments: &Arguments) -> anyhow::Result<Diagnosis> {
    let trace =
        read::open(path, &Wanted::ALL).map_err(|error| anyhow::anyhow!("failed to {error}"))?;
    let Some(range) = &arguments.range else { return Ok(diagnose(&trace)) };
    let inside = restrict::inside(&trace, range).ok_or_else(|| {
        anyhow::anyhow!("--range {range}: no range of {} has this path", path.display())
    })?;
    Ok(diagnose(&inside))
}
