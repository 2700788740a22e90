//! Times a verified case and keeps every raw sample: by Criterion's plan, or in a trial by
//! kernelgate's shorter plan, because Criterion takes at least ten samples. On a GPU, launches of
//! the same case come first as a load, until the GPU is in its steady power state
//! (`measure::power`).

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant, SystemTime};

use criterion::measurement::Measurement;
use criterion::{BenchmarkGroup, SamplingMode};

use super::silence_criterion::CriterionStderrSilencer;
use crate::backend::{BackendError, BackendKind, LaunchableProblem};
use crate::harness::phase_timer;
use crate::harness::settings::BenchSettings;
use crate::harness::settings::args::BenchProcessTask;
use crate::measure::contention::HostCpuTimeTicks;
use crate::measure::power::{
    self, CasePowerRecord, ClockAndThrottleReading, GpuLoadSample, GpuLoadTimeWindows, LoadOfGpu,
    PowerStateOfSamples, ReasonThatGpuLoadEnded, SamplesAfterLoad, TimingPowerMode,
};
use crate::measure::{CaseSampleConditions, LaunchStopwatch, TimedLaunchSample};
use crate::record::{LaunchCostsBesidesDeviceTime, SamplesOfCase, TrialSamplingPlan};
use crate::stats;
use crate::workload::BenchEffort;
use kernelgate_cuda::observe::range::NamedRangeGuard;

/// Duration of a GPU sample in seconds; equal at every effort, so that the load on the GPU is
/// equal.
const GPU_SAMPLE_DURATION_SECONDS: f64 = 0.004;
/// Length of the pause before each sample in burst mode, as a multiple of the sample's length, so
/// that average power stays below the cap.
const BURST_PAUSE_TO_SAMPLE_TIME_RATIO: u32 = 4;
/// Longest launch that can be timed in burst mode, in nanoseconds.
const MAX_BURST_LAUNCH_NS: f64 = 10e6;
/// Minimum number of samples that Criterion accepts.
const MIN_CRITERION_SAMPLES: usize = 10;
/// Maximum number of samples per case; more samples take time but add no certainty, because
/// comparisons decide by the differences between processes.
const MAX_SAMPLES_PER_CASE: f64 = 50.0;

/// Maximum time for which a case at the power cap is sampled beyond its plan, until the median is
/// precise.
const MAX_EXTRA_SAMPLING_AT_POWER_CAP: Duration = Duration::from_millis(400);

/// Number of samples whose wall times are summed to determine whether the GPU waited for the host.
const SAMPLES_PER_IDLE_CHECK_GROUP: usize = 8;

/// Maximum number of launches whose host time is measured.
const MAX_HOST_TIMED_LAUNCHES: usize = 5;

/// Number and duration of a case's samples, and the GPU's power mode.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingPlan {
    /// Number of samples; all samples time equally many launches.
    pub sample_count: usize,
    /// Warm-up.
    pub warm_up_time: Duration,
    /// Measurement time of a case; if ten launches take longer, Criterion exceeds this time.
    pub measurement_time: Duration,
    /// Number of bootstrap resamples in Criterion's analysis.
    pub bootstrap_resamples: usize,
    /// How the GPU's power is controlled during sampling: steady load or bursts.
    pub power: TimingPowerMode,
    /// Whether sampling at the power cap continues until the median is precise; false if the user
    /// set the number of samples.
    pub extends_sampling_at_power_cap: bool,
}

impl SamplingPlan {
    /// Plans at least 10 samples within the effort's time budget, given the time of one launch. On
    /// a GPU, the effort determines only the number of samples; their length is fixed, so that the
    /// load on the GPU is equal. Criterion's own warm-up is minimal on a GPU, because the load
    /// before the samples is the warm-up.
    pub fn for_effort_and_launch_time(
        effort: BenchEffort,
        on: BackendKind,
        launch_ns: f64,
        settings: &BenchSettings,
    ) -> Self {
        let on_gpu = |samples: f64| (samples * GPU_SAMPLE_DURATION_SECONDS, 0.001, samples);
        let (budget_s, warm_up_s, most) = match (effort, on) {
            (BenchEffort::Quick, BackendKind::Cuda) => on_gpu(MAX_SAMPLES_PER_CASE),
            (BenchEffort::Default, BackendKind::Cuda) => on_gpu(2.0 * MAX_SAMPLES_PER_CASE),
            (BenchEffort::Thorough, BackendKind::Cuda) => on_gpu(8.0 * MAX_SAMPLES_PER_CASE),
            (BenchEffort::Quick, BackendKind::Cpu) => (0.1, 0.02, MAX_SAMPLES_PER_CASE),
            (BenchEffort::Default, BackendKind::Cpu) => (1.5, 0.15, MAX_SAMPLES_PER_CASE),
            (BenchEffort::Thorough, BackendKind::Cpu) => (4.0, 0.5, MAX_SAMPLES_PER_CASE),
        };
        let samples =
            (budget_s / (launch_ns * 1e-9)).clamp(MIN_CRITERION_SAMPLES as f64, most) as usize;
        Self {
            sample_count: settings.plan.sample_count.unwrap_or(samples),
            warm_up_time: Duration::from_secs_f64(settings.plan.warm_up_s.unwrap_or(warm_up_s)),
            measurement_time: Duration::from_secs_f64(
                settings.plan.measurement_s.unwrap_or(budget_s),
            ),
            bootstrap_resamples: match (settings.plan.bootstrap_resamples, effort) {
                (Some(chosen), _) => chosen,
                (None, BenchEffort::Quick) => 2_000,
                (None, _) => 10_000,
            },
            power: settings.power,
            extends_sampling_at_power_cap: settings.plan.sample_count.is_none(),
        }
    }

