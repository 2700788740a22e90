//! Sums of groups of durations.

/// What is said of a group of values, in nanoseconds or bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Summary {
    /// How many values.
    pub count: usize,
    /// Their sum.
    pub total: i64,
    /// Their mean.
    pub mean: f64,
    /// Their median; of an even number the mean of the two in the middle.
    pub median: f64,
    /// The smallest.
    pub min: i64,
    /// The largest.
    pub max: i64,
    /// Their sample standard deviation; 0 of a single value.
    pub deviation: f64,
}

impl Summary {
    /// The summary of some values, which change their order.
    #[allow(clippy::cast_precision_loss)]
    pub fn of(values: &mut [i64]) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        let count = values.len();
        let total: i64 = values.iter().sum();
        let mean = total as f64 / count as f64;
        let squares: f64 = values.iter().map(|&value| (value as f64 - mean).powi(2)).sum();
        let deviation = if count > 1 { (squares / (count - 1) as f64).sqrt() } else { 0.0 };
        let (min, max) = values
            .iter()
            .fold((i64::MAX, i64::MIN), |(min, max), &value| (min.min(value), max.max(value)));
        let (below, &mut upper, _) = values.select_nth_unstable(count / 2);
        let median = if count % 2 == 1 {
            upper as f64
        } else {
            let lower = below.iter().max().copied().unwrap_or(upper);
            (lower as f64 + upper as f64) / 2.0
        };
        Self { count, total, mean, median, min, max, deviation }
    }
}

/// Values of many groups, in two columns: a value costs 12 bytes until it is summed.
#[derive(Debug, Default)]
pub struct Samples {
    groups: Vec<u32>,
    values: Vec<i64>,
}

impl Samples {
    /// Room for so many.
    pub fn with_capacity(count: usize) -> Self {
        Self { groups: Vec::with_capacity(count), values: Vec::with_capacity(count) }
    }

    /// A value of a group. Groups are numbered from 0.
    pub fn push(&mut self, group: u32, value: i64) {
        self.groups.push(group);
        self.values.push(value);
    }

    /// The summary of each group.
    pub fn summaries(self, groups: usize) -> Vec<Summary> {
        let mut bounds = vec![0usize; groups + 1];
        self.groups.iter().for_each(|&group| bounds[group as usize + 1] += 1);
        for index in 1..bounds.len() {
            bounds[index] += bounds[index - 1];
        }
        let mut sorted = vec![0i64; self.values.len()];
        let mut next = bounds.clone();
        for (&group, &value) in self.groups.iter().zip(&self.values) {
            sorted[next[group as usize]] = value;
            next[group as usize] += 1;
        }
        bounds.windows(2).map(|bound| Summary::of(&mut sorted[bound[0]..bound[1]])).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_summed_apart() {
        let mut samples = Samples::default();
        for (group, value) in [(1, 4), (0, 10), (1, 2), (1, 9), (1, 3)] {
            samples.push(group, value);
        }
        let of = samples.summaries(3);
        assert_eq!(of[0].count, 1);
        assert_eq!((of[0].median, of[0].deviation), (10.0, 0.0));
        assert_eq!((of[1].count, of[1].total, of[1].min, of[1].max), (4, 18, 2, 9));
        assert_eq!((of[1].mean, of[1].median), (4.5, 3.5));
        // Squared distances 0.25 + 6.25 + 20.25 + 2.25 = 29, by 3.
        assert!((of[1].deviation - (29.0f64 / 3.0).sqrt()).abs() < 1e-12);
        assert_eq!(of[2], Summary::default());
    }
}
