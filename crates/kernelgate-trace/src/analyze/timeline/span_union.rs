//! Unions of time spans.

use crate::model::packed_columns::{PackedColumn, partition_point};

/// Spans in order of time that neither overlap nor touch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnitedSpans {
    start: PackedColumn<i64>,
    length: PackedColumn<i64>,
}

impl UnitedSpans {
    /// Joins spans, given in any order, into their union.
    pub fn new(mut spans: Vec<(i64, i64)>) -> Self {
        if !spans.is_sorted() {
            spans.sort_unstable();
        }
        let mut union = Self::default();
        spans.into_iter().for_each(|span| union.add(span));
        union
    }

    /// Adds a time span that starts no earlier than the spans added before.
    pub fn add(&mut self, (start, end): (i64, i64)) {
        match self.start.len().checked_sub(1).map(|last| (last, self.span_at(last))) {
            Some((last, (first, until))) if start <= until => {
                self.length.set_row(last, until.max(end) - first);
            }
            _ => {
                self.start.push(start);
                self.length.push(end - start);
            }
        }
    }

    fn span_at(&self, index: usize) -> (i64, i64) {
        let start = self.start.at(index);
        (start, start + self.length.at(index))
    }

    /// Nanoseconds of all spans.
    pub fn covered_ns(&self) -> i64 {
        self.length.iter().sum()
    }

    fn parts_inside(&self, (start, end): (i64, i64)) -> impl Iterator<Item = (i64, i64)> {
        let count = self.start.len();
        let first = partition_point(count, |index| self.span_at(index).1 <= start);
        let inside = (first..count).map(|index| self.span_at(index));
        let inside = inside.take_while(move |&(from, _)| from < end);
        inside.map(move |(from, to)| (from.max(start), to.min(end)))
    }

    /// Returns the nanoseconds of a span that the union covers.
    pub fn covered_within(&self, span: (i64, i64)) -> i64 {
        self.parts_inside(span).map(|(from, to)| to - from).sum()
    }

    /// Nanoseconds from the first to the last time inside of one span.
    pub fn extent_inside(&self, span: (i64, i64)) -> i64 {
        let mut inside = self.parts_inside(span);
        let Some((from, to)) = inside.next() else { return 0 };
        inside.last().map_or(to, |(_, to)| to) - from
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_spans_are_counted_once_in_a_union() {
        let union = UnitedSpans::new(vec![(10, 20), (0, 5), (15, 30), (5, 7), (40, 40)]);
        let spans: Vec<(i64, i64)> =
            (0..union.start.len()).map(|index| union.span_at(index)).collect();
        assert_eq!(spans, [(0, 7), (10, 30), (40, 40)]);
        assert_eq!(union.covered_ns(), 27);
        let within = [(5, 12), (7, 10), (-5, 100), (29, 41)].map(|span| union.covered_within(span));
        assert_eq!(within, [4, 0, 27, 1]);
        let extent = [(5, 12), (7, 10), (-5, 100), (29, 39)].map(|span| union.extent_inside(span));
        assert_eq!(extent, [7, 0, 40, 1]);
    }
}
