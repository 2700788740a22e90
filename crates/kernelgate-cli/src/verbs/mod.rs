//! The `kernelgate` program: one file for each verb, in a folder for each of the four questions
//! (right? how fast? slower? why?).
//!
//! Results go to standard output in the requested format, everything else to standard error; the
//! exit code is the verdict.
//!
//! A new command needs one file and one arm in this match.

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

pub use fast::peers::read as read_peers;
pub use shared::refusal::Refusal;

use std::path::PathBuf;

use clap::{CommandFactory as _, Parser, Subcommand};
use kernelgate::exit::ExitReason;

use crate::benches::package;
use crate::commands;
use correct::{list, verify};
use fast::{diff, history, peers, report, runs, timing};
use fleet::{merge, submit};
use slower::{baseline, bisect, calibrate, check, compare, gate, resources};
use why::{diagnose, export, profile, stats};

/// Heading of the flags that every verb takes.
const GLOBAL_FLAGS_HEADING: &str = "Global options";

const PROGRAM_VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("BUILD_COMMIT"), ")");

/// Verify, time and gate GPU kernels
#[derive(Debug, Parser)]
#[command(
    name = "kernelgate",
    version = PROGRAM_VERSION,
    after_help = "Exit codes: 0 fine, 1 regression or failed verification, 2 usage or broken \
                  input, 3 inconclusive, 4 refused (not comparable), 130 interrupted, 141 broken \
                  pipe."
)]
pub struct CliArguments {
    /// Folder of committed baselines [default: baselines/ of the package]
    #[arg(long, global = true, value_name = "DIR", help_heading = GLOBAL_FLAGS_HEADING)]
    baselines: Option<PathBuf>,
    /// Folder of recorded runs [default: kernelgate/runs/ of the target folder]
    #[arg(long, global = true, value_name = "DIR", help_heading = GLOBAL_FLAGS_HEADING)]
    records: Option<PathBuf>,
    /// Print every command before it runs, with its folder and variables, on standard error
    #[arg(long, short, global = true, help_heading = GLOBAL_FLAGS_HEADING)]
    verbose: bool,
    #[command(subcommand)]
    verb: ProgramVerb,
}

#[derive(Debug, Subcommand)]
enum ProgramVerb {
    /// Check the device, the build and the folders, and name what is missing
    Doctor(doctor::DoctorArguments),
    /// List workloads, cases and implementations, with the reason of each skip
    List(list::ListArguments),
    /// Compare the outputs of every case with the fp64 reference
    Verify(verify::VerifyArguments),
    /// Compare the last run with a committed baseline
    Gate(gate::GateArguments),
    /// Compare two builds by interleaved processes
    Compare(Box<compare::CompareArguments>),
    /// Judge a pull request: compare, else gate; check resources; write a comment
    Check(check::CheckArguments),
    /// Submit shards as jobs of a scheduler, and follow them to the verdict
    #[command(subcommand)]
    Submit(submit::ClusterScheduler),
    /// Merge the records of shards
    Merge(merge::MergeArguments),
    /// Show the last run as a table or for another program
    Runs(runs::RunsArguments),
    /// Find the first slower commit between two revisions
    Bisect(Box<bisect::BisectArguments>),
    /// Show times over commits and where their level changed
    History(Box<history::HistoryArguments>),
    /// Draw runs as one page: curves, ladders, roofline, tables
    Report(report::ReportArguments),
    /// Measure how often `compare` is wrong here, and recommend thresholds
    Calibrate(Box<calibrate::CalibrateArguments>),
    /// Compile every kernel and check registers, spills and instructions, without a GPU
    Resources(resources::ResourcesArguments),
    /// Measure how accurate timing is on this GPU
    Timing(timing::TimingArguments),
    /// Record where the time of each case goes
    Profile(profile::ProfileArguments),
    /// Diagnose a trace or a case: why the GPU waits, and what to do
    Diagnose(diagnose::DiagnoseArguments),
    /// Export a trace as a timeline for ui.perfetto.dev or chrome://tracing
    Export(export::ExportArguments),
    /// Print the tables of `nsys stats` for a trace
    Stats(stats::StatsArguments),
    /// Time kernels of other libraries for the problems of the last run
    Peers(peers::PeersArguments),
    /// Show two recorded runs side by side, without a verdict
    Diff(diff::DiffArguments),
    /// Add a bench and a workflow to a package
    Init(init::InitArguments),
    /// Print a script that completes verbs and flags in a shell
    Completions(completions::CompletionsArguments),
    /// Save, list, show, extend, import and export baselines
    #[command(subcommand)]
    Baseline(baseline::BaselineVerb),
}

/// The command line, whose help groups verbs by question.
pub fn command() -> clap::Command {
    help::arrange_help(CliArguments::command())
}

impl CliArguments {
    /// Runs the verb.
    ///
    /// # Errors
    /// Wrong usage or broken input is an error: [`ExitReason::Usage`].
    pub fn run(self) -> anyhow::Result<ExitReason> {
        if self.verbose {
            commands::show_all_commands();
        }
        let mut store = package::store(&std::env::current_dir()?);
        if let Some(folder) = self.baselines {
            store.baselines = folder;
        }
        if let Some(folder) = self.records {
            store.runs = folder;
        }
        match self.verb {
            ProgramVerb::Doctor(arguments) => doctor::run(&arguments, &store),
            ProgramVerb::List(arguments) => list::run(&arguments, &store),
            ProgramVerb::Verify(arguments) => verify::run(&arguments, &store),
            ProgramVerb::Gate(arguments) => gate::run(&arguments, &store),
            ProgramVerb::Compare(arguments) => compare::run(&arguments, &store),
            ProgramVerb::Check(arguments) => check::run(&arguments, &store),
            ProgramVerb::Submit(scheduler) => submit::run(&scheduler, &store),
            ProgramVerb::Merge(arguments) => merge::run(&arguments, &store),
            ProgramVerb::Runs(arguments) => runs::run(&arguments, &store),
            ProgramVerb::Bisect(arguments) => bisect::run(&arguments, &store),
            ProgramVerb::History(arguments) => history::run(&arguments, &store),
            ProgramVerb::Report(arguments) => report::run(&arguments, &store),
            ProgramVerb::Calibrate(arguments) => calibrate::run(&arguments, &store),
            ProgramVerb::Resources(arguments) => resources::run(&arguments, &store),
            ProgramVerb::Timing(arguments) => timing::run(&arguments, &store),
            ProgramVerb::Profile(arguments) => profile::run(&arguments, &store),
            ProgramVerb::Diagnose(arguments) => diagnose::run(&arguments, &store),
            ProgramVerb::Export(arguments) => export::run(&arguments),
            ProgramVerb::Stats(arguments) => stats::run(&arguments),
            ProgramVerb::Peers(arguments) => peers::run(&arguments, &store),
            ProgramVerb::Diff(arguments) => diff::run(&arguments, &store),
            ProgramVerb::Init(arguments) => init::run(&arguments),
            ProgramVerb::Completions(arguments) => Ok(completions::run(&arguments, command())),
            ProgramVerb::Baseline(verb) => baseline::run(&verb, &store),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::command;

    #[test]
    fn clap_accepts_the_definition_of_the_command_line() {
        command().debug_assert();
    }
}
