//! The command-line flags of a bench binary. Some mirror Criterion's flags, so that kernelgate can
//! read them; the others are kernelgate's own.
//!
//! Criterion parses the arguments of the process itself and rejects flags that it does not know.
//! Kernelgate's own flags therefore become environment variables, and the process restarts itself
//! without them (`flag_variables`); Criterion sees exactly its own command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{CommandFactory, FromArgMatches, Parser, ValueEnum};

use super::scheduler::parse_shard;
use super::variables;
use crate::backend::BackendKind;
use crate::display::duration;
use crate::harness::error::HarnessError;
use crate::harness::selection::backend_choice::{
    DEFAULT_GPU_TIMEOUT_S, DEFAULT_HOST_TIMEOUT_S, DeviceRequest,
};
use crate::harness::selection::filter::CaseFilter;
use crate::measure::delay::InjectedDelay;
use crate::measure::power::PowerMode;
use crate::record::Shard;
use crate::record::store::check_path_component;
use crate::record::text::on_one_line;
use crate::workload::{AxisOverride, Effort};
use kernelgate_cuda::instruments::barrier::MAX_BARRIER_GPUS;
use kernelgate_cuda::{DeviceOptions, Devices};

/// Heading of the flags that Criterion lacks.
const KERNELGATE_FLAGS_HEADING: &str = "kernelgate's options";

/// Verify and time the cases of a bench.
#[derive(Debug, Parser)]
#[command(
    no_binary_name = true,
    disable_version_flag = true,
    override_usage = "cargo bench -- [FILTER] [OPTIONS]",
    after_help = "kernelgate's options can also be given as environment variables: \
                  KERNELGATE_EFFORT=thorough cargo bench.\n\nExamples:\n  cargo bench -- \
                  attention/forward\n  cargo bench -- --quick\n  cargo bench -- --effort thorough \
                  --shard 1/4\n  cargo bench -- --axis s=777 --axis d=128 forward"
)]
pub struct BenchProcessFlags {
    /// Run only cases whose id matches this regular expression
    pub filter: Option<String>,

