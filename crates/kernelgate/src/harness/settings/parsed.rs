//! The settings of a bench process, made from its flags and environment variables.

use std::path::PathBuf;
use std::time::Duration;

use super::args::{BenchProcessFlags, BenchProcessTask, CaseOrderFlagValue};
use crate::harness::error::HarnessError;
use crate::harness::selection::backend_choice::RequestedBackendAndGpus;
use crate::harness::selection::filter::CaseIdFilter;
use crate::measure::delay::InjectedLaunchDelay;
use crate::measure::power::TimingPowerMode;
use crate::record::ShardOfWork;
use crate::workload::{AxisValuesFromCommandLine, BenchEffort};

/// Names of baselines in Criterion's store; the run is saved under the name `saved_baseline` to
/// kernelgate's baseline too.
#[derive(Debug, Clone, Default)]
pub struct CriterionBaselineFlags {
    /// Gets this run.
    pub saved_baseline: Option<String>,
    /// Name of the stored Criterion baseline with which this run is compared.
    pub compared_baseline: Option<String>,
    /// Name of the Criterion baseline with which this run is compared, if it is stored.
    pub compared_baseline_if_stored: Option<String>,
    /// Name of stored Criterion results that are shown instead of running cases.
    pub name_of_shown_results: Option<String>,
}

/// The parts of the sampling plan that the user set by Criterion's flags.
#[derive(Debug, Clone, Copy, Default)]
pub struct SamplingPlanFlags {
    /// Number of samples that are taken of each case.
    pub sample_count: Option<usize>,
    /// Warm-up, seconds.
    pub warm_up_s: Option<f64>,
    /// Measurement, seconds.
    pub measurement_s: Option<f64>,
    /// Bootstrap resamples.
    pub bootstrap_resamples: Option<usize>,
}

/// Facts about the process that do not come from its flags.
#[derive(Debug, Clone, Default)]
pub struct BenchProcessFacts {
    /// Whether Criterion's own output is suppressed.
    pub silent_criterion: bool,
    /// The session name, if the user chose one.
    pub session_name: Option<String>,
    /// Path of this program's executable file.
    pub executable: Option<PathBuf>,
    /// Whether the package has other bench executables, in which a filter without match here may
    /// match.
    pub has_other_benches: bool,
}

/// Settings of a bench process from its flags and environment variables.
#[derive(Debug, Clone)]
pub struct BenchSettings {
    /// Task of the bench process, such as measuring or testing.
    pub mode: BenchProcessTask,
    /// Determines which cases run by default, and how long each is timed.
    pub effort: BenchEffort,
    /// How the GPU's power is controlled during timing: steady load or bursts.
    pub power: TimingPowerMode,
    /// Whether the energy per launch is measured after timing.
    pub measures_energy: bool,
    /// Whether the cases run in reverse order.
    pub reverses_case_order: bool,
    /// Axis values from the command line, which replace the selection's own values.
    pub axes: Vec<AxisValuesFromCommandLine>,
    /// Ids that run.
    pub filter: CaseIdFilter,
    /// The shard of the problems that this process runs; `None`: all problems.
    pub shard: Option<ShardOfWork>,
    /// Backend and GPUs that the user requested.
    pub requested_backend_and_gpus: RequestedBackendAndGpus,
    /// Launches on the host that exceed this time count as hung.
    pub host_launch_timeout: Duration,
    /// Seed of the inputs.
    pub input_seed: u64,
    /// Time budget after which no further case begins.
    pub time_budget: Option<Duration>,
    /// Deliberate delays.
    pub delays: Vec<InjectedLaunchDelay>,
    /// Names of the baselines in Criterion's store that the user gave by flags.
    pub baselines: CriterionBaselineFlags,
    /// Parts of the sampling plan that the user set by Criterion's flags.
    pub plan: SamplingPlanFlags,
    /// Prints results only.
    pub quiet: bool,
    /// Prints our table.
    pub prints_results_table: bool,
    /// Facts about the bench process that do not come from its flags.
    pub process: BenchProcessFacts,
}

impl BenchSettings {
    /// Checks the flags of a bench process and converts them to settings.
    ///
    /// # Errors
    /// The error names the invalid flag or environment variable.
    pub fn from_checked_flags(
        flags: &BenchProcessFlags,
        process: BenchProcessFacts,
    ) -> Result<Self, HarnessError> {
        flags.check_flag_values()?;
        Ok(Self {
            mode: flags.process_mode(),
            effort: flags.requested_effort(),
            power: flags.power.into(),
            measures_energy: flags.measures_energy,
            reverses_case_order: flags.order == CaseOrderFlagValue::ReversedListedOrder,
            axes: flags.axis.clone(),
            filter: flags.filter_of_case_ids()?,
            shard: flags.shard,
            requested_backend_and_gpus: flags.requested_backend_and_gpus(),
            host_launch_timeout: flags.timeout_of_host_launches(),
            input_seed: flags.seed,
            time_budget: flags.time_budget,
            delays: flags.delay.clone(),
            baselines: CriterionBaselineFlags {
                saved_baseline: flags.save_baseline.clone(),
                compared_baseline: flags.compared_criterion_baseline.clone(),
                compared_baseline_if_stored: flags.baseline_lenient.clone(),
                name_of_shown_results: flags.load_baseline.clone(),
            },
            plan: SamplingPlanFlags {
                sample_count: flags.sample_size,
                warm_up_s: flags.warm_up_time,
                measurement_s: flags.measurement_time,
                bootstrap_resamples: flags.nresamples,
            },
            quiet: flags.quiet,
            prints_results_table: flags.output_format == "criterion" || process.silent_criterion,
            process,
        })
    }

    /// Settings of a bench run without flags.
    ///
    /// # Panics
    /// Panics if an environment variable of this process is invalid.
    pub fn settings_of_plain_bench_run() -> BenchSettings {
        Self::from_checked_flags(
            &BenchProcessFlags::flags_of_plain_bench_run(),
            BenchProcessFacts::default(),
        )
        .expect("variables make sense")
    }

    /// Parses a command line into the settings of a bench process, for tests.
    #[cfg(test)]
    pub fn parse_command_line(line: &str) -> Result<BenchSettings, HarnessError> {
        use clap::Parser as _;
        Self::from_checked_flags(
            &BenchProcessFlags::try_parse_from(line.split_whitespace()).unwrap(),
            BenchProcessFacts::default(),
        )
    }
}
