//! Defines "slower" in one place: limits that a person sets, and the limits that follow for a case,
//! each with its source.
//!
//! A `[[threshold]]` of the package takes precedence over a flag, a flag over the calibration of
//! the device, and that over the default. The limits of a case are raised by `[[accept]]` for as
//! long as it applies. Deliberately absent: reading the file (`rules_file`), which pattern names a
//! case (`rules`).

use serde::{Deserialize, Serialize};

use super::verdict::Verdict;

/// Limits of time and accuracy that flags or a `[[threshold]]` set. A limit that is absent takes
/// the value of the next source.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct AskedLimits {
    /// Smallest relative change of the time that matters.
    pub relative: Option<f64>,
    /// Smallest change of the time that matters, nanoseconds a launch.
    pub absolute_ns: Option<f64>,
    /// Largest relative change that an unchanged case may hide.
    pub tolerated: Option<f64>,
    /// Ratio of the output errors of head and base above which they count as grown.
    pub growth: Option<f64>,
    /// Relative growth of the device memory that counts as a regression; without this value growth
    /// is ignored.
    pub device_memory: Option<f64>,
    /// Relative growth of the commands of a launch that is a regression.
    pub launches: Option<f64>,
    /// Relative growth of the host's time to start a launch that is a regression.
    pub host_time: Option<f64>,
    /// Relative growth of the energy of a launch that is a regression; only for `gate`, as trials
    /// of `compare` are too short.
    pub energy: Option<f64>,
}

impl AskedLimits {
    /// Returns the limits that `self` sets, completed by the limits that only `other` sets.
    pub fn or(self, other: Self) -> Self {
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

/// Source of a limit: a flag, a calibration or the default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitSource {
    /// The limit is the program's default.
    Default,
    /// The limit comes from the calibration of the device.
    Calibration,
    /// A flag.
    Flag,
    /// A `[[threshold]]` of `kernelgate.toml`.
    Threshold,
    /// An `[[accept]]` of `kernelgate.toml`.
    Accept,
}

/// A limit with the place it comes from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SourcedLimit {
    /// The limit.
    pub value: f64,
    /// Source of the limit.
    pub source: LimitSource,
}

impl SourcedLimit {
    /// A limit with the given value, as the program's default.
    pub const fn from_default(value: f64) -> SourcedLimit {
        Self { value, source: LimitSource::Default }
    }

    fn overridden_by(self, value: Option<f64>, source: LimitSource) -> Self {
        value.map_or(self, |value| Self { value, source })
    }

    /// Returns the larger one of this limit and the limit that the package accepts.
    fn larger_with_accepted(self, accepted: Option<f64>) -> Self {
        self.overridden_by(accepted.filter(|accepted| *accepted > self.value), LimitSource::Accept)
    }
}

/// The limits of one case, or of all cases without limits of their own.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CaseLimits {
    /// Smallest relative change of the time that matters.
    pub relative: SourcedLimit,
    /// Smallest change of the time that matters, nanoseconds a launch.
    pub absolute_ns: SourcedLimit,
    /// Ratio of the errors against the reference above which they count as grown.
    pub growth: SourcedLimit,
    /// Relative slow-down that the package's rules accept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted: Option<f64>,
}

impl CaseLimits {
    /// Default of [`Self::absolute_ns`].
    pub const DEFAULT_ABSOLUTE_NS: f64 = 100.0;
    /// Default of [`Self::growth`].
    pub const DEFAULT_GROWTH_FACTOR: f64 = 1.5;

