//! Settings of bench processes (effort, backend, device, seed, shard) as command-line flags, for
//! all verbs that start bench processes.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use clap::ValueEnum as _;

use crate::compare::progress::parse_duration;
use crate::compare::{TestPlanBasis, TestPlanRequest};
use crate::gate::limits::RequestedLimits;
use crate::gate::paired::ComparisonTestPlan;
use crate::gate::rules::rules_file::{MAX_RATIO_IN_RULES, MAX_TIME_IN_RULES_NS};
use kernelgate::harness::args::{BackendFlagValue, EffortFlagValue, PowerFlagValue};
use kernelgate::harness::scheduler::parse_shard;
use kernelgate::record::{ShardOfWork, TrialSamplingPlan};
use kernelgate::workload::AxisValuesFromCommandLine;

/// Share of the time that a process spends on a case (`--case-time`) that is used to warm up.
const WARM_UP_SHARE_OF_CASE_TIME: f64 = 0.25;

/// Environment variable that names the shard of the cases that a bench process runs.
pub const SHARD_ENVIRONMENT_VARIABLE: &str = "KERNELGATE_SHARD";

/// Command-line flags with settings of bench processes: effort, power state, axes, backend, device,
/// seed, timeout and shard.
#[derive(Debug, Clone, clap::Args)]
pub struct BenchSettingsFlags {
    /// How many cases are run and how many samples are taken, as in `cargo bench`
    #[arg(long, env = "KERNELGATE_EFFORT", value_enum)]
    effort: Option<EffortFlagValue>,
    /// Power state in which a GPU is while a case is timed
    #[arg(
        id = "power",
        value_name = "POWER",
        long = "power",
        env = "KERNELGATE_POWER",
        value_enum
    )]
    gpu_power_state: Option<PowerFlagValue>,
    /// Replace the values of a workload's axis, for example --axis s=512,777 (repeatable; values of
    /// one axis add up)
    #[arg(
        long = "axis",
        env = "KERNELGATE_AXIS",
        value_name = "AXIS=VALUE[,VALUE]",
        value_delimiter = ' '
    )]
    axis_values: Vec<AxisValuesFromCommandLine>,
    /// Backend on which cases run: auto is the GPU if there is one, else the CPU
    #[arg(long, env = "KERNELGATE_BACKEND", value_enum)]
    backend: Option<BackendFlagValue>,
    /// Ordinal of the GPU on which cases run, counted from 0
    #[arg(id = "device", long = "device", env = "KERNELGATE_DEVICE", value_name = "NUMBER")]
    gpu_ordinal: Option<usize>,
    /// GPUs for cases that use several: their numbers (0,1), or how many GPUs from number 0 on (2)
    #[arg(
        id = "devices",
        long = "devices",
        env = "KERNELGATE_DEVICES",
        value_name = "NUMBERS|COUNT",
        conflicts_with = "device"
    )]
    gpu_ordinals_or_count: Option<String>,
    /// Seed of the random input data
    #[arg(id = "seed", long = "seed", env = "KERNELGATE_SEED", value_name = "NUMBER")]
    input_data_seed: Option<u64>,
    /// Seconds after which a kernel that has not finished on the GPU is treated as hung
    #[arg(long = "timeout", env = "KERNELGATE_TIMEOUT", value_name = "SECONDS")]
    kernel_timeout_s: Option<u64>,
    /// One of N parts of the cases; auto takes I and N from the variables of Slurm, GitLab or
    /// Kubernetes, or from KERNELGATE_SHARD_INDEX and KERNELGATE_SHARD_COUNT
    #[arg(long, env = SHARD_ENVIRONMENT_VARIABLE, value_name = "I/N|auto", value_parser = parse_shard)]
    shard: Option<ShardOfWork>,
}

impl BenchSettingsFlags {
    /// The shard of the cases that `--shard` requests; `None` without the flag.
    pub const fn requested_shard(&self) -> Option<ShardOfWork> {
        self.shard
    }

    /// Text that names the requested shard after a number of cases, "; of shard 1/4 only"; empty
    /// without `--shard`.
    pub fn shard_note_after_case_count(&self) -> String {
        self.shard.map_or_else(String::new, |shard| format!("; of shard {shard} only"))
    }

