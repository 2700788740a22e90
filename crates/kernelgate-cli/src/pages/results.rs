//! Makes results pages in Markdown for committing: one page for each family of workloads, with
//! times, limit, clock, power state and peers' times. A Markdown page that a person wrote can mark
//! tables, which kernelgate fills from records.

use std::collections::{BTreeMap, BTreeSet};

use kernelgate::display::harmless_text::EscapedForMarkdown;
use kernelgate::display::table::AlignedTextTable;
use kernelgate::display::{amount_rate_text, energy_text, time_text};
use kernelgate::harness::filter::CaseIdFilter;
use kernelgate::measure::limits::ShortestLaunchTime;
use kernelgate::stats::half_range_by_median;

use super::measured_runs::{CaseWithItsRuns, MeasurementsOfOneDevice, PeerTimeForProblem};
use crate::report::utilization::published_peak_throughput_text;

/// A generated Markdown page with the results of one family of workloads.
#[derive(Debug, PartialEq, Eq)]
pub struct FamilyResultsMarkdown {
    /// File name of the Markdown page without a folder, such as `attention.md`.
    pub page_file_name: String,
    /// Text of the page in Markdown.
    pub page_markdown: String,
}

/// Error: some GPU cases have no recorded power state, so their times are not written to results
/// pages.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{cases_without_power_state} of {all_cases_count} cases have no recorded power state, the first is {first_case_without_state}: \
     `cargo bench -- --save-baseline NAME` measures them again"
)]
pub struct CasesWithoutPowerStateError {
    /// Number of GPU cases without a recorded power state.
    pub cases_without_power_state: usize,
    /// Number of all cases that a results page would show.
    pub all_cases_count: usize,
    /// Id of the first case without a recorded power state.
    pub first_case_without_state: String,
}

/// Start and end of the comment line that marks a table to be filled from records: `<!-- results
/// FILTER: COLUMN, COLUMN -->`.
const TABLE_MARK_START_AND_END: (&str, &str) = ("<!-- results ", " -->");

/// Error: a marked table of a Markdown page cannot be filled.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("line {line_number}: {problem_with_mark}: write `<!-- results FILTER: COLUMN, COLUMN -->`")]
pub struct MarkedTableError {
    /// Line number of the table's mark in the Markdown page, counted from 1.
    pub line_number: usize,
    /// The problem with the table's mark, as a fragment of a sentence.
    pub problem_with_mark: String,
}

/// Returns the text of a Markdown page with its marked tables filled from the measurements; `None`
/// if the page marks no table.
///
/// # Errors
/// Fails if a table's mark cannot be parsed, no case matches its filter, or it names an unknown
/// column.
pub fn fill_marked_tables_of_page(
    text: &str,
    measured: &MeasurementsOfOneDevice,
) -> Result<Option<String>, MarkedTableError> {
    let mut lines = text.lines().enumerate().peekable();
    let (mut out, mut has_marks) = (String::new(), false);
    while let Some((index, line)) = lines.next() {
        out = out + line + "\n";
        let mark = line
            .strip_prefix(TABLE_MARK_START_AND_END.0)
            .and_then(|line| line.strip_suffix(TABLE_MARK_START_AND_END.1));
        let Some(mark) = mark else { continue };
        has_marks = true;
        let table = results_table_for_mark(mark, measured).map_err(|problem| MarkedTableError {
            line_number: index + 1,
            problem_with_mark: problem,
        })?;
        out = out + &table + "\n";
        while lines.next_if(|(_, line)| line.starts_with('|')).is_some() {}
    }
    Ok(has_marks.then_some(out))
}

