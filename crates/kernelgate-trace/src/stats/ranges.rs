//! Tables of named ranges, and of what was launched in them.

use super::cells::{by_total, count, summary_table, total_cells};
use super::summary::{Samples, Summary};
use super::table::{Cell, Table};
use crate::analyze::launches::{Launches, NONE};
use crate::analyze::operations::{AllOperations, Kind, OperationId};
use crate::analyze::sweep;
use crate::model::host::RangeStyle;
use crate::model::{Table as Interner, Trace};

/// Ranges by name and style, of some styles.
fn range_rows(
    trace: &Trace,
    wanted: impl Fn(RangeStyle) -> bool,
) -> Vec<((String, RangeStyle), Summary)> {
    let ranges = &trace.ranges;
    let mut groups = Interner::default();
    let mut samples = Samples::with_capacity(ranges.len());
    for (row, (&name, &style)) in ranges.name.iter().zip(&ranges.style).enumerate() {
        if wanted(style) {
            samples.push(groups.of((name, style)), ranges.end[row] - ranges.start[row]);
        }
    }
    let summaries = samples.summaries(groups.values.len());
    let label = |(name, style)| (trace.names.text(name).to_owned(), style);
    by_total(groups.values.into_iter().map(label).collect(), summaries)
}

pub(super) fn ranges(trace: &Trace) -> Table {
    let rows = range_rows(trace, |_| true);
    summary_table("nvtx_sum", "Instances", &["Style", "Range"], rows, |(name, style)| {
        vec![Cell::Text(style.label().to_owned()), Cell::Text(name)]
    })
}

pub(super) fn push_pop(trace: &Trace) -> Table {
    let rows = range_rows(trace, |style| style == RangeStyle::PushPop);
    summary_table("nvtx_pushpop_sum", "Instances", &["Range"], rows, |(name, _)| {
        vec![Cell::Text(name)]
    })
}

/// Kernels that are summed together: name and style of the range, thread, name of the kernel. No
/// range: none is around the launch; no thread either: the launch is not in the trace.
type KernelGroup = (Option<(u32, RangeStyle)>, Option<u32>, u32);

/// Visits calls that launched something, with the ranges around each and what it launched.
fn launching_calls(
    trace: &Trace,
    launches: &Launches,
    mut visit: impl FnMut(u32, &[u32], &mut dyn Iterator<Item = OperationId>),
) {
    let pairs = launches.by_call();
    let mut first = vec![NONE; trace.calls.len()];
    for (index, &(call, _)) in (0u32..).zip(&pairs) {
        let first = &mut first[call as usize];
        *first = index.min(*first);
    }
    sweep::enclosing_calls(
        trace,
        |call| first[call as usize] != NONE,
        |call, ranges| {
            let own = pairs[first[call as usize] as usize..].iter();
            let mut own = own.take_while(|pair| pair.0 == call).map(|pair| pair.1);
            visit(call, ranges, &mut own);
        },
    );
}

/// Kernels by the range that their launch is in, thread and name. A kernel counts for every range
/// around its launch; one without a range stands under an empty name.
pub(super) fn kernels(trace: &Trace) -> Table {
    let launches = Launches::of(trace);
    let all = AllOperations::of(trace);
    let mut groups: Interner<KernelGroup> = Interner::default();
    let mut samples = Samples::with_capacity(trace.kernels.on_gpu.len());
    // Which range instances a group has: (group, range).
    let mut instances: Vec<u64> = Vec::new();
    let mut last: Vec<u32> = Vec::new();
    let function =
        |kernel: usize| trace.functions[trace.kernels.function[kernel] as usize].demangled.0;
    let length =
        |kernel: usize| trace.kernels.on_gpu.end[kernel] - trace.kernels.on_gpu.start[kernel];
    launching_calls(trace, &launches, |call, ranges, operations| {
        let thread = trace.calls.thread[call as usize];
        for id in operations {
            let (Kind::Kernel, kernel) = all.part(id) else { continue };
            if ranges.is_empty() {
                samples.push(groups.of((None, Some(thread), function(kernel))), length(kernel));
            }
            for &range in ranges {
                let scope =
                    (trace.ranges.name[range as usize].0, trace.ranges.style[range as usize]);
                let group = groups.of((Some(scope), Some(thread), function(kernel)));
                samples.push(group, length(kernel));
                last.resize(groups.values.len(), NONE);
                if std::mem::replace(&mut last[group as usize], range) != range {
                    instances.push(u64::from(group) << 32 | u64::from(range));
                }
            }
        }
    });
    for (kernel, _) in launches.call_of.iter().enumerate().filter(|&(_, &call)| call == NONE) {
        if kernel < trace.kernels.on_gpu.len() {
            samples.push(groups.of((None, None, function(kernel))), length(kernel));
        }
    }
    instances.sort_unstable();
    instances.dedup();
    let mut instances_of = vec![0usize; groups.values.len()];
    instances.iter().for_each(|pair| instances_of[(pair >> 32) as usize] += 1);
    let summaries = samples.summaries(groups.values.len());
    let text = |name: u32| trace.names.text(crate::model::names::Name(name));
    let mut order: Vec<usize> = (0..groups.values.len()).collect();
    let key = |index: usize| {
        let (scope, thread, kernel) = groups.values[index];
        let name = scope.map_or("", |(name, _)| text(name));
        (
            name,
            scope.map(|(_, style)| style),
            thread,
            std::cmp::Reverse(summaries[index].total),
            text(kernel),
        )
    };
    order.sort_by(|&a, &b| key(a).cmp(&key(b)));
    let row = |index: usize| {
        let (scope, thread, kernel) = groups.values[index];
        let thread = thread.map(|thread| trace.threads[thread as usize]);
        let pid = |process: u32| Cell::Integer(trace.processes[process as usize].pid);
        let mut cells = vec![
            Cell::Text(scope.map_or("", |(name, _)| text(name)).to_owned()),
            Cell::Text(scope.map_or("", |(_, style)| style.label()).to_owned()),
            thread.map_or(Cell::Empty, |thread| pid(thread.process)),
            thread.map_or(Cell::Empty, |thread| Cell::Integer(thread.tid)),
            count(instances_of[index]),
            count(summaries[index].count),
        ];
        let mut summary = total_cells(&summaries[index]);
        // The count stands before the total here.
        summary.remove(1);
        cells.extend(summary);
        cells.push(Cell::Text(text(kernel).to_owned()));
        cells
    };
    Table {
        report: "nvtx_kern_sum",
        columns: vec![
            "NVTX Range",
            "Style",
            "PID",
            "TID",
            "NVTX Inst",
            "Kern Inst",
            "Total Time (ns)",
            "Avg (ns)",
            "Med (ns)",
            "Min (ns)",
            "Max (ns)",
            "StdDev (ns)",
            "Kernel Name",
        ],
        rows: order.into_iter().map(row).collect(),
        named_by: 0,
    }
}

