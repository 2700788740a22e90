//! Timing a verified case, keeping every raw sample: under Criterion's planner, or in a trial by a
//! shorter plan of our own, because Criterion takes no fewer than ten samples and analyses each
//! case alone.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use criterion::measurement::Measurement;
use criterion::{BenchmarkGroup, SamplingMode};

use super::args::{Flags, Mode};
use super::spent;
use super::terse::WithoutAdvice;
use crate::backend::{BackendError, BackendKind, Executable};
use crate::measure::contention::CpuTime;
use crate::measure::{Sample, Stopwatch};
use crate::record::{Samples, TrialSampling};
use crate::workload::Effort;
use kernelgate_cuda::observe::range::Range;

/// Smallest number of samples that Criterion accepts.
const MIN_SAMPLES: f64 = 10.0;
/// Most samples a case: more add time, not knowledge; the unit of a decision is the process.
const MAX_SAMPLES: f64 = 50.0;

/// Launches of which the host's time is taken.
const HOST_LAUNCHES: usize = 5;

/// How long to time a case.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingPlan {
    /// Samples, each of the same number of launches.
    pub samples: usize,
    /// Warm-up.
    pub warm_up: Duration,
    /// Measurement; Criterion takes longer where ten launches do.
    pub measurement: Duration,
    /// Bootstrap resamples of Criterion's analysis.
    pub resamples: usize,
}

impl SamplingPlan {
    /// From the time of one launch: within the effort's budget 10 to 50 samples, never fewer than
    /// 10. Shorter at a GPU than at a host, whose times scatter more and whose cases are fewer; in
    /// a quick look half as many samples there, because flushing the L2 before each cold launch is
    /// not in the budget.
    pub fn new(effort: Effort, on: BackendKind, launch_ns: f64, flags: &Flags) -> Self {
        let (budget_s, warm_up_s, most) = match (effort, on) {
            (Effort::Quick, BackendKind::Cuda) => (0.02, 0.005, MAX_SAMPLES / 2.0),
            (Effort::Quick, BackendKind::Cpu) => (0.1, 0.02, MAX_SAMPLES),
            (Effort::Default, BackendKind::Cuda) => (0.15, 0.04, MAX_SAMPLES),
            (Effort::Default, BackendKind::Cpu) => (1.5, 0.15, MAX_SAMPLES),
            (Effort::Thorough, _) => (4.0, 0.5, MAX_SAMPLES),
        };
        let samples = (budget_s / (launch_ns * 1e-9)).clamp(MIN_SAMPLES, most) as usize;
        Self {
            samples: flags.sample_size.unwrap_or(samples),
            warm_up: Duration::from_secs_f64(flags.warm_up_time.unwrap_or(warm_up_s)),
            measurement: Duration::from_secs_f64(flags.measurement_time.unwrap_or(budget_s)),
            resamples: if effort == Effort::Quick { 2_000 } else { 10_000 },
        }
    }

    /// The least that it takes where a launch takes so long.
    pub fn least(&self, launch_ns: f64) -> Duration {
        let launches = Duration::from_secs_f64(self.samples as f64 * launch_ns * 1e-9);
        self.warm_up + self.measurement.max(launches)
    }
}