    /// Minimum time that sampling takes, given the nanoseconds per launch.
    pub fn minimum_sampling_duration(&self, launch_ns: f64) -> Duration {
        let launches = Duration::from_secs_f64(self.sample_count as f64 * launch_ns * 1e-9);
        self.warm_up_time + self.measurement_time.max(launches)
    }
}

/// Runs a case through Criterion in the mode of the process; returns the samples, or none if the
/// mode does not measure.
///
/// # Errors
/// Fails if a launch fails; Criterion then stores no result.
pub fn sample_case_by_criterion<M: Measurement<Value = f64>>(
    group: &mut BenchmarkGroup<'_, M>,
    function: &str,
    executable: &mut dyn LaunchableProblem,
    stopwatch: &mut dyn LaunchStopwatch,
    plan: SamplingPlan,
    settings: &BenchSettings,
) -> Result<SamplesOfCase, BackendError> {
    let measures = settings.mode == BenchProcessTask::TimeCases;
    let mut lead = match measures {
        true => GpuLoadBeforeCaseSamples::load_gpu_until_steady(executable, stopwatch, plan.power)?,
        false => GpuLoadBeforeCaseSamples::without_load(),
    };
    let begun_at_cap = HostCpuTimeTicks::read_for_this_process();
    let (samples, cap_contention) = match lead.ended_at_power_cap_or_unsettled() {
        true => {
            let samples = lead.take_samples_at_power_cap(executable, stopwatch, &plan)?;
            (
                samples,
                cpu_share_of_other_processes(
                    begun_at_cap,
                    HostCpuTimeTicks::read_for_this_process(),
                ),
            )
        }
        false => (plan.sample_count, None),
    };
    group
        .sampling_mode(SamplingMode::Flat)
        .sample_size(samples)
        .warm_up_time(plan.warm_up_time)
        .measurement_time(plan.measurement_time)
        .nresamples(plan.bootstrap_resamples);
    let timed = RefCell::new(Vec::<SampleWithWallTime>::new());
    // Time of Criterion's first call, at which its warm-up begins.
    let warm_up_began = OnceCell::new();
    let failure = RefCell::new(None);
    let (start, end) = (HostCpuTimeTicks::read_for_this_process(), Cell::new(None));
    // Criterion accepts no errors, so a failed launch leaves Criterion by unwinding, without a
    // panic message.
    let advice = CriterionStderrSilencer::silence_stderr_if(settings.process.silent_criterion);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        group.bench_function(function, |bencher| {
            bencher.iter_custom(|launches| {
                let _activity = phase_timer::start_timed_activity("samples");
                // Criterion does not mark calls of its warm-up, so calls count as warm-up until the
                // warm-up time is over.
                let warms_up =
                    warm_up_began.get_or_init(Instant::now).elapsed() < plan.warm_up_time;
                let _range =
                    NamedRangeGuard::open_named_range(if warms_up { "warm-up" } else { "sample" });
                let first = lead.next_load_sample_for_case(warms_up);
                let next = || match first {
                    Some(first) => Ok(first),
                    None => lead.take_sample_after_load(executable, stopwatch, launches),
                };
                match advice.run_with_original_stderr(next) {
                    Ok(one) => {
                        timed.borrow_mut().push(one);
                        end.set(HostCpuTimeTicks::read_for_this_process());
                        // Criterion asks for a number of iterations; the sample may contain another
                        // number of launches, so its time is scaled.
                        one.sample.elapsed_ns / one.sample.launches as f64 * launches as f64
                    }
                    Err(error) => {
                        *failure.borrow_mut() = Some(error);
                        resume_unwind(Box::new(()));
                    }
                }
            });
        });
    }));
    drop(advice);
    if let Some(error) = failure.into_inner() {
        return Err(error);
    }
    if let Err(panic) = outcome {
        resume_unwind(panic);
    }
    if !measures {
        return Ok(SamplesOfCase::default());
    }
    let timed = timed.into_inner();
    // Criterion also calls the closure during its warm-up, so only the last calls are samples.
    let first = timed.len().saturating_sub(samples);
    let contention = cap_contention.or_else(|| cpu_share_of_other_processes(start, end.get()));
    Ok(make_case_samples(&timed[first..], stopwatch, &lead, contention))
}

