//! Defines the command-line flags of a bench executable. Some flags mirror Criterion's flags, so
//! that kernelgate can read their values; the others are kernelgate's own.
//!
//! Criterion parses the process's arguments itself and rejects unknown flags. Therefore
//! kernelgate's own flags become environment variables, and the process restarts itself without
//! these flags (`flag_variables`); Criterion then sees only flags that it knows.

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
    DEFAULT_GPU_TIMEOUT_S, DEFAULT_HOST_TIMEOUT_S, RequestedBackendAndGpus,
};
use crate::harness::selection::filter::CaseIdFilter;
use crate::measure::delay::InjectedLaunchDelay;
use crate::measure::power::TimingPowerMode;
use crate::record::ShardOfWork;
use crate::record::store::check_baseline_file_name;
use crate::record::text::join_lines_with_spaces;
use crate::workload::{AxisValuesFromCommandLine, BenchEffort};
use kernelgate_cuda::instruments::barrier::MAX_GPUS_IN_BARRIER;
use kernelgate_cuda::{DeviceOptions, Devices};

/// Help heading above the flags that only kernelgate has.
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
    /// Set the power mode of a GPU: steady launches the case until its time no longer changes,
    /// burst pauses between samples to stay below the power cap
    #[arg(long, env = "KERNELGATE_POWER", value_enum, default_value = "steady")]
    pub power: PowerFlagValue,
    /// Also measure the energy per launch of hot cases, for about a second each after timing
    #[arg(long = "energy", env = "KERNELGATE_ENERGY")]
    pub measures_energy: bool,
    /// Set the order of the cases; a steady time does not depend on it
    #[arg(long, env = "KERNELGATE_ORDER", value_enum, default_value = "forward")]
    pub order: CaseOrderFlagValue,
    /// Replace the values of an axis, for example --axis s=512,777 (repeatable; values of one axis
    /// add up)
    #[arg(long, env = "KERNELGATE_AXIS", value_name = "AXIS=VALUE[,VALUE]", value_delimiter = ' ')]
    pub axis: Vec<AxisValuesFromCommandLine>,
    /// Select where cases run: auto is the GPU if there is one, else the CPU
    #[arg(long, env = "KERNELGATE_BACKEND", value_enum, default_value = "auto")]
    pub backend: BackendFlagValue,
    /// Select the GPU by its number, starting at 0
    #[arg(long, env = "KERNELGATE_DEVICE", value_name = "NUMBER")]
    pub device: Option<usize>,
    /// Select several GPUs for the cases that need them: by numbers (0,1), or the first N (2)
    #[arg(
        long,
        env = "KERNELGATE_DEVICES",
        value_name = "NUMBERS|COUNT",
        value_parser = parse_devices,
        conflicts_with = "device"
    )]
    pub devices: Option<Devices<usize>>,
    /// Set the seconds after which a GPU kernel, or host launches timed together, count as hung: by
    /// default 60 on the GPU, 600 on the host
    #[arg(long = "timeout", env = "KERNELGATE_TIMEOUT", value_name = "SECONDS")]
    pub timeout_s: Option<u64>,
    /// Set the seed of the random inputs
    #[arg(long, env = "KERNELGATE_SEED", default_value_t = 1)]
    pub seed: u64,
    /// Begin no further case once the session has run for this time (90s, 10m, 1h); list the other
    /// cases as not run
    #[arg(long = "budget", env = "KERNELGATE_BUDGET", value_name = "TIME", value_parser = duration::parse)]
    pub time_budget: Option<Duration>,
    /// Run one of N shards of the problems; auto takes I and N from variables of Slurm, GitLab or
    /// Kubernetes, or from KERNELGATE_SHARD_INDEX and KERNELGATE_SHARD_COUNT
    #[arg(long, env = "KERNELGATE_SHARD", value_name = "I/N|auto", value_parser = parse_shard)]
    pub shard: Option<ShardOfWork>,
    /// Delay launches artificially, to test the gate: NS nanoseconds for cases whose id contains
    /// CASE, by waiting, or with `:work` by memory passes; on a GPU with the SIZE fitted before
    #[arg(
        long,
        env = "KERNELGATE_DELAY",
        value_name = "CASE=NS[:work][@SIZE][,CASE=NS]",
        value_delimiter = ','
    )]
    pub delay: Vec<InjectedLaunchDelay>,
    /// Shift the addresses of code and memory, as another build of equal code would: the number of
    /// a layout
    #[arg(long = "layout", env = "KERNELGATE_LAYOUT", value_name = "NUMBER")]
    pub address_layout_number: Option<u32>,
    /// File with a request of the program `kernelgate`, which started this process
    #[arg(long = "request", env = "KERNELGATE_REQUEST", value_name = "FILE", hide = true)]
    pub request_file: Option<PathBuf>,

    /// Run only the case with exactly this id
    #[arg(long = "exact")]
    pub filter_is_exact_id: bool,
    /// List the case ids instead of timing
    #[arg(long = "list", conflicts_with_all = ["test", "profile_time"])]
    pub lists_case_ids: bool,
    /// Verify every case and launch it once, without timing
    #[arg(id = "test", long = "test", conflicts_with = "profile_time")]
    pub only_tests_cases: bool,
    /// Time briefly: effort quick, without plots
    #[arg(long)]
    pub quick: bool,
    /// Save the results as Criterion's baseline NAME and as baselines/DEVICE/NAME.json
    #[arg(
        short,
        long,
        value_name = "NAME",
        conflicts_with_all = ["baseline", "baseline_lenient", "discard_baseline"]
    )]
    pub save_baseline: Option<String>,
    /// Show Criterion's comparison with Criterion's baseline NAME
    #[arg(id = "baseline", 
        short,
        long = "baseline",
        value_name = "NAME",
        conflicts_with_all = ["baseline_lenient", "discard_baseline"]
    )]
    pub compared_criterion_baseline: Option<String>,
    /// Like --baseline, but a missing baseline is not an error
    #[arg(long, value_name = "NAME", conflicts_with = "discard_baseline")]
    pub baseline_lenient: Option<String>,
    /// With --baseline: compare Criterion's stored results NAME with the baseline instead of
    /// measuring
    #[arg(long, value_name = "NAME", requires = "baseline", conflicts_with = "profile_time")]
    pub load_baseline: Option<String>,
    /// Do not store results in Criterion's folder
    #[arg(long)]
    pub discard_baseline: bool,
    /// Launch each case repeatedly for this many seconds, for a profiler, without analysis
    #[arg(long, value_name = "SECONDS")]
    pub profile_time: Option<f64>,
    /// Number of samples per case, at least 10
    #[arg(long, value_name = "COUNT")]
    pub sample_size: Option<usize>,
    /// Seconds of warm-up before each case
    #[arg(long, value_name = "SECONDS")]
    pub warm_up_time: Option<f64>,
    /// Seconds of measurement per case
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
    #[arg(long = "bench", hide = true)]
    passed_by_cargo_bench: bool,
    #[arg(long = "ignored", hide = true)]
    libtest_ignored: bool,
    #[arg(value_name = "FORMAT", long = "format", hide = true, value_parser = ["pretty", "terse"])]
    libtest_format: Option<String>,
    #[arg(long, hide = true)]
    nocapture: bool,
    #[arg(long, hide = true)]
    show_output: bool,
    #[arg(long, hide = true)]
    include_ignored: bool,
    #[arg(short = 'V', long, hide = true)]
    version: bool,
}

