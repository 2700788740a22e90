//! The page that `kernelgate diagnose --html` writes for a trace.

mod accounts;
mod charts;

use maud::{Markup, html};

use super::charts::{ChartFigure, ChartGallery};
use super::page_frame::{self, PageSection};
use super::ranks;
use crate::plot::PlotError;
use kernelgate::display::{byte_text, time_text};
use kernelgate_trace::diagnose::ranks::JoinedJob;
use kernelgate_trace::diagnose::{
    DiagnosisFinding, DiagnosisQuestion, FindingEvidence, FindingSeverity, GapLengthClass,
    ProcessDeviceUse, QuestionAnswer, TraceDiagnosis, readable_name,
};
use kernelgate_trace::model::Trace;
use kernelgate_trace::stats::{self, StatsReport, TableCell};

/// Largest number of rows of a table on the page; `kernelgate stats` prints all rows.
const MAX_ROWS: usize = 100;

/// Makes the page of a trace called `name`, and of its GPUs as ranks of a job.
pub fn trace_page(
    name: &str,
    trace: &Trace,
    diagnosis: &TraceDiagnosis,
    gpus: Option<&JoinedJob>,
) -> Result<String, PlotError> {
    let drawn = |figures: Vec<ChartFigure>| {
        page_frame::chart_gallery(&ChartGallery { figures, left_out: 0 })
    };
    let mut sections = vec![
        PageSection::new("quality", "Data quality", quality_markup(diagnosis)),
        PageSection::new("findings", "Findings", findings_markup(diagnosis)),
        PageSection::new("account", "Time accounting", {
            let charts = drawn(accounts::stacked(diagnosis))?;
            html! { (charts) (accounts::tables(diagnosis)) }
        }),
        PageSection::new("timeline", "Timeline", drawn(charts::timeline(trace))?),
        PageSection::new("gaps", "Gaps", gaps_markup(diagnosis)),
        PageSection::new("kernels", "Where the time goes", {
            let charts = drawn(charts::kernels(diagnosis))?;
            html! { (charts) (components_markup(diagnosis)) }
        }),
        PageSection::new("memory", "Device memory", {
            let charts = drawn(charts::memory(trace, diagnosis))?;
            html! { (charts) (memory(diagnosis)) }
        }),
        PageSection::new(
            "bounds",
            "What bounds the kernels",
            drawn(charts::roofline_chart(trace))?,
        ),
    ];
    if let Some(gpus) = gpus {
        let timeline = sections.iter().position(|section| section.anchor == "timeline");
        let gpus = ranks::sections_of(gpus, "gpus", "Time of each GPU")?;
        let at = timeline.map_or(sections.len(), |timeline| timeline + 1);
        sections.splice(at..at, gpus);
    }
    sections.extend(tables(trace));
    sections.push(PageSection::new("rules", "Rules without a finding", rules_markup(diagnosis)));
    let empty = |section: &PageSection| {
        section.body.0.replace("<div class=\"gallery\"></div>", "").trim().is_empty()
    };
    sections.retain(|section| !empty(section));
    Ok(page_frame::page(
        &format!("kernelgate diagnose: {name}"),
        &diagnosis_summary(diagnosis),
        &sections,
    ))
}

fn diagnosis_summary(diagnosis: &TraceDiagnosis) -> Markup {
    let records = diagnosis.records.iter().filter(|(_, count)| *count > 0);
    let records: Vec<String> = records.map(|(what, count)| format!("{count} {what}")).collect();
    let device = |of: &ProcessDeviceUse| {
        let span = (of.span.1 - of.span.0).max(1) as f64;
        let name = of.name.as_ref().map_or_else(String::new, |name| format!("{name}, "));
        format!(
            "{name}{}: busy {:.1}% of {}, {} operations",
            place_words(of),
            100.0 * of.busy_ns as f64 / span,
            time_text(span),
            of.operations
        )
    };
    let mut facts = vec![("recorder", diagnosis.recorder.clone()), ("records", records.join(", "))];
    facts.extend(diagnosis.devices.iter().map(|of| ("device", device(of))));
    page_frame::facts(&facts)
}

/// Warnings about the quality of the trace, which come first.
fn quality_markup(diagnosis: &TraceDiagnosis) -> Markup {
    html! {
        @for finding in &diagnosis.quality {
            div class=(severity_css_class("banner", finding.severity)) {
                p { b { (finding.severity.label()) } ": " (page_frame::printable(&finding.title)) }
                p class="note" { (page_frame::printable(&finding.advice)) "." }
                (finding_details(finding))
            }
        }
    }
}