/// Times a case of a comparison's trial: first a warm-up, then samples of equally many launches. On
/// a GPU, the warm-up is a load of launches until the GPU's power state is steady.
pub fn take_trial_samples(
    executable: &mut dyn LaunchableProblem,
    stopwatch: &mut dyn LaunchStopwatch,
    sampling: TrialSamplingPlan,
    launch: Duration,
    power: TimingPowerMode,
) -> Result<SamplesOfCase, BackendError> {
    if stopwatch.power_meter().is_none() || sampling.measurement_s == 0.0 {
        return take_trial_samples_on_host(executable, stopwatch, sampling, launch);
    }
    let start = HostCpuTimeTicks::read_for_this_process();
    let lead = GpuLoadBeforeCaseSamples::load_gpu_until_steady(executable, stopwatch, power)?
        .drop_load_samples();
    let begun = Instant::now();
    let mut timed = Vec::with_capacity(sampling.most_samples);
    let outcome = loop {
        let over = timed.len() >= sampling.most_samples
            || begun.elapsed().as_secs_f64() >= sampling.measurement_s;
        if timed.len() >= sampling.fewest_samples && over {
            break Ok(());
        }
        let _range = NamedRangeGuard::open_named_range("sample");
        match lead.take_sample_after_load(executable, stopwatch, 1) {
            Ok(one) => timed.push(one),
            Err(error) => break Err(error),
        }
    };
    stop_gpu_load_and_wait(stopwatch, outcome)?;
    Ok(make_case_samples(
        &timed,
        stopwatch,
        &lead,
        cpu_share_of_other_processes(start, HostCpuTimeTicks::read_for_this_process()),
    ))
}

/// Times a case of a trial on the host; also launches a case once if the trial only verifies.
/// `launch` is the wall time of an earlier launch; if it exceeds the whole plan, it also served as
/// the warm-up. A shorter earlier launch is ignored, because it may be far slower than later
/// launches, and the plan would then end after two launches.
fn take_trial_samples_on_host(
    executable: &mut dyn LaunchableProblem,
    stopwatch: &mut dyn LaunchStopwatch,
    sampling: TrialSamplingPlan,
    launch: Duration,
) -> Result<SamplesOfCase, BackendError> {
    let (start, started) = (HostCpuTimeTicks::read_for_this_process(), Instant::now());
    let warm_up = NamedRangeGuard::open_named_range("warm-up");
    let mut launches = 1;
    // The sampling plan uses wall time, because emptying caches before each cold launch must fit
    // into the plan too.
    let launch_s = loop {
        if launch.as_secs_f64() > (sampling.warm_up_s + sampling.measurement_s).max(1e-3) {
            break launch.as_secs_f64();
        }
        let call = Instant::now();
        let sample = stopwatch.take_sample_of_launches(executable, launches)?;
        let launch_s = call.elapsed().as_secs_f64() / sample.launches as f64;
        let left_s = sampling.warm_up_s - started.elapsed().as_secs_f64();
        if left_s <= 0.0 {
            break launch_s.max(1e-9);
        }
        launches = (2 * launches).min((left_s / launch_s.max(1e-9)).ceil() as u64).max(1);
    };
    drop(warm_up);
    let samples = ((sampling.measurement_s / launch_s) as usize)
        .clamp(sampling.fewest_samples, sampling.most_samples);
    let launches = ((sampling.measurement_s / samples as f64 / launch_s) as u64).max(1);
    let mut timed = Vec::with_capacity(samples);
    for _ in 0..samples {
        let _range = NamedRangeGuard::open_named_range("sample");
        timed.push(SampleWithWallTime::take_sample_with_wall_time(|| {
            stopwatch.take_sample_of_launches(executable, launches)
        })?);
    }
    Ok(make_case_samples(
        &timed,
        stopwatch,
        &GpuLoadBeforeCaseSamples::without_load(),
        cpu_share_of_other_processes(start, HostCpuTimeTicks::read_for_this_process()),
    ))
}

/// Stops keeping the GPU loaded, which waits for the launches queued after the last sample.
fn stop_gpu_load_and_wait<T>(
    stopwatch: &mut dyn LaunchStopwatch,
    outcome: Result<T, BackendError>,
) -> Result<T, BackendError> {
    let ended = stopwatch.keep_gpu_loaded_between_samples(false);
    outcome.and_then(|value| ended.map(|()| value))
}

/// A sample, and the wall time including everything around its launches.
#[derive(Debug, Clone, Copy)]
struct SampleWithWallTime {
    sample: TimedLaunchSample,
    wall_time: Duration,
}

impl SampleWithWallTime {
    fn take_sample_with_wall_time(
        take: impl FnOnce() -> Result<TimedLaunchSample, BackendError>,
    ) -> Result<Self, BackendError> {
        let started = Instant::now();
        let sample = take()?;
        Ok(Self { sample, wall_time: started.elapsed() })
    }
}