/// Returns the clap definition of a bench executable's command line; environment variables of this
/// process are defaults.
pub fn command_line_of_bench_executables() -> clap::Command {
    // Only kernelgate's own flags can also be set by environment variables, so they get their own
    // help heading.
    let command = BenchProcessFlags::command().mut_args(|flag| match flag.get_env() {
        Some(_) => flag.help_heading(KERNELGATE_FLAGS_HEADING),
        None => flag,
    });
    variables::ignore_empty_flag_variables(command)
}

/// Parses kernelgate's and Criterion's flags of a bench executable.
///
/// # Errors
/// The problem with the arguments, or the requested help.
pub fn parse_bench_arguments(arguments: &[OsString]) -> Result<BenchProcessFlags, clap::Error> {
    BenchProcessFlags::from_arg_matches(
        &command_line_of_bench_executables().try_get_matches_from(arguments)?,
    )
}

/// Describes all environment variables whose values are invalid for their flags. A bench run itself
/// reports only the first invalid variable.
pub fn problems_of_flag_variables() -> Vec<String> {
    let flags = BenchProcessFlags::command();
    let with_variable = flags.get_arguments().filter(|flag| flag.get_env().is_some());
    let wrong = with_variable.filter_map(|of| {
        let id = of.get_id();
        let alone = |flag: clap::Arg| match flag.get_id() == id {
            true => flag,
            false => flag.env(clap::builder::Resettable::Reset),
        };
        let command =
            variables::ignore_empty_flag_variables(BenchProcessFlags::command().mut_args(alone));
        let error = command.clone().try_get_matches_from([""; 0]).err()?;
        let text = variables::command_line_error_naming_the_variable(&error, &command, &[]);
        let what = text.split("\n\n").next().unwrap_or_default();
        Some(join_lines_with_spaces(what.strip_prefix("error: ").unwrap_or(what)))
    });
    wrong.collect()
}

