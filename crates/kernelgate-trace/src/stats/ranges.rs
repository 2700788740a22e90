//! Tables of named ranges, and of what was launched in them, from rows in order of time: those of
//! a trace in memory, or of an export that is read once and not kept.

use std::hash::Hash;

use super::cells::{by_total, count, summary_table, total_cells};
use super::launched::{Launched, Open, OpenRanges};
use super::summary::{Samples, Summary};
use super::table::{Cell, Table};
use crate::analyze::operations::{AllOperations, Kind};
use crate::model::host::RangeStyle;
use crate::model::names::Name;
use crate::model::{Table as Interner, Trace};
use crate::read::{CallRow, RangeRow, Row};

/// What is known once all rows went by.
pub(super) struct End<'a, N: Fn(u32) -> Name> {
    pub trace: &'a Trace,
    /// The names that labels mean.
    pub name_of: N,
    /// The end of ranges that were never closed.
    pub last: i64,
}

/// A table that is summed row by row.
pub(super) trait Sums {
    /// The next row; the trace is all but ranges and calls.
    fn add(&mut self, trace: &Trace, row: Row);
    /// The table.
    fn table(self, end: &End<'_, impl Fn(u32) -> Name>) -> Table;
}

/// Groups by what their labels mean, since several labels may mean one name: the new groups, and
/// which each is.
fn regroup<K: Copy, L: Copy + Eq + Hash>(
    groups: &[K],
    samples: &mut Samples,
    meaning: impl Fn(K) -> L,
) -> (Vec<L>, Vec<u32>) {
    let mut meanings = Interner::default();
    let group_of: Vec<u32> = groups.iter().map(|&group| meanings.of(meaning(group))).collect();
    samples.regroup(&group_of);
    (meanings.values, group_of)
}

/// Ranges by name and style.
#[derive(Default)]
pub(super) struct RangeSums {
    push_pop_only: bool,
    groups: Interner<(u32, RangeStyle)>,
    samples: Samples,
    /// Group and start of those that were never closed.
    unclosed: Vec<(u32, i64)>,
}

impl RangeSums {
    pub fn new(push_pop_only: bool) -> Self {
        Self { push_pop_only, ..Self::default() }
    }
}

impl Sums for RangeSums {
    fn add(&mut self, _: &Trace, row: Row) {
        match row {
            Row::Begin => *self = Self::new(self.push_pop_only),
            Row::Range(range) if !self.push_pop_only || range.style == RangeStyle::PushPop => {
                let group = self.groups.of((range.label, range.style));
                if range.end == RangeRow::UNCLOSED {
                    self.unclosed.push((group, range.start));
                } else {
                    self.samples.push(group, range.end - range.start);
                }
            }
            Row::Range(_) | Row::Call(_) => {}
        }
    }

