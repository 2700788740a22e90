//! `kernelgate diagnose`: what is wrong with a trace, with evidence.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use kernelgate::exit::Exit;
use kernelgate::record::file;
use kernelgate::record::text::printable;
use kernelgate_trace::analyze::restrict;
use kernelgate_trace::diagnose::{Diagnosis, diagnose};
use kernelgate_trace::read::{self, Wanted};
use serde_json::{Value, json};

use super::output::print_json;
use crate::pages;

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
    /// Also write a page to look at into this file: findings, timeline, tables; of one trace
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
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
    anyhow::ensure!(
        arguments.html.is_none() || arguments.traces.len() == 1,
        "--html takes one trace, not {}",
        arguments.traces.len()
    );
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

fn of(path: &Path, arguments: &Arguments) -> anyhow::Result<Diagnosis> {
    let mut trace =
        read::open(path, &Wanted::ALL).map_err(|error| anyhow::anyhow!("failed to {error}"))?;
    if let Some(range) = &arguments.range {
        trace = restrict::inside(&trace, range).ok_or_else(|| {
            anyhow::anyhow!("--range {range}: no range of {} has this path", path.display())
        })?;
    }
    let diagnosis = diagnose(&trace);
    if let Some(file) = &arguments.html {
        let page = pages::trace::page(&path.display().to_string(), &trace, &diagnosis)
            .map_err(|error| anyhow::anyhow!("--html: failed to {error}"))?;
        file::write_text(file, &page)
            .map_err(|error| anyhow::anyhow!("--html: failed to {error}"))?;
        eprintln!("page: {}", printable(&file.display().to_string()));
    }
    Ok(diagnosis)
}
