//! Flags of a bench binary that verbs with bench processes also have.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use clap::ValueEnum as _;

use crate::compare::progress::parse_duration;
use crate::compare::{PlanBasis, PlanRequest};
use crate::gate::limits::AskedLimits;
use crate::gate::paired::TestPlan;
use crate::gate::rules::rules_file::{MAX_ACCEPTED_TIME_NS, MAX_RULE_RATIO};
use kernelgate::harness::args::{BackendFlagValue, EffortFlagValue, PowerFlagValue};
use kernelgate::harness::scheduler::parse_shard;
use kernelgate::record::{Shard, TrialSampling};
use kernelgate::workload::AxisOverride;

/// Share of a case's time that is used to warm up.
const WARM_UP_SECONDS: f64 = 0.25;

/// Variable that gives a shard to benches.
pub const SHARD_VARIABLE: &str = "KERNELGATE_SHARD";

/// Settings of bench executables: cases, device and inputs.
#[derive(Debug, Clone, clap::Args)]
pub struct BenchProcessSettings {
    /// Number of cases and samples, as in `cargo bench`
    #[arg(long, env = "KERNELGATE_EFFORT", value_enum)]
    effort: Option<EffortFlagValue>,
    /// Power state of a GPU while a case is timed
    #[arg(long, env = "KERNELGATE_POWER", value_enum)]
    power: Option<PowerFlagValue>,
    /// Replace an axis' values, for example --axis s=512,777 (repeatable; values of one axis add
    /// up)
    #[arg(long, env = "KERNELGATE_AXIS", value_name = "AXIS=VALUE[,VALUE]", value_delimiter = ' ')]
    axis: Vec<AxisOverride>,
    /// Backend to run on: auto is the GPU if there is one, else the CPU
    #[arg(long, env = "KERNELGATE_BACKEND", value_enum)]
    backend: Option<BackendFlagValue>,
    /// Number of the GPU, counted from 0
    #[arg(long, env = "KERNELGATE_DEVICE", value_name = "NUMBER")]
    device: Option<usize>,
    /// GPUs of cases over several: their numbers (0,1), or a count of the first ones (2)
    #[arg(
        long,
        env = "KERNELGATE_DEVICES",
        value_name = "NUMBERS|COUNT",
        conflicts_with = "device"
    )]
    devices: Option<String>,
    /// Seed of the random inputs
    #[arg(long, env = "KERNELGATE_SEED", value_name = "NUMBER")]
    seed: Option<u64>,
    /// Seconds after which a kernel on the GPU is treated as hung
    #[arg(long, env = "KERNELGATE_TIMEOUT", value_name = "SECONDS")]
    timeout: Option<u64>,
    /// One of N parts of the work; auto takes I and N from the variables of Slurm, GitLab or
    /// Kubernetes, or from KERNELGATE_SHARD_INDEX and KERNELGATE_SHARD_COUNT
    #[arg(long, env = SHARD_VARIABLE, value_name = "I/N|auto", value_parser = parse_shard)]
    shard: Option<Shard>,
}

impl BenchProcessSettings {
    /// Returns the shard of the work that was requested.
    pub const fn shard(&self) -> Option<Shard> {
        self.shard
    }

    /// Text of the shard that follows a number of cases; empty if no shard was requested.
    pub fn shard_text(&self) -> String {
        self.shard.map_or_else(String::new, |shard| format!("; of shard {shard} only"))
    }

    /// The settings as variables for benches that must list every case, even if this process has a
    /// shard.
    pub fn variables_without_shard(&self) -> BTreeMap<String, String> {
        let mut variables = self.variables();
        variables.remove(SHARD_VARIABLE);
        variables
    }

    /// The settings as environment variables.
    pub fn variables(&self) -> BTreeMap<String, String> {
        let word = |value: &dyn Fn() -> Option<clap::builder::PossibleValue>| {
            value().map(|value| value.get_name().to_owned())
        };
        let axes: Vec<String> = self
            .axis
            .iter()
            .map(|wanted| format!("{}={}", wanted.axis, wanted.values.join(",")))
            .collect();
        let settings = [
            (
                "KERNELGATE_EFFORT",
                self.effort.and_then(|effort| word(&|| effort.to_possible_value())),
            ),
            ("KERNELGATE_POWER", self.power.and_then(|power| word(&|| power.to_possible_value()))),
            (
                "KERNELGATE_BACKEND",
                self.backend.and_then(|backend| word(&|| backend.to_possible_value())),
            ),
            ("KERNELGATE_AXIS", (!axes.is_empty()).then(|| axes.join(" "))),
            ("KERNELGATE_DEVICE", self.device.map(|device| device.to_string())),
            ("KERNELGATE_DEVICES", self.devices.clone()),
            ("KERNELGATE_SEED", self.seed.map(|seed| seed.to_string())),
            ("KERNELGATE_TIMEOUT", self.timeout.map(|seconds| seconds.to_string())),
            (SHARD_VARIABLE, self.shard.map(|shard| shard.to_string())),
        ];
        settings.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
    }

    /// Seed of the inputs: the requested one, or the benches' default.
    pub fn input_seed(&self) -> u64 {
        self.seed.unwrap_or(1)
    }

