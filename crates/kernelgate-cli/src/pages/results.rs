//! Results as Markdown to commit: a page for each family, with the limit, the clock and the power
//! state of each case, and the times of peers. A page written by hand marks the tables that are
//! filled from records.

use std::collections::{BTreeMap, BTreeSet};

use kernelgate::display::harmless_text::MarkdownText;
use kernelgate::display::table::TextTable;
use kernelgate::display::{amount_rate_text, joules_text, time_text};
use kernelgate::harness::filter::CaseFilter;
use kernelgate::measure::limits::TimeLimit;
use kernelgate::stats::relative_half_range;

use super::measured_runs::{MeasuredCase, PeerTime, ReportMeasurements};
use crate::report::utilization::published_peak_text;

/// A results page of a family of workloads.
#[derive(Debug, PartialEq, Eq)]
pub struct FamilyResultsPage {
    /// Name of the page's file, without its folder: `attention.md`.
    pub file: String,
    /// Markdown.
    pub text: String,
}

/// Cases of a GPU lack a recorded power state: their times cannot be published.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{count} of {all} cases have no recorded power state, the first is {first}: \
     `cargo bench -- --save-baseline NAME` measures them again"
)]
pub struct CasesWithoutPowerState {
    /// Number of such cases.
    pub count: usize,
    /// Number of all cases.
    pub all: usize,
    /// Id of the first case that has no such column.
    pub first: String,
}

/// Start and end of the line above a table that is filled from records: `<!-- results FILTER:
/// COLUMN, COLUMN -->`.
const TABLE_MARK: (&str, &str) = ("<!-- results ", " -->");

/// A table of a page cannot be filled.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("line {line}: {problem}: write `<!-- results FILTER: COLUMN, COLUMN -->`")]
pub struct TableMarkError {
    /// Line number of the table's mark, counted from 1.
    pub line: usize,
    /// Fragment of a sentence that names the problem.
    pub problem: String,
}

/// The text of a page with its marked tables filled; `None` if it marks none.
///
/// # Errors
/// Fails if a mark cannot be read, no case matches its filter, or a column is unknown.
pub fn fill_marked_tables(
    text: &str,
    measured: &ReportMeasurements,
) -> Result<Option<String>, TableMarkError> {
    let mut lines = text.lines().enumerate().peekable();
    let (mut out, mut has_marks) = (String::new(), false);
    while let Some((index, line)) = lines.next() {
        out = out + line + "\n";
        let mark = line.strip_prefix(TABLE_MARK.0).and_then(|line| line.strip_suffix(TABLE_MARK.1));
        let Some(mark) = mark else { continue };
        has_marks = true;
        let table = results_table_for_mark(mark, measured)
            .map_err(|problem| TableMarkError { line: index + 1, problem })?;
        out = out + &table + "\n";
        while lines.next_if(|(_, line)| line.starts_with('|')).is_some() {}
    }
    Ok(has_marks.then_some(out))
}

/// The results table that belongs to a mark, `FILTER: COLUMN, COLUMN`.
fn results_table_for_mark(mark: &str, measured: &ReportMeasurements) -> Result<String, String> {
    let (filter, columns) = mark.rsplit_once(": ").ok_or("no columns")?;
    let filter = CaseFilter::parse(Some(filter), false).map_err(|error| error.to_string())?;
    let columns: Vec<&str> = columns.split(", ").collect();
    let cases: Vec<&MeasuredCase> =
        measured.cases.iter().filter(|case| filter.matches_id(&case.id)).collect();
    if cases.is_empty() {
        return Err("no case matches the filter".to_owned());
    }
    let mut chosen = TextTable::new(&columns);
    for of_workload in cases.chunk_by(|a, b| a.workload == b.workload) {
        let whole = results_rows(measured, of_workload);
        let mut header: Vec<&str> = whole.column_names().iter().map(String::as_str).collect();
        header.push(OPERATION_COLUMN);
        let place = |column: &&str| {
            let place = header.iter().position(|name| name == column);
            place.ok_or_else(|| format!("no column `{column}` beside {}", header.join(", ")))
        };
        let places: Vec<usize> = columns.iter().map(place).collect::<Result<_, _>>()?;
        let operation = of_workload[0].workload.split('/').next_back().unwrap_or_default();
        for row in whole.rows() {
            let cell = |place: &usize| row.get(*place).map_or(operation, String::as_str).to_owned();
            chosen.row(places.iter().map(cell).collect());
        }
    }
    Ok(chosen.to_markdown())
}

/// Column of a marked table with the workload's name inside of its family.
const OPERATION_COLUMN: &str = "operation";

