//! Table of ranges by the GPU time from the first start to the last end of the operations launched
//! in the range.

use super::ranges::{
    NamesAndEndAfterLastRow, TableBuiltFromStreamedRows, merge_groups_with_equal_meaning,
};
use super::shared_cells::{sort_groups_by_descending_total, summary_cells_without_share};
use super::summary::{ValueSummary, ValuesByGroup};
use super::table::{StatsTable, TableCell};
use crate::analyze::launches::passing_calls::{
    OpenRangeWithState, OpenRangesByThread, OperationsByLaunchKey,
};
use crate::analyze::operations::{AllGpuOperations, GpuOperationKind};
use crate::model::host::HostRangeStyle;
use crate::model::interned_names::InternedNameId;
use crate::model::{DistinctValues as Interner, Trace};
use crate::read::{StreamedCallRow, StreamedRangeOrCall};

/// First start and last end of the GPU operations that were launched in a range.
struct GpuSpanOfRange {
    start_ns: i64,
    end_ns: i64,
    operations: u32,
    /// Number of open ranges that enclose this range.
    nesting_level: u32,
    /// Number of ranges directly inside this range that launched GPU operations.
    child_range_count: u32,
}

/// Sums the GPU spans of ranges that launched operations, by range name and style.
#[derive(Default)]
pub(super) struct GpuSpansOfRangesByName {
    operations_by_launch_key: OperationsByLaunchKey,
    spans_of_open_ranges: OpenRangesByThread<Option<GpuSpanOfRange>>,
    spans_of_ended_ranges: GpuSpansOfEndedRanges,
}

/// Sums of the GPU spans of ranges that have ended, by range name and style.
#[derive(Default)]
struct GpuSpansOfEndedRanges {
    groups: Interner<(u32, HostRangeStyle)>,
    gpu_span_ns_by_group: ValuesByGroup,
    /// For each group, the sums of host time, operation count, nesting level and number of child
    /// ranges.
    sums: Vec<[i64; 4]>,
}

impl GpuSpansOfEndedRanges {
    fn add_ended_range_with_gpu_span(
        &mut self,
        range: &OpenRangeWithState<Option<GpuSpanOfRange>>,
        trace_end_ns: i64,
    ) {
        let (row, Some(projection)) = (&range.row, &range.range_state) else { return };
        let group = self.groups.index_of_value((row.name_index, row.style));
        self.gpu_span_ns_by_group
            .push_value_of_group(group, projection.end_ns - projection.start_ns);
        self.sums.resize(self.groups.values.len(), [0; 4]);
        let [host, operations, levels, children] = &mut self.sums[group as usize];
        *host += row.end_ns.min(trace_end_ns.max(row.start_ns)) - row.start_ns;
        *operations += i64::from(projection.operations);
        *levels += i64::from(projection.nesting_level);
        *children += i64::from(projection.child_range_count);
    }
}

