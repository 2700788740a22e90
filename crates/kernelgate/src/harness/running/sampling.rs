//! How the samples of cases are taken: under Criterion, or by the plan of a trial.

use std::time::Duration;

use criterion::{BenchmarkGroup, Criterion, Throughput};

use super::timing::{self, SamplingPlan};
use crate::backend::{BackendError, Executable};
use crate::harness::selection::cases::{Case, Group};
use crate::harness::settings::Settings;
use crate::measure::Stopwatch;
use crate::measure::criterion::Elapsed;
use crate::measure::limits::TimeLimit;
use crate::measure::power::PowerMode;
use crate::record::{Samples, Store, TrialSampling};
use crate::workload::Effort;

/// Takes the samples of a process.
pub trait Sampler {
    /// Begins a problem.
    fn open<'s>(&'s mut self, group: &Group<'_>) -> Box<dyn GroupSampler + 's>;
}

/// A case that is sampled.
pub struct SampledCase<'a> {
    /// The case.
    pub case: &'a Case,
    /// The time that the ceilings allow.
    pub limit: Option<&'a TimeLimit>,
    /// Time of an earlier launch, where that was measured.
    pub launch: Duration,
}

/// Takes the samples of a problem's cases.
pub trait GroupSampler {
    /// Times a case.
    ///
    /// # Errors
    /// When a launch fails.
    fn sample(
        &mut self,
        sampled: &SampledCase<'_>,
        executable: &mut dyn Executable,
        stopwatch: &mut dyn Stopwatch,
    ) -> Result<Samples, BackendError>;
}

/// Criterion in the mode of the process; without measurement there are no samples.
pub struct UnderCriterion<'a> {
    settings: &'a Settings,
    effort: Effort,
    criterion: Criterion<Elapsed>,
    elapsed: Elapsed,
}

impl<'a> UnderCriterion<'a> {
    /// Criterion, with its store where it always is.
    pub fn new(settings: &'a Settings, effort: Effort, store: &Store) -> Self {
        let elapsed = Elapsed::default();
        let criterion = new_criterion(store, effort, elapsed.clone());
        Self { settings, effort, criterion, elapsed }
    }
}

impl Sampler for UnderCriterion<'_> {
    fn open<'s>(&'s mut self, group: &Group<'_>) -> Box<dyn GroupSampler + 's> {
        let Self { settings, effort, criterion, elapsed } = self;
        let group = open_group(criterion, group);
        Box::new(CriterionGroup { settings, effort: *effort, group, elapsed })
    }
}

struct CriterionGroup<'s> {
    settings: &'s Settings,
    effort: Effort,
    group: BenchmarkGroup<'s, Elapsed>,
    elapsed: &'s Elapsed,
}

impl GroupSampler for CriterionGroup<'_> {
    fn sample(
        &mut self,
        sampled: &SampledCase<'_>,
        executable: &mut dyn Executable,
        stopwatch: &mut dyn Stopwatch,
    ) -> Result<Samples, BackendError> {
        self.elapsed.shown().borrow_mut().limit = sampled.limit.cloned();
        let sample = stopwatch.time(executable, 1)?;
        let launch_ns = sample.elapsed_ns / sample.launches as f64;
        let backend = sampled.case.row.backend;
        let plan = SamplingPlan::new(self.effort, backend, launch_ns, self.settings);
        let function = sampled.case.function();
        timing::run(&mut self.group, &function, executable, stopwatch, plan, self.settings)
    }
}

/// The plan of a trial. Criterion takes no fewer than ten samples, and analyses each case alone.
#[derive(Clone, Copy)]
pub struct ByPlan {
    /// How long to time.
    pub sampling: TrialSampling,
    /// Power state of a GPU.
    pub power: PowerMode,
}

impl Sampler for ByPlan {
    fn open<'s>(&'s mut self, _: &Group<'_>) -> Box<dyn GroupSampler + 's> {
        Box::new(*self)
    }
}

impl GroupSampler for ByPlan {
    fn sample(
        &mut self,
        sampled: &SampledCase<'_>,
        executable: &mut dyn Executable,
        stopwatch: &mut dyn Stopwatch,
    ) -> Result<Samples, BackendError> {
        timing::trial(executable, stopwatch, self.sampling, sampled.launch, self.power)
    }
}

/// Criterion with our measurement, its store where it always is.
pub fn new_criterion(store: &Store, effort: Effort, elapsed: Elapsed) -> Criterion<Elapsed> {
    let criterion = Criterion::default()
        .with_measurement(elapsed)
        .output_directory(&store.criterion)
        .configure_from_args();
    // Plots of a case take as long as a quick look at it.
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
