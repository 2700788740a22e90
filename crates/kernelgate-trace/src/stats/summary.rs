//! Summaries of groups of durations.

/// Summary of a group of values, in nanoseconds or bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ValueSummary {
    /// Number of values.
    pub count: usize,
    /// Sum of the values, saturated at the largest `i64`.
    pub total: i64,
    pub mean: f64,
    /// Median of the values; for an even number of values, the mean of the two middle values.
    pub median: f64,
    /// Smallest value.
    pub min: i64,
    /// Largest value.
    pub max: i64,
    /// Sample standard deviation of the values; 0 for a single value.
    pub deviation: f64,
}

impl ValueSummary {
    /// Summarises values, whose order changes.
    pub fn new(values: &mut [i64]) -> Self {
        values.sort_unstable();
        Self::summary_of_sorted(|| values.iter().map(|&value| (value, 1)))
    }

    /// The summary of sorted values, each with its number of occurrences.
    #[allow(clippy::cast_precision_loss)]
    fn summary_of_sorted<I: Iterator<Item = (i64, u32)>>(values: impl Fn() -> I) -> Self {
        let (mut count, mut total, mut last) = (0usize, 0i64, None);
        for (value, times) in values() {
            count += times as usize;
            total = total.saturating_add(value.saturating_mul(i64::from(times)));
            last = Some(value);
        }
        let (Some(max), Some((min, _))) = (last, values().next()) else { return Self::default() };
        let mean = total as f64 / count as f64;
        let squares: f64 =
            values().map(|(value, times)| (value as f64 - mean).powi(2) * f64::from(times)).sum();
        let deviation = if count > 1 { (squares / (count - 1) as f64).sqrt() } else { 0.0 };
        // The values at or after the middle, and at or before the middle.
        let (mut lower, mut upper, mut before) = (min, min, 0usize);
        for (value, times) in values() {
            let end = before + times as usize;
            if before <= (count - 1) / 2 {
                lower = value;
            }
            upper = value;
            if end > count / 2 {
                break;
            }
            before = end;
        }
        let median = (lower as f64 + upper as f64) / 2.0;
        Self { count, total, mean, median, min, max, deviation }
    }
}

/// Values of many groups. Equal values of a group are counted from time to time, so that memory
/// grows with the number of distinct values.
#[derive(Debug, Default)]
pub struct GroupedSamples {
    /// Group and value, in the order in which they were added.
    recent: Vec<(u32, i64)>,
    /// Entries of group, value and number of occurrences, in order.
    counted: Vec<(u32, i64, u32)>,
}

impl GroupedSamples {
    /// Least number of values that are counted at a time.
    const MIN_BUFFERED_VALUES: usize = 1 << 18;

    /// Room for so many.
    pub fn with_value_capacity(count: usize) -> Self {
        Self { recent: Vec::with_capacity(count.min(Self::MIN_BUFFERED_VALUES)), ..Self::default() }
    }

    /// Adds a value to a group. Groups are numbered from 0.
    pub fn push(&mut self, group: u32, value: i64) {
        // The larger of both, so that counting stays linear in the values.
        if self.recent.len() >= self.counted.len().max(Self::MIN_BUFFERED_VALUES) {
            self.count_new_values();
        }
        self.recent.push((group, value));
    }

    /// Counts the values that came since the last count.
    fn count_new_values(&mut self) {
        self.recent.sort_unstable();
        let mut old = std::mem::take(&mut self.counted).into_iter().peekable();
        let mut add = |(group, value, times): (u32, i64, u32)| match self.counted.last_mut() {
            Some((g, v, all)) if (*g, *v) == (group, value) => *all += times,
            _ => self.counted.push((group, value, times)),
        };
        for (group, value) in self.recent.drain(..) {
            while let Some(before) = old.next_if(|&(g, v, _)| (g, v) <= (group, value)) {
                add(before);
            }
            add((group, value, 1));
        }
        old.for_each(add);
    }

