//! Defines the summary of one case in one process run, with the numbers that a verdict needs, as a
//! baseline stores it. The summary does not contain the raw samples, which stay in the run record.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::run::{CaseRecordWithSamples, LaunchCostsBesidesDeviceTime, SamplesOfCase};
use crate::measure::CaseSampleConditions;
use crate::measure::limits::ShortestLaunchTime;
use crate::measure::plausibility;
use crate::measure::power::{CasePowerRecord, PowerStateOfSamples};
use crate::stats::{MedianAndQuartiles, median};

/// Launch times and conditions of one case in one process run, summarised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseSummaryOfRun {
    /// Median over the samples of the time per launch, nanoseconds.
    #[serde(rename = "median_ns")]
    pub median_launch_ns: f64,
    /// Half the interquartile range of the samples' launch times, divided by their median.
    #[serde(rename = "spread")]
    pub relative_half_interquartile_range: f64,
    /// Samples.
    #[serde(rename = "samples")]
    pub sample_count: u64,
    /// Number of launches in all samples together.
    pub total_launches: u64,
    /// Median of the samples' SM clocks, MHz; absent if the device does not report the SM clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "median_clock_mhz")]
    pub median_sm_clock_mhz: Option<f64>,
    /// Median over the samples of the time by which the slowest GPU exceeds the fastest,
    /// nanoseconds per launch; absent for one GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "skew_ns")]
    pub skew_between_gpus_ns: Option<f64>,
    /// Conditions under which the samples were taken.
    #[serde(default, skip_serializing_if = "CaseSampleConditions::are_all_defaults")]
    pub conditions: CaseSampleConditions,
    /// Power state of the GPU during the samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<PowerStateForComparison>,
    /// Costs of a launch besides its time on the device: host time and energy.
    #[serde(default, skip_serializing_if = "LaunchCostsBesidesDeviceTime::is_empty")]
    pub costs: LaunchCostsBesidesDeviceTime,
    /// Shortest time of a launch by the device's measured ceilings, and the ceiling that decides;
    /// absent if not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<ShortestLaunchTime>,
}

impl CaseSummaryOfRun {
    /// Summarises the samples of a case; the samples must have passed validation, otherwise the
    /// numbers mean nothing.
    pub fn summarize_samples(samples: &SamplesOfCase) -> CaseSummaryOfRun {
        let spread = MedianAndQuartiles::median_and_quartiles_from_values(
            &samples.launch_times_by_sample_ns(),
        );
        let clocks = &samples.sm_clock_per_sample_mhz;
        Self {
            median_launch_ns: spread.median,
            relative_half_interquartile_range: spread.half_interquartile_range_by_median(),
            sample_count: samples.launches_per_sample.len() as u64,
            total_launches: samples.number_of_launches_in_all_samples().unwrap_or(u64::MAX),
            median_sm_clock_mhz: (!clocks.is_empty()).then(|| median(clocks)),
            skew_between_gpus_ns: samples.median_gpu_skew_per_launch_ns(),
            conditions: samples.conditions,
            power: samples.power.as_ref().map(PowerStateForComparison::from),
            costs: samples.launch_costs_with_energy(),
            limit: None,
        }
    }

    /// Summarises the record of a case, whose samples must have passed validation.
    pub fn summarize_case_record(case: &CaseRecordWithSamples) -> CaseSummaryOfRun {
        Self { limit: case.limit.clone(), ..Self::summarize_samples(&case.samples) }
    }

    /// Rounds times to seven significant digits and all other numbers to four, for a short baseline
    /// file.
    pub fn round_to_significant_digits(mut self) -> Self {
        self.median_launch_ns = round_to_significant_digits_of(self.median_launch_ns, 7);
        self.relative_half_interquartile_range =
            round_to_significant_digits_of(self.relative_half_interquartile_range, 4);
        let limit = self.limit.iter_mut().map(|limit| (&mut limit.shortest_launch_ns, 7));
        let LaunchCostsBesidesDeviceTime { host_launch_ns, launch_energy_j: launch_j, .. } =
            &mut self.costs;
        let costs = host_launch_ns.iter_mut().chain(launch_j).map(|number| (number, 4));
        let others = self
            .median_sm_clock_mhz
            .iter_mut()
            .chain(&mut self.conditions.other_processes_cpu_share);
        let busy = self.power.iter_mut().filter_map(|power| power.gpu_busy_share.as_mut());
        let others = others.chain(&mut self.skew_between_gpus_ns).chain(busy);
        let all = limit.chain(costs).chain(others.map(|number| (number, 4)));
        all.for_each(|(number, count)| *number = round_to_significant_digits_of(*number, count));
        self
    }

