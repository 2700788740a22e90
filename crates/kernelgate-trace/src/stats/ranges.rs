//! Makes tables of named ranges from rows in order of time: of a trace in memory, or of an export
//! that is read once and not kept.

use std::hash::Hash;

use super::shared_cells::{groups_by_total, summary_table};
use super::summary::GroupedSamples;
use super::table::{StatsTable, TableCell};
use crate::model::host::RangeStyle;
use crate::model::interned_names::NameId;
use crate::model::{InternedValues as Interner, Trace};
use crate::read::{RangeOrCall, RangeRow};

/// Results that are known once all rows were read.
pub(super) struct EndOfRows<'a, N: Fn(u32) -> NameId> {
    pub trace: &'a Trace,
    /// Names of the ranges, by the labels that rows hold.
    pub name_of: N,
    /// End time that is assumed for ranges that were never closed.
    pub last: i64,
}

/// A table that is summed row by row.
pub(super) trait StreamedSums {
    /// The next row; the trace is all but ranges and calls.
    fn add(&mut self, trace: &Trace, row: RangeOrCall);
    fn projection_table(self, end: &EndOfRows<'_, impl Fn(u32) -> NameId>) -> StatsTable;
}

/// Merges groups whose labels mean one name; returns the new groups, and the new group of each old
/// one.
pub(super) fn regroup_by_meaning<K: Copy, L: Copy + Eq + Hash>(
    groups: &[K],
    samples: &mut GroupedSamples,
    meaning: impl Fn(K) -> L,
) -> (Vec<L>, Vec<u32>) {
    let mut meanings = Interner::default();
    let group_of: Vec<u32> = groups.iter().map(|&group| meanings.intern(meaning(group))).collect();
    samples.merge_value_groups(&group_of);
    (meanings.values, group_of)
}

/// Sums of ranges by name and style.
#[derive(Default)]
pub(super) struct RangeSumsByName {
    push_pop_only: bool,
    groups: Interner<(u32, RangeStyle)>,
    samples: GroupedSamples,
    /// Group and start of ranges that were never closed.
    unclosed: Vec<(u32, i64)>,
}

impl RangeSumsByName {
    pub fn new(push_pop_only: bool) -> Self {
        Self { push_pop_only, ..Self::default() }
    }
}

impl StreamedSums for RangeSumsByName {
    fn add(&mut self, _: &Trace, row: RangeOrCall) {
        match row {
            RangeOrCall::Begin => *self = Self::new(self.push_pop_only),
            RangeOrCall::Range(range)
                if !self.push_pop_only || range.style == RangeStyle::PushPop =>
            {
                let group = self.groups.intern((range.label, range.style));
                if range.end == RangeRow::UNCLOSED_RANGE_END {
                    self.unclosed.push((group, range.start));
                } else {
                    self.samples.push(group, range.end - range.start);
                }
            }
            RangeOrCall::Range(_) | RangeOrCall::Call(_) => {}
        }
    }

    fn projection_table(mut self, end: &EndOfRows<'_, impl Fn(u32) -> NameId>) -> StatsTable {
        for (group, start) in self.unclosed {
            self.samples.push(group, end.last.max(start) - start);
        }
        let mut samples = self.samples;
        let meaning = |(label, style)| ((end.name_of)(label), style);
        let (groups, _) = regroup_by_meaning(&self.groups.values, &mut samples, meaning);
        let summaries = samples.group_summaries(groups.len());
        let label = |(name, style)| (end.trace.names.text(name).to_owned(), style);
        let rows = groups_by_total(groups.into_iter().map(label).collect(), summaries);
        if self.push_pop_only {
            let cells = |(name, _): (String, RangeStyle)| vec![TableCell::Text(name)];
            return summary_table("nvtx_pushpop_sum", "Instances", &["Range"], rows, cells);
        }
        summary_table("nvtx_sum", "Instances", &["Style", "Range"], rows, |(name, style)| {
            vec![TableCell::Text(style.label().to_owned()), TableCell::Text(name)]
        })
    }
}
