//! Draws the charts on the page of a trace.

use std::collections::BTreeMap;

use crate::pages::charts::ChartWithFileName;
use crate::plot::{
    AxisScaleKind, ChartAxis, ChartBody, ChartRowWithLabel, CurveOrPointSeries, LabelledRowsChart,
    MarkInChartRow, PlottedUnit, PointWithRange, TitledChart, XyChart,
};
use kernelgate::display::time_text;
use kernelgate_trace::analyze::operations::{AllGpuOperations, GpuOperationKind};
use kernelgate_trace::diagnose::{TraceDiagnosis, shortened_kernel_name_for_readers};
use kernelgate_trace::model::Trace;
use kernelgate_trace::stats::shorten_in_the_middle;

/// Number of time columns of the timeline chart; operations within one column are drawn as one.
const TIMELINE_CHART_COLUMNS: i64 = 500;
/// Largest number of rows (streams and kinds of operation) of the timeline chart.
const MAX_TIMELINE_CHART_ROWS: usize = 24;
/// Largest number of points in the chart of device memory over time.
const MAX_MEMORY_CHART_POINTS: usize = 250;
/// Largest number of characters of a kernel's name in a chart.
const MAX_KERNEL_NAME_CHARACTERS: usize = 60;

/// Draws the timeline chart, with a row for each stream and kind of operation (kernels, copies,
/// sets, graphs).
pub fn timeline_chart(trace: &Trace) -> Vec<ChartWithFileName> {
    let operations = AllGpuOperations::number_operations_of_trace(trace);
    let first = operations.all_operation_ids().map(|id| operations.operation_start_ns(id)).min();
    let last =
        operations.all_operation_ids().map(|id| operations.operation_end_exclusive_ns(id)).max();
    let Some((first, last)) = first.zip(last).filter(|(first, last)| first < last) else {
        return Vec::new();
    };
    let column = ((last - first) / TIMELINE_CHART_COLUMNS).max(1);
    // For each row of the timeline, its busy nanoseconds in each time column.
    let mut rows: BTreeMap<(u32, u32, u64, GpuOperationKind), BTreeMap<i64, i64>> = BTreeMap::new();
    for id in operations.all_operation_ids() {
        let place = trace.places[operations.place_of_operation(id).0 as usize];
        let (kind, _) = operations.kind_and_table_row(id);
        let busy = rows.entry((place.process_index, place.device, place.stream, kind)).or_default();
        let (start, end) = (
            operations.operation_start_ns(id) - first,
            operations.operation_end_exclusive_ns(id) - first,
        );
        for at in start / column..=((end - 1).max(start) / column) {
            let inside = end.min((at + 1) * column) - start.max(at * column);
            *busy.entry(at).or_default() += inside;
        }
    }
    let mut busiest: Vec<_> = rows.into_iter().collect();
    busiest.sort_by_key(|(key, busy)| (std::cmp::Reverse(busy.values().sum::<i64>()), *key));
    let left_out = busiest.len().saturating_sub(MAX_TIMELINE_CHART_ROWS);
    busiest.truncate(MAX_TIMELINE_CHART_ROWS);
    busiest.sort_by_key(|(key, _)| *key);
    let several = trace.processes.len() > 1;
    let row = |((process, device, stream, kind), busy): (
        (u32, u32, u64, GpuOperationKind),
        BTreeMap<i64, i64>,
    )| {
        let pid = trace.processes.get(process as usize).map_or(0, |process| process.pid);
        let process = if several { format!("process {pid}, ") } else { String::new() };
        let total: i64 = busy.values().sum();
        ChartRowWithLabel {
            row_label: format!(
                "{process}device {device}, stream {stream}: {}",
                operation_kind_label(kind)
            ),
            value_text: format!(
                "{} ({:.1}%)",
                time_text(total as f64),
                100.0 * total as f64 / (last - first) as f64
            ),
            marks: spans_of_timeline_row(&busy, column, operation_kind_colour(kind)),
        }
    };
    let more =
        if left_out > 0 { format!("; {left_out} more rows are skipped") } else { String::new() };
    let chart = TitledChart {
        chart_title: "When the GPU worked".to_owned(),
        chart_subtitle: format!(
            "a row a stream; what is closer than {} runs together{more}",
            time_text(column as f64)
        ),
        body: ChartBody::Rows(LabelledRowsChart {
            horizontal_axis: ChartAxis::with_round_ticks(
                "since the first operation",
                PlottedUnit::TimeNs,
                AxisScaleKind::LinearFromZero,
            ),
            mark_colour_legend: ["kernels", "copies", "sets", "graphs"].map(str::to_owned).to_vec(),
            rows: busiest.into_iter().map(row).collect(),
            vertical_line_value: None,
        }),
    };
    vec![ChartWithFileName::with_file_name_from_words(&["timeline"], chart)]
}