    /// The settings as environment variables for bench processes that must list every case, even if
    /// this process has a shard.
    pub fn bench_environment_variables_without_shard(&self) -> BTreeMap<String, String> {
        let mut variables = self.bench_environment_variables();
        variables.remove(SHARD_ENVIRONMENT_VARIABLE);
        variables
    }

    /// The settings as environment variables for bench processes.
    pub fn bench_environment_variables(&self) -> BTreeMap<String, String> {
        let word = |value: &dyn Fn() -> Option<clap::builder::PossibleValue>| {
            value().map(|value| value.get_name().to_owned())
        };
        let axes: Vec<String> = self
            .axis_values
            .iter()
            .map(|wanted| format!("{}={}", wanted.axis, wanted.replacement_values.join(",")))
            .collect();
        let settings = [
            (
                "KERNELGATE_EFFORT",
                self.effort.and_then(|effort| word(&|| effort.to_possible_value())),
            ),
            (
                "KERNELGATE_POWER",
                self.gpu_power_state.and_then(|power| word(&|| power.to_possible_value())),
            ),
            (
                "KERNELGATE_BACKEND",
                self.backend.and_then(|backend| word(&|| backend.to_possible_value())),
            ),
            ("KERNELGATE_AXIS", (!axes.is_empty()).then(|| axes.join(" "))),
            ("KERNELGATE_DEVICE", self.gpu_ordinal.map(|device| device.to_string())),
            ("KERNELGATE_DEVICES", self.gpu_ordinals_or_count.clone()),
            ("KERNELGATE_SEED", self.input_data_seed.map(|seed| seed.to_string())),
            ("KERNELGATE_TIMEOUT", self.kernel_timeout_s.map(|seconds| seconds.to_string())),
            (SHARD_ENVIRONMENT_VARIABLE, self.shard.map(|shard| shard.to_string())),
        ];
        settings.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
    }

    /// Seed of the input data: the one of `--seed`, or 1, the default of the benches.
    pub fn input_data_seed(&self) -> u64 {
        self.input_data_seed.unwrap_or(1)
    }

    /// Whether `--axis` selects the values of an axis, and thereby the cases.
    pub const fn overrides_axes(&self) -> bool {
        !self.axis_values.is_empty()
    }
}

/// Command-line flags with the thresholds of a comparison and the time for a case. The threshold
/// flags have no default values, because thresholds of the device's calibration come before the
/// program's defaults.
#[derive(Debug, Clone, clap::Args)]
pub struct ThresholdFlags {
    /// Largest number of blocks of four processes (two of base, two of head) [default: as
    /// calibrated, else 96]
    #[arg(id = "max_blocks", long = "max-blocks", value_name = "COUNT")]
    max_process_blocks: Option<usize>,
    /// Smallest change of a case's time that matters, as a fraction of the time [default: as
    /// calibrated, else 0.01]
    #[arg(id = "relative", long = "relative", value_name = "FRACTION", value_parser = parse_fraction_or_percentage)]
    min_relative_change: Option<f64>,
    /// Smallest change of a case's time that matters, in nanoseconds [default: as calibrated, else
    /// 100]
    #[arg(long = "absolute", value_name = "NS")]
    min_change_ns: Option<f64>,
    /// Equivalence margin: a case without a significant change counts as unchanged if the test
    /// excludes slow-downs above this fraction. This test runs after 24, 48, 96 … blocks [default:
    /// as calibrated, else 0.05 and 24 blocks]
    #[arg(id = "tolerated", long = "tolerated", value_name = "FRACTION", value_parser = parse_fraction_or_percentage)]
    equivalence_margin: Option<f64>,
    /// Time that a process spends on a case, a quarter of it to warm up [default: 0.4s, on a GPU
    /// 0.15s]
    #[arg(long = "case-time", value_name = "TIME", value_parser = parse_duration)]
    process_time_per_case: Option<Duration>,
}

