//! The command-line verbs of `kernelgate`: one file for each verb, in a folder for each question
//! (are outputs right? how fast? slower? why?).
//!
//! Every verb prints results to standard output in the requested format and everything else to
//! standard error; the exit code is the verdict.
//!
//! A new verb needs one file and one arm of the match in [`KernelgateCommandLine`].

#![allow(clippy::disallowed_methods, reason = "the boundary: variables are read here")]

mod completions;
mod correct;
mod doctor;
mod fast;
mod fleet;
mod help;
mod init;
mod shared;
mod slower;
mod why;

pub use fast::peers::read_device_and_peer_times as read_peers;
pub use shared::refusal::RefusalToCompare;

use std::path::PathBuf;

use clap::{CommandFactory as _, Parser, Subcommand};
use kernelgate::exit::ProcessExitReason;

use crate::benches::package;
use crate::commands;
use correct::{list, verify};
use fast::{diff, history, peers, report, runs, timing};
use fleet::{merge, submit};
use slower::{baseline, bisect, calibrate, check, compare, gate, resources};
use why::{diagnose, export, profile, stats};

/// Heading in the help for the flags that every verb accepts.
const GLOBAL_FLAGS_HELP_HEADING: &str = "Global options";

const PROGRAM_VERSION_AND_COMMIT: &str =
    concat!(env!("CARGO_PKG_VERSION"), " (", env!("BUILD_COMMIT"), ")");

/// Verify, time and gate the performance of GPU kernels
#[derive(Debug, Parser)]
#[command(
    name = "kernelgate",
    version = PROGRAM_VERSION_AND_COMMIT,
    after_help = "Exit codes: 0 fine, 1 regression or failed verification, 2 usage or broken \
                  input, 3 inconclusive, 4 refused (not comparable), 130 interrupted, 141 broken \
                  pipe."
)]
pub struct KernelgateCommandLine {
    /// Folder of committed baselines [default: baselines/ of the package]
    #[arg(id = "baselines", long = "baselines", global = true, value_name = "DIR", help_heading = GLOBAL_FLAGS_HELP_HEADING)]
    baselines_folder: Option<PathBuf>,
    /// Folder of recorded runs [default: kernelgate/runs/ of the target folder]
    #[arg(id = "records", long = "records", global = true, value_name = "DIR", help_heading = GLOBAL_FLAGS_HELP_HEADING)]
    run_records_folder: Option<PathBuf>,
    /// Print every command before it runs, with its folder and variables, on standard error
    #[arg(long = "verbose", short = 'v', global = true, help_heading = GLOBAL_FLAGS_HELP_HEADING)]
    prints_every_command: bool,
    #[command(subcommand)]
    verb: KernelgateVerb,
}

#[derive(Debug, Subcommand)]
enum KernelgateVerb {
    /// Check GPUs, libraries, settings and folders, and name what is missing
    Doctor(doctor::DoctorCommandArguments),
    /// List workloads, cases and implementations, with the reason of each skip
    List(list::ListCommandArguments),
    /// Compare the outputs of every case with the fp64 reference
    Verify(verify::VerifyCommandArguments),
    /// Compare the last run with a committed baseline
    Gate(gate::GateCommandArguments),
    /// Compare the times of two builds by running their processes alternately
    Compare(Box<compare::CompareCommandArguments>),
    /// Judge a pull request: compare, else gate; check resources; write a comment
    Check(check::CheckCommandArguments),
    /// Submit shards as jobs of a cluster scheduler, and follow them to the verdict
    #[command(subcommand)]
    Submit(submit::ClusterScheduler),
    /// Merge shards into one measurement, comparison, calibration or verification
    Merge(merge::MergeCommandArguments),
    /// Show the recorded measurements of the last run as a table or for another program
    Runs(runs::RunsCommandArguments),
    /// Find the first slower commit between two revisions by comparing builds
    Bisect(Box<bisect::BisectCommandArguments>),
    /// Show recorded times of cases over commits and where their level changed
    History(Box<history::HistoryCommandArguments>),
    /// Draw recorded runs as one page: curves, ladders, roofline, tables
    Report(report::ReportCommandArguments),
    /// Measure how often `compare` errs on this machine, and recommend thresholds
    Calibrate(Box<calibrate::CalibrateCommandArguments>),
    /// Compile every kernel and check registers, spills and instructions, without a GPU
    Resources(resources::ResourcesCommandArguments),
    /// Measure how accurate timing with CUDA events is on this GPU
    Timing(timing::TimingCommandArguments),
    /// Record where the time of each case goes
    Profile(profile::ProfileCommandArguments),
    /// Diagnose a trace or a case: why the GPU waits, and what to do
    Diagnose(diagnose::DiagnoseCommandArguments),
    /// Export a trace as a timeline for ui.perfetto.dev or chrome://tracing
    Export(export::ExportCommandArguments),
    /// Print the tables that `nsys stats` prints for a trace
    Stats(stats::StatsCommandArguments),
    /// Time other libraries' kernels for the problems of the last run
    Peers(peers::PeersCommandArguments),
    /// Show two recorded runs side by side, without a verdict
    Diff(diff::DiffCommandArguments),
    /// Add a bench and a CI workflow to a package
    Init(init::InitCommandArguments),
    /// Print a script that completes verbs and flags in a shell
    Completions(completions::CompletionsCommandArguments),
    /// Save, list, show, extend, import and export baselines
    #[command(subcommand)]
    Baseline(baseline::BaselineSubverb),
}

