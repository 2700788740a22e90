//! One case in one process run, reduced to the numbers that a verdict needs: the form that a
//! baseline stores. Deliberately absent: the raw samples, which stay in the run record.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::run::{CaseRecord, CaseSamples, LaunchCosts};
use crate::measure::SampleConditions;
use crate::measure::limits::TimeLimit;
use crate::measure::plausibility;
use crate::measure::power::{PowerRecord, PowerState};
use crate::stats::{QuartileSpread, median};

/// Times and facts of a case from one process run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseRun {
    /// Median time of a launch over the samples, nanoseconds.
    pub median_ns: f64,
    /// Half the interquartile range of the samples over their median.
    pub spread: f64,
    /// Samples.
    pub samples: u64,
    /// Number of launches of all samples together.
    pub total_launches: u64,
    /// Median of the SM clock over the samples, MHz; absent if the device does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub median_clock_mhz: Option<f64>,
    /// Median difference between the slowest and the fastest GPU, nanoseconds a launch; absent for
    /// one GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skew_ns: Option<f64>,
    /// Conditions under which the samples were taken.
    #[serde(default, skip_serializing_if = "SampleConditions::is_empty")]
    pub conditions: SampleConditions,
    /// Power state of the card while the samples were taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<CasePower>,
    /// Costs of a launch other than device time.
    #[serde(default, skip_serializing_if = "LaunchCosts::is_empty")]
    pub costs: LaunchCosts,
    /// Time that the measured ceilings allow for a launch, nanoseconds; absent if they were not
    /// measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<TimeLimit>,
}

impl CaseRun {
    /// Summarizes samples that were validated; the numbers are meaningless for invalid samples.
    pub fn from_samples(samples: &CaseSamples) -> CaseRun {
        let spread = QuartileSpread::from_values(&samples.per_launch_ns());
        let clocks = &samples.clock_mhz;
        Self {
            median_ns: spread.median,
            spread: spread.relative_half_iqr(),
            samples: samples.launches.len() as u64,
            total_launches: samples.total_launches().unwrap_or(u64::MAX),
            median_clock_mhz: (!clocks.is_empty()).then(|| median(clocks)),
            skew_ns: samples.typical_skew_ns(),
            conditions: samples.conditions,
            power: samples.power.as_ref().map(CasePower::from),
            costs: samples.costs_with_energy(),
            limit: None,
        }
    }

    /// Summarises a case whose samples were validated before.
    pub fn from_record(case: &CaseRecord) -> CaseRun {
        Self { limit: case.limit.clone(), ..Self::from_samples(&case.samples) }
    }

    /// Rounds times to seven significant digits and other numbers to four.
    pub fn round_to_significant_digits(mut self) -> Self {
        self.median_ns = round_to_digits(self.median_ns, 7);
        self.spread = round_to_digits(self.spread, 4);
        let limit = self.limit.iter_mut().map(|limit| (&mut limit.time_ns, 7));
        let LaunchCosts { host_launch_ns, launch_j, .. } = &mut self.costs;
        let costs = host_launch_ns.iter_mut().chain(launch_j).map(|number| (number, 4));
        let others = self.median_clock_mhz.iter_mut().chain(&mut self.conditions.contention);
        let busy = self.power.iter_mut().filter_map(|power| power.busy.as_mut());
        let others = others.chain(&mut self.skew_ns).chain(busy);
        let all = limit.chain(costs).chain(others.map(|number| (number, 4)));
        all.for_each(|(number, count)| *number = round_to_digits(*number, count));
        self
    }

    /// Checks the facts that deserialising does not enforce.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn validate(&self) -> Result<(), String> {
        plausibility::check_launch_ns("a median", self.median_ns)?;
        plausibility::check_spread(self.spread)?;
        plausibility::check_count("samples", self.samples)?;
        plausibility::check_count("launches", self.total_launches)?;
        if self.samples == 0 || self.total_launches < self.samples {
            return Err(format!("{} samples of {} launches", self.samples, self.total_launches));
        }
        self.median_clock_mhz.map_or(Ok(()), plausibility::check_clock_mhz)?;
        self.skew_ns.map_or(Ok(()), plausibility::check_cost_ns)?;
        self.costs.validate()?;
        self.limit.as_ref().map_or(Ok(()), TimeLimit::validate)?;
        self.conditions.validate()?;
        let (busy, range) = self.power.map_or((None, None), |power| (power.busy, power.range));
        busy.map_or(Ok(()), |share| plausibility::check_share("busy", share))?;
        range.map_or(Ok(()), plausibility::check_power_range)
    }
}

/// Power state of a case, reduced to the facts that a verdict needs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CasePower {
    /// The state.
    pub state: PowerState,
    /// Whether the power cap held the SM clock down.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_cap: bool,
    /// Range in which another run's time may lie if the case is unsettled, as in
    /// [`PowerRecord::range`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<[f64; 2]>,
    /// Share of the samples' wall time during which launches ran, as in [`PowerRecord::busy`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy: Option<f64>,
    /// Power that the card may draw, milliwatts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limit_mw: Option<u32>,
}

impl CasePower {
    /// Whether times of both may be compared: in states that compare, and at the power cap under
    /// the same limit, where both are known, and if the card idled between samples in both or in
    /// none.
    pub fn comparable(self, other: Self) -> bool {
        let limits = self.power_limit_mw.zip(other.power_limit_mw);
        let same_limit = limits.is_none_or(|(one, other)| one == other);
        let same_load = self.busy.is_some() == other.busy.is_some();
        let below_cap = !(self.at_cap || other.at_cap);
        self.state.comparable(other.state) && (below_cap || (same_limit && same_load))
    }
}

impl fmt::Display for CasePower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.state.name())?;
        match self.power_limit_mw.filter(|_| self.at_cap) {
            Some(limit_mw) => write!(f, " at {:.0} W", f64::from(limit_mw) / 1e3),
            None => Ok(()),
        }
    }
}

impl From<&PowerRecord> for CasePower {
    fn from(power: &PowerRecord) -> Self {
        let PowerRecord { state, at_cap, range, busy, power_limit_mw, .. } = *power;
        Self { state, at_cap, range, busy, power_limit_mw }
    }
}

/// Rounds a number to `count` significant digits.
pub(super) fn round_to_digits(number: f64, count: usize) -> f64 {
    let rounded: Option<f64> = format!("{number:.*e}", count - 1).parse().ok();
    // Rounding to fewer digits may turn the largest number into infinity.
    rounded.filter(|it| it.is_finite()).unwrap_or(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_rounded_to_significant_digits() {
        assert_eq!(
            [round_to_digits(1348146.384, 7), round_to_digits(0.00115122, 4)],
            [1348146.0, 0.001151]
        );
        assert_eq!([round_to_digits(0.0, 4), round_to_digits(9.9999e-300, 2)], [0.0, 1e-299]);
        let mut case = CaseRecord::untimed_samples(vec![1e6 / 3.0, 1e6 / 3.0]);
        case.samples.conditions.contention = Some(2.0 / 3.0);
        let run = CaseRun::from_record(&case).round_to_significant_digits();
        assert_eq!((run.median_ns, run.conditions.contention), (333_333.3, Some(0.6667)));
        assert_eq!(run.validate(), Ok(()));
    }

    #[test]
    fn a_sum_of_launch_counts_does_not_overflow() {
        let mut case = CaseRecord::untimed_samples(vec![1e20, 1e20]);
        case.samples.launches = vec![u64::MAX, 1];
        assert_eq!(CaseRun::from_samples(&case.samples).total_launches, u64::MAX);
    }
}