/// Outcome of the load before a case's samples, which determines how the samples are taken.
struct GpuLoadBeforeCaseSamples {
    /// Number of launches per sample; `None` if Criterion or the trial's plan decides.
    launches_per_sample: Option<u64>,
    windows_and_end_reason: Option<(GpuLoadTimeWindows, ReasonThatGpuLoadEnded)>,
    /// Samples of the load that count as the case's first samples: those in the last window of a
    /// settled load.
    samples_for_case: RefCell<VecDeque<SampleWithWallTime>>,
    /// Wall time of the samples in `samples_for_case`, which is subtracted from the settling time
    /// because these samples count for the case.
    wall_time_of_case_samples: Duration,
    /// Pause before each sample in burst mode; zero otherwise.
    pause_before_sample: Duration,
    load_start_time: SystemTime,
}

impl GpuLoadBeforeCaseSamples {
    fn without_load() -> GpuLoadBeforeCaseSamples {
        Self::with_launches_and_pause(None, Duration::ZERO, SystemTime::now())
    }

    fn with_launches_and_pause(launches: Option<u64>, pause: Duration, begun: SystemTime) -> Self {
        let (taken, taken_wall) = (RefCell::default(), Duration::ZERO);
        Self {
            launches_per_sample: launches,
            windows_and_end_reason: None,
            samples_for_case: taken,
            wall_time_of_case_samples: taken_wall,
            pause_before_sample: pause,
            load_start_time: begun,
        }
    }

    /// In steady mode, launches the case until the GPU's power state is steady; in burst mode,
    /// finds the number of launches per sample. On the host, no load is needed.
    ///
    /// # Errors
    /// Fails if a launch fails; [`BackendError::Unsupported`] for long launches in burst mode.
    fn load_gpu_until_steady(
        executable: &mut dyn LaunchableProblem,
        stopwatch: &mut dyn LaunchStopwatch,
        power: TimingPowerMode,
    ) -> Result<GpuLoadBeforeCaseSamples, BackendError> {
        if stopwatch.power_meter().is_none() {
            return Ok(Self::without_load());
        }
        let _activity = phase_timer::start_timed_activity("settling");
        let _range = NamedRangeGuard::open_named_range("warm-up");
        let begun = SystemTime::now();
        let mut load = CaseAsGpuLoad {
            executable,
            stopwatch,
            launches_per_sample: 1,
            load_samples: Vec::new(),
        };
        match power {
            TimingPowerMode::SteadyLoad => {
                let settled = power::run_load_until_gpu_is_steady(&mut load);
                let CaseAsGpuLoad { launches_per_sample: launches, load_samples: taken, .. } = load;
                let settled = match settled {
                    Ok(
                        settled @ (
                            _,
                            ReasonThatGpuLoadEnded::SteadyAtPowerCap
                            | ReasonThatGpuLoadEnded::UnsteadyAtTimeLimit,
                        ),
                    ) => settled,
                    below_cap => stop_gpu_load_and_wait(stopwatch, below_cap)?,
                };
                stopwatch.set_settled_sm_clock_of_case(
                    taken.last().and_then(|last| last.sample.sm_clock_mhz),
                );
                let mut lead = Self::with_launches_and_pause(Some(launches), Duration::ZERO, begun);
                if settled.1 != ReasonThatGpuLoadEnded::UnsteadyAtTimeLimit {
                    lead.samples_for_case
                        .get_mut()
                        .extend(samples_in_last_load_window(&taken, launches));
                    lead.wall_time_of_case_samples =
                        lead.samples_for_case.get_mut().iter().map(|it| it.wall_time).sum();
                }
                Ok(Self { windows_and_end_reason: Some(settled), ..lead })
            }
            TimingPowerMode::BurstsAfterPauses => {
                // The warm-up lasts until the number of launches per sample no longer changes.
                let started = Instant::now();
                while started.elapsed().as_secs_f64() < GPU_SAMPLE_DURATION_SECONDS {
                    let sample = load.run_load_sample()?;
                    let launch_ns = sample.elapsed_ns / sample.launches as f64;
                    if launch_ns > MAX_BURST_LAUNCH_NS {
                        return Err(BackendError::Unsupported(format!(
                            "--power burst measures launches of at most 10 ms, this one takes {:.0} \
                             ms",
                            launch_ns * 1e-6
                        )));
                    }
                }
                let pause = Duration::from_secs_f64(GPU_SAMPLE_DURATION_SECONDS)
                    * BURST_PAUSE_TO_SAMPLE_TIME_RATIO;
                Ok(Self::with_launches_and_pause(Some(load.launches_per_sample), pause, begun))
            }
        }
    }

    /// Drops the samples of the load, because a trial takes all of its samples after the load.
    fn drop_load_samples(self) -> Self {
        Self {
            samples_for_case: RefCell::default(),
            wall_time_of_case_samples: Duration::ZERO,
            ..self
        }
    }

    /// Returns the next sample of the load that counts for the case; `None` during Criterion's
    /// warm-up, whose samples are discarded.
    fn next_load_sample_for_case(&self, warms_up: bool) -> Option<SampleWithWallTime> {
        if warms_up { None } else { self.samples_for_case.borrow_mut().pop_front() }
    }