/// Builds the Markdown table that a mark on a page requests by a case filter and a list of columns.
fn results_table_for_mark(
    mark: &str,
    measured: &MeasurementsOfOneDevice,
) -> Result<String, String> {
    let (filter, columns) = mark.rsplit_once(": ").ok_or("no columns")?;
    let filter = CaseIdFilter::parse_exact_id_or_regex(Some(filter), false)
        .map_err(|error| error.to_string())?;
    let columns: Vec<&str> = columns.split(", ").collect();
    let cases: Vec<&CaseWithItsRuns> =
        measured.cases.iter().filter(|case| filter.selects_case_id(&case.case_id)).collect();
    if cases.is_empty() {
        return Err("no case matches the filter".to_owned());
    }
    let mut chosen = AlignedTextTable::new(&columns);
    for of_workload in cases.chunk_by(|a, b| a.workload == b.workload) {
        let whole = results_table_of_workload(measured, of_workload);
        let mut header: Vec<&str> = whole.column_names().iter().map(String::as_str).collect();
        header.push(OPERATION_COLUMN_NAME);
        let place = |column: &&str| {
            let place = header.iter().position(|name| name == column);
            place.ok_or_else(|| format!("no column `{column}` beside {}", header.join(", ")))
        };
        let places: Vec<usize> = columns.iter().map(place).collect::<Result<_, _>>()?;
        let operation = of_workload[0].workload.split('/').next_back().unwrap_or_default();
        for row in whole.rows() {
            let cell = |place: &usize| row.get(*place).map_or(operation, String::as_str).to_owned();
            chosen.add_row(places.iter().map(cell).collect());
        }
    }
    Ok(chosen.to_markdown())
}

/// Name of the column of a marked table that holds the last part of the workload's name, after its
/// family.
const OPERATION_COLUMN_NAME: &str = "operation";

/// Makes one results page in Markdown for each family of workloads, sorted by name.
pub fn results_pages_of_families(
    measured: &MeasurementsOfOneDevice,
) -> Result<Vec<FamilyResultsMarkdown>, CasesWithoutPowerStateError> {
    let cases = &measured.cases;
    let is_stateless = |case: &&CaseWithItsRuns| {
        case.implementation != "cpu" && case.power_states.iter().any(Option::is_none)
    };
    let stateless: Vec<&CaseWithItsRuns> = cases.iter().filter(is_stateless).collect();
    if let Some(first) = stateless.first() {
        let (count, all) = (stateless.len(), cases.len());
        return Err(CasesWithoutPowerStateError {
            cases_without_power_state: count,
            all_cases_count: all,
            first_case_without_state: first.case_id.clone(),
        });
    }
    let mut families: BTreeMap<&str, Vec<&CaseWithItsRuns>> = BTreeMap::new();
    for case in cases {
        families.entry(family_name_of_workload(&case.workload)).or_default().push(case);
    }
    let page = |(name, cases): (&str, Vec<&CaseWithItsRuns>)| FamilyResultsMarkdown {
        page_file_name: format!("{}.md", sanitize_family_name_for_file(name)),
        page_markdown: results_page_of_family(measured, name, &cases),
    };
    Ok(families.into_iter().map(page).collect())
}

fn family_name_of_workload(workload: &str) -> &str {
    workload.split('/').next().unwrap_or(workload)
}

/// Turns the name of a family into a file name, because a case id may contain any character.
fn sanitize_family_name_for_file(family: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' };
    family.chars().map(plain).collect()
}

const LEGEND_OF_RESULTS_TABLES: &str = "Time: median of the process runs, with half their range. Limit: the least time that \
                      the measured ceilings of this card allow for the declared work. Speed: time of \
                      the fastest implementation of the project over this time; of a peer, above 1 \
                      if the peer is faster.";

