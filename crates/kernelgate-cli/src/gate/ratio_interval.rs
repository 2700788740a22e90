//! A conservative interval for the ratio of two times, from the medians of their process runs.
//!
//! Better statistics would replace this module: the verdict needs only [`TimeRatio`].

use serde::{Deserialize, Serialize};

use kernelgate::record::CaseRun;
use kernelgate::stats::median;

/// Relative half-width of the confidence interval assumed for a single run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SingleRunSpread {
    /// Assumed half-width of the confidence interval of a single run, as a share of its median. A
    /// run whose own samples spread more gets a wider interval.
    pub relative: f64,
    /// Source of the half-width.
    pub from: SpreadSource,
}

/// Source of the assumed spread between runs of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpreadSource {
    /// A spread that the policy assumes, because none was measured.
    Assumed,
    /// Several runs of earlier code, which the baseline keeps.
    EarlierRuns,
    /// The spread comes from the calibration of this device.
    Calibration,
}

/// The times of one side of a comparison.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SideTimeInterval {
    /// Median of the runs' median times, nanoseconds.
    pub center_ns: f64,
    /// Lower end of the time's interval, nanoseconds.
    pub low_ns: f64,
    /// Upper end of the time's interval, nanoseconds.
    pub high_ns: f64,
    /// Number of process runs.
    pub runs: usize,
    /// Half the range of the runs' medians, relative to their median; `None` with one run.
    pub spread: Option<f64>,
    /// Median over the runs of the share of the host's CPU time that co-running processes took, at
    /// most 0.95; 0 where unknown.
    pub contention: f64,
}

impl SideTimeInterval {
    /// The interval of several runs is the range of their median times. A single run shows nothing
    /// of the spread between runs: it gets `single_run`, or half its own relative interquartile
    /// range if that is wider, to either side.
    ///
    /// If contention on the host matters (`contended`) and took the share c of the CPU time, the
    /// lower end is reduced by the factor (1 - c), because the run would have been that much
    /// shorter without it. Equal contention on both sides does not cancel, because the same load
    /// slows one run more than the next.
    ///
    /// The list `runs` must have at least one entry.
    pub fn ratio_from_runs<'a>(
        runs: impl IntoIterator<Item = &'a CaseRun>,
        single_run: f64,
        contended: bool,
    ) -> Self {
        let runs: Vec<&CaseRun> = runs.into_iter().collect();
        let shares: Vec<f64> = runs
            .iter()
            .map(|run| {
                run.conditions.contention.filter(|_| contended).unwrap_or(0.0).clamp(0.0, 0.95)
            })
            .collect();
        let medians: Vec<f64> = runs.iter().map(|run| run.median_ns).collect();
        let center_ns = median(&medians);
        let half_width = if let [only] = runs[..] { single_run.max(only.spread) } else { 0.0 };
        let highest = medians.iter().copied().fold(0.0, f64::max);
        let lowest = medians.iter().copied().fold(f64::INFINITY, f64::min);
        let lows = medians
            .iter()
            .zip(&shares)
            .map(|(median, share)| median * (1.0 - half_width).max(0.01) * (1.0 - share));
        Self {
            center_ns,
            low_ns: lows.fold(f64::INFINITY, f64::min),
            high_ns: highest * (1.0 + half_width),
            runs: runs.len(),
            spread: (runs.len() > 1).then(|| (highest - lowest) / (2.0 * center_ns)),
            contention: median(&shares),
        }
    }
}

/// Returns the time of the head divided by that of the base, with an interval: above 1 is slower.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TimeRatio {
    /// Ratio of the medians.
    pub center: f64,
    /// Smallest time ratio that the intervals allow.
    pub low: f64,
    /// Largest time ratio that the intervals allow.
    pub high: f64,
}

impl TimeRatio {
    /// The ratio of two sides' times, with the extremes that their intervals allow.
    pub fn from_side_times(head: &SideTimeInterval, base: &SideTimeInterval) -> Self {
        Self {
            center: head.center_ns / base.center_ns,
            low: head.low_ns / base.high_ns,
            high: head.high_ns / base.low_ns,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::measure::SampleConditions;
    use kernelgate::record::CaseSamples;

    fn run(times: &[f64]) -> CaseRun {
        CaseRun::from_samples(&CaseSamples {
            launches: vec![2; times.len()],
            elapsed_ns: times.iter().map(|time| 2.0 * time).collect(),
            ..CaseSamples::default()
        })
    }

    #[test]
    fn the_interval_of_a_single_run_is_the_allowance_or_its_own_spread() {
        let steady = SideTimeInterval::ratio_from_runs([&run(&[100.0, 100.0, 101.0])], 0.1, true);
        assert_eq!((steady.center_ns, steady.runs), (100.0, 1));
        assert!((steady.low_ns - 90.0).abs() < 1e-9 && (steady.high_ns - 110.0).abs() < 1e-9);
        let noisy = SideTimeInterval::ratio_from_runs([&run(&[50.0, 100.0, 150.0])], 0.1, true);
        assert!((noisy.low_ns - 75.0).abs() < 1e-9 && (noisy.high_ns - 125.0).abs() < 1e-9);
    }

    #[test]
    fn the_interval_of_several_runs_spans_their_medians() {
        let side = SideTimeInterval::ratio_from_runs(
            [&run(&[100.0]), &run(&[104.0]), &run(&[98.0])],
            0.1,
            true,
        );
        assert_eq!((side.low_ns, side.center_ns, side.high_ns, side.runs), (98.0, 100.0, 104.0, 3));
        let ratio = TimeRatio::from_side_times(&side, &side);
        assert!(ratio.low < 1.0 && ratio.center == 1.0 && ratio.high > 1.0);
    }

    #[test]
    fn contention_extends_the_interval_of_a_time_downwards() {
        let side = |contended| {
            let conditions =
                SampleConditions { contention: Some(0.2), ..SampleConditions::default() };
            let first = CaseRun { conditions, ..run(&[100.0]) };
            SideTimeInterval::ratio_from_runs([&first, &run(&[110.0])], 0.1, contended)
        };
        assert_eq!(
            (side(true).low_ns, side(true).center_ns, side(true).high_ns, side(true).contention),
            (80.0, 105.0, 110.0, 0.1)
        );
        assert_eq!((side(false).low_ns, side(false).contention), (100.0, 0.0));
    }
}
