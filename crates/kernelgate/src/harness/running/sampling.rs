//! How the samples of cases are taken: under Criterion, or by the plan of a trial.

use std::time::Duration;

use criterion::{BenchmarkGroup, Criterion, Throughput};

use super::timing::{self, SamplingPlan};
use crate::backend::{BackendError, Executable};
use crate::harness::phase_timer;
use crate::harness::selection::cases::{Case, Group};
use crate::harness::settings::Settings;
use crate::harness::settings::args::Mode;
use crate::measure::criterion::Elapsed;
use crate::measure::limits::TimeLimit;
use crate::measure::power::PowerMode;
use crate::measure::{Cache, Stopwatch, energy};
use crate::record::{Samples, Store, TrialSampling};
use crate::stats;
use crate::workload::Effort;

/// Takes the samples of a process.
pub enum Sampler<'a> {
    /// Criterion, in the mode of the process; without measurement there are no samples.
    Criterion(Box<Criterion<Elapsed>>, Elapsed, &'a Settings),
    /// The plan of a trial: Criterion takes no fewer than ten samples, and analyses each case alone.
    Plan(TrialSampling, PowerMode),
}

impl<'a> Sampler<'a> {
    /// Samples by Criterion, with its store at the usual place.
    pub fn under_criterion(settings: &'a Settings, store: &Store) -> Self {
        let elapsed = Elapsed::default();
        let criterion = new_criterion(store, settings.effort, elapsed.clone());
        Self::Criterion(Box::new(criterion), elapsed, settings)
    }

    /// Begins a problem.
    pub fn open(&mut self, group: &Group<'_>) -> GroupSampler<'_> {
        match self {
            Self::Criterion(criterion, elapsed, settings) => {
                GroupSampler::Criterion(open_group(criterion, group), elapsed, settings)
            }
            Self::Plan(sampling, power) => GroupSampler::Plan(*sampling, *power),
        }
    }
}

/// Takes the samples of a problem's cases.
pub enum GroupSampler<'s> {
    /// Criterion's group of the problem.
    Criterion(BenchmarkGroup<'s, Elapsed>, &'s Elapsed, &'s Settings),
    /// The plan of a trial.
    Plan(TrialSampling, PowerMode),
}

/// A case that is sampled.
pub struct SampledCase<'a> {
    /// The case.
    pub case: &'a Case,
    /// The time that the ceilings allow.
    pub limit: Option<&'a TimeLimit>,
    /// Time of an earlier launch, if it was measured.
    pub launch: Duration,
}

impl GroupSampler<'_> {
    /// Times a case.
    ///
    /// # Errors
    /// When a launch fails.
    pub fn sample(
        &mut self,
        sampled: &SampledCase<'_>,
        executable: &mut dyn Executable,
        stopwatch: &mut dyn Stopwatch,
    ) -> Result<Samples, BackendError> {
        let (group, elapsed, settings) = match self {
            Self::Criterion(group, elapsed, settings) => (group, elapsed, settings),
            Self::Plan(sampling, power) => {
                return timing::trial(executable, stopwatch, *sampling, sampled.launch, *power);
            }
        };
        elapsed.displayed_case().borrow_mut().limit = sampled.limit.cloned();
        let sample = stopwatch.time(executable, 1)?;
        let launch_ns = sample.elapsed_ns / sample.launches as f64;
        let (backend, function) = (sampled.case.row.backend, sampled.case.function());
        let plan = SamplingPlan::new(settings.effort, backend, launch_ns, settings);
        let mut samples = timing::run(group, &function, executable, stopwatch, plan, settings)?;
        let timed = settings.mode == Mode::Bench && sampled.case.cache == Cache::Hot;
        if settings.energy && timed {
            let _activity = phase_timer::start("energy");
            let launch_ns = stats::median(&samples.per_launch_ns());
            samples.energy = Some(energy::measure(executable, stopwatch, launch_ns)?);
        }
        Ok(samples)
    }
}

/// Criterion with our measurement and its store at the usual place.
pub fn new_criterion(store: &Store, effort: Effort, elapsed: Elapsed) -> Criterion<Elapsed> {
    let criterion = Criterion::default()
        .with_measurement(elapsed)
        .output_directory(&store.criterion)
        .configure_from_args();
    // Drawing the plots of a case takes as long as a quick measurement of it.
    if effort == Effort::Quick { criterion.without_plots() } else { criterion }
}

/// Opens Criterion's group of a problem.
pub fn open_group<'c>(
    criterion: &'c mut Criterion<Elapsed>,
    group: &Group<'_>,
) -> BenchmarkGroup<'c, Elapsed> {
    let mut criterion_group = criterion.benchmark_group(group.id());
    let work = group.bound.problem().work();
    // One throughput a problem: operations where GEMMs dominate, bytes elsewhere.
    criterion_group.throughput(match work.matmul_flops() {
        0 => Throughput::BytesDecimal(work.total_bytes()),
        flops => Throughput::Elements(flops),
    });
    criterion_group
}