/// Values of the flag `--effort`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum EffortFlagValue {
    #[value(name = "quick")]
    QuickEffort,
    #[value(name = "default")]
    DefaultEffort,
    #[value(name = "thorough")]
    ThoroughEffort,
}

/// Values of the flag `--backend`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
#[allow(missing_docs)]
pub enum BackendFlagValue {
    #[default]
    #[value(name = "auto")]
    GpuIfAvailable,
    Cpu,
    Cuda,
}

impl From<BackendFlagValue> for Option<BackendKind> {
    fn from(name: BackendFlagValue) -> Self {
        match name {
            BackendFlagValue::GpuIfAvailable => None,
            BackendFlagValue::Cpu => Some(BackendKind::Cpu),
            BackendFlagValue::Cuda => Some(BackendKind::Cuda),
        }
    }
}

/// Values of the flag `--order`: the order in which cases run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CaseOrderFlagValue {
    /// In the order in which `--list` prints the cases
    #[value(name = "forward")]
    ListedOrder,
    /// Last case first
    #[value(name = "reverse")]
    ReversedListedOrder,
}

/// Values of the flag `--power`: how the GPU's power is controlled during timing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PowerFlagValue {
    /// Under steady load, at the clock that the GPU sustains
    #[value(name = "steady")]
    SteadyLoad,
    /// After pauses that keep the average power below the power cap
    #[value(name = "burst")]
    BurstAfterPauses,
}

impl From<PowerFlagValue> for TimingPowerMode {
    fn from(name: PowerFlagValue) -> Self {
        match name {
            PowerFlagValue::SteadyLoad => Self::SteadyLoad,
            PowerFlagValue::BurstAfterPauses => Self::BurstsAfterPauses,
        }
    }
}

impl From<EffortFlagValue> for BenchEffort {
    fn from(name: EffortFlagValue) -> Self {
        match name {
            EffortFlagValue::QuickEffort => Self::Quick,
            EffortFlagValue::DefaultEffort => Self::Default,
            EffortFlagValue::ThoroughEffort => Self::Thorough,
        }
    }
}