impl GpuSpansOfRangesByName {
    fn add_operations_of_launch_call(&mut self, trace: &Trace, call: &StreamedCallRow) {
        let all = AllGpuOperations::number_operations_of_trace(trace);
        let (mut start, mut end, mut number) = (i64::MAX, i64::MIN, 0);
        // Executions of whole CUDA graphs are skipped, because `nsys stats` counts only kernels,
        // copies and memsets.
        let launched =
            self.operations_by_launch_key.operations_launched_by_host_call(trace, call).iter();
        for &id in launched
            .filter(|&&id| all.kind_and_table_row(id).0 != GpuOperationKind::CudaGraphLaunch)
        {
            start = start.min(all.operation_start_ns(id));
            end = end.max(all.operation_end_exclusive_ns(id));
            number += 1;
        }
        if number == 0 {
            return;
        }
        let ranges = self.spans_of_open_ranges.ranges_of_thread_open_at(
            call.thread_index,
            call.start_ns,
            |range| self.spans_of_ended_ranges.add_ended_range_with_gpu_span(&range, i64::MAX),
        );
        for depth in 0..ranges.len() {
            let (outer, rest) = ranges.split_at_mut(depth);
            let range = &mut rest[0];
            let last = range.row.end_ns;
            if last < call.end_ns {
                continue;
            }
            if range.range_state.is_none() {
                // An enclosing range of this range also encloses the API call, so its counters
                // exist already.
                let mut level = 0;
                let mut around = None;
                for outer in outer.iter_mut().filter(|outer| outer.row.end_ns >= last) {
                    level += 1;
                    around = outer.range_state.as_mut();
                }
                if let Some(parent) = around {
                    parent.child_range_count += 1;
                }
                range.range_state = Some(GpuSpanOfRange {
                    start_ns: start,
                    end_ns: end,
                    operations: 0,
                    nesting_level: level,
                    child_range_count: 0,
                });
            }
            if let Some(projection) = &mut range.range_state {
                projection.start_ns = projection.start_ns.min(start);
                projection.end_ns = projection.end_ns.max(end);
                projection.operations += number;
            }
        }
    }
}

impl TableBuiltFromStreamedRows for GpuSpansOfRangesByName {
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
            StreamedRangeOrCall::Range(range) => {
                self.spans_of_open_ranges.open_range_of_thread(range, None, |range| {
                    self.spans_of_ended_ranges.add_ended_range_with_gpu_span(&range, i64::MAX)
                });
            }
            StreamedRangeOrCall::Call(call) => self.add_operations_of_launch_call(trace, &call),
        }
    }

    fn into_stats_table(
        mut self,
        end: &NamesAndEndAfterLastRow<'_, impl Fn(u32) -> InternedNameId>,
    ) -> StatsTable {
        self.spans_of_open_ranges.close_all_ranges(|range| {
            self.spans_of_ended_ranges.add_ended_range_with_gpu_span(&range, end.trace_end_ns)
        });
        let GpuSpansOfEndedRanges { groups, gpu_span_ns_by_group: mut samples, sums: parts } =
            self.spans_of_ended_ranges;
        let meaning = |(label, style)| ((end.name_of_range_label)(label), style);
        let (groups, group_of) =
            merge_groups_with_equal_meaning(&groups.values, &mut samples, meaning);
        let mut sums = vec![[0i64; 4]; groups.len()];
        for (&group, part) in group_of.iter().zip(parts) {
            for (sum, part) in sums[group as usize].iter_mut().zip(part) {
                *sum += part;
            }
        }
        let summaries = samples.summaries_of_groups(groups.len());
        let labels = groups
            .iter()
            .zip(&sums)
            .map(|(&(name, style), &sums)| (end.trace.names.text_of_name(name), style, sums))
            .collect();
        let rows = sort_groups_by_descending_total(labels, summaries);
        #[allow(clippy::cast_precision_loss)]
        let mean = |sum: i64, summary: &ValueSummary| {
            TableCell::DecimalWithPlaces(sum as f64 / summary.value_count as f64, 1)
        };
        let row = |((name, style, [host, operations, levels, children]), summary): (
            (&str, HostRangeStyle, [i64; 4]),
            ValueSummary,
        )| {
            let mut cells = vec![
                TableCell::Text(name.to_owned()),
                TableCell::Text(style.nsys_style_label().to_owned()),
            ];
            cells.extend(summary_cells_without_share(&summary));
            // In the table `nvtx_gpu_proj_sum`, the host time of ranges is between the total GPU
            // time and the count.
            cells.insert(3, TableCell::Integer(host));
            cells.push(TableCell::Integer(operations));
            cells.extend([operations, levels, children].map(|sum| mean(sum, &summary)));
            cells
        };
        StatsTable {
            report_name: "nvtx_gpu_proj_sum",
            column_titles: vec![
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
            filtered_column_index: 0,
        }
    }
}
