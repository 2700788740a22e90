//! Timing a verified case, keeping every raw sample: under Criterion's planner, or in a trial by a
//! shorter plan of our own, because Criterion takes no fewer than ten samples and analyses each
//! case alone. On a GPU the samples follow a load of the same launches that brings the card into
//! its steady power state (`measure::power`).

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant, SystemTime};

use criterion::measurement::Measurement;
use criterion::{BenchmarkGroup, SamplingMode};

use super::silence_criterion::WithoutCriterionAdvice;
use crate::backend::{BackendError, BackendKind, Executable};
use crate::harness::phase_timer;
use crate::harness::settings::BenchSettings;
use crate::harness::settings::args::ProcessMode;
use crate::measure::contention::CpuTimeTicks;
use crate::measure::power::{
    self, CapReading, GpuLoad, PowerMode, PowerRecord, PowerState, SamplesBehindLoad, SettlingEnd,
    SettlingWindows, TimedLaunches,
};
use crate::measure::{LaunchSample, SampleConditions, Stopwatch};
use crate::record::{CaseSamples, LaunchCosts, TrialSampling};
use crate::stats;
use crate::workload::Effort;
use kernelgate_cuda::observe::range::RangeGuard;

/// Length of a GPU sample, seconds: equal at every effort, so that the load is equal.
const GPU_SAMPLE_SECONDS: f64 = 0.004;
/// Length of the pause before each sample of a burst, as a multiple of the sample's length: the
/// average power stays below the cap.
const BURST_PAUSES_PER_SAMPLE: u32 = 4;
/// Longest launch that can be timed in bursts, nanoseconds.
const MAX_BURST_LAUNCH_NS: f64 = 10e6;
/// Smallest number of samples that Criterion accepts.
const MIN_CRITERION_SAMPLES: usize = 10;
/// Maximum number of samples of a case: more samples add time but no certainty, because decisions
/// compare processes.
const MAX_SAMPLES_PER_CASE: f64 = 50.0;

/// Time for which samples of a case at the cap go on, beyond the plan's, until their median is
/// precise.
const MAX_EXTRA_SAMPLING: Duration = Duration::from_millis(400);

/// Samples whose wall times are added to find out whether the card waited for the host.
const SAMPLES_PER_GROUP: usize = 8;

/// Number of launches whose host time is measured.
const LAUNCHES_WITH_HOST_TIME: usize = 5;

/// Number and duration of the samples of a case.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingPlan {
    /// Number of samples; each times the same number of launches.
    pub samples: usize,
    /// Warm-up.
    pub warm_up: Duration,
    /// Measurement time of a case; Criterion takes longer if ten launches take longer.
    pub measurement: Duration,
    /// Number of bootstrap resamples of Criterion's analysis.
    pub resamples: usize,
    /// Power state in which the GPU is kept while it is measured: steady or burst.
    pub power: PowerMode,
    /// Whether samples at the power cap go on until their median is precise: not if the number of
    /// samples was chosen.
    pub extends_at_cap: bool,
}

impl SamplingPlan {
    /// Plans from the time of one launch: 10 samples or more within the effort's budget. On a GPU
    /// the effort sets only the number of samples; the length of a sample, and so the load, is
    /// always equal. Criterion's warm-up is then as short as it may be, because the load is the
    /// warm-up.
    pub fn new(effort: Effort, on: BackendKind, launch_ns: f64, settings: &BenchSettings) -> Self {
        let on_gpu = |samples: f64| (samples * GPU_SAMPLE_SECONDS, 0.001, samples);
        let (budget_s, warm_up_s, most) = match (effort, on) {
            (Effort::Quick, BackendKind::Cuda) => on_gpu(MAX_SAMPLES_PER_CASE),
            (Effort::Default, BackendKind::Cuda) => on_gpu(2.0 * MAX_SAMPLES_PER_CASE),
            (Effort::Thorough, BackendKind::Cuda) => on_gpu(8.0 * MAX_SAMPLES_PER_CASE),
            (Effort::Quick, BackendKind::Cpu) => (0.1, 0.02, MAX_SAMPLES_PER_CASE),
            (Effort::Default, BackendKind::Cpu) => (1.5, 0.15, MAX_SAMPLES_PER_CASE),
            (Effort::Thorough, BackendKind::Cpu) => (4.0, 0.5, MAX_SAMPLES_PER_CASE),
        };
        let samples =
            (budget_s / (launch_ns * 1e-9)).clamp(MIN_CRITERION_SAMPLES as f64, most) as usize;
        Self {
            samples: settings.plan.samples.unwrap_or(samples),
            warm_up: Duration::from_secs_f64(settings.plan.warm_up_s.unwrap_or(warm_up_s)),
            measurement: Duration::from_secs_f64(settings.plan.measurement_s.unwrap_or(budget_s)),
            resamples: match (settings.plan.resamples, effort) {
                (Some(chosen), _) => chosen,
                (None, Effort::Quick) => 2_000,
                (None, _) => 10_000,
            },
            power: settings.power,
            extends_at_cap: settings.plan.samples.is_none(),
        }
    }

