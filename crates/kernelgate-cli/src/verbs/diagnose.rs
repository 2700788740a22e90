//! `kernelgate diagnose`: what is wrong with a trace, with evidence; of two traces what changed.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use kernelgate::exit::Exit;
use kernelgate::record::file;
use kernelgate::record::text::printable;
use kernelgate_trace::analyze::restrict;
use kernelgate_trace::diagnose::difference::{Sums, difference};
use kernelgate_trace::diagnose::{Diagnosis, checklist, diagnose};
use kernelgate_trace::model::Trace;
use kernelgate_trace::read::{self, Wanted};
use serde_json::{Value, json};

use super::output::print_json;
use crate::pages;

/// The version of the JSON around the diagnoses, which have one of their own.
const SCHEMA: u32 = 1;

#[derive(Debug, Args)]
pub struct Arguments {
    /// Traces: SQLite exports or reports of Nsight Systems, CSV or reports of Nsight Compute, JSON
    /// of PyTorch's profiler (.gz too). Two are compared, unless --each is given
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Only what was launched inside the ranges of this path, or end of one; `*` is any text
    #[arg(long, value_name = "PATH")]
    range: Option<String>,
    /// Diagnose two traces one after the other, in place of comparing them
    #[arg(long)]
    each: bool,
    /// The checklist of the guides, filled in, in place of the diagnosis
    #[arg(long)]
    checklist: bool,
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
    match &arguments.traces[..] {
        [base, head] if !arguments.each && !arguments.checklist => {
            compare(arguments, [base, head])?
        }
        traces => each(arguments, traces)?,
    }
    Ok(Exit::Fine)
}

fn each(arguments: &Arguments, traces: &[PathBuf]) -> anyhow::Result<()> {
    let mut all: Vec<Value> = Vec::new();
    for (index, path) in traces.iter().enumerate() {
        let trace = load(path, arguments)?;
        let diagnosis = diagnose(&trace);
        if let Some(file) = &arguments.html {
            write_page(file, path, &trace, &diagnosis)?;
        }
        let lines = checklist::checklist(&diagnosis);
        if arguments.format == DiagnosisFormat::Json {
            let path = path.display().to_string();
            all.push(match arguments.checklist {
                true => json!({ "trace": path, "checklist": checklist::to_json(&lines) }),
                false => json!({ "trace": path, "diagnosis": diagnosis.to_json() }),
            });
            continue;
        }
        if traces.len() > 1 {
            println!("{}{}", if index > 0 { "\n" } else { "" }, path.display());
        }
        print(&match arguments.checklist {
            true => checklist::to_text(&lines),
            false => diagnosis.to_text(),
        });
    }
    if arguments.format == DiagnosisFormat::Json {
        print_json(&json!({ "schema_version": SCHEMA, "traces": all }))?;
    }
    Ok(())
}

/// What changed from one trace to another. Only one of them is held at a time.
fn compare(arguments: &Arguments, paths: [&PathBuf; 2]) -> anyhow::Result<()> {
    let [base, head] = paths.map(|path| load(path, arguments).map(|trace| Sums::of(&trace)));
    let difference = difference(base?, head?);
    let names = paths.map(|path| path.display().to_string());
    match arguments.format {
        DiagnosisFormat::Json => print_json(&json!({
            "schema_version": SCHEMA,
            "compared": names,
            "difference": difference.to_json(),
        })),
        DiagnosisFormat::Text => {
            print(&difference.to_text([&names[0], &names[1]]));
            Ok(())
        }
    }
}

/// Names come from the file: what a terminal would obey is made harmless.
fn print(text: &str) {
    text.lines().for_each(|line| println!("{}", printable(line)));
}

fn load(path: &Path, arguments: &Arguments) -> anyhow::Result<Trace> {
    let trace =
        read::open(path, &Wanted::ALL).map_err(|error| anyhow::anyhow!("failed to {error}"))?;
    let Some(range) = &arguments.range else { return Ok(trace) };
    restrict::inside(&trace, range).ok_or_else(|| {
        anyhow::anyhow!("--range {range}: no range of {} has this path", path.display())
    })
}

/// The diagnosis as a page.
fn write_page(
    file: &Path,
    path: &Path,
    trace: &Trace,
    diagnosis: &Diagnosis,
) -> anyhow::Result<()> {
    let page = pages::trace::page(&path.display().to_string(), trace, diagnosis)
        .map_err(|error| anyhow::anyhow!("--html: failed to {error}"))?;
    file::write_text(file, &page).map_err(|error| anyhow::anyhow!("--html: failed to {error}"))?;
    eprintln!("page: {}", printable(&file.display().to_string()));
    Ok(())
}
