//! `kernelgate runs`: prints the recorded measurements of the last run again, as tables or in a
//! format for another program.

use std::path::PathBuf;

use clap::ValueEnum;

use crate::report::costs;
use crate::report::formats::metrics;
use crate::verbs::shared::output::{
    json_safe_for_terminals, print_as_json, write_all_files_or_none,
};
use crate::verbs::shared::sessions::SessionSelectionFlags;
use kernelgate::display::{runs, terminal};
use kernelgate::exit::ProcessExitReason;
use kernelgate::record::text::clean_message_for_terminal;
use kernelgate::record::{BenchProcessRun, RecordFoldersOfPackage};

/// How runs are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum RunsOutputFormat {
    /// The tables of times that `cargo bench` prints
    #[default]
    Text,
    /// The records
    Json,
    /// JSON in Bencher Metric Format, for `bencher run --adapter json`
    #[value(name = "bmf")]
    BencherMetricFormat,
    /// For github-action-benchmark's tool customSmallerIsBetter
    #[value(name = "smaller-is-better")]
    GithubSmallerIsBetter,
}

#[derive(Debug, clap::Args)]
pub struct RunsCommandArguments {
    #[command(flatten)]
    sessions: SessionSelectionFlags,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: RunsOutputFormat,
    /// Show device memory, commands, host time and errors of each case's launch, in place of its
    /// time
    #[arg(id = "costs", long = "costs")]
    shows_launch_costs: bool,
    /// Also write runs.txt, runs.json, bmf.json and smaller-is-better.json into this folder
    #[arg(id = "out", long = "out", value_name = "DIR")]
    output_folder: Option<PathBuf>,
}

pub fn run_runs_command(
    arguments: &RunsCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    let found = arguments.sessions.read_runs_of_package(store)?;
    let interrupted = lines_on_interrupted_benches(&found);
    match arguments.format {
        RunsOutputFormat::Text => {
            let columns = terminal::terminal_columns();
            let table = if arguments.shows_launch_costs {
                costs::launch_costs_table_text
            } else {
                runs::results_table_and_remarks_text
            };
            terminal::print_broken_to_terminal_width(&(table(&found, columns) + &interrupted));
        }
        RunsOutputFormat::Json => print_as_json(&found)?,
        RunsOutputFormat::BencherMetricFormat => print_as_json(&metrics::bencher_metric_format(
            &metrics::metrics_of_process_runs(&found),
        ))?,
        RunsOutputFormat::GithubSmallerIsBetter => print_as_json(
            &metrics::github_action_benchmark_format(&metrics::metrics_of_process_runs(&found)),
        )?,
    }
    if let Some(folder) = &arguments.output_folder {
        let metrics = metrics::metrics_of_process_runs(&found);
        let files = [
            ("runs.txt", runs::results_table_and_remarks_text(&found, None) + &interrupted + "\n"),
            ("runs.json", json_safe_for_terminals(&found)?),
            ("bmf.json", json_safe_for_terminals(&metrics::bencher_metric_format(&metrics))?),
            (
                "smaller-is-better.json",
                json_safe_for_terminals(&metrics::github_action_benchmark_format(&metrics))?,
            ),
        ];
        write_all_files_or_none(folder, files, &[])?;
    }
    Ok(ProcessExitReason::Success)
}

/// A line for each bench process that ended before all its cases were measured.
fn lines_on_interrupted_benches(runs: &[BenchProcessRun]) -> String {
    let ended = runs.iter().filter(|run| !run.ended_normally);
    let line = |run: &BenchProcessRun| {
        format!("\n{}", clean_message_for_terminal(&run.message_of_interrupted_run()))
    };
    ended.map(line).collect()
}
