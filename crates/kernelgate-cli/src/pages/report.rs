//! Makes the HTML page that `kernelgate report` writes.

use std::collections::{BTreeMap, BTreeSet};

use maud::{Markup, html};

use super::charts::{self, ChartFigure, ChartGallery};
use super::measured_runs::{MeasuredCase, ReportMeasurements};
use super::page_frame::{self, PageSection};
use super::results::{UTILIZATION_COLUMNS, network_cells, utilization_peaks};
use super::verdict;
use crate::history::CaseHistory;
use crate::plot::PlotError;
use crate::report;
use crate::report::summary::VerdictSummary;
use kernelgate::display::{amount_rate_text, counted_noun, joules_text, time_text};
use kernelgate::stats::relative_half_range;

/// Contents of a page.
pub struct ReportContent<'a> {
    pub measured: &'a ReportMeasurements,
    /// Times over commits, if a history store has them.
    pub history: Option<&'a CommitHistories>,
    /// The verdict against a baseline, if one was requested.
    pub verdict: Option<&'a VerdictSummary>,
}

/// Times of the page's cases over commits.
pub struct CommitHistories {
    /// Histories of times by case and device.
    pub histories: Vec<CaseHistory>,
    /// How commits were put in order, in words.
    pub order: String,
}

/// The report page and the charts in it.
pub struct ReportPage {
    pub html: String,
    /// Charts, which are also written as files of their own.
    pub figures: Vec<ChartFigure>,
}

/// Largest number of ids that are listed for one reason.
const MAX_LISTED_IDS: usize = 200;

/// Makes the page.
pub fn page(content: &ReportContent<'_>) -> Result<ReportPage, PlotError> {
    let measured = content.measured;
    let roofline = ChartGallery {
        figures: charts::roofline_figure(measured).into_iter().collect(),
        left_out: 0,
    };
    let verdict = content.verdict.and_then(verdict::changes);
    let kinds = [
        (
            "ladders",
            "Ladders",
            "The implementations of a problem, the slowest first.",
            charts::ladder_charts(measured),
        ),
        ("peers", "Peers", PEERS_CHART_NOTE, charts::peers(&measured.peers)),
        ("curves", "Over each axis", CURVES_CHART_NOTE, charts::curves(measured)),
        ("roofline", "Roofline", ROOFLINE_CHART_NOTE, roofline),
        (
            "maps",
            "Over several axes",
            "The fastest implementation of each problem.",
            charts::heat_maps(measured),
        ),
        ("caches", "Hot and cold caches", CACHES_EXPLANATION, charts::cold_cache_charts(measured)),
        ("errors", "Errors beside speed", ERRORS_CHART_NOTE, charts::errors(measured)),
        ("runs", "Process runs", RUNS_CHART_NOTE, charts::run_distributions(measured)),
    ];
    let mut sections = Vec::new();
    if let Some(summary) = content.verdict {
        sections.push(PageSection::new("verdicts", "Verdicts", verdict::verdict_section(summary)?));
    }
    sections.push(PageSection::new("workloads", "Workloads", workload_sections(&measured.cases)));
    let mut figures: Vec<ChartFigure> = verdict.into_iter().collect();
    for (anchor, title, about, gallery) in kinds {
        if gallery.figures.is_empty() {
            continue;
        }
        let drawn = page_frame::chart_gallery(&gallery)?;
        let body = html! { @if !about.is_empty() { p class="note" { (about) } } (drawn) };
        sections.push(PageSection::new(anchor, title, body));
        figures.extend(gallery.figures);
    }
    if let Some(history) = content.history {
        let drawn = charts::history(measured, &history.histories);
        sections.push(PageSection::new(
            "history",
            "Over commits",
            commit_sections(history, &drawn)?,
        ));
        figures.extend(drawn.figures);
    }
    sections.push(PageSection::new("cases", "Every case", cases_table(measured)));
    if !measured.skipped.is_empty() || !measured.failed.is_empty() {
        sections.push(PageSection::new("not-measured", "Not measured", unmeasured_cases(measured)));
    }
    sections.push(PageSection::new(
        "environment",
        "Environment",
        page_frame::facts(&measured.facts),
    ));
    sections.push(PageSection::new("glossary", "Glossary", glossary_section()));
    let title = format!("kernelgate: {}", measured.device);
    let html = page_frame::page(&title, &report_lead(measured), &sections);
    make_file_names_unique(&mut figures);
    Ok(ReportPage { html, figures })
}

/// Adds numbers to equal file names of figures, because characters of case ids may be lost in file
/// names.
fn make_file_names_unique(figures: &mut [ChartFigure]) {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for figure in figures {
        let count = seen.entry(figure.name.clone()).or_default();
        *count += 1;
        if *count > 1 {
            figure.name = format!("{}.{count}", figure.name);
        }
    }
}