/// The CSS class for the colour of a severity.
fn severity_css_class(kind: &str, severity: FindingSeverity) -> String {
    format!("{kind} {}", severity.label())
}

fn finding_details(finding: &DiagnosisFinding) -> Markup {
    html! {
        @if !finding.evidence.is_empty() {
            details {
                summary { "evidence" }
                (page_frame::lines(&finding.evidence.iter().map(evidence_text).collect::<Vec<_>>()))
            }
        }
    }
}

fn findings_markup(diagnosis: &TraceDiagnosis) -> Markup {
    let recoverable = |finding: &DiagnosisFinding| {
        finding.recoverable_ns.map(|ns| format!(", up to {} to gain", time_text(ns as f64)))
    };
    let replayed = |finding: &DiagnosisFinding| {
        finding.replayed.as_ref().map(|gain| {
            let alone = time_text(gain.alone_ns as f64);
            let further = match gain.further_ns {
                same if same == gain.alone_ns => return format!("; replayed: {alone}"),
                ..=0 => "nothing".to_owned(),
                further => time_text(further as f64),
            };
            format!("; replayed: {alone}, {further} once those above are mended")
        })
    };
    html! {
        @if diagnosis.findings.is_empty() {
            @if diagnosis.answers_any_gpu_question() {
                p { "No rule found anything." }
            } @else {
                p { "No question can be answered: see the rules without a finding." }
            }
        }
        @for finding in &diagnosis.findings {
            h3 class=(severity_css_class("finding", finding.severity)) {
                (finding.severity.label()) ": " (page_frame::printable(&finding.title))
            }
            p class="note" {
                (finding.id) ", confidence " (finding.confidence.label()) ": measured "
                (format_amount(finding.measured.value)) " " (finding.measured.unit) ", threshold "
                (format_amount(finding.threshold.value)) " " (finding.threshold.unit)
                (recoverable(finding).unwrap_or_default())
                (replayed(finding).unwrap_or_default())
            }
            p { (finding.advice) "." }
            (finding_details(finding))
            p class="note" { "No fault where " (finding.false_positive) "." }
        }
    }
}

/// Formats a number with few digits.
fn format_amount(value: f64) -> String {
    let whole = value.abs() >= 100.0 || value.fract() == 0.0;
    if whole { format!("{value:.0}") } else { format!("{value:.1}") }
}

fn evidence_text(of: &FindingEvidence) -> String {
    let total =
        of.total_ns.map(|ns| format!(", {} in all", time_text(ns as f64))).unwrap_or_default();
    let range = of.range.as_ref().map(|range| format!(", in {range}")).unwrap_or_default();
    format!("{} ({} times{total}{range})", of.what, of.count)
}

fn place_words(device: &ProcessDeviceUse) -> String {
    format!("process {}, device {}", device.pid, device.device)
}

fn gaps_markup(diagnosis: &TraceDiagnosis) -> Markup {
    let class =
        |class: GapLengthClass| format!("{} / {}", class.count, time_text(class.total_ns as f64));
    let rows: Vec<Vec<String>> = diagnosis
        .devices
        .iter()
        .filter(|device| device.gaps.gap_count() > 0)
        .map(|device| {
            let gaps = &device.gaps;
            vec![
                place_words(device),
                class(gaps.normal),
                class(gaps.warning),
                class(gaps.severe),
                time_text(gaps.mean_gap_ns()),
                time_text(gaps.longest_ns as f64),
            ]
        })
        .collect();
    let causes: Vec<Vec<String>> = diagnosis
        .devices
        .iter()
        .flat_map(|device| device.gaps.causes.iter().map(move |cause| (device, cause)))
        .map(|(device, cause)| {
            vec![
                cause.label(),
                place_words(device),
                cause.count.to_string(),
                time_text(cause.total_ns as f64),
            ]
        })
        .collect();
    let header =
        ["where", "normal, < 20 µs", "warning, 20 to 50 µs", "severe, > 50 µs", "mean", "longest"];
    html! {
        @if !rows.is_empty() {
            (page_frame::table(&header, &rows, |_| false))
            h3 { "Why" }
            (page_frame::table(&["cause", "where", "gaps", "time"], &causes, |_| false))
        }
    }
}

