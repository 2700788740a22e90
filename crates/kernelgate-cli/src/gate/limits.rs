//! Defines which changes count as slower: the limits that flags, calibration and rules set, and the
//! limits of one case, each with its source.
//!
//! A `[[threshold]]` of the package's `kernelgate.toml` takes precedence over a flag, a flag over
//! the device's calibration, and a calibration over the default. An `[[accept]]` of
//! `kernelgate.toml` raises the limits of a case until it expires. The modules `rules_file`
//! (reading `kernelgate.toml`) and `rules` (matching patterns with cases) are separate.

use serde::{Deserialize, Serialize};

use super::verdict::VerdictOnCase;

/// Limits of time, accuracy and costs that flags or a `[[threshold]]` of `kernelgate.toml` set. A
/// limit that is `None` takes its value from the source of next lower precedence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RequestedLimits {
    /// Smallest relative change of the time that counts as a regression.
    #[serde(rename = "relative")]
    pub relative_time_change_threshold: Option<f64>,
    /// Smallest change of the time that counts as a regression, nanoseconds per launch.
    #[serde(rename = "absolute_ns")]
    pub absolute_time_change_threshold_ns: Option<f64>,
    /// Largest relative change that a case judged as unchanged may have with the promised error
    /// rate.
    #[serde(rename = "tolerated")]
    pub max_unchanged_relative_change: Option<f64>,
    /// Ratio of the head's to the base's output error from which the error counts as grown.
    #[serde(rename = "growth")]
    pub output_error_growth_threshold: Option<f64>,
    /// Relative growth of device memory from which it counts as a regression; `None` ignores
    /// growth.
    #[serde(rename = "device_memory")]
    pub device_memory_growth_threshold: Option<f64>,
    /// Relative growth of the number of commands per launch from which it counts as a regression;
    /// `None` ignores growth.
    #[serde(rename = "launches")]
    pub command_growth_threshold: Option<f64>,
    /// Relative growth of the host's time to enqueue a launch from which it counts as a regression;
    /// `None` ignores growth.
    #[serde(rename = "host_time")]
    pub host_time_growth_threshold: Option<f64>,
    /// Relative growth of a launch's energy from which it counts as a regression; only `gate`
    /// judges energy, because the trials of `compare` are too short.
    #[serde(rename = "energy")]
    pub energy_growth_threshold: Option<f64>,
}

impl RequestedLimits {
    /// Returns these limits, with those that are `None` taken from `other`.
    pub fn with_missing_limits_from(self, other: Self) -> Self {
        Self {
            relative_time_change_threshold: self
                .relative_time_change_threshold
                .or(other.relative_time_change_threshold),
            absolute_time_change_threshold_ns: self
                .absolute_time_change_threshold_ns
                .or(other.absolute_time_change_threshold_ns),
            max_unchanged_relative_change: self
                .max_unchanged_relative_change
                .or(other.max_unchanged_relative_change),
            output_error_growth_threshold: self
                .output_error_growth_threshold
                .or(other.output_error_growth_threshold),
            device_memory_growth_threshold: self
                .device_memory_growth_threshold
                .or(other.device_memory_growth_threshold),
            command_growth_threshold: self
                .command_growth_threshold
                .or(other.command_growth_threshold),
            host_time_growth_threshold: self
                .host_time_growth_threshold
                .or(other.host_time_growth_threshold),
            energy_growth_threshold: self.energy_growth_threshold.or(other.energy_growth_threshold),
        }
    }
}

/// Source of a limit: the default, a calibration, a flag, or an entry of `kernelgate.toml`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitSource {
    /// The limit is the default of the program kernelgate.
    #[serde(rename = "default")]
    ProgramDefault,
    /// The limit comes from the calibration of the gate on this device.
    #[serde(rename = "calibration")]
    DeviceCalibration,
    /// A command-line flag set the limit.
    #[serde(rename = "flag")]
    CommandLineFlag,
    /// The limit comes from a `[[threshold]]` entry of `kernelgate.toml`.
    #[serde(rename = "threshold")]
    RulesThresholdEntry,
    /// The limit comes from an `[[accept]]` entry of `kernelgate.toml`.
    #[serde(rename = "accept")]
    RulesAcceptEntry,
}

/// A limit with its source, such as a flag or a calibration.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LimitWithSource {
    /// Numeric value of the limit.
    #[serde(rename = "value")]
    pub limit_value: f64,
    /// Source of the limit's value: default, calibration, flag, or an entry of `kernelgate.toml`.
    pub source: LimitSource,
}

