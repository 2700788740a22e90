//! Table of kernels by the NVTX range in which each kernel was launched.

use super::ranges::{
    NamesAndEndAfterLastRow, TableBuiltFromStreamedRows, merge_groups_with_equal_meaning,
};
use super::shared_cells::{count_cell, summary_cells_without_share};
use super::summary::ValuesByGroup;
use super::table::{StatsTable, TableCell};
use crate::analyze::launches::passing_calls::{OpenRangesByThread, OperationsByLaunchKey};
use crate::analyze::operations::{AllGpuOperations, GpuOperationKind};
use crate::model::host::HostRangeStyle;
use crate::model::interned_names::InternedNameId;
use crate::model::{DistinctValues as Interner, Trace};
use crate::read::{StreamedCallRow, StreamedRangeOrCall};

/// Kernels with equal keys are summed: label and style of the range, host thread, and name of the
/// kernel. The range is `None` if no range encloses the launch; the thread is `None` if the trace
/// lacks the launch call.
type RangeThreadAndKernelKey = (Option<(u32, HostRangeStyle)>, Option<u32>, u32);

/// Sums kernel durations by enclosing range, host thread and kernel name. A kernel counts for every
/// range that encloses its launch; a kernel outside all ranges is listed under an empty range name.
#[derive(Default)]
pub(super) struct KernelDurationsByRange {
    operations_by_launch_key: OperationsByLaunchKey,
    /// For each open range, the sorted groups of kernels that were already counted for this range.
    counted_kernel_groups_by_open_range: OpenRangesByThread<Vec<u32>>,
    groups: Interner<RangeThreadAndKernelKey>,
    kernel_ns_by_group: ValuesByGroup,
    /// For each group, the number of ranges that launched kernels of the group.
    range_count_by_group: Vec<usize>,
}

impl KernelDurationsByRange {
    fn add_kernels_of_launch_call(&mut self, trace: &Trace, call: &StreamedCallRow) {
        let all = AllGpuOperations::number_operations_of_trace(trace);
        let ranges = self.counted_kernel_groups_by_open_range.ranges_of_thread_open_at(
            call.thread_index,
            call.start_ns,
            |_| (),
        );
        for &id in self.operations_by_launch_key.operations_launched_by_host_call(trace, call) {
            let (GpuOperationKind::Kernel, kernel) = all.kind_and_table_row(id) else { continue };
            let (function, length) = kernel_name_and_duration(trace, kernel);
            let mut alone = true;
            for range in ranges.iter_mut().filter(|range| range.row.end_ns >= call.end_ns) {
                alone = false;
                let scope = (range.row.name_index, range.row.style);
                let group =
                    self.groups.index_of_value((Some(scope), Some(call.thread_index), function));
                self.kernel_ns_by_group.push_value_of_group(group, length);
                if let Err(place) = range.range_state.binary_search(&group) {
                    range.range_state.insert(place, group);
                    self.range_count_by_group.resize(self.groups.values.len(), 0);
                    self.range_count_by_group[group as usize] += 1;
                }
            }
            if alone {
                self.kernel_ns_by_group.push_value_of_group(
                    self.groups.index_of_value((None, Some(call.thread_index), function)),
                    length,
                );
            }
        }
    }
}

/// Name id of a kernel, and its duration in nanoseconds.
fn kernel_name_and_duration(trace: &Trace, kernel: usize) -> (u32, i64) {
    let name = trace.functions[trace.kernels.function_index.at(kernel) as usize].demangled_name.0;
    (name, trace.kernels.on_gpu.operation_duration_ns(kernel))
}

impl TableBuiltFromStreamedRows for KernelDurationsByRange {
    fn add_range_or_call_row(&mut self, trace: &Trace, row: StreamedRangeOrCall) {
        match row {
            StreamedRangeOrCall::PassBegins => {
                *self = Self {
                    operations_by_launch_key: OperationsByLaunchKey::operations_without_read_calls(
                        trace,
                    ),
                    ..Self::default()
                }
            }
            StreamedRangeOrCall::Range(range) => self
                .counted_kernel_groups_by_open_range
                .open_range_of_thread(range, Vec::new(), |_| ()),
            StreamedRangeOrCall::Call(call) => self.add_kernels_of_launch_call(trace, &call),
        }
    }

    fn into_stats_table(
        mut self,
        end: &NamesAndEndAfterLastRow<'_, impl Fn(u32) -> InternedNameId>,
    ) -> StatsTable {
        let trace = end.trace;
        for kernel in
            self.operations_by_launch_key.operations_whose_call_was_not_read().map(|id| id as usize)
        {
            if kernel < trace.kernels.on_gpu.operation_count() {
                let (function, length) = kernel_name_and_duration(trace, kernel);
                self.kernel_ns_by_group.push_value_of_group(
                    self.groups.index_of_value((None, None, function)),
                    length,
                );
            }
        }
        let mut samples = self.kernel_ns_by_group;
        let meaning = |(scope, thread, kernel): RangeThreadAndKernelKey| {
            let name = |label| (end.name_of_range_label)(label).0;
            (scope.map(|(label, style)| (name(label), style)), thread, kernel)
        };
        let (groups, group_of) =
            merge_groups_with_equal_meaning(&self.groups.values, &mut samples, meaning);
        let mut instances_of = vec![0usize; groups.len()];
        for (&group, &instances) in group_of.iter().zip(&self.range_count_by_group) {
            instances_of[group as usize] += instances;
        }
        let summaries = samples.summaries_of_groups(groups.len());
        let text = |name: u32| trace.names.text_of_name(InternedNameId(name));
        let id = |thread: u32| {
            let thread = trace.threads[thread as usize];
            (trace.processes[thread.process_index as usize].pid, thread.tid)
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
                TableCell::Text(scope.map_or("", |(_, style)| style.nsys_style_label()).to_owned()),
                ids.map_or(TableCell::EmptyCell, |(pid, _)| TableCell::Integer(pid)),
                ids.map_or(TableCell::EmptyCell, |(_, tid)| TableCell::Integer(tid)),
                count_cell(instances_of[index]),
                count_cell(summaries[index].value_count),
            ];
            let mut summary = summary_cells_without_share(&summaries[index]);
            // In the table `nvtx_kern_sum`, the count comes before the total, so the cell of the
            // count is removed here and inserted earlier.
            summary.remove(1);
            cells.extend(summary);
            cells.push(TableCell::Text(text(kernel).to_owned()));
            cells
        };
        StatsTable {
            report_name: "nvtx_kern_sum",
            column_titles: vec![
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
            filtered_column_index: 0,
        }
    }
}