    /// Set which cases run, and how long: quick, default or thorough
    #[arg(long, env = "KERNELGATE_EFFORT", value_enum)]
    pub effort: Option<EffortFlagValue>,
    /// Set the power state of a GPU while a case is timed: steady launches the case until its
    /// time no longer changes, burst pauses between samples to stay below the power cap
    #[arg(long, env = "KERNELGATE_POWER", value_enum, default_value = "steady")]
    pub power: PowerFlagValue,
    /// Also measure the energy of a launch of hot cases, in a pass of a second each
    #[arg(long, env = "KERNELGATE_ENERGY")]
    pub energy: bool,
    /// Set the order of the cases; a steady time does not depend on it
    #[arg(long, env = "KERNELGATE_ORDER", value_enum, default_value = "forward")]
    pub order: CaseOrderFlagValue,
    /// Replace an axis' values, for example --axis s=512,777 (repeatable; values of one
    /// axis add up)
    #[arg(long, env = "KERNELGATE_AXIS", value_name = "AXIS=VALUE[,VALUE]", value_delimiter = ' ')]
    pub axis: Vec<AxisOverride>,
    /// Select where cases run: auto is the GPU if there is one, else the CPU
    #[arg(long, env = "KERNELGATE_BACKEND", value_enum, default_value = "auto")]
    pub backend: BackendFlagValue,
    /// Select the GPU, counted from 0
    #[arg(long, env = "KERNELGATE_DEVICE", value_name = "NUMBER")]
    pub device: Option<usize>,
    /// Select several GPUs for the cases that need them: their numbers (0,1), or how many of the
    /// first (2)
    #[arg(
        long,
        env = "KERNELGATE_DEVICES",
        value_name = "NUMBERS|COUNT",
        value_parser = parse_devices,
        conflicts_with = "device"
    )]
    pub devices: Option<Devices<usize>>,
    /// Set the seconds after which a kernel on the GPU, or launches on the host that are timed
    /// together, are treated as hung: 60 on the GPU, 600 on the host
    #[arg(long, env = "KERNELGATE_TIMEOUT", value_name = "SECONDS")]
    pub timeout: Option<u64>,
    /// Set the seed of the random inputs
    #[arg(long, env = "KERNELGATE_SEED", default_value_t = 1)]
    pub seed: u64,
    /// Begin no case once the session has taken this long (90s, 10m, 1h); list the rest
    /// as not run
    #[arg(long, env = "KERNELGATE_BUDGET", value_name = "TIME", value_parser = duration::parse)]
    pub budget: Option<Duration>,
    /// Measure one of N parts of the problems; auto takes I and N from the variables of
    /// Slurm, GitLab or Kubernetes, or from KERNELGATE_SHARD_INDEX and KERNELGATE_SHARD_COUNT
    #[arg(long, env = "KERNELGATE_SHARD", value_name = "I/N|auto", value_parser = parse_shard)]
    pub shard: Option<Shard>,
    /// Make launches slower on purpose, to try the gate: nanoseconds added to cases
    /// whose id contains CASE, by a wait, or with `:work` by passes over memory; on a GPU of the
    /// size behind `@`, where it was fitted before
    #[arg(
        long,
        env = "KERNELGATE_DELAY",
        value_name = "CASE=NS[:work][@SIZE][,CASE=NS]",
        value_delimiter = ','
    )]
    pub delay: Vec<InjectedDelay>,
    /// Put code and memory at other addresses, as another build of the same code would:
    /// the number of a layout
    #[arg(long, env = "KERNELGATE_LAYOUT", value_name = "NUMBER")]
    pub layout: Option<u32>,
    /// A request of the program, which runs this process
    #[arg(long, env = "KERNELGATE_REQUEST", value_name = "FILE", hide = true)]
    pub request: Option<PathBuf>,

    /// Run only the case with exactly this id
    #[arg(long)]
    pub exact: bool,
    /// List the ids instead of timing
    #[arg(long, conflicts_with_all = ["test", "profile_time"])]
    pub list: bool,
    /// Verify every case and run it once, without timing
    #[arg(long, conflicts_with = "profile_time")]
    pub test: bool,
    /// Time briefly: effort quick, without plots
    #[arg(long)]
    pub quick: bool,
    /// Save the results as Criterion's baseline and as baselines/DEVICE/NAME.json
    #[arg(
        short,
        long,
        value_name = "NAME",
        conflicts_with_all = ["baseline", "baseline_lenient", "discard_baseline"]
    )]
    pub save_baseline: Option<String>,
    /// Show Criterion's comparison with its baseline NAME
    #[arg(
        short,
        long,
        value_name = "NAME",
        conflicts_with_all = ["baseline_lenient", "discard_baseline"]
    )]
    pub baseline: Option<String>,
    /// Like --baseline, but a missing baseline is not an error
    #[arg(long, value_name = "NAME", conflicts_with = "discard_baseline")]
    pub baseline_lenient: Option<String>,
    /// With --baseline: compare Criterion's stored results of NAME instead of measuring
    #[arg(long, value_name = "NAME", requires = "baseline", conflicts_with = "profile_time")]
    pub load_baseline: Option<String>,
    /// Do not store results in Criterion's folder
    #[arg(long)]
    pub discard_baseline: bool,
    /// Run each case for this many seconds, for a profiler, without analysis
    #[arg(long, value_name = "SECONDS")]
    pub profile_time: Option<f64>,
    /// Number of samples of a case, at least 10
    #[arg(long, value_name = "COUNT")]
    pub sample_size: Option<usize>,
    /// Seconds of warm-up before each case
    #[arg(long, value_name = "SECONDS")]
    pub warm_up_time: Option<f64>,
    /// Seconds for which each case is measured
    #[arg(long, value_name = "SECONDS")]
    pub measurement_time: Option<f64>,
    /// Number of bootstrap resamples in Criterion's analysis
    #[arg(long, value_name = "COUNT")]
    pub nresamples: Option<usize>,
    /// Noise threshold of Criterion's comparison
    #[arg(long, value_name = "FRACTION")]
    pub noise_threshold: Option<f64>,
    /// Confidence level of Criterion's intervals
    #[arg(long, value_name = "FRACTION")]
    pub confidence_level: Option<f64>,
    /// Significance level of Criterion's comparison
    #[arg(long, value_name = "FRACTION")]
    pub significance_level: Option<f64>,
    /// Draw no plots
    #[arg(short, long)]
    pub noplot: bool,
    /// gnuplot or plotters
    #[arg(long, value_parser = ["gnuplot", "plotters"])]
    pub plotting_backend: Option<String>,
    /// criterion or bencher
    #[arg(long, value_parser = ["criterion", "bencher"], default_value = "criterion")]
    pub output_format: String,
    /// auto, always or never
    #[arg(short, long, value_parser = ["auto", "always", "never"], default_value = "auto")]
    pub color: String,
    /// Print more statistics
    #[arg(short, long)]
    pub verbose: bool,
    /// Print only the results
    #[arg(long, conflicts_with = "verbose")]
    pub quiet: bool,
    #[arg(long, hide = true)]
    bench: bool,
    #[arg(long, hide = true)]
    ignored: bool,
    #[arg(long, hide = true, value_parser = ["pretty", "terse"])]
    format: Option<String>,
    #[arg(long, hide = true)]
    nocapture: bool,
    #[arg(long, hide = true)]
    show_output: bool,
    #[arg(long, hide = true)]
    include_ignored: bool,
    #[arg(short = 'V', long, hide = true)]
    version: bool,
}

