//! `kernelgate diagnose`: what is wrong with a trace, or with a case that is recorded now, with
//! evidence.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use kernelgate::exit::Exit;
use kernelgate::record::Store;
use kernelgate::record::text::printable;
use kernelgate_trace::analyze::restrict;
use kernelgate_trace::diagnose::{Diagnosis, diagnose};
use kernelgate_trace::read::{self, Wanted};
use serde_json::{Value, json};

use super::choice::ChosenBenches;
use super::output::print_json;
use super::profile;

/// The version of the JSON around the diagnoses, which have one of their own.
const SCHEMA: u32 = 1;

#[derive(Debug, Args)]
pub struct Arguments {
    /// Traces: SQLite exports or reports of Nsight Systems, CSV or reports of Nsight Compute, JSON
    /// of PyTorch's profiler (.gz too), recordings of `kernelgate profile`; or one case, or a
    /// regular expression of several, to record and diagnose
    #[arg(required = true, value_name = "TRACE|CASE")]
    traces: Vec<PathBuf>,
    /// Only what was launched inside the ranges of this path, or end of one; `*` is any text
    #[arg(long, value_name = "PATH")]
    range: Option<String>,
    /// How the result is printed
    #[arg(long, value_enum, default_value_t)]
    format: DiagnosisFormat,
    #[command(flatten, next_help_heading = "Options for a case")]
    benches: ChosenBenches,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum DiagnosisFormat {
    /// For a terminal
    #[default]
    Text,
    /// For programs
    Json,
}

pub fn run(arguments: &Arguments, store: &Store) -> anyhow::Result<Exit> {
    let folder = tempfile::tempdir()?;
    let traces: Vec<(String, PathBuf)> = match case(&arguments.traces) {
        Some(filter) => profile::record(&filter, &arguments.benches, store, folder.path())?,
        None => {
            let named = |path: &PathBuf| (path.display().to_string(), path.clone());
            arguments.traces.iter().map(named).collect()
        }
    };
    let mut all: Vec<Value> = Vec::new();
    for (index, (name, path)) in traces.iter().enumerate() {
        let diagnosis = of(path, arguments)?;
        if arguments.format == DiagnosisFormat::Json {
            all.push(json!({ "trace": name, "diagnosis": diagnosis.to_json() }));
            continue;
        }
        if traces.len() > 1 {
            println!("{}{name}", if index > 0 { "\n" } else { "" });
        }
        // Names come from the file: what a terminal would obey is made harmless.
        diagnosis.to_text().lines().for_each(|line| println!("{}", printable(line)));
    }
    if arguments.format == DiagnosisFormat::Json {
        print_json(&json!({ "schema_version": SCHEMA, "traces": all }))?;
    }
    Ok(Exit::Fine)
}

/// The filter, where one word is given that names no file: files have an extension, cases have none.
fn case(words: &[PathBuf]) -> Option<String> {
    let [word] = words else { return None };
    let names_a_file = word.exists() || word.extension().is_some();
    (!names_a_file).then(|| word.to_str().map(str::to_owned)).flatten()
}

fn of(path: &Path, arguments: &Arguments) -> anyhow::Result<Diagnosis> {
    let trace =
        read::open(path, &Wanted::ALL).map_err(|error| anyhow::anyhow!("failed to {error}"))?;
    let Some(range) = &arguments.range else { return Ok(diagnose(&trace)) };
    let inside = restrict::inside(&trace, range).ok_or_else(|| {
        anyhow::anyhow!("--range {range}: no range of {} has this path", path.display())
    })?;
    Ok(diagnose(&inside))
}
