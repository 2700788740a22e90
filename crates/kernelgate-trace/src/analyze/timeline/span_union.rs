//! Unions of time spans.

use crate::model::packed_columns::{BitPackedColumn, first_number_that_fails_condition};

/// Union of time spans: its parts are in order of time, and neither overlap nor touch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnionOfTimeSpans {
    span_start_ns: BitPackedColumn<i64>,
    span_length_ns: BitPackedColumn<i64>,
}

impl UnionOfTimeSpans {
    /// Computes the union of spans, which may be in any order.
    pub fn union_of_spans(mut spans: Vec<(i64, i64)>) -> Self {
        if !spans.is_sorted() {
            spans.sort_unstable();
        }
        let mut union = Self::default();
        spans.into_iter().for_each(|span| union.add_later_span(span));
        union
    }

    /// Adds a span that starts no earlier than all spans that were added before.
    pub fn add_later_span(&mut self, (start, end): (i64, i64)) {
        match self
            .span_start_ns
            .row_count()
            .checked_sub(1)
            .map(|last| (last, self.part_of_union_at(last)))
        {
            Some((last, (first, until))) if start <= until => {
                self.span_length_ns.replace_row(last, until.max(end) - first);
            }
            _ => {
                self.span_start_ns.push_row(start);
                self.span_length_ns.push_row(end - start);
            }
        }
    }

    fn part_of_union_at(&self, index: usize) -> (i64, i64) {
        let start = self.span_start_ns.at(index);
        (start, start + self.span_length_ns.at(index))
    }

    /// Total length of the union's parts, nanoseconds.
    pub fn total_covered_ns(&self) -> i64 {
        self.span_length_ns.iter_decoded_rows().sum()
    }

    fn parts_of_union_inside(&self, (start, end): (i64, i64)) -> impl Iterator<Item = (i64, i64)> {
        let count = self.span_start_ns.row_count();
        let first = first_number_that_fails_condition(count, |index| {
            self.part_of_union_at(index).1 <= start
        });
        let inside = (first..count).map(|index| self.part_of_union_at(index));
        let inside = inside.take_while(move |&(from, _)| from < end);
        inside.map(move |(from, to)| (from.max(start), to.min(end)))
    }

    /// Returns how many nanoseconds of `span` the union covers.
    pub fn covered_ns_within(&self, span: (i64, i64)) -> i64 {
        self.parts_of_union_inside(span).map(|(from, to)| to - from).sum()
    }

    /// Returns the nanoseconds from the first to the last covered time inside `span`.
    pub fn first_to_last_covered_ns_within(&self, span: (i64, i64)) -> i64 {
        let mut inside = self.parts_of_union_inside(span);
        let Some((from, to)) = inside.next() else { return 0 };
        inside.last().map_or(to, |(_, to)| to) - from
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_spans_are_counted_once_in_a_union() {
        let union =
            UnionOfTimeSpans::union_of_spans(vec![(10, 20), (0, 5), (15, 30), (5, 7), (40, 40)]);
        let spans: Vec<(i64, i64)> = (0..union.span_start_ns.row_count())
            .map(|index| union.part_of_union_at(index))
            .collect();
        assert_eq!(spans, [(0, 7), (10, 30), (40, 40)]);
        assert_eq!(union.total_covered_ns(), 27);
        let within =
            [(5, 12), (7, 10), (-5, 100), (29, 41)].map(|span| union.covered_ns_within(span));
        assert_eq!(within, [4, 0, 27, 1]);
        let extent = [(5, 12), (7, 10), (-5, 100), (29, 39)]
            .map(|span| union.first_to_last_covered_ns_within(span));
        assert_eq!(extent, [7, 0, 40, 1]);
    }
}