fn components_markup(diagnosis: &TraceDiagnosis) -> Markup {
    let row = |of: &kernelgate_trace::diagnose::RunComponent| {
        vec![
            format!("{}{}", "\u{a0}\u{a0}".repeat(of.depth), of.path),
            of.host.count.to_string(),
            time_text(of.host.mean),
            of.kernels.to_string(),
            time_text(of.kernel_ns as f64),
            format!("{:.1}%", 100.0 * of.share),
        ]
    };
    let rows: Vec<Vec<String>> = diagnosis.answers.components.iter().map(row).collect();
    let header = ["range", "times", "host, mean", "kernels", "kernel time", "share"];
    html! { @if !rows.is_empty() { h3 { "Ranges" } (page_frame::table(&header, &rows, |_| false)) } }
}

/// Held memory, by phase.
fn memory(diagnosis: &TraceDiagnosis) -> Markup {
    let rows: Vec<Vec<String>> = diagnosis
        .memory
        .iter()
        .flat_map(|of| of.phases.iter().map(move |phase| (of, phase)))
        .take(MAX_ROWS)
        .map(|(of, phase)| {
            let sign = if phase.change_bytes < 0 { "-" } else { "+" };
            vec![
                phase.name.clone(),
                format!("process {}, device {}", of.pid, of.device),
                phase.times.to_string(),
                byte_text(phase.peak_bytes),
                format!("{sign}{}", byte_text(phase.change_bytes.unsigned_abs())),
            ]
        })
        .collect();
    let header = ["phase", "where", "times", "held at most", "change"];
    html! { @if !rows.is_empty() { h3 { "By phase" } (page_frame::table(&header, &rows, |_| false)) } }
}

/// The most useful tables of a trace, if it has data for them.
fn tables(trace: &Trace) -> Vec<PageSection> {
    let sections = [
        (StatsReport::GpuKernels, "table-kernels", "Kernels"),
        (StatsReport::ApiCalls, "table-calls", "CUDA calls"),
        (StatsReport::MemoryTimes, "table-memory", "Copies and sets"),
        (StatsReport::RangeProjections, "table-ranges", "Ranges on the GPU"),
    ];
    let section = |(report, anchor, title): (StatsReport, _, _)| {
        let table = stats::make_table(trace, report);
        if table.rows.is_empty() {
            return None;
        }
        let cell = |cell: &TableCell| match cell {
            TableCell::Text(text) => readable_name(text),
            cell => cell.csv_text(),
        };
        // The name comes first, as in every table of a page.
        let row = |row: &Vec<TableCell>| -> Vec<String> {
            let mut cells: Vec<String> = row.iter().map(cell).collect();
            let name = cells.remove(table.named_by);
            cells.insert(0, name);
            cells
        };
        let mut header = table.columns.clone();
        let name = header.remove(table.named_by);
        header.insert(0, name);
        let rows: Vec<Vec<String>> = table.rows.iter().take(MAX_ROWS).map(row).collect();
        let more = table.rows.len().saturating_sub(MAX_ROWS);
        let body = html! {
            (page_frame::table(&header, &rows, |_| false))
            @if more > 0 {
                p class="note" { (more) " more rows: kernelgate stats --report " (report.name()) }
            }
        };
        Some(PageSection::new(anchor, title, body))
    };
    sections.into_iter().filter_map(section).collect()
}

fn rules_markup(diagnosis: &TraceDiagnosis) -> Markup {
    let without = |answered: bool| {
        let line = move |question: &DiagnosisQuestion| match (&question.answer, answered) {
            (QuestionAnswer::No { inspected }, true) => {
                Some(format!("{} in {inspected}", question.id))
            }
            (QuestionAnswer::CannotAnswer { .. }, false) => {
                Some(format!("{}: {}", question.text, question.missing_data_reason()?))
            }
            _ => None,
        };
        diagnosis.questions.iter().filter_map(line).collect::<Vec<String>>()
    };
    let (passed, open) = (without(true), without(false));
    html! {
        @if !passed.is_empty() {
            details { summary { (passed.len()) " found nothing" } (page_frame::lines(&passed)) }
        }
        @if !open.is_empty() {
            details { summary { (open.len()) " cannot be answered" } (page_frame::lines(&open)) }
        }
    }
}
