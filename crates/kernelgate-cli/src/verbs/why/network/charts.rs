//! Charts of recorded networks, with a bar for each case.

use kernelgate::display::time_text;
use kernelgate_trace::diagnose::network::{AttentionOperation, time_share_by_class};

use super::RecordedNetwork;
use super::tables::{classes_with_most_time, kernels_by_pass};
use crate::plot::{
    ChartAxis, ChartBody, ChartRowMark, ChartWithTitle, LabelledRow, LabelledRows, MAX_ROWS,
    PlottedUnit, ScaleKind,
};

/// File names and contents of the charts; empty without networks.
pub fn chart_files(cases: &[RecordedNetwork]) -> anyhow::Result<Vec<(String, String)>> {
    let charts = [
        ("network-host.svg", host_chart(cases)),
        ("network-kinds.svg", kinds_chart(cases)),
        ("network-attention.svg", attention_chart(cases)),
        ("network-utilization.svg", utilization_chart(cases)),
    ];
    let some = charts.into_iter().filter(|(_, chart)| match &chart.body {
        ChartBody::Rows(rows) => !rows.rows.is_empty(),
        _ => true,
    });
    some.map(|(name, chart)| Ok((name.to_owned(), chart.svg()?))).collect()
}

fn network_chart(
    title: &str,
    subtitle: &str,
    axis: ChartAxis,
    legend: &[&str],
    rows: Vec<LabelledRow>,
) -> ChartWithTitle {
    let legend = legend.iter().map(|&name| name.to_owned()).collect();
    let rows = rows.into_iter().take(MAX_ROWS).collect();
    ChartWithTitle {
        title: title.to_owned(),
        subtitle: subtitle.to_owned(),
        body: ChartBody::Rows(LabelledRows { axis, legend, rows, origin: None }),
    }
}

/// Draws consecutive spans for these values, each in the colour of its number.
fn stacked_spans(values: &[f64]) -> Vec<ChartRowMark> {
    let mut from = 0.0;
    let mut mark = |(colour, value): (usize, &f64)| {
        let start = from;
        from += value;
        ChartRowMark::Span(start, from, colour)
    };
    values.iter().enumerate().map(&mut mark).collect()
}

fn host_chart(cases: &[RecordedNetwork]) -> ChartWithTitle {
    let row = |case: &RecordedNetwork| {
        let ends = (case.wall_ns - case.device_ns).max(0.0);
        LabelledRow {
            label: case.case.clone(),
            value: time_text(case.wall_ns),
            marks: stacked_spans(&[case.busy_ns, case.device_ns - case.busy_ns, ends]),
        }
    };
    network_chart(
        "A launch by the host's timer",
        "time in which the device was busy, idle between kernels, and before and after all of them",
        ChartAxis::new("wall time of a launch", PlottedUnit::Time, ScaleKind::FromZero),
        &["busy", "idle", "before and after"],
        cases.iter().map(row).collect(),
    )
}

fn kinds_chart(cases: &[RecordedNetwork]) -> ChartWithTitle {
    let columns = classes_with_most_time(cases);
    let row = |case: &RecordedNetwork| -> Vec<LabelledRow> {
        let bar = |(pass, kernels): (&str, Vec<_>)| {
            let shares = time_share_by_class(&kernels);
            let share = |class| shares.iter().find(|(of, _)| of == class).map_or(0.0, |of| of.1);
            let values: Vec<f64> = columns.iter().map(share).collect();
            LabelledRow {
                label: format!("{}, {pass}", case.case),
                value: columns.first().map_or_else(String::new, |first| {
                    format!("{:.1}% {}", 100.0 * share(first), first.label())
                }),
                marks: stacked_spans(&values),
            }
        };
        kernels_by_pass(case, cases).into_iter().map(bar).collect()
    };
    let labels: Vec<&str> = columns.iter().map(|class| class.label()).collect();
    network_chart(
        "Kinds of kernels, inference and training",
        "share of the time of all kernels; the rest is of other kinds",
        ChartAxis::new("share of the kernels' time", PlottedUnit::Share, ScaleKind::FromZero),
        &labels,
        cases.iter().flat_map(row).collect(),
    )
}

fn attention_chart(cases: &[RecordedNetwork]) -> ChartWithTitle {
    let row = |case: &RecordedNetwork| {
        let all = case.attention_time_ns()?;
        let passes = case.network.passes.max(1) as f64;
        let operations =
            [AttentionOperation::Scores, AttentionOperation::Softmax, AttentionOperation::Values];
        let marks = match &case.network.attention {
            Some(of) => stacked_spans(
                &operations.map(|it| of.use_of_operation(it).kernel_ns as f64 / passes),
            ),
            None => vec![ChartRowMark::Bar(all, operations.len())],
        };
        Some(LabelledRow { label: case.case.clone(), value: time_text(all), marks })
    };
    network_chart(
        "Attention of a forward pass",
        "kernels between the projections, by operation or fused",
        ChartAxis::new("time of kernels", PlottedUnit::Time, ScaleKind::FromZero),
        &["scores", "softmax", "values", "fused"],
        cases.iter().filter_map(row).collect(),
    )
}

fn utilization_chart(cases: &[RecordedNetwork]) -> ChartWithTitle {
    let row = |case: &RecordedNetwork| {
        let share = case.utilization.of_published?;
        let mut marks = vec![ChartRowMark::Bar(share, 0)];
        marks.extend(case.utilization.of_measured.map(ChartRowMark::Tick));
        let value = format!("{:.1}%, {}", 100.0 * share, time_text(case.launch_ns));
        Some(LabelledRow { label: case.case.clone(), value, marks })
    };
    network_chart(
        "Model FLOP utilization",
        "a bar by the published dense peak, a line by the measured one",
        ChartAxis::new("share of the peak", PlottedUnit::Share, ScaleKind::FromZero),
        &[],
        cases.iter().filter_map(row).collect(),
    )
}
