//! Draws the time account of each device: a stacked bar for the whole time, or one for start-up and
//! for each iteration.

use maud::{Markup, html};

use crate::pages::charts::ChartWithFileName;
use crate::pages::page_frame;
use crate::plot::{
    AxisScaleKind, ChartAxis, ChartBody, ChartRowWithLabel, LabelledRowsChart, MarkInChartRow,
    PlottedUnit, TitledChart,
};
use kernelgate::display::time_text;
use kernelgate_trace::analyze::timeline::BusyTimeCategoryOfGpu;
use kernelgate_trace::diagnose::{
    GpuTimeAccount, ProcessTimeAccountOnGpu, TraceDiagnosis, TransfersOfOneKind,
};

/// Largest number of iterations that are drawn as bars; only the first ones are drawn.
const MAX_ITERATIONS_DRAWN_AS_BARS: usize = 24;

/// The coloured parts of a bar for busy time: name, and the lines of the time account that it sums.
/// The idle time follows these parts in the bar.
const BUSY_TIME_BAR_PARTS: &[(&str, &[BusyTimeCategoryOfGpu])] = &[
    (
        "compute",
        &[BusyTimeCategoryOfGpu::ComputeKernelsAlone, BusyTimeCategoryOfGpu::WholeCudaGraph],
    ),
    ("compute beside communication", &[BusyTimeCategoryOfGpu::ComputeAndCommunication]),
    (
        "compute beside copies",
        &[BusyTimeCategoryOfGpu::ComputeAndCopy, BusyTimeCategoryOfGpu::ComputeAndMigration],
    ),
    ("exposed communication", &[BusyTimeCategoryOfGpu::ExposedCommunication]),
    (
        "exposed copies",
        &[
            BusyTimeCategoryOfGpu::ExposedCopies,
            BusyTimeCategoryOfGpu::ExposedPageMigration,
            BusyTimeCategoryOfGpu::OnlyMemsets,
        ],
    ),
];

/// Draws one stacked bar chart of the time account for each device.
pub fn time_account_charts(diagnosis: &TraceDiagnosis) -> Vec<ChartWithFileName> {
    diagnosis
        .gpu_use_by_process
        .iter()
        .map(|device| time_account_chart_of_device(&device.account))
        .collect()
}

fn time_account_chart_of_device(account: &ProcessTimeAccountOnGpu) -> ChartWithFileName {
    let mut rows = Vec::new();
    let mut subtitle = "lines add up to the span".to_owned();
    match &account.iterations {
        None => rows.push(row_of_time_account("all".to_owned(), &account.whole_trace_account)),
        Some(iterations) => {
            if iterations.account_before_first_iteration.span_length_ns() > 0 {
                rows.push(row_of_time_account(
                    "start-up".to_owned(),
                    &iterations.account_before_first_iteration,
                ));
            }
            for (index, of) in
                iterations.listed_iterations.iter().take(MAX_ITERATIONS_DRAWN_AS_BARS).enumerate()
            {
                rows.push(row_of_time_account(format!("iteration {}", index + 1), &of.account));
            }
            let more =
                iterations.iteration_lengths_ns.len().saturating_sub(MAX_ITERATIONS_DRAWN_AS_BARS);
            let more = if more > 0 { format!("; {more} more follow") } else { String::new() };
            subtitle = format!(
                "by iteration, found by {}{more}",
                iterations.evidence.printed_iteration_evidence()
            );
        }
    }
    let names = BUSY_TIME_BAR_PARTS.iter().map(|(name, _)| (*name).to_owned());
    let chart = TitledChart {
        chart_title: format!("Time of process {}, device {}", account.pid, account.gpu_ordinal),
        chart_subtitle: subtitle,
        body: ChartBody::Rows(LabelledRowsChart {
            horizontal_axis: ChartAxis::with_round_ticks(
                "time",
                PlottedUnit::TimeNs,
                AxisScaleKind::LinearFromZero,
            ),
            mark_colour_legend: names.chain(["idle".to_owned()]).collect(),
            rows,
            vertical_line_value: None,
        }),
    };
    ChartWithFileName::with_file_name_from_words(
        &["account", &account.pid.to_string(), &account.gpu_ordinal.to_string()],
        chart,
    )
}

/// Makes a chart row of consecutive spans, one for each part of the time account.
fn row_of_time_account(label: String, account: &GpuTimeAccount) -> ChartRowWithLabel {
    let mut at = 0;
    let mut marks = Vec::new();
    let busy = BUSY_TIME_BAR_PARTS
        .iter()
        .map(|(_, lines)| lines.iter().map(|&line| account.busy_ns_of_category(line)).sum());
    for (colour, ns) in busy.chain([account.idle_time_of_all_causes_ns()]).enumerate() {
        if ns > 0 {
            marks.push(MarkInChartRow::RectangleBetweenValues(at as f64, (at + ns) as f64, colour));
            at += ns;
        }
    }
    ChartRowWithLabel {
        row_label: label,
        value_text: time_text(account.span_length_ns() as f64),
        marks,
    }
}

/// Builds HTML tables of the time account of each device, of its transfers and of the possible
/// gains.
pub fn time_account_tables(diagnosis: &TraceDiagnosis) -> Markup {
    let lines: Vec<Vec<String>> = diagnosis
        .gpu_use_by_process
        .iter()
        .flat_map(|device| {
            let total = device.account.whole_trace_account.span_length_ns().max(1) as f64;
            let place = format!("process {}, device {}", device.pid, device.gpu_ordinal);
            device.account.whole_trace_account.labels_and_ns_of_lines().into_iter().map(
                move |(label, ns)| {
                    let share = format!("{:.1}%", 100.0 * ns as f64 / total);
                    vec![label, place.clone(), time_text(ns as f64), share]
                },
            )
        })
        .collect();
    let transfer = |of: &TransfersOfOneKind| {
        vec![
            format!("{} {}", of.transfer_class.printed_operation_class(), of.transfer_label),
            of.transfer_count.to_string(),
            time_text(of.total_transfer_ns as f64),
            time_text(of.exposed_transfer_ns as f64),
            of.collective_bus_gb_per_s
                .map_or_else(|| "-".to_owned(), |bus| format!("{bus:.1} GB/s")),
        ]
    };
    let transfers: Vec<Vec<String>> = diagnosis
        .gpu_use_by_process
        .iter()
        .flat_map(|of| of.account.transfers.iter().map(transfer))
        .collect();
    let path = &diagnosis.critical_path;
    let gains: Vec<Vec<String>> = path
        .gains
        .iter()
        .map(|gain| {
            let share = 100.0 * gain.gain_ns as f64 / path.critical_path_ns.max(1) as f64;
            vec![
                gain.change.printed_speedup_label(),
                time_text(gain.gain_ns as f64),
                format!("{share:.1}%"),
            ]
        })
        .collect();
    html! {
        @if !lines.is_empty() {
            (page_frame::html_table(&["line", "where", "time", "share"], &lines, |_| false))
        }
        @if !transfers.is_empty() {
            h3 { "Communication and copies" }
            (page_frame::html_table(&["kind", "count", "time", "exposed", "bus bandwidth"], &transfers, |_| false))
        }
        @if !gains.is_empty() {
            h3 { "Gains, from the replay of the recorded dependencies" }
            (page_frame::html_table(&["change", "gain", "share"], &gains, |_| false))
        }
    }
}