/// Returns the command line of a bench binary, with defaults from the environment variables of this
/// process.
pub fn bench_command_line() -> clap::Command {
    // Flags of kernelgate, unlike flags of Criterion, can be set by an environment variable.
    let command = BenchProcessFlags::command().mut_args(|flag| match flag.get_env() {
        Some(_) => flag.help_heading(KERNELGATE_FLAGS_HEADING),
        None => flag,
    });
    variables::ignore_empty_variables(command)
}

/// Parses the flags of kernelgate and those of Criterion.
///
/// # Errors
/// The problem with the arguments, or the requested help.
pub fn parse(arguments: &[OsString]) -> Result<BenchProcessFlags, clap::Error> {
    BenchProcessFlags::from_arg_matches(&bench_command_line().try_get_matches_from(arguments)?)
}

/// Returns the problems of all environment variables that stand for flags. A bench reports the
/// first wrong variable when it runs.
pub fn wrong_flag_variables() -> Vec<String> {
    let flags = BenchProcessFlags::command();
    let with_variable = flags.get_arguments().filter(|flag| flag.get_env().is_some());
    let wrong = with_variable.filter_map(|of| {
        let id = of.get_id();
        let alone = |flag: clap::Arg| match flag.get_id() == id {
            true => flag,
            false => flag.env(clap::builder::Resettable::Reset),
        };
        let command =
            variables::ignore_empty_variables(BenchProcessFlags::command().mut_args(alone));
        let error = command.clone().try_get_matches_from([""; 0]).err()?;
        let text = variables::explain_command_line_error(&error, &command, &[]);
        let what = text.split("\n\n").next().unwrap_or_default();
        Some(on_one_line(what.strip_prefix("error: ").unwrap_or(what)))
    });
    wrong.collect()
}

/// The values of the flag that sets the effort.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum EffortFlagValue {
    Quick,
    Default,
    Thorough,
}

/// The values of the flag that selects the backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
#[allow(missing_docs)]
pub enum BackendFlagValue {
    #[default]
    Auto,
    Cpu,
    Cuda,
}

impl From<BackendFlagValue> for Option<BackendKind> {
    fn from(name: BackendFlagValue) -> Self {
        match name {
            BackendFlagValue::Auto => None,
            BackendFlagValue::Cpu => Some(BackendKind::Cpu),
            BackendFlagValue::Cuda => Some(BackendKind::Cuda),
        }
    }
}

/// Order of the cases on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CaseOrderFlagValue {
    /// In the order that `--list` prints
    Forward,
    /// The last one first
    Reverse,
}

/// The values of the flag that selects the power state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PowerFlagValue {
    /// At the clock that the card sustains under this load
    Steady,
    /// Behind pauses that keep the average power below the cap
    Burst,
}

impl From<PowerFlagValue> for PowerMode {
    fn from(name: PowerFlagValue) -> Self {
        match name {
            PowerFlagValue::Steady => Self::Steady,
            PowerFlagValue::Burst => Self::Burst,
        }
    }
}

impl From<EffortFlagValue> for Effort {
    fn from(name: EffortFlagValue) -> Self {
        match name {
            EffortFlagValue::Quick => Self::Quick,
            EffortFlagValue::Default => Self::Default,
            EffortFlagValue::Thorough => Self::Thorough,
        }
    }
}

