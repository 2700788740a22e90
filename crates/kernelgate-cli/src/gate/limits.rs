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
    pub relative: Option<f64>,
    /// Smallest change of the time that counts as a regression, nanoseconds per launch.
    pub absolute_ns: Option<f64>,
    /// Largest relative change that a case judged as unchanged may have with the promised error
    /// rate.
    pub tolerated: Option<f64>,
    /// Ratio of the head's to the base's output error from which the error counts as grown.
    pub growth: Option<f64>,
    /// Relative growth of device memory from which it counts as a regression; `None` ignores
    /// growth.
    pub device_memory: Option<f64>,
    /// Relative growth of the number of commands per launch from which it counts as a regression;
    /// `None` ignores growth.
    pub launches: Option<f64>,
    /// Relative growth of the host's time to enqueue a launch from which it counts as a regression;
    /// `None` ignores growth.
    pub host_time: Option<f64>,
    /// Relative growth of a launch's energy from which it counts as a regression; only `gate`
    /// judges energy, because the trials of `compare` are too short.
    pub energy: Option<f64>,
}

impl RequestedLimits {
    /// Returns these limits, with those that are `None` taken from `other`.
    pub fn or_limits_of(self, other: Self) -> Self {
        Self {
            relative: self.relative.or(other.relative),
            absolute_ns: self.absolute_ns.or(other.absolute_ns),
            tolerated: self.tolerated.or(other.tolerated),
            growth: self.growth.or(other.growth),
            device_memory: self.device_memory.or(other.device_memory),
            launches: self.launches.or(other.launches),
            host_time: self.host_time.or(other.host_time),
            energy: self.energy.or(other.energy),
        }
    }
}

/// Source of a limit: the default, a calibration, a flag, or an entry of `kernelgate.toml`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitSource {
    /// The limit is the default of the program kernelgate.
    Default,
    /// The limit comes from the calibration of the gate on this device.
    Calibration,
    /// A command-line flag set the limit.
    Flag,
    /// A `[[threshold]]` of `kernelgate.toml`.
    Threshold,
    /// An `[[accept]]` of `kernelgate.toml`.
    Accept,
}

/// A limit with its source, such as a flag or a calibration.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LimitWithSource {
    /// Value of the limit.
    pub value: f64,
    /// Source of the limit.
    pub source: LimitSource,
}

impl LimitWithSource {
    /// Makes a limit whose source is the program's default.
    pub const fn from_default(value: f64) -> LimitWithSource {
        Self { value, source: LimitSource::Default }
    }

    fn overridden_if_set(self, value: Option<f64>, source: LimitSource) -> Self {
        value.map_or(self, |value| Self { value, source })
    }

    /// Returns this limit, or the larger one that an `[[accept]]` of the package's rules accepts.
    fn or_larger_accepted(self, accepted: Option<f64>) -> Self {
        self.overridden_if_set(
            accepted.filter(|accepted| *accepted > self.value),
            LimitSource::Accept,
        )
    }
}

/// The limits of one case, or those of all cases without limits of their own.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CaseLimits {
    /// Smallest relative change of the time that counts as a regression.
    pub relative: LimitWithSource,
    /// Smallest change of the time that counts as a regression, nanoseconds per launch.
    pub absolute_ns: LimitWithSource,
    /// Ratio of the head's to the base's error against the reference from which the error counts as
    /// grown.
    pub growth: LimitWithSource,
    /// Relative slow-down that an `[[accept]]` of the package's rules accepts; `None` without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted: Option<f64>,
}

impl CaseLimits {
    /// Default of [`Self::absolute_ns`].
    pub const DEFAULT_ABSOLUTE_NS: f64 = 100.0;
    /// Default of [`Self::growth`].
    pub const DEFAULT_GROWTH_FACTOR: f64 = 1.5;

    /// Checks that the limits that were read from a file are in their possible ranges.
    ///
    /// # Errors
    /// The error states the name and the value of the limit that is out of range.
    pub fn check_ranges(&self) -> Result<(), String> {
        let Self { relative, absolute_ns, growth, accepted } = *self;
        for (field, value) in [
            ("relative", relative.value),
            ("absolute_ns", absolute_ns.value),
            ("growth", growth.value),
            ("accepted", accepted.unwrap_or(0.0)),
        ] {
            if !(0.0..1e12).contains(&value) {
                return Err(format!("limits: {field} is {value}"));
            }
        }
        Ok(())
    }

    /// Returns the program's default limits, with the given relative limit of the time.
    pub const fn default_with_relative_limit(relative: f64) -> CaseLimits {
        Self {
            relative: LimitWithSource::from_default(relative),
            absolute_ns: LimitWithSource::from_default(Self::DEFAULT_ABSOLUTE_NS),
            growth: LimitWithSource::from_default(Self::DEFAULT_GROWTH_FACTOR),
            accepted: None,
        }
    }

