//! Charts of recorded neural networks, with a bar for each case.

use kernelgate::display::time_text;
use kernelgate_trace::diagnose::network::{AttentionOperation, kernel_time_share_by_work_class};

use super::RecordedNetwork;
use super::tables::{kernel_classes_with_most_time, kernels_shown_for_each_pass};
use crate::plot::{
    AxisScaleKind, ChartAxis, ChartBody, ChartRowWithLabel, LabelledRowsChart,
    MAX_ROWS_PER_ROW_CHART, MarkInChartRow, PlottedUnit, TitledChart,
};

/// File name and SVG text of each chart of the recorded networks; empty without networks.
pub fn network_chart_files(cases: &[RecordedNetwork]) -> anyhow::Result<Vec<(String, String)>> {
    let charts = [
        ("network-host.svg", host_and_device_time_chart(cases)),
        ("network-kinds.svg", kernel_kinds_chart(cases)),
        ("network-attention.svg", attention_time_chart(cases)),
        ("network-utilization.svg", matrix_utilization_chart(cases)),
    ];
    let some = charts.into_iter().filter(|(_, chart)| match &chart.body {
        ChartBody::Rows(rows) => !rows.rows.is_empty(),
        _ => true,
    });
    some.map(|(name, chart)| Ok((name.to_owned(), chart.render_svg()?))).collect()
}

fn bar_chart_of_networks(
    title: &str,
    subtitle: &str,
    axis: ChartAxis,
    legend: &[&str],
    rows: Vec<ChartRowWithLabel>,
) -> TitledChart {
    let legend = legend.iter().map(|&name| name.to_owned()).collect();
    let rows = rows.into_iter().take(MAX_ROWS_PER_ROW_CHART).collect();
    TitledChart {
        chart_title: title.to_owned(),
        chart_subtitle: subtitle.to_owned(),
        body: ChartBody::Rows(LabelledRowsChart {
            horizontal_axis: axis,
            mark_colour_legend: legend,
            rows,
            vertical_line_value: None,
        }),
    }
}

/// Chart marks that draw the values as consecutive spans of one bar, each in a colour of its own.
fn stacked_bar_spans(values: &[f64]) -> Vec<MarkInChartRow> {
    let mut from = 0.0;
    let mut mark = |(colour, value): (usize, &f64)| {
        let start = from;
        from += value;
        MarkInChartRow::RectangleBetweenValues(start, from, colour)
    };
    values.iter().enumerate().map(&mut mark).collect()
}

fn host_and_device_time_chart(cases: &[RecordedNetwork]) -> TitledChart {
    let row = |case: &RecordedNetwork| {
        let ends = (case.host_ns_per_launch - case.gpu_span_ns_per_launch).max(0.0);
        ChartRowWithLabel {
            row_label: case.case_id.clone(),
            value_text: time_text(case.host_ns_per_launch),
            marks: stacked_bar_spans(&[
                case.gpu_busy_ns_per_launch,
                case.gpu_span_ns_per_launch - case.gpu_busy_ns_per_launch,
                ends,
            ]),
        }
    };
    bar_chart_of_networks(
        "A launch by the host's timer",
        "time in which the device was busy, idle between kernels, and before and after all of them",
        ChartAxis::with_round_ticks(
            "wall time of a launch",
            PlottedUnit::TimeNs,
            AxisScaleKind::LinearFromZero,
        ),
        &["busy", "idle", "before and after"],
        cases.iter().map(row).collect(),
    )
}

fn kernel_kinds_chart(cases: &[RecordedNetwork]) -> TitledChart {
    let columns = kernel_classes_with_most_time(cases);
    let row = |case: &RecordedNetwork| -> Vec<ChartRowWithLabel> {
        let bar = |(pass, kernels): (&str, Vec<_>)| {
            let shares = kernel_time_share_by_work_class(&kernels);
            let share = |class| shares.iter().find(|(of, _)| of == class).map_or(0.0, |of| of.1);
            let values: Vec<f64> = columns.iter().map(share).collect();
            ChartRowWithLabel {
                row_label: format!("{}, {pass}", case.case_id),
                value_text: columns.first().map_or_else(String::new, |first| {
                    format!("{:.1}% {}", 100.0 * share(first), first.printed_work_class_label())
                }),
                marks: stacked_bar_spans(&values),
            }
        };
        kernels_shown_for_each_pass(case, cases).into_iter().map(bar).collect()
    };
    let labels: Vec<&str> = columns.iter().map(|class| class.printed_work_class_label()).collect();
    bar_chart_of_networks(
        "Kinds of kernels, inference and training",
        "share of the time of all kernels; the rest is of other kinds",
        ChartAxis::with_round_ticks(
            "share of the kernels' time",
            PlottedUnit::ShareAsPercent,
            AxisScaleKind::LinearFromZero,
        ),
        &labels,
        cases.iter().flat_map(row).collect(),
    )
}

fn attention_time_chart(cases: &[RecordedNetwork]) -> TitledChart {
    let row = |case: &RecordedNetwork| {
        let all = case.attention_kernel_time_ns()?;
        let passes = case.network.forward_passes.max(1) as f64;
        let operations = [
            AttentionOperation::ScoresMatmul,
            AttentionOperation::Softmax,
            AttentionOperation::ValuesMatmul,
        ];
        let marks =
            match &case.network.attention {
                Some(of) => stacked_bar_spans(&operations.map(|it| {
                    of.kernels_of_attention_operation(it).total_kernel_ns as f64 / passes
                })),
                None => vec![MarkInChartRow::BarToValue(all, operations.len())],
            };
        Some(ChartRowWithLabel {
            row_label: case.case_id.clone(),
            value_text: time_text(all),
            marks,
        })
    };
    bar_chart_of_networks(
        "Attention of a forward pass",
        "kernels between the projections, by operation or fused",
        ChartAxis::with_round_ticks(
            "time of kernels",
            PlottedUnit::TimeNs,
            AxisScaleKind::LinearFromZero,
        ),
        &["scores", "softmax", "values", "fused"],
        cases.iter().filter_map(row).collect(),
    )
}

fn matrix_utilization_chart(cases: &[RecordedNetwork]) -> TitledChart {
    let row = |case: &RecordedNetwork| {
        let share = case.utilization.share_of_published_peak?;
        let mut marks = vec![MarkInChartRow::BarToValue(share, 0)];
        marks.extend(
            case.utilization.share_of_measured_peak.map(MarkInChartRow::VerticalTickAtValue),
        );
        let value = format!("{:.1}%, {}", 100.0 * share, time_text(case.single_launch_gpu_span_ns));
        Some(ChartRowWithLabel { row_label: case.case_id.clone(), value_text: value, marks })
    };
    bar_chart_of_networks(
        "Model FLOP utilization",
        "a bar by the published dense peak, a line by the measured one",
        ChartAxis::with_round_ticks(
            "share of the peak",
            PlottedUnit::ShareAsPercent,
            AxisScaleKind::LinearFromZero,
        ),
        &[],
        cases.iter().filter_map(row).collect(),
    )
}