/// Makes one results page for each family, in the order of their names.
pub fn family_pages(
    measured: &ReportMeasurements,
) -> Result<Vec<FamilyResultsPage>, CasesWithoutPowerState> {
    let cases = &measured.cases;
    let is_stateless = |case: &&MeasuredCase| {
        case.implementation != "cpu" && case.power.iter().any(Option::is_none)
    };
    let stateless: Vec<&MeasuredCase> = cases.iter().filter(is_stateless).collect();
    if let Some(first) = stateless.first() {
        let (count, all) = (stateless.len(), cases.len());
        return Err(CasesWithoutPowerState { count, all, first: first.id.clone() });
    }
    let mut families: BTreeMap<&str, Vec<&MeasuredCase>> = BTreeMap::new();
    for case in cases {
        families.entry(family_of_workload(&case.workload)).or_default().push(case);
    }
    let page = |(name, cases): (&str, Vec<&MeasuredCase>)| FamilyResultsPage {
        file: format!("{}.md", family_file_name(name)),
        text: family_page(measured, name, &cases),
    };
    Ok(families.into_iter().map(page).collect())
}

fn family_of_workload(workload: &str) -> &str {
    workload.split('/').next().unwrap_or(workload)
}

/// Turns a family into the name of a file, because an id may contain any character.
fn family_file_name(family: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' };
    family.chars().map(plain).collect()
}

const RESULTS_LEGEND: &str = "Time: median of the process runs, with half their range. Limit: the least time that \
                      the measured ceilings of this card allow for the declared work. Speed: time of \
                      the fastest implementation of the project over this time; of a peer, above 1 \
                      if the peer is faster.";

fn family_page(measured: &ReportMeasurements, family: &str, cases: &[&MeasuredCase]) -> String {
    let mut text = format!(
        "# {}\n\nGenerated by `kernelgate report --results`; do not edit.\n\n",
        MarkdownText(family)
    );
    for (name, words) in &measured.facts {
        text += &format!("- {name}: {}\n", MarkdownText(words));
    }
    for of_workload in cases.chunk_by(|a, b| a.workload == b.workload) {
        text += &format!("\n## {}\n\n", MarkdownText(&of_workload[0].workload));
        text += &results_rows(measured, of_workload).to_markdown();
        text.push('\n');
    }
    text = text + "\n" + RESULTS_LEGEND + "\n";
    if cases.iter().any(|case| measured.utilization(case, 1.0).is_some()) {
        text += &format!("\n{}\n", utilization_peaks(measured));
    }
    text
}

fn results_rows(measured: &ReportMeasurements, cases: &[&MeasuredCase]) -> TextTable {
    let with_energy = cases.iter().any(|case| case.launch_j.is_some());
    let mut header = vec![
        "problem",
        "cache",
        "row",
        "time",
        "±",
        "speed",
        "rate",
        "clock",
        "power",
        "limit",
        "limited by",
        "of limit",
    ];
    header.extend(with_energy.then_some("energy"));
    let with_skew = cases.iter().any(|case| case.skew_ns.is_some());
    header.extend(with_skew.then_some("skew"));
    let is_network =
        cases.iter().any(|case| measured.utilization(case, case.median_time_ns()).is_some());
    if is_network {
        header.extend(UTILIZATION_COLUMNS);
    }
    let mut table = TextTable::new(&header);
    for of_problem in cases.chunk_by(|a, b| (&a.problem, &a.cache) == (&b.problem, &b.cache)) {
        // Cases are sorted by time, so the first one is the fastest.
        let best = of_problem[0];
        let rows = of_problem.iter().map(|case| ResultRow::from(*case));
        let peers = measured.peers_of(best).into_iter();
        for row in rows.chain(peers.map(|peer| ResultRow::from_peer(peer, best))) {
            let network = is_network.then(|| network_cells(measured, best, row.elapsed_ns));
            let skew_ns = row.skew_ns;
            let mut cells = row.cells(best, with_energy);
            cells.extend(with_skew.then(|| skew_ns.map_or_else(|| "-".to_owned(), time_text)));
            cells.extend(network.into_iter().flatten());
            table.row(cells);
        }
    }
    table
}

/// Header of the columns that [`network_cells`] fills.
pub const UTILIZATION_COLUMNS: [&str; 3] = ["throughput", "of published peak", "of measured peak"];

