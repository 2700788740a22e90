//! Writes the numbers of a report page as CSV and JSON.

use serde::Serialize;

use super::measured_runs::{CaseWithItsRuns, MeasurementsOfOneDevice};
use super::report::ReportPageContent;
use crate::history::CaseTimeHistory;
use kernelgate::display::harmless_text::EscapedForCsv;
use kernelgate::measure::limits::MeasuredDeviceLimits;
use kernelgate_cuda::CaseFailureReason;

/// Format version of the report page's `report.json`.
const REPORT_JSON_VERSION: u32 = 1;

/// The numbers of a case as one line of a CSV file; unknown values are empty.
#[derive(Debug, Serialize)]
struct CaseAsCsvLine<'a> {
    case: &'a str,
    workload: &'a str,
    #[serde(rename = "problem")]
    problem_id: &'a str,
    implementation: &'a str,
    #[serde(rename = "cache")]
    cache_state: &'a str,
    #[serde(rename = "runs")]
    run_count: usize,
    /// Median over the process runs of their median times, nanoseconds per launch.
    #[serde(rename = "median_ns")]
    median_launch_ns: f64,
    #[serde(rename = "min_ns")]
    smallest_run_median_ns: f64,
    #[serde(rename = "max_ns")]
    largest_run_median_ns: f64,
    /// Half the interquartile range of a process run's samples, divided by their median.
    #[serde(rename = "spread")]
    relative_half_interquartile_range: f64,
    /// Median SM clock.
    #[serde(rename = "clock_mhz")]
    median_sm_clock_mhz: Option<f64>,
    /// Distinct power states of the process runs, as text.
    #[serde(rename = "power")]
    power_states_text: String,
    /// Energy of one launch, joules; empty if it was not measured.
    #[serde(rename = "launch_j")]
    launch_energy_j: Option<f64>,
    #[serde(rename = "limit_ns")]
    launch_time_limit_ns: Option<f64>,
    #[serde(rename = "limited_by")]
    limiting_ceiling: Option<&'a str>,
    #[serde(rename = "of_limit")]
    fraction_of_limit: Option<f64>,
    #[serde(rename = "flops")]
    declared_flops: f64,
    #[serde(rename = "read_bytes")]
    declared_read_bytes: u64,
    #[serde(rename = "write_bytes")]
    declared_write_bytes: u64,
    /// Rate of the case's declared work per second, such as operations or bytes.
    #[serde(rename = "rate")]
    work_rate_per_s: Option<f64>,
    rate_of: Option<&'static str>,
    #[serde(rename = "max_error")]
    max_error_over_max_reference: Option<f64>,
    #[serde(rename = "relative_l2")]
    relative_l2_error: Option<f64>,
}

impl<'a> From<&'a CaseWithItsRuns> for CaseAsCsvLine<'a> {
    fn from(case: &'a CaseWithItsRuns) -> Self {
        let (min_ns, max_ns) = case.range_of_run_medians_ns();
        let median_ns = case.median_launch_ns();
        Self {
            case: &case.case_id,
            workload: &case.workload,
            problem_id: &case.problem_id,
            implementation: &case.implementation,
            cache_state: &case.cache_state,
            run_count: case.run_medians_ns.len(),
            median_launch_ns: median_ns,
            smallest_run_median_ns: min_ns,
            largest_run_median_ns: max_ns,
            relative_half_interquartile_range: case.relative_half_interquartile_range,
            median_sm_clock_mhz: case.median_sm_clock_mhz,
            power_states_text: case.distinct_power_states(),
            launch_energy_j: case.launch_energy_j,
            launch_time_limit_ns: case.limit.as_ref().map(|limit| limit.shortest_launch_ns),
            limiting_ceiling: case.limit.as_ref().map(|limit| &*limit.deciding_ceiling),
            fraction_of_limit: case.fraction_of_limit(),
            declared_flops: case.total_declared_flops(),
            declared_read_bytes: case.work.min_read_bytes,
            declared_write_bytes: case.work.min_write_bytes,
            work_rate_per_s: case
                .declared_amount_and_unit()
                .map(|(amount, _)| amount / median_ns * 1e9),
            rate_of: case.declared_amount_and_unit().map(|(_, unit)| unit),
            max_error_over_max_reference: case.errors.map(|errors| errors.max_error),
            relative_l2_error: case.errors.map(|errors| errors.relative_l2),
        }
    }
}

