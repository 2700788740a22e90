//! Writes the numbers of a report page as CSV and JSON.

use serde::Serialize;

use super::measured_runs::{CaseWithItsRuns, MeasurementsOfOneDevice};
use super::report::ReportPageContent;
use crate::history::CaseTimeHistory;
use kernelgate::display::harmless_text::EscapedForCsv;
use kernelgate::measure::limits::MeasuredDeviceLimits;
use kernelgate_cuda::CaseFailureReason;

/// Version of the JSON.
const REPORT_JSON_VERSION: u32 = 1;

/// The numbers of a case as one line of a CSV file; unknown values are empty.
#[derive(Debug, Serialize)]
struct CaseAsCsvLine<'a> {
    case: &'a str,
    workload: &'a str,
    problem: &'a str,
    implementation: &'a str,
    cache: &'a str,
    runs: usize,
    /// Median over the process runs of their median times, nanoseconds per launch.
    median_ns: f64,
    min_ns: f64,
    max_ns: f64,
    /// Half the interquartile range of a process run's samples, divided by their median.
    spread: f64,
    /// Median SM clock.
    clock_mhz: Option<f64>,
    /// Distinct power states of the process runs, as text.
    power: String,
    /// Energy of one launch, joules; empty if it was not measured.
    launch_j: Option<f64>,
    limit_ns: Option<f64>,
    limited_by: Option<&'a str>,
    of_limit: Option<f64>,
    flops: f64,
    read_bytes: u64,
    write_bytes: u64,
    /// Rate of the amount that `rate_of` names, per second.
    rate: Option<f64>,
    rate_of: Option<&'static str>,
    max_error: Option<f64>,
    relative_l2: Option<f64>,
}

impl<'a> From<&'a CaseWithItsRuns> for CaseAsCsvLine<'a> {
    fn from(case: &'a CaseWithItsRuns) -> Self {
        let (min_ns, max_ns) = case.range_of_run_medians_ns();
        let median_ns = case.median_launch_ns();
        Self {
            case: &case.id,
            workload: &case.workload,
            problem: &case.problem,
            implementation: &case.implementation,
            cache: &case.cache,
            runs: case.medians_ns.len(),
            median_ns,
            min_ns,
            max_ns,
            spread: case.spread,
            clock_mhz: case.clock_mhz,
            power: case.distinct_power_states(),
            launch_j: case.launch_j,
            limit_ns: case.limit.as_ref().map(|limit| limit.time_ns),
            limited_by: case.limit.as_ref().map(|limit| &*limit.by),
            of_limit: case.fraction_of_limit(),
            flops: case.total_declared_flops(),
            read_bytes: case.work.read_bytes,
            write_bytes: case.work.write_bytes,
            rate: case.declared_amount_and_unit().map(|(amount, _)| amount / median_ns * 1e9),
            rate_of: case.declared_amount_and_unit().map(|(_, unit)| unit),
            max_error: case.errors.map(|errors| errors.max_error),
            relative_l2: case.errors.map(|errors| errors.relative_l2),
        }
    }
}

/// The times of a case at one commit as one line of a CSV file; unknown values are empty.
#[derive(Debug, Serialize)]
struct CommitTimesAsCsvLine<'a> {
    case: &'a str,
    revision: u32,
    device: &'a str,
    card: Option<&'a str>,
    commit: Option<&'a str>,
    dirty: bool,
    started_ms: i64,
    runs: usize,
    /// Median over the commit's process runs of their median times, nanoseconds per launch.
    median_ns: f64,
    min_ns: f64,
    max_ns: f64,
    /// Relative change of the time level, if the level changed at this commit; otherwise empty.
    change: Option<f64>,
}

/// Makes a CSV text with one line for each measured case.
pub fn cases_as_csv(measured: &MeasurementsOfOneDevice) -> Result<String, csv::Error> {
    csv_from_lines(measured.cases.iter().map(CaseAsCsvLine::from))
}

/// Makes a CSV text with one line for each commit of each case's history.
pub fn histories_as_csv(histories: &[CaseTimeHistory]) -> Result<String, csv::Error> {
    csv_from_lines(histories.iter().flat_map(csv_lines_of_history))
}

fn csv_lines_of_history(
    history: &CaseTimeHistory,
) -> impl Iterator<Item = CommitTimesAsCsvLine<'_>> {
    history.points.iter().enumerate().map(|(at, point)| CommitTimesAsCsvLine {
        case: &history.case,
        revision: history.revision,
        device: &history.device,
        card: history.card.as_deref(),
        commit: point.commit.as_deref(),
        dirty: point.dirty,
        started_ms: point.started_ms,
        runs: point.runs_ns.len(),
        median_ns: point.median_ns,
        min_ns: point.low_ns,
        max_ns: point.high_ns,
        change: history.changes.iter().find(|it| it.first_point_after == at).map(|it| it.change),
    })
}

fn csv_from_lines(lines: impl Iterator<Item = impl Serialize>) -> Result<String, csv::Error> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    for line in lines {
        writer.serialize(line)?;
    }
    let bytes = writer.into_inner().map_err(|error| error.into_error())?;
    escape_spreadsheet_formulas(&bytes)
}

/// Escapes the CSV fields that a spreadsheet program would execute as formulas.
fn escape_spreadsheet_formulas(bytes: &[u8]) -> Result<String, csv::Error> {
    let mut reader = csv::ReaderBuilder::new().has_headers(false).from_reader(bytes);
    let mut writer = csv::Writer::from_writer(Vec::new());
    for record in reader.records() {
        writer.write_record(record?.iter().map(|field| EscapedForCsv(field).to_string()))?;
    }
    let bytes = writer.into_inner().map_err(|error| error.into_error())?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// All numbers of a report page, in the form that is written to `report.json`.
#[derive(Debug, Serialize)]
pub struct ReportNumbersJson<'a> {
    schema_version: u32,
    device: &'a str,
    facts: Vec<(&'a str, &'a str)>,
    limits: &'a MeasuredDeviceLimits,
    cases: Vec<CaseNumbersJson<'a>>,
    peers: Vec<(&'a str, &'a str, f64)>,
    histories: &'a [CaseTimeHistory],
    skipped: &'a std::collections::BTreeMap<String, std::collections::BTreeSet<String>>,
    failed: &'a std::collections::BTreeMap<String, CaseFailureReason>,
}

#[derive(Debug, Serialize)]
struct CaseNumbersJson<'a> {
    numbers: CaseAsCsvLine<'a>,
    medians_ns: &'a [f64],
}

/// Collects the numbers of a report page for `report.json`.
pub fn numbers_of_report_page<'a>(content: &ReportPageContent<'a>) -> ReportNumbersJson<'a> {
    let measured = content.measured;
    let case = |case: &'a CaseWithItsRuns| CaseNumbersJson {
        numbers: CaseAsCsvLine::from(case),
        medians_ns: &case.medians_ns,
    };
    ReportNumbersJson {
        schema_version: REPORT_JSON_VERSION,
        device: &measured.device,
        facts: measured.facts.iter().map(|(name, words)| (*name, words.as_str())).collect(),
        limits: &measured.limits,
        cases: measured.cases.iter().map(case).collect(),
        peers: measured
            .peers
            .iter()
            .map(|time| (&*time.problem, &*time.peer, time.peer_ns))
            .collect(),
        histories: content.history.map_or(&[], |history| &history.histories),
        skipped: &measured.skipped,
        failed: &measured.failed,
    }
}
