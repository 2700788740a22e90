//! Makes the HTML page that `kernelgate report` writes for measurements of one device.

use std::collections::{BTreeMap, BTreeSet};

use maud::{Markup, html};

use super::charts::{self, ChartWithFileName, ChartsOfOneKind};
use super::measured_runs::{CaseWithItsRuns, MeasurementsOfOneDevice};
use super::page_frame::{self, HtmlPageSection};
use super::results::{THROUGHPUT_COLUMN_TITLES, network_throughput_cells, utilization_peaks_note};
use super::verdict;
use crate::history::CaseTimeHistory;
use crate::plot::ChartDrawingError;
use crate::report;
use crate::report::summary::VerdictSummary;
use kernelgate::display::{amount_rate_text, counted_noun, energy_text, time_text};
use kernelgate::stats::half_range_by_median;

/// Contents of a report page: measurements, histories and verdicts.
pub struct ReportPageContent<'a> {
    pub measured: &'a MeasurementsOfOneDevice,
    /// Times of the cases over commits; `None` without a history store.
    pub history: Option<&'a CaseHistoriesOnPage>,
    /// The verdicts against a baseline that the report page shows; `None` if none were requested.
    pub verdict: Option<&'a VerdictSummary>,
}

/// Histories of the page's cases over commits, with the way in which commits were ordered.
pub struct CaseHistoriesOnPage {
    /// Histories of case times, one for each case and device.
    pub histories: Vec<CaseTimeHistory>,
    /// Phrase for the report page that states how the commits were ordered: by git or by time.
    pub commit_order_phrase: String,
}

/// The HTML text of the report page, and its charts.
pub struct RenderedReportPage {
    pub page_html: String,
    /// The page's charts, which are also written as separate image files.
    pub figures: Vec<ChartWithFileName>,
}

/// Largest number of case ids that the page lists for one reason of skipping.
const MAX_LISTED_SKIPPED_CASES: usize = 200;