    fn table(mut self, end: &End<'_, impl Fn(u32) -> Name>) -> Table {
        for (group, start) in self.unclosed {
            self.samples.push(group, end.last.max(start) - start);
        }
        let mut samples = self.samples;
        let meaning = |(label, style)| ((end.name_of)(label), style);
        let (groups, _) = regroup(&self.groups.values, &mut samples, meaning);
        let summaries = samples.summaries(groups.len());
        let label = |(name, style)| (end.trace.names.text(name).to_owned(), style);
        let rows = by_total(groups.into_iter().map(label).collect(), summaries);
        if self.push_pop_only {
            let cells = |(name, _): (String, RangeStyle)| vec![Cell::Text(name)];
            return summary_table("nvtx_pushpop_sum", "Instances", &["Range"], rows, cells);
        }
        summary_table("nvtx_sum", "Instances", &["Style", "Range"], rows, |(name, style)| {
            vec![Cell::Text(style.label().to_owned()), Cell::Text(name)]
        })
    }
}

/// Kernels that are summed together: name (or label) and style of the range, thread, name of the
/// kernel. No range: none is around the launch; no thread either: the launch is not in the trace.
type KernelGroup = (Option<(u32, RangeStyle)>, Option<u32>, u32);

/// Kernels by the range that their launch is in, thread and name. A kernel counts for every range
/// around its launch; one without a range stands under an empty name.
#[derive(Default)]
pub(super) struct KernelSums {
    launched: Launched,
    /// Of each range the groups that it counts in, in order.
    open: OpenRanges<Vec<u32>>,
    groups: Interner<KernelGroup>,
    samples: Samples,
    /// Of each group, the ranges that have kernels in it.
    instances: Vec<usize>,
}

impl KernelSums {
    fn call(&mut self, trace: &Trace, call: &CallRow) {
        let all = AllOperations::of(trace);
        let ranges = self.open.at(call, |_| ());
        for &(_, id) in self.launched.by(call) {
            let (Kind::Kernel, kernel) = all.part(id) else { continue };
            let (function, length) = kernel_of(trace, kernel);
            let mut alone = true;
            for range in ranges.iter_mut().filter(|range| range.row.end >= call.end) {
                alone = false;
                let scope = (range.row.label, range.row.style);
                let group = self.groups.of((Some(scope), Some(call.thread), function));
                self.samples.push(group, length);
                if let Err(place) = range.state.binary_search(&group) {
                    range.state.insert(place, group);
                    self.instances.resize(self.groups.values.len(), 0);
                    self.instances[group as usize] += 1;
                }
            }
            if alone {
                self.samples.push(self.groups.of((None, Some(call.thread), function)), length);
            }
        }
    }
}

/// The name of a kernel and how long it ran.
fn kernel_of(trace: &Trace, kernel: usize) -> (u32, i64) {
    let name = trace.functions[trace.kernels.function[kernel] as usize].demangled.0;
    (name, trace.kernels.on_gpu.end[kernel] - trace.kernels.on_gpu.start[kernel])
}

impl Sums for KernelSums {
    fn add(&mut self, trace: &Trace, row: Row) {
        match row {
            Row::Begin => *self = Self { launched: Launched::of(trace), ..Self::default() },
            Row::Range(range) => self.open.add(range, |_| ()),
            Row::Call(call) => self.call(trace, &call),
        }
    }