/// Task of the bench process, such as measuring or testing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BenchProcessTask {
    /// Verify, time, record.
    TimeCases,
    /// Verify and run once.
    TestCases,
    /// Print ids.
    ListCases,
    /// Verify each case, then launch it repeatedly for a profiler.
    ProfileCases,
    /// Show stored results.
    ShowStoredResults,
    /// Answer the request of the program `kernelgate` in this file.
    RespondToRequestFile(PathBuf),
}

impl BenchProcessFlags {
    /// The flags of a bench run without arguments.
    pub fn flags_of_plain_bench_run() -> BenchProcessFlags {
        Self::parse_from(["--bench"])
    }

    /// Returns the task of the bench process. Without cargo's flag `--bench`, a bench executable
    /// only tests its cases, like Criterion's benches.
    pub fn process_mode(&self) -> BenchProcessTask {
        match (self.mode_by_criterion_flags(), self.request_file.clone()) {
            (BenchProcessTask::TimeCases, Some(request)) => {
                BenchProcessTask::RespondToRequestFile(request)
            }
            (mode, _) => mode,
        }
    }

    fn mode_by_criterion_flags(&self) -> BenchProcessTask {
        if self.lists_case_ids {
            BenchProcessTask::ListCases
        } else if self.only_tests_cases || !self.passed_by_cargo_bench {
            BenchProcessTask::TestCases
        } else if self.profile_time.is_some() {
            BenchProcessTask::ProfileCases
        } else if self.load_baseline.is_some() {
            BenchProcessTask::ShowStoredResults
        } else {
            BenchProcessTask::TimeCases
        }
    }

    /// Backend and GPUs that the user requested.
    pub fn requested_backend_and_gpus(&self) -> RequestedBackendAndGpus {
        RequestedBackendAndGpus {
            backend: self.backend.into(),
            gpu_ordinals: self.devices.clone().or_else(|| self.device.map(Devices::from)),
            options: DeviceOptions {
                hung_kernel_timeout: Duration::from_secs(
                    self.timeout_s.unwrap_or(DEFAULT_GPU_TIMEOUT_S),
                ),
                ..DeviceOptions::from_environment()
            },
        }
    }

    /// Returns the time after which launches on the host count as hung.
    pub fn timeout_of_host_launches(&self) -> Duration {
        Duration::from_secs(self.timeout_s.unwrap_or(DEFAULT_HOST_TIMEOUT_S))
    }

    /// How many problems the bench process runs.
    pub fn requested_effort(&self) -> BenchEffort {
        match self.effort {
            Some(name) => name.into(),
            None if self.quick => BenchEffort::Quick,
            None => BenchEffort::Default,
        }
    }

    /// The filter for case ids that the flags describe.
    ///
    /// # Errors
    /// Fails if the filter is not a regular expression.
    pub fn filter_of_case_ids(&self) -> Result<CaseIdFilter, HarnessError> {
        if self.libtest_ignored {
            return Ok(CaseIdFilter::NoCase);
        }
        CaseIdFilter::parse_exact_id_or_regex(self.filter.as_deref(), self.filter_is_exact_id)
    }

    /// Rejects flag values with which Criterion would panic.
    ///
    /// # Errors
    /// The error names the flag whose value is out of range.
    pub fn check_flag_values(&self) -> Result<(), HarnessError> {
        for name in [
            &self.save_baseline,
            &self.compared_criterion_baseline,
            &self.baseline_lenient,
            &self.load_baseline,
        ]
        .into_iter()
        .flatten()
        {
            check_baseline_file_name(name)?;
        }
        for (flag, is_given) in [
            ("--delay (KERNELGATE_DELAY)", !self.delay.is_empty()),
            ("--layout (KERNELGATE_LAYOUT)", self.address_layout_number.is_some()),
        ] {
            if self.save_baseline.is_some() && is_given {
                return Err(HarnessError::BaselineOfDelayedRun { flag });
            }
        }
        if self.request_file.is_some()
            && self.mode_by_criterion_flags() != BenchProcessTask::TimeCases
        {
            return Err(HarnessError::RequestOutsideBenchRun);
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
                return Err(HarnessError::FlagValueOutOfRange { flag, accepted_values: range });
            }
        }
        if self.plotting_backend.as_deref() == Some("gnuplot")
            && std::process::Command::new("gnuplot").arg("--version").output().is_err()
        {
            return Err(HarnessError::GnuplotNotInstalled);
        }
        Ok(())
    }
}

