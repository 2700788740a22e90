//! The `kernelgate` program: one file a verb, in the order of the four questions (right? how fast? slower? why?).
//!
//! Results go to standard output in the format that was asked for, everything else to standard error; the exit code says the rest.

mod baseline;
mod calibrate;
mod compare;
mod doctor;
mod gate;
mod list;
mod peers;
mod profile;
mod resources;
mod runs;
mod save;
mod settings;
mod timing;
mod verdict;
mod verify;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};

use crate::exit::Exit;
use crate::harness::HarnessError;
use crate::harness::args::{BackendName, DEFAULT_TIMEOUT_S, Filter};
use crate::harness::cases::{self, Case, Group, Place, Selection};
use crate::harness::place::Wanted;
use crate::harness::problem::{Ready, Setback};
use crate::record::text::printable;
use crate::record::{Run, Store};
use crate::report;
use crate::report::table::escape;
use crate::suite::Suite;
use crate::workload::{Effort, Override};

/// Verified GPU-kernel benchmarks with a gate: is it right, how fast, did it get slower
#[derive(Debug, Parser)]
#[command(
    name = "kernelgate",
    version,
    after_help = "Exit codes: 0 fine, 1 regression or failed verification, 2 usage or broken input, 3 inconclusive, 4 refused (not comparable), 130 interrupted, 141 nobody reads the output."
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
    /// What the last run measured, as a table or for another program
    Runs(runs::Arguments),
    /// How good `compare` is on this machine: false alarms, slow-downs found, recommended thresholds
    Calibrate(Box<calibrate::Arguments>),
    /// Registers, spills, shared memory and instructions of every kernel; a gate that needs no GPU
    Resources(resources::Arguments),
    /// How good timing is on this GPU: overheads, accuracy against known lengths and CUPTI, cold caches, ceilings
    Timing(timing::Arguments),
    /// What the GPU's time goes to: the kernels of each case as the hardware recorded them
    Profile(profile::Arguments),
    /// The last run beside PyTorch's and other kernels for the same problems, timed now
    Peers(peers::Arguments),
    /// Save, list, show, extend, import and export baselines
    #[command(subcommand)]
    Baseline(baseline::Verb),
}

/// How a result is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Format {
    /// For a terminal.
    #[default]
    Text,
    /// For programs.
    Json,
    /// For a pull request or a page.
    Markdown,
}

impl Cli {
    /// Runs the verb.
    ///
    /// # Errors
    /// Bad usage or broken input: [`Exit::Usage`].
    pub fn run(self) -> anyhow::Result<Exit> {
        let mut store = Store::discover();
        if let Some(folder) = self.baselines {
            store.baselines = folder;
        }
        if let Some(folder) = self.records {
            store.runs = folder;
        }
        match self.verb {
            Verb::Doctor(arguments) => doctor::run(&arguments, &store),
            Verb::List(arguments) => list::run(&arguments),
            Verb::Verify(arguments) => verify::run(&arguments),
            Verb::Gate(arguments) => gate::run(&arguments, &store),
            Verb::Compare(arguments) => compare::run(&arguments, &store),
            Verb::Runs(arguments) => runs::run(&arguments, &store),
            Verb::Calibrate(arguments) => calibrate::run(&arguments, &store),
            Verb::Resources(arguments) => resources::run(&arguments, &store),
            Verb::Timing(arguments) => timing::run(&arguments),
            Verb::Profile(arguments) => profile::run(&arguments),
            Verb::Peers(arguments) => peers::run(&arguments, &store),
            Verb::Baseline(verb) => baseline::run(&verb, &store),
        }
    }
}

/// Which cases a verb is about.
#[derive(Debug, clap::Args)]
struct Choice {
    /// Only cases whose id matches this regular expression
    filter: Option<String>,
    /// Which cases: quick and default are the same handful, thorough is the whole sweep
    #[arg(long, env = "KERNELGATE_EFFORT", value_enum, default_value = "default")]
    effort: crate::harness::args::EffortName,
    /// Replace an axis' values, for example --axis s=512,777 (repeatable)
    #[arg(long, env = "KERNELGATE_AXIS", value_name = "AXIS=VALUE[,VALUE]", value_delimiter = ' ')]
    axis: Vec<Override>,
    /// Where to run: auto is the GPU if there is one, else the CPU
    #[arg(long, env = "KERNELGATE_BACKEND", value_enum, default_value = "auto")]
    backend: BackendName,
    /// Which GPU, counted from 0
    #[arg(long, env = "KERNELGATE_DEVICE", value_name = "NUMBER")]
    device: Option<usize>,
}

impl Choice {
    /// Where the cases would run.
    const fn wanted(&self) -> Wanted {
        Wanted { backend: self.backend, device: self.device, patience: Duration::from_secs(DEFAULT_TIMEOUT_S) }
    }

