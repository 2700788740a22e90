//! `kernelgate diff`: shows the medians of two recorded runs side by side. Deliberately absent: a
//! verdict, because two runs differ by machine, load and time; `compare` and `gate` decide.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use kernelgate::display;
use kernelgate::display::table::TextTable;
use kernelgate::exit::ExitReason;
use kernelgate::record::environment::EnvironmentMismatch;
use kernelgate::record::{BaselineStore, ProcessRun};
use serde::Serialize;

use crate::report::formats::metrics::{self, MetricsByCase};
use crate::report::judgement_cells;
use crate::verbs::shared::output::{OutputFormat, print_json};

#[derive(Debug, clap::Args)]
pub struct DiffArguments {
    /// Run to compare with: its name, or its folder
    #[arg(value_name = "BASE")]
    base: PathBuf,
    /// Run that is compared with BASE: its name, or its folder
    #[arg(value_name = "HEAD")]
    head: PathBuf,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

/// A table row: one case in two runs.
#[derive(Debug, Serialize)]
struct DiffRow {
    case: String,
    base_ns: Option<f64>,
    head_ns: Option<f64>,
    /// Relative change of the time from base to head.
    change: Option<f64>,
}

pub fn run(arguments: &DiffArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    let base = read(&arguments.base, store)?;
    let head = read(&arguments.head, store)?;
    let rows = metric_rows(&metrics::from_runs(&base), &metrics::from_runs(&head));
    if arguments.format == OutputFormat::Json {
        print_json(&rows)?;
        return Ok(ExitReason::Fine);
    }
    let mut table = TextTable::new(&["case", "base", "head", "change"]);
    let time = |ns: Option<f64>| ns.map_or_else(|| "-".to_owned(), display::time_text);
    for row in &rows {
        let change = row
            .change
            .map_or_else(|| "-".to_owned(), |change| judgement_cells::percent(1.0 + change));
        table.row(vec![row.case.clone(), time(row.base_ns), time(row.head_ns), change]);
    }
    let note = "Medians of two recorded runs, not a verdict: `kernelgate compare` decides.";
    let differing = differing_facts(&base, &head);
    arguments.format.print(&format!("{}\n{differing}{note}", arguments.format.table(&table)));
    Ok(ExitReason::Fine)
}

/// The process runs in a folder, or of a recorded session of that name.
fn read(run: &Path, store: &BaselineStore) -> anyhow::Result<Vec<ProcessRun>> {
    let folder = if run.is_dir() { run.to_owned() } else { store.runs.join(run) };
    let sessions = store.sessions_in_folders([folder.as_path()])?;
    Ok(sessions.into_iter().flat_map(|session| session.runs).collect())
}

fn metric_rows(base: &MetricsByCase, head: &MetricsByCase) -> Vec<DiffRow> {
    let ids: BTreeSet<&String> = base.keys().chain(head.keys()).collect();
    let row = |id: &String| {
        let [base_ns, head_ns] = [base, head].map(|side| Some(side.get(id)?.latency.value));
        let change = base_ns.zip(head_ns).map(|(base, head)| head / base - 1.0);
        DiffRow { case: id.clone(), base_ns, head_ns, change }
    };
    ids.into_iter().map(row).collect()
}

/// A line for each fact in which the environments differ.
fn differing_facts(base: &[ProcessRun], head: &[ProcessRun]) -> String {
    let pair = base.first().zip(head.first());
    let mismatches = pair.map(|(base, head)| head.environment.mismatches(&base.environment));
    let line = |EnvironmentMismatch { field, base, head }: EnvironmentMismatch| {
        format!("{field}: {base}, now {head}\n")
    };
    mismatches.unwrap_or_default().into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::record::{CaseRecord, Environment, Provenance};

    #[test]
    fn a_case_with_a_single_run_has_no_change_of_time() {
        let side = |cases: [(&str, f64); 2]| {
            let mut run =
                ProcessRun::start_now("b", "s", Environment::cpu(), Provenance::default());
            let case =
                |(id, ns): (&str, f64)| (id.to_owned(), CaseRecord::untimed_samples(vec![ns]));
            run.cases.extend(cases.map(case));
            run.cases.insert("empty".to_owned(), CaseRecord::untimed_samples(vec![]));
            metrics::from_runs(&[run])
        };
        let base = side([("both", 100.0), ("gone", 5.0)]);
        let head = side([("both", 150.0), ("new", 7.0)]);
        let rows = metric_rows(&base, &head);
        let changes: Vec<_> = rows.iter().map(|row| (row.case.as_str(), row.change)).collect();
        assert_eq!(changes, [("both", Some(0.5)), ("gone", None), ("new", None)]);
    }
}
