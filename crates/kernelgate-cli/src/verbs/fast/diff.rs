//! `kernelgate diff`: shows the medians of two recorded runs side by side. Deliberately absent: a
//! verdict, because two runs differ by machine, load and time; `compare` and `gate` decide.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use kernelgate::display;
use kernelgate::display::table::Table;
use kernelgate::exit::Exit;
use kernelgate::record::environment::Mismatch;
use kernelgate::record::{ProcessRun, Store};
use kernelgate::stats;
use serde::Serialize;

use crate::report::cells;
use crate::verbs::shared::output::{OutputFormat, print_json};

#[derive(Debug, clap::Args)]
pub struct Arguments {
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

/// A case of two runs.
#[derive(Debug, Serialize)]
struct Row {
    case: String,
    base_ns: Option<f64>,
    head_ns: Option<f64>,
    /// Relative change from base to head.
    change: Option<f64>,
}

pub fn run(arguments: &Arguments, store: &Store) -> anyhow::Result<Exit> {
    let base = read(&arguments.base, store)?;
    let head = read(&arguments.head, store)?;
    let rows = rows(&medians(&base), &medians(&head));
    if arguments.format == OutputFormat::Json {
        print_json(&rows)?;
        return Ok(Exit::Fine);
    }
    let mut table = Table::new(&["case", "base", "head", "change"]);
    let time = |ns: Option<f64>| ns.map_or_else(|| "-".to_owned(), display::time);
    for row in &rows {
        let change =
            row.change.map_or_else(|| "-".to_owned(), |change| cells::percent(1.0 + change));
        table.row(vec![row.case.clone(), time(row.base_ns), time(row.head_ns), change]);
    }
    let note = "Medians of two recorded runs, not a verdict: `kernelgate compare` decides.";
    let differing = differing(&base, &head);
    arguments.format.print(&format!("{}\n{differing}{note}", arguments.format.table(&table)));
    Ok(Exit::Fine)
}

/// The process runs in a folder, or of a recorded session of that name.
fn read(run: &Path, store: &Store) -> anyhow::Result<Vec<ProcessRun>> {
    let folder = if run.is_dir() { run.to_owned() } else { store.runs.join(run) };
    let sessions = store.sessions([folder.as_path()])?;
    Ok(sessions.into_iter().flat_map(|session| session.runs).collect())
}

/// Median time of a launch by case; for several process runs the median of their medians.
fn medians(runs: &[ProcessRun]) -> BTreeMap<&str, f64> {
    let mut times: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (id, case) in runs.iter().flat_map(|run| &run.cases) {
        let launches_ns = case.samples.per_launch_ns();
        if !launches_ns.is_empty() {
            times.entry(id).or_default().push(stats::median(&launches_ns));
        }
    }
    times.into_iter().map(|(id, medians)| (id, stats::median(&medians))).collect()
}

fn rows(base: &BTreeMap<&str, f64>, head: &BTreeMap<&str, f64>) -> Vec<Row> {
    let ids: BTreeSet<&str> = base.keys().chain(head.keys()).copied().collect();
    let row = |id: &str| {
        let (base_ns, head_ns) = (base.get(id).copied(), head.get(id).copied());
        let change = base_ns.zip(head_ns).map(|(base, head)| head / base - 1.0);
        Row { case: id.to_owned(), base_ns, head_ns, change }
    };
    ids.into_iter().map(row).collect()
}

/// A line for each fact in which the environments differ.
fn differing(base: &[ProcessRun], head: &[ProcessRun]) -> String {
    let pair = base.first().zip(head.first());
    let mismatches = pair.map(|(base, head)| head.environment.mismatches(&base.environment));
    let line = |Mismatch { field, base, head }: Mismatch| format!("{field}: {base}, now {head}\n");
    mismatches.unwrap_or_default().into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_of_one_run_has_no_change() {
        let base = BTreeMap::from([("both", 100.0), ("gone", 5.0)]);
        let head = BTreeMap::from([("both", 150.0), ("new", 7.0)]);
        let rows = rows(&base, &head);
        let changes: Vec<_> = rows.iter().map(|row| (row.case.as_str(), row.change)).collect();
        assert_eq!(changes, [("both", Some(0.5)), ("gone", None), ("new", None)]);
    }
}
