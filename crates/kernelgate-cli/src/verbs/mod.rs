//! The `kernelgate` program: one file a verb, in a folder for each of the four questions (right? how
//! fast? slower? why?).
//!
//! Results go to standard output in the format that was asked for, everything else to standard
//! error; the exit code says the rest.
//!
//! A new verb is one file and one arm here.

mod correct;
mod doctor;
mod fast;
mod fleet;
mod shared;
mod slower;
mod why;

pub use fast::peers::read as read_peers;

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use kernelgate::exit::Exit;

use crate::benches::package;
use correct::{list, verify};
use fast::{history, peers, report, runs, timing};
use fleet::{merge, submit};
use slower::{baseline, bisect, calibrate, check, compare, gate, resources};
use why::{diagnose, export, profile, stats};

/// Verified GPU-kernel benchmarks with a gate: is it right, how fast, did it get slower
#[derive(Debug, Parser)]
#[command(
    name = "kernelgate",
    version,
    after_help = "Exit codes: 0 fine, 1 regression or failed verification, 2 usage or broken \
                  input, 3 inconclusive, 4 refused (not comparable), 130 interrupted, 141 broken \
                  pipe."
)]
pub struct Cli {
    /// Where committed baselines lie [default: baselines/ of the package]
    #[arg(long, global = true, value_name = "DIR")]
    baselines: Option<PathBuf>,
    /// Where bench processes record their runs [default: kernelgate/runs/ of the target folder]
    #[arg(long, global = true, value_name = "DIR")]
    records: Option<PathBuf>,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// The device, the build, the folders: what is there, what is missing and how to get it
    Doctor(doctor::Arguments),
    /// Workloads, problems and implementations, which can run here and why not
    List(list::Arguments),
    /// Every case against the fp64 reference
    Verify(verify::Arguments),
    /// The last run against a committed baseline
    Gate(gate::Arguments),
    /// Two builds, their processes interleaved: did it get slower?
    Compare(Box<compare::Arguments>),
    /// Judge a pull request in CI: compare, else gate; check kernel resources; leave a comment
    Check(check::Arguments),
    /// Measure in shards: jobs of a scheduler, followed to the verdict
    #[command(subcommand)]
    Submit(submit::Scheduler),
    /// Put the records of shards together
    Merge(merge::Arguments),
    /// What the last run measured, as a table or for another program
    Runs(runs::Arguments),
    /// The first slower commit between two revisions, by paired comparisons
    Bisect(Box<bisect::Arguments>),
    /// Times over commits, with the changes of their level; the store of all runs
    History(Box<history::Arguments>),
    /// A page to look at: curves, ladders, roofline, tables, verdicts
    Report(report::Arguments),
    /// How good `compare` is on this machine: false alarms, slow-downs found, recommended
    /// thresholds
    Calibrate(Box<calibrate::Arguments>),
    /// Registers, spills, shared memory and instructions of every kernel; a gate that needs no GPU
    Resources(resources::Arguments),
    /// How good timing is on this GPU: overheads, accuracy against known lengths and CUPTI, cold
    /// caches, ceilings
    Timing(timing::Arguments),
    /// What the time of each case goes to and why: on a GPU what the hardware recorded, by range and
    /// kernel; on the CPU its phases
    Profile(profile::Arguments),
    /// What is wrong with a trace, or with a case, which is recorded now: why the GPU waits, for what,
    /// and what to do
    Diagnose(diagnose::Arguments),
    /// A trace as a timeline for ui.perfetto.dev or chrome://tracing
    Export(export::Arguments),
    /// The tables of `nsys stats` for traces of Nsight Systems and PyTorch's profiler
    Stats(stats::Arguments),
    /// The last run compared with PyTorch's and other kernels for the same problems, timed now
    Peers(peers::Arguments),
    /// Save, list, show, extend, import and export baselines
    #[command(subcommand)]
    Baseline(baseline::BaselineVerb),
}

impl Cli {
    /// Runs the verb.
    ///
    /// # Errors
    /// Bad usage or broken input: [`Exit::Usage`].
    pub fn run(self) -> anyhow::Result<Exit> {
        let mut store = package::store(&std::env::current_dir()?);
        if let Some(folder) = self.baselines {
            store.baselines = folder;
        }
        if let Some(folder) = self.records {
            store.runs = folder;
        }
        match self.verb {
            Verb::Doctor(arguments) => doctor::run(&arguments, &store),
            Verb::List(arguments) => list::run(&arguments, &store),
            Verb::Verify(arguments) => verify::run(&arguments, &store),
            Verb::Gate(arguments) => gate::run(&arguments, &store),
            Verb::Compare(arguments) => compare::run(&arguments, &store),
            Verb::Check(arguments) => check::run(&arguments, &store),
            Verb::Submit(scheduler) => submit::run(&scheduler, &store),
            Verb::Merge(arguments) => merge::run(&arguments, &store),
            Verb::Runs(arguments) => runs::run(&arguments, &store),
            Verb::Bisect(arguments) => bisect::run(&arguments, &store),
            Verb::History(arguments) => history::run(&arguments, &store),
            Verb::Report(arguments) => report::run(&arguments, &store),
            Verb::Calibrate(arguments) => calibrate::run(&arguments, &store),
            Verb::Resources(arguments) => resources::run(&arguments, &store),
            Verb::Timing(arguments) => timing::run(&arguments, &store),
            Verb::Profile(arguments) => profile::run(&arguments, &store),
            Verb::Diagnose(arguments) => diagnose::run(&arguments, &store),
            Verb::Export(arguments) => export::run(&arguments),
            Verb::Stats(arguments) => stats::run(&arguments),
            Verb::Peers(arguments) => peers::run(&arguments, &store),
            Verb::Baseline(verb) => baseline::run(&verb, &store),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::Cli;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