/// Task of the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessMode {
    /// Verify, time, record.
    Bench,
    /// Verify and run once.
    Test,
    /// Print ids.
    List,
    /// Verify each case, then launch it for a profiler.
    Profile,
    /// Show stored results.
    Load,
    /// Answer the request of the program in this file.
    Respond(PathBuf),
}

impl BenchProcessFlags {
    /// Default values of all flags of a bench.
    pub fn default_flags() -> BenchProcessFlags {
        Self::parse_from(["--bench"])
    }

    /// Task of the process. Without cargo's flag `--bench` a bench binary only tests its cases, as
    /// Criterion's do.
    pub fn process_mode(&self) -> ProcessMode {
        match (self.mode_of_criterion(), self.request.clone()) {
            (ProcessMode::Bench, Some(request)) => ProcessMode::Respond(request),
            (mode, _) => mode,
        }
    }

    fn mode_of_criterion(&self) -> ProcessMode {
        if self.list {
            ProcessMode::List
        } else if self.test || !self.bench {
            ProcessMode::Test
        } else if self.profile_time.is_some() {
            ProcessMode::Profile
        } else if self.load_baseline.is_some() {
            ProcessMode::Load
        } else {
            ProcessMode::Bench
        }
    }

    /// Requested device.
    pub fn device(&self) -> DeviceRequest {
        DeviceRequest {
            backend: self.backend.into(),
            devices: self.devices.clone().or_else(|| self.device.map(Devices::from)),
            options: DeviceOptions {
                timeout: Duration::from_secs(self.timeout.unwrap_or(DEFAULT_GPU_TIMEOUT_S)),
                ..DeviceOptions::from_environment()
            },
        }
    }

    /// Timeout after which launches on the host are treated as hung.
    pub fn host_timeout(&self) -> Duration {
        Duration::from_secs(self.timeout.unwrap_or(DEFAULT_HOST_TIMEOUT_S))
    }

    /// How much to run.
    pub fn requested_effort(&self) -> Effort {
        match self.effort {
            Some(name) => name.into(),
            None if self.quick => Effort::Quick,
            None => Effort::Default,
        }
    }

    /// Which ids to run.
    ///
    /// # Errors
    /// Fails if the filter is not a regular expression.
    pub fn case_filter(&self) -> Result<CaseFilter, HarnessError> {
        if self.ignored {
            return Ok(CaseFilter::None);
        }
        CaseFilter::parse(self.filter.as_deref(), self.exact)
    }

    /// Rejects values that Criterion would answer with a panic.
    ///
    /// # Errors
    /// The error names the flag whose value is out of range.
    pub fn check(&self) -> Result<(), HarnessError> {
        for name in
            [&self.save_baseline, &self.baseline, &self.baseline_lenient, &self.load_baseline]
                .into_iter()
                .flatten()
        {
            check_path_component(name)?;
        }
        for (flag, is_given) in [
            ("--delay (KERNELGATE_DELAY)", !self.delay.is_empty()),
            ("--layout (KERNELGATE_LAYOUT)", self.layout.is_some()),
        ] {
            if self.save_baseline.is_some() && is_given {
                return Err(HarnessError::DelayedBaseline { flag });
            }
        }
        if self.request.is_some() && self.mode_of_criterion() != ProcessMode::Bench {
            return Err(HarnessError::RequestOutsideBench);
        }
        let positive = |value: Option<f64>| {
            value.is_none_or(|value| value > 0.0 && value.is_finite() && value < 1e9)
        };
        let fraction = |value: Option<f64>| value.is_none_or(|value| value > 0.0 && value < 1.0);
        let profiles = self.profile_time.is_none_or(|seconds| (1.0..1e9).contains(&seconds));
        for (flag, is_possible, range) in [
            ("--sample-size", self.sample_size.is_none_or(|count| count >= 10), "a number from 10"),
            ("--nresamples", self.nresamples != Some(0), "a number from 1"),
            ("--profile-time", profiles, "seconds from 1"),
            ("--warm-up-time", positive(self.warm_up_time), "seconds above 0"),
            ("--measurement-time", positive(self.measurement_time), "seconds above 0"),
            ("--noise-threshold", positive(self.noise_threshold), "a number above 0"),
            ("--confidence-level", fraction(self.confidence_level), "a number between 0 and 1"),
            ("--significance-level", fraction(self.significance_level), "a number between 0 and 1"),
        ] {
            if !is_possible {
                return Err(HarnessError::FlagValue { flag, range });
            }
        }
        if self.plotting_backend.as_deref() == Some("gnuplot")
            && std::process::Command::new("gnuplot").arg("--version").output().is_err()
        {
            return Err(HarnessError::NoGnuplot);
        }
        Ok(())
    }
}

