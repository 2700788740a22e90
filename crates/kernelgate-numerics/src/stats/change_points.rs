//! Detects where the level of a sequence of values changed, for example the process medians of one
//! benchmark case over commits.
//!
//! The cuts minimise the sum of |value − its segment's median| / noise plus
//! [`MIN_CUT_GAIN_IN_NOISE_DEVIATIONS`] for each cut: PELT's objective with a Laplace cost,
//! minimised exactly. The detection uses medians and absolute deviations, because process medians
//! have outliers, which means and squares would follow. The detection needs no threshold in per
//! cent, and does not assume where a change is. A permutation test (E-divisive) would need twenty
//! values before a p value is small enough for testing after every run, and most histories are
//! shorter.
//!
//! This module sees only values, not the commits or the times that they belong to. Callers pass
//! logarithms of the values to detect relative changes.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{median, normal, quantile_by_interpolation};

/// A cut of the sequence is made only if it lowers the sum of absolute deviations by this many
/// standard deviations of the noise.
pub const MIN_CUT_GAIN_IN_NOISE_DEVIATIONS: f64 = 9.5;
/// Smallest number of values between two detected changes, and before the first and after the last.
pub const MIN_VALUES_BETWEEN_LEVEL_CHANGES: usize = 4;
/// Smallest number of values of a sequence in which changes are searched; shorter sequences have no
/// changes.
pub const MIN_VALUES_TO_SEARCH_LEVEL_CHANGES: usize = 8;
/// Largest number of values of a sequence that callers pass: the time grows with the square of the
/// length.
pub const MAX_VALUES_TO_SEARCH_LEVEL_CHANGES: usize = 2000;
/// Distances, in values, between the pairs of values whose differences estimate the noise.
const NOISE_COMPARISON_DISTANCES: [usize; 4] = [1, 2, 4, 8];
/// Median of |a − b| for two independent normal values a and b, in units of their standard
/// deviation.
const MEDIAN_ABSOLUTE_NORMAL_DIFFERENCE: f64 = 0.953_872_552_417_893;
/// Largest number of values on each side of a change that its size is estimated from.
const MAX_VALUES_PER_SIDE_FOR_CHANGE_SIZE: usize = 200;

/// A detected change of the level of a sequence, with its size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DetectedLevelChange {
    /// Index of the first value after the change of the level.
    pub first_index_after_change: usize,
    /// Level after the change minus the level before: the Hodges-Lehmann estimate, in the unit of
    /// the values.
    pub level_shift: f64,
    /// Lower end of the 95 % confidence interval of the shift.
    pub shift_lower_bound: f64,
    /// Upper end.
    pub shift_upper_bound: f64,
    /// Decrease of the sum of absolute deviations by this cut, in standard deviations of the noise;
    /// at least [`MIN_CUT_GAIN_IN_NOISE_DEVIATIONS`].
    pub cut_gain_in_noise_deviations: f64,
    /// 1 minus the p value of a rank-sum test (normal approximation) between the neighbouring
    /// changes, where p is multiplied by the number of possible places.
    pub rank_sum_confidence: f64,
}

/// Returns the level changes of a sequence of finite values, in order; changes smaller than
/// `smallest` are dropped. The noise's standard deviation is taken as at least `least_noise`,
/// because values may be rounded, or be equal by chance.
pub fn detect_level_changes(
    values: &[f64],
    smallest: f64,
    least_noise: f64,
) -> Vec<DetectedLevelChange> {
    if values.len() < MIN_VALUES_TO_SEARCH_LEVEL_CHANGES {
        return Vec::new();
    }
    let noise = noise_standard_deviation(values).max(least_noise);
    let ranked = SequenceWithRanks::rank_values(values);
    let mut cuts =
        ranked.start_indices_of_cheapest_segments(noise * MIN_CUT_GAIN_IN_NOISE_DEVIATIONS);
    loop {
        let found = measure_level_changes(&ranked, values, &cuts, noise);
        let shift = |change: &DetectedLevelChange| change.level_shift.abs();
        let least = found.iter().min_by(|a, b| shift(a).total_cmp(&shift(b)));
        match least {
            Some(least) if shift(least) < smallest => {
                cuts.retain(|at| *at != least.first_index_after_change)
            }
            _ => return found,
        }
    }
}

/// Estimates the noise's standard deviation from differences of nearby values, which a level change
/// hardly affects: the largest over several distances, so that drift counts as noise.
pub fn noise_standard_deviation(values: &[f64]) -> f64 {
    let of_lag = |lag: usize| {
        let differences: Vec<f64> =
            values.windows(lag + 1).map(|window| (window[lag] - window[0]).abs()).collect();
        median(&differences)
    };
    let lags =
        NOISE_COMPARISON_DISTANCES.into_iter().filter(|lag| *lag == 1 || lag * 4 <= values.len());
    lags.map(of_lag).fold(0.0, f64::max) / MEDIAN_ABSOLUTE_NORMAL_DIFFERENCE
}

