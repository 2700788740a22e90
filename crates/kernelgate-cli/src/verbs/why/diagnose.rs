//! `kernelgate diagnose`: finds what costs time in a trace or in a case that is recorded now, with
//! evidence, or shows what changed between two traces.

use std::path::{Component, Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use kernelgate::exit::ProcessExitReason;
use kernelgate::record::text::{clean_message_for_terminal, path_for_terminal};
use kernelgate::record::{RecordFoldersOfPackage, file};
use kernelgate_trace::TraceError;
use kernelgate_trace::diagnose::difference::{SummedTimesOfTrace, compare_summed_traces};
use kernelgate_trace::diagnose::ranks::{self, JobOfJoinedRanks};
use kernelgate_trace::diagnose::{
    FindingSeverity, TraceDiagnosis, checklist, diagnose_export_while_reading,
    diagnose_trace_in_memory,
};
use kernelgate_trace::model::Trace;
use kernelgate_trace::read::WantedTraceParts;
use serde_json::{Value, json};

use super::{profile, trace_file};
use crate::pages;
use crate::plot::ChartDrawingError;
use crate::verbs::shared::case_selection::BenchSelectionFlags;
use crate::verbs::shared::output::{print_as_json, refuse_to_overwrite_input};

/// Version of the outer JSON object of `kernelgate diagnose`; each diagnosis inside has a version
/// of its own.
const DIAGNOSE_JSON_VERSION: u32 = 1;

#[derive(Debug, Args)]
pub struct DiagnoseCommandArguments {
    /// Traces: Traces to diagnose, which are SQLite exports or reports of Nsight Systems, reports
    /// or CSV of Nsight Compute, JSON of PyTorch's profiler, JAX or rocprofv3 (.gz too), or
    /// recordings of `kernelgate profile`. Two traces are compared with each other, unless --each
    /// is given. In place of traces: one case id, or a regular expression of several, to record and
    /// diagnose
    #[arg(id = "traces", required = true, value_name = "TRACE|CASE")]
    traces_or_case_filter: Vec<PathBuf>,
    /// Use only GPU work that was launched inside ranges of this path, or of a path with this end;
    /// `*` matches any text
    #[arg(id = "range", long = "range", value_name = "PATH")]
    range_path_pattern: Option<String>,
    /// Diagnose two traces one after the other, in place of comparing them
    #[arg(id = "each", long = "each")]
    diagnoses_each_alone: bool,
    /// Join the traces as ranks of one distributed job, and show which rank waits for which. This
    /// is the default for three or more traces that communicate, and for two that declare different
    /// ranks
    #[arg(id = "ranks", long = "ranks", conflicts_with_all = ["each", "range", "checklist"])]
    joins_traces_as_ranks: bool,
    /// Print the checklist of the profiling guides with the trace's answers, in place of the
    /// diagnosis
    #[arg(id = "checklist", long = "checklist")]
    prints_checklist: bool,
    /// Exit with 1 if a finding is at least as severe as this
    #[arg(long, value_enum, value_name = "SEVERITY")]
    fail_on: Option<FailOnSeverity>,
    /// Format in which the diagnosis is printed
    #[arg(long, value_enum, default_value_t)]
    format: DiagnosisOutputFormat,
    /// Also write an HTML page into this file: findings, timeline and tables of one trace, or of
    /// the ranks of one job
    #[arg(long = "html", value_name = "FILE")]
    html_output_file: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Options for a case")]
    benches: BenchSelectionFlags,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum DiagnosisOutputFormat {
    /// For a terminal
    #[default]
    Text,
    /// For programs
    Json,
}

/// Least severity of a finding that makes the exit code of `kernelgate diagnose` 1 (flag
/// `--fail-on`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum FailOnSeverity {
    /// Any finding
    Information,
    /// A finding that costs any time
    Warning,
    /// A finding that costs at least a tenth of the time
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

/// Whether the diagnoses of a call answered anything, and their worst finding, which decide the
/// exit code.
#[derive(Debug, Clone, Copy, Default)]
struct DiagnosesForExitCode {
    /// Whether any of the diagnosed traces had data of a GPU, so that a diagnosis could be made.
    answered_any_gpu_question: bool,
    worst_severity: Option<FindingSeverity>,
}

impl DiagnosesForExitCode {
    fn note_diagnosis_for_exit_code(&mut self, diagnosis: &TraceDiagnosis) {
        self.answered_any_gpu_question |= diagnosis.answers_any_gpu_question();
        self.worst_severity = self.worst_severity.max(diagnosis.worst_severity_of_findings());
    }

    fn exit_reason(self, fail_on: Option<FailOnSeverity>) -> ProcessExitReason {
        let fails = fail_on.is_some_and(|flag| self.worst_severity >= Some(flag.into()));
        match self.answered_any_gpu_question {
            false => ProcessExitReason::Inconclusive,
            true if fails => ProcessExitReason::Regression,
            true => ProcessExitReason::Success,
        }
    }
}

pub fn run_diagnose_command(
    arguments: &DiagnoseCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    let folder = tempfile::tempdir()?;
    let traces: Vec<(String, PathBuf)> =
        match argument_as_case_filter(&arguments.traces_or_case_filter) {
            Some(filter) => {
                profile::record_cases_to_folder(&filter, &arguments.benches, store, folder.path())?
            }
            None => {
                let named = |path: &PathBuf| (path.display().to_string(), path.clone());
                arguments.traces_or_case_filter.iter().map(named).collect()
            }
        };
    if let Some(page) = &arguments.html_output_file {
        traces
            .iter()
            .try_for_each(|(_, trace)| refuse_to_overwrite_input("--html", page, trace))?;
    }
    if let Some(job) = join_traces_as_ranks(arguments, &traces)? {
        if let Some(file) = &arguments.html_output_file {
            write_html_page_of_diagnosis(file, pages::ranks::ranks_page(&job))?;
        }
        match arguments.format {
            DiagnosisOutputFormat::Json => print_as_json(&json!({
                "schema_version": DIAGNOSE_JSON_VERSION,
                "job": job.job_to_json(),
            }))?,
            DiagnosisOutputFormat::Text => print_escaped(&job.job_to_text()),
        }
        let outcome = DiagnosesForExitCode {
            answered_any_gpu_question: job.joined_collectives > 0,
            worst_severity: job.severity_of_worst_straggler(),
        };
        return Ok(outcome.exit_reason(arguments.fail_on));
    }
    anyhow::ensure!(
        arguments.html_output_file.is_none() || traces.len() == 1,
        "--html takes one trace, or the ranks of one job with --ranks, not {} traces",
        traces.len()
    );
    let together = arguments.traces_or_case_filter.len() == 2
        && !arguments.diagnoses_each_alone
        && !arguments.prints_checklist;
    anyhow::ensure!(
        arguments.fail_on.is_none() || !together,
        "--fail-on judges findings of single traces, not a comparison; add --each"
    );
    match &traces[..] {
        [base, head] if together => {
            print_changes_between_traces(arguments, [base, head])?;
            Ok(ProcessExitReason::Success)
        }
        traces => Ok(diagnose_each_trace(arguments, traces)?.exit_reason(arguments.fail_on)),
    }
}

/// Joins the traces as ranks of one distributed job; `None` if they are separate traces.
fn join_traces_as_ranks(
    arguments: &DiagnoseCommandArguments,
    traces: &[(String, PathBuf)],
) -> anyhow::Result<Option<JobOfJoinedRanks>> {
    let alone = arguments.diagnoses_each_alone
        || arguments.prints_checklist
        || arguments.range_path_pattern.is_some();
    // Only traces in JSON format can declare a rank.
    let declares = |(_, path): &(String, PathBuf)| path.to_string_lossy().contains(".json");
    let candidates = match traces.len() {
        _ if arguments.joins_traces_as_ranks => true,
        0 | 1 => false,
        2 => !alone && traces.iter().all(declares),
        _ => !alone,
    };
    if !candidates {
        return Ok(None);
    }
    let parts = ranks::read_traces_of_ranks(traces)
        .map_err(|error| anyhow::anyhow!("failed to {error}"))?;
    if traces.len() == 2
        && !arguments.joins_traces_as_ranks
        && !ranks::do_traces_declare_different_ranks(&parts)
    {
        return Ok(None);
    }
    let job = ranks::join_ranks_to_job(parts);
    Ok(Some(job).filter(|job| arguments.joins_traces_as_ranks || job.joined_collectives > 0))
}

fn diagnose_each_trace(
    arguments: &DiagnoseCommandArguments,
    traces: &[(String, PathBuf)],
) -> anyhow::Result<DiagnosesForExitCode> {
    let mut all: Vec<Value> = Vec::new();
    let mut outcome = DiagnosesForExitCode::default();
    for (index, (name, path)) in traces.iter().enumerate() {
        let (diagnosis, gpus) = match &arguments.html_output_file {
            Some(file) => {
                let trace = load_trace_inside_range(path, arguments)?;
                let diagnosis = diagnose_trace_in_memory(&trace);
                let gpus = diagnose_gpus_as_ranks(name, path, arguments, &diagnosis)?;
                write_html_page_of_diagnosis(
                    file,
                    pages::trace::trace_diagnosis_page(name, &trace, &diagnosis, gpus.as_ref()),
                )?;
                (diagnosis, gpus)
            }
            None => {
                let diagnosis = analyze_streamed_or_loaded_trace(
                    path,
                    arguments,
                    diagnose_export_while_reading,
                    diagnose_trace_in_memory,
                )?;
                let gpus = diagnose_gpus_as_ranks(name, path, arguments, &diagnosis)?;
                (diagnosis, gpus)
            }
        };
        outcome.note_diagnosis_for_exit_code(&diagnosis);
        let lines = checklist::fill_in_checklist(&diagnosis);
        if arguments.format == DiagnosisOutputFormat::Json {
            let mut value = match arguments.prints_checklist {
                true => json!({ "trace": name, "checklist": checklist::checklist_to_json(&lines) }),
                false => json!({ "trace": name, "diagnosis": diagnosis.diagnosis_to_json() }),
            };
            if let Some(gpus) = &gpus {
                value["gpus"] = gpus.job_to_json();
            }
            all.push(value);
            continue;
        }
        if traces.len() > 1 {
            println!("{}{}", if index > 0 { "\n" } else { "" }, clean_message_for_terminal(name));
        }
        print_escaped(&match arguments.prints_checklist {
            true => checklist::checklist_to_text(&lines),
            false => diagnosis.diagnosis_to_text(),
        });
        if let Some(gpus) = &gpus {
            println!();
            print_escaped(&gpus.job_to_text());
        }
    }
    if arguments.format == DiagnosisOutputFormat::Json {
        print_as_json(&json!({ "schema_version": DIAGNOSE_JSON_VERSION, "traces": all }))?;
    }
    Ok(outcome)
}

/// Joins the GPUs of one trace as ranks of a job; `None` if only ranges of the trace are diagnosed.
fn diagnose_gpus_as_ranks(
    name: &str,
    path: &Path,
    arguments: &DiagnoseCommandArguments,
    diagnosis: &TraceDiagnosis,
) -> anyhow::Result<Option<JobOfJoinedRanks>> {
    match arguments.range_path_pattern.is_some() || arguments.prints_checklist {
        true => Ok(None),
        false => trace_file::gpus_as_ranks(name, path, diagnosis),
    }
}

/// Prints the changes from a base trace to a head trace; the two traces are read one after the
/// other to save memory.
fn print_changes_between_traces(
    arguments: &DiagnoseCommandArguments,
    traces: [&(String, PathBuf); 2],
) -> anyhow::Result<()> {
    let [base, head] = traces.map(|(_, path)| {
        analyze_streamed_or_loaded_trace(
            path,
            arguments,
            SummedTimesOfTrace::sum_export_while_reading,
            SummedTimesOfTrace::sum_times_of_loaded_trace,
        )
    });
    let difference = compare_summed_traces(base?, head?);
    let names = traces.map(|(name, _)| name);
    match arguments.format {
        DiagnosisOutputFormat::Json => print_as_json(&json!({
            "schema_version": DIAGNOSE_JSON_VERSION,
            "compared": names,
            "difference": difference.difference_to_json(),
        })),
        DiagnosisOutputFormat::Text => {
            print_escaped(&difference.difference_to_text(names.map(String::as_str)));
            Ok(())
        }
    }
}

/// The case filter, if the only argument is not a file; a word with an extension or a path such as
/// `/tmp/trace` or `./trace` is a file.
fn argument_as_case_filter(words: &[PathBuf]) -> Option<String> {
    let [word] = words else { return None };
    let first = word.components().next();
    let is_path = matches!(
        first,
        Some(Component::RootDir | Component::Prefix(_) | Component::CurDir | Component::ParentDir)
    );
    let names_a_file = is_path || word.exists() || word.extension().is_some();
    (!names_a_file).then(|| word.to_str().map(str::to_owned)).flatten()
}

/// Prints a text, with control characters from the trace file escaped.
fn print_escaped(text: &str) {
    text.lines().for_each(|line| println!("{}", clean_message_for_terminal(line)));
}

/// Analyses a trace while it is read if its format allows this, because a large trace does not fit
/// into memory.
fn analyze_streamed_or_loaded_trace<T>(
    path: &Path,
    arguments: &DiagnoseCommandArguments,
    streamed: impl Fn(&Path) -> Result<Option<T>, TraceError>,
    held: impl Fn(&Trace) -> T,
) -> anyhow::Result<T> {
    let streamed = match arguments.range_path_pattern {
        Some(_) => None,
        None => streamed(path).map_err(|error| anyhow::anyhow!("failed to {error}"))?,
    };
    streamed.map_or_else(|| load_trace_inside_range(path, arguments).map(|trace| held(&trace)), Ok)
}

fn load_trace_inside_range(
    path: &Path,
    arguments: &DiagnoseCommandArguments,
) -> anyhow::Result<Trace> {
    trace_file::read_trace_inside_range(
        path,
        &WantedTraceParts::ALL,
        arguments.range_path_pattern.as_deref(),
    )
}

fn write_html_page_of_diagnosis(
    file: &Path,
    page: Result<String, ChartDrawingError>,
) -> anyhow::Result<()> {
    file::write_text_atomically(file, &page.context("--html")?).context("--html")?;
    eprintln!("page: {}", path_for_terminal(file));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_argument_is_taken_as_case_id_or_path() {
        let filter_of = |word: &str| argument_as_case_filter(&[PathBuf::from(word)]);
        for filter in ["attention/forward/n64/cuda/hot", "^st_bif/", "graph"] {
            assert_eq!(filter_of(filter).as_deref(), Some(filter));
        }
        for path in ["/no/such/trace", "./trace", "../trace", "none.sqlite", "none.json", "."] {
            assert_eq!(filter_of(path), None, "{path}");
        }
    }
}