/// Definition of the command line, whose help groups the verbs by the question that they answer.
pub fn command_line_definition() -> clap::Command {
    help::add_questions_and_examples_to_help(KernelgateCommandLine::command())
}

impl KernelgateCommandLine {
    /// Runs the verb that the command line names.
    ///
    /// # Errors
    /// Wrong usage or broken input is an error, for which the exit code is that of
    /// [`ProcessExitReason::InvalidUsageOrInput`].
    pub fn run_verb(self) -> anyhow::Result<ProcessExitReason> {
        if self.prints_every_command {
            commands::enable_command_printing();
        }
        let mut store = package::baseline_store_of_package(&std::env::current_dir()?);
        if let Some(folder) = self.baselines_folder {
            store.baselines_folder = folder;
        }
        if let Some(folder) = self.run_records_folder {
            store.runs_folder = folder;
        }
        match self.verb {
            KernelgateVerb::Doctor(arguments) => doctor::run_doctor_command(&arguments, &store),
            KernelgateVerb::List(arguments) => list::run_list_command(&arguments, &store),
            KernelgateVerb::Verify(arguments) => verify::run_verify_command(&arguments, &store),
            KernelgateVerb::Gate(arguments) => gate::run_gate_command(&arguments, &store),
            KernelgateVerb::Compare(arguments) => compare::run_compare_command(&arguments, &store),
            KernelgateVerb::Check(arguments) => check::run_check_command(&arguments, &store),
            KernelgateVerb::Submit(scheduler) => {
                submit::submit_shards_to_scheduler(&scheduler, &store)
            }
            KernelgateVerb::Merge(arguments) => merge::run_merge_command(&arguments, &store),
            KernelgateVerb::Runs(arguments) => runs::run_runs_command(&arguments, &store),
            KernelgateVerb::Bisect(arguments) => bisect::run_bisect_command(&arguments, &store),
            KernelgateVerb::History(arguments) => history::run_history_command(&arguments, &store),
            KernelgateVerb::Report(arguments) => report::run_report_command(&arguments, &store),
            KernelgateVerb::Calibrate(arguments) => {
                calibrate::run_calibrate_command(&arguments, &store)
            }
            KernelgateVerb::Resources(arguments) => {
                resources::run_resources_command(&arguments, &store)
            }
            KernelgateVerb::Timing(arguments) => timing::run_timing_command(&arguments, &store),
            KernelgateVerb::Profile(arguments) => profile::run_profile_command(&arguments, &store),
            KernelgateVerb::Diagnose(arguments) => {
                diagnose::run_diagnose_command(&arguments, &store)
            }
            KernelgateVerb::Export(arguments) => export::run_export_command(&arguments),
            KernelgateVerb::Stats(arguments) => stats::run_stats_command(&arguments),
            KernelgateVerb::Peers(arguments) => peers::run_peers_command(&arguments, &store),
            KernelgateVerb::Diff(arguments) => diff::run_diff_command(&arguments, &store),
            KernelgateVerb::Init(arguments) => init::run_init_command(&arguments),
            KernelgateVerb::Completions(arguments) => {
                Ok(completions::run_completions_command(&arguments, command_line_definition()))
            }
            KernelgateVerb::Baseline(verb) => baseline::run_baseline_command(&verb, &store),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::command_line_definition;

    #[test]
    fn clap_accepts_the_definition_of_the_command_line() {
        command_line_definition().debug_assert();
    }
}
