//! `kernelgate diff`: prints the median times of two recorded runs side by side. `kernelgate diff`
//! gives no verdict, because two runs may differ in machine, load and time of day; `kernelgate
//! compare` and `kernelgate gate` give verdicts.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use kernelgate::display;
use kernelgate::display::table::AlignedTextTable;
use kernelgate::exit::ProcessExitReason;
use kernelgate::record::environment::IncomparableEnvironmentField;
use kernelgate::record::{BenchProcessRun, RecordFoldersOfPackage};
use serde::Serialize;

use crate::report::formats::metrics::{self, MetricsByCase};
use crate::report::judgement_cells;
use crate::verbs::shared::output::{OutputFormat, print_as_json};

#[derive(Debug, clap::Args)]
pub struct DiffCommandArguments {
    /// Base run of the comparison: its name, or its folder
    #[arg(id = "base", value_name = "BASE")]
    base_run: PathBuf,
    /// Head run, which is compared with BASE: its name, or its folder
    #[arg(id = "head", value_name = "HEAD")]
    head_run: PathBuf,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

/// A table row with the median times of one case in two recorded runs.
#[derive(Debug, Serialize)]
struct CaseInTwoRuns {
    #[serde(rename = "case")]
    case_id: String,
    #[serde(rename = "base_ns")]
    base_median_ns: Option<f64>,
    #[serde(rename = "head_ns")]
    head_median_ns: Option<f64>,
    /// Relative change of the case's time from the base run to the head run.
    #[serde(rename = "change")]
    relative_change: Option<f64>,
}

pub fn run_diff_command(
    arguments: &DiffCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    let base = read_runs_by_folder_or_name(&arguments.base_run, store)?;
    let head = read_runs_by_folder_or_name(&arguments.head_run, store)?;
    let rows = rows_of_cases_in_either_run(
        &metrics::metrics_of_process_runs(&base),
        &metrics::metrics_of_process_runs(&head),
    );
    if arguments.format == OutputFormat::Json {
        print_as_json(&rows)?;
        return Ok(ProcessExitReason::Success);
    }
    let mut table = AlignedTextTable::new(&["case", "base", "head", "change"]);
    let time = |ns: Option<f64>| ns.map_or_else(|| "-".to_owned(), display::time_text);
    for row in &rows {
        let change = row.relative_change.map_or_else(
            || "-".to_owned(),
            |change| judgement_cells::ratio_as_percent_change(1.0 + change),
        );
        table.add_row(vec![
            row.case_id.clone(),
            time(row.base_median_ns),
            time(row.head_median_ns),
            change,
        ]);
    }
    let note = "Medians of two recorded runs, not a verdict: `kernelgate compare` decides.";
    let differing = differing_environment_facts(&base, &head);
    arguments.format.print_wrapped_lines(&format!(
        "{}\n{differing}{note}",
        arguments.format.format_table(&table)
    ));
    Ok(ProcessExitReason::Success)
}

/// Reads the process runs in a folder, or those of the recorded session with this name.
fn read_runs_by_folder_or_name(
    run: &Path,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<Vec<BenchProcessRun>> {
    let folder = if run.is_dir() { run.to_owned() } else { store.runs_folder.join(run) };
    let sessions = store.read_sessions_in_folders([folder.as_path()])?;
    Ok(sessions.into_iter().flat_map(|session| session.runs).collect())
}

fn rows_of_cases_in_either_run(base: &MetricsByCase, head: &MetricsByCase) -> Vec<CaseInTwoRuns> {
    let ids: BTreeSet<&String> = base.keys().chain(head.keys()).collect();
    let row = |id: &String| {
        let [base_ns, head_ns] =
            [base, head].map(|side| Some(side.get(id)?.launch_latency_ns.metric_value));
        let change = base_ns.zip(head_ns).map(|(base, head)| head / base - 1.0);
        CaseInTwoRuns {
            case_id: id.clone(),
            base_median_ns: base_ns,
            head_median_ns: head_ns,
            relative_change: change,
        }
    };
    ids.into_iter().map(row).collect()
}

/// A line for each fact of the environment (GPU, driver, …) that differs between the two runs.
fn differing_environment_facts(base: &[BenchProcessRun], head: &[BenchProcessRun]) -> String {
    let pair = base.first().zip(head.first());
    let mismatches =
        pair.map(|(base, head)| head.environment.incomparable_facts_with_base(&base.environment));
    let line = |IncomparableEnvironmentField {
                    field_name: field,
                    base_value: base,
                    head_value: head,
                }: IncomparableEnvironmentField| {
        format!("{field}: {base}, now {head}\n")
    };
    mismatches.unwrap_or_default().into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::record::{CaseRecordWithSamples, CommitAndChanges, RunEnvironment};

    #[test]
    fn the_change_of_a_case_in_only_one_run_is_unknown() {
        let side = |cases: [(&str, f64); 2]| {
            let mut run = BenchProcessRun::empty_run_starting_now(
                "b",
                "s",
                RunEnvironment::environment_of_process_on_cpu(),
                CommitAndChanges::default(),
            );
            let case = |(id, ns): (&str, f64)| {
                (id.to_owned(), CaseRecordWithSamples::example_with_sample_times(vec![ns]))
            };
            run.cases.extend(cases.map(case));
            run.cases.insert(
                "empty".to_owned(),
                CaseRecordWithSamples::example_with_sample_times(vec![]),
            );
            metrics::metrics_of_process_runs(&[run])
        };
        let base = side([("both", 100.0), ("gone", 5.0)]);
        let head = side([("both", 150.0), ("new", 7.0)]);
        let rows = rows_of_cases_in_either_run(&base, &head);
        let changes: Vec<_> =
            rows.iter().map(|row| (row.case_id.as_str(), row.relative_change)).collect();
        assert_eq!(changes, [("both", Some(0.5)), ("gone", None), ("new", None)]);
    }
}
