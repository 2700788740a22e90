//! Summarises values, such as durations, by group.

/// Count, total, mean, median, extremes and standard deviation of values in nanoseconds or bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ValueSummary {
    /// Number of values.
    pub value_count: usize,
    /// Sum of the values; limited to the largest `i64` on overflow.
    pub total: i64,
    pub mean: f64,
    /// Median of the values; for an even number of values, the mean of the two middle values.
    pub median: f64,
    /// Smallest value.
    pub min: i64,
    /// Largest value.
    pub max: i64,
    /// Sample standard deviation of the values; 0 for a single value.
    pub standard_deviation: f64,
}

impl ValueSummary {
    /// Summarises values; sorts the slice in place.
    pub fn from_values_sorted_in_place(values: &mut [i64]) -> Self {
        values.sort_unstable();
        Self::from_sorted_values_and_counts(|| values.iter().map(|&value| (value, 1)))
    }

    /// Summarises sorted values, each with the number of its occurrences.
    #[allow(clippy::cast_precision_loss)]
    fn from_sorted_values_and_counts<I: Iterator<Item = (i64, u32)>>(
        values: impl Fn() -> I,
    ) -> Self {
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
        // `lower` and `upper` become the two middle values, whose mean is the median.
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
        Self { value_count: count, total, mean, median, min, max, standard_deviation: deviation }
    }
}

/// Collects values of many groups for summaries. Equal values of a group are merged into one entry
/// with a count from time to time, so that memory grows with the number of distinct values.
#[derive(Debug, Default)]
pub struct ValuesByGroup {
    /// Group and value of each value that was added since the last merge of equal values.
    recent_groups_and_values: Vec<(u32, i64)>,
    /// Sorted entries of group, value and number of occurrences.
    group_value_count_entries: Vec<(u32, i64, u32)>,
}

impl ValuesByGroup {
    /// Minimum number of added values before equal values are merged.
    const MIN_VALUES_BEFORE_MERGE: usize = 1 << 18;

    /// Creates an empty collection with memory reserved for `count` values.
    pub fn with_capacity_for_values(count: usize) -> Self {
        Self {
            recent_groups_and_values: Vec::with_capacity(count.min(Self::MIN_VALUES_BEFORE_MERGE)),
            ..Self::default()
        }
    }

    /// Adds a value to a group. Group numbers start at 0.
    pub fn push_value_of_group(&mut self, group: u32, value: i64) {
        // The threshold grows with the number of entries, so that the total work of merging stays
        // linear.
        if self.recent_groups_and_values.len()
            >= self.group_value_count_entries.len().max(Self::MIN_VALUES_BEFORE_MERGE)
        {
            self.merge_equal_values();
        }
        self.recent_groups_and_values.push((group, value));
    }

    /// Merges the values that were added since the last merge into the sorted entries with counts.
    fn merge_equal_values(&mut self) {
        self.recent_groups_and_values.sort_unstable();
        let mut old = std::mem::take(&mut self.group_value_count_entries).into_iter().peekable();
        let mut add = |(group, value, times): (u32, i64, u32)| match self
            .group_value_count_entries
            .last_mut()
        {
            Some((g, v, all)) if (*g, *v) == (group, value) => *all += times,
            _ => self.group_value_count_entries.push((group, value, times)),
        };
        for (group, value) in self.recent_groups_and_values.drain(..) {
            while let Some(before) = old.next_if(|&(g, v, _)| (g, v) <= (group, value)) {
                add(before);
            }
            add((group, value, 1));
        }
        old.for_each(add);
    }

    /// Renumbers the groups: the values of group g become values of group `group_of[g]`, so groups
    /// can be merged.
    pub fn renumber_and_merge_groups(&mut self, group_of: &[u32]) {
        self.recent_groups_and_values
            .iter_mut()
            .for_each(|(group, _)| *group = group_of[*group as usize]);
        for (group, ..) in &mut self.group_value_count_entries {
            *group = group_of[*group as usize];
        }
        self.group_value_count_entries.sort_unstable();
    }