const fn operation_kind_label(kind: GpuOperationKind) -> &'static str {
    match kind {
        GpuOperationKind::Kernel => "kernels",
        GpuOperationKind::Copy => "copies",
        GpuOperationKind::Memset => "sets",
        GpuOperationKind::CudaGraphLaunch => "graphs",
    }
}

const fn operation_kind_colour(kind: GpuOperationKind) -> usize {
    match kind {
        GpuOperationKind::Kernel => 0,
        GpuOperationKind::Copy => 1,
        GpuOperationKind::Memset => 2,
        GpuOperationKind::CudaGraphLaunch => 3,
    }
}

/// Joins neighbouring busy columns of a timeline row into spans.
fn spans_of_timeline_row(
    busy: &BTreeMap<i64, i64>,
    column: i64,
    colour: usize,
) -> Vec<MarkInChartRow> {
    let mut spans: Vec<(i64, i64)> = Vec::new();
    for at in busy.keys() {
        match spans.last_mut() {
            Some((_, end)) if *end == *at => *end = at + 1,
            _ => spans.push((*at, at + 1)),
        }
    }
    let mark = |(from, to)| {
        MarkInChartRow::RectangleBetweenValues((from * column) as f64, (to * column) as f64, colour)
    };
    spans.into_iter().map(mark).collect()
}

/// Draws the charts of the kernels with the most time, and of the kinds of kernels.
pub fn kernel_time_charts(diagnosis: &TraceDiagnosis) -> Vec<ChartWithFileName> {
    let answers = &diagnosis.answers;
    let bar = |label: String, count: usize, total_ns: i64| ChartRowWithLabel {
        row_label: label,
        value_text: format!(
            "{count} x, {}, {:.1}%",
            time_text(total_ns as f64),
            100.0 * total_ns as f64 / answers.all_kernels_ns.max(1) as f64
        ),
        marks: vec![MarkInChartRow::BarToValue(total_ns as f64, 0)],
    };
    let chart = |title: &str, rows: Vec<ChartRowWithLabel>| TitledChart {
        chart_title: title.to_owned(),
        chart_subtitle: format!("of {} of kernels", time_text(answers.all_kernels_ns as f64)),
        body: ChartBody::Rows(LabelledRowsChart {
            horizontal_axis: ChartAxis::with_round_ticks(
                "time in all",
                PlottedUnit::TimeNs,
                AxisScaleKind::LinearFromZero,
            ),
            mark_colour_legend: vec![],
            rows,
            vertical_line_value: None,
        }),
    };
    let top = answers.top_kernels.iter().map(|of| {
        bar(
            shorten_in_the_middle(
                &shortened_kernel_name_for_readers(&of.kernel_name),
                MAX_KERNEL_NAME_CHARACTERS,
            ),
            of.launch_time_summary.value_count,
            of.launch_time_summary.total,
        )
    });
    let classes = answers
        .ns_and_launches_by_class
        .iter()
        .map(|(class, ns, count)| bar(class.printed_work_class_label().to_owned(), *count, *ns));
    let both = [
        ("top-kernels", chart("Kernels with most time", top.collect())),
        ("kinds", chart("Kinds of kernels, by their names", classes.collect())),
    ];
    let some =
        |chart: &TitledChart| matches!(&chart.body, ChartBody::Rows(rows) if !rows.rows.is_empty());
    both.into_iter()
        .filter(|(_, chart)| some(chart))
        .map(|(name, chart)| ChartWithFileName::with_file_name_from_words(&[name], chart))
        .collect()
}