/// Command-line flags with timeouts for bench processes and builds that may hang.
#[derive(Debug, Clone, clap::Args)]
pub struct ProcessTimeoutFlags {
    /// Time after which a bench process is treated as hung and killed [default: 20s to report its
    /// version, 1m to list its cases, 30m to verify them; later processes 1m and ten times the time
    /// of the verification]
    #[arg(id = "wait", long = "wait", value_name = "TIME", value_parser = parse_duration)]
    pub bench_process_timeout: Option<Duration>,
    /// Time after which a build is treated as hung and killed
    #[arg(long = "build-wait", value_name = "TIME", default_value = "4h", value_parser = parse_duration)]
    pub build_timeout: Duration,
}

/// Environment variables of a bench process that change what is measured (an added delay, another
/// memory layout); a comparison sets them only for the head.
pub const CHANGE_INJECTION_VARIABLES: [&str; 2] = ["KERNELGATE_DELAY", "KERNELGATE_LAYOUT"];

/// Returns an error if this process has variables that inject a change, because both base and head
/// would be changed.
pub fn refuse_injection_variables_of_user() -> anyhow::Result<()> {
    for variable in CHANGE_INJECTION_VARIABLES {
        anyhow::ensure!(
            std::env::var_os(variable).is_none_or(|value| value.is_empty()),
            "{variable} is set: it would change both sides; unset it"
        );
    }
    Ok(())
}

/// Parses a fraction from a text such as "0.05" or "5%".
pub fn parse_fraction_or_percentage(text: &str) -> Result<f64, String> {
    let number = |text: &str| text.trim().parse::<f64>().ok().filter(|value| value.is_finite());
    let fraction = match text.strip_suffix('%') {
        Some(percent) => number(percent).map(|percent| percent / 100.0),
        None => number(text),
    };
    fraction.ok_or_else(|| "write a fraction or a percentage, for example 0.05 or 5%".to_owned())
}

/// Returns an error if the value of a flag is set and lies outside the range.
pub fn check_flag_in_range(
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
    /// The measurement plan: the thresholds of these flags, with values of `basis` where a flag is
    /// not set.
    pub fn test_plan_overriding_basis(
        &self,
        basis: TestPlanBasis,
    ) -> anyhow::Result<TestPlanRequest> {
        for (flag, value, most) in [
            ("--relative", self.min_relative_change, MAX_RATIO_IN_RULES),
            ("--absolute", self.min_change_ns, MAX_TIME_IN_RULES_NS),
            ("--tolerated", self.equivalence_margin, MAX_RATIO_IN_RULES),
        ] {
            check_flag_in_range(flag, value, 0.0..=most)?;
        }
        let most =
            self.max_process_blocks.unwrap_or(ComparisonTestPlan::default().max_trial_blocks);
        anyhow::ensure!(
            (1..=10_000).contains(&most),
            "--max-blocks takes a number from 1 to 10000"
        );
        let limits = RequestedLimits {
            relative_time_change_threshold: self.min_relative_change,
            absolute_time_change_threshold_ns: self.min_change_ns,
            max_unchanged_relative_change: self.equivalence_margin,
            ..RequestedLimits::default()
        };
        Ok(TestPlanRequest {
            requested_limits: limits,
            max_trial_blocks: self.max_process_blocks,
            plan_basis: basis,
        })
    }

    /// How long a process warms a case up and times it, from `--case-time`; `None` without the
    /// flag.
    pub fn warm_up_and_timing_durations(&self) -> Option<TrialSamplingPlan> {
        let whole_s = self.process_time_per_case?.as_secs_f64();
        Some(TrialSamplingPlan {
            warm_up_s: WARM_UP_SHARE_OF_CASE_TIME * whole_s,
            measurement_s: (1.0 - WARM_UP_SHARE_OF_CASE_TIME) * whole_s,
            ..TrialSamplingPlan::SAMPLING_ON_HOST
        })
    }
}

#[cfg(test)]
mod tests {
    use super::parse_fraction_or_percentage;

    #[test]
    fn a_fraction_on_the_command_line_may_be_a_percentage() {
        assert_eq!(parse_fraction_or_percentage("0.05"), Ok(0.05));
        assert_eq!(parse_fraction_or_percentage("5%"), Ok(0.05));
        for text in ["", "%", "five", "5 percent", "inf", "NaN%"] {
            assert!(
                parse_fraction_or_percentage(text).unwrap_err().contains("0.05 or 5%"),
                "{text}"
            );
        }
    }
}
