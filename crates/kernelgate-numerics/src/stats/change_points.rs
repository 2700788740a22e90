//! Positions at which the level of a sequence changed, such as process medians of one case over
//! commits.
//!
//! The sequence is cut so that the sum over its segments of |value − the segment's median|, in
//! units of the noise, plus [`MIN_CUT_GAIN`] a cut is least: the objective of PELT with the cost of
//! a Laplace distribution, minimised exactly. The detection uses medians and absolute deviations,
//! because process medians have outliers, which a mean or a square would follow. The rule needs no
//! threshold in per cent, and no assumption about the place of a change. A permutation test
//! (E-divisive) needs twenty values before its smallest p value is small enough to be tested after
//! every run, and histories stay shorter than that for a long time.
//!
//! This module does not use commits or times. Callers pass logarithms of values if changes are
//! relative.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{median, normal, quantile};

/// Minimum gain of a cut, in standard deviations of the noise.
pub const MIN_CUT_GAIN: f64 = 9.5;
/// Smallest number of values of a segment.
pub const MIN_SEGMENT_VALUES: usize = 4;
/// Minimum number of values for any result.
pub const MIN_SEQUENCE_VALUES: usize = 8;
/// Maximum length of a sequence: the time grows with its square.
pub const MAX_SEQUENCE_VALUES: usize = 2000;
/// Distances at which values are compared to estimate the noise.
const NOISE_LAGS: [usize; 4] = [1, 2, 4, 8];
/// The median of |a − b| of two independent normal values, in standard deviations.
const MEDIAN_NORMAL_DIFFERENCE: f64 = 0.953_872_552_417_893;
/// Values of a segment that the size of a change is estimated from.
const MAX_VALUES_FOR_CHANGE_SIZE: usize = 200;

/// A detected change of the level of a sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChangePoint {
    /// Index of the first value after the change of the level.
    pub at: usize,
    /// Level after the change minus the level before: the Hodges-Lehmann estimate.
    pub shift: f64,
    /// Lower end of the 95 % interval of the shift.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Gain of the cut, in standard deviations of the noise; at least [`MIN_CUT_GAIN`].
    pub gain: f64,
    /// 1 minus the probability that values in random order are divided as clearly anywhere between
    /// the neighbouring changes: a rank-sum test (its normal approximation is conservative this far
    /// in the tail), times the number of places.
    pub confidence: f64,
}

/// The changes of a sequence of at most [`MAX_SEQUENCE_VALUES`] finite values, in order; smaller
/// ones than `smallest` are dropped. `least_noise` is a lower bound of the noise's standard
/// deviation, because values may be rounded, or repeat by chance.
pub fn change_points(values: &[f64], smallest: f64, least_noise: f64) -> Vec<ChangePoint> {
    if values.len() < MIN_SEQUENCE_VALUES {
        return Vec::new();
    }
    let noise = noise_deviation(values).max(least_noise);
    let ranked = RankedSequence::new(values);
    let mut cuts = ranked.cheapest_segment_starts(noise * MIN_CUT_GAIN);
    loop {
        let found = describe_changes(&ranked, values, &cuts, noise);
        let shift = |change: &ChangePoint| change.shift.abs();
        let least = found.iter().min_by(|a, b| shift(a).total_cmp(&shift(b)));
        match least {
            Some(least) if shift(least) < smallest => cuts.retain(|at| *at != least.at),
            _ => return found,
        }
    }
}

/// Standard deviation of the noise from differences of values that are near each other, which a
/// change of the level hardly touches: the largest over several distances, so that a level that
/// wanders counts as noise.
pub fn noise_deviation(values: &[f64]) -> f64 {
    let of_lag = |lag: usize| {
        let differences: Vec<f64> =
            values.windows(lag + 1).map(|window| (window[lag] - window[0]).abs()).collect();
        median(&differences)
    };
    let lags = NOISE_LAGS.into_iter().filter(|lag| *lag == 1 || lag * 4 <= values.len());
    lags.map(of_lag).fold(0.0, f64::max) / MEDIAN_NORMAL_DIFFERENCE
}