    /// Whether the GPU was at its power cap, or still unsettled, when the load ended.
    fn ended_at_power_cap_or_unsettled(&self) -> bool {
        let end = self.windows_and_end_reason.as_ref().map(|(_, end)| end);
        matches!(
            end,
            Some(
                ReasonThatGpuLoadEnded::SteadyAtPowerCap
                    | ReasonThatGpuLoadEnded::UnsteadyAtTimeLimit
            )
        )
    }

    /// Samples a case at the power cap without pauses, so that the GPU stays loaded: for the plan's
    /// time including load samples, then until the median is precise
    /// ([`MAX_EXTRA_SAMPLING_AT_POWER_CAP`]). Returns their number.
    fn take_samples_at_power_cap(
        &mut self,
        executable: &mut dyn LaunchableProblem,
        stopwatch: &mut dyn LaunchStopwatch,
        plan: &SamplingPlan,
    ) -> Result<usize, BackendError> {
        let _activity = phase_timer::start_timed_activity("samples");
        let mut windows = GpuLoadTimeWindows::with_window_length_for_samples();
        let surplus = self.samples_for_case.get_mut().len().saturating_sub(plan.sample_count);
        self.samples_for_case.get_mut().drain(..surplus);
        for SampleWithWallTime { sample, wall_time: wall } in self.samples_for_case.get_mut() {
            windows.add_load_sample(*wall, sample.launches, sample.elapsed_ns, sample.sm_clock_mhz);
        }
        let mut count = self.samples_for_case.get_mut().len();
        let (fewest, shortest, extra) = match plan.extends_sampling_at_power_cap {
            true => (MIN_CRITERION_SAMPLES, plan.measurement_time, MAX_EXTRA_SAMPLING_AT_POWER_CAP),
            false => (plan.sample_count, Duration::ZERO, Duration::ZERO),
        };
        let load = self.windows_and_end_reason.as_ref().map(|(load, _)| load);
        let is_precise = |windows_ns: &[f64]| {
            load.is_none_or(|load| load.is_median_precise_with_load_windows(windows_ns))
        };
        let outcome = loop {
            let elapsed = windows.duration_under_load();
            let precise =
                elapsed >= shortest + extra || is_precise(windows.launch_times_by_window_ns());
            if count >= fewest && elapsed >= shortest && precise {
                break Ok(count);
            }
            let _range = NamedRangeGuard::open_named_range("sample");
            match self.take_sample_after_load(executable, stopwatch, 1) {
                Ok(one) => {
                    let TimedLaunchSample { launches, elapsed_ns, sm_clock_mhz: clock_mhz, .. } =
                        one.sample;
                    windows.add_load_sample(one.wall_time, launches, elapsed_ns, clock_mhz);
                    self.samples_for_case.get_mut().push_back(one);
                    count += 1;
                }
                Err(error) => break Err(error),
            }
        };
        stop_gpu_load_and_wait(stopwatch, outcome)
    }

    /// Takes a sample of as many launches as the load determined, or else of `launches` launches.
    fn take_sample_after_load(
        &self,
        executable: &mut dyn LaunchableProblem,
        stopwatch: &mut dyn LaunchStopwatch,
        launches: u64,
    ) -> Result<SampleWithWallTime, BackendError> {
        std::thread::sleep(self.pause_before_sample);
        SampleWithWallTime::take_sample_with_wall_time(|| {
            stopwatch
                .take_sample_of_launches(executable, self.launches_per_sample.unwrap_or(launches))
        })
    }

    /// Power state during the samples; `None` if the process only verifies.
    fn power_record_of_samples(
        &self,
        timed: &[SampleWithWallTime],
        stopwatch: &dyn LaunchStopwatch,
    ) -> Option<CasePowerRecord> {
        let Some(meter) = stopwatch.power_meter() else {
            return Some(CasePowerRecord::with_power_state_not_applicable("the host computes"));
        };
        self.launches_per_sample?;
        if stopwatch.sample_conditions().includes_host_launch_time {
            return Some(CasePowerRecord::with_power_state_not_applicable(
                "the host's launches are in the time",
            ));
        }
        let Some(settled) = &self.windows_and_end_reason else {
            let reading = meter.read_card_with_nvml().unwrap_or_default();
            return Some(CasePowerRecord::from_nvml_reading(
                PowerStateOfSamples::BurstsAfterPauses,
                reading,
            ));
        };
        let mut windows = GpuLoadTimeWindows::with_window_length_for_samples();
        let (mut launches_ns, mut busy_ns) = (Vec::new(), 0.0);
        for SampleWithWallTime { sample, wall_time: wall } in timed {
            busy_ns += sample.elapsed_ns;
            launches_ns.push(sample.elapsed_ns / sample.launches as f64);
            windows.add_load_sample(*wall, sample.launches, sample.elapsed_ns, sample.sm_clock_mhz);
        }
        let median_ns = stats::median(&launches_ns);
        let (windows_ns, idle) =
            (windows.launch_times_by_window_ns(), share_of_time_gpu_waited_for_host(timed));
        let samples = SamplesAfterLoad {
            window_mean_launch_ns: windows_ns,
            median_launch_ns: median_ns,
            gpu_idle_share: idle,
        };
        let power = CasePowerRecord::from_samples_after_load(settled, &samples, meter);
        let settling_s = power.load_before_samples_s - self.wall_time_of_case_samples.as_secs_f64();
        let wall_s = timed.iter().map(|it| it.wall_time).sum::<Duration>().as_secs_f64();
        let busy = (busy_ns * 1e-9 / wall_s.max(1e-9)).min(1.0);
        Some(CasePowerRecord {
            load_before_samples_s: settling_s.max(0.0),
            gpu_busy_share: Some(busy),
            ..power
        })
    }
}

