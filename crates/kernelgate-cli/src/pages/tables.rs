//! The numbers of a page as CSV and JSON.

use serde::Serialize;

use super::measured_runs::{MeasuredCase, ReportMeasurements};
use super::report::ReportContent;
use crate::history::CaseHistory;
use kernelgate::display::harmless_text::CsvText;
use kernelgate::measure::limits::DeviceLimits;
use kernelgate_cuda::CaseFailure;

/// Version of the JSON.
const REPORT_SCHEMA: u32 = 1;

/// A case, one line of the CSV; unknown values are empty.
#[derive(Debug, Serialize)]
struct CaseCsvRow<'a> {
    case: &'a str,
    workload: &'a str,
    problem: &'a str,
    implementation: &'a str,
    cache: &'a str,
    runs: usize,
    /// Median over the process runs, nanoseconds a launch.
    median_ns: f64,
    min_ns: f64,
    max_ns: f64,
    /// Half the interquartile range within a process over its median.
    spread: f64,
    /// Median SM clock.
    clock_mhz: Option<f64>,
    /// Power states of the process runs, as text.
    power: String,
    /// Energy of one launch, joules.
    launch_j: Option<f64>,
    limit_ns: Option<f64>,
    limited_by: Option<&'a str>,
    of_limit: Option<f64>,
    flops: f64,
    read_bytes: u64,
    write_bytes: u64,
    /// The rate of the amount that `rate_of` names, a second.
    rate: Option<f64>,
    rate_of: Option<&'static str>,
    max_error: Option<f64>,
    relative_l2: Option<f64>,
}

impl<'a> From<&'a MeasuredCase> for CaseCsvRow<'a> {
    fn from(case: &'a MeasuredCase) -> Self {
        let (min_ns, max_ns) = case.median_range_ns();
        let median_ns = case.median_time_ns();
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
            power: case.power_states(),
            launch_j: case.launch_j,
            limit_ns: case.limit.as_ref().map(|limit| limit.time_ns),
            limited_by: case.limit.as_ref().map(|limit| &*limit.by),
            of_limit: case.fraction_of_limit(),
            flops: case.flops(),
            read_bytes: case.work.read_bytes,
            write_bytes: case.work.write_bytes,
            rate: case.amount().map(|(amount, _)| amount / median_ns * 1e9),
            rate_of: case.amount().map(|(_, unit)| unit),
            max_error: case.errors.map(|errors| errors.max_error),
            relative_l2: case.errors.map(|errors| errors.relative_l2),
        }
    }
}

/// A commit of a case, one line of the CSV; unknown values are empty.
#[derive(Debug, Serialize)]
struct HistoryPointCsvRow<'a> {
    case: &'a str,
    revision: u32,
    device: &'a str,
    card: Option<&'a str>,
    commit: Option<&'a str>,
    dirty: bool,
    started_ms: i64,
    runs: usize,
    /// Median over the process runs, nanoseconds a launch.
    median_ns: f64,
    min_ns: f64,
    max_ns: f64,
    /// Relative change of the time, if the level changed at this commit.
    change: Option<f64>,
}

/// Makes a CSV table with one line for each case.
pub fn cases_csv(measured: &ReportMeasurements) -> Result<String, csv::Error> {
    csv(measured.cases.iter().map(CaseCsvRow::from))
}

/// A CSV with a line for each commit of each case.
pub fn history_csv(histories: &[CaseHistory]) -> Result<String, csv::Error> {
    csv(histories.iter().flat_map(csv_points))
}

fn csv_points(history: &CaseHistory) -> impl Iterator<Item = HistoryPointCsvRow<'_>> {
    history.points.iter().enumerate().map(|(at, point)| HistoryPointCsvRow {
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
        change: history.changes.iter().find(|it| it.point == at).map(|it| it.change),
    })
}

fn csv(lines: impl Iterator<Item = impl Serialize>) -> Result<String, csv::Error> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    for line in lines {
        writer.serialize(line)?;
    }
    let bytes = writer.into_inner().map_err(|error| error.into_error())?;
    escape_spreadsheet_formulas(&bytes)
}

/// Escapes fields that a spreadsheet would take for formulas.
fn escape_spreadsheet_formulas(bytes: &[u8]) -> Result<String, csv::Error> {
    let mut reader = csv::ReaderBuilder::new().has_headers(false).from_reader(bytes);
    let mut writer = csv::Writer::from_writer(Vec::new());
    for record in reader.records() {
        writer.write_record(record?.iter().map(|field| CsvText(field).to_string()))?;
    }
    let bytes = writer.into_inner().map_err(|error| error.into_error())?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// All numbers of a report page, written to `report.json`.
#[derive(Debug, Serialize)]
pub struct ReportJson<'a> {
    schema_version: u32,
    device: &'a str,
    facts: Vec<(&'a str, &'a str)>,
    limits: &'a DeviceLimits,
    cases: Vec<CaseJson<'a>>,
    peers: Vec<(&'a str, &'a str, f64)>,
    histories: &'a [CaseHistory],
    skipped: &'a std::collections::BTreeMap<String, std::collections::BTreeSet<String>>,
    failed: &'a std::collections::BTreeMap<String, CaseFailure>,
}

#[derive(Debug, Serialize)]
struct CaseJson<'a> {
    numbers: CaseCsvRow<'a>,
    medians_ns: &'a [f64],
}

/// Collects the numbers of a report page.
pub fn report_numbers<'a>(content: &ReportContent<'a>) -> ReportJson<'a> {
    let measured = content.measured;
    let case = |case: &'a MeasuredCase| CaseJson {
        numbers: CaseCsvRow::from(case),
        medians_ns: &case.medians_ns,
    };
    ReportJson {
        schema_version: REPORT_SCHEMA,
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