/// Draws the device memory that was allocated over time, one series for each process and device.
pub fn device_memory_chart(trace: &Trace, diagnosis: &TraceDiagnosis) -> Vec<ChartWithFileName> {
    let Some((begun, last)) = trace.first_and_last_activity_ns() else { return Vec::new() };
    let starts = diagnosis
        .device_memory_over_time
        .iter()
        .filter_map(|of| Some(of.held_bytes_over_time.first()?.0));
    let first = starts.fold(begun, i64::min);
    let series = diagnosis.device_memory_over_time.iter().enumerate().map(|(colour, of)| {
        // The memory chart is a step chart: the value stays equal until the next point.
        let mut before = 0;
        let corners = of.thinned_bytes_over_time(MAX_MEMORY_CHART_POINTS).into_iter().flat_map(
            |(time, bytes)| {
                let held = std::mem::replace(&mut before, bytes);
                [(time, held), (time, bytes)]
            },
        );
        let until = of
            .held_bytes_over_time
            .last()
            .map(|&(time, _)| (time.max(last), of.bytes_held_at_end_of_trace()));
        let mark = |(time, bytes): (i64, u64)| {
            PointWithRange::point_without_range((time - first) as f64, bytes as f64)
        };
        CurveOrPointSeries {
            legend_name: format!("process {}, device {}", of.pid, of.gpu_ordinal),
            colour_number: colour,
            joined_by_lines: true,
            marks: corners.chain(until).map(mark).collect(),
        }
    });
    let series: Vec<CurveOrPointSeries> = series.collect();
    if series.is_empty() {
        return Vec::new();
    }
    let chart = TitledChart {
        chart_title: "Device memory".to_owned(),
        chart_subtitle: "taken since the recording began".to_owned(),
        body: ChartBody::Xy(XyChart {
            horizontal_axis: ChartAxis::with_round_ticks(
                "since the recording began",
                PlottedUnit::TimeNs,
                AxisScaleKind::LinearFromZero,
            ),
            vertical_axis: ChartAxis::with_round_ticks(
                "held",
                PlottedUnit::Bytes,
                AxisScaleKind::LinearFromZero,
            ),
            series,
            reference_lines: vec![],
            fills_page_width: true,
        }),
    };
    vec![ChartWithFileName::with_file_name_from_words(&["memory"], chart)]
}

/// Draws each profiled launch by the shares of peak memory and compute throughput that it reached:
/// near the top compute-bound, near the right memory-bound, far from both latency-bound.
pub fn throughput_share_chart(trace: &Trace) -> Vec<ChartWithFileName> {
    let metric = |name: &str| trace.names.find_interned_text(name);
    let names = metric("Memory Throughput").zip(metric("Compute (SM) Throughput"));
    let Some((memory, compute)) = names else { return Vec::new() };
    let percent = |launch: &kernelgate_trace::model::kernel_metrics::NcuProfiledLaunch, name| {
        let metric = launch.metrics.get(&name)?;
        (trace.names.text_of_name(metric.unit) == "%").then_some(metric.metric_value / 100.0)
    };
    let mut series: BTreeMap<String, Vec<PointWithRange>> = BTreeMap::new();
    for launch in &trace.profiled_launches {
        if let (Some(x), Some(y)) = (percent(launch, memory), percent(launch, compute)) {
            let name = shorten_in_the_middle(
                &shortened_kernel_name_for_readers(trace.names.text_of_name(launch.kernel_name)),
                MAX_KERNEL_NAME_CHARACTERS,
            );
            series.entry(name).or_default().push(PointWithRange::point_without_range(x, y));
        }
    }
    if series.is_empty() {
        return Vec::new();
    }
    let numbered = series.into_iter().enumerate();
    let series = numbered.map(|(colour, (name, marks))| CurveOrPointSeries {
        legend_name: name,
        colour_number: colour,
        joined_by_lines: false,
        marks,
    });
    let chart = TitledChart {
        chart_title: "Profiled launches against their peaks".to_owned(),
        chart_subtitle: "near the top: compute-bound; near the right: memory-bound".to_owned(),
        body: ChartBody::Xy(XyChart {
            horizontal_axis: ChartAxis::with_round_ticks(
                "memory throughput",
                PlottedUnit::ShareAsPercent,
                AxisScaleKind::LinearFromZero,
            ),
            vertical_axis: ChartAxis::with_round_ticks(
                "compute throughput",
                PlottedUnit::ShareAsPercent,
                AxisScaleKind::LinearFromZero,
            ),
            series: series.collect(),
            reference_lines: vec![],
            fills_page_width: false,
        }),
    };
    vec![ChartWithFileName::with_file_name_from_words(&["bounds"], chart)]
}
