//! `kernelgate diagnose`: what is wrong with a trace, or with a case that is recorded now, with
//! evidence; of two traces what changed.

use std::path::{Component, Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use kernelgate::exit::ExitReason;
use kernelgate::record::text::{printable_on_terminal, printable_path};
use kernelgate::record::{BaselineStore, file};
use kernelgate_trace::TraceError;
use kernelgate_trace::diagnose::difference::{TraceSums, compare_sums};
use kernelgate_trace::diagnose::ranks::{self, JoinedJob};
use kernelgate_trace::diagnose::{
    FindingSeverity, TraceDiagnosis, checklist, diagnose, diagnose_streamed,
};
use kernelgate_trace::model::Trace;
use kernelgate_trace::read::WantedTraceParts;
use serde_json::{Value, json};

use super::{profile, trace_file};
use crate::pages;
use crate::plot::PlotError;
use crate::verbs::shared::case_selection::ChosenBenches;
use crate::verbs::shared::output::{print_json, refuse_overwriting_source};

/// The version of the JSON around the diagnoses, which have one of their own.
const DIAGNOSIS_SCHEMA: u32 = 1;

#[derive(Debug, Args)]
pub struct DiagnoseArguments {
    /// Traces: SQLite exports or reports of Nsight Systems, reports or CSV of Nsight Compute, JSON
    /// of PyTorch's profiler, JAX or rocprofv3 (.gz too), recordings of `kernelgate profile`. Two
    /// are compared, unless --each is given. Or one case, or a regular expression of several, to
    /// record and diagnose
    #[arg(required = true, value_name = "TRACE|CASE")]
    traces: Vec<PathBuf>,
    /// Use only work that was launched inside ranges of this path, or of a path with this end; `*`
    /// matches any text
    #[arg(long, value_name = "PATH")]
    range: Option<String>,
    /// Diagnose two traces one after the other, in place of comparing them
    #[arg(long)]
    each: bool,
    /// Join the traces as ranks of one job, and show which rank waits for which. The default for
    /// three or more traces that communicate, and for two that declare different ranks
    #[arg(long, conflicts_with_all = ["each", "range", "checklist"])]
    ranks: bool,
    /// Print the checklist of the profiling guides, filled in, in place of the diagnosis
    #[arg(long)]
    checklist: bool,
    /// Exit with 1 if a finding is as severe as this, or more
    #[arg(long, value_enum, value_name = "SEVERITY")]
    fail_on: Option<FailOnSeverity>,
    /// How the result is printed
    #[arg(long, value_enum, default_value_t)]
    format: DiagnosisFormat,
    /// Also write an HTML page into this file: findings, timeline and tables of one trace, or of
    /// the ranks of one job
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
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

/// The least severity of a finding that makes the exit code 1 (flag `--fail-on`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum FailOnSeverity {
    /// Any finding
    Information,
    /// A finding that costs time
    Warning,
    /// A finding that costs a tenth of the time or more
    Severe,
}

impl From<FailOnSeverity> for FindingSeverity {
    fn from(flag: FailOnSeverity) -> Self {
        match flag {
            FailOnSeverity::Information => Self::Information,
            FailOnSeverity::Warning => Self::Warning,
            FailOnSeverity::Severe => Self::Severe,
        }
    }
}

/// The outcome of all diagnoses of a call.
#[derive(Debug, Clone, Copy, Default)]
struct DiagnosesOutcome {
    /// Whether any question about a GPU was answered.
    answered: bool,
    worst: Option<FindingSeverity>,
}

impl DiagnosesOutcome {
    fn add(&mut self, diagnosis: &TraceDiagnosis) {
        self.answered |= diagnosis.answers_any_gpu_question();
        self.worst = self.worst.max(diagnosis.worst_severity());
    }

    fn exit(self, fail_on: Option<FailOnSeverity>) -> ExitReason {
        let fails = fail_on.is_some_and(|flag| self.worst >= Some(flag.into()));
        match self.answered {
            false => ExitReason::Inconclusive,
            true if fails => ExitReason::Regression,
            true => ExitReason::Fine,
        }
    }
}

pub fn run(arguments: &DiagnoseArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    let folder = tempfile::tempdir()?;
    let traces: Vec<(String, PathBuf)> = match case_filter_word(&arguments.traces) {
        Some(filter) => profile::record_cases(&filter, &arguments.benches, store, folder.path())?,
        None => {
            let named = |path: &PathBuf| (path.display().to_string(), path.clone());
            arguments.traces.iter().map(named).collect()
        }
    };
    if let Some(page) = &arguments.html {
        traces
            .iter()
            .try_for_each(|(_, trace)| refuse_overwriting_source("--html", page, trace))?;
    }
    if let Some(job) = job(arguments, &traces)? {
        if let Some(file) = &arguments.html {
            write_diagnosis_page(file, pages::ranks::page(&job))?;
        }
        match arguments.format {
            DiagnosisFormat::Json => print_json(&json!({
                "schema_version": DIAGNOSIS_SCHEMA,
                "job": job.to_json(),
            }))?,
            DiagnosisFormat::Text => print_text(&job.to_text()),
        }
        let outcome = DiagnosesOutcome { answered: job.joined > 0, worst: job.worst_severity() };
        return Ok(outcome.exit(arguments.fail_on));
    }
    anyhow::ensure!(
        arguments.html.is_none() || traces.len() == 1,
        "--html takes one trace, or the ranks of one job with --ranks, not {} traces",
        traces.len()
    );
    let together = arguments.traces.len() == 2 && !arguments.each && !arguments.checklist;
    anyhow::ensure!(
        arguments.fail_on.is_none() || !together,
        "--fail-on judges findings of single traces, not a comparison; add --each"
    );
    match &traces[..] {
        [base, head] if together => {
            compare_traces(arguments, [base, head])?;
            Ok(ExitReason::Fine)
        }
        traces => Ok(diagnose_each(arguments, traces)?.exit(arguments.fail_on)),
    }
}

/// Joins the traces as ranks of one job, if they belong to one.
fn job(
    arguments: &DiagnoseArguments,
    traces: &[(String, PathBuf)],
) -> anyhow::Result<Option<JoinedJob>> {
    let alone = arguments.each || arguments.checklist || arguments.range.is_some();
    // Only JSON traces can declare ranks.
    let declares = |(_, path): &(String, PathBuf)| path.to_string_lossy().contains(".json");
    let candidates = match traces.len() {
        _ if arguments.ranks => true,
        0 | 1 => false,
        2 => !alone && traces.iter().all(declares),
        _ => !alone,
    };
    if !candidates {
        return Ok(None);
    }
    let parts =
        ranks::read_rank_traces(traces).map_err(|error| anyhow::anyhow!("failed to {error}"))?;
    if traces.len() == 2 && !arguments.ranks && !ranks::have_different_ranks(&parts) {
        return Ok(None);
    }
    let job = ranks::join_ranks(parts);
    Ok(Some(job).filter(|job| arguments.ranks || job.joined > 0))
}

fn diagnose_each(
    arguments: &DiagnoseArguments,
    traces: &[(String, PathBuf)],
) -> anyhow::Result<DiagnosesOutcome> {
    let mut all: Vec<Value> = Vec::new();
    let mut outcome = DiagnosesOutcome::default();
    for (index, (name, path)) in traces.iter().enumerate() {
        let (diagnosis, gpus) = match &arguments.html {
            Some(file) => {
                let trace = load_trace(path, arguments)?;
                let diagnosis = diagnose(&trace);
                let gpus = diagnose_ranks(name, path, arguments, &diagnosis)?;
                write_diagnosis_page(
                    file,
                    pages::trace::trace_page(name, &trace, &diagnosis, gpus.as_ref()),
                )?;
                (diagnosis, gpus)
            }
            None => {
                let diagnosis = analyze_trace(path, arguments, diagnose_streamed, diagnose)?;
                let gpus = diagnose_ranks(name, path, arguments, &diagnosis)?;
                (diagnosis, gpus)
            }
        };
        outcome.add(&diagnosis);
        let lines = checklist::checklist(&diagnosis);
        if arguments.format == DiagnosisFormat::Json {
            let mut value = match arguments.checklist {
                true => json!({ "trace": name, "checklist": checklist::to_json(&lines) }),
                false => json!({ "trace": name, "diagnosis": diagnosis.to_json() }),
            };
            if let Some(gpus) = &gpus {
                value["gpus"] = gpus.to_json();
            }
            all.push(value);
            continue;
        }
        if traces.len() > 1 {
            println!("{}{}", if index > 0 { "\n" } else { "" }, printable_on_terminal(name));
        }
        print_text(&match arguments.checklist {
            true => checklist::to_text(&lines),
            false => diagnosis.to_text(),
        });
        if let Some(gpus) = &gpus {
            println!();
            print_text(&gpus.to_text());
        }
    }
    if arguments.format == DiagnosisFormat::Json {
        print_json(&json!({ "schema_version": DIAGNOSIS_SCHEMA, "traces": all }))?;
    }
    Ok(outcome)
}

/// The GPUs of a trace as ranks, where the whole trace is diagnosed.
fn diagnose_ranks(
    name: &str,
    path: &Path,
    arguments: &DiagnoseArguments,
    diagnosis: &TraceDiagnosis,
) -> anyhow::Result<Option<JoinedJob>> {
    match arguments.range.is_some() || arguments.checklist {
        true => Ok(None),
        false => trace_file::gpus(name, path, diagnosis),
    }
}

/// Prints the changes from one trace to another; both traces are read one after the other.
fn compare_traces(
    arguments: &DiagnoseArguments,
    traces: [&(String, PathBuf); 2],
) -> anyhow::Result<()> {
    let [base, head] = traces
        .map(|(_, path)| analyze_trace(path, arguments, TraceSums::sum_streamed, TraceSums::new));
    let difference = compare_sums(base?, head?);
    let names = traces.map(|(name, _)| name);
    match arguments.format {
        DiagnosisFormat::Json => print_json(&json!({
            "schema_version": DIAGNOSIS_SCHEMA,
            "compared": names,
            "difference": difference.to_json(),
        })),
        DiagnosisFormat::Text => {
            print_text(&difference.to_text(names.map(String::as_str)));
            Ok(())
        }
    }
}

/// The case filter, if the only word names no file: files have an extension or begin with the root
/// or the current folder (`/tmp/trace`, `./trace`), cases do not.
fn case_filter_word(words: &[PathBuf]) -> Option<String> {
    let [word] = words else { return None };
    let first = word.components().next();
    let is_path = matches!(
        first,
        Some(Component::RootDir | Component::Prefix(_) | Component::CurDir | Component::ParentDir)
    );
    let names_a_file = is_path || word.exists() || word.extension().is_some();
    (!names_a_file).then(|| word.to_str().map(str::to_owned)).flatten()
}

/// Prints a text of the file and escapes its control characters.
fn print_text(text: &str) {
    text.lines().for_each(|line| println!("{}", printable_on_terminal(line)));
}

/// Analyses a trace while it is read if possible, because a large trace does not fit into memory.
fn analyze_trace<T>(
    path: &Path,
    arguments: &DiagnoseArguments,
    streamed: impl Fn(&Path) -> Result<Option<T>, TraceError>,
    held: impl Fn(&Trace) -> T,
) -> anyhow::Result<T> {
    let streamed = match arguments.range {
        Some(_) => None,
        None => streamed(path).map_err(|error| anyhow::anyhow!("failed to {error}"))?,
    };
    streamed.map_or_else(|| load_trace(path, arguments).map(|trace| held(&trace)), Ok)
}

fn load_trace(path: &Path, arguments: &DiagnoseArguments) -> anyhow::Result<Trace> {
    trace_file::read_trace_tables(path, &WantedTraceParts::ALL, arguments.range.as_deref())
}

fn write_diagnosis_page(file: &Path, page: Result<String, PlotError>) -> anyhow::Result<()> {
    file::write_text(file, &page.context("--html")?).context("--html")?;
    eprintln!("page: {}", printable_path(file));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_distinguished_as_case_ids_or_paths() {
        let filter_of = |word: &str| case_filter_word(&[PathBuf::from(word)]);
        for filter in ["attention/forward/n64/cuda/hot", "^st_bif/", "graph"] {
            assert_eq!(filter_of(filter).as_deref(), Some(filter));
        }
        for path in ["/no/such/trace", "./trace", "../trace", "none.sqlite", "none.json", "."] {
            assert_eq!(filter_of(path), None, "{path}");
        }
    }
}
