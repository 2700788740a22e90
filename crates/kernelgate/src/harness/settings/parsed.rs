//! Settings of a bench process, from its flags and environment variables.

use std::path::PathBuf;
use std::time::Duration;

use super::args::{BenchProcessFlags, CaseOrderFlagValue, ProcessMode};
use crate::harness::error::HarnessError;
use crate::harness::selection::backend_choice::DeviceRequest;
use crate::harness::selection::filter::CaseFilter;
use crate::measure::delay::InjectedDelay;
use crate::measure::power::PowerMode;
use crate::record::Shard;
use crate::workload::{AxisOverride, Effort};

/// Names of baselines in Criterion's store; the saved name is also the name of kernelgate's
/// baseline.
#[derive(Debug, Clone, Default)]
pub struct CriterionBaselineNames {
    /// Gets this run.
    pub save: Option<String>,
    /// Name of the stored Criterion baseline that is compared with this run.
    pub compare: Option<String>,
    /// Name of a Criterion baseline that is compared with this run if it is stored.
    pub compare_if_stored: Option<String>,
    /// Name of a stored result that is shown instead of a run.
    pub load: Option<String>,
}

/// The parts of Criterion's sampling plan that the user chose by flags.
#[derive(Debug, Clone, Copy, Default)]
pub struct ChosenCriterionPlan {
    /// Samples of a case.
    pub samples: Option<usize>,
    /// Warm-up, seconds.
    pub warm_up_s: Option<f64>,
    /// Measurement, seconds.
    pub measurement_s: Option<f64>,
    /// Bootstrap resamples.
    pub resamples: Option<usize>,
}

/// Facts of the process besides its flags.
#[derive(Debug, Clone, Default)]
pub struct ProcessFacts {
    /// Whether Criterion's own output is suppressed.
    pub silent_criterion: bool,
    /// Name of the session, if one was given.
    pub session: Option<String>,
    /// File of this program.
    pub executable: Option<PathBuf>,
    /// Whether the package has other benches; a filter that matches nothing here may match there.
    pub has_other_benches: bool,
}

/// Flags and variables of a bench process.
#[derive(Debug, Clone)]
pub struct BenchSettings {
    /// Task of the process.
    pub mode: ProcessMode,
    /// Which cases by default, and how long each is timed.
    pub effort: Effort,
    /// Power state of a GPU while a case is timed.
    pub power: PowerMode,
    /// Whether the energy of a launch is measured, in a separate pass after timing.
    pub energy: bool,
    /// Whether the cases run in reverse order.
    pub reversed: bool,
    /// Axis values of the command line that replace those of the selection.
    pub axes: Vec<AxisOverride>,
    /// Ids that run.
    pub filter: CaseFilter,
    /// The shard of the problems that this process runs.
    pub shard: Option<Shard>,
    /// Requested device.
    pub device: DeviceRequest,
    /// Launches on the host that take longer are treated as hung.
    pub host_timeout: Duration,
    /// Seed of the inputs.
    pub seed: u64,
    /// Time budget after which no further case begins.
    pub budget: Option<Duration>,
    /// Deliberate delays.
    pub delays: Vec<InjectedDelay>,
    /// Baselines in Criterion's store.
    pub baselines: CriterionBaselineNames,
    /// Parts of Criterion's plan that the user chose.
    pub plan: ChosenCriterionPlan,
    /// Prints results only.
    pub quiet: bool,
    /// Prints our table.
    pub table: bool,
    /// Facts of the process.
    pub process: ProcessFacts,
}

impl BenchSettings {
    /// Checks the flags of a process and turns them into settings.
    ///
    /// # Errors
    /// The error names the flag or variable that makes no sense.
    pub fn new(flags: &BenchProcessFlags, process: ProcessFacts) -> Result<Self, HarnessError> {
        flags.check()?;
        Ok(Self {
            mode: flags.process_mode(),
            effort: flags.requested_effort(),
            power: flags.power.into(),
            energy: flags.energy,
            reversed: flags.order == CaseOrderFlagValue::Reverse,
            axes: flags.axis.clone(),
            filter: flags.case_filter()?,
            shard: flags.shard,
            device: flags.device(),
            host_timeout: flags.host_timeout(),
            seed: flags.seed,
            budget: flags.budget,
            delays: flags.delay.clone(),
            baselines: CriterionBaselineNames {
                save: flags.save_baseline.clone(),
                compare: flags.baseline.clone(),
                compare_if_stored: flags.baseline_lenient.clone(),
                load: flags.load_baseline.clone(),
            },
            plan: ChosenCriterionPlan {
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

    /// Settings of a command line without flags.
    ///
    /// # Panics
    /// Panics if a variable of this process makes no sense.
    pub fn default_settings() -> BenchSettings {
        Self::new(&BenchProcessFlags::default_flags(), ProcessFacts::default())
            .expect("variables make sense")
    }

    /// Parses a command line into the settings of a bench, for tests.
    #[cfg(test)]
    pub fn parse(line: &str) -> Result<BenchSettings, HarnessError> {
        use clap::Parser as _;
        Self::new(
            &BenchProcessFlags::try_parse_from(line.split_whitespace()).unwrap(),
            ProcessFacts::default(),
        )
    }
}