impl LimitWithSource {
    /// Makes a limit whose source is the program's default.
    pub const fn from_program_default(value: f64) -> LimitWithSource {
        Self { limit_value: value, source: LimitSource::ProgramDefault }
    }

    fn overridden_if_set(self, value: Option<f64>, source: LimitSource) -> Self {
        value.map_or(self, |value| Self { limit_value: value, source })
    }

    /// Returns this limit, or the larger one that an `[[accept]]` of the package's rules accepts.
    fn raised_to_accepted_limit(self, accepted: Option<f64>) -> Self {
        self.overridden_if_set(
            accepted.filter(|accepted| *accepted > self.limit_value),
            LimitSource::RulesAcceptEntry,
        )
    }
}

/// The limits of one case, or those of all cases without limits of their own.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CaseTimeAndErrorLimits {
    /// Smallest relative change of the time that counts as a regression.
    #[serde(rename = "relative")]
    pub relative_time_change_threshold: LimitWithSource,
    /// Smallest change of the time that counts as a regression, nanoseconds per launch.
    #[serde(rename = "absolute_ns")]
    pub absolute_time_change_threshold_ns: LimitWithSource,
    /// Ratio of the head's to the base's error against the reference from which the error counts as
    /// grown.
    #[serde(rename = "growth")]
    pub output_error_growth_threshold: LimitWithSource,
    /// Relative slow-down that an `[[accept]]` of the package's rules accepts; `None` without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "accepted")]
    pub accepted_relative_slowdown: Option<f64>,
}

impl CaseTimeAndErrorLimits {
    /// Default of [`Self::absolute_time_change_threshold_ns`].
    pub const DEFAULT_ABSOLUTE_TIME_CHANGE_THRESHOLD_NS: f64 = 100.0;
    /// Default of [`Self::output_error_growth_threshold`].
    pub const DEFAULT_OUTPUT_ERROR_GROWTH_FACTOR: f64 = 1.5;

    /// Checks that the limits that were read from a file are in their possible ranges.
    ///
    /// # Errors
    /// The error states the name and the value of the limit that is out of range.
    pub fn check_limit_ranges(&self) -> Result<(), String> {
        let Self {
            relative_time_change_threshold: relative,
            absolute_time_change_threshold_ns: absolute_ns,
            output_error_growth_threshold: growth,
            accepted_relative_slowdown: accepted,
        } = *self;
        for (field, value) in [
            ("relative", relative.limit_value),
            ("absolute_ns", absolute_ns.limit_value),
            ("growth", growth.limit_value),
            ("accepted", accepted.unwrap_or(0.0)),
        ] {
            if !(0.0..1e12).contains(&value) {
                return Err(format!("limits: {field} is {value}"));
            }
        }
        Ok(())
    }

    /// Returns the program's default limits, with the given relative limit of the time.
    pub const fn default_with_relative_limit(relative: f64) -> CaseTimeAndErrorLimits {
        Self {
            relative_time_change_threshold: LimitWithSource::from_program_default(relative),
            absolute_time_change_threshold_ns: LimitWithSource::from_program_default(
                Self::DEFAULT_ABSOLUTE_TIME_CHANGE_THRESHOLD_NS,
            ),
            output_error_growth_threshold: LimitWithSource::from_program_default(
                Self::DEFAULT_OUTPUT_ERROR_GROWTH_FACTOR,
            ),
            accepted_relative_slowdown: None,
        }
    }

    /// Returns the limits with those that `asked` sets replaced; the replaced ones get this source.
    pub fn overridden_by(self, asked: &RequestedLimits, source: LimitSource) -> Self {
        Self {
            relative_time_change_threshold: self
                .relative_time_change_threshold
                .overridden_if_set(asked.relative_time_change_threshold, source),
            absolute_time_change_threshold_ns: self
                .absolute_time_change_threshold_ns
                .overridden_if_set(asked.absolute_time_change_threshold_ns, source),
            output_error_growth_threshold: self
                .output_error_growth_threshold
                .overridden_if_set(asked.output_error_growth_threshold, source),
            ..self
        }
    }

    /// Returns these limits, raised to the slow-down and the growth of output errors that the
    /// package's rules accept.
    pub fn raised_by_acceptance(self, slower: Option<f64>, growth: Option<f64>) -> Self {
        Self {
            accepted_relative_slowdown: slower,
            output_error_growth_threshold: self
                .output_error_growth_threshold
                .raised_to_accepted_limit(growth),
            ..self
        }
    }

    /// Returns the smallest relative change that counts as a regression of a case that takes
    /// `time_ns`. The argument `device` is the relative time difference that two devices of one
    /// model may have; 0 for a single device.
    pub fn regression_threshold(&self, time_ns: f64, device: f64) -> LimitWithSource {
        self.larger_of_relative_and_absolute_limit(
            self.relative_time_change_threshold,
            time_ns,
            device,
        )
    }

