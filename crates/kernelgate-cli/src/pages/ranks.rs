//! Makes the HTML page about a job with several ranks, which `kernelgate diagnose --html` writes
//! for the traces of several ranks.

use maud::{Markup, html};

use super::charts::{ChartWithFileName, ChartsOfOneKind};
use super::page_frame::{self, HtmlPageSection};
use crate::plot::{
    AxisScaleKind, ChartAxis, ChartBody, ChartDrawingError, ChartRowWithLabel, HeatMapData,
    LabelledRowsChart, MarkInChartRow, PlottedUnit, TitledChart,
};
use kernelgate::display::{decimal_byte_size_text, time_text};
use kernelgate_trace::diagnose::FindingSeverity;
use kernelgate_trace::diagnose::ranks::{
    CollectivesOfKindAndSize, JobOfJoinedRanks, RankWithCollectiveSums,
};

/// Largest number of ranks that are drawn as bars; the table lists all ranks.
const MAX_RANKS_DRAWN_AS_BARS: usize = 64;
/// Largest number of ranks for which a heat map shows the waiting between each pair of ranks.
const MAX_RANKS_IN_WAITING_MAP: usize = 12;
/// Largest number of bars in the chart of collectives, one for each kind and size.
const MAX_COLLECTIVE_BARS: usize = 16;

/// Makes the HTML page about a job with several ranks.
pub fn ranks_page(job: &JobOfJoinedRanks) -> Result<String, ChartDrawingError> {
    let mut sections = vec![
        HtmlPageSection::with_anchor_and_title(
            "quality",
            "Data quality",
            problems_of_ranks_data(job),
        ),
        HtmlPageSection::with_anchor_and_title("findings", "Findings", straggler_findings(job)),
    ];
    sections.extend(ranks_sections(job, "account", "Time of each rank")?);
    sections.retain(|section| !section.section_html.0.trim().is_empty());
    Ok(page_frame::build_html_page(
        &format!("kernelgate diagnose: {} ranks", job.ranks.len()),
        &ranks_page_lead(job),
        &sections,
    ))
}

/// Builds the sections about the ranks' times, their waiting, their collectives and the critical
/// path; `anchor` and `title` belong to the first section.
pub fn ranks_sections(
    job: &JobOfJoinedRanks,
    anchor: &'static str,
    title: &'static str,
) -> Result<Vec<HtmlPageSection>, ChartDrawingError> {
    let drawn = |figures: Vec<ChartWithFileName>| {
        page_frame::charts_side_by_side(&ChartsOfOneKind { figures, omitted_charts: 0 })
    };
    let mut sections = Vec::new();
    if !job.ranks.is_empty() {
        let charts = drawn(vec![chart_of_time_per_rank(job)])?;
        let body = html! {
            (charts) (table_of_times_per_rank(job))
        };
        sections.push(HtmlPageSection::with_anchor_and_title(anchor, title, body));
    }
    if job.joined_collectives > 0 {
        let charts = drawn(
            vec![chart_of_waiting_per_rank(job)]
                .into_iter()
                .chain(heat_map_of_waiting_between_ranks(job))
                .collect(),
        )?;
        sections.push(HtmlPageSection::with_anchor_and_title(
            "skew",
            "Waiting between ranks",
            charts,
        ));
        let charts = drawn(vec![chart_of_collective_transfer_and_skew(job)])?;
        let body = html! {
            (charts) (table_of_collectives(job))
        };
        sections.push(HtmlPageSection::with_anchor_and_title("collectives", "Collectives", body));
        sections.push(HtmlPageSection::with_anchor_and_title(
            "path",
            "Critical path and gains",
            tables_of_critical_path_and_gains(job),
        ));
    }
    Ok(sections)
}

fn ranks_page_lead(job: &JobOfJoinedRanks) -> Markup {
    let mut facts = vec![
        ("ranks", job.ranks.len().to_string()),
        (
            "collectives joined",
            format!(
                "{} over {}",
                job.joined_collectives,
                time_text(job.collectives_span_ns as f64)
            ),
        ),
        ("clocks aligned to", format!("± {}", time_text(job.clock_alignment_precision_ns as f64))),
    ];
    if let Some((speed, name)) = job.link_bandwidth_and_name {
        facts.push(("link", format!("{name}, {speed:.0} GB/s each way")));
    }
    page_frame::facts_list(&facts)
}

fn problems_of_ranks_data(job: &JobOfJoinedRanks) -> Markup {
    html! {
        @for problem in &job.problems {
            div class="banner warning" { p { (page_frame::printable_on_page(&problem.problem_as_sentence())) } }
        }
    }
}