/// The GPUs of `--devices`: numbers separated by commas, or a count of the first ones.
///
/// # Errors
/// The error states why the text names no GPUs.
pub fn parse_devices(text: &str) -> Result<Devices<usize>, String> {
    let number = |text: &str| {
        text.trim().parse::<usize>().map_err(|_| format!("`{text}` is no number of a GPU"))
    };
    let numbers: Vec<usize> = match text.split_once(',') {
        Some(_) => text.trim_end_matches(',').split(',').map(number).collect::<Result<_, _>>()?,
        None => (0..number(text)?.min(MAX_BARRIER_GPUS + 1)).collect(),
    };
    if numbers.len() > MAX_BARRIER_GPUS {
        return Err(format!("more than {MAX_BARRIER_GPUS} GPUs"));
    }
    Devices::in_launch_order(numbers).ok_or_else(|| "no GPU, or one of them twice".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::store::StoreError;

    fn parse_flags(line: &str) -> BenchProcessFlags {
        BenchProcessFlags::try_parse_from(line.split_whitespace()).unwrap()
    }

    #[test]
    fn clap_accepts_the_definition_of_the_bench_flags() {
        BenchProcessFlags::command().debug_assert();
    }

    #[test]
    fn flags_select_the_same_mode_as_criterion() {
        assert_eq!(parse_flags("--bench").process_mode(), ProcessMode::Bench);
        assert_eq!(parse_flags("").process_mode(), ProcessMode::Test);
        assert_eq!(parse_flags("--test --bench").process_mode(), ProcessMode::Test);
        assert_eq!(parse_flags("--list").process_mode(), ProcessMode::List);
        assert_eq!(parse_flags("--profile-time 5 --bench").process_mode(), ProcessMode::Profile);
        assert_eq!(
            parse_flags("--load-baseline a --baseline a --bench").process_mode(),
            ProcessMode::Load
        );
        assert_eq!(parse_flags("--quick --bench").requested_effort(), Effort::Quick);
    }

    #[test]
    fn several_gpus_are_given_as_numbers_or_as_a_count() {
        let ordinals =
            |text| parse_devices(text).map(|set| set.iter().copied().collect::<Vec<_>>());
        assert_eq!(ordinals("2"), Ok(vec![0, 1]));
        assert_eq!(ordinals("3,1"), Ok(vec![3, 1]));
        assert_eq!(ordinals("1,"), Ok(vec![1]));
        for wrong in ["0", "", "a", "1,1", "0,,1", "-1", "17", "99999999999"] {
            assert!(ordinals(wrong).is_err(), "{wrong}");
        }
        let both = "--device 0 --devices 2".split_whitespace();
        assert!(BenchProcessFlags::try_parse_from(both).is_err());
    }

    #[test]
    fn flag_values_that_would_panic_are_errors_naming_the_flag() {
        for line in [
            "--sample-size 5",
            "--warm-up-time 0",
            "--measurement-time nan",
            "--confidence-level 1",
            "--profile-time 0.5",
            "--nresamples 0",
        ] {
            match parse_flags(line).check().unwrap_err() {
                HarnessError::FlagValue { flag, .. } => assert!(line.starts_with(flag), "{flag}"),
                other => panic!("{other:?}"),
            }
        }
        for line in ["--save-baseline ../x", "--baseline .x"] {
            let error = parse_flags(line).check().unwrap_err();
            assert!(matches!(error, HarnessError::Store(StoreError::Name(_))), "{error:?}");
        }
        match parse_flags("a(b").case_filter().unwrap_err() {
            HarnessError::Filter { filter, problem } => {
                assert_eq!([&*filter, &problem], ["a(b", "unclosed group"]);
            }
            other => panic!("{other:?}"),
        }
    }
}
