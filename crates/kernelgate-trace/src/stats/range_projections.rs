//! Ranges by the time of the GPU between their first and last operation.

use super::ranges::{EndOfRows, StreamedSums, regroup_by_meaning};
use super::shared_cells::{groups_by_total, total_cells_without_share};
use super::summary::{GroupedSamples, ValueSummary};
use super::table::{StatsTable, TableCell};
use crate::analyze::launches::passing_calls::{
    LaunchedOperations, OpenHostRange, OpenRangesByThread,
};
use crate::analyze::operations::{AllOperations, OperationKind};
use crate::model::host::RangeStyle;
use crate::model::interned_names::NameId;
use crate::model::{InternedValues as Interner, Trace};
use crate::read::{CallRow, RangeOrCall};

/// The time span of the GPU operations that were launched in a range.
struct RangeProjection {
    start: i64,
    end: i64,
    operations: u32,
    /// Number of ranges that enclose the range.
    level: u32,
    /// Number of ranges directly inside that have a projection.
    children: u32,
}

/// Projections of the ranges in which something was launched, by name and style.
#[derive(Default)]
pub(super) struct ProjectionSums {
    launched: LaunchedOperations,
    open: OpenRangesByThread<Option<RangeProjection>>,
    closed: EndedProjections,
}

/// Projections of ranges that have ended.
#[derive(Default)]
struct EndedProjections {
    groups: Interner<(u32, RangeStyle)>,
    samples: GroupedSamples,
    /// Sums of each group: host time, operations, levels, children.
    sums: Vec<[i64; 4]>,
}

impl EndedProjections {
    fn add(&mut self, range: &OpenHostRange<Option<RangeProjection>>, last: i64) {
        let (row, Some(projection)) = (&range.row, &range.state) else { return };
        let group = self.groups.intern((row.label, row.style));
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
        let all = AllOperations::new(trace);
        let (mut start, mut end, mut number) = (i64::MAX, i64::MIN, 0);
        // Graphs are recorded whole; tables of `nsys stats` are of kernels, copies and sets.
        let launched = self.launched.by(trace, call).iter();
        for &id in launched.filter(|&&id| all.kind_and_row(id).0 != OperationKind::Graph) {
            start = start.min(all.start(id));
            end = end.max(all.end(id));
            number += 1;
        }
        if number == 0 {
            return;
        }
        let ranges =
            self.open.at(call.thread, call.start, |range| self.closed.add(&range, i64::MAX));
        for depth in 0..ranges.len() {
            let (outer, rest) = ranges.split_at_mut(depth);
            let range = &mut rest[0];
            let last = range.row.end;
            if last < call.end {
                continue;
            }
            if range.state.is_none() {
                // A range that encloses this range also encloses the call.
                let mut level = 0;
                let mut around = None;
                for outer in outer.iter_mut().filter(|outer| outer.row.end >= last) {
                    level += 1;
                    around = outer.state.as_mut();
                }
                if let Some(parent) = around {
                    parent.children += 1;
                }
                range.state =
                    Some(RangeProjection { start, end, operations: 0, level, children: 0 });
            }
            if let Some(projection) = &mut range.state {
                projection.start = projection.start.min(start);
                projection.end = projection.end.max(end);
                projection.operations += number;
            }
        }
    }
}

impl StreamedSums for ProjectionSums {
    fn add(&mut self, trace: &Trace, row: RangeOrCall) {
        match row {
            RangeOrCall::Begin => {
                *self = Self { launched: LaunchedOperations::new(trace), ..Self::default() }
            }
            RangeOrCall::Range(range) => {
                self.open.add(range, None, |range| self.closed.add(&range, i64::MAX));
            }
            RangeOrCall::Call(call) => self.call(trace, &call),
        }
    }

    fn projection_table(mut self, end: &EndOfRows<'_, impl Fn(u32) -> NameId>) -> StatsTable {
        self.open.close_all(|range| self.closed.add(&range, end.last));
        let EndedProjections { groups, mut samples, sums: parts } = self.closed;
        let meaning = |(label, style)| ((end.name_of)(label), style);
        let (groups, group_of) = regroup_by_meaning(&groups.values, &mut samples, meaning);
        let mut sums = vec![[0i64; 4]; groups.len()];
        for (&group, part) in group_of.iter().zip(parts) {
            for (sum, part) in sums[group as usize].iter_mut().zip(part) {
                *sum += part;
            }
        }
        let summaries = samples.group_summaries(groups.len());
        let labels = groups
            .iter()
            .zip(&sums)
            .map(|(&(name, style), &sums)| (end.trace.names.text(name), style, sums))
            .collect();
        let rows = groups_by_total(labels, summaries);
        #[allow(clippy::cast_precision_loss)]
        let mean = |sum: i64, summary: &ValueSummary| {
            TableCell::Decimal(sum as f64 / summary.count as f64, 1)
        };
        let row = |((name, style, [host, operations, levels, children]), summary): (
            (&str, RangeStyle, [i64; 4]),
            ValueSummary,
        )| {
            let mut cells =
                vec![TableCell::Text(name.to_owned()), TableCell::Text(style.label().to_owned())];
            cells.extend(total_cells_without_share(&summary));
            // The time on the host stands between the total and the count.
            cells.insert(3, TableCell::Integer(host));
            cells.push(TableCell::Integer(operations));
            cells.extend([operations, levels, children].map(|sum| mean(sum, &summary)));
            cells
        };
        StatsTable {
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
