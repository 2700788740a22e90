//! Makes the charts on the page of a trace.

use std::collections::BTreeMap;

use crate::pages::charts::ChartFigure;
use crate::plot::{
    ChartAxis, ChartBody, ChartRowMark, ChartWithTitle, CurveMark, CurveSeries, LabelledRow,
    LabelledRows, PlottedUnit, ScaleKind, Xy,
};
use kernelgate::display::time_text;
use kernelgate_trace::analyze::operations::{AllOperations, OperationKind};
use kernelgate_trace::diagnose::{TraceDiagnosis, readable_name};
use kernelgate_trace::model::Trace;
use kernelgate_trace::stats::shorten;

/// Columns of the overview; operations closer than one column are joined.
const TIMELINE_COLUMNS: i64 = 500;
/// Largest number of rows of the overview.
const MAX_DRAWN_STREAMS: usize = 24;
/// Largest number of points of memory over time.
const MAX_CHART_POINTS: usize = 250;
/// Largest number of characters of a kernel's name.
const MAX_KERNEL_NAME_LENGTH: usize = 60;

/// A timeline with a row for each stream and kind of operation.
pub fn timeline(trace: &Trace) -> Vec<ChartFigure> {
    let operations = AllOperations::new(trace);
    let first = operations.ids().map(|id| operations.start(id)).min();
    let last = operations.ids().map(|id| operations.end(id)).max();
    let Some((first, last)) = first.zip(last).filter(|(first, last)| first < last) else {
        return Vec::new();
    };
    let column = ((last - first) / TIMELINE_COLUMNS).max(1);
    // The columns in which each row works, with the busy time.
    let mut rows: BTreeMap<(u32, u32, u64, OperationKind), BTreeMap<i64, i64>> = BTreeMap::new();
    for id in operations.ids() {
        let place = trace.places[operations.place(id).0 as usize];
        let (kind, _) = operations.kind_and_row(id);
        let busy = rows.entry((place.process, place.device, place.stream, kind)).or_default();
        let (start, end) = (operations.start(id) - first, operations.end(id) - first);
        for at in start / column..=((end - 1).max(start) / column) {
            let inside = end.min((at + 1) * column) - start.max(at * column);
            *busy.entry(at).or_default() += inside;
        }
    }
    let mut busiest: Vec<_> = rows.into_iter().collect();
    busiest.sort_by_key(|(key, busy)| (std::cmp::Reverse(busy.values().sum::<i64>()), *key));
    let left_out = busiest.len().saturating_sub(MAX_DRAWN_STREAMS);
    busiest.truncate(MAX_DRAWN_STREAMS);
    busiest.sort_by_key(|(key, _)| *key);
    let several = trace.processes.len() > 1;
    let row = |((process, device, stream, kind), busy): (
        (u32, u32, u64, OperationKind),
        BTreeMap<i64, i64>,
    )| {
        let pid = trace.processes.get(process as usize).map_or(0, |process| process.pid);
        let process = if several { format!("process {pid}, ") } else { String::new() };
        let total: i64 = busy.values().sum();
        LabelledRow {
            label: format!("{process}device {device}, stream {stream}: {}", activity_words(kind)),
            value: format!(
                "{} ({:.1}%)",
                time_text(total as f64),
                100.0 * total as f64 / (last - first) as f64
            ),
            marks: row_spans(&busy, column, activity_colour(kind)),
        }
    };
    let more =
        if left_out > 0 { format!("; {left_out} more rows are skipped") } else { String::new() };
    let chart = ChartWithTitle {
        title: "When the GPU worked".to_owned(),
        subtitle: format!(
            "a row a stream; what is closer than {} runs together{more}",
            time_text(column as f64)
        ),
        body: ChartBody::Rows(LabelledRows {
            axis: ChartAxis::new(
                "since the first operation",
                PlottedUnit::Time,
                ScaleKind::FromZero,
            ),
            legend: ["kernels", "copies", "sets", "graphs"].map(str::to_owned).to_vec(),
            rows: busiest.into_iter().map(row).collect(),
            origin: None,
        }),
    };
    vec![ChartFigure::new(&["timeline"], chart)]
}

const fn activity_words(kind: OperationKind) -> &'static str {
    match kind {
        OperationKind::Kernel => "kernels",
        OperationKind::Copy => "copies",
        OperationKind::Set => "sets",
        OperationKind::Graph => "graphs",
    }
}

const fn activity_colour(kind: OperationKind) -> usize {
    match kind {
        OperationKind::Kernel => 0,
        OperationKind::Copy => 1,
        OperationKind::Set => 2,
        OperationKind::Graph => 3,
    }
}

/// Joins neighbouring columns of a row to spans.
fn row_spans(busy: &BTreeMap<i64, i64>, column: i64, colour: usize) -> Vec<ChartRowMark> {
    let mut spans: Vec<(i64, i64)> = Vec::new();
    for at in busy.keys() {
        match spans.last_mut() {
            Some((_, end)) if *end == *at => *end = at + 1,
            _ => spans.push((*at, at + 1)),
        }
    }
    let mark =
        |(from, to)| ChartRowMark::Span((from * column) as f64, (to * column) as f64, colour);
    spans.into_iter().map(mark).collect()
}