    /// Returns whether axis values select the cases.
    pub const fn names_axes(&self) -> bool {
        !self.axis.is_empty()
    }
}

/// Flags that set thresholds and the measurement time. These flags have no default values, because
/// the device's calibration precedes the defaults.
#[derive(Debug, Clone, clap::Args)]
pub struct ThresholdFlags {
    /// Largest number of blocks of four processes [default: as calibrated, else 96]
    #[arg(long, value_name = "COUNT")]
    max_blocks: Option<usize>,
    /// Smallest change that matters, as a fraction of the time [default: as calibrated, else 0.01]
    #[arg(long, value_name = "FRACTION", value_parser = parse_fraction)]
    relative: Option<f64>,
    /// Smallest change that matters, in nanoseconds [default: as calibrated, else 100]
    #[arg(long, value_name = "NS")]
    absolute: Option<f64>,
    /// Equivalence margin: a case without a visible change is unchanged if slow-downs above this
    /// fraction are excluded. Tested after 24, 48, 96 … blocks [default: as calibrated, else 0.05
    /// and 24 blocks]
    #[arg(long, value_name = "FRACTION", value_parser = parse_fraction)]
    tolerated: Option<f64>,
    /// Time for which a process times a case, a quarter of it to warm up [default: 0.4s, on a GPU
    /// 0.15s]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    case_time: Option<Duration>,
}

/// Flags that set timeouts for processes that may hang.
#[derive(Debug, Clone, clap::Args)]
pub struct ProcessTimeouts {
    /// Time after which a process of a bench is treated as hung and ended [default: 20s to report
    /// its version, 1m to list its cases, 30m to verify them; later processes 1m and ten times the
    /// time of the verification]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub wait: Option<Duration>,
    /// Time after which a build is treated as hung and ended
    #[arg(long, value_name = "TIME", default_value = "4h", value_parser = parse_duration)]
    pub build_wait: Duration,
}

/// Variables of a bench that change what is measured, which a comparison sets for the head alone.
pub const INJECTION_VARIABLES: [&str; 2] = ["KERNELGATE_DELAY", "KERNELGATE_LAYOUT"];

/// Refuses environment variables that would change both compared sides.
pub fn refuse_injected_changes() -> anyhow::Result<()> {
    for variable in INJECTION_VARIABLES {
        anyhow::ensure!(
            std::env::var_os(variable).is_none_or(|value| value.is_empty()),
            "{variable} is set: it would change both sides; unset it"
        );
    }
    Ok(())
}

/// Parses a fraction from text such as "0.05" or "5%".
pub fn parse_fraction(text: &str) -> Result<f64, String> {
    let number = |text: &str| text.trim().parse::<f64>().ok().filter(|value| value.is_finite());
    let fraction = match text.strip_suffix('%') {
        Some(percent) => number(percent).map(|percent| percent / 100.0),
        None => number(text),
    };
    fraction.ok_or_else(|| "write a fraction or a percentage, for example 0.05 or 5%".to_owned())
}

/// Checks the value of a flag, if it is set.
pub fn check_flag_range(
    flag: &str,
    value: impl Into<Option<f64>>,
    range: RangeInclusive<f64>,
) -> anyhow::Result<()> {
    let (least, most) = (range.start(), range.end());
    let possible = value.into().is_none_or(|value| range.contains(&value));
    anyhow::ensure!(possible, "{flag} takes a number from {least} to {most}");
    Ok(())
}

impl ThresholdFlags {
    /// The plan with these flags over a basis.
    pub fn plan(&self, basis: PlanBasis) -> anyhow::Result<PlanRequest> {
        for (flag, value, most) in [
            ("--relative", self.relative, MAX_RULE_RATIO),
            ("--absolute", self.absolute, MAX_ACCEPTED_TIME_NS),
            ("--tolerated", self.tolerated, MAX_RULE_RATIO),
        ] {
            check_flag_range(flag, value, 0.0..=most)?;
        }
        let most = self.max_blocks.unwrap_or(TestPlan::default().max_blocks);
        anyhow::ensure!(
            (1..=10_000).contains(&most),
            "--max-blocks takes a number from 1 to 10000"
        );
        let limits = AskedLimits {
            relative: self.relative,
            absolute_ns: self.absolute,
            tolerated: self.tolerated,
            ..AskedLimits::default()
        };
        Ok(PlanRequest { asked: limits, max_blocks: self.max_blocks, basis })
    }

    /// Time for which a process times a case.
    pub fn sampling(&self) -> Option<TrialSampling> {
        let whole_s = self.case_time?.as_secs_f64();
        Some(TrialSampling {
            warm_up_s: WARM_UP_SECONDS * whole_s,
            measurement_s: (1.0 - WARM_UP_SECONDS) * whole_s,
            ..TrialSampling::HOST_SAMPLING
        })
    }
}

#[cfg(test)]
mod tests {
    use super::parse_fraction;

    #[test]
    fn a_fraction_on_the_command_line_may_be_a_percentage() {
        assert_eq!(parse_fraction("0.05"), Ok(0.05));
        assert_eq!(parse_fraction("5%"), Ok(0.05));
        for text in ["", "%", "five", "5 percent", "inf", "NaN%"] {
            assert!(parse_fraction(text).unwrap_err().contains("0.05 or 5%"), "{text}");
        }
    }
}