/// The times of a case at one commit as one line of a CSV file; unknown values are empty.
#[derive(Debug, Serialize)]
struct CommitTimesAsCsvLine<'a> {
    #[serde(rename = "case")]
    case_id: &'a str,
    #[serde(rename = "revision")]
    definition_revision: u32,
    device: &'a str,
    #[serde(rename = "card")]
    card_or_host_id: Option<&'a str>,
    #[serde(rename = "commit")]
    measured_commit: Option<&'a str>,
    #[serde(rename = "dirty")]
    differs_from_commit: bool,
    #[serde(rename = "started_ms")]
    first_process_start_unix_ms: i64,
    #[serde(rename = "runs")]
    run_count: usize,
    /// Median over the commit's process runs of their median times, nanoseconds per launch.
    #[serde(rename = "median_ns")]
    median_launch_ns: f64,
    #[serde(rename = "min_ns")]
    smallest_run_median_ns: f64,
    #[serde(rename = "max_ns")]
    largest_run_median_ns: f64,
    /// Relative change of the time level, if the level changed at this commit; otherwise empty.
    #[serde(rename = "change")]
    relative_level_change: Option<f64>,
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
        case_id: &history.current_case_id,
        definition_revision: history.definition_revision,
        device: &history.device,
        card_or_host_id: history.card_or_host_id.as_deref(),
        measured_commit: point.measured_commit.as_deref(),
        differs_from_commit: point.differs_from_commit,
        first_process_start_unix_ms: point.first_process_start_unix_ms,
        run_count: point.run_medians_ns.len(),
        median_launch_ns: point.median_launch_ns,
        smallest_run_median_ns: point.smallest_run_median_ns,
        largest_run_median_ns: point.largest_run_median_ns,
        relative_level_change: history
            .changes
            .iter()
            .find(|it| it.first_point_after == at)
            .map(|it| it.relative_level_change),
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
    #[serde(rename = "facts")]
    measurement_facts: Vec<(&'a str, &'a str)>,
    limits: &'a MeasuredDeviceLimits,
    cases: Vec<CaseNumbersJson<'a>>,
    #[serde(rename = "peers")]
    peer_times: Vec<(&'a str, &'a str, f64)>,
    histories: &'a [CaseTimeHistory],
    #[serde(rename = "skipped")]
    skipped_cases_by_reason:
        &'a std::collections::BTreeMap<String, std::collections::BTreeSet<String>>,
    #[serde(rename = "failed")]
    failed_cases: &'a std::collections::BTreeMap<String, CaseFailureReason>,
}

#[derive(Debug, Serialize)]
struct CaseNumbersJson<'a> {
    numbers: CaseAsCsvLine<'a>,
    #[serde(rename = "medians_ns")]
    run_medians_ns: &'a [f64],
}

/// Collects the numbers of a report page for `report.json`.
pub fn numbers_of_report_page<'a>(content: &ReportPageContent<'a>) -> ReportNumbersJson<'a> {
    let measured = content.measured;
    let case = |case: &'a CaseWithItsRuns| CaseNumbersJson {
        numbers: CaseAsCsvLine::from(case),
        run_medians_ns: &case.run_medians_ns,
    };
    ReportNumbersJson {
        schema_version: REPORT_JSON_VERSION,
        device: &measured.device,
        measurement_facts: measured
            .facts
            .iter()
            .map(|(name, words)| (*name, words.as_str()))
            .collect(),
        limits: &measured.limits,
        cases: measured.cases.iter().map(case).collect(),
        peer_times: measured
            .peers
            .iter()
            .map(|time| (&*time.workload_and_problem, &*time.peer_name, time.peer_launch_ns))
            .collect(),
        histories: content.history.map_or(&[], |history| &history.histories),
        skipped_cases_by_reason: &measured.skipped_cases_by_reason,
        failed_cases: &measured.failed_cases,
    }
}
