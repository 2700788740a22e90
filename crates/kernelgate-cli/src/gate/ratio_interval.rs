//! Computes a conservative interval for the ratio of two times, from the median times of the
//! process runs of baseline and head.
//!
//! A better statistical method could replace the module `ratio_interval`, because the verdict uses
//! only [`TimeRatioWithInterval`].

use serde::{Deserialize, Serialize};

use kernelgate::record::CaseSummaryOfRun;
use kernelgate::stats::median;

/// Relative half-width of the time interval that is assumed for a side with a single run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AssumedSpreadOfSingleRun {
    /// Assumed half-width of the time interval of a single run, relative to the run's median time.
    /// A single run whose samples spread more than assumed gets a wider interval.
    #[serde(rename = "relative")]
    pub relative_half_width: f64,
    /// Source of the assumed half-width: a setting, earlier runs or the calibration.
    pub from: SourceOfAssumedSpread,
}

/// Source of the spread that is assumed for a single run: assumption, earlier runs or calibration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SourceOfAssumedSpread {
    /// The assumed spread comes from the setting for single runs, because the spread between runs
    /// was not measured.
    #[serde(rename = "assumed")]
    AssumedWithoutMeasurement,
    /// The spread of several runs of earlier code, which the baseline keeps.
    #[serde(rename = "earlier_runs")]
    EarlierCodeRuns,
    /// The assumed spread is the spread between processes that the device's calibration measured.
    #[serde(rename = "calibration")]
    DeviceCalibration,
}

/// The time of a case on one side (baseline or head), with a conservative interval from its process
/// runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimeIntervalOfSide {
    /// Median over the side's process runs of their median times, nanoseconds per launch.
    pub median_launch_ns: f64,
    /// Lower end of the interval of the side's time, nanoseconds per launch.
    pub interval_low_ns: f64,
    /// Upper end of the interval of the side's time, nanoseconds per launch.
    pub interval_high_ns: f64,
    /// Number of process runs of the side.
    pub run_count: usize,
    /// Half the range of the runs' median times, relative to the median of these; `None` with one
    /// run.
    pub relative_half_range: Option<f64>,
    /// Median over the runs of the share of the host's CPU time that other processes used, at most
    /// 0.95; 0 if unknown.
    pub median_cpu_contention: f64,
}

impl TimeIntervalOfSide {
    /// With several runs, the interval of a side's time is the range of their median times. A
    /// single run does not show the spread between runs: its interval extends by the assumed spread
    /// of a single run to either side, or by half its own relative interquartile range if that is
    /// larger.
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
                run.conditions
                    .other_processes_cpu_share
                    .filter(|_| contended)
                    .unwrap_or(0.0)
                    .clamp(0.0, 0.95)
            })
            .collect();
        let medians: Vec<f64> = runs.iter().map(|run| run.median_launch_ns).collect();
        let center_ns = median(&medians);
        let half_width = if let [only] = runs[..] {
            single_run.max(only.relative_half_interquartile_range)
        } else {
            0.0
        };
        let highest = medians.iter().copied().fold(0.0, f64::max);
        let lowest = medians.iter().copied().fold(f64::INFINITY, f64::min);
        let lows = medians
            .iter()
            .zip(&shares)
            .map(|(median, share)| median * (1.0 - half_width).max(0.01) * (1.0 - share));
        Self {
            median_launch_ns: center_ns,
            interval_low_ns: lows.fold(f64::INFINITY, f64::min),
            interval_high_ns: highest * (1.0 + half_width),
            run_count: runs.len(),
            relative_half_range: (runs.len() > 1).then(|| (highest - lowest) / (2.0 * center_ns)),
            median_cpu_contention: median(&shares),
        }
    }
}

/// Time of the head divided by the time of the base, with an interval; a ratio above 1 means that
/// the head is slower.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TimeRatioWithInterval {
    /// Head time divided by base time: the ratio of the medians or a Hodges-Lehmann estimate.
    #[serde(rename = "center")]
    pub estimated_ratio: f64,
    /// Lower end of the confidence interval of the ratio of head time to base time.
    #[serde(rename = "low")]
    pub ratio_low: f64,
    /// Upper end of the confidence interval of the ratio of head time to base time.
    #[serde(rename = "high")]
    pub ratio_high: f64,
}

impl TimeRatioWithInterval {
    /// Returns the ratio of the head's to the base's time, with the extreme ratios that both time
    /// intervals allow.
    pub fn from_head_and_base_intervals(
        head: &TimeIntervalOfSide,
        base: &TimeIntervalOfSide,
    ) -> Self {
        Self {
            estimated_ratio: head.median_launch_ns / base.median_launch_ns,
            ratio_low: head.interval_low_ns / base.interval_high_ns,
            ratio_high: head.interval_high_ns / base.interval_low_ns,
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
            launches_per_sample: vec![2; times.len()],
            elapsed_per_sample_ns: times.iter().map(|time| 2.0 * time).collect(),
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
        assert_eq!((steady.median_launch_ns, steady.run_count), (100.0, 1));
        assert!(
            (steady.interval_low_ns - 90.0).abs() < 1e-9
                && (steady.interval_high_ns - 110.0).abs() < 1e-9
        );
        let noisy = TimeIntervalOfSide::interval_from_runs(
            [&test_case_run(&[50.0, 100.0, 150.0])],
            0.1,
            true,
        );
        assert!(
            (noisy.interval_low_ns - 75.0).abs() < 1e-9
                && (noisy.interval_high_ns - 125.0).abs() < 1e-9
        );
    }

    #[test]
    fn the_interval_of_several_runs_spans_their_medians() {
        let side = TimeIntervalOfSide::interval_from_runs(
            [&test_case_run(&[100.0]), &test_case_run(&[104.0]), &test_case_run(&[98.0])],
            0.1,
            true,
        );
        assert_eq!(
            (side.interval_low_ns, side.median_launch_ns, side.interval_high_ns, side.run_count),
            (98.0, 100.0, 104.0, 3)
        );
        let ratio = TimeRatioWithInterval::from_head_and_base_intervals(&side, &side);
        assert!(ratio.ratio_low < 1.0 && ratio.estimated_ratio == 1.0 && ratio.ratio_high > 1.0);
    }

    #[test]
    fn contention_extends_the_interval_of_a_time_downwards() {
        let side = |contended| {
            let conditions = CaseSampleConditions {
                other_processes_cpu_share: Some(0.2),
                ..CaseSampleConditions::default()
            };
            let first = CaseSummaryOfRun { conditions, ..test_case_run(&[100.0]) };
            TimeIntervalOfSide::interval_from_runs(
                [&first, &test_case_run(&[110.0])],
                0.1,
                contended,
            )
        };
        assert_eq!(
            (
                side(true).interval_low_ns,
                side(true).median_launch_ns,
                side(true).interval_high_ns,
                side(true).median_cpu_contention
            ),
            (80.0, 105.0, 110.0, 0.1)
        );
        assert_eq!((side(false).interval_low_ns, side(false).median_cpu_contention), (100.0, 0.0));
    }
}
