//! Makes tables of named ranges from rows in order of time, either of a trace in memory or of an
//! export that is streamed.

use std::hash::Hash;

use super::shared_cells::{sort_groups_by_descending_total, table_of_group_summaries};
use super::summary::ValuesByGroup;
use super::table::{StatsTable, TableCell};
use crate::model::host::HostRangeStyle;
use crate::model::interned_names::InternedNameId;
use crate::model::{DistinctValues as Interner, Trace};
use crate::read::{StreamedRangeOrCall, StreamedRangeRow};

/// Facts that are known only after all rows were read, and that finish a table.
pub(super) struct NamesAndEndAfterLastRow<'a, N: Fn(u32) -> InternedNameId> {
    pub trace: &'a Trace,
    /// Returns the name id for a range label.
    pub name_of_range_label: N,
    /// End time in nanoseconds for ranges that were never closed.
    pub trace_end_ns: i64,
}

/// A table that is built by adding ranges and API calls one by one in order of time.
pub(super) trait TableBuiltFromStreamedRows {
    /// Adds the next range or API call; `trace` contains everything except ranges and API calls.
    fn add_range_or_call_row(&mut self, trace: &Trace, row: StreamedRangeOrCall);
    fn into_stats_table(
        self,
        end: &NamesAndEndAfterLastRow<'_, impl Fn(u32) -> InternedNameId>,
    ) -> StatsTable;
}

/// Merges groups whose labels have the same name; returns the merged groups, and for each old group
/// the index of its merged group.
pub(super) fn merge_groups_with_equal_meaning<K: Copy, L: Copy + Eq + Hash>(
    groups: &[K],
    samples: &mut ValuesByGroup,
    meaning: impl Fn(K) -> L,
) -> (Vec<L>, Vec<u32>) {
    let mut meanings = Interner::default();
    let group_of: Vec<u32> =
        groups.iter().map(|&group| meanings.index_of_value(meaning(group))).collect();
    samples.renumber_and_merge_groups(&group_of);
    (meanings.values, group_of)
}

/// Sums the host durations of ranges by range name and style.
#[derive(Default)]
pub(super) struct HostDurationsOfRangesByName {
    push_pop_only: bool,
    groups: Interner<(u32, HostRangeStyle)>,
    range_ns_by_group: ValuesByGroup,
    /// Group and start time of each range that was never closed.
    group_and_start_of_unclosed_ranges: Vec<(u32, i64)>,
}

impl HostDurationsOfRangesByName {
    pub fn for_all_or_push_pop_ranges(push_pop_only: bool) -> Self {
        Self { push_pop_only, ..Self::default() }
    }
}

impl TableBuiltFromStreamedRows for HostDurationsOfRangesByName {
    fn add_range_or_call_row(&mut self, _: &Trace, row: StreamedRangeOrCall) {
        match row {
            StreamedRangeOrCall::PassBegins => {
                *self = Self::for_all_or_push_pop_ranges(self.push_pop_only)
            }
            StreamedRangeOrCall::Range(range)
                if !self.push_pop_only || range.style == HostRangeStyle::PushPop =>
            {
                let group = self.groups.index_of_value((range.name_index, range.style));
                if range.end_ns == StreamedRangeRow::UNCLOSED_RANGE_END {
                    self.group_and_start_of_unclosed_ranges.push((group, range.start_ns));
                } else {
                    self.range_ns_by_group
                        .push_value_of_group(group, range.end_ns - range.start_ns);
                }
            }
            StreamedRangeOrCall::Range(_) | StreamedRangeOrCall::Call(_) => {}
        }
    }

    fn into_stats_table(
        mut self,
        end: &NamesAndEndAfterLastRow<'_, impl Fn(u32) -> InternedNameId>,
    ) -> StatsTable {
        for (group, start) in self.group_and_start_of_unclosed_ranges {
            self.range_ns_by_group.push_value_of_group(group, end.trace_end_ns.max(start) - start);
        }
        let mut samples = self.range_ns_by_group;
        let meaning = |(label, style)| ((end.name_of_range_label)(label), style);
        let (groups, _) =
            merge_groups_with_equal_meaning(&self.groups.values, &mut samples, meaning);
        let summaries = samples.summaries_of_groups(groups.len());
        let label = |(name, style)| (end.trace.names.text_of_name(name).to_owned(), style);
        let rows =
            sort_groups_by_descending_total(groups.into_iter().map(label).collect(), summaries);
        if self.push_pop_only {
            let cells = |(name, _): (String, HostRangeStyle)| vec![TableCell::Text(name)];
            return table_of_group_summaries(
                "nvtx_pushpop_sum",
                "Instances",
                &["Range"],
                rows,
                cells,
            );
        }
        table_of_group_summaries(
            "nvtx_sum",
            "Instances",
            &["Style", "Range"],
            rows,
            |(name, style)| {
                vec![TableCell::Text(style.nsys_style_label().to_owned()), TableCell::Text(name)]
            },
        )
    }
}