    fn table(mut self, end: &End<'_, impl Fn(u32) -> Name>) -> Table {
        let trace = end.trace;
        for kernel in self.launched.orphans().map(|id| id as usize) {
            if kernel < trace.kernels.on_gpu.len() {
                let (function, length) = kernel_of(trace, kernel);
                self.samples.push(self.groups.of((None, None, function)), length);
            }
        }
        let mut samples = self.samples;
        let meaning = |(scope, thread, kernel): KernelGroup| {
            (scope.map(|(label, style)| ((end.name_of)(label).0, style)), thread, kernel)
        };
        let (groups, group_of) = regroup(&self.groups.values, &mut samples, meaning);
        let mut instances_of = vec![0usize; groups.len()];
        for (&group, &instances) in group_of.iter().zip(&self.instances) {
            instances_of[group as usize] += instances;
        }
        let summaries = samples.summaries(groups.len());
        let text = |name: u32| trace.names.text(Name(name));
        let id = |thread: u32| {
            let thread = trace.threads[thread as usize];
            (trace.processes[thread.process as usize].pid, thread.tid)
        };
        let mut order: Vec<usize> = (0..groups.len()).collect();
        let key = |index: usize| {
            let (scope, thread, kernel) = groups[index];
            let name = scope.map_or("", |(name, _)| text(name));
            (
                name,
                scope.map(|(_, style)| style),
                thread.map(id),
                std::cmp::Reverse(summaries[index].total),
                text(kernel),
            )
        };
        order.sort_by(|&a, &b| key(a).cmp(&key(b)));
        let row = |index: usize| {
            let (scope, thread, kernel) = groups[index];
            let ids = thread.map(id);
            let mut cells = vec![
                Cell::Text(scope.map_or("", |(name, _)| text(name)).to_owned()),
                Cell::Text(scope.map_or("", |(_, style)| style.label()).to_owned()),
                ids.map_or(Cell::Empty, |(pid, _)| Cell::Integer(pid)),
                ids.map_or(Cell::Empty, |(_, tid)| Cell::Integer(tid)),
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
}

/// The projection of a range onto the GPU.
struct Projection {
    start: i64,
    end: i64,
    operations: u32,
    /// How many ranges are around it.
    level: u32,
    /// How many ranges directly in it have a projection.
    children: u32,
}

/// Projections of the ranges in which something was launched, by name and style.
#[derive(Default)]
pub(super) struct ProjectionSums {
    launched: Launched,
    open: OpenRanges<Option<Projection>>,
    closed: Projections,
}

/// Those of ranges that are over.
#[derive(Default)]
struct Projections {
    groups: Interner<(u32, RangeStyle)>,
    samples: Samples,
    /// Of each group: host time, operations, levels, children.
    sums: Vec<[i64; 4]>,
}

impl Projections {
    fn add(&mut self, range: &Open<Option<Projection>>, last: i64) {
        let (row, Some(projection)) = (&range.row, &range.state) else { return };
        let group = self.groups.of((row.label, row.style));
        self.samples.push(group, projection.end - projection.start);
        self.sums.resize(self.groups.values.len(), [0; 4]);
        let [host, operations, levels, children] = &mut self.sums[group as usize];
        *host += row.end.min(last.max(row.start)) - row.start;
        *operations += i64::from(projection.operations);
        *levels += i64::from(projection.level);
        *children += i64::from(projection.children);
    }
}

impl ProjectionSums {
    fn call(&mut self, trace: &Trace, call: &CallRow) {
        let all = AllOperations::of(trace);
        let (mut start, mut end, mut number) = (i64::MAX, i64::MIN, 0);
        // Graphs are recorded whole; tables of `nsys stats` are of kernels, copies and sets.
        for &(_, id) in self.launched.by(call).iter().filter(|row| all.part(row.1).0 != Kind::Graph)
        {
            start = start.min(all.start(id));
            end = end.max(all.end(id));
            number += 1;
        }
        if number == 0 {
            return;
        }
        let ranges = self.open.at(call, |range| self.closed.add(&range, i64::MAX));
        for depth in 0..ranges.len() {
            let (outer, rest) = ranges.split_at_mut(depth);
            let range = &mut rest[0];
            let last = range.row.end;
            if last < call.end {
                continue;
            }
            if range.state.is_none() {
                // Whatever encloses the range encloses the call, too.
                let mut level = 0;
                let mut around = None;
                for outer in outer.iter_mut().filter(|outer| outer.row.end >= last) {
                    level += 1;
                    around = outer.state.as_mut();
                }
                if let Some(parent) = around {
                    parent.children += 1;
                }
                range.state = Some(Projection { start, end, operations: 0, level, children: 0 });
            }
            if let Some(projection) = &mut range.state {
                projection.start = projection.start.min(start);
                projection.end = projection.end.max(end);
                projection.operations += number;
            }
        }
    }
}

impl Sums for ProjectionSums {
    fn add(&mut self, trace: &Trace, row: Row) {
        match row {
            Row::Begin => *self = Self { launched: Launched::of(trace), ..Self::default() },
            Row::Range(range) => {
                self.open.add(range, |range| self.closed.add(&range, i64::MAX));
            }
            Row::Call(call) => self.call(trace, &call),
        }
    }

    fn table(mut self, end: &End<'_, impl Fn(u32) -> Name>) -> Table {
        self.open.finish(|range| self.closed.add(&range, end.last));
        let Projections { groups, mut samples, sums: parts } = self.closed;
        let meaning = |(label, style)| ((end.name_of)(label), style);
        let (groups, group_of) = regroup(&groups.values, &mut samples, meaning);
        let mut sums = vec![[0i64; 4]; groups.len()];
        for (&group, part) in group_of.iter().zip(parts) {
            for (sum, part) in sums[group as usize].iter_mut().zip(part) {
                *sum += part;
            }
        }
        let summaries = samples.summaries(groups.len());
        let labels = groups
            .iter()
            .zip(&sums)
            .map(|(&(name, style), &sums)| (end.trace.names.text(name), style, sums))
            .collect();
        let rows = by_total(labels, summaries);
        #[allow(clippy::cast_precision_loss)]
        let mean =
            |sum: i64, summary: &Summary| Cell::Decimal(sum as f64 / summary.count as f64, 1);
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
}