fn results_page_of_family(
    measured: &MeasurementsOfOneDevice,
    family: &str,
    cases: &[&CaseWithItsRuns],
) -> String {
    let mut text = format!(
        "# {}\n\nGenerated by `kernelgate report --results`; do not edit.\n\n",
        EscapedForMarkdown(family)
    );
    for (name, words) in &measured.facts {
        text += &format!("- {name}: {}\n", EscapedForMarkdown(words));
    }
    for of_workload in cases.chunk_by(|a, b| a.workload == b.workload) {
        text += &format!("\n## {}\n\n", EscapedForMarkdown(&of_workload[0].workload));
        text += &results_table_of_workload(measured, of_workload).to_markdown();
        text.push('\n');
    }
    text = text + "\n" + LEGEND_OF_RESULTS_TABLES + "\n";
    if cases.iter().any(|case| measured.model_flop_utilization(case, 1.0).is_some()) {
        text += &format!("\n{}\n", utilization_peaks_note(measured));
    }
    text
}

fn results_table_of_workload(
    measured: &MeasurementsOfOneDevice,
    cases: &[&CaseWithItsRuns],
) -> AlignedTextTable {
    let with_energy = cases.iter().any(|case| case.launch_energy_j.is_some());
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
    let with_skew = cases.iter().any(|case| case.skew_between_gpus_ns.is_some());
    header.extend(with_skew.then_some("skew"));
    let is_network = cases
        .iter()
        .any(|case| measured.model_flop_utilization(case, case.median_launch_ns()).is_some());
    if is_network {
        header.extend(THROUGHPUT_COLUMN_TITLES);
    }
    let mut table = AlignedTextTable::new(&header);
    for of_problem in
        cases.chunk_by(|a, b| (&a.problem_id, &a.cache_state) == (&b.problem_id, &b.cache_state))
    {
        // The cases of a problem are sorted by time, so the first one is the fastest.
        let best = of_problem[0];
        let rows = of_problem.iter().map(|case| ResultsTableRow::from(*case));
        let peers = measured.peer_times_for_case(best).into_iter();
        for row in rows.chain(peers.map(|peer| ResultsTableRow::from_peer_time(peer, best))) {
            let network =
                is_network.then(|| network_throughput_cells(measured, best, row.launch_ns));
            let skew_ns = row.skew_between_gpus_ns;
            let mut cells = row.into_table_cells(best, with_energy);
            cells.extend(with_skew.then(|| skew_ns.map_or_else(|| "-".to_owned(), time_text)));
            cells.extend(network.into_iter().flatten());
            table.add_row(cells);
        }
    }
    table
}

/// Titles of the table columns that [`network_throughput_cells`] fills.
pub const THROUGHPUT_COLUMN_TITLES: [&str; 3] =
    ["throughput", "of published peak", "of measured peak"];

/// Returns the table cells of a network's launch that takes this time: throughput, and model FLOP
/// utilization of the published and of the measured peak.
pub fn network_throughput_cells(
    measured: &MeasurementsOfOneDevice,
    case: &CaseWithItsRuns,
    elapsed_ns: f64,
) -> [String; 3] {
    let dash = || "-".to_owned();
    let utilization = measured.model_flop_utilization(case, elapsed_ns).unwrap_or_default();
    let share = |share: Option<f64>| share.map_or_else(dash, |it| format!("{:.1}%", 100.0 * it));
    let rate = case.samples_per_launch.map(|samples| samples as f64 * 1e9 / elapsed_ns);
    [
        rate.map_or_else(dash, |rate| case.sample_unit.throughput_as_text(rate)),
        share(utilization.share_of_published_peak),
        share(utilization.share_of_measured_peak),
    ]
}

