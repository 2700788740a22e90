//! Makes the HTML page of a job with several ranks: `kernelgate diagnose --html` writes this page
//! for traces of several ranks.

use maud::{Markup, html};

use super::charts::{ChartFigure, ChartGallery};
use super::page_frame::{self, PageSection};
use crate::plot::{
    ChartAxis, ChartBody, ChartRowMark, ChartWithTitle, HeatMap, LabelledRow, LabelledRows,
    PlotError, PlottedUnit, ScaleKind,
};
use kernelgate::display::{byte_text, time_text};
use kernelgate_trace::diagnose::FindingSeverity;
use kernelgate_trace::diagnose::ranks::{CollectiveKindSum, JoinedJob, RankCollectiveSum};

/// Largest number of ranks that are drawn as bars; the table has all ranks.
const MAX_RANK_BARS: usize = 64;
/// Largest number of ranks for which waiting is drawn for each pair.
const MAX_RANKS_IN_PAIR_TABLE: usize = 12;
/// Largest number of kinds and sizes of collectives with a bar.
const MAX_COLLECTIVE_BARS: usize = 16;

/// Makes the HTML page of a job with several ranks.
pub fn page(job: &JoinedJob) -> Result<String, PlotError> {
    let mut sections = vec![
        PageSection::new("quality", "Data quality", ranks_problems(job)),
        PageSection::new("findings", "Findings", ranks_findings(job)),
    ];
    sections.extend(sections_of(job, "account", "Time of each rank")?);
    sections.retain(|section| !section.body.0.trim().is_empty());
    Ok(page_frame::page(
        &format!("kernelgate diagnose: {} ranks", job.ranks.len()),
        &ranks_lead(job),
        &sections,
    ))
}

/// Time of the ranks, their waiting, their collectives and the critical path; the first section has
/// that anchor and title.
pub fn sections_of(
    job: &JoinedJob,
    anchor: &'static str,
    title: &'static str,
) -> Result<Vec<PageSection>, PlotError> {
    let drawn = |figures: Vec<ChartFigure>| {
        page_frame::chart_gallery(&ChartGallery { figures, left_out: 0 })
    };
    let mut sections = Vec::new();
    if !job.ranks.is_empty() {
        let charts = drawn(vec![rank_accounts(job)])?;
        let body = html! {
            (charts) (rank_table(job))
        };
        sections.push(PageSection::new(anchor, title, body));
    }
    if job.joined > 0 {
        let charts = drawn(vec![rank_lateness(job)].into_iter().chain(rank_pairs(job)).collect())?;
        sections.push(PageSection::new("skew", "Waiting between ranks", charts));
        let charts = drawn(vec![rank_transfers(job)])?;
        let body = html! {
            (charts) (collectives_table(job))
        };
        sections.push(PageSection::new("collectives", "Collectives", body));
        sections.push(PageSection::new(
            "path",
            "Critical path and gains",
            critical_path_table(job),
        ));
    }
    Ok(sections)
}

fn ranks_lead(job: &JoinedJob) -> Markup {
    let mut facts = vec![
        ("ranks", job.ranks.len().to_string()),
        ("collectives joined", format!("{} over {}", job.joined, time_text(job.span_ns as f64))),
        ("clocks aligned to", format!("± {}", time_text(job.precision_ns as f64))),
    ];
    if let Some((speed, name)) = job.link {
        facts.push(("link", format!("{name}, {speed:.0} GB/s each way")));
    }
    page_frame::facts(&facts)
}

fn ranks_problems(job: &JoinedJob) -> Markup {
    html! {
        @for problem in &job.problems {
            div class="banner warning" { p { (page_frame::printable(&problem.problem_text())) } }
        }
    }
}