/// Charts of the measured cases in the page's order, each kind with its section's anchor, its title
/// and the note above the charts.
fn chart_sections_of_measured_cases(
    measured: &MeasurementsOfOneDevice,
) -> [(&'static str, &'static str, &'static str, ChartsOfOneKind); 8] {
    let roofline = ChartsOfOneKind {
        figures: charts::roofline_chart_of_cases(measured).into_iter().collect(),
        omitted_charts: 0,
    };
    [
        (
            "ladders",
            "Ladders",
            "The implementations of a problem, the slowest first.",
            charts::ladder_charts(measured),
        ),
        ("peers", "Peers", NOTE_UNDER_PEER_CHARTS, charts::peer_comparison_charts(&measured.peers)),
        ("curves", "Over each axis", NOTE_UNDER_CURVE_CHARTS, charts::curve_charts(measured)),
        ("roofline", "Roofline", NOTE_UNDER_ROOFLINE_CHART, roofline),
        (
            "maps",
            "Over several axes",
            "The fastest implementation of each problem.",
            charts::heat_map_charts(measured),
        ),
        (
            "caches",
            "Hot and cold caches",
            NOTE_UNDER_CACHE_CHARTS,
            charts::cold_against_hot_cache_charts(measured),
        ),
        (
            "errors",
            "Errors beside speed",
            NOTE_UNDER_ERROR_CHARTS,
            charts::error_against_speed_charts(measured),
        ),
        (
            "runs",
            "Process runs",
            NOTE_UNDER_RUN_CHARTS,
            charts::charts_of_differences_between_runs(measured),
        ),
    ]
}

/// Builds the report page as HTML.
pub fn report_page(
    content: &ReportPageContent<'_>,
) -> Result<RenderedReportPage, ChartDrawingError> {
    let measured = content.measured;
    let verdict = content.verdict.and_then(verdict::time_change_chart);
    let mut sections = Vec::new();
    if let Some(summary) = content.verdict {
        sections.push(HtmlPageSection::with_anchor_and_title(
            "verdicts",
            "Verdicts",
            verdict::build_verdict_section(summary)?,
        ));
    }
    sections.push(HtmlPageSection::with_anchor_and_title(
        "workloads",
        "Workloads",
        workload_overview_table(&measured.cases),
    ));
    let mut figures: Vec<ChartWithFileName> = verdict.into_iter().collect();
    for (anchor, title, about, gallery) in chart_sections_of_measured_cases(measured) {
        if gallery.figures.is_empty() {
            continue;
        }
        let drawn = page_frame::charts_side_by_side(&gallery)?;
        let body = html! { @if !about.is_empty() { p class="note" { (about) } } (drawn) };
        sections.push(HtmlPageSection::with_anchor_and_title(anchor, title, body));
        figures.extend(gallery.figures);
    }
    if let Some(history) = content.history {
        let drawn = charts::history_charts(measured, &history.histories);
        sections.push(HtmlPageSection::with_anchor_and_title(
            "history",
            "Over commits",
            commit_history_section(history, &drawn)?,
        ));
        figures.extend(drawn.figures);
    }
    sections.push(HtmlPageSection::with_anchor_and_title(
        "cases",
        "Every case",
        tables_of_all_cases(measured),
    ));
    if !measured.skipped_cases_by_reason.is_empty() || !measured.failed_cases.is_empty() {
        sections.push(HtmlPageSection::with_anchor_and_title(
            "not-measured",
            "Not measured",
            failed_and_skipped_cases(measured),
        ));
    }
    sections.push(HtmlPageSection::with_anchor_and_title(
        "environment",
        "Environment",
        page_frame::facts_list(&measured.facts),
    ));
    sections.push(HtmlPageSection::with_anchor_and_title(
        "glossary",
        "Glossary",
        report_glossary_section(),
    ));
    let title = format!("kernelgate: {}", measured.device);
    let html = page_frame::build_html_page(&title, &report_page_lead(measured), &sections);
    number_equal_chart_file_names(&mut figures);
    Ok(RenderedReportPage { page_html: html, figures })
}

/// Appends numbers to chart file names that occur several times, because different case ids can
/// give equal file names.
fn number_equal_chart_file_names(figures: &mut [ChartWithFileName]) {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for figure in figures {
        let count = seen.entry(figure.file_name_stem.clone()).or_default();
        *count += 1;
        if *count > 1 {
            figure.file_name_stem = format!("{}.{count}", figure.file_name_stem);
        }
    }
}

const NOTE_UNDER_CURVE_CHARTS: &str = "A point is the median of the process runs, its bar their range. The limit is what \
                      the measured ceilings of the device allow for the declared work.";
const NOTE_UNDER_ROOFLINE_CHART: &str = "Declared operations over declared bytes; operations of GEMMs where there are \
                        any, else all.";

const NOTE_UNDER_CACHE_CHARTS: &str = "Each implementation against itself: how much longer a launch takes after caches \
                      were filled with other data. It may take less: they were filled by reads, and \
                      nothing in them has to be written back first, as after a launch.";
const NOTE_UNDER_PEER_CHARTS: &str = "The same problems by other programs on the same device.";
const NOTE_UNDER_ERROR_CHARTS: &str = "Each point is a case: fast and exact is at the bottom left.";
const NOTE_UNDER_RUN_CHARTS: &str = "How much the time differs from one process to the next. A difference between two \
                    builds that is smaller than this may be chance.";

/// Terms that the report page explains, each with its explanation.
const GLOSSARY_OF_REPORT_PAGE: [(&str, &str); 9] = [
    ("workload", "A computation with one mathematical definition, such as attention/forward."),
    (
        "problem",
        "A workload with its sizes and data types. s512_d64_bf16 has the axes s = 512 and d = 64.",
    ),
    ("implementation", "One way to compute it: on the host (cpu) or by a row of kernels (cuda/…)."),
    ("launch", "One computation of the problem, by one kernel or several. Times are of a launch."),
    (
        "hot, cold",
        "Caches as the launch before left them, or filled with other data before each launch.",
    ),
    ("case", "Problem, implementation and state of the caches: what has a time."),
    (
        "process run",
        "What one process of a bench measured. Its time of a case is the median of its samples; the \
         time shown is the median of all process runs.",
    ),
    (
        "limit",
        "The least time that the device's measured bandwidths and rates allow for the operations and \
         bytes that the mathematics needs. Of limit, or share of the limit: that over the time. Above \
         100 %: the machine was busier when its ceilings were measured, or a GEMM of this shape is \
         faster than the one that was measured.",
    ),
    (
        "error",
        "Largest error of the outputs over the largest value of the reference, in double precision. \
         A case is verified before it is timed.",
    ),
];

fn report_glossary_section() -> Markup {
    html! {
        dl class="words" { @for (word, meaning) in GLOSSARY_OF_REPORT_PAGE { div { dt { (word) } dd { (meaning) } } } }
        p class="note" { "In the tables the fastest implementation of each problem is green." }
    }
}

/// Builds the sentence at the top of the report page: numbers of cases, workloads, skipped and
/// failed cases.
fn report_page_lead(measured: &MeasurementsOfOneDevice) -> Markup {
    let cases = &measured.cases;
    let workloads = cases.chunk_by(|a, b| a.workload == b.workload).count();
    let fractions: Vec<f64> = cases
        .iter()
        .filter(|case| case.is_fastest_of_problem)
        .filter_map(CaseWithItsRuns::fraction_of_limit)
        .collect();
    let skipped: usize = measured.skipped_cases_by_reason.values().map(BTreeSet::len).sum();
    html! {
        p {
            (counted_noun(cases.len(), "case")) " of " (counted_noun(workloads, "workload"))
            @if !fractions.is_empty() {
                "; the fastest implementations reach "
                (format!("{:.0}%", 100.0 * kernelgate::stats::median(&fractions)))
                " of their limit in the median problem"
            }
            @if skipped > 0 { "; " (skipped) " skipped" }
            @if !measured.failed_cases.is_empty() {
                "; " strong { (measured.failed_cases.len()) " failed" }
            }
            "."
        }
    }
}

/// Builds the section on case times over commits: the charts, and a table row for each case.
fn commit_history_section(
    history: &CaseHistoriesOnPage,
    drawn: &ChartsOfOneKind,
) -> Result<Markup, ChartDrawingError> {
    let joined = history.histories.iter().any(|history| history.card_or_host_id.is_none());
    Ok(html! {
        p class="note" { "The level is the median of the process runs between two changes; "
            (history.commit_order_phrase) "."
            @if joined { " All cards of a model are taken for one: a change may be the card's." } }
        (page_frame::charts_side_by_side(drawn)?)
        @for (device, table) in report::history::history_tables_by_device(&history.histories) {
            h3 { (page_frame::printable_on_page(&device)) }
            (page_frame::html_table_from_terminal_table(&table))
        }
    })
}

/// Builds a table with one row for each workload: its fastest implementation, times and speed-up,
/// with hot caches if there are hot times.
fn workload_overview_table(cases: &[CaseWithItsRuns]) -> Markup {
    let header = ["workload", "problems", "fastest", "time", "of limit", "speed-up"];
    let row = |workload: &[CaseWithItsRuns]| -> Vec<String> {
        let hot = workload.iter().any(|case| case.cache_state == "hot");
        let cases: Vec<&CaseWithItsRuns> =
            workload.iter().filter(|case| !hot || case.cache_state == "hot").collect();
        let best: Vec<&CaseWithItsRuns> =
            cases.iter().copied().filter(|case| case.is_fastest_of_problem).collect();
        let slowest_ns = |problem: &str| {
            let same = cases.iter().filter(|case| case.problem_id == problem);
            same.map(|case| case.median_launch_ns()).fold(0.0, f64::max)
        };
        let mut wins: BTreeMap<&str, usize> = BTreeMap::new();
        for case in &best {
            *wins.entry(&case.implementation).or_default() += 1;
        }
        let fastest = match &wins.iter().max_by_key(|(_, wins)| **wins) {
            Some((name, _)) if wins.len() == 1 => (*name).to_string(),
            Some((name, wins)) => format!("{name}, in {wins} of {}", best.len()),
            None => "-".to_owned(),
        };
        let speedups =
            best.iter().map(|case| slowest_ns(&case.problem_id) / case.median_launch_ns());
        vec![
            workload[0].workload.clone(),
            best.len().to_string(),
            fastest,
            value_range_text(best.iter().map(|case| case.median_launch_ns()), time_text),
            value_range_text(best.iter().filter_map(|case| case.fraction_of_limit()), |it| {
                format!("{:.0}%", 100.0 * it)
            }),
            value_range_text(speedups, |it| format!("{it:.2}×")),
        ]
    };
    let rows: Vec<Vec<String>> = cases.chunk_by(|a, b| a.workload == b.workload).map(row).collect();
    html! {
        (page_frame::html_table(&header, &rows, |_| false))
        p class="note" { "Fastest: the implementation that is fastest in most problems. Speed-up: over \
            the slowest implementation of the same problem." }
    }
}

/// Formats the smallest and the largest of these values as a range; only one value if both give
/// equal text.
fn value_range_text(values: impl Iterator<Item = f64>, shown: impl Fn(f64) -> String) -> String {
    let values: Vec<f64> = values.collect();
    let Some(low) = values.iter().copied().reduce(f64::min) else { return "-".to_owned() };
    let high = values.iter().copied().fold(low, f64::max);
    match (shown(low), shown(high)) {
        (low, high) if low == high => low,
        (low, high) => format!("{low} to {high}"),
    }
}

/// Builds a table of all cases for each workload, with the fastest case of each problem
/// highlighted.
fn tables_of_all_cases(measured: &MeasurementsOfOneDevice) -> Markup {
    let cases = &measured.cases;
    let mut header = vec![
        "case",
        "time",
        "runs differ",
        "rate",
        "of limit",
        "limited by",
        "largest error",
        "runs",
    ];
    // The columns for clock and power state are shown only if some record contains them.
    let with_power = cases.iter().any(|case| case.power_states.iter().any(Option::is_some));
    let with_energy = cases.iter().any(|case| case.launch_energy_j.is_some());
    header.extend(["clock", "power"].into_iter().filter(|_| with_power));
    header.extend(with_energy.then_some("energy"));
    let with_networks =
        cases.iter().any(|case| measured.model_flop_utilization(case, 1.0).is_some());
    if with_networks {
        header.extend(THROUGHPUT_COLUMN_TITLES);
    }
    let row = |case: &CaseWithItsRuns| -> Vec<String> {
        let elapsed_ns = case.median_launch_ns();
        let dash = || "-".to_owned();
        let several = case.run_medians_ns.len() > 1;
        let mut cells = vec![
            case.case_id.clone(),
            time_text(elapsed_ns),
            if several {
                format!("±{:.2}%", 100.0 * half_range_by_median(&case.run_medians_ns))
            } else {
                dash()
            },
            case.declared_amount_and_unit().map_or_else(dash, |(amount, unit)| {
                amount_rate_text(amount as u64, unit, elapsed_ns)
            }),
            case.fraction_of_limit().map_or_else(dash, |share| format!("{:.1}%", 100.0 * share)),
            case.limit.as_ref().map_or_else(dash, |limit| limit.deciding_ceiling.clone()),
            match case.errors {
                None => "unverified".to_owned(),
                Some(errors) if errors.max_error == 0.0 => "exact".to_owned(),
                Some(errors) => format!("{:.1e}", errors.max_error),
            },
            case.run_medians_ns.len().to_string(),
        ];
        if with_power {
            cells.push(case.median_sm_clock_mhz.map_or_else(dash, |mhz| format!("{mhz:.0} MHz")));
            cells.push(case.distinct_power_states());
        }
        cells.extend(with_energy.then(|| case.launch_energy_j.map_or_else(dash, energy_text)));
        if with_networks {
            cells.extend(network_throughput_cells(measured, case, elapsed_ns));
        }
        cells
    };
    html! {
        @if with_networks { p class="note" { (utilization_peaks_note(measured)) } }
        @for workload in cases.chunk_by(|a, b| a.workload == b.workload) {
            @let (header, rows, common) = remove_constant_columns(&header, workload.iter().map(row).collect());
            h3 { (page_frame::printable_on_page(&workload[0].workload)) }
            @if !common.is_empty() { p class="note" { "All cases: " (common.join(", ")) } }
            (page_frame::html_table(&header, &rows, |i| workload[i].is_fastest_of_problem))
        }
    }
}

/// Removes the columns of a table that are empty or have one and the same value, and returns these
/// values as text: "runs 5".
fn remove_constant_columns<'a>(
    header: &[&'a str],
    mut rows: Vec<Vec<String>>,
) -> (Vec<&'a str>, Vec<Vec<String>>, Vec<String>) {
    let mut common = Vec::new();
    let differs: Vec<bool> = (0..header.len())
        .map(|column| {
            let first = &rows[0][column];
            let same = rows.iter().all(|row| row[column] == *first);
            // The columns of the case id and its time are never removed.
            let drop = column > 1 && same && (first == "-" || rows.len() > 1);
            if drop && first != "-" {
                common.push(format!("{} {first}", header[column]));
            }
            !drop
        })
        .collect();
    for row in &mut rows {
        let mut kept = differs.iter();
        row.retain(|_| *kept.next().unwrap_or(&true));
    }
    let kept = header.iter().zip(&differs).filter(|(_, differs)| **differs);
    (kept.map(|(title, _)| *title).collect(), rows, common)
}

fn failed_and_skipped_cases(measured: &MeasurementsOfOneDevice) -> Markup {
    html! {
        @for (id, error) in &measured.failed_cases {
            p { strong { "failed " (page_frame::printable_on_page(id)) } ": " (page_frame::printable_on_page(&error.failure_sentence)) }
        }
        @for (reason, ids) in &measured.skipped_cases_by_reason {
            details {
                summary { (ids.len()) " skipped: " (page_frame::printable_on_page(reason)) }
                ul { @for id in ids.iter().take(MAX_LISTED_SKIPPED_CASES) { li { (page_frame::printable_on_page(id)) } } }
                @if ids.len() > MAX_LISTED_SKIPPED_CASES { p class="note" { "and " (ids.len() - MAX_LISTED_SKIPPED_CASES) " more" } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::remove_constant_columns;

    #[test]
    fn empty_or_constant_columns_are_removed_from_the_table() {
        let header = ["case", "time", "power", "rate", "energy"];
        let row = |cells: [&str; 5]| cells.map(str::to_owned).to_vec();
        let one = row(["a", "1 ms", "steady", "1 GB/s", "-"]);
        let two = row(["b", "1 ms", "steady", "2 GB/s", "-"]);
        let (titles, rows, common) = remove_constant_columns(&header, vec![one.clone(), two]);
        assert_eq!(titles, ["case", "time", "rate"]);
        assert_eq!(rows, [["a", "1 ms", "1 GB/s"], ["b", "1 ms", "2 GB/s"]]);
        assert_eq!(common, ["power steady"]);
        let (titles, _, common) = remove_constant_columns(&header, vec![one]);
        assert_eq!((titles.len(), common.len()), (4, 0));
    }
}
