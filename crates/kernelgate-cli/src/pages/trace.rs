//! Makes the HTML page that `kernelgate diagnose --html` writes for one trace.

mod accounts;
mod charts;

use maud::{Markup, html};

use super::charts::{ChartWithFileName, ChartsOfOneKind};
use super::page_frame::{self, HtmlPageSection};
use super::ranks;
use crate::plot::ChartDrawingError;
use kernelgate::display::{decimal_byte_size_text, time_text};
use kernelgate_trace::diagnose::ranks::JobOfJoinedRanks;
use kernelgate_trace::diagnose::{
    DiagnosisFinding, DiagnosisRuleAnswer, FindingEvidence, FindingSeverity, GpuUseOfProcess,
    IdleGapsOfLengthClass, QuestionWithAnswer, TraceDiagnosis, shortened_kernel_name_for_readers,
};
use kernelgate_trace::model::Trace;
use kernelgate_trace::stats::{self, StatsReport, TableCell};

/// Largest number of rows of a table on the trace page; `kernelgate stats` prints all rows.
const MAX_ROWS_OF_TRACE_TABLE: usize = 100;

/// Makes the HTML page of a trace called `name`; `gpus` compares the GPUs of the trace as ranks of
/// one job.
pub fn trace_diagnosis_page(
    name: &str,
    trace: &Trace,
    diagnosis: &TraceDiagnosis,
    gpus: Option<&JobOfJoinedRanks>,
) -> Result<String, ChartDrawingError> {
    let drawn = |figures: Vec<ChartWithFileName>| {
        page_frame::charts_side_by_side(&ChartsOfOneKind { figures, omitted_charts: 0 })
    };
    let mut sections = vec![
        HtmlPageSection::with_anchor_and_title(
            "quality",
            "Data quality",
            data_quality_warnings(diagnosis),
        ),
        HtmlPageSection::with_anchor_and_title(
            "findings",
            "Findings",
            findings_of_trace(diagnosis),
        ),
        HtmlPageSection::with_anchor_and_title("account", "Time accounting", {
            let charts = drawn(accounts::time_account_charts(diagnosis))?;
            html! { (charts) (accounts::time_account_tables(diagnosis)) }
        }),
        HtmlPageSection::with_anchor_and_title(
            "timeline",
            "Timeline",
            drawn(charts::timeline_chart(trace))?,
        ),
        HtmlPageSection::with_anchor_and_title("gaps", "Gaps", tables_of_idle_gaps(diagnosis)),
        HtmlPageSection::with_anchor_and_title("kernels", "Where the time goes", {
            let charts = drawn(charts::kernel_time_charts(diagnosis))?;
            html! { (charts) (table_of_time_per_component(diagnosis)) }
        }),
        HtmlPageSection::with_anchor_and_title("memory", "Device memory", {
            let charts = drawn(charts::device_memory_chart(trace, diagnosis))?;
            html! { (charts) (tables_of_device_memory(diagnosis)) }
        }),
        HtmlPageSection::with_anchor_and_title(
            "bounds",
            "What bounds the kernels",
            drawn(charts::throughput_share_chart(trace))?,
        ),
    ];
    if let Some(gpus) = gpus {
        let timeline = sections.iter().position(|section| section.anchor == "timeline");
        let gpus = ranks::ranks_sections(gpus, "gpus", "Time of each GPU")?;
        let at = timeline.map_or(sections.len(), |timeline| timeline + 1);
        sections.splice(at..at, gpus);
    }
    sections.extend(stats_table_sections(trace));
    sections.push(HtmlPageSection::with_anchor_and_title(
        "rules",
        "Rules without a finding",
        rules_without_finding(diagnosis),
    ));
    let empty = |section: &HtmlPageSection| {
        section.section_html.0.replace("<div class=\"gallery\"></div>", "").trim().is_empty()
    };
    sections.retain(|section| !empty(section));
    Ok(page_frame::build_html_page(
        &format!("kernelgate diagnose: {name}"),
        &facts_about_trace(diagnosis),
        &sections,
    ))
}

fn facts_about_trace(diagnosis: &TraceDiagnosis) -> Markup {
    let records = diagnosis.records.iter().filter(|(_, count)| *count > 0);
    let records: Vec<String> = records.map(|(what, count)| format!("{count} {what}")).collect();
    let device = |of: &GpuUseOfProcess| {
        let span =
            (of.first_start_and_last_end_ns.1 - of.first_start_and_last_end_ns.0).max(1) as f64;
        let name = of.gpu_name.as_ref().map_or_else(String::new, |name| format!("{name}, "));
        format!(
            "{name}{}: busy {:.1}% of {}, {} operations",
            process_and_device_name(of),
            100.0 * of.gpu_busy_ns as f64 / span,
            time_text(span),
            of.operation_count
        )
    };
    let mut facts =
        vec![("recorder", diagnosis.recorder_and_version.clone()), ("records", records.join(", "))];
    facts.extend(diagnosis.gpu_use_by_process.iter().map(|of| ("device", device(of))));
    page_frame::facts_list(&facts)
}