fn straggler_findings(job: &JobOfJoinedRanks) -> Markup {
    let stragglers = job.straggler_ranks_slowest_first();
    let severity = |rank: &RankWithCollectiveSums| {
        FindingSeverity::severity_from_possible_saving(
            rank.delayed_other_ranks_ns,
            job.collectives_span_ns,
        )
        .printed_severity_label()
    };
    html! {
        @for rank in &stragglers {
            h3 class={ "finding " (severity(rank)) } {
                (severity(rank)) ": straggler " (page_frame::printable_on_page(&rank.rank_name))
            }
            p { (page_frame::printable_on_page(&job.straggler_delay_sentence(rank))) "." }
        }
        @match (job.joined_collectives, stragglers.is_empty()) {
            (0, _) => p {
                "No collective could be joined: waiting cannot be separated from transfer. Give the \
                 traces of several ranks of one job."
            },
            (_, true) => p {
                "No straggler: no rank delays the others by 5 % of the time where no compute hides \
                 it, and by more than the clocks may differ."
            },
            (_, false) => {}
        }
        @if let Some((least, most)) = job.exposed_communication_share_range() {
            p {
                "Exposed communication: "
                (format!("{:.1} to {:.1} %", least * 100.0, most * 100.0))
                " of the time of a rank."
            }
        }
    }
}

fn ranks_bar_chart(
    title: &str,
    subtitle: String,
    legend: &[&str],
    rows: Vec<ChartRowWithLabel>,
) -> TitledChart {
    TitledChart {
        chart_title: title.to_owned(),
        chart_subtitle: subtitle,
        body: ChartBody::Rows(LabelledRowsChart {
            horizontal_axis: ChartAxis::with_round_ticks(
                "time",
                PlottedUnit::TimeNs,
                AxisScaleKind::LinearFromZero,
            ),
            mark_colour_legend: legend.iter().map(|&name| name.to_owned()).collect(),
            rows,
            vertical_line_value: None,
        }),
    }
}

/// Makes a chart row of consecutive coloured spans from these times in nanoseconds.
fn row_of_consecutive_spans(label: String, value: String, parts: &[i64]) -> ChartRowWithLabel {
    let mut at = 0;
    let mut marks = Vec::new();
    for (colour, &ns) in parts.iter().enumerate().filter(|(_, ns)| **ns > 0) {
        marks.push(MarkInChartRow::RectangleBetweenValues(at as f64, (at + ns) as f64, colour));
        at += ns;
    }
    ChartRowWithLabel { row_label: label, value_text: value, marks }
}

/// Returns a note on how many ranks have no bar in the chart; empty if all have one.
fn note_on_ranks_without_bar(count: usize) -> String {
    match count.saturating_sub(MAX_RANKS_DRAWN_AS_BARS) {
        0 => String::new(),
        more => format!("; {more} more ranks are in the table"),
    }
}

fn chart_of_time_per_rank(job: &JobOfJoinedRanks) -> ChartWithFileName {
    let row = |of: &RankWithCollectiveSums| {
        let times = &of.times_in_common_span;
        let parts = [
            times.compute_ns - times.hidden_communication_ns,
            times.hidden_communication_ns,
            times.exposed_communication_ns,
            times.copies_alone_ns,
            times.idle_ns,
        ];
        row_of_consecutive_spans(
            of.rank_name.clone(),
            time_text(times.total_ns_of_all_activities() as f64),
            &parts,
        )
    };
    let legend =
        ["compute", "compute beside communication", "exposed communication", "copies", "idle"];
    let subtitle = format!(
        "while all ranks were recorded; parts of a rank add up{}",
        note_on_ranks_without_bar(job.ranks.len())
    );
    let bars = job.ranks.iter().take(MAX_RANKS_DRAWN_AS_BARS).map(row).collect();
    ChartWithFileName::with_file_name_from_words(
        &["ranks"],
        ranks_bar_chart("Time of each rank", subtitle, &legend, bars),
    )
}

fn chart_of_waiting_per_rank(job: &JobOfJoinedRanks) -> ChartWithFileName {
    let row = |of: &RankWithCollectiveSums| {
        let value = format!(
            "{}, {}",
            time_text(of.waited_in_collectives_ns as f64),
            time_text(of.delayed_other_ranks_ns as f64)
        );
        row_of_consecutive_spans(
            of.rank_name.clone(),
            value,
            &[of.waited_in_collectives_ns, of.delayed_other_ranks_ns],
        )
    };
    let bars = job.ranks.iter().take(MAX_RANKS_DRAWN_AS_BARS).map(row).collect();
    let subtitle = format!(
        "inside collectives, until the last rank arrives; a straggler delays and does not wait{}",
        note_on_ranks_without_bar(job.ranks.len())
    );
    let legend = ["waits for others", "delays others alone"];
    ChartWithFileName::with_file_name_from_words(
        &["waiting"],
        ranks_bar_chart("Waiting between ranks", subtitle, &legend, bars),
    )
}