/// Computes shift, interval, gain and confidence of each level change from the segments before and
/// after the change.
fn measure_level_changes(
    ranked: &SequenceWithRanks,
    values: &[f64],
    cuts: &[usize],
    noise: f64,
) -> Vec<DetectedLevelChange> {
    let edges: Vec<usize> =
        [0].into_iter().chain(cuts.iter().copied()).chain([values.len()]).collect();
    let each = edges.windows(3).map(|edge| {
        let (from, at, to) = (edge[0], edge[1], edge[2]);
        let gain = ranked.absolute_deviation_sum(from, to)
            - ranked.absolute_deviation_sum(from, at)
            - ranked.absolute_deviation_sum(at, to);
        let before = &values[from.max(at.saturating_sub(MAX_VALUES_PER_SIDE_FOR_CHANGE_SIZE))..at];
        let after = &values[at..to.min(at + MAX_VALUES_PER_SIDE_FOR_CHANGE_SIZE)];
        let (differences, deviation) = sorted_differences_and_rank_sum_deviation(before, after);
        let pairs = differences.len() as f64;
        let below = (pairs / 2.0 - 1.96 * deviation).floor().max(0.0) as usize;
        let rising = differences.iter().filter(|difference| **difference > 0.0).count() as f64;
        let falling = differences.iter().filter(|difference| **difference < 0.0).count() as f64;
        let p = 2.0 * normal::standard_normal_cdf(-(rising - falling).abs() / 2.0 / deviation);
        DetectedLevelChange {
            first_index_after_change: at,
            level_shift: quantile_by_interpolation(&differences, 0.5),
            shift_lower_bound: differences[below],
            shift_upper_bound: differences[differences.len() - 1 - below],
            cut_gain_in_noise_deviations: gain / noise,
            rank_sum_confidence: 1.0 - (p * (to - from) as f64).min(1.0),
        }
    });
    each.collect()
}

/// Returns all differences (value after minus value before a change), sorted, and the standard
/// deviation of Mann and Whitney's statistic if nothing changed.
fn sorted_differences_and_rank_sum_deviation(before: &[f64], after: &[f64]) -> (Vec<f64>, f64) {
    let mut differences: Vec<f64> =
        after.iter().flat_map(|after| before.iter().map(move |before| after - before)).collect();
    differences.sort_by(f64::total_cmp);
    let (m, n) = (before.len() as f64, after.len() as f64);
    (differences, (m * n * (m + n + 1.0) / 12.0).sqrt())
}

/// The values of a sequence sorted, and the rank of each value in sequence order.
struct SequenceWithRanks {
    sorted_values: Vec<f64>,
    rank_of_value: Vec<usize>,
}

impl SequenceWithRanks {
    fn rank_values(values: &[f64]) -> Self {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
        let mut ranks = vec![0; values.len()];
        order.iter().enumerate().for_each(|(rank, index)| ranks[*index] = rank);
        Self {
            sorted_values: order.iter().map(|index| values[*index]).collect(),
            rank_of_value: ranks,
        }
    }

    /// Sum of |value − median| over the segment that begins at index `from` and ends before index
    /// `to`.
    fn absolute_deviation_sum(&self, from: usize, to: usize) -> f64 {
        self.absolute_deviation_sums_from(from).nth(to - from - 1).unwrap_or(0.0)
    }

    /// Sums of |value − median| of the segments of 1, 2, … values that begin at index `from`.
    fn absolute_deviation_sums_from(&self, from: usize) -> impl Iterator<Item = f64> {
        let mut halves = RunningMedianHalves::default();
        self.rank_of_value[from..]
            .iter()
            .map(move |rank| halves.add_rank_and_sum_deviations(*rank, &self.sorted_values))
    }

    /// Returns the start indices, except 0, of the segments of the division with the least cost;
    /// each cut costs `penalty`.
    fn start_indices_of_cheapest_segments(&self, penalty: f64) -> Vec<usize> {
        let count = self.rank_of_value.len();
        // For each index: the cost of the cheapest division of the values before the index, and the
        // start of that division's last segment.
        let mut cheapest = vec![(f64::INFINITY, 0); count + 1];
        cheapest[0] = (-penalty, 0);
        for from in 0..=count - MIN_VALUES_BETWEEN_LEVEL_CHANGES {
            let (before, _) = cheapest[from];
            if before.is_infinite() {
                continue;
            }
            for (length, cost) in self
                .absolute_deviation_sums_from(from)
                .enumerate()
                .skip(MIN_VALUES_BETWEEN_LEVEL_CHANGES - 1)
            {
                let best = &mut cheapest[from + length + 1];
                if before + cost + penalty < best.0 {
                    *best = (before + cost + penalty, from);
                }
            }
        }
        let last = std::iter::successors(Some(cheapest[count].1), |at| Some(cheapest[*at].1));
        let mut cuts: Vec<usize> = last.take_while(|at| *at > 0).collect();
        cuts.reverse();
        cuts
    }
}

/// The ranks of a growing segment, divided at its median into a lower and an upper half, with the
/// sum of each half's values.
#[derive(Default)]
struct RunningMedianHalves {
    lower_half_ranks: BinaryHeap<usize>,
    upper_half_ranks: BinaryHeap<Reverse<usize>>,
    lower_half_sum: f64,
    upper_half_sum: f64,
}

impl RunningMedianHalves {
    /// Adds a value by its rank; returns the sum of |value − median| of all values that were added
    /// so far.
    fn add_rank_and_sum_deviations(&mut self, rank: usize, sorted: &[f64]) -> f64 {
        self.lower_half_ranks.push(rank);
        let highest = self.lower_half_ranks.pop().expect("one was just added");
        self.lower_half_sum += sorted[rank] - sorted[highest];
        self.upper_half_ranks.push(Reverse(highest));
        self.upper_half_sum += sorted[highest];
        if self.upper_half_ranks.len() > self.lower_half_ranks.len() {
            let Reverse(lowest) = self.upper_half_ranks.pop().expect("it has more than the other");
            self.upper_half_sum -= sorted[lowest];
            self.lower_half_ranks.push(lowest);
            self.lower_half_sum += sorted[lowest];
        }
        let odd = self.lower_half_ranks.len() > self.upper_half_ranks.len();
        let middle = self.lower_half_ranks.peek().map_or(0.0, |rank| sorted[*rank]);
        self.upper_half_sum - self.lower_half_sum + if odd { middle } else { 0.0 }
    }
}

#[cfg(test)]
mod tests;
