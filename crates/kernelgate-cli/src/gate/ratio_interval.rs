//! Computes a conservative interval for the ratio of two times, from the median times of the
//! process runs of baseline and head.
//!
//! A better statistical method could replace this module, because the verdict uses only
//! [`TimeRatioWithInterval`].

use serde::{Deserialize, Serialize};

use kernelgate::record::CaseSummaryOfRun;
use kernelgate::stats::median;

/// Relative half-width of the time interval that is assumed for a side with a single run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AssumedSpreadOfSingleRun {
    /// Assumed half-width of the time interval of a single run, relative to the run's median time.
    /// A single run whose samples spread more than assumed gets a wider interval.
    pub relative: f64,
    /// Source of the half-width.
    pub from: SourceOfAssumedSpread,
}

/// Source of the spread that is assumed for a single run: assumption, earlier runs or calibration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SourceOfAssumedSpread {
    /// The setting `single_run`, because the spread between runs was not measured.
    Assumed,
    /// The spread of several runs of earlier code, which the baseline keeps.
    EarlierRuns,
    /// The spread between processes that the device's calibration measured.
    Calibration,
}

/// The time of a case on one side (baseline or head), with a conservative interval from its process
/// runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimeIntervalOfSide {
    /// Median over the runs of their median times, nanoseconds per launch.
    pub center_ns: f64,
    /// Lower end of the interval of the side's time, nanoseconds per launch.
    pub low_ns: f64,
    /// Upper end of the interval of the side's time, nanoseconds per launch.
    pub high_ns: f64,
    /// Number of process runs.
    pub runs: usize,
    /// Half the range of the runs' median times, relative to the median of these; `None` with one
    /// run.
    pub spread: Option<f64>,
    /// Median over the runs of the share of the host's CPU time that other processes used, at most
    /// 0.95; 0 if unknown.
    pub contention: f64,
}

impl TimeIntervalOfSide {
    /// With several runs, the interval of a side's time is the range of their median times. A
    /// single run does not show the spread between runs: its interval extends by `single_run` to
    /// either side, or by half its own relative interquartile range if that is larger.
    ///
    /// If CPU contention matters (`contended`) and took the share c of the CPU time, the lower end
    /// is multiplied by (1 - c), the possible undisturbed time. Contention is considered separately
    /// for each side, because the same load can slow one run more than another.
    ///
    /// The argument `runs` must contain at least one run.
    pub fn interval_from_runs<'a>(
        runs: impl IntoIterator<Item = &'a CaseSummaryOfRun>,
        single_run: f64,
        contended: bool,
    ) -> Self {
        let runs: Vec<&CaseSummaryOfRun> = runs.into_iter().collect();
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

/// Time of the head divided by the time of the base, with an interval; a ratio above 1 means that
/// the head is slower.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TimeRatioWithInterval {
    /// Ratio of the medians.
    pub center: f64,
    /// Lower end of the interval of the time ratio.
    pub low: f64,
    /// Upper end of the interval of the time ratio.
    pub high: f64,
}

impl TimeRatioWithInterval {
    /// Returns the ratio of the head's to the base's time, with the extreme ratios that both time
    /// intervals allow.
    pub fn from_head_and_base_intervals(
        head: &TimeIntervalOfSide,
        base: &TimeIntervalOfSide,
    ) -> Self {
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
    use kernelgate::measure::CaseSampleConditions;
    use kernelgate::record::SamplesOfCase;

    fn test_case_run(times: &[f64]) -> CaseSummaryOfRun {
        CaseSummaryOfRun::summarize_samples(&SamplesOfCase {
            launches: vec![2; times.len()],
            elapsed_ns: times.iter().map(|time| 2.0 * time).collect(),
            ..SamplesOfCase::default()
        })
    }

    #[test]
    fn the_interval_of_a_single_run_is_the_allowance_or_its_own_spread() {
        let steady = TimeIntervalOfSide::interval_from_runs(
            [&test_case_run(&[100.0, 100.0, 101.0])],
            0.1,
            true,
        );
        assert_eq!((steady.center_ns, steady.runs), (100.0, 1));
        assert!((steady.low_ns - 90.0).abs() < 1e-9 && (steady.high_ns - 110.0).abs() < 1e-9);
        let noisy = TimeIntervalOfSide::interval_from_runs(
            [&test_case_run(&[50.0, 100.0, 150.0])],
            0.1,
            true,
        );
        assert!((noisy.low_ns - 75.0).abs() < 1e-9 && (noisy.high_ns - 125.0).abs() < 1e-9);
    }

    #[test]
    fn the_interval_of_several_runs_spans_their_medians() {
        let side = TimeIntervalOfSide::interval_from_runs(
            [&test_case_run(&[100.0]), &test_case_run(&[104.0]), &test_case_run(&[98.0])],
            0.1,
            true,
        );
        assert_eq!((side.low_ns, side.center_ns, side.high_ns, side.runs), (98.0, 100.0, 104.0, 3));
        let ratio = TimeRatioWithInterval::from_head_and_base_intervals(&side, &side);
        assert!(ratio.low < 1.0 && ratio.center == 1.0 && ratio.high > 1.0);
    }

    #[test]
    fn contention_extends_the_interval_of_a_time_downwards() {
        let side = |contended| {
            let conditions =
                CaseSampleConditions { contention: Some(0.2), ..CaseSampleConditions::default() };
            let first = CaseSummaryOfRun { conditions, ..test_case_run(&[100.0]) };
            TimeIntervalOfSide::interval_from_runs(
                [&first, &test_case_run(&[110.0])],
                0.1,
                contended,
            )
        };
        assert_eq!(
            (side(true).low_ns, side(true).center_ns, side(true).high_ns, side(true).contention),
            (80.0, 105.0, 110.0, 0.1)
        );
        assert_eq!((side(false).low_ns, side(false).contention), (100.0, 0.0));
    }
}
