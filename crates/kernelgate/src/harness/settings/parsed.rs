//! Settings of a bench process.

use std::path::PathBuf;
use std::time::Duration;

use super::args::{Flags, Mode, OrderName};
use crate::harness::error::HarnessError;
use crate::harness::selection::cases::CaseOrder;
use crate::harness::selection::filter::Filter;
use crate::harness::selection::place::DeviceRequest;
use crate::measure::delay::Delay;
use crate::measure::power::PowerMode;
use crate::record::Shard;
use crate::workload::{Effort, Override};

/// Names of baselines in Criterion's store; the saved one is ours too.
#[derive(Debug, Clone, Default)]
pub struct BaselineNames {
    /// Gets this run.
    pub save: Option<String>,
    /// Name of a stored result that is shown with this run.
    pub compare: Option<String>,
    /// Name of a result that is shown with this run if it is stored.
    pub compare_if_stored: Option<String>,
    /// Name of a stored result that is shown instead of a run.
    pub load: Option<String>,
}

/// Parts of Criterion's plan that the user chose.
#[derive(Debug, Clone, Copy, Default)]
pub struct ChosenPlan {
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
    /// Whether Criterion's lines stay out of the output.
    pub silent_criterion: bool,
    /// Name of the session, if one was given.
    pub session: Option<String>,
    /// File of this program.
    pub executable: Option<PathBuf>,
    /// Whether the package has other benches, which a filter may be for.
    pub has_other_benches: bool,
}

/// Flags and variables of a bench process.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Task of the process.
    pub mode: Mode,
    /// Which cases by default, and how long each is timed.
    pub effort: Effort,
    /// Power state of a GPU while a case is timed.
    pub power: PowerMode,
    /// Whether the energy of a launch is measured, in a pass of its own.
    pub energy: bool,
    /// Order of the cases.
    pub order: CaseOrder,
    /// Values that replace those of axes.
    pub axes: Vec<Override>,
    /// Ids that run.
    pub filter: Filter,
    /// The shard of the problems that runs.
    pub shard: Option<Shard>,
    /// Requested device.
    pub device: DeviceRequest,
    /// Launches on the host that take longer are treated as hung.
    pub host_timeout: Duration,
    /// Seed of the inputs.
    pub seed: u64,
    /// Time after which no case begins.
    pub budget: Option<Duration>,
    /// Deliberate delays.
    pub delays: Vec<Delay>,
    /// Baselines in Criterion's store.
    pub baselines: BaselineNames,
    /// Parts of Criterion's plan that the user chose.
    pub plan: ChosenPlan,
    /// Prints results only.
    pub quiet: bool,
    /// Prints our table.
    pub table: bool,
    /// Facts of the process.
    pub process: ProcessFacts,
}

impl Settings {
    /// Checks flags and turns them into settings.
    ///
    /// # Errors
    /// Names the flag or variable that makes no sense.
    pub fn new(flags: &Flags, process: ProcessFacts) -> Result<Self, HarnessError> {
        flags.check()?;
        Ok(Self {
            mode: flags.mode(),
            effort: flags.effort(),
            power: flags.power.into(),
            energy: flags.energy,
            order: match flags.order {
                OrderName::Forward => CaseOrder::Forward,
                OrderName::Reverse => CaseOrder::Reverse,
            },
            axes: flags.axis.clone(),
            filter: flags.filter()?,
            shard: flags.shard,
            device: flags.device(),
            host_timeout: flags.host_timeout(),
            seed: flags.seed,
            budget: flags.budget,
            delays: flags.delay.clone(),
            baselines: BaselineNames {
                save: flags.save_baseline.clone(),
                compare: flags.baseline.clone(),
                compare_if_stored: flags.baseline_lenient.clone(),
                load: flags.load_baseline.clone(),
            },
            plan: ChosenPlan {
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
    /// When a variable of this process makes no sense.
    pub fn defaults() -> Self {
        Self::new(&Flags::defaults(), ProcessFacts::default()).expect("variables make sense")
    }

    /// Settings of a command line.
    #[cfg(test)]
    pub fn parse(line: &str) -> Result<Self, HarnessError> {
        use clap::Parser as _;
        Self::new(&Flags::try_parse_from(line.split_whitespace()).unwrap(), ProcessFacts::default())
    }
}