/// Describes each change by the segments of the sequence before and after it.
fn describe_changes(
    ranked: &RankedSequence,
    values: &[f64],
    cuts: &[usize],
    noise: f64,
) -> Vec<ChangePoint> {
    let edges: Vec<usize> =
        [0].into_iter().chain(cuts.iter().copied()).chain([values.len()]).collect();
    let each = edges.windows(3).map(|edge| {
        let (from, at, to) = (edge[0], edge[1], edge[2]);
        let gain = ranked.segment_cost(from, to)
            - ranked.segment_cost(from, at)
            - ranked.segment_cost(at, to);
        let before = &values[from.max(at.saturating_sub(MAX_VALUES_FOR_CHANGE_SIZE))..at];
        let after = &values[at..to.min(at + MAX_VALUES_FOR_CHANGE_SIZE)];
        let (differences, deviation) = all_pair_differences(before, after);
        let pairs = differences.len() as f64;
        let below = (pairs / 2.0 - 1.96 * deviation).floor().max(0.0) as usize;
        let rising = differences.iter().filter(|difference| **difference > 0.0).count() as f64;
        let falling = differences.iter().filter(|difference| **difference < 0.0).count() as f64;
        let p = 2.0 * normal::normal_cdf(-(rising - falling).abs() / 2.0 / deviation);
        ChangePoint {
            at,
            shift: quantile(&differences, 0.5),
            low: differences[below],
            high: differences[differences.len() - 1 - below],
            gain: gain / noise,
            confidence: 1.0 - (p * (to - from) as f64).min(1.0),
        }
    });
    each.collect()
}

/// All differences between a value after and a value before the change, sorted, and the standard
/// deviation of the number of positive differences if nothing changed (Mann and Whitney).
fn all_pair_differences(before: &[f64], after: &[f64]) -> (Vec<f64>, f64) {
    let mut differences: Vec<f64> =
        after.iter().flat_map(|after| before.iter().map(move |before| after - before)).collect();
    differences.sort_by(f64::total_cmp);
    let (m, n) = (before.len() as f64, after.len() as f64);
    (differences, (m * n * (m + n + 1.0) / 12.0).sqrt())
}

/// A sequence as ranks among its sorted values.
struct RankedSequence {
    sorted: Vec<f64>,
    ranks: Vec<usize>,
}

impl RankedSequence {
    fn new(values: &[f64]) -> Self {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
        let mut ranks = vec![0; values.len()];
        order.iter().enumerate().for_each(|(rank, index)| ranks[*index] = rank);
        Self { sorted: order.iter().map(|index| values[*index]).collect(), ranks }
    }

    /// Sum of |value − median| from an index up to before another.
    fn segment_cost(&self, from: usize, to: usize) -> f64 {
        self.segment_costs_from(from).nth(to - from - 1).unwrap_or(0.0)
    }

    /// Costs of the segments of 1, 2, … values that begin at index `from`.
    fn segment_costs_from(&self, from: usize) -> impl Iterator<Item = f64> {
        let mut halves = RankHalves::default();
        self.ranks[from..].iter().map(move |rank| halves.add(*rank, &self.sorted))
    }

    /// The indices at which segments begin, the first apart, of the cheapest division.
    fn cheapest_segment_starts(&self, penalty: f64) -> Vec<usize> {
        let count = self.ranks.len();
        // For each index: the cost of the cheapest division of the values before it, and the start
        // of its last segment.
        let mut cheapest = vec![(f64::INFINITY, 0); count + 1];
        cheapest[0] = (-penalty, 0);
        for from in 0..=count - MIN_SEGMENT_VALUES {
            let (before, _) = cheapest[from];
            if before.is_infinite() {
                continue;
            }
            for (length, cost) in
                self.segment_costs_from(from).enumerate().skip(MIN_SEGMENT_VALUES - 1)
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

/// The lower and upper half of a growing set of ranks.
#[derive(Default)]
struct RankHalves {
    low: BinaryHeap<usize>,
    high: BinaryHeap<Reverse<usize>>,
    low_sum: f64,
    high_sum: f64,
}

impl RankHalves {
    /// Adds a value to the segment; returns the sum of |value − median| of all its values so far.
    fn add(&mut self, rank: usize, sorted: &[f64]) -> f64 {
        self.low.push(rank);
        let highest = self.low.pop().expect("one was just added");
        self.low_sum += sorted[rank] - sorted[highest];
        self.high.push(Reverse(highest));
        self.high_sum += sorted[highest];
        if self.high.len() > self.low.len() {
            let Reverse(lowest) = self.high.pop().expect("it has more than the other");
            self.high_sum -= sorted[lowest];
            self.low.push(lowest);
            self.low_sum += sorted[lowest];
        }
        let odd = self.low.len() > self.high.len();
        let middle = self.low.peek().map_or(0.0, |rank| sorted[*rank]);
        self.high_sum - self.low_sum + if odd { middle } else { 0.0 }
    }
}

#[cfg(test)]
mod tests;
