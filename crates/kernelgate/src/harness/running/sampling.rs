//! How a case's samples are taken: by Criterion, or by the fixed plan of a comparison's trial.

use std::time::Duration;

use criterion::{BenchmarkGroup, Criterion, Throughput};

use super::timing::{self, SamplingPlan};
use crate::backend::{BackendError, LaunchableProblem};
use crate::harness::phase_timer;
use crate::harness::selection::cases::{SelectedCase, SelectedProblem};
use crate::harness::settings::BenchSettings;
use crate::harness::settings::args::BenchProcessTask;
use crate::measure::criterion::ElapsedTimeMeasurement;
use crate::measure::limits::ShortestLaunchTime;
use crate::measure::power::TimingPowerMode;
use crate::measure::{CacheState, LaunchStopwatch, energy};
use crate::record::{RecordFoldersOfPackage, SamplesOfCase, TrialSamplingPlan};
use crate::stats;
use crate::workload::BenchEffort;

/// How a process samples all of its cases: by Criterion, or by the fixed plan of a trial.
pub enum CriterionOrTrialPlan<'a> {
    /// Criterion takes the samples; in some modes of the process, Criterion runs cases without
    /// measuring.
    Criterion(Box<Criterion<ElapsedTimeMeasurement>>, ElapsedTimeMeasurement, &'a BenchSettings),
    /// A trial takes a planned number of samples without Criterion: Criterion would take at least
    /// ten samples, and would analyse each case alone.
    Plan(TrialSamplingPlan, TimingPowerMode),
}

impl<'a> CriterionOrTrialPlan<'a> {
    /// Samples by Criterion, with Criterion's store in its usual folder.
    pub fn sample_by_criterion(
        settings: &'a BenchSettings,
        store: &RecordFoldersOfPackage,
    ) -> Self {
        let elapsed = ElapsedTimeMeasurement::default();
        let criterion =
            criterion_with_kernelgate_measurement(store, settings.effort, elapsed.clone());
        Self::Criterion(Box::new(criterion), elapsed, settings)
    }

    /// Begins a problem.
    pub fn begin_sampling_of_problem(
        &mut self,
        group: &SelectedProblem<'_>,
    ) -> SamplerOfProblemCases<'_> {
        match self {
            Self::Criterion(criterion, elapsed, settings) => SamplerOfProblemCases::Criterion(
                open_criterion_group_of_problem(criterion, group),
                elapsed,
                settings,
            ),
            Self::Plan(sampling, power) => SamplerOfProblemCases::Plan(*sampling, *power),
        }
    }
}

/// Takes the samples of all cases of one problem.
pub enum SamplerOfProblemCases<'s> {
    /// Criterion's benchmark group of the problem.
    Criterion(
        BenchmarkGroup<'s, ElapsedTimeMeasurement>,
        &'s ElapsedTimeMeasurement,
        &'s BenchSettings,
    ),
    /// A trial takes a planned number of samples without Criterion.
    Plan(TrialSamplingPlan, TimingPowerMode),
}

/// A case whose samples are about to be taken.
pub struct CaseToTakeSamplesOf<'a> {
    /// Id of the case: `workload/problem/implementation/cache`.
    pub case: &'a SelectedCase,
    /// The minimum time per launch that the measured ceilings allow for the case.
    pub limit: Option<&'a ShortestLaunchTime>,
    /// Wall time of an earlier launch of the case; zero if it was not measured.
    pub earlier_launch_wall_time: Duration,
}

impl SamplerOfProblemCases<'_> {
    /// Times a case.
    pub fn take_samples_of_case(
        &mut self,
        sampled: &CaseToTakeSamplesOf<'_>,
        executable: &mut dyn LaunchableProblem,
        stopwatch: &mut dyn LaunchStopwatch,
    ) -> Result<SamplesOfCase, BackendError> {
        let (group, elapsed, settings) = match self {
            Self::Criterion(group, elapsed, settings) => (group, elapsed, settings),
            Self::Plan(sampling, power) => {
                return timing::take_trial_samples(
                    executable,
                    stopwatch,
                    *sampling,
                    sampled.earlier_launch_wall_time,
                    *power,
                );
            }
        };
        elapsed.case_shown_by_formatter().borrow_mut().limit = sampled.limit.cloned();
        let sample = stopwatch.take_sample_of_launches(executable, 1)?;
        let launch_ns = sample.elapsed_ns / sample.launches as f64;
        let (backend, function) =
            (sampled.case.implementation.backend, sampled.case.criterion_function_name());
        let plan =
            SamplingPlan::for_effort_and_launch_time(settings.effort, backend, launch_ns, settings);
        let mut samples = timing::sample_case_by_criterion(
            group, &function, executable, stopwatch, plan, settings,
        )?;
        let timed = settings.mode == BenchProcessTask::TimeCases
            && sampled.case.cache == CacheState::HotCaches;
        if settings.measures_energy && timed {
            let _activity = phase_timer::start_timed_activity("energy");
            let launch_ns = stats::median(&samples.launch_times_by_sample_ns());
            samples.energy = Some(energy::measure_launch_energy(executable, stopwatch, launch_ns)?);
        }
        Ok(samples)
    }
}

/// Creates Criterion with kernelgate's measurement and its store in the usual folder.
pub fn criterion_with_kernelgate_measurement(
    store: &RecordFoldersOfPackage,
    effort: BenchEffort,
    elapsed: ElapsedTimeMeasurement,
) -> Criterion<ElapsedTimeMeasurement> {
    let criterion = Criterion::default()
        .with_measurement(elapsed)
        .output_directory(&store.criterion_folder)
        .configure_from_args();
    // Plots are disabled at quick effort, because drawing them takes as long as quickly measuring
    // the case.
    if effort == BenchEffort::Quick { criterion.without_plots() } else { criterion }
}

/// Opens Criterion's benchmark group for a problem.
pub fn open_criterion_group_of_problem<'c>(
    criterion: &'c mut Criterion<ElapsedTimeMeasurement>,
    group: &SelectedProblem<'_>,
) -> BenchmarkGroup<'c, ElapsedTimeMeasurement> {
    let mut criterion_group = criterion.benchmark_group(group.workload_and_problem_id());
    let work = group.problem.problem().work();
    // Criterion reports throughput in matrix-product operations if the problem has any, otherwise
    // in bytes.
    criterion_group.throughput(match work.matmul_flops() {
        0 => Throughput::BytesDecimal(work.total_bytes()),
        flops => Throughput::Elements(flops),
    });
    criterion_group
}