/// The kernels with most time, and the kinds of work.
pub fn kernels(diagnosis: &TraceDiagnosis) -> Vec<ChartFigure> {
    let answers = &diagnosis.answers;
    let bar = |label: String, count: usize, total_ns: i64| LabelledRow {
        label,
        value: format!(
            "{count} x, {}, {:.1}%",
            time_text(total_ns as f64),
            100.0 * total_ns as f64 / answers.kernel_ns.max(1) as f64
        ),
        marks: vec![ChartRowMark::Bar(total_ns as f64, 0)],
    };
    let chart = |title: &str, rows: Vec<LabelledRow>| ChartWithTitle {
        title: title.to_owned(),
        subtitle: format!("of {} of kernels", time_text(answers.kernel_ns as f64)),
        body: ChartBody::Rows(LabelledRows {
            axis: ChartAxis::new("time in all", PlottedUnit::Time, ScaleKind::FromZero),
            legend: vec![],
            rows,
            origin: None,
        }),
    };
    let top = answers.top_kernels.iter().map(|of| {
        bar(
            shorten(&readable_name(&of.name), MAX_KERNEL_NAME_LENGTH),
            of.summary.count,
            of.summary.total,
        )
    });
    let classes =
        answers.classes.iter().map(|(class, ns, count)| bar(class.label().to_owned(), *count, *ns));
    let both = [
        ("top-kernels", chart("Kernels with most time", top.collect())),
        ("kinds", chart("Kinds of kernels, by their names", classes.collect())),
    ];
    let some = |chart: &ChartWithTitle| matches!(&chart.body, ChartBody::Rows(rows) if !rows.rows.is_empty());
    both.into_iter()
        .filter(|(_, chart)| some(chart))
        .map(|(name, chart)| ChartFigure::new(&[name], chart))
        .collect()
}

/// Device memory that was held over time, a series a process and device.
pub fn memory(trace: &Trace, diagnosis: &TraceDiagnosis) -> Vec<ChartFigure> {
    let Some((begun, last)) = trace.first_and_last_ns() else { return Vec::new() };
    let starts = diagnosis.memory.iter().filter_map(|of| Some(of.held.first()?.0));
    let first = starts.fold(begun, i64::min);
    let series = diagnosis.memory.iter().enumerate().map(|(colour, of)| {
        // A step chart: the value stays the same until the next point.
        let mut before = 0;
        let corners = of.bytes_over_time(MAX_CHART_POINTS).into_iter().flat_map(|(time, bytes)| {
            let held = std::mem::replace(&mut before, bytes);
            [(time, held), (time, bytes)]
        });
        let until = of.held.last().map(|&(time, _)| (time.max(last), of.bytes_at_end()));
        let mark = |(time, bytes): (i64, u64)| CurveMark::at((time - first) as f64, bytes as f64);
        CurveSeries {
            name: format!("process {}, device {}", of.pid, of.device),
            colour,
            joined: true,
            marks: corners.chain(until).map(mark).collect(),
        }
    });
    let series: Vec<CurveSeries> = series.collect();
    if series.is_empty() {
        return Vec::new();
    }
    let chart = ChartWithTitle {
        title: "Device memory".to_owned(),
        subtitle: "taken since the recording began".to_owned(),
        body: ChartBody::Xy(Xy {
            x: ChartAxis::new("since the recording began", PlottedUnit::Time, ScaleKind::FromZero),
            y: ChartAxis::new("held", PlottedUnit::Bytes, ScaleKind::FromZero),
            series,
            guides: vec![],
            broad: true,
        }),
    };
    vec![ChartFigure::new(&["memory"], chart)]
}

/// Share of the peaks that profiled launches reach, a series for each kernel: near the top a kernel
/// is compute-bound, near the right memory-bound, far from both latency-bound.
pub fn roofline_chart(trace: &Trace) -> Vec<ChartFigure> {
    let metric = |name: &str| trace.names.find(name);
    let names = metric("Memory Throughput").zip(metric("Compute (SM) Throughput"));
    let Some((memory, compute)) = names else { return Vec::new() };
    let percent = |launch: &kernelgate_trace::model::kernel_metrics::ProfiledLaunch, name| {
        let metric = launch.metrics.get(&name)?;
        (trace.names.text(metric.unit) == "%").then_some(metric.value / 100.0)
    };
    let mut series: BTreeMap<String, Vec<CurveMark>> = BTreeMap::new();
    for launch in &trace.profiled {
        if let (Some(x), Some(y)) = (percent(launch, memory), percent(launch, compute)) {
            let name =
                shorten(&readable_name(trace.names.text(launch.kernel)), MAX_KERNEL_NAME_LENGTH);
            series.entry(name).or_default().push(CurveMark::at(x, y));
        }
    }
    if series.is_empty() {
        return Vec::new();
    }
    let numbered = series.into_iter().enumerate();
    let series =
        numbered.map(|(colour, (name, marks))| CurveSeries { name, colour, joined: false, marks });
    let chart = ChartWithTitle {
        title: "Profiled launches against their peaks".to_owned(),
        subtitle: "near the top: compute-bound; near the right: memory-bound".to_owned(),
        body: ChartBody::Xy(Xy {
            x: ChartAxis::new("memory throughput", PlottedUnit::Share, ScaleKind::FromZero),
            y: ChartAxis::new("compute throughput", PlottedUnit::Share, ScaleKind::FromZero),
            series: series.collect(),
            guides: vec![],
            broad: false,
        }),
    };
    vec![ChartFigure::new(&["bounds"], chart)]
}