/// Parses the value of `--devices`: GPU numbers separated by commas, or a count of GPUs.
///
/// # Errors
/// The error says why the text describes no GPUs.
pub fn parse_devices(text: &str) -> Result<Devices<usize>, String> {
    let number = |text: &str| {
        text.trim().parse::<usize>().map_err(|_| format!("`{text}` is no number of a GPU"))
    };
    let numbers: Vec<usize> = match text.split_once(',') {
        Some(_) => text.trim_end_matches(',').split(',').map(number).collect::<Result<_, _>>()?,
        None => (0..number(text)?.min(MAX_GPUS_IN_BARRIER + 1)).collect(),
    };
    if numbers.len() > MAX_GPUS_IN_BARRIER {
        return Err(format!("more than {MAX_GPUS_IN_BARRIER} GPUs"));
    }
    Devices::from_distinct_in_order(numbers)
        .ok_or_else(|| "no GPU, or one of them twice".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::store::RecordLookupError;

    fn parse_flags_of_line(line: &str) -> BenchProcessFlags {
        BenchProcessFlags::try_parse_from(line.split_whitespace()).unwrap()
    }

    #[test]
    fn clap_accepts_the_definition_of_the_bench_flags() {
        BenchProcessFlags::command().debug_assert();
    }

    #[test]
    fn flags_select_the_mode_that_criterion_would_select() {
        assert_eq!(parse_flags_of_line("--bench").process_mode(), BenchProcessTask::TimeCases);
        assert_eq!(parse_flags_of_line("").process_mode(), BenchProcessTask::TestCases);
        assert_eq!(
            parse_flags_of_line("--test --bench").process_mode(),
            BenchProcessTask::TestCases
        );
        assert_eq!(parse_flags_of_line("--list").process_mode(), BenchProcessTask::ListCases);
        assert_eq!(
            parse_flags_of_line("--profile-time 5 --bench").process_mode(),
            BenchProcessTask::ProfileCases
        );
        assert_eq!(
            parse_flags_of_line("--load-baseline a --baseline a --bench").process_mode(),
            BenchProcessTask::ShowStoredResults
        );
        assert_eq!(parse_flags_of_line("--quick --bench").requested_effort(), BenchEffort::Quick);
    }

    #[test]
    fn devices_are_parsed_as_numbers_or_as_a_count() {
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
    fn flag_values_that_make_criterion_panic_are_errors() {
        for line in [
            "--sample-size 5",
            "--warm-up-time 0",
            "--measurement-time nan",
            "--confidence-level 1",
            "--profile-time 0.5",
            "--nresamples 0",
        ] {
            match parse_flags_of_line(line).check_flag_values().unwrap_err() {
                HarnessError::FlagValueOutOfRange { flag, .. } => {
                    assert!(line.starts_with(flag), "{flag}")
                }
                other => panic!("{other:?}"),
            }
        }
        for line in ["--save-baseline ../x", "--baseline .x"] {
            let error = parse_flags_of_line(line).check_flag_values().unwrap_err();
            assert!(
                matches!(error, HarnessError::Store(RecordLookupError::InvalidBaselineName(_))),
                "{error:?}"
            );
        }
        match parse_flags_of_line("a(b").filter_of_case_ids().unwrap_err() {
            HarnessError::InvalidCaseFilter { case_filter: filter, regex_fault: problem } => {
                assert_eq!([&*filter, &problem], ["a(b", "unclosed group"]);
            }
            other => panic!("{other:?}"),
        }
    }
}