/// Share of the samples' wall time in which the GPU waited for the host, beyond the time that
/// unhindered samples need around their launches, such as emptying caches. If the host is late for
/// one sample, it reads the next one early, because launches were queued; therefore groups of
/// samples are compared.
fn share_of_time_gpu_waited_for_host(timed: &[SampleWithWallTime]) -> f64 {
    let wall_per_launch_time = |group: &[SampleWithWallTime]| {
        let wall_ns: f64 = group.iter().map(|one| one.wall_time.as_nanos() as f64).sum();
        let busy_ns: f64 = group.iter().map(|one| one.sample.elapsed_ns).sum();
        wall_ns / busy_ns.max(1.0)
    };
    let of_groups: Vec<f64> =
        timed.chunks(SAMPLES_PER_IDLE_CHECK_GROUP).map(wall_per_launch_time).collect();
    let without_wait = stats::quantile_by_interpolation(&of_groups, 0.1).max(1.0);
    (1.0 - without_wait / wall_per_launch_time(timed)).max(0.0)
}

/// Returns the samples in the last window of a load. Shorter samples from the beginning of a load,
/// and the very first sample, are excluded.
fn samples_in_last_load_window(
    taken: &[SampleWithWallTime],
    launches: u64,
) -> impl Iterator<Item = SampleWithWallTime> {
    let mut wall = Duration::ZERO;
    let is_earlier = |it: &SampleWithWallTime| {
        let earlier = wall >= power::LOAD_SETTLING_WINDOW;
        wall += it.wall_time;
        earlier
    };
    let first_of_window =
        taken.len() - taken.iter().rev().position(is_earlier).unwrap_or(taken.len());
    let window = taken.iter().copied().skip(first_of_window.max(1));
    window.filter(move |it| 2 * it.sample.launches >= launches)
}

/// Launches a case as a load on the GPU, in samples of [`GPU_SAMPLE_DURATION_SECONDS`].
struct CaseAsGpuLoad<'a> {
    executable: &'a mut dyn LaunchableProblem,
    stopwatch: &'a mut dyn LaunchStopwatch,
    launches_per_sample: u64,
    /// Samples since the load began, or resumed after a pause.
    load_samples: Vec<SampleWithWallTime>,
}

impl LoadOfGpu for CaseAsGpuLoad<'_> {
    fn run_load_sample(&mut self) -> Result<GpuLoadSample, BackendError> {
        let timed = SampleWithWallTime::take_sample_with_wall_time(|| {
            self.stopwatch.take_sample_of_launches(self.executable, self.launches_per_sample)
        })?;
        self.load_samples.push(timed);
        let SampleWithWallTime { sample, wall_time: wall } = timed;
        // The load counts wall time, because emptying caches before each cold launch is part of the
        // load.
        let launch_s = wall.as_secs_f64() / sample.launches as f64;
        let whole = (GPU_SAMPLE_DURATION_SECONDS / launch_s.max(1e-9)).ceil() as u64;
        self.launches_per_sample = whole.clamp(1, 2 * sample.launches);
        let TimedLaunchSample { launches, elapsed_ns, sm_clock_mhz, .. } = sample;
        Ok(GpuLoadSample { launches, elapsed_ns, sm_clock_mhz })
    }

    fn read_power_cap_and_heat(&mut self, clock_mhz: Option<f64>) -> ClockAndThrottleReading {
        let highest_mhz = f64::INFINITY;
        self.stopwatch.power_meter().map_or(
            ClockAndThrottleReading {
                sm_clock_mhz: clock_mhz,
                highest_sm_clock_mhz: highest_mhz,
                at_power_cap: None,
                slowed_by_heat_or_hardware: None,
            },
            |meter| meter.read_power_cap_and_heat_with_nvml(clock_mhz),
        )
    }

    fn enqueue_samples_ahead(&mut self) -> Result<(), BackendError> {
        self.stopwatch.keep_gpu_loaded_between_samples(true)
    }

    fn wait_for_hot_gpu_to_cool(&mut self) {
        let _activity = phase_timer::start_timed_activity("cooling");
        self.load_samples.clear();
        if let Some(meter) = self.stopwatch.power_meter() {
            meter.wait_until_gpu_is_cooler();
        }
    }
}