/// Describes the published and measured peak rates on which the utilization of networks is based.
pub fn utilization_peaks_note(measured: &MeasurementsOfOneDevice) -> String {
    let cases = measured.cases.iter();
    let networks =
        || cases.clone().filter(|case| measured.model_flop_utilization(case, 1.0).is_some());
    let published: BTreeSet<String> = networks()
        .filter_map(|case| published_peak_throughput_text(&case.work, &measured.device))
        .collect();
    let units = networks().flat_map(|case| case.work.flops_by_unit_and_dtype.keys());
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

/// The values of one row of a results table, for an implementation or a peer (other people's
/// kernel).
struct ResultsTableRow<'a> {
    implementation_or_peer: String,
    launch_ns: f64,
    /// Amount of work whose rate is shown, and its unit; `None` if nothing is declared.
    amount: Option<(f64, &'static str)>,
    /// Half the range of the process runs' medians relative to their median; `None` with one run.
    relative_half_range: Option<f64>,
    sm_clock_mhz: Option<f64>,
    power_state_text: String,
    limit: Option<&'a ShortestLaunchTime>,
    launch_energy_j: Option<f64>,
    skew_between_gpus_ns: Option<f64>,
}

impl<'a> From<&'a CaseWithItsRuns> for ResultsTableRow<'a> {
    fn from(case: &'a CaseWithItsRuns) -> Self {
        Self {
            implementation_or_peer: case.implementation.clone(),
            launch_ns: case.median_launch_ns(),
            amount: case.declared_amount_and_unit(),
            relative_half_range: (case.run_medians_ns.len() > 1)
                .then(|| half_range_by_median(&case.run_medians_ns)),
            sm_clock_mhz: case.median_sm_clock_mhz,
            power_state_text: case.distinct_power_states(),
            limit: case.limit.as_ref(),
            launch_energy_j: case.launch_energy_j,
            skew_between_gpus_ns: case.skew_between_gpus_ns,
        }
    }
}

impl<'a> ResultsTableRow<'a> {
    /// Makes the results table's row of a peer (other people's kernel). For the share of the limit,
    /// a peer is measured by the limit of `best`, the fastest case of the same problem.
    fn from_peer_time(peer: &PeerTimeForProblem, best: &'a CaseWithItsRuns) -> ResultsTableRow<'a> {
        Self {
            implementation_or_peer: format!("{} (peer)", peer.peer_name),
            launch_ns: peer.peer_launch_ns,
            amount: best.declared_amount_and_unit(),
            relative_half_range: None,
            sm_clock_mhz: peer.peer_sm_clock_mhz,
            power_state_text: peer
                .peer_power_state
                .map_or_else(String::new, |state| state.name_in_files_and_tables().to_owned()),
            limit: best.limit.as_ref(),
            launch_energy_j: None,
            skew_between_gpus_ns: None,
        }
    }

    /// Returns the cells of a row of the results table, in the order of the table's header. The
    /// argument `best` is the fastest case of the same problem.
    fn into_table_cells(self, best: &CaseWithItsRuns, with_energy: bool) -> Vec<String> {
        let dash = || "-".to_owned();
        let Self {
            implementation_or_peer: name,
            launch_ns: elapsed_ns,
            amount,
            relative_half_range: spread,
            sm_clock_mhz: clock_mhz,
            power_state_text: power,
            limit,
            launch_energy_j: launch_j,
            ..
        } = self;
        let rate_text = |(amount, unit)| amount_rate_text(amount as u64, unit, elapsed_ns);
        let mut cells = vec![
            best.problem_id.clone(),
            best.cache_state.clone(),
            name,
            time_text(elapsed_ns),
            spread.map_or_else(dash, |spread| format!("{:.1}%", 100.0 * spread)),
            format!("{:.2}", best.median_launch_ns() / elapsed_ns),
            amount.map_or_else(dash, rate_text),
            clock_mhz.map_or_else(dash, |mhz| format!("{mhz:.0} MHz")),
            Some(power).filter(|power| !power.is_empty()).unwrap_or_else(dash),
            limit.map_or_else(dash, |limit| time_text(limit.shortest_launch_ns)),
            limit.map_or_else(dash, |limit| limit.deciding_ceiling.clone()),
            limit.map_or_else(dash, |it| {
                format!("{:.1}%", 100.0 * it.share_of_limit_reached(elapsed_ns))
            }),
        ];
        cells.extend(with_energy.then(|| launch_j.map_or_else(dash, energy_text)));
        cells
    }
}
