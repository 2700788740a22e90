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

/// Names of baselines in Criterion's store; the run is saved under the name `save` to kernelgate's
/// baseline too.
#[derive(Debug, Clone, Default)]
pub struct CriterionBaselineFlags {
    /// Gets this run.
    pub save: Option<String>,
    /// Name of the stored Criterion baseline with which this run is compared.
    pub compare: Option<String>,
    /// Name of the Criterion baseline with which this run is compared, if it is stored.
    pub compare_if_stored: Option<String>,
    /// Name of stored Criterion results that are shown instead of running cases.
    pub shown_results: Option<String>,
}

/// The parts of the sampling plan that the user set by Criterion's flags.
#[derive(Debug, Clone, Copy, Default)]
pub struct SamplingPlanFlags {
    /// Samples of a case.
    pub samples: Option<usize>,
    /// Warm-up, seconds.
    pub warm_up_s: Option<f64>,
    /// Measurement, seconds.
    pub measurement_s: Option<f64>,
    /// Bootstrap resamples.
    pub resamples: Option<usize>,
}

/// Facts about the process that do not come from its flags.
#[derive(Debug, Clone, Default)]
pub struct BenchProcessFacts {
    /// Whether Criterion's own output is suppressed.
    pub silent_criterion: bool,
    /// The session name, if the user chose one.
    pub session: Option<String>,
    /// File of this program.
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
    pub energy: bool,
    /// Whether the cases run in reverse order.
    pub reversed: bool,
    /// Axis values from the command line, which replace the selection's own values.
    pub axes: Vec<AxisValuesFromCommandLine>,
    /// Ids that run.
    pub filter: CaseIdFilter,
    /// The shard of the problems that this process runs; `None`: all problems.
    pub shard: Option<ShardOfWork>,
    /// Backend and GPUs that the user requested.
    pub device: RequestedBackendAndGpus,
    /// Launches on the host that exceed this time count as hung.
    pub host_timeout: Duration,
    /// Seed of the inputs.
    pub seed: u64,
    /// Time budget after which no further case begins.
    pub budget: Option<Duration>,
    /// Deliberate delays.
    pub delays: Vec<InjectedLaunchDelay>,
    /// Baselines in Criterion's store.
    pub baselines: CriterionBaselineFlags,
    /// Parts of the sampling plan that the user set by Criterion's flags.
    pub plan: SamplingPlanFlags,
    /// Prints results only.
    pub quiet: bool,
    /// Prints our table.
    pub table: bool,
    /// Facts of the process.
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
            energy: flags.energy,
            reversed: flags.order == CaseOrderFlagValue::Reverse,
            axes: flags.axis.clone(),
            filter: flags.filter_of_case_ids()?,
            shard: flags.shard,
            device: flags.requested_backend_and_gpus(),
            host_timeout: flags.timeout_of_host_launches(),
            seed: flags.seed,
            budget: flags.budget,
            delays: flags.delay.clone(),
            baselines: CriterionBaselineFlags {
                save: flags.save_baseline.clone(),
                compare: flags.baseline.clone(),
                compare_if_stored: flags.baseline_lenient.clone(),
                shown_results: flags.load_baseline.clone(),
            },
            plan: SamplingPlanFlags {
                samples: flags.sample_size,
                warm_up_s: flags.warm_up_time,
                measurement_s: flags.measurement_time,
                resamples: flags.nresamples,
            },
            quiet: flags.quiet,
            table: flags.output_format == "criterion" || process.silent_criterion,
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