    /// The selection among these suites. A filter that matches no default case is tried on the whole sweep.
    fn select<'a>(&self, suites: &'a [Box<dyn Suite>], place: &Place) -> Result<Selection<'a>, HarnessError> {
        let all = || suites.iter().map(AsRef::as_ref);
        cases::check_overrides(all(), &self.axis)?;
        let filter = Filter::parse(self.filter.as_deref(), false)?;
        let selection = cases::select(all(), self.effort.into(), place, &self.axis, &filter)?;
        if !selection.matched_nothing() {
            return Ok(selection);
        }
        let selection = cases::select(all(), Effort::Thorough, place, &self.axis, &filter)?;
        if selection.matched_nothing() {
            return Err(match filter.text() {
                Some(text) => cases::nothing_matches(text, all()),
                None => cases::nothing_has(&self.axis),
            });
        }
        Ok(selection)
    }
}

/// What came of each case, by its id.
type Outcomes<T> = Vec<(String, Result<T, Setback>)>;

/// Goes through a selection, one case an implementation (what is right hot is right cold, and has the same kernels), then through what
/// was skipped: what came of each case, and whether the GPU was lost, after which nothing runs any more.
///
/// # Errors
/// Those of `one`.
fn each_implementation<T>(
    selection: &Selection<'_>,
    seed: u64,
    doing: &str,
    mut one: impl FnMut(&Group<'_>, &Case, &Ready) -> anyhow::Result<Result<T, Setback>>,
) -> anyhow::Result<(Outcomes<T>, bool)> {
    let mut outcomes = Vec::new();
    let mut lost: Option<String> = None;
    for group in &selection.groups {
        let ready = match &lost {
            Some(lost) => Err(Setback::Fail(lost.clone())),
            None => Ready::new(group, seed),
        };
        for case in group.cases.chunk_by(|a, b| a.index == b.index).map(|cases| &cases[0]) {
            let outcome = match (&ready, &lost) {
                (_, Some(lost)) => Err(Setback::Fail(lost.clone())),
                (Err(setback), None) => Err(setback.clone()),
                (Ok(ready), None) => {
                    eprintln!("{doing} {}", case.id);
                    one(group, case, ready)?
                }
            };
            if matches!(outcome, Err(Setback::Lost(_))) {
                lost = Some(format!("not run: {} lost the GPU", case.id));
            }
            outcomes.push((case.id.clone(), outcome));
        }
    }
    let skipped = selection.skipped.iter().map(|(id, reason)| (id.clone(), Err(Setback::Skip(reason.clone()))));
    outcomes.extend(skipped);
    Ok((outcomes, lost.is_some()))
}

/// The command line as one would type it again in a shell, without some flags; those of the first list have a value.
fn command_line(arguments: impl Iterator<Item = String>, valued: &[&str], bare: &[&str]) -> String {
    let plain = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-~^:@=,+%".contains(c));
    let quoted = |word: String| if plain(&word) { word } else { format!("'{}'", word.replace('\'', "'\\''")) };
    let words = report::without_flags(arguments, valued, bare).into_iter().map(quoted);
    std::iter::once("kernelgate".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

/// Which recorded invocations a verb is about.
#[derive(Debug, clap::Args)]
struct Sessions {
    /// Folder of a recorded invocation, in place of the last one; several are several process runs
    #[arg(long, value_name = "DIR")]
    session: Vec<PathBuf>,
    /// The last so many invocations: several process runs
    #[arg(long, value_name = "COUNT", default_value_t = 1, conflicts_with = "session", value_parser = clap::value_parser!(u16).range(1..))]
    last: u16,
}

impl Sessions {
    /// Their runs, no run twice.
    fn read(&self, store: &Store) -> anyhow::Result<Vec<Run>> {
        if self.session.is_empty() {
            return Ok(store.last_sessions(self.last.into())?);
        }
        let mut runs: BTreeMap<String, Run> = BTreeMap::new();
        for folder in &self.session {
            for run in store.session(folder)? {
                let twice = runs.insert(run.key(), run);
                anyhow::ensure!(twice.is_none(), "--session {}: its runs are given twice", folder.display());
            }
        }
        Ok(runs.into_values().collect())
    }
}

impl Format {
    /// What others wrote, such as a message, harmless in this format.
    fn words(self, text: &str) -> String {
        if self == Self::Markdown { escape(text) } else { printable(text).into_owned() }
    }
}

fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string_pretty(value)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_can_be_typed_again() {
        let of = |words: &[&str]| command_line(words.iter().map(|word| (*word).to_owned()), &["--dir", "--output"], &["--resume"]);
        let words = ["calibrate", "st_bif", "--dir", "/x/y", "--resume", "--output=/a.json", "--inject", "2,5"];
        assert_eq!(of(&words), "kernelgate calibrate st_bif --inject 2,5");
        assert_eq!(of(&["compare", "a(b|c)", "it's", ""]), "kernelgate compare 'a(b|c)' 'it'\\''s' ''");
        assert_eq!(of(&["compare", "--dir"]), "kernelgate compare");
    }
}