    /// Returns the smallest relative slow-down that fails a case: the threshold, or a larger
    /// accepted slow-down.
    pub fn smallest_failing_slowdown(&self, time_ns: f64, device: f64) -> LimitWithSource {
        self.larger_of_relative_and_absolute_limit(self.failing_relative_limit(), time_ns, device)
    }

    /// Returns the relative limit of [`Self::smallest_failing_slowdown`], without the absolute
    /// limit and the device's allowance.
    pub fn failing_relative_limit(&self) -> LimitWithSource {
        self.relative_time_change_threshold
            .raised_to_accepted_limit(self.accepted_relative_slowdown)
    }

    fn larger_of_relative_and_absolute_limit(
        &self,
        relative: LimitWithSource,
        time_ns: f64,
        device: f64,
    ) -> LimitWithSource {
        let value = relative.limit_value + device * (1.0 + relative.limit_value);
        let absolute = self.absolute_time_change_threshold_ns.limit_value / time_ns;
        if absolute > value {
            LimitWithSource { limit_value: absolute, ..self.absolute_time_change_threshold_ns }
        } else {
            LimitWithSource { limit_value: value, ..relative }
        }
    }

    /// Changes the verdict "unchanged" to "accepted" if the estimated slow-down exceeds the
    /// threshold and only an `[[accept]]` keeps it from failing.
    pub fn verdict_with_acceptance(
        &self,
        verdict: VerdictOnCase,
        ratio: f64,
        time_ns: f64,
        device: f64,
    ) -> VerdictOnCase {
        let beyond = || ratio > 1.0 + self.regression_threshold(time_ns, device).limit_value;
        match verdict {
            VerdictOnCase::Unchanged if self.accepted_relative_slowdown.is_some() && beyond() => {
                VerdictOnCase::AcceptedSlowdown
            }
            verdict => verdict,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_names_the_last_source_that_set_it() {
        let flags = RequestedLimits {
            relative_time_change_threshold: Some(0.02),
            ..RequestedLimits::default()
        };
        let package = RequestedLimits {
            output_error_growth_threshold: Some(2.0),
            ..RequestedLimits::default()
        };
        let limits = CaseTimeAndErrorLimits::default_with_relative_limit(0.01)
            .overridden_by(&flags, LimitSource::CommandLineFlag)
            .overridden_by(&package, LimitSource::RulesThresholdEntry)
            .raised_by_acceptance(Some(0.12), Some(1.8));
        assert_eq!(
            limits.relative_time_change_threshold,
            LimitWithSource { limit_value: 0.02, source: LimitSource::CommandLineFlag }
        );
        assert_eq!(limits.absolute_time_change_threshold_ns.source, LimitSource::ProgramDefault);
        assert_eq!(
            limits.output_error_growth_threshold,
            LimitWithSource { limit_value: 2.0, source: LimitSource::RulesThresholdEntry }
        );
        assert_eq!(
            limits.failing_relative_limit(),
            LimitWithSource { limit_value: 0.12, source: LimitSource::RulesAcceptEntry }
        );
    }

    #[test]
    fn the_larger_of_the_relative_and_absolute_limit_applies() {
        let limits = CaseTimeAndErrorLimits::default_with_relative_limit(0.05);
        assert_eq!(limits.regression_threshold(1e6, 0.0), limits.relative_time_change_threshold);
        assert_eq!(
            limits.regression_threshold(1e3, 0.0),
            LimitWithSource::from_program_default(0.1)
        );
        assert!(
            (limits.regression_threshold(1e6, 0.22).limit_value - (1.05 * 1.22 - 1.0)).abs()
                < 1e-12
        );
    }

    #[test]
    fn an_accepted_slow_down_is_not_reported_as_unchanged() {
        let plain = CaseTimeAndErrorLimits::default_with_relative_limit(0.05);
        let accepting = plain.raised_by_acceptance(Some(0.2), None);
        let reported = |limits: &CaseTimeAndErrorLimits, ratio| {
            limits.verdict_with_acceptance(VerdictOnCase::Unchanged, ratio, 1e6, 0.0)
        };
        assert_eq!(reported(&accepting, 1.1), VerdictOnCase::AcceptedSlowdown);
        assert_eq!(reported(&accepting, 1.04), VerdictOnCase::Unchanged);
        assert_eq!(
            accepting.verdict_with_acceptance(VerdictOnCase::Improved, 1.1, 1e6, 0.0),
            VerdictOnCase::Improved
        );
    }
}