/// Shortest of a few host times in nanoseconds to enqueue a launch on an idle device.
pub fn shortest_host_time_to_launch_ns(
    executable: &mut dyn LaunchableProblem,
) -> Result<f64, BackendError> {
    let mut shortest = f64::INFINITY;
    let begun = Instant::now();
    for taken in 0..MAX_HOST_TIMED_LAUNCHES {
        // For long launches, a second measurement is as informative as later ones, so two suffice.
        if taken > 1 && begun.elapsed() > Duration::from_millis(5) {
            break;
        }
        executable.reset_state_and_wait()?;
        let started = Instant::now();
        executable.launch_once()?;
        shortest = shortest.min(started.elapsed().as_secs_f64() * 1e9);
    }
    executable.wait_for_launches()?;
    Ok(shortest)
}

/// Returns the share of the host's CPU time that other processes used between two readings.
fn cpu_share_of_other_processes(
    start: Option<HostCpuTimeTicks>,
    end: Option<HostCpuTimeTicks>,
) -> Option<f64> {
    end?.cpu_share_of_other_processes_since(&start?)
}

fn make_case_samples(
    timed: &[SampleWithWallTime],
    stopwatch: &dyn LaunchStopwatch,
    lead: &GpuLoadBeforeCaseSamples,
    contention: Option<f64>,
) -> SamplesOfCase {
    let kept: Vec<TimedLaunchSample> = timed.iter().map(|timed| timed.sample).collect();
    let power = lead.power_record_of_samples(timed, stopwatch);
    let slowed = power.as_ref().is_some_and(CasePowerRecord::was_slowed_by_heat_or_hardware);
    SamplesOfCase {
        launches_per_sample: kept.iter().map(|sample| sample.launches).collect(),
        elapsed_per_sample_ns: kept.iter().map(|sample| sample.elapsed_ns).collect(),
        sm_clock_per_sample_mhz: kept
            .iter()
            .map(|sample| sample.sm_clock_mhz)
            .collect::<Option<_>>()
            .unwrap_or_default(),
        gpu_skew_per_sample_ns: kept
            .iter()
            .map(|sample| sample.skew_between_gpus_ns)
            .collect::<Option<_>>()
            .unwrap_or_default(),
        conditions: CaseSampleConditions {
            discarded_attempts: kept.iter().map(|sample| sample.discarded_attempts).sum(),
            throttled_samples: kept
                .iter()
                .filter(|sample| sample.gpu_was_throttled || slowed)
                .count() as u64,
            other_processes_cpu_share: contention,
            other_gpu_processes: stopwatch
                .power_meter()
                .and_then(|meter| meter.other_processes_on_gpus_since(lead.load_start_time)),
            ..stopwatch.sample_conditions()
        },
        costs: LaunchCostsBesidesDeviceTime {
            gpu_commands: stopwatch.commands_per_launch(),
            ..LaunchCostsBesidesDeviceTime::default()
        },
        reason_cupti_did_not_check: None,
        power,
        energy: None,
        delay_ns_or_bytes: None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::backend::cpu::CpuTask;
    use crate::measure::power::NvmlPowerMeter;
    use crate::measure::{CaseSampleConditions, TimedReplay};
    use crate::workload::Tensors;

    /// Simulates a GPU: milliseconds per launch, SM clock in MHz, and power meter.
    struct SimulatedGpuStopwatch(f64, Option<f64>, Arc<NvmlPowerMeter>);

    impl LaunchStopwatch for SimulatedGpuStopwatch {
        fn take_sample_of_launches(
            &mut self,
            _: &mut dyn LaunchableProblem,
            launches: u64,
        ) -> Result<TimedLaunchSample, BackendError> {
            let elapsed = Duration::from_secs_f64(self.0 * 1e-3) * launches as u32;
            std::thread::sleep(elapsed);
            let elapsed_ns = elapsed.as_nanos() as f64;
            Ok(TimedLaunchSample {
                launches,
                elapsed_ns,
                skew_between_gpus_ns: None,
                sm_clock_mhz: self.1,
                discarded_attempts: 0,
                gpu_was_throttled: false,
            })
        }

        fn time_one_replay(
            &mut self,
            _: &mut dyn LaunchableProblem,
        ) -> Result<Option<TimedReplay>, BackendError> {
            Ok(None)
        }

        fn power_meter(&self) -> Option<&Arc<NvmlPowerMeter>> {
            Some(&self.2)
        }

        fn sample_conditions(&self) -> CaseSampleConditions {
            CaseSampleConditions::default()
        }
    }

    fn run_load_on_simulated_gpu(
        launch_ms: f64,
        clock_mhz: Option<f64>,
        power: TimingPowerMode,
    ) -> Result<GpuLoadBeforeCaseSamples, BackendError> {
        let mut task = CpuTask::new(Arc::new(Tensors::new()), Tensors::new(), |_, _| {});
        let meter = Arc::new(NvmlPowerMeter::without_nvml_for_tests(None));
        let mut card = SimulatedGpuStopwatch(launch_ms, clock_mhz, meter);
        GpuLoadBeforeCaseSamples::load_gpu_until_steady(&mut task, &mut card, power)
    }

    #[test]
    fn the_last_window_of_a_settled_load_gives_the_first_samples() {
        let below =
            run_load_on_simulated_gpu(1.0, Some(1980.0), TimingPowerMode::SteadyLoad).unwrap();
        let (launches, windows) =
            (below.launches_per_sample.unwrap(), below.windows_and_end_reason.as_ref().unwrap());
        assert_eq!(windows.1, ReasonThatGpuLoadEnded::SteadyBelowPowerCap);
        assert!(below.next_load_sample_for_case(true).is_none(), "a warm-up takes real samples");
        let first: Vec<_> = std::iter::from_fn(|| below.next_load_sample_for_case(false)).collect();
        let wall: Duration = first.iter().map(|it| it.wall_time).sum();
        assert!(wall > Duration::ZERO && wall < windows.0.duration_under_load());
        assert!(first.iter().all(|it| 2 * it.sample.launches >= launches && launches > 1));
        let capped =
            run_load_on_simulated_gpu(1.0, Some(1430.0), TimingPowerMode::SteadyLoad).unwrap();
        assert_eq!(
            capped.windows_and_end_reason.as_ref().unwrap().1,
            ReasonThatGpuLoadEnded::SteadyAtPowerCap
        );
        let first: Vec<_> =
            std::iter::from_fn(|| capped.next_load_sample_for_case(false)).collect();
        let wall: Duration = first.iter().map(|it| it.wall_time).sum();
        assert!(
            wall >= power::LOAD_SETTLING_WINDOW
                && wall - first[0].wall_time < power::LOAD_SETTLING_WINDOW
        );
    }

    #[test]
    fn samples_at_the_power_cap_include_load_samples() {
        let sample_counts = |samples, extends_at_cap| {
            let mut task = CpuTask::new(Arc::new(Tensors::new()), Tensors::new(), |_, _| {});
            let meter = Arc::new(NvmlPowerMeter::without_nvml_for_tests(None));
            let mut card = SimulatedGpuStopwatch(1.0, Some(1430.0), meter);
            let mut lead = GpuLoadBeforeCaseSamples::load_gpu_until_steady(
                &mut task,
                &mut card,
                TimingPowerMode::SteadyLoad,
            )
            .unwrap();
            let plan = SamplingPlan {
                sample_count: samples,
                warm_up_time: Duration::ZERO,
                measurement_time: Duration::from_millis(200),
                bootstrap_resamples: 1,
                power: TimingPowerMode::SteadyLoad,
                extends_sampling_at_power_cap: extends_at_cap,
            };
            let of_load = lead.samples_for_case.get_mut().len();
            let count = lead.take_samples_at_power_cap(&mut task, &mut card, &plan).unwrap();
            assert_eq!(lead.samples_for_case.get_mut().len(), count);
            (of_load, count)
        };
        let (of_load, count) = sample_counts(50, true);
        assert!(of_load >= 10 && count > of_load, "{of_load} {count}");
        assert_eq!(sample_counts(10, false).1, 10, "the number that was chosen holds");
    }

    #[test]
    fn a_gpu_that_waits_for_the_host_counts_as_idle() {
        let sample = |wall_us| {
            let sample = TimedLaunchSample {
                launches: 1,
                elapsed_ns: 4e6,
                skew_between_gpus_ns: None,
                sm_clock_mhz: None,
                discarded_attempts: 0,
                gpu_was_throttled: false,
            };
            SampleWithWallTime { sample, wall_time: Duration::from_micros(wall_us) }
        };
        // In this simulation, every sample includes emptying caches, and one in five waits for the
        // host.
        let flushed = vec![sample(5000); 32];
        assert!(share_of_time_gpu_waited_for_host(&flushed).abs() < 1e-9);
        let mut held_up = flushed;
        held_up.extend([sample(10_000); 8]);
        assert!((share_of_time_gpu_waited_for_host(&held_up) - 40.0 / 240.0).abs() < 1e-9);
        // In this simulation, the host is late for every other sample, but by less than the queued
        // launches take.
        let late = [sample(6000), sample(2000)].repeat(20);
        assert!(share_of_time_gpu_waited_for_host(&late).abs() < 1e-9);
    }

    #[test]
    fn burst_mode_refuses_launches_of_more_than_10_ms() {
        let lead = |launch_ms| {
            run_load_on_simulated_gpu(launch_ms, None, TimingPowerMode::BurstsAfterPauses)
        };
        assert!(lead(1.0).is_ok_and(|lead| lead.pause_before_sample > Duration::ZERO));
        let why = "--power burst measures launches of at most 10 ms, this one takes 12 ms";
        assert_eq!(lead(12.0).err(), Some(BackendError::Unsupported(why.to_owned())));
    }
}
