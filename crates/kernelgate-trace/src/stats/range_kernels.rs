//! Kernels by the ranges that they were launched in.

use super::ranges::{EndOfRows, StreamedSums, regroup_by_meaning};
use super::shared_cells::{count_cell, total_cells_without_share};
use super::summary::GroupedSamples;
use super::table::{StatsTable, TableCell};
use crate::analyze::launches::passing_calls::{LaunchedOperations, OpenRangesByThread};
use crate::analyze::operations::{AllOperations, OperationKind};
use crate::model::host::RangeStyle;
use crate::model::interned_names::NameId;
use crate::model::{InternedValues as Interner, Trace};
use crate::read::{CallRow, RangeOrCall};

/// Kernels that are summed together: name (or label) and style of the range, thread, name of the
/// kernel. No range: none is around the launch; no thread either: the launch is not in the trace.
type KernelGroupKey = (Option<(u32, RangeStyle)>, Option<u32>, u32);

/// Kernels by the range that their launch is in, thread and name. A kernel counts for every range
/// around its launch; one without a range stands under an empty name.
#[derive(Default)]
pub(super) struct KernelSumsByRange {
    launched: LaunchedOperations,
    /// For each open range, the groups in which it counts, in order.
    open: OpenRangesByThread<Vec<u32>>,
    groups: Interner<KernelGroupKey>,
    samples: GroupedSamples,
    /// For each group, the number of ranges that contain kernels.
    instances: Vec<usize>,
}

impl KernelSumsByRange {
    fn call(&mut self, trace: &Trace, call: &CallRow) {
        let all = AllOperations::new(trace);
        let ranges = self.open.at(call.thread, call.start, |_| ());
        for &id in self.launched.by(trace, call) {
            let (OperationKind::Kernel, kernel) = all.kind_and_row(id) else { continue };
            let (function, length) = kernel_name_and_duration(trace, kernel);
            let mut alone = true;
            for range in ranges.iter_mut().filter(|range| range.row.end >= call.end) {
                alone = false;
                let scope = (range.row.label, range.row.style);
                let group = self.groups.intern((Some(scope), Some(call.thread), function));
                self.samples.push(group, length);
                if let Err(place) = range.state.binary_search(&group) {
                    range.state.insert(place, group);
                    self.instances.resize(self.groups.values.len(), 0);
                    self.instances[group as usize] += 1;
                }
            }
            if alone {
                self.samples.push(self.groups.intern((None, Some(call.thread), function)), length);
            }
        }
    }
}

/// The name of a kernel and how long it ran.
fn kernel_name_and_duration(trace: &Trace, kernel: usize) -> (u32, i64) {
    let name = trace.functions[trace.kernels.function.at(kernel) as usize].demangled.0;
    (name, trace.kernels.on_gpu.length(kernel))
}

impl StreamedSums for KernelSumsByRange {
    fn add(&mut self, trace: &Trace, row: RangeOrCall) {
        match row {
            RangeOrCall::Begin => {
                *self = Self { launched: LaunchedOperations::new(trace), ..Self::default() }
            }
            RangeOrCall::Range(range) => self.open.add(range, Vec::new(), |_| ()),
            RangeOrCall::Call(call) => self.call(trace, &call),
        }
    }

    fn projection_table(mut self, end: &EndOfRows<'_, impl Fn(u32) -> NameId>) -> StatsTable {
        let trace = end.trace;
        for kernel in self.launched.operations_without_call().map(|id| id as usize) {
            if kernel < trace.kernels.on_gpu.len() {
                let (function, length) = kernel_name_and_duration(trace, kernel);
                self.samples.push(self.groups.intern((None, None, function)), length);
            }
        }
        let mut samples = self.samples;
        let meaning = |(scope, thread, kernel): KernelGroupKey| {
            (scope.map(|(label, style)| ((end.name_of)(label).0, style)), thread, kernel)
        };
        let (groups, group_of) = regroup_by_meaning(&self.groups.values, &mut samples, meaning);
        let mut instances_of = vec![0usize; groups.len()];
        for (&group, &instances) in group_of.iter().zip(&self.instances) {
            instances_of[group as usize] += instances;
        }
        let summaries = samples.group_summaries(groups.len());
        let text = |name: u32| trace.names.text(NameId(name));
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
                TableCell::Text(scope.map_or("", |(name, _)| text(name)).to_owned()),
                TableCell::Text(scope.map_or("", |(_, style)| style.label()).to_owned()),
                ids.map_or(TableCell::Empty, |(pid, _)| TableCell::Integer(pid)),
                ids.map_or(TableCell::Empty, |(_, tid)| TableCell::Integer(tid)),
                count_cell(instances_of[index]),
                count_cell(summaries[index].count),
            ];
            let mut summary = total_cells_without_share(&summaries[index]);
            // In this table the count comes before the total.
            summary.remove(1);
            cells.extend(summary);
            cells.push(TableCell::Text(text(kernel).to_owned()));
            cells
        };
        StatsTable {
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