    /// Makes groups one: what each is from now on.
    pub fn merge_value_groups(&mut self, group_of: &[u32]) {
        self.recent.iter_mut().for_each(|(group, _)| *group = group_of[*group as usize]);
        for (group, ..) in &mut self.counted {
            *group = group_of[*group as usize];
        }
        self.counted.sort_unstable();
    }

    /// Returns the summary of each group.
    pub fn group_summaries(self, groups: usize) -> Vec<ValueSummary> {
        let samples = self.into_counted_values();
        (0u32..).take(groups).map(|group| samples.summary_of_group(group)).collect()
    }

    /// Sorts and counts all values that were added.
    pub fn into_counted_values(mut self) -> ValueCountsByGroup {
        self.count_new_values();
        ValueCountsByGroup { rows: self.counted }
    }
}

/// Values of many groups with their numbers of occurrences.
#[derive(Debug, Default)]
pub struct ValueCountsByGroup {
    /// Group, value and number of occurrences, in order.
    rows: Vec<(u32, i64, u32)>,
}

impl ValueCountsByGroup {
    /// Returns the groups that have values, in order.
    pub fn groups_with_values(&self) -> impl Iterator<Item = u32> {
        self.rows.chunk_by(|a, b| a.0 == b.0).map(|rows| rows[0].0)
    }

    pub fn summary_of_group(&self, group: u32) -> ValueSummary {
        let first = self.rows.partition_point(|row| row.0 < group);
        let own = &self.rows[first..];
        let own = &own[..own.partition_point(|row| row.0 == group)];
        ValueSummary::summary_of_sorted(|| own.iter().map(|&(_, value, times)| (value, times)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_summed_separately_for_each_group() {
        let mut samples = GroupedSamples::default();
        for (group, value) in [(1, 4), (0, 10), (1, 2), (1, 9), (1, 3)] {
            samples.push(group, value);
        }
        let groups = samples.group_summaries(3);
        assert_eq!(groups[0].count, 1);
        assert_eq!((groups[0].median, groups[0].deviation), (10.0, 0.0));
        assert_eq!((groups[1].count, groups[1].total, groups[1].min, groups[1].max), (4, 18, 2, 9));
        assert_eq!((groups[1].mean, groups[1].median), (4.5, 3.5));
        // Squared distances 0.25 + 6.25 + 20.25 + 2.25 = 29, by 3.
        assert!((groups[1].deviation - (29.0f64 / 3.0).sqrt()).abs() < 1e-12);
        assert_eq!(groups[2], ValueSummary::default());
    }

    #[test]
    fn a_sum_of_durations_that_overflows_is_the_largest_number() {
        let mut samples = GroupedSamples::default();
        (0..5).for_each(|_| samples.push(0, i64::MAX / 4));
        assert_eq!(samples.group_summaries(1)[0].total, i64::MAX);
    }

    #[test]
    fn counted_values_are_summed_like_single_values() {
        let mut samples = GroupedSamples::default();
        let values = [(0, 7), (1, 5), (0, 7), (2, 1), (0, 9), (1, 5), (0, 8), (1, 4), (2, 3)];
        for (group, value) in values {
            samples.push(group, value);
            samples.count_new_values();
        }
        assert_eq!(samples.counted.len(), 7, "{:?}", samples.counted);
        // Group 2 becomes group 0 in this test.
        samples.merge_value_groups(&[0, 1, 0]);
        let groups = samples.group_summaries(2);
        assert_eq!(groups[0], ValueSummary::new(&mut [7, 7, 9, 8, 1, 3]));
        assert_eq!((groups[0].count, groups[0].total, groups[0].median), (6, 35, 7.0));
        assert_eq!(groups[1], ValueSummary::new(&mut [5, 5, 4]));
        assert_eq!(groups[1].median, 5.0);
    }
}