    /// Fails if a number in this summary is implausible or contradicts another.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn check_summary_plausible(&self) -> Result<(), String> {
        plausibility::check_launch_ns_plausible("a median", self.median_launch_ns)?;
        plausibility::check_relative_spread_plausible(self.relative_half_interquartile_range)?;
        plausibility::check_count_plausible("samples", self.sample_count)?;
        plausibility::check_count_plausible("launches", self.total_launches)?;
        if self.sample_count == 0 || self.total_launches < self.sample_count {
            return Err(format!(
                "{} samples of {} launches",
                self.sample_count, self.total_launches
            ));
        }
        self.median_sm_clock_mhz.map_or(Ok(()), plausibility::check_sm_clock_mhz_plausible)?;
        self.skew_between_gpus_ns.map_or(Ok(()), plausibility::check_overhead_ns_plausible)?;
        self.costs.check_launch_costs_plausible()?;
        self.limit.as_ref().map_or(Ok(()), ShortestLaunchTime::check_limit_time_plausible)?;
        self.conditions.check_conditions_plausible()?;
        let (busy, range) =
            self.power.map_or((None, None), |power| (power.gpu_busy_share, power.range));
        busy.map_or(Ok(()), |share| plausibility::check_share_plausible("busy", share))?;
        range.map_or(Ok(()), plausibility::check_power_window_range_plausible)
    }
}

/// Power state of a case, with only those facts that a comparison of times needs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PowerStateForComparison {
    /// Power state in which the samples were taken.
    pub state: PowerStateOfSamples,
    /// Whether the power cap lowered the SM clock.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "at_cap")]
    pub at_power_cap: bool,
    /// For an unsettled case: range in which another run's median may lie, as in
    /// [`CasePowerRecord::range`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<[f64; 2]>,
    /// Share of the samples' wall time during which launches ran, as in
    /// [`CasePowerRecord::gpu_busy_share`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "busy")]
    pub gpu_busy_share: Option<f64>,
    /// Power limit of the card, milliwatts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limit_mw: Option<u32>,
}

impl PowerStateForComparison {
    /// Returns whether times measured in these two power states may be compared. The states must be
    /// comparable and, at the power cap, have equal power limits and an equal way of loading the
    /// GPU.
    pub fn are_times_comparable_with(self, other: Self) -> bool {
        let limits = self.power_limit_mw.zip(other.power_limit_mw);
        let same_limit = limits.is_none_or(|(one, other)| one == other);
        let same_load = self.gpu_busy_share.is_some() == other.gpu_busy_share.is_some();
        let below_cap = !(self.at_power_cap || other.at_power_cap);
        self.state.are_times_comparable_with(other.state)
            && (below_cap || (same_limit && same_load))
    }
}

impl fmt::Display for PowerStateForComparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.state.name_in_files_and_tables())?;
        match self.power_limit_mw.filter(|_| self.at_power_cap) {
            Some(limit_mw) => write!(f, " at {:.0} W", f64::from(limit_mw) / 1e3),
            None => Ok(()),
        }
    }
}

impl From<&CasePowerRecord> for PowerStateForComparison {
    fn from(power: &CasePowerRecord) -> Self {
        let CasePowerRecord { state, at_power_cap, range, gpu_busy_share, power_limit_mw, .. } =
            *power;
        Self { state, at_power_cap, range, gpu_busy_share, power_limit_mw }
    }
}

/// Rounds a number to `count` significant digits.
pub(super) fn round_to_significant_digits_of(number: f64, count: usize) -> f64 {
    let rounded: Option<f64> = format!("{number:.*e}", count - 1).parse().ok();
    // Rounding the largest finite number up gives infinity; then the number stays unrounded.
    rounded.filter(|it| it.is_finite()).unwrap_or(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_rounded_to_significant_digits() {
        assert_eq!(
            [
                round_to_significant_digits_of(1348146.384, 7),
                round_to_significant_digits_of(0.00115122, 4)
            ],
            [1348146.0, 0.001151]
        );
        assert_eq!(
            [
                round_to_significant_digits_of(0.0, 4),
                round_to_significant_digits_of(9.9999e-300, 2)
            ],
            [0.0, 1e-299]
        );
        let mut case = CaseRecordWithSamples::example_with_sample_times(vec![1e6 / 3.0, 1e6 / 3.0]);
        case.samples.conditions.other_processes_cpu_share = Some(2.0 / 3.0);
        let run = CaseSummaryOfRun::summarize_case_record(&case).round_to_significant_digits();
        assert_eq!(
            (run.median_launch_ns, run.conditions.other_processes_cpu_share),
            (333_333.3, Some(0.6667))
        );
        assert_eq!(run.check_summary_plausible(), Ok(()));
    }

    #[test]
    fn a_sum_of_launch_counts_saturates() {
        let mut case = CaseRecordWithSamples::example_with_sample_times(vec![1e20, 1e20]);
        case.samples.launches_per_sample = vec![u64::MAX, 1];
        assert_eq!(CaseSummaryOfRun::summarize_samples(&case.samples).total_launches, u64::MAX);
    }
}