/// Draws a heat map of the time that each rank waits for each other rank; `None` if no rank waits
/// or there are too many ranks.
fn heat_map_of_waiting_between_ranks(job: &JobOfJoinedRanks) -> Option<ChartWithFileName> {
    let names: Vec<String> = job.ranks.iter().map(|of| of.rank_name.clone()).collect();
    let some = job.wait_ns_between_ranks.iter().flatten().any(|&ns| ns > 0);
    let chart = TitledChart {
        chart_title: "Who waits for whom".to_owned(),
        chart_subtitle: "time that one rank waits for the last one".to_owned(),
        body: ChartBody::Heat(HeatMapData {
            column_titles: names.clone(),
            row_labels: names,
            cell_values: job
                .wait_ns_between_ranks
                .iter()
                .map(|of| of.iter().map(|&ns| (ns > 0).then_some(ns as f64)).collect())
                .collect(),
            quantity: PlottedUnit::TimeNs,
            x_and_y_axis_names: ("the last rank".to_owned(), "the rank that waits".to_owned()),
        }),
    };
    (some && job.ranks.len() <= MAX_RANKS_IN_WAITING_MAP)
        .then(|| ChartWithFileName::with_file_name_from_words(&["pairs"], chart))
}

fn collective_kind_and_size(of: &CollectivesOfKindAndSize) -> String {
    match of.bytes_per_collective {
        0 => of.collective.collective_label().to_owned(),
        size => format!("{}, {}", of.collective.collective_label(), decimal_byte_size_text(size)),
    }
}

fn chart_of_collective_transfer_and_skew(job: &JobOfJoinedRanks) -> ChartWithFileName {
    let row = |of: &CollectivesOfKindAndSize| {
        let value = format!("{} x", of.collective_count);
        row_of_consecutive_spans(
            collective_kind_and_size(of),
            value,
            &[of.total_transfer_ns, of.total_arrival_skew_ns],
        )
    };
    let more = job.collectives.len().saturating_sub(MAX_COLLECTIVE_BARS);
    let more = if more > 0 { format!("; {more} more are in the table") } else { String::new() };
    let subtitle = format!("skew is the mean time of a rank until the last one arrives{more}");
    let bars = job.collectives.iter().take(MAX_COLLECTIVE_BARS).map(row).collect();
    let legend = ["transfer", "skew"];
    ChartWithFileName::with_file_name_from_words(
        &["collectives"],
        ranks_bar_chart("Transfer and skew", subtitle, &legend, bars),
    )
}

fn table_of_times_per_rank(job: &JobOfJoinedRanks) -> Markup {
    let lines: Vec<Vec<String>> = job
        .ranks
        .iter()
        .map(|of| {
            let own = &of.times_in_common_span;
            let device = of.rank_trace.gpu_name.clone().unwrap_or_default();
            let times = [
                own.compute_ns,
                own.hidden_communication_ns,
                own.exposed_communication_ns,
                own.copies_alone_ns,
                own.idle_ns,
                of.waited_in_collectives_ns,
                of.delayed_other_ranks_ns,
            ];
            let name = std::iter::once(of.rank_name.clone());
            let times = times.iter().map(|&ns| time_text(ns as f64));
            name.chain(times).chain([of.last_arrivals.to_string(), device]).collect()
        })
        .collect();
    let header = [
        "rank",
        "compute",
        "of it beside communication",
        "exposed communication",
        "copies",
        "idle",
        "waits",
        "delays",
        "last",
        "device",
    ];
    page_frame::html_table(&header, &lines, |_| false)
}

fn table_of_collectives(job: &JobOfJoinedRanks) -> Markup {
    let line = |of: &CollectivesOfKindAndSize| {
        let bus = match (of.bus_bandwidth_gb_per_s, job.link_bandwidth_and_name) {
            (Some(bus), Some((link, _))) => {
                format!("{bus:.1} GB/s ({:.0} % of the link)", bus / link * 100.0)
            }
            (Some(bus), None) => format!("{bus:.1} GB/s"),
            (None, _) => "size not recorded".to_owned(),
        };
        vec![
            collective_kind_and_size(of),
            of.ranks.to_string(),
            of.collective_count.to_string(),
            time_text(of.total_transfer_ns as f64),
            time_text(of.total_arrival_skew_ns as f64),
            bus,
        ]
    };
    let lines: Vec<Vec<String>> = job.collectives.iter().map(line).collect();
    let header = ["collective", "ranks", "count", "transfer", "skew", "bus bandwidth"];
    page_frame::html_table(&header, &lines, |_| false)
}

fn tables_of_critical_path_and_gains(job: &JobOfJoinedRanks) -> Markup {
    let path = &job.critical_path;
    let share = |ns: i64| format!("{:.1}%", 100.0 * ns as f64 / path.path_length_ns.max(1) as f64);
    let segments: Vec<Vec<String>> = path
        .rank_kind_and_ns_of_segments
        .iter()
        .map(|(rank, what, ns)| {
            vec![
                what.clone(),
                job.ranks[*rank].rank_name.clone(),
                time_text(*ns as f64),
                share(*ns),
            ]
        })
        .collect();
    let gains: Vec<Vec<String>> = path
        .gains
        .iter()
        .map(|of| vec![of.change.clone(), time_text(of.gain_ns as f64), share(of.gain_ns)])
        .collect();
    html! {
        @if !segments.is_empty() {
            (page_frame::html_table(&["on the critical path", "rank", "time", "share"], &segments, |_| false))
        }
        @if !gains.is_empty() {
            h3 { "Gains, from the replay of all ranks" }
            (page_frame::html_table(&["change", "gain", "share"], &gains, |_| false))
        }
    }
}