    /// Checks the numbers of limits that a file holds.
    ///
    /// # Errors
    /// The error names the invalid limit and its value.
    pub fn validate(&self) -> Result<(), String> {
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

    /// The program's default limits, with the given relative limit.
    pub const fn default_limit(relative: f64) -> CaseLimits {
        Self {
            relative: SourcedLimit::from_default(relative),
            absolute_ns: SourcedLimit::from_default(Self::DEFAULT_ABSOLUTE_NS),
            growth: SourcedLimit::from_default(Self::DEFAULT_GROWTH_FACTOR),
            accepted: None,
        }
    }

    /// The limits, replaced by the requested ones, which come from `source`.
    pub fn overridden_by(self, asked: &AskedLimits, source: LimitSource) -> Self {
        Self {
            relative: self.relative.overridden_by(asked.relative, source),
            absolute_ns: self.absolute_ns.overridden_by(asked.absolute_ns, source),
            growth: self.growth.overridden_by(asked.growth, source),
            ..self
        }
    }

    /// Returns these limits, raised to the slow-down and the growth of errors that the package
    /// accepts.
    pub fn larger_with_accepted(self, slower: Option<f64>, growth: Option<f64>) -> Self {
        Self { accepted: slower, growth: self.growth.larger_with_accepted(growth), ..self }
    }

    /// Smallest relative change that matters for a case that takes `time_ns`. `device` is the
    /// relative difference that two devices of one model may have, 0 for a single device.
    pub fn threshold(&self, time_ns: f64, device: f64) -> SourcedLimit {
        self.largest(self.relative, time_ns, device)
    }

    /// Smallest relative slow-down that fails: the threshold, or the accepted slow-down if that is
    /// larger.
    pub fn failing_limit(&self, time_ns: f64, device: f64) -> SourcedLimit {
        self.largest(self.failing_relative_limit(), time_ns, device)
    }

    /// The relative part of the smallest failing slow-down ([`Self::failing_limit`]).
    pub fn failing_relative_limit(&self) -> SourcedLimit {
        self.relative.larger_with_accepted(self.accepted)
    }

    fn largest(&self, relative: SourcedLimit, time_ns: f64, device: f64) -> SourcedLimit {
        let value = relative.value + device * (1.0 + relative.value);
        let absolute = self.absolute_ns.value / time_ns;
        if absolute > value {
            SourcedLimit { value: absolute, ..self.absolute_ns }
        } else {
            SourcedLimit { value, ..relative }
        }
    }

    /// Converts a verdict by [`Self::failing_limit`] for a reader who knows the threshold: an
    /// estimate beyond the threshold is reported as accepted, not as unchanged.
    pub fn reported(&self, verdict: Verdict, ratio: f64, time_ns: f64, device: f64) -> Verdict {
        let beyond = || ratio > 1.0 + self.threshold(time_ns, device).value;
        match verdict {
            Verdict::Unchanged if self.accepted.is_some() && beyond() => Verdict::Accepted,
            verdict => verdict,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_names_the_last_source_that_set_it() {
        let flags = AskedLimits { relative: Some(0.02), ..AskedLimits::default() };
        let package = AskedLimits { growth: Some(2.0), ..AskedLimits::default() };
        let limits = CaseLimits::default_limit(0.01)
            .overridden_by(&flags, LimitSource::Flag)
            .overridden_by(&package, LimitSource::Threshold)
            .larger_with_accepted(Some(0.12), Some(1.8));
        assert_eq!(limits.relative, SourcedLimit { value: 0.02, source: LimitSource::Flag });
        assert_eq!(limits.absolute_ns.source, LimitSource::Default);
        assert_eq!(limits.growth, SourcedLimit { value: 2.0, source: LimitSource::Threshold });
        assert_eq!(
            limits.failing_relative_limit(),
            SourcedLimit { value: 0.12, source: LimitSource::Accept }
        );
    }

    #[test]
    fn the_larger_of_the_relative_and_absolute_time_limit_applies() {
        let limits = CaseLimits::default_limit(0.05);
        assert_eq!(limits.threshold(1e6, 0.0), limits.relative);
        assert_eq!(limits.threshold(1e3, 0.0), SourcedLimit::from_default(0.1));
        assert!((limits.threshold(1e6, 0.22).value - (1.05 * 1.22 - 1.0)).abs() < 1e-12);
    }

    #[test]
    fn an_accepted_slow_down_does_not_count_as_unchanged() {
        let plain = CaseLimits::default_limit(0.05);
        let accepting = plain.larger_with_accepted(Some(0.2), None);
        let reported =
            |limits: &CaseLimits, ratio| limits.reported(Verdict::Unchanged, ratio, 1e6, 0.0);
        assert_eq!(reported(&accepting, 1.1), Verdict::Accepted);
        assert_eq!(reported(&accepting, 1.04), Verdict::Unchanged);
        assert_eq!(accepting.reported(Verdict::Improved, 1.1, 1e6, 0.0), Verdict::Improved);
    }
}
