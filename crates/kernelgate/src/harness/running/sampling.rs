//! How the samples of cases are taken: under Criterion, or by the plan of a trial.

use std::time::Duration;

use criterion::{BenchmarkGroup, Criterion, Throughput};

use super::timing::{self, SamplingPlan};
use crate::backend::{BackendError, Executable};
use crate::harness::phase_timer;
use crate::harness::selection::cases::{ProblemGroup, SelectedCase};
use crate::harness::settings::BenchSettings;
use crate::harness::settings::args::ProcessMode;
use crate::measure::criterion::ElapsedTimeMethod;
use crate::measure::limits::TimeLimit;
use crate::measure::power::PowerMode;
use crate::measure::{CacheState, Stopwatch, energy};
use crate::record::{BaselineStore, CaseSamples, TrialSampling};
use crate::stats;
use crate::workload::Effort;

/// The way in which a process samples its cases: by Criterion, or by a fixed plan.
pub enum ProcessSampler<'a> {
    /// Criterion takes the samples, in the mode of the process, which may exclude measurement.
    Criterion(Box<Criterion<ElapsedTimeMethod>>, ElapsedTimeMethod, &'a BenchSettings),
    /// A trial takes a fixed number of samples of a fixed number of launches: Criterion takes no
    /// fewer than ten samples, and analyses each case alone.
    Plan(TrialSampling, PowerMode),
}

impl<'a> ProcessSampler<'a> {
    /// Samples by Criterion, with its store at the usual place.
    pub fn sampling_by_criterion(settings: &'a BenchSettings, store: &BaselineStore) -> Self {
        let elapsed = ElapsedTimeMethod::default();
        let criterion = criterion_with_measurement(store, settings.effort, elapsed.clone());
        Self::Criterion(Box::new(criterion), elapsed, settings)
    }

    /// Begins a problem.
    pub fn begin_problem(&mut self, group: &ProblemGroup<'_>) -> GroupCaseSampler<'_> {
        match self {
            Self::Criterion(criterion, elapsed, settings) => GroupCaseSampler::Criterion(
                open_criterion_group(criterion, group),
                elapsed,
                settings,
            ),
            Self::Plan(sampling, power) => GroupCaseSampler::Plan(*sampling, *power),
        }
    }
}

/// Takes the samples of one problem's cases.
pub enum GroupCaseSampler<'s> {
    /// Criterion's benchmark group of the problem.
    Criterion(BenchmarkGroup<'s, ElapsedTimeMethod>, &'s ElapsedTimeMethod, &'s BenchSettings),
    /// A trial takes a fixed number of samples of a fixed number of launches.
    Plan(TrialSampling, PowerMode),
}

/// A case whose samples are about to be measured.
pub struct CaseToSample<'a> {
    /// The case.
    pub case: &'a SelectedCase,
    /// The least time that the measured ceilings allow for the case.
    pub limit: Option<&'a TimeLimit>,
    /// Time of an earlier launch of the case; zero if it was not measured.
    pub launch: Duration,
}

impl GroupCaseSampler<'_> {
    /// Times a case.
    pub fn sample_case(
        &mut self,
        sampled: &CaseToSample<'_>,
        executable: &mut dyn Executable,
        stopwatch: &mut dyn Stopwatch,
    ) -> Result<CaseSamples, BackendError> {
        let (group, elapsed, settings) = match self {
            Self::Criterion(group, elapsed, settings) => (group, elapsed, settings),
            Self::Plan(sampling, power) => {
                return timing::time_trial_case(
                    executable,
                    stopwatch,
                    *sampling,
                    sampled.launch,
                    *power,
                );
            }
        };
        elapsed.displayed_case().borrow_mut().limit = sampled.limit.cloned();
        let sample = stopwatch.time_launches(executable, 1)?;
        let launch_ns = sample.elapsed_ns / sample.launches as f64;
        let (backend, function) =
            (sampled.case.row.backend, sampled.case.criterion_function_name());
        let plan = SamplingPlan::new(settings.effort, backend, launch_ns, settings);
        let mut samples =
            timing::run_in_criterion(group, &function, executable, stopwatch, plan, settings)?;
        let timed = settings.mode == ProcessMode::Bench && sampled.case.cache == CacheState::Hot;
        if settings.energy && timed {
            let _activity = phase_timer::start_activity("energy");
            let launch_ns = stats::median(&samples.per_launch_ns());
            samples.energy = Some(energy::measure_launch_energy(executable, stopwatch, launch_ns)?);
        }
        Ok(samples)
    }
}

/// Criterion with our measurement and its store at the usual place.
pub fn criterion_with_measurement(
    store: &BaselineStore,
    effort: Effort,
    elapsed: ElapsedTimeMethod,
) -> Criterion<ElapsedTimeMethod> {
    let criterion = Criterion::default()
        .with_measurement(elapsed)
        .output_directory(&store.criterion)
        .configure_from_args();
    // Plots are left off at quick effort, because drawing them takes as long as a quick measurement
    // of the case.
    if effort == Effort::Quick { criterion.without_plots() } else { criterion }
}

/// Opens Criterion's benchmark group of a problem.
pub fn open_criterion_group<'c>(
    criterion: &'c mut Criterion<ElapsedTimeMethod>,
    group: &ProblemGroup<'_>,
) -> BenchmarkGroup<'c, ElapsedTimeMethod> {
    let mut criterion_group = criterion.benchmark_group(group.id());
    let work = group.bound.problem().work();
    // Sets the throughput that Criterion reports for a problem: operations if GEMMs dominate, bytes
    // otherwise.
    criterion_group.throughput(match work.matmul_flops() {
        0 => Throughput::BytesDecimal(work.total_bytes()),
        flops => Throughput::Elements(flops),
    });
    criterion_group
}