/// Builds the warnings about the data quality of the trace, which come first on the page.
fn data_quality_warnings(diagnosis: &TraceDiagnosis) -> Markup {
    html! {
        @for finding in &diagnosis.data_quality_findings {
            div class=(severity_css_class("banner", finding.severity)) {
                p { b { (finding.severity.printed_severity_label()) } ": " (page_frame::printable_on_page(&finding.finding_title)) }
                p class="note" { (page_frame::printable_on_page(&finding.advice)) "." }
                (evidence_of_finding(finding))
            }
        }
    }
}

/// Returns the CSS class that colours an element by the severity of a finding.
fn severity_css_class(kind: &str, severity: FindingSeverity) -> String {
    format!("{kind} {}", severity.printed_severity_label())
}

fn evidence_of_finding(finding: &DiagnosisFinding) -> Markup {
    html! {
        @if !finding.evidence.is_empty() {
            details {
                summary { "evidence" }
                (page_frame::html_list_of_lines(&finding.evidence.iter().map(evidence_line).collect::<Vec<_>>()))
            }
        }
    }
}

fn findings_of_trace(diagnosis: &TraceDiagnosis) -> Markup {
    let recoverable = |finding: &DiagnosisFinding| {
        finding.max_recoverable_ns.map(|ns| format!(", up to {} to gain", time_text(ns as f64)))
    };
    let replayed = |finding: &DiagnosisFinding| {
        finding.replayed_gain.as_ref().map(|gain| {
            let alone = time_text(gain.saved_ns_alone as f64);
            let further = match gain.further_saved_ns {
                same if same == gain.saved_ns_alone => return format!("; replayed: {alone}"),
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
                (finding.severity.printed_severity_label()) ": " (page_frame::printable_on_page(&finding.finding_title))
            }
            p class="note" {
                (finding.rule_id) ", confidence " (finding.confidence.printed_confidence_label()) ": measured "
                (number_with_few_digits(finding.measured_value.number_in_unit)) " " (finding.measured_value.unit) ", threshold "
                (number_with_few_digits(finding.rule_threshold.number_in_unit)) " " (finding.rule_threshold.unit)
                (recoverable(finding).unwrap_or_default())
                (replayed(finding).unwrap_or_default())
            }
            p { (finding.advice) "." }
            (evidence_of_finding(finding))
            p class="note" { "No fault where " (finding.false_positive_note) "." }
        }
    }
}

/// Formats a number with few significant digits.
fn number_with_few_digits(value: f64) -> String {
    let whole = value.abs() >= 100.0 || value.fract() == 0.0;
    if whole { format!("{value:.0}") } else { format!("{value:.1}") }
}

fn evidence_line(of: &FindingEvidence) -> String {
    let total = of
        .total_duration_ns
        .map(|ns| format!(", {} in all", time_text(ns as f64)))
        .unwrap_or_default();
    let range = of
        .innermost_common_range_path
        .as_ref()
        .map(|range| format!(", in {range}"))
        .unwrap_or_default();
    format!("{} ({} times{total}{range})", of.kernel_call_or_copy_name, of.covered_count)
}

fn process_and_device_name(device: &GpuUseOfProcess) -> String {
    format!("process {}, device {}", device.pid, device.gpu_ordinal)
}

fn tables_of_idle_gaps(diagnosis: &TraceDiagnosis) -> Markup {
    let class = |class: IdleGapsOfLengthClass| {
        format!("{} / {}", class.gap_count, time_text(class.total_gap_ns as f64))
    };
    let rows: Vec<Vec<String>> = diagnosis
        .gpu_use_by_process
        .iter()
        .filter(|device| device.idle_gaps.number_of_idle_gaps() > 0)
        .map(|device| {
            let gaps = &device.idle_gaps;
            vec![
                process_and_device_name(device),
                class(gaps.gaps_below_20_us),
                class(gaps.gaps_of_20_to_50_us),
                class(gaps.gaps_above_50_us),
                time_text(gaps.mean_length_of_gaps_ns()),
                time_text(gaps.longest_gap_ns as f64),
            ]
        })
        .collect();
    let causes: Vec<Vec<String>> = diagnosis
        .gpu_use_by_process
        .iter()
        .flat_map(|device| {
            device.idle_gaps.idle_time_by_cause.iter().map(move |cause| (device, cause))
        })
        .map(|(device, cause)| {
            vec![
                cause.printed_cause_with_name(),
                process_and_device_name(device),
                cause.gap_count.to_string(),
                time_text(cause.total_idle_ns as f64),
            ]
        })
        .collect();
    let header =
        ["where", "normal, < 20 µs", "warning, 20 to 50 µs", "severe, > 50 µs", "mean", "longest"];
    html! {
        @if !rows.is_empty() {
            (page_frame::html_table(&header, &rows, |_| false))
            h3 { "Why" }
            (page_frame::html_table(&["cause", "where", "gaps", "time"], &causes, |_| false))
        }
    }
}

fn table_of_time_per_component(diagnosis: &TraceDiagnosis) -> Markup {
    let row = |of: &kernelgate_trace::diagnose::RangePathHostAndKernelTimes| {
        vec![
            format!("{}{}", "\u{a0}\u{a0}".repeat(of.enclosing_range_count), of.range_path),
            of.host_times.value_count.to_string(),
            time_text(of.host_times.mean),
            of.kernel_count.to_string(),
            time_text(of.kernel_ns as f64),
            format!("{:.1}%", 100.0 * of.share_of_kernel_time),
        ]
    };
    let rows: Vec<Vec<String>> = diagnosis.answers.components.iter().map(row).collect();
    let header = ["range", "times", "host, mean", "kernels", "kernel time", "share"];
    html! { @if !rows.is_empty() { h3 { "Ranges" } (page_frame::html_table(&header, &rows, |_| false)) } }
}

/// Builds tables of the GPU memory that was allocated in each phase of the trace.
fn tables_of_device_memory(diagnosis: &TraceDiagnosis) -> Markup {
    let rows: Vec<Vec<String>> = diagnosis
        .device_memory_over_time
        .iter()
        .flat_map(|of| of.phases.iter().map(move |phase| (of, phase)))
        .take(MAX_ROWS_OF_TRACE_TABLE)
        .map(|(of, phase)| {
            let sign = if phase.held_bytes_change < 0 { "-" } else { "+" };
            vec![
                phase.phase_name.clone(),
                format!("process {}, device {}", of.pid, of.gpu_ordinal),
                phase.range_count.to_string(),
                decimal_byte_size_text(phase.peak_bytes),
                format!("{sign}{}", decimal_byte_size_text(phase.held_bytes_change.unsigned_abs())),
            ]
        })
        .collect();
    let header = ["phase", "where", "times", "held at most", "change"];
    html! { @if !rows.is_empty() { h3 { "By phase" } (page_frame::html_table(&header, &rows, |_| false)) } }
}

/// Builds the most useful tables of `kernelgate stats` as sections, if the trace has data for them.
fn stats_table_sections(trace: &Trace) -> Vec<HtmlPageSection> {
    let sections = [
        (StatsReport::KernelsByName, "table-kernels", "Kernels"),
        (StatsReport::ApiCallsByFunction, "table-calls", "CUDA calls"),
        (StatsReport::MemoryOperationDurations, "table-memory", "Copies and sets"),
        (StatsReport::RangesByProjectedGpuTime, "table-ranges", "Ranges on the GPU"),
    ];
    let section = |(report, anchor, title): (StatsReport, _, _)| {
        let table = stats::make_table(trace, report);
        if table.rows.is_empty() {
            return None;
        }
        let cell = |cell: &TableCell| match cell {
            TableCell::Text(text) => shortened_kernel_name_for_readers(text),
            cell => cell.cell_as_csv_text(),
        };
        // The column with the name is moved to the front, as in all tables on the page.
        let row = |row: &Vec<TableCell>| -> Vec<String> {
            let mut cells: Vec<String> = row.iter().map(cell).collect();
            let name = cells.remove(table.filtered_column_index);
            cells.insert(0, name);
            cells
        };
        let mut header = table.column_titles.clone();
        let name = header.remove(table.filtered_column_index);
        header.insert(0, name);
        let rows: Vec<Vec<String>> =
            table.rows.iter().take(MAX_ROWS_OF_TRACE_TABLE).map(row).collect();
        let more = table.rows.len().saturating_sub(MAX_ROWS_OF_TRACE_TABLE);
        let body = html! {
            (page_frame::html_table(&header, &rows, |_| false))
            @if more > 0 {
                p class="note" { (more) " more rows: kernelgate stats --report " (report.nsys_report_name()) }
            }
        };
        Some(HtmlPageSection::with_anchor_and_title(anchor, title, body))
    };
    sections.into_iter().filter_map(section).collect()
}

fn rules_without_finding(diagnosis: &TraceDiagnosis) -> Markup {
    let without = |answered: bool| {
        let line = move |question: &QuestionWithAnswer| match (&question.answer, answered) {
            (DiagnosisRuleAnswer::No { inspected }, true) => {
                Some(format!("{} in {inspected}", question.rule_id))
            }
            (DiagnosisRuleAnswer::CannotAnswer { .. }, false) => {
                Some(format!("{}: {}", question.question_text, question.reason_without_answer()?))
            }
            _ => None,
        };
        diagnosis.questions.iter().filter_map(line).collect::<Vec<String>>()
    };
    let (passed, open) = (without(true), without(false));
    html! {
        @if !passed.is_empty() {
            details { summary { (passed.len()) " found nothing" } (page_frame::html_list_of_lines(&passed)) }
        }
        @if !open.is_empty() {
            details { summary { (open.len()) " cannot be answered" } (page_frame::html_list_of_lines(&open)) }
        }
    }
}