/// Throughput of a launch of this time, and the model FLOP utilization by the published and by the
/// measured peak.
pub fn network_cells(
    measured: &ReportMeasurements,
    case: &MeasuredCase,
    elapsed_ns: f64,
) -> [String; 3] {
    let dash = || "-".to_owned();
    let utilization = measured.utilization(case, elapsed_ns).unwrap_or_default();
    let share = |share: Option<f64>| share.map_or_else(dash, |it| format!("{:.1}%", 100.0 * it));
    let rate = case.computed_samples.map(|samples| samples as f64 * 1e9 / elapsed_ns);
    [
        rate.map_or_else(dash, |rate| case.sample_unit.per_second(rate)),
        share(utilization.of_published),
        share(utilization.of_measured),
    ]
}

/// The peaks on which the utilization of networks is based.
pub fn utilization_peaks(measured: &ReportMeasurements) -> String {
    let cases = measured.cases.iter();
    let networks = || cases.clone().filter(|case| measured.utilization(case, 1.0).is_some());
    let published: BTreeSet<String> =
        networks().filter_map(|case| published_peak_text(&case.work, &measured.device)).collect();
    let units = networks().flat_map(|case| case.work.flops.keys());
    let units: BTreeSet<&String> = units.filter(|unit| unit.starts_with("matmul ")).collect();
    let rate = |unit: &&String| {
        let rate = measured.limits.flops_per_s.get(*unit)?;
        Some(format!("{:.0} TFLOP/s {}", rate / 1e12, unit.trim_start_matches("matmul ")))
    };
    let named = |peaks: Vec<String>| match peaks.is_empty() {
        true => "unknown".to_owned(),
        false => peaks.join(", "),
    };
    format!(
        "Utilization of networks: declared operations of matrix products, masked attention not \
         counted. Published dense peak: {}. Measured peak: {}.",
        named(published.into_iter().collect()),
        named(units.iter().filter_map(rate).collect())
    )
}

/// Numbers of a row, of an implementation or a peer.
struct ResultRow<'a> {
    name: String,
    elapsed_ns: f64,
    /// Amount whose rate is shown, and its unit.
    amount: Option<(f64, &'static str)>,
    /// Half the range of the process runs, relative.
    spread: Option<f64>,
    clock_mhz: Option<f64>,
    power: String,
    limit: Option<&'a TimeLimit>,
    launch_j: Option<f64>,
    skew_ns: Option<f64>,
}

impl<'a> From<&'a MeasuredCase> for ResultRow<'a> {
    fn from(case: &'a MeasuredCase) -> Self {
        Self {
            name: case.implementation.clone(),
            elapsed_ns: case.median_time_ns(),
            amount: case.amount(),
            spread: (case.medians_ns.len() > 1).then(|| relative_half_range(&case.medians_ns)),
            clock_mhz: case.clock_mhz,
            power: case.power_states(),
            limit: case.limit.as_ref(),
            launch_j: case.launch_j,
            skew_ns: case.skew_ns,
        }
    }
}

impl<'a> ResultRow<'a> {
    /// Makes the table row of a peer. A peer shares the limit of `best`, the fastest case of its
    /// problem.
    fn from_peer(peer: &PeerTime, best: &'a MeasuredCase) -> ResultRow<'a> {
        Self {
            name: format!("{} (peer)", peer.peer),
            elapsed_ns: peer.peer_ns,
            amount: best.amount(),
            spread: None,
            clock_mhz: peer.clock_mhz,
            power: peer.power.map_or_else(String::new, |state| state.name().to_owned()),
            limit: best.limit.as_ref(),
            launch_j: None,
            skew_ns: None,
        }
    }

    /// Cells of the row, in the order of the header. `best` is the fastest case of the problem.
    fn cells(self, best: &MeasuredCase, with_energy: bool) -> Vec<String> {
        let dash = || "-".to_owned();
        let Self { name, elapsed_ns, amount, spread, clock_mhz, power, limit, launch_j, .. } = self;
        let rate_text = |(amount, unit)| amount_rate_text(amount as u64, unit, elapsed_ns);
        let mut cells = vec![
            best.problem.clone(),
            best.cache.clone(),
            name,
            time_text(elapsed_ns),
            spread.map_or_else(dash, |spread| format!("{:.1}%", 100.0 * spread)),
            format!("{:.2}", best.median_time_ns() / elapsed_ns),
            amount.map_or_else(dash, rate_text),
            clock_mhz.map_or_else(dash, |mhz| format!("{mhz:.0} MHz")),
            Some(power).filter(|power| !power.is_empty()).unwrap_or_else(dash),
            limit.map_or_else(dash, |limit| time_text(limit.time_ns)),
            limit.map_or_else(dash, |limit| limit.by.clone()),
            limit.map_or_else(dash, |it| format!("{:.1}%", 100.0 * it.fraction(elapsed_ns))),
        ];
        cells.extend(with_energy.then(|| launch_j.map_or_else(dash, joules_text)));
        cells
    }
}
