//! `kernelgate runs`: what the last run measured, again, or for another program.

use std::path::PathBuf;

use clap::ValueEnum;

use crate::report::costs;
use crate::report::formats::metrics;
use crate::verbs::shared::output::{json, print_json, write_files};
use crate::verbs::shared::sessions::SelectedSessions;
use kernelgate::display::{runs, terminal};
use kernelgate::exit::ExitReason;
use kernelgate::record::text::printable_on_terminal;
use kernelgate::record::{BaselineStore, ProcessRun};

/// How runs are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum RunsFormat {
    /// The tables that `cargo bench` prints
    #[default]
    Text,
    /// The records
    Json,
    /// Bencher Metric Format, for `bencher run --adapter json`
    Bmf,
    /// For github-action-benchmark's tool customSmallerIsBetter
    SmallerIsBetter,
}

#[derive(Debug, clap::Args)]
pub struct RunsArguments {
    #[command(flatten)]
    sessions: SelectedSessions,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: RunsFormat,
    /// Show device memory, commands and host time of a launch, and errors, in place of times
    #[arg(long)]
    costs: bool,
    /// Also write runs.txt, runs.json, bmf.json and smaller-is-better.json into this folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub fn run(arguments: &RunsArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    let found = arguments.sessions.read(store)?;
    let interrupted = interrupted_runs(&found);
    match arguments.format {
        RunsFormat::Text => {
            let columns = terminal::terminal_columns();
            let table = if arguments.costs { costs::costs_text } else { runs::results_text };
            terminal::print_wrapped(&(table(&found, columns) + &interrupted));
        }
        RunsFormat::Json => print_json(&found)?,
        RunsFormat::Bmf => {
            print_json(&metrics::bencher_metric_format(&metrics::from_runs(&found)))?
        }
        RunsFormat::SmallerIsBetter => {
            print_json(&metrics::smaller_is_better_format(&metrics::from_runs(&found)))?
        }
    }
    if let Some(folder) = &arguments.out {
        let metrics = metrics::from_runs(&found);
        let files = [
            ("runs.txt", runs::results_text(&found, None) + &interrupted + "\n"),
            ("runs.json", json(&found)?),
            ("bmf.json", json(&metrics::bencher_metric_format(&metrics))?),
            ("smaller-is-better.json", json(&metrics::smaller_is_better_format(&metrics))?),
        ];
        write_files(folder, files, &[])?;
    }
    Ok(ExitReason::Fine)
}

/// A line for each bench process that ended before its cases did.
fn interrupted_runs(runs: &[ProcessRun]) -> String {
    let ended = runs.iter().filter(|run| !run.complete);
    let line =
        |run: &ProcessRun| format!("\n{}", printable_on_terminal(&run.interrupted_message()));
    ended.map(line).collect()
}