fn ranks_findings(job: &JoinedJob) -> Markup {
    let stragglers = job.straggler_ranks();
    let severity = |rank: &RankCollectiveSum| {
        FindingSeverity::from_saving(rank.delayed_ns, job.span_ns).label()
    };
    html! {
        @for rank in &stragglers {
            h3 class={ "finding " (severity(rank)) } {
                (severity(rank)) ": straggler " (page_frame::printable(&rank.name))
            }
            p { (page_frame::printable(&job.straggler_sentence(rank))) "." }
        }
        @match (job.joined, stragglers.is_empty()) {
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
        @if let Some((least, most)) = job.exposed_share_range() {
            p {
                "Exposed communication: "
                (format!("{:.1} to {:.1} %", least * 100.0, most * 100.0))
                " of the time of a rank."
            }
        }
    }
}

fn ranks_chart(
    title: &str,
    subtitle: String,
    legend: &[&str],
    rows: Vec<LabelledRow>,
) -> ChartWithTitle {
    ChartWithTitle {
        title: title.to_owned(),
        subtitle,
        body: ChartBody::Rows(LabelledRows {
            axis: ChartAxis::new("time", PlottedUnit::Time, ScaleKind::FromZero),
            legend: legend.iter().map(|&name| name.to_owned()).collect(),
            rows,
            origin: None,
        }),
    }
}

/// A chart row of consecutive time spans.
fn stacked_row(label: String, value: String, parts: &[i64]) -> LabelledRow {
    let mut at = 0;
    let mut marks = Vec::new();
    for (colour, &ns) in parts.iter().enumerate().filter(|(_, ns)| **ns > 0) {
        marks.push(ChartRowMark::Span(at as f64, (at + ns) as f64, colour));
        at += ns;
    }
    LabelledRow { label, value, marks }
}

/// A note on ranks without a bar.
fn ranks_without_bar(count: usize) -> String {
    match count.saturating_sub(MAX_RANK_BARS) {
        0 => String::new(),
        more => format!("; {more} more ranks are in the table"),
    }
}

fn rank_accounts(job: &JoinedJob) -> ChartFigure {
    let row = |of: &RankCollectiveSum| {
        let times = &of.times;
        let parts = [
            times.compute_ns - times.hidden_ns,
            times.hidden_ns,
            times.exposed_ns,
            times.copies_ns,
            times.idle_ns,
        ];
        stacked_row(of.name.clone(), time_text(times.total_ns() as f64), &parts)
    };
    let legend =
        ["compute", "compute beside communication", "exposed communication", "copies", "idle"];
    let subtitle = format!(
        "while all ranks were recorded; parts of a rank add up{}",
        ranks_without_bar(job.ranks.len())
    );
    let bars = job.ranks.iter().take(MAX_RANK_BARS).map(row).collect();
    ChartFigure::new(&["ranks"], ranks_chart("Time of each rank", subtitle, &legend, bars))
}

fn rank_lateness(job: &JoinedJob) -> ChartFigure {
    let row = |of: &RankCollectiveSum| {
        let value =
            format!("{}, {}", time_text(of.waited_ns as f64), time_text(of.delayed_ns as f64));
        stacked_row(of.name.clone(), value, &[of.waited_ns, of.delayed_ns])
    };
    let bars = job.ranks.iter().take(MAX_RANK_BARS).map(row).collect();
    let subtitle = format!(
        "inside collectives, until the last rank arrives; a straggler delays and does not wait{}",
        ranks_without_bar(job.ranks.len())
    );
    let legend = ["waits for others", "delays others alone"];
    ChartFigure::new(&["waiting"], ranks_chart("Waiting between ranks", subtitle, &legend, bars))
}

/// Chart of the time that each rank waits for each other rank.
fn rank_pairs(job: &JoinedJob) -> Option<ChartFigure> {
    let names: Vec<String> = job.ranks.iter().map(|of| of.name.clone()).collect();
    let some = job.waits.iter().flatten().any(|&ns| ns > 0);
    let chart = ChartWithTitle {
        title: "Who waits for whom".to_owned(),
        subtitle: "time that one rank waits for the last one".to_owned(),
        body: ChartBody::Heat(HeatMap {
            columns: names.clone(),
            rows: names,
            cells: job
                .waits
                .iter()
                .map(|of| of.iter().map(|&ns| (ns > 0).then_some(ns as f64)).collect())
                .collect(),
            quantity: PlottedUnit::Time,
            names: ("the last rank".to_owned(), "the rank that waits".to_owned()),
        }),
    };
    (some && job.ranks.len() <= MAX_RANKS_IN_PAIR_TABLE)
        .then(|| ChartFigure::new(&["pairs"], chart))
}

fn collective_kind_text(of: &CollectiveKindSum) -> String {
    match of.bytes {
        0 => of.collective.label().to_owned(),
        size => format!("{}, {}", of.collective.label(), byte_text(size)),
    }
}

fn rank_transfers(job: &JoinedJob) -> ChartFigure {
    let row = |of: &CollectiveKindSum| {
        let value = format!("{} x", of.count);
        stacked_row(collective_kind_text(of), value, &[of.transfer_ns, of.skew_ns])
    };
    let more = job.collectives.len().saturating_sub(MAX_COLLECTIVE_BARS);
    let more = if more > 0 { format!("; {more} more are in the table") } else { String::new() };
    let subtitle = format!("skew is the mean time of a rank until the last one arrives{more}");
    let bars = job.collectives.iter().take(MAX_COLLECTIVE_BARS).map(row).collect();
    let legend = ["transfer", "skew"];
    ChartFigure::new(&["collectives"], ranks_chart("Transfer and skew", subtitle, &legend, bars))
}

fn rank_table(job: &JoinedJob) -> Markup {
    let lines: Vec<Vec<String>> = job
        .ranks
        .iter()
        .map(|of| {
            let own = &of.times;
            let device = of.part.device.clone().unwrap_or_default();
            let times = [
                own.compute_ns,
                own.hidden_ns,
                own.exposed_ns,
                own.copies_ns,
                own.idle_ns,
                of.waited_ns,
                of.delayed_ns,
            ];
            let name = std::iter::once(of.name.clone());
            let times = times.iter().map(|&ns| time_text(ns as f64));
            name.chain(times).chain([of.last.to_string(), device]).collect()
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
    page_frame::table(&header, &lines, |_| false)
}

fn collectives_table(job: &JoinedJob) -> Markup {
    let line = |of: &CollectiveKindSum| {
        let bus = match (of.bus, job.link) {
            (Some(bus), Some((link, _))) => {
                format!("{bus:.1} GB/s ({:.0} % of the link)", bus / link * 100.0)
            }
            (Some(bus), None) => format!("{bus:.1} GB/s"),
            (None, _) => "size not recorded".to_owned(),
        };
        vec![
            collective_kind_text(of),
            of.ranks.to_string(),
            of.count.to_string(),
            time_text(of.transfer_ns as f64),
            time_text(of.skew_ns as f64),
            bus,
        ]
    };
    let lines: Vec<Vec<String>> = job.collectives.iter().map(line).collect();
    let header = ["collective", "ranks", "count", "transfer", "skew", "bus bandwidth"];
    page_frame::table(&header, &lines, |_| false)
}

fn critical_path_table(job: &JoinedJob) -> Markup {
    let path = &job.path;
    let share = |ns: i64| format!("{:.1}%", 100.0 * ns as f64 / path.total_ns.max(1) as f64);
    let segments: Vec<Vec<String>> = path
        .segments
        .iter()
        .map(|(rank, what, ns)| {
            vec![what.clone(), job.ranks[*rank].name.clone(), time_text(*ns as f64), share(*ns)]
        })
        .collect();
    let gains: Vec<Vec<String>> = path
        .gains
        .iter()
        .map(|of| vec![of.change.clone(), time_text(of.gain_ns as f64), share(of.gain_ns)])
        .collect();
    html! {
        @if !segments.is_empty() {
            (page_frame::table(&["on the critical path", "rank", "time", "share"], &segments, |_| false))
        }
        @if !gains.is_empty() {
            h3 { "Gains, from the replay of all ranks" }
            (page_frame::table(&["change", "gain", "share"], &gains, |_| false))
        }
    }
}