/// The projection of a range onto the GPU.
struct Projection {
    range: u32,
    start: i64,
    end: i64,
    operations: u32,
    /// How many ranges are around it.
    level: u32,
    /// How many ranges directly in it have a projection.
    children: u32,
}

/// The projections of all ranges in which something was launched.
fn projections_of(trace: &Trace) -> Vec<Projection> {
    let launches = Launches::of(trace);
    let all = AllOperations::of(trace);
    let mut slots = vec![NONE; trace.ranges.len()];
    let mut projections: Vec<Projection> = Vec::new();
    launching_calls(trace, &launches, |_, ranges, operations| {
        let (mut start, mut end, mut number) = (i64::MAX, i64::MIN, 0);
        // Graphs are recorded whole; tables of `nsys stats` are of kernels, copies and sets.
        for id in operations.filter(|&id| all.part(id).0 != Kind::Graph) {
            start = start.min(all.start(id));
            end = end.max(all.end(id));
            number += 1;
        }
        if number == 0 {
            return;
        }
        for (depth, &range) in ranges.iter().enumerate() {
            if slots[range as usize] == NONE {
                slots[range as usize] = u32::try_from(projections.len()).expect("one a range");
                // Whatever encloses the range encloses the call, too.
                let last = trace.ranges.end[range as usize];
                let outer = ranges[..depth]
                    .iter()
                    .filter(|&&outer| trace.ranges.end[outer as usize] >= last);
                let (level, parent) = (outer.clone().count(), { outer }.next_back());
                if let Some(&parent) = parent {
                    projections[slots[parent as usize] as usize].children += 1;
                }
                let level = u32::try_from(level).unwrap_or(u32::MAX);
                projections.push(Projection {
                    range,
                    start,
                    end,
                    operations: 0,
                    level,
                    children: 0,
                });
            }
            let projection = &mut projections[slots[range as usize] as usize];
            projection.start = projection.start.min(start);
            projection.end = projection.end.max(end);
            projection.operations += number;
        }
    });
    projections
}

pub(super) fn projections(trace: &Trace) -> Table {
    let projections = projections_of(trace);
    let ranges = &trace.ranges;
    let mut groups = Interner::default();
    let mut samples = Samples::with_capacity(projections.len());
    // Of each group: host time, operations, levels, children.
    let mut sums: Vec<[i64; 4]> = Vec::new();
    for projection in &projections {
        let row = projection.range as usize;
        let group = groups.of((ranges.name[row], ranges.style[row]));
        samples.push(group, projection.end - projection.start);
        sums.resize(groups.values.len(), [0; 4]);
        let [host, operations, levels, children] = &mut sums[group as usize];
        *host += ranges.end[row] - ranges.start[row];
        *operations += i64::from(projection.operations);
        *levels += i64::from(projection.level);
        *children += i64::from(projection.children);
    }
    let summaries = samples.summaries(groups.values.len());
    let labels = groups
        .values
        .iter()
        .zip(&sums)
        .map(|(&(name, style), &sums)| (trace.names.text(name), style, sums))
        .collect();
    let rows = by_total(labels, summaries);
    #[allow(clippy::cast_precision_loss)]
    let mean = |sum: i64, summary: &Summary| Cell::Decimal(sum as f64 / summary.count as f64, 1);
    let row = |((name, style, [host, operations, levels, children]), summary): (
        (&str, RangeStyle, [i64; 4]),
        Summary,
    )| {
        vec![
            Cell::Text(name.to_owned()),
            Cell::Text(style.label().to_owned()),
            Cell::Integer(summary.total),
            Cell::Integer(host),
            count(summary.count),
            Cell::Decimal(summary.mean, 1),
            Cell::Decimal(summary.median, 1),
            Cell::Integer(summary.min),
            Cell::Integer(summary.max),
            Cell::Decimal(summary.deviation, 1),
            Cell::Integer(operations),
            mean(operations, &summary),
            mean(levels, &summary),
            mean(children, &summary),
        ]
    };
    Table {
        report: "nvtx_gpu_proj_sum",
        columns: vec![
            "Range",
            "Style",
            "Total Proj Time (ns)",
            "Total Range Time (ns)",
            "Range Instances",
            "Proj Avg (ns)",
            "Proj Med (ns)",
            "Proj Min (ns)",
            "Proj Max (ns)",
            "Proj StdDev (ns)",
            "Total GPU Ops",
            "Avg GPU Ops",
            "Avg Range Lvl",
            "Avg Num Child",
        ],
        rows: rows.into_iter().map(row).collect(),
        named_by: 0,
    }
}