/// Runs the case through Criterion in the mode of the process; returns the samples of a
/// measurement, none in the other modes.
///
/// # Errors
/// When a launch fails; Criterion then leaves the case without a result.
pub fn run<M: Measurement<Value = f64>>(
    group: &mut BenchmarkGroup<'_, M>,
    function: &str,
    executable: &mut dyn Executable,
    stopwatch: &mut dyn Stopwatch,
    plan: SamplingPlan,
    flags: &Flags,
) -> Result<Samples, BackendError> {
    group
        .sampling_mode(SamplingMode::Flat)
        .sample_size(plan.samples)
        .warm_up_time(plan.warm_up)
        .measurement_time(plan.measurement);
    if flags.nresamples.is_none() {
        group.nresamples(plan.resamples);
    }
    let taken = RefCell::new(Vec::<Sample>::new());
    let started = Instant::now();
    let failure = RefCell::new(None);
    let (start, end) = (CpuTime::now(), Cell::new(None));
    // Criterion cannot be told of a failed launch: unwind out of it, without a panic message.
    let advice = WithoutAdvice::new();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        group.bench_function(function, |bencher| {
            bencher.iter_custom(|launches| {
                let _activity = spent::on("samples");
                // Criterion does not say which calls are its warm-up; it warms up until the time is
                // over.
                let _range =
                    Range::new(if started.elapsed() < plan.warm_up { "warm-up" } else { "sample" });
                match advice.aloud(|| stopwatch.time(executable, launches)) {
                    Ok(sample) => {
                        taken.borrow_mut().push(sample);
                        end.set(CpuTime::now());
                        // What Criterion asked for, where short launches are batched into more.
                        sample.elapsed_ns / sample.launches as f64 * launches as f64
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
    if flags.mode() != Mode::Bench {
        return Ok(Samples::default());
    }
    let taken = taken.into_inner();
    // Criterion warms up through the same closure: the samples are the last calls.
    let first = taken.len().saturating_sub(plan.samples);
    Ok(collect(&taken[first..], stopwatch, start, end.get()))
}

/// Times a case of a trial: warm-up, then samples of the same number of launches. `launch` is what
/// one took a moment ago; where that is longer than the whole plan, it was the warm-up. Shorter
/// ones are not believed: the first launch of a process may be many times slower than the next, and
/// a plan made from it would end after two of those.
///
/// # Errors
/// When a launch fails.
pub fn trial(
    executable: &mut dyn Executable,
    stopwatch: &mut dyn Stopwatch,
    sampling: TrialSampling,
    launch: Duration,
) -> Result<Samples, BackendError> {
    let (start, started) = (CpuTime::now(), Instant::now());
    let warm_up = Range::new("warm-up");
    let mut launches = 1;
    // By the wall: what a launch costs besides its own time (emptying caches) must fit the plan
    // too.
    let launch_s = loop {
        if launch.as_secs_f64() > (sampling.warm_up_s + sampling.measurement_s).max(1e-3) {
            break launch.as_secs_f64();
        }
        let call = Instant::now();
        let sample = stopwatch.time(executable, launches)?;
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
    let mut taken = Vec::with_capacity(samples);
    for _ in 0..samples {
        let _range = Range::new("sample");
        taken.push(stopwatch.time(executable, launches)?);
    }
    Ok(collect(&taken, stopwatch, start, CpuTime::now()))
}

/// Time of the host to start a launch on an idle device, nanoseconds: the shortest of a few.
///
/// # Errors
/// When a launch fails.
pub fn host_launch_ns(executable: &mut dyn Executable) -> Result<f64, BackendError> {
    let mut shortest = f64::INFINITY;
    let begun = Instant::now();
    for taken in 0..HOST_LAUNCHES {
        // The second of a long launch says as much as the last.
        if taken > 1 && begun.elapsed() > Duration::from_millis(5) {
            break;
        }
        executable.settle()?;
        let started = Instant::now();
        executable.launch()?;
        shortest = shortest.min(started.elapsed().as_secs_f64() * 1e9);
    }
    executable.synchronize()?;
    Ok(shortest)
}

fn collect(
    kept: &[Sample],
    stopwatch: &dyn Stopwatch,
    start: Option<CpuTime>,
    end: Option<CpuTime>,
) -> Samples {
    let technique = stopwatch.technique();
    Samples {
        batch: technique.batch,
        host_bound: technique.host_bound,
        launches: kept.iter().map(|sample| sample.launches).collect(),
        elapsed_ns: kept.iter().map(|sample| sample.elapsed_ns).collect(),
        clock_mhz: kept
            .iter()
            .map(|sample| sample.clock_mhz)
            .collect::<Option<_>>()
            .unwrap_or_default(),
        discarded: kept.iter().map(|sample| sample.discarded).sum(),
        throttled: kept.iter().filter(|sample| sample.throttled).count() as u64,
        commands: technique.commands,
        host_launch_ns: None,
        unrecorded: None,
        delay_size: None,
        contention: start.zip(end).and_then(|(start, end)| end.taken_by_others_since(&start)),
    }
}
