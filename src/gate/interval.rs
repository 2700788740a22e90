//! A conservative interval for the ratio of two times, from the medians of their process runs.
//!
//! This is the seam for better statistics: everything the verdict needs is [`Ratio`].

use serde::Serialize;

use crate::record::Samples;
use crate::stats::{Spread, median};

/// One side of a comparison.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Side {
    /// Median of the runs' medians, nanoseconds.
    pub center_ns: f64,
    /// Lower end, nanoseconds.
    pub low_ns: f64,
    /// Upper end, nanoseconds.
    pub high_ns: f64,
    /// Process runs.
    pub runs: usize,
    /// Median over the runs of the share of the host's CPU time that others took, at most 0.95; 0 where unknown.
    pub contention: f64,
}

impl Side {
    /// The range of the runs' medians. A single run shows nothing of the spread between runs: it gets `single_run`, or half its
    /// own relative interquartile range if that is wider, to either side.
    ///
    /// `runs` has at least one entry, and each at least one sample.
    pub fn of<'a>(runs: impl IntoIterator<Item = &'a Samples>, single_run: f64) -> Self {
        let runs: Vec<&Samples> = runs.into_iter().collect();
        let spreads: Vec<Spread> = runs.iter().map(|samples| Spread::of(&samples.per_launch_ns())).collect();
        let contention: Vec<f64> = runs.iter().map(|samples| samples.contention.unwrap_or(0.0).clamp(0.0, 0.95)).collect();
        let medians: Vec<f64> = spreads.iter().map(|spread| spread.median).collect();
        let center_ns = median(&medians);
        let (low_ns, high_ns) = if let [only] = spreads[..] {
            let half_width = single_run.max(only.relative());
            (center_ns * (1.0 - half_width).max(0.01), center_ns * (1.0 + half_width))
        } else {
            (medians.iter().copied().fold(f64::INFINITY, f64::min), medians.iter().copied().fold(0.0, f64::max))
        };
        Self { center_ns, low_ns, high_ns, runs: spreads.len(), contention: median(&contention) }
    }
}

/// Head over base: above 1 is slower.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ratio {
    /// Of the medians.
    pub center: f64,
    /// Least that the intervals allow.
    pub low: f64,
    /// Most that the intervals allow.
    pub high: f64,
}

impl Ratio {
    /// The ratio of two sides, with the worst that their intervals allow. Where others took more of the CPU on one side than on
    /// the other, that side may be slower by no more than their doing: with the share c taken, a time grows by 1 / (1 - c).
    pub fn of(head: &Side, base: &Side) -> Self {
        let more = head.contention - base.contention;
        Self {
            center: head.center_ns / base.center_ns,
            low: head.low_ns / base.high_ns * (1.0 - more.max(0.0)),
            high: head.high_ns / base.low_ns / (1.0 - (-more).max(0.0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(times: &[f64]) -> Samples {
        Samples { launches: vec![2; times.len()], elapsed_ns: times.iter().map(|time| 2.0 * time).collect(), ..Samples::default() }
    }

    #[test]
    fn a_single_run_gets_the_allowance_or_its_own_spread() {
        let steady = Side::of([&run(&[100.0, 100.0, 101.0])], 0.1);
        assert_eq!((steady.center_ns, steady.runs), (100.0, 1));
        assert!((steady.low_ns - 90.0).abs() < 1e-9 && (steady.high_ns - 110.0).abs() < 1e-9);
        let noisy = Side::of([&run(&[50.0, 100.0, 150.0])], 0.1);
        assert!((noisy.low_ns - 75.0).abs() < 1e-9 && (noisy.high_ns - 125.0).abs() < 1e-9);
    }

    #[test]
    fn several_runs_span_their_medians() {
        let side = Side::of([&run(&[100.0]), &run(&[104.0]), &run(&[98.0])], 0.1);
        assert_eq!((side.low_ns, side.center_ns, side.high_ns, side.runs), (98.0, 100.0, 104.0, 3));
        let ratio = Ratio::of(&side, &side);
        assert!(ratio.low < 1.0 && ratio.center == 1.0 && ratio.high > 1.0);
    }

    #[test]
    fn load_on_one_side_widens_the_interval_towards_its_excuse() {
        let loaded = |contention| Side::of([&Samples { contention: Some(contention), ..run(&[100.0]) }], 0.1);
        let ratio = |head, base| Ratio::of(&loaded(head), &loaded(base));
        let quiet = ratio(0.0, 0.0);
        assert_eq!(ratio(0.3, 0.3), quiet);
        assert!((ratio(0.3, 0.1).low / quiet.low - 0.8).abs() < 1e-9 && ratio(0.3, 0.1).high == quiet.high);
        assert!((ratio(0.1, 0.3).high / quiet.high - 1.25).abs() < 1e-9 && ratio(0.1, 0.3).low == quiet.low);
    }
}
