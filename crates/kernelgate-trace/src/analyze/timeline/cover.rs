//! Spans of time as unions, and the part of one union that another does not cover.

/// Spans in order of time that neither overlap nor touch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Union(Vec<(i64, i64)>);

impl Union {
    /// Joins spans in any order.
    pub fn new(mut spans: Vec<(i64, i64)>) -> Self {
        if !spans.is_sorted() {
            spans.sort_unstable();
        }
        spans.dedup_by(|next, before| {
            let joins = next.0 <= before.1;
            if joins {
                before.1 = before.1.max(next.1);
            }
            joins
        });
        Self(spans)
    }

    /// The time of either of two.
    pub fn joined(a: &Self, b: &Self) -> Self {
        Self::new(a.0.iter().chain(&b.0).copied().collect())
    }

    /// Nanoseconds of all spans.
    pub fn length(&self) -> i64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    /// Nanoseconds inside of one span.
    pub fn within(&self, (start, end): (i64, i64)) -> i64 {
        let first = self.0.partition_point(|&(_, to)| to <= start);
        let inside = self.0[first..].iter().take_while(|&&(from, _)| from < end);
        inside.map(|&(from, to)| to.min(end) - from.max(start)).sum()
    }

    /// Nanoseconds from the first to the last time inside of one span.
    pub fn extent(&self, (start, end): (i64, i64)) -> i64 {
        let first = self.0.partition_point(|&(_, to)| to <= start);
        let last = self.0[first..].partition_point(|&(from, _)| from < end);
        match &self.0[first..first + last] {
            [] => 0,
            [only] => only.1.min(end) - only.0.max(start),
            [first, .., last] => last.1.min(end) - first.0.max(start),
        }
    }

    /// Nanoseconds outside of another union.
    pub fn outside(&self, other: &Self) -> i64 {
        let mut inside = 0;
        let mut next = other.0.iter().peekable();
        for &(start, end) in &self.0 {
            while let Some(&&(from, to)) = next.peek() {
                inside += (end.min(to) - start.max(from)).max(0);
                if to > end {
                    break;
                }
                next.next();
            }
        }
        self.length() - inside
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_union_counts_time_once() {
        let union = Union::new(vec![(10, 20), (0, 5), (15, 30), (5, 7), (40, 40)]);
        assert_eq!(union, Union(vec![(0, 7), (10, 30), (40, 40)]));
        assert_eq!(union.length(), 27);
        let within = [(5, 12), (7, 10), (-5, 100), (29, 41)].map(|span| union.within(span));
        assert_eq!(within, [4, 0, 27, 1]);
        let extent = [(5, 12), (7, 10), (-5, 100), (29, 39)].map(|span| union.extent(span));
        assert_eq!(extent, [7, 0, 40, 1]);
    }

    #[test]
    fn time_outside_is_what_the_other_does_not_cover() {
        let joined = |spans: &[(i64, i64)]| Union::new(spans.to_vec());
        let union = joined(&[(0, 10), (20, 30), (50, 60)]);
        assert_eq!(union.outside(&joined(&[])), 30);
        assert_eq!(union.outside(&joined(&[(0, 100)])), 0);
        assert_eq!(union.outside(&joined(&[(5, 25), (29, 55)])), 5 + 4 + 5);
        assert_eq!(union.outside(&joined(&[(10, 20), (30, 50)])), 30);
        assert_eq!(union.outside(&joined(&[(2, 3), (4, 5), (6, 7)])), 27);
        assert_eq!(joined(&[]).outside(&union), 0);
    }
}