    /// Returns the limits with those that `asked` sets replaced; the replaced ones get this source.
    pub fn overridden_by(self, asked: &RequestedLimits, source: LimitSource) -> Self {
        Self {
            relative: self.relative.overridden_if_set(asked.relative, source),
            absolute_ns: self.absolute_ns.overridden_if_set(asked.absolute_ns, source),
            growth: self.growth.overridden_if_set(asked.growth, source),
            ..self
        }
    }

    /// Returns these limits, raised to the slow-down and the growth of output errors that the
    /// package's rules accept.
    pub fn raised_by_acceptance(self, slower: Option<f64>, growth: Option<f64>) -> Self {
        Self { accepted: slower, growth: self.growth.or_larger_accepted(growth), ..self }
    }

    /// Returns the smallest relative change that counts as a regression of a case that takes
    /// `time_ns`. The argument `device` is the relative time difference that two devices of one
    /// model may have; 0 for a single device.
    pub fn regression_threshold(&self, time_ns: f64, device: f64) -> LimitWithSource {
        self.larger_of_relative_and_absolute(self.relative, time_ns, device)
    }

    /// Returns the smallest relative slow-down that fails a case: the threshold, or a larger
    /// accepted slow-down.
    pub fn smallest_failing_slowdown(&self, time_ns: f64, device: f64) -> LimitWithSource {
        self.larger_of_relative_and_absolute(self.failing_relative_limit(), time_ns, device)
    }

    /// Returns the relative limit of [`Self::smallest_failing_slowdown`], without the absolute
    /// limit and the device's allowance.
    pub fn failing_relative_limit(&self) -> LimitWithSource {
        self.relative.or_larger_accepted(self.accepted)
    }

    fn larger_of_relative_and_absolute(
        &self,
        relative: LimitWithSource,
        time_ns: f64,
        device: f64,
    ) -> LimitWithSource {
        let value = relative.value + device * (1.0 + relative.value);
        let absolute = self.absolute_ns.value / time_ns;
        if absolute > value {
            LimitWithSource { value: absolute, ..self.absolute_ns }
        } else {
            LimitWithSource { value, ..relative }
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
        let beyond = || ratio > 1.0 + self.regression_threshold(time_ns, device).value;
        match verdict {
            VerdictOnCase::Unchanged if self.accepted.is_some() && beyond() => {
                VerdictOnCase::Accepted
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
        let flags = RequestedLimits { relative: Some(0.02), ..RequestedLimits::default() };
        let package = RequestedLimits { growth: Some(2.0), ..RequestedLimits::default() };
        let limits = CaseLimits::default_with_relative_limit(0.01)
            .overridden_by(&flags, LimitSource::Flag)
            .overridden_by(&package, LimitSource::Threshold)
            .raised_by_acceptance(Some(0.12), Some(1.8));
        assert_eq!(limits.relative, LimitWithSource { value: 0.02, source: LimitSource::Flag });
        assert_eq!(limits.absolute_ns.source, LimitSource::Default);
        assert_eq!(limits.growth, LimitWithSource { value: 2.0, source: LimitSource::Threshold });
        assert_eq!(
            limits.failing_relative_limit(),
            LimitWithSource { value: 0.12, source: LimitSource::Accept }
        );
    }

    #[test]
    fn the_larger_of_the_relative_and_absolute_limit_applies() {
        let limits = CaseLimits::default_with_relative_limit(0.05);
        assert_eq!(limits.regression_threshold(1e6, 0.0), limits.relative);
        assert_eq!(limits.regression_threshold(1e3, 0.0), LimitWithSource::from_default(0.1));
        assert!((limits.regression_threshold(1e6, 0.22).value - (1.05 * 1.22 - 1.0)).abs() < 1e-12);
    }

    #[test]
    fn an_accepted_slow_down_is_not_reported_as_unchanged() {
        let plain = CaseLimits::default_with_relative_limit(0.05);
        let accepting = plain.raised_by_acceptance(Some(0.2), None);
        let reported = |limits: &CaseLimits, ratio| {
            limits.verdict_with_acceptance(VerdictOnCase::Unchanged, ratio, 1e6, 0.0)
        };
        assert_eq!(reported(&accepting, 1.1), VerdictOnCase::Accepted);
        assert_eq!(reported(&accepting, 1.04), VerdictOnCase::Unchanged);
        assert_eq!(
            accepting.verdict_with_acceptance(VerdictOnCase::Improved, 1.1, 1e6, 0.0),
            VerdictOnCase::Improved
        );
    }
}