    /// Shortest duration of sampling for launches of this length.
    pub fn least_duration(&self, launch_ns: f64) -> Duration {
        let launches = Duration::from_secs_f64(self.samples as f64 * launch_ns * 1e-9);
        self.warm_up + self.measurement.max(launches)
    }
}

/// Runs the case through Criterion in the mode of the process; returns the samples of a
/// measurement, none in the other modes.
///
/// # Errors
/// Fails if a launch fails; Criterion then leaves the case without a result.
pub fn run_in_criterion<M: Measurement<Value = f64>>(
    group: &mut BenchmarkGroup<'_, M>,
    function: &str,
    executable: &mut dyn Executable,
    stopwatch: &mut dyn Stopwatch,
    plan: SamplingPlan,
    settings: &BenchSettings,
) -> Result<CaseSamples, BackendError> {
    let measures = settings.mode == ProcessMode::Bench;
    let mut lead = match measures {
        true => LoadBeforeSamples::run_load(executable, stopwatch, plan.power)?,
        false => LoadBeforeSamples::without_load(),
    };
    let begun_at_cap = CpuTimeTicks::now();
    let (samples, cap_contention) = match lead.settled_at_cap() {
        true => {
            let samples = lead.take_samples_at_cap(executable, stopwatch, &plan)?;
            (samples, cpu_contention(begun_at_cap, CpuTimeTicks::now()))
        }
        false => (plan.samples, None),
    };
    group
        .sampling_mode(SamplingMode::Flat)
        .sample_size(samples)
        .warm_up_time(plan.warm_up)
        .measurement_time(plan.measurement)
        .nresamples(plan.resamples);
    let timed = RefCell::new(Vec::<SampleWithWallTime>::new());
    // Time of Criterion's first call, with which its warm-up begins.
    let warm_up_began = OnceCell::new();
    let failure = RefCell::new(None);
    let (start, end) = (CpuTimeTicks::now(), Cell::new(None));
    // A launch that fails cannot be reported to Criterion, so the closure leaves Criterion by
    // unwinding, without a panic message.
    let advice = WithoutCriterionAdvice::new(settings.process.silent_criterion);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        group.bench_function(function, |bencher| {
            bencher.iter_custom(|launches| {
                let _activity = phase_timer::start_activity("samples");
                // Criterion does not mark the calls of its warm-up; the warm-up lasts until its
                // time is over.
                let warms_up = warm_up_began.get_or_init(Instant::now).elapsed() < plan.warm_up;
                let _range = RangeGuard::new(if warms_up { "warm-up" } else { "sample" });
                let first = lead.take_load_sample(warms_up);
                let next = || match first {
                    Some(first) => Ok(first),
                    None => lead.sample_after_load(executable, stopwatch, launches),
                };
                match advice.with_original_stderr(next) {
                    Ok(one) => {
                        timed.borrow_mut().push(one);
                        end.set(CpuTimeTicks::now());
                        // Criterion counts its own iterations; a sample may hold another number of
                        // launches.
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
        return Ok(CaseSamples::default());
    }
    let timed = timed.into_inner();
    // Criterion calls this closure for its warm-up too: the last calls are the samples.
    let first = timed.len().saturating_sub(samples);
    let contention = cap_contention.or_else(|| cpu_contention(start, end.get()));
    Ok(collect_samples(&timed[first..], stopwatch, &lead, contention))
}

/// Times a case of a trial: a warm-up, then samples of equally many launches. On a GPU the warm-up
/// is the load that leads to the steady power state.
pub fn time_trial_case(
    executable: &mut dyn Executable,
    stopwatch: &mut dyn Stopwatch,
    sampling: TrialSampling,
    launch: Duration,
    power: PowerMode,
) -> Result<CaseSamples, BackendError> {
    if stopwatch.power().is_none() || sampling.measurement_s == 0.0 {
        return time_trial_on_host(executable, stopwatch, sampling, launch);
    }
    let start = CpuTimeTicks::now();
    let lead = LoadBeforeSamples::run_load(executable, stopwatch, power)?.without_load_samples();
    let begun = Instant::now();
    let mut timed = Vec::with_capacity(sampling.most);
    let outcome = loop {
        let over =
            timed.len() >= sampling.most || begun.elapsed().as_secs_f64() >= sampling.measurement_s;
        if timed.len() >= sampling.fewest && over {
            break Ok(());
        }
        let _range = RangeGuard::new("sample");
        match lead.sample_after_load(executable, stopwatch, 1) {
            Ok(one) => timed.push(one),
            Err(error) => break Err(error),
        }
    };
    end_load(stopwatch, outcome)?;
    Ok(collect_samples(&timed, stopwatch, &lead, cpu_contention(start, CpuTimeTicks::now())))
}

/// Times a case of a trial on the host, or launches it once in a verification pass. `launch` is the
/// time of an earlier launch; if that is longer than the whole plan, it was the warm-up. A shorter
/// first launch is not trusted: it may be many times slower than the next one, and a plan made from
/// it would end after two launches.
fn time_trial_on_host(
    executable: &mut dyn Executable,
    stopwatch: &mut dyn Stopwatch,
    sampling: TrialSampling,
    launch: Duration,
) -> Result<CaseSamples, BackendError> {
    let (start, started) = (CpuTimeTicks::now(), Instant::now());
    let warm_up = RangeGuard::new("warm-up");
    let mut launches = 1;
    // The plan uses wall time, because the cost of a launch besides its own time (emptying caches)
    // must fit the plan too.
    let launch_s = loop {
        if launch.as_secs_f64() > (sampling.warm_up_s + sampling.measurement_s).max(1e-3) {
            break launch.as_secs_f64();
        }
        let call = Instant::now();
        let sample = stopwatch.time_launches(executable, launches)?;
        let launch_s = call.elapsed().as_secs_f64() / sample.launches as f64;
        let left_s = sampling.warm_up_s - started.elapsed().as_secs_f64();
        if left_s <= 0.0 {
            break launch_s.max(1e-9);
        }
        launches = (2 * launches).min((left_s / launch_s.max(1e-9)).ceil() as u64).max(1);
    };
    drop(warm_up);
    let samples =
        ((sampling.measurement_s / launch_s) as usize).clamp(sampling.fewest, sampling.most);
    let launches = ((sampling.measurement_s / samples as f64 / launch_s) as u64).max(1);
    let mut timed = Vec::with_capacity(samples);
    for _ in 0..samples {
        let _range = RangeGuard::new("sample");
        timed.push(SampleWithWallTime::new(|| stopwatch.time_launches(executable, launches))?);
    }
    Ok(collect_samples(
        &timed,
        stopwatch,
        &LoadBeforeSamples::without_load(),
        cpu_contention(start, CpuTimeTicks::now()),
    ))
}

/// Waits for the launches that are in the queue behind the last sample.
fn end_load<T>(
    stopwatch: &mut dyn Stopwatch,
    outcome: Result<T, BackendError>,
) -> Result<T, BackendError> {
    let ended = stopwatch.keep_loaded(false);
    outcome.and_then(|value| ended.map(|()| value))
}

/// A sample, and the wall time that it took with everything around its launches.
#[derive(Debug, Clone, Copy)]
struct SampleWithWallTime {
    sample: LaunchSample,
    wall: Duration,
}

impl SampleWithWallTime {
    fn new(
        take: impl FnOnce() -> Result<LaunchSample, BackendError>,
    ) -> Result<Self, BackendError> {
        let started = Instant::now();
        let sample = take()?;
        Ok(Self { sample, wall: started.elapsed() })
    }
}

/// Result of the load before the samples of a case: how its samples are taken.
struct LoadBeforeSamples {
    /// Launches of a sample; absent if Criterion or the trial's plan decides.
    launches: Option<u64>,
    settled: Option<(SettlingWindows, SettlingEnd)>,
    /// Samples of the load that count as the first samples of the case: those of the last window of
    /// a settled load.
    taken: RefCell<VecDeque<SampleWithWallTime>>,
    /// Wall time of the samples in `taken`, which is subtracted because they come before the first
    /// regular sample.
    taken_wall: Duration,
    /// Pause before each sample of a case that is timed in bursts.
    pause: Duration,
    begun: SystemTime,
}

impl LoadBeforeSamples {
    fn without_load() -> LoadBeforeSamples {
        Self::new(None, Duration::ZERO, SystemTime::now())
    }

    fn new(launches: Option<u64>, pause: Duration, begun: SystemTime) -> Self {
        let (taken, taken_wall) = (RefCell::default(), Duration::ZERO);
        Self { launches, settled: None, taken, taken_wall, pause, begun }
    }

    /// Launches the case as it is sampled until its power state is steady, or finds the length of
    /// its samples for a burst. On the host no wait is needed.
    ///
    /// # Errors
    /// Fails if a launch fails; [`BackendError::Unsupported`] for a burst of long launches.
    fn run_load(
        executable: &mut dyn Executable,
        stopwatch: &mut dyn Stopwatch,
        power: PowerMode,
    ) -> Result<LoadBeforeSamples, BackendError> {
        if stopwatch.power().is_none() {
            return Ok(Self::without_load());
        }
        let _activity = phase_timer::start_activity("settling");
        let _range = RangeGuard::new("warm-up");
        let begun = SystemTime::now();
        let mut load = CaseAsLoad { executable, stopwatch, launches: 1, taken: Vec::new() };
        match power {
            PowerMode::Steady => {
                let settled = power::wait_until_steady(&mut load);
                let CaseAsLoad { launches, taken, .. } = load;
                let settled = match settled {
                    Ok(settled @ (_, SettlingEnd::AtCap | SettlingEnd::Unsettled)) => settled,
                    below_cap => end_load(stopwatch, below_cap)?,
                };
                stopwatch.settle_clock(taken.last().and_then(|last| last.sample.clock_mhz));
                let mut lead = Self::new(Some(launches), Duration::ZERO, begun);
                if settled.1 != SettlingEnd::Unsettled {
                    lead.taken.get_mut().extend(samples_of_last_window(&taken, launches));
                    lead.taken_wall = lead.taken.get_mut().iter().map(|it| it.wall).sum();
                }
                Ok(Self { settled: Some(settled), ..lead })
            }
            PowerMode::Burst => {
                // The warm-up is long enough for the number of launches in a sample to settle.
                let started = Instant::now();
                while started.elapsed().as_secs_f64() < GPU_SAMPLE_SECONDS {
                    let sample = load.take_load_sample()?;
                    let launch_ns = sample.elapsed_ns / sample.launches as f64;
                    if launch_ns > MAX_BURST_LAUNCH_NS {
                        return Err(BackendError::Unsupported(format!(
                            "--power burst measures launches of at most 10 ms, this one takes {:.0} \
                             ms",
                            launch_ns * 1e-6
                        )));
                    }
                }
                let pause = Duration::from_secs_f64(GPU_SAMPLE_SECONDS) * BURST_PAUSES_PER_SAMPLE;
                Ok(Self::new(Some(load.launches), pause, begun))
            }
        }
    }

    /// The load, none of whose samples counts: trials take all of theirs after it.
    fn without_load_samples(self) -> Self {
        Self { taken: RefCell::default(), taken_wall: Duration::ZERO, ..self }
    }

    /// The next sample of the load that counts as a sample of the case; none during a warm-up,
    /// whose samples nobody keeps.
    fn take_load_sample(&self, warms_up: bool) -> Option<SampleWithWallTime> {
        if warms_up { None } else { self.taken.borrow_mut().pop_front() }
    }

    /// Returns whether the card was at its power cap when the load ended.
    fn settled_at_cap(&self) -> bool {
        let end = self.settled.as_ref().map(|(_, end)| end);
        matches!(end, Some(SettlingEnd::AtCap | SettlingEnd::Unsettled))
    }

    /// Takes the samples of a case at the cap without a pause, so that the card stays loaded: with
    /// those of the load for as long as the plan says, then until their median is precise, for at
    /// most [`MAX_EXTRA_SAMPLING`] more; or a number that was chosen. Returns their number.
    fn take_samples_at_cap(
        &mut self,
        executable: &mut dyn Executable,
        stopwatch: &mut dyn Stopwatch,
        plan: &SamplingPlan,
    ) -> Result<usize, BackendError> {
        let _activity = phase_timer::start_activity("samples");
        let mut windows = SettlingWindows::while_sampling();
        let surplus = self.taken.get_mut().len().saturating_sub(plan.samples);
        self.taken.get_mut().drain(..surplus);
        for SampleWithWallTime { sample, wall } in self.taken.get_mut() {
            windows.add(*wall, sample.launches, sample.elapsed_ns, sample.clock_mhz);
        }
        let mut count = self.taken.get_mut().len();
        let (fewest, shortest, extra) = match plan.extends_at_cap {
            true => (MIN_CRITERION_SAMPLES, plan.measurement, MAX_EXTRA_SAMPLING),
            false => (plan.samples, Duration::ZERO, Duration::ZERO),
        };
        let load = self.settled.as_ref().map(|(load, _)| load);
        let is_precise =
            |windows_ns: &[f64]| load.is_none_or(|load| load.median_is_precise(windows_ns));
        let outcome = loop {
            let elapsed = windows.elapsed();
            let precise = elapsed >= shortest + extra || is_precise(windows.windows_ns());
            if count >= fewest && elapsed >= shortest && precise {
                break Ok(count);
            }
            let _range = RangeGuard::new("sample");
            match self.sample_after_load(executable, stopwatch, 1) {
                Ok(one) => {
                    let LaunchSample { launches, elapsed_ns, clock_mhz, .. } = one.sample;
                    windows.add(one.wall, launches, elapsed_ns, clock_mhz);
                    self.taken.get_mut().push_back(one);
                    count += 1;
                }
                Err(error) => break Err(error),
            }
        };
        end_load(stopwatch, outcome)
    }

    /// Takes a sample after the load, with the number of launches that the load found, else with
    /// `launches`.
    fn sample_after_load(
        &self,
        executable: &mut dyn Executable,
        stopwatch: &mut dyn Stopwatch,
        launches: u64,
    ) -> Result<SampleWithWallTime, BackendError> {
        std::thread::sleep(self.pause);
        SampleWithWallTime::new(|| {
            stopwatch.time_launches(executable, self.launches.unwrap_or(launches))
        })
    }

    /// Power state of the samples; absent for a verification pass.
    fn power_of_samples(
        &self,
        timed: &[SampleWithWallTime],
        stopwatch: &dyn Stopwatch,
    ) -> Option<PowerRecord> {
        let Some(meter) = stopwatch.power() else {
            return Some(PowerRecord::not_applicable("the host computes"));
        };
        self.launches?;
        if stopwatch.conditions().host_bound {
            return Some(PowerRecord::not_applicable("the host's launches are in the time"));
        }
        let Some(settled) = &self.settled else {
            let reading = meter.reading().unwrap_or_default();
            return Some(PowerRecord::from_reading(PowerState::Burst, reading));
        };
        let mut windows = SettlingWindows::while_sampling();
        let (mut launches_ns, mut busy_ns) = (Vec::new(), 0.0);
        for SampleWithWallTime { sample, wall } in timed {
            busy_ns += sample.elapsed_ns;
            launches_ns.push(sample.elapsed_ns / sample.launches as f64);
            windows.add(*wall, sample.launches, sample.elapsed_ns, sample.clock_mhz);
        }
        let median_ns = stats::median(&launches_ns);
        let (windows_ns, idle) = (windows.windows_ns(), idle_share(timed));
        let samples = SamplesBehindLoad { windows_ns, median_ns, idle };
        let power = PowerRecord::from_samples_behind_load(settled, &samples, meter);
        let settling_s = power.settling_s - self.taken_wall.as_secs_f64();
        let wall_s = timed.iter().map(|it| it.wall).sum::<Duration>().as_secs_f64();
        let busy = (busy_ns * 1e-9 / wall_s.max(1e-9)).min(1.0);
        Some(PowerRecord { settling_s: settling_s.max(0.0), busy: Some(busy), ..power })
    }
}

/// Share of the samples' wall time that the card waited for the host, beyond what samples that were
/// not held up take besides their launches (such as the flush of a cold one). A host that is late for
/// one sample reads the next one early, because its launches were in the queue: only groups of
/// samples show whether the card waited.
fn idle_share(timed: &[SampleWithWallTime]) -> f64 {
    let wall_per_launch_time = |group: &[SampleWithWallTime]| {
        let wall_ns: f64 = group.iter().map(|one| one.wall.as_nanos() as f64).sum();
        let busy_ns: f64 = group.iter().map(|one| one.sample.elapsed_ns).sum();
        wall_ns / busy_ns.max(1.0)
    };
    let of_groups: Vec<f64> = timed.chunks(SAMPLES_PER_GROUP).map(wall_per_launch_time).collect();
    let without_wait = stats::quantile(&of_groups, 0.1).max(1.0);
    (1.0 - without_wait / wall_per_launch_time(timed)).max(0.0)
}

/// Samples of the last window of a load. A load begins with shorter samples, until the number of
/// launches fits; its very first sample does not count either.
fn samples_of_last_window(
    taken: &[SampleWithWallTime],
    launches: u64,
) -> impl Iterator<Item = SampleWithWallTime> {
    let mut wall = Duration::ZERO;
    let is_earlier = |it: &SampleWithWallTime| {
        let earlier = wall >= power::SETTLING_WINDOW;
        wall += it.wall;
        earlier
    };
    let first_of_window =
        taken.len() - taken.iter().rev().position(is_earlier).unwrap_or(taken.len());
    let window = taken.iter().copied().skip(first_of_window.max(1));
    window.filter(move |it| 2 * it.sample.launches >= launches)
}

/// Launches of a case as they are sampled, in samples of [`GPU_SAMPLE_SECONDS`].
struct CaseAsLoad<'a> {
    executable: &'a mut dyn Executable,
    stopwatch: &'a mut dyn Stopwatch,
    launches: u64,
    /// Samples since the load began, or began again behind a pause.
    taken: Vec<SampleWithWallTime>,
}

impl GpuLoad for CaseAsLoad<'_> {
    fn take_load_sample(&mut self) -> Result<TimedLaunches, BackendError> {
        let timed = SampleWithWallTime::new(|| {
            self.stopwatch.time_launches(self.executable, self.launches)
        })?;
        self.taken.push(timed);
        let SampleWithWallTime { sample, wall } = timed;
        // Wall time, because the cost of a launch besides its own time (the flush of a cold one) is
        // part of the load.
        let launch_s = wall.as_secs_f64() / sample.launches as f64;
        let whole = (GPU_SAMPLE_SECONDS / launch_s.max(1e-9)).ceil() as u64;
        self.launches = whole.clamp(1, 2 * sample.launches);
        let LaunchSample { launches, elapsed_ns, clock_mhz, .. } = sample;
        Ok(TimedLaunches { launches, elapsed_ns, clock_mhz })
    }

    fn cap_reading(&mut self, clock_mhz: Option<f64>) -> CapReading {
        let highest_mhz = f64::INFINITY;
        self.stopwatch
            .power()
            .map_or(CapReading { clock_mhz, highest_mhz, capped: None, slowed: None }, |meter| {
                meter.cap_reading(clock_mhz)
            })
    }

    fn keep_loaded(&mut self) -> Result<(), BackendError> {
        self.stopwatch.keep_loaded(true)
    }

    fn cool_card(&mut self) {
        let _activity = phase_timer::start_activity("cooling");
        self.taken.clear();
        if let Some(meter) = self.stopwatch.power() {
            meter.cool_card();
        }
    }
}

/// Time of the host to start a launch on an idle device, nanoseconds: the shortest of a few.
pub fn shortest_host_launch_ns(executable: &mut dyn Executable) -> Result<f64, BackendError> {
    let mut shortest = f64::INFINITY;
    let begun = Instant::now();
    for taken in 0..LAUNCHES_WITH_HOST_TIME {
        // For long launches the second sample is as informative as a later one, so one further
        // sample suffices.
        if taken > 1 && begun.elapsed() > Duration::from_millis(5) {
            break;
        }
        executable.reset_and_wait()?;
        let started = Instant::now();
        executable.launch()?;
        shortest = shortest.min(started.elapsed().as_secs_f64() * 1e9);
    }
    executable.synchronize()?;
    Ok(shortest)
}

/// Share of the CPU that other processes took between two readings.
fn cpu_contention(start: Option<CpuTimeTicks>, end: Option<CpuTimeTicks>) -> Option<f64> {
    end?.taken_by_others_since(&start?)
}

fn collect_samples(
    timed: &[SampleWithWallTime],
    stopwatch: &dyn Stopwatch,
    lead: &LoadBeforeSamples,
    contention: Option<f64>,
) -> CaseSamples {
    let kept: Vec<LaunchSample> = timed.iter().map(|timed| timed.sample).collect();
    let power = lead.power_of_samples(timed, stopwatch);
    let slowed = power.as_ref().is_some_and(PowerRecord::was_slowed);
    CaseSamples {
        launches: kept.iter().map(|sample| sample.launches).collect(),
        elapsed_ns: kept.iter().map(|sample| sample.elapsed_ns).collect(),
        clock_mhz: kept
            .iter()
            .map(|sample| sample.clock_mhz)
            .collect::<Option<_>>()
            .unwrap_or_default(),
        skew_ns: kept
            .iter()
            .map(|sample| sample.skew_ns)
            .collect::<Option<_>>()
            .unwrap_or_default(),
        conditions: SampleConditions {
            discarded: kept.iter().map(|sample| sample.discarded).sum(),
            throttled: kept.iter().filter(|sample| sample.throttled || slowed).count() as u64,
            contention,
            other_processes: stopwatch
                .power()
                .and_then(|meter| meter.others_computing_since(lead.begun)),
            ..stopwatch.conditions()
        },
        costs: LaunchCosts { commands: stopwatch.command_count(), ..LaunchCosts::default() },
        unrecorded: None,
        power,
        energy: None,
        delay_size: None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::backend::cpu::CpuTask;
    use crate::measure::power::PowerMeter;
    use crate::measure::{ReplayResult, SampleConditions};
    use crate::workload::Tensors;

    /// A simulated card on which a launch takes this many milliseconds, at this SM clock.
    struct FakePowerCard(f64, Option<f64>, Arc<PowerMeter>);

    impl Stopwatch for FakePowerCard {
        fn time_launches(
            &mut self,
            _: &mut dyn Executable,
            launches: u64,
        ) -> Result<LaunchSample, BackendError> {
            let elapsed = Duration::from_secs_f64(self.0 * 1e-3) * launches as u32;
            std::thread::sleep(elapsed);
            let elapsed_ns = elapsed.as_nanos() as f64;
            Ok(LaunchSample {
                launches,
                elapsed_ns,
                skew_ns: None,
                clock_mhz: self.1,
                discarded: 0,
                throttled: false,
            })
        }

        fn replay_timed(
            &mut self,
            _: &mut dyn Executable,
        ) -> Result<Option<ReplayResult>, BackendError> {
            Ok(None)
        }

        fn power(&self) -> Option<&Arc<PowerMeter>> {
            Some(&self.2)
        }

        fn conditions(&self) -> SampleConditions {
            SampleConditions::default()
        }
    }

    fn load_on_card(
        launch_ms: f64,
        clock_mhz: Option<f64>,
        power: PowerMode,
    ) -> Result<LoadBeforeSamples, BackendError> {
        let mut task = CpuTask::new(Arc::new(Tensors::new()), Tensors::new(), |_, _| {});
        let meter = Arc::new(PowerMeter::without_nvml(None));
        let mut card = FakePowerCard(launch_ms, clock_mhz, meter);
        LoadBeforeSamples::run_load(&mut task, &mut card, power)
    }

    #[test]
    fn the_last_window_of_a_settled_load_holds_the_first_samples() {
        let below = load_on_card(1.0, Some(1980.0), PowerMode::Steady).unwrap();
        let (launches, windows) = (below.launches.unwrap(), below.settled.as_ref().unwrap());
        assert_eq!(windows.1, SettlingEnd::BelowCap);
        assert!(below.take_load_sample(true).is_none(), "a warm-up takes real samples");
        let first: Vec<_> = std::iter::from_fn(|| below.take_load_sample(false)).collect();
        let wall: Duration = first.iter().map(|it| it.wall).sum();
        assert!(wall > Duration::ZERO && wall < windows.0.elapsed());
        assert!(first.iter().all(|it| 2 * it.sample.launches >= launches && launches > 1));
        let capped = load_on_card(1.0, Some(1430.0), PowerMode::Steady).unwrap();
        assert_eq!(capped.settled.as_ref().unwrap().1, SettlingEnd::AtCap);
        let first: Vec<_> = std::iter::from_fn(|| capped.take_load_sample(false)).collect();
        let wall: Duration = first.iter().map(|it| it.wall).sum();
        assert!(wall >= power::SETTLING_WINDOW && wall - first[0].wall < power::SETTLING_WINDOW);
    }

    #[test]
    fn samples_at_the_cap_begin_with_those_of_the_load() {
        let sample_counts = |samples, extends_at_cap| {
            let mut task = CpuTask::new(Arc::new(Tensors::new()), Tensors::new(), |_, _| {});
            let meter = Arc::new(PowerMeter::without_nvml(None));
            let mut card = FakePowerCard(1.0, Some(1430.0), meter);
            let mut lead =
                LoadBeforeSamples::run_load(&mut task, &mut card, PowerMode::Steady).unwrap();
            let plan = SamplingPlan {
                samples,
                warm_up: Duration::ZERO,
                measurement: Duration::from_millis(200),
                resamples: 1,
                power: PowerMode::Steady,
                extends_at_cap,
            };
            let of_load = lead.taken.get_mut().len();
            let count = lead.take_samples_at_cap(&mut task, &mut card, &plan).unwrap();
            assert_eq!(lead.taken.get_mut().len(), count);
            (of_load, count)
        };
        let (of_load, count) = sample_counts(50, true);
        assert!(of_load >= 10 && count > of_load && count <= 50, "{of_load} {count}");
        assert_eq!(sample_counts(10, false).1, 10, "the number that was chosen holds");
    }

    #[test]
    fn a_card_that_waits_for_the_host_is_counted_as_idle() {
        let sample = |wall_us| {
            let sample = LaunchSample {
                launches: 1,
                elapsed_ns: 4e6,
                skew_ns: None,
                clock_mhz: None,
                discarded: 0,
                throttled: false,
            };
            SampleWithWallTime { sample, wall: Duration::from_micros(wall_us) }
        };
        // A cold sample has a flush each time, and one in five waits for the host.
        let flushed = vec![sample(5000); 32];
        assert!(idle_share(&flushed).abs() < 1e-9);
        let mut held_up = flushed;
        held_up.extend([sample(10_000); 8]);
        assert!((idle_share(&held_up) - 40.0 / 240.0).abs() < 1e-9);
        // The host is late for every other sample, for less than the launches in the queue take.
        let late = [sample(6000), sample(2000)].repeat(20);
        assert!(idle_share(&late).abs() < 1e-9);
    }

    #[test]
    fn a_burst_refuses_launches_of_more_than_ten_milliseconds() {
        let lead = |launch_ms| load_on_card(launch_ms, None, PowerMode::Burst);
        assert!(lead(1.0).is_ok_and(|lead| lead.pause > Duration::ZERO));
        let why = "--power burst measures launches of at most 10 ms, this one takes 12 ms";
        assert_eq!(lead(12.0).err(), Some(BackendError::Unsupported(why.to_owned())));
    }
}