    /// Returns the summary of each of the first `groups` groups.
    pub fn summaries_of_groups(self, groups: usize) -> Vec<ValueSummary> {
        let samples = self.into_sorted_values_with_counts();
        (0u32..).take(groups).map(|group| samples.summary_of_group(group)).collect()
    }

    /// Merges all added values and returns the sorted entries with counts.
    pub fn into_sorted_values_with_counts(mut self) -> SortedValuesByGroup {
        self.merge_equal_values();
        SortedValuesByGroup { group_value_count_entries: self.group_value_count_entries }
    }
}

/// Sorted values of many groups, each with the number of its occurrences.
#[derive(Debug, Default)]
pub struct SortedValuesByGroup {
    /// Entries of group, value and number of occurrences, sorted by group and value.
    group_value_count_entries: Vec<(u32, i64, u32)>,
}

impl SortedValuesByGroup {
    /// Returns the groups that have at least one value, in ascending order.
    pub fn groups_with_values(&self) -> impl Iterator<Item = u32> {
        self.group_value_count_entries.chunk_by(|a, b| a.0 == b.0).map(|rows| rows[0].0)
    }

    pub fn summary_of_group(&self, group: u32) -> ValueSummary {
        let first = self.group_value_count_entries.partition_point(|row| row.0 < group);
        let own = &self.group_value_count_entries[first..];
        let own = &own[..own.partition_point(|row| row.0 == group)];
        ValueSummary::from_sorted_values_and_counts(|| {
            own.iter().map(|&(_, value, times)| (value, times))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_summarised_separately_for_each_group() {
        let mut samples = ValuesByGroup::default();
        for (group, value) in [(1, 4), (0, 10), (1, 2), (1, 9), (1, 3)] {
            samples.push_value_of_group(group, value);
        }
        let groups = samples.summaries_of_groups(3);
        assert_eq!(groups[0].value_count, 1);
        assert_eq!((groups[0].median, groups[0].standard_deviation), (10.0, 0.0));
        assert_eq!(
            (groups[1].value_count, groups[1].total, groups[1].min, groups[1].max),
            (4, 18, 2, 9)
        );
        assert_eq!((groups[1].mean, groups[1].median), (4.5, 3.5));
        // The squared distances from the mean are 0.25 + 6.25 + 20.25 + 2.25 = 29, divided by n - 1
        // = 3.
        assert!((groups[1].standard_deviation - (29.0f64 / 3.0).sqrt()).abs() < 1e-12);
        assert_eq!(groups[2], ValueSummary::default());
    }

    #[test]
    fn a_total_that_overflows_becomes_the_largest_i64() {
        let mut samples = ValuesByGroup::default();
        (0..5).for_each(|_| samples.push_value_of_group(0, i64::MAX / 4));
        assert_eq!(samples.summaries_of_groups(1)[0].total, i64::MAX);
    }

    #[test]
    fn values_with_counts_are_summarised_like_single_values() {
        let mut samples = ValuesByGroup::default();
        let values = [(0, 7), (1, 5), (0, 7), (2, 1), (0, 9), (1, 5), (0, 8), (1, 4), (2, 3)];
        for (group, value) in values {
            samples.push_value_of_group(group, value);
            samples.merge_equal_values();
        }
        assert_eq!(
            samples.group_value_count_entries.len(),
            7,
            "{:?}",
            samples.group_value_count_entries
        );
        // The test renumbers group 2 to group 0.
        samples.renumber_and_merge_groups(&[0, 1, 0]);
        let groups = samples.summaries_of_groups(2);
        assert_eq!(groups[0], ValueSummary::from_values_sorted_in_place(&mut [7, 7, 9, 8, 1, 3]));
        assert_eq!((groups[0].value_count, groups[0].total, groups[0].median), (6, 35, 7.0));
        assert_eq!(groups[1], ValueSummary::from_values_sorted_in_place(&mut [5, 5, 4]));
        assert_eq!(groups[1].median, 5.0);
    }
}