const CURVES_CHART_NOTE: &str = "A point is the median of the process runs, its bar their range. The limit is what \
                      the measured ceilings of the device allow for the declared work.";
const ROOFLINE_CHART_NOTE: &str = "Declared operations over declared bytes; operations of GEMMs where there are \
                        any, else all.";

const CACHES_EXPLANATION: &str = "Each implementation against itself: how much longer a launch takes after caches \
                      were filled with other data. It may take less: they were filled by reads, and \
                      nothing in them has to be written back first, as after a launch.";
const PEERS_CHART_NOTE: &str = "The same problems by other programs on the same device.";
const ERRORS_CHART_NOTE: &str = "Each point is a case: fast and exact is at the bottom left.";
const RUNS_CHART_NOTE: &str = "How much the time differs from one process to the next. A difference between two \
                    builds that is smaller than this may be chance.";

/// Terms of the page.
const GLOSSARY_ENTRIES: [(&str, &str); 9] = [
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

fn glossary_section() -> Markup {
    html! {
        dl class="words" { @for (word, meaning) in GLOSSARY_ENTRIES { div { dt { (word) } dd { (meaning) } } } }
        p class="note" { "In the tables the fastest implementation of each problem is green." }
    }
}

/// One sentence about how much was measured.
fn report_lead(measured: &ReportMeasurements) -> Markup {
    let cases = &measured.cases;
    let workloads = cases.chunk_by(|a, b| a.workload == b.workload).count();
    let fractions: Vec<f64> =
        cases.iter().filter(|case| case.best).filter_map(MeasuredCase::fraction_of_limit).collect();
    let skipped: usize = measured.skipped.values().map(BTreeSet::len).sum();
    html! {
        p {
            (counted_noun(cases.len(), "case")) " of " (counted_noun(workloads, "workload"))
            @if !fractions.is_empty() {
                "; the fastest implementations reach "
                (format!("{:.0}%", 100.0 * kernelgate::stats::median(&fractions)))
                " of their limit in the median problem"
            }
            @if skipped > 0 { "; " (skipped) " skipped" }
            @if !measured.failed.is_empty() {
                "; " strong { (measured.failed.len()) " failed" }
            }
            "."
        }
    }
}

/// Charts of cases with changes, and a line for every case.
fn commit_sections(history: &CommitHistories, drawn: &ChartGallery) -> Result<Markup, PlotError> {
    let joined = history.histories.iter().any(|history| history.card.is_none());
    Ok(html! {
        p class="note" { "The level is the median of the process runs between two changes; "
            (history.order) "."
            @if joined { " All cards of a model are taken for one: a change may be the card's." } }
        (page_frame::chart_gallery(drawn)?)
        @for (device, table) in report::history::tables(&history.histories) {
            h3 { (page_frame::printable(&device)) }
            (page_frame::table_from_terminal(&table))
        }
    })
}

/// One line for each workload: the fastest implementation of each problem, with hot caches if hot
/// times exist.
fn workload_sections(cases: &[MeasuredCase]) -> Markup {
    let header = ["workload", "problems", "fastest", "time", "of limit", "speed-up"];
    let row = |workload: &[MeasuredCase]| -> Vec<String> {
        let hot = workload.iter().any(|case| case.cache == "hot");
        let cases: Vec<&MeasuredCase> =
            workload.iter().filter(|case| !hot || case.cache == "hot").collect();
        let best: Vec<&MeasuredCase> = cases.iter().copied().filter(|case| case.best).collect();
        let slowest_ns = |problem: &str| {
            let same = cases.iter().filter(|case| case.problem == problem);
            same.map(|case| case.median_time_ns()).fold(0.0, f64::max)
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
        let speedups = best.iter().map(|case| slowest_ns(&case.problem) / case.median_time_ns());
        vec![
            workload[0].workload.clone(),
            best.len().to_string(),
            fastest,
            value_range(best.iter().map(|case| case.median_time_ns()), time_text),
            value_range(best.iter().filter_map(|case| case.fraction_of_limit()), |it| {
                format!("{:.0}%", 100.0 * it)
            }),
            value_range(speedups, |it| format!("{it:.2}×")),
        ]
    };
    let rows: Vec<Vec<String>> = cases.chunk_by(|a, b| a.workload == b.workload).map(row).collect();
    html! {
        (page_frame::table(&header, &rows, |_| false))
        p class="note" { "Fastest: the implementation that is fastest in most problems. Speed-up: over \
            the slowest implementation of the same problem." }
    }
}

/// Text of the smallest and the largest value; one value if both print alike.
fn value_range(values: impl Iterator<Item = f64>, shown: impl Fn(f64) -> String) -> String {
    let values: Vec<f64> = values.collect();
    let Some(low) = values.iter().copied().reduce(f64::min) else { return "-".to_owned() };
    let high = values.iter().copied().fold(low, f64::max);
    match (shown(low), shown(high)) {
        (low, high) if low == high => low,
        (low, high) => format!("{low} to {high}"),
    }
}

/// A table for each workload; the fastest case of each problem is highlighted.
fn cases_table(measured: &ReportMeasurements) -> Markup {
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
    // Power columns are shown only if some record has values for them.
    let with_power = cases.iter().any(|case| case.power.iter().any(Option::is_some));
    let with_energy = cases.iter().any(|case| case.launch_j.is_some());
    header.extend(["clock", "power"].into_iter().filter(|_| with_power));
    header.extend(with_energy.then_some("energy"));
    let with_networks = cases.iter().any(|case| measured.utilization(case, 1.0).is_some());
    if with_networks {
        header.extend(UTILIZATION_COLUMNS);
    }
    let row = |case: &MeasuredCase| -> Vec<String> {
        let elapsed_ns = case.median_time_ns();
        let dash = || "-".to_owned();
        let several = case.medians_ns.len() > 1;
        let mut cells = vec![
            case.id.clone(),
            time_text(elapsed_ns),
            if several {
                format!("±{:.2}%", 100.0 * relative_half_range(&case.medians_ns))
            } else {
                dash()
            },
            case.amount().map_or_else(dash, |(amount, unit)| {
                amount_rate_text(amount as u64, unit, elapsed_ns)
            }),
            case.fraction_of_limit().map_or_else(dash, |share| format!("{:.1}%", 100.0 * share)),
            case.limit.as_ref().map_or_else(dash, |limit| limit.by.clone()),
            match case.errors {
                None => "unverified".to_owned(),
                Some(errors) if errors.max_error == 0.0 => "exact".to_owned(),
                Some(errors) => format!("{:.1e}", errors.max_error),
            },
            case.medians_ns.len().to_string(),
        ];
        if with_power {
            cells.push(case.clock_mhz.map_or_else(dash, |mhz| format!("{mhz:.0} MHz")));
            cells.push(case.power_states());
        }
        cells.extend(with_energy.then(|| case.launch_j.map_or_else(dash, joules_text)));
        if with_networks {
            cells.extend(network_cells(measured, case, elapsed_ns));
        }
        cells
    };
    html! {
        @if with_networks { p class="note" { (utilization_peaks(measured)) } }
        @for workload in cases.chunk_by(|a, b| a.workload == b.workload) {
            @let (header, rows, common) = without_constant_columns(&header, workload.iter().map(row).collect());
            h3 { (page_frame::printable(&workload[0].workload)) }
            @if !common.is_empty() { p class="note" { "All cases: " (common.join(", ")) } }
            (page_frame::table(&header, &rows, |i| workload[i].best))
        }
    }
}

/// Removes columns that are empty or constant, and returns the constant values as text: "runs 5".
fn without_constant_columns<'a>(
    header: &[&'a str],
    mut rows: Vec<Vec<String>>,
) -> (Vec<&'a str>, Vec<Vec<String>>, Vec<String>) {
    let mut common = Vec::new();
    let differs: Vec<bool> = (0..header.len())
        .map(|column| {
            let first = &rows[0][column];
            let same = rows.iter().all(|row| row[column] == *first);
            // The columns of the case and its time are never dropped.
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

fn unmeasured_cases(measured: &ReportMeasurements) -> Markup {
    html! {
        @for (id, error) in &measured.failed {
            p { strong { "failed " (page_frame::printable(id)) } ": " (page_frame::printable(&error.text)) }
        }
        @for (reason, ids) in &measured.skipped {
            details {
                summary { (ids.len()) " skipped: " (page_frame::printable(reason)) }
                ul { @for id in ids.iter().take(MAX_LISTED_IDS) { li { (page_frame::printable(id)) } } }
                @if ids.len() > MAX_LISTED_IDS { p class="note" { "and " (ids.len() - MAX_LISTED_IDS) " more" } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::without_constant_columns;

    #[test]
    fn empty_or_constant_columns_are_not_shown_in_the_table() {
        let header = ["case", "time", "power", "rate", "energy"];
        let row = |cells: [&str; 5]| cells.map(str::to_owned).to_vec();
        let one = row(["a", "1 ms", "steady", "1 GB/s", "-"]);
        let two = row(["b", "1 ms", "steady", "2 GB/s", "-"]);
        let (titles, rows, common) = without_constant_columns(&header, vec![one.clone(), two]);
        assert_eq!(titles, ["case", "time", "rate"]);
        assert_eq!(rows, [["a", "1 ms", "1 GB/s"], ["b", "1 ms", "2 GB/s"]]);
        assert_eq!(common, ["power steady"]);
        let (titles, _, common) = without_constant_columns(&header, vec![one]);
        assert_eq!((titles.len(), common.len()), (4, 0));
    }
}
