//! Going through the selected cases: inputs, reference, verification, timing, record.

use crate::record::text::printable;
use std::time::{Duration, Instant};

use criterion::{BenchmarkGroup, Criterion, Throughput};

use super::case_error::{CaseError, guarded};
use super::deadline::Deadline;
use super::problem::Ready;
use super::progress::BenchProgress;
use super::timing::{self, SamplingPlan};
use super::trial::TrialState;
use crate::backend::{BackendError, BackendKind, Executable, Target};
use crate::exit::Exit;
use crate::harness::auditing::after_timing::{self, Checked};
use crate::harness::auditing::device_memory::MemoryWatch;
use crate::harness::error::HarnessError;
use crate::harness::recording::recorder::Recorder;
use crate::harness::recording::references::References;
use crate::harness::selection::cases::{Case, Group, Selection};
use crate::harness::settings::args::Flags;
use crate::harness::spent;
use crate::measure::criterion::Elapsed;
use crate::measure::delay::{Delay, Delayed};
use crate::measure::events::EventTimer;
use crate::measure::limits::{Limits, TimeLimit};
use crate::measure::wall::Wall;
use crate::measure::{Cache, Stopwatch};
use crate::record::run::{AfterTiming, VerificationRecord};
use crate::record::{CaseRecord, Samples, Store, TrialSampling};
use crate::workload::{Effort, Work};
use kernelgate_cuda::driver::used::UsedKernels;
use kernelgate_cuda::observe::range::Range;

/// What samples are taken with.
pub enum Timer {
    /// Host wall time.
    Wall(Wall),
    /// CUDA events.
    Events(Box<EventTimer>),
}

impl Timer {
    /// The clock of a target.
    ///
    /// # Errors
    /// When the device fails.
    pub fn new(target: &Target) -> Result<Self, BackendError> {
        match target {
            Target::Cpu => Ok(Self::Wall(Wall)),
            Target::Cuda(devices) => Ok(Self::Events(Box::new(EventTimer::new(devices)?))),
        }
    }

    /// The same launches, delayed on purpose.
    fn delay<'a>(
        &mut self,
        executable: &'a mut dyn Executable,
        (delay, cache): (&Delay, Cache),
    ) -> Result<Delayed<'a>, BackendError> {
        match self {
            Self::Wall(_) => Ok(Delayed::on_host(executable, delay)),
            Self::Events(events) => Delayed::on_device(executable, delay, (events, cache)),
        }
    }

    /// The stopwatch for a case, with how it takes its samples.
    fn case(
        &mut self,
        executable: &mut dyn Executable,
        cache: Cache,
    ) -> Result<Box<dyn Stopwatch + '_>, BackendError> {
        match self {
            Self::Wall(_) => Ok(Box::new(Wall)),
            Self::Events(events) => Ok(Box::new(events.case(executable, cache)?)),
        }
    }
}

/// What stays the same while a process goes through its cases.
pub struct Execution<'a> {
    /// The process' flags.
    pub flags: &'a Flags,
    /// How long to time.
    pub effort: Effort,
    /// Where to compute.
    pub target: Target,
    /// The clock.
    pub timer: Timer,
    /// Measured only when timing.
    pub limits: Option<Limits>,
    /// Present only when timing.
    pub recorder: Option<Recorder>,
    /// What a person sees.
    pub progress: BenchProgress,
    /// Why nothing more can run, once the device was lost.
    pub lost: Option<String>,
    /// Where references are kept; none where each is computed.
    pub references: Option<References>,
    /// Present in a process of a comparison.
    pub trial: Option<TrialState>,
    /// After which no case begins.
    pub deadline: Option<Deadline>,
}

impl Execution<'_> {
    /// Verifies and times every case.
    ///
    /// # Errors
    /// When the record cannot be written; what goes wrong with a case is that case's result.
    pub fn run(
        &mut self,
        selection: &Selection<'_>,
        mut criterion: Option<&mut Criterion<Elapsed>>,
        elapsed: &Elapsed,
    ) -> Result<Exit, HarnessError> {
        let mut exit = Exit::Fine;
        for (done, group) in selection.groups.iter().enumerate() {
            if let Some(why) = self.out_of_time() {
                let left = selection.groups[done..].iter().flat_map(|group| &group.cases);
                self.leave(left, &why)?;
                break;
            }
            exit = exit.max(self.run_group(group, criterion.as_deref_mut(), elapsed)?);
        }
        Ok(exit)
    }

    fn run_group(
        &mut self,
        group: &Group<'_>,
        criterion: Option<&mut Criterion<Elapsed>>,
        elapsed: &Elapsed,
    ) -> Result<Exit, HarnessError> {
        let work = group.bound.problem().work();
        let mut exit = Exit::Fine;
        let mut criterion_group = criterion.map(|criterion| open_group(criterion, group));
        let started = Instant::now();
        let ready = match &self.lost {
            Some(lost) => Err(CaseError::Fail(lost.clone())),
            None => {
                let kept = self.trial.as_ref().and_then(|trial| trial.inputs.as_deref());
                Ready::inputs(group, self.flags.seed, kept, &self.target)
            }
        };
        let ready = ready.and_then(|mut ready| {
            ready.references.clone_from(&self.references);
            // Where each case needs it: not beside a case, in whose memory it would count.
            if self.trial.as_ref().is_none_or(|trial| trial.verified.is_none()) {
                ready.compute_reference(group)?;
            }
            Ok(ready)
        });
        let mut ready = match ready {
            Ok(ready) => ready,
            Err(error) => {
                for case in &group.cases {
                    exit = exit.max(self.record_case_error(case, &error)?);
                }
                return Ok(exit);
            }
        };
        self.progress.prepared(&ready.inputs, started.elapsed());
        if let Some(remark) = group.bound.problem().remark() {
            self.progress.remark(&group.id(), &remark);
        }
        let implementations = group.cases.chunk_by(|a, b| a.index == b.index);
        for cases in implementations {
            if let Some(why) = self.out_of_time() {
                self.leave(cases, &why)?;
                continue;
            }
            self.progress.case(&cases[0].id);
            let started = Instant::now();
            let verified = match &self.lost {
                Some(lost) => Err(CaseError::Fail(lost.clone())),
                None => self.verify(&mut ready, group, &cases[0]),
            };
            let (mut executable, verification, launch) = match verified {
                Ok(verified) => verified,
                Err(error) => {
                    for case in cases {
                        exit = exit.max(self.record_case_error(case, &error)?);
                    }
                    continue;
                }
            };
            self.progress.verified(&verification, started.elapsed());
            let mut checked = Checked::default();
            for (i, case) in cases.iter().enumerate() {
                if i > 0 {
                    if let Some(why) = self.out_of_time() {
                        self.leave(&cases[i..], &why)?;
                        break;
                    }
                    self.progress.case(&case.id);
                }
                let limit = self.limits.as_ref().and_then(|limits| limits.bound(&work, case.cache));
                elapsed.shown().borrow_mut().limit.clone_from(&limit);
                let timed = self.time(
                    criterion_group.as_mut(),
                    (group, case, &mut ready),
                    (executable.as_mut(), &mut checked),
                    (launch, &verification),
                );
                // Builds are compared by what their kernels are, once an executable.
                let kernels = match &self.trial {
                    Some(trial) if !trial.measures() => ready.kernels.describe(),
                    _ => UsedKernels::new(),
                };
                let timed = timed.and_then(|(samples, after)| {
                    let limits = self.limits.as_ref();
                    let floor = limits.and_then(|limits| limits.floor(&work, case.cache));
                    check_floor(&samples, floor.as_ref(), self.target.kind())?;
                    Ok((samples, after))
                });
                match timed {
                    Ok((samples, after)) => {
                        let verification =
                            VerificationRecord { after: Some(after), ..verification.clone() };
                        let found = (verification, kernels);
                        self.record((group, case), &work, limit, found, samples)?;
                    }
                    Err(error) => exit = exit.max(self.record_case_error(case, &error)?),
                }
            }
            let _activity = spent::on("free");
            if self.lost.is_some() {
                // To free what a hung kernel uses is to wait for it.
                std::mem::forget(executable);
            } else {
                drop(executable);
                if let (Some(bytes), Some(recorder)) = (ready.memory.finish(), &self.recorder) {
                    recorder.add_device_memory(cases.iter().map(|case| case.id.as_str()), bytes)?;
                }
            }
        }
        let _activity = spent::on("free");
        drop(ready);
        Ok(exit)
    }

    fn out_of_time(&self) -> Option<String> {
        self.deadline.as_ref().and_then(Deadline::passed)
    }

    /// Records cases that do not begin.
    fn leave<'c>(
        &self,
        cases: impl IntoIterator<Item = &'c Case>,
        why: &str,
    ) -> Result<(), HarnessError> {
        let ids: Vec<&str> = cases.into_iter().map(|case| case.id.as_str()).collect();
        self.progress.left(ids.len(), why);
        Ok(self.recorder.as_ref().map_or(Ok(()), |recorder| recorder.add_skips(&ids, why))?)
    }

    fn verify(
        &self,
        ready: &mut Ready,
        group: &Group<'_>,
        case: &Case,
    ) -> Result<(Box<dyn Executable>, VerificationRecord, Duration), CaseError> {
        // A process that measures times is to be short.
        ready.memory = match &self.trial {
            Some(trial) if trial.measures() => MemoryWatch::default(),
            _ => MemoryWatch::start(&self.target),
        };
        let verified = self.verify_watched(ready, group, case)?;
        ready.memory.see();
        Ok(verified)
    }

    fn verify_watched(
        &self,
        ready: &mut Ready,
        group: &Group<'_>,
        case: &Case,
    ) -> Result<(Box<dyn Executable>, VerificationRecord, Duration), CaseError> {
        match &self.trial {
            Some(trial) => {
                ready.outputs.clone_from(&trial.outputs);
                ready.verify_bits(group, case, &self.target, trial.known(&case.id))
            }
            None => {
                let (executable, comparison) = ready.verify(group, case, &self.target)?;
                Ok((executable, ready.found(comparison, None), Duration::ZERO))
            }
        }
    }

    /// Times a verified case and checks it.
    ///
    /// # Errors
    /// The reason why it has no time.
    pub fn time(
        &mut self,
        criterion_group: Option<&mut BenchmarkGroup<'_, Elapsed>>,
        (group, case, ready): (&Group<'_>, &Case, &mut Ready),
        (executable, checked): (&mut dyn Executable, &mut Checked),
        (launch, verification): (Duration, &VerificationRecord),
    ) -> Result<(Samples, AfterTiming), CaseError> {
        if let Some(lost) = &self.lost {
            return Err(CaseError::Fail(lost.clone()));
        }
        let _case = Range::new(&case.id);
        let (timer, effort, flags) = (&mut self.timer, self.effort, self.flags);
        let on = self.target.kind();
        let sampling = self.trial.as_ref().map_or(TrialSampling::MEASURED, |trial| trial.sampling);
        let mut delayed = match Delay::of(&flags.delay, &case.id) {
            Some(delay) => Some(guarded(|| timer.delay(executable, (delay, case.cache)))?),
            None => None,
        };
        if delayed.is_some() {
            // Its memory is none of the case's.
            ready.memory.skip();
        }
        let delay_size = delayed.as_ref().and_then(Delayed::size);
        let executable = match &mut delayed {
            Some(delayed) => delayed as &mut dyn Executable,
            None => executable,
        };
        ready.memory.see();
        let making = spent::on("stopwatch");
        let mut stopwatch = guarded(|| timer.case(executable, case.cache))?;
        drop(making);
        let timing = spent::on("time");
        let mut samples = guarded(|| {
            let Some(criterion_group) = criterion_group else {
                let power = flags.power.into();
                return timing::trial(executable, stopwatch.as_mut(), sampling, launch, power);
            };
            let sample = stopwatch.time(executable, 1)?;
            let plan =
                SamplingPlan::new(effort, on, sample.elapsed_ns / sample.launches as f64, flags);
            timing::run(
                criterion_group,
                &case.function(),
                executable,
                stopwatch.as_mut(),
                plan,
                flags,
            )
        })?;
        samples.delay_size = delay_size;
        // A process of a comparison that measures is to be short.
        let measures = self.trial.as_ref().is_some_and(TrialState::measures);
        if self.target.kind() == BackendKind::Cuda && !measures {
            samples.host_launch_ns = Some(guarded(|| timing::host_launch_ns(executable))?);
        }
        drop(timing);
        ready.memory.see();
        // The bits of a case that an earlier process of this executable checked.
        let digest = verification.by.as_ref().and(verification.digest.as_deref());
        let clock = Instant::now();
        let _activity = spent::on(after_timing::ACTIVITY);
        let inputs = &mut checked.inputs;
        let after =
            after_timing::check(ready, group, (executable, inputs), stopwatch.as_mut(), digest);
        if after.is_err() {
            // A row that was the reference beside it is none of the cold case's either.
            ready.memory.skip();
        }
        let after = after?;
        // An earlier process of this executable has looked.
        if digest.is_none() {
            let _activity = spent::on("record of streams");
            samples.unrecorded = match &checked.elsewhere {
                Some(known) => known.clone(),
                None => {
                    let unrecorded = guarded(|| stopwatch.check_elsewhere(executable))?;
                    checked.elsewhere.insert(unrecorded).clone()
                }
            };
        }
        ready.memory.skip();
        self.progress.checked(&after, clock.elapsed());
        Ok((samples, after))
    }

    fn record(
        &self,
        (group, case): (&Group<'_>, &Case),
        work: &Work,
        limit: Option<TimeLimit>,
        (verification, kernels): (VerificationRecord, UsedKernels),
        samples: Samples,
    ) -> Result<(), HarnessError> {
        let Some(recorder) = &self.recorder else { return Ok(()) };
        let _activity = spent::on("record");
        let record = CaseRecord {
            workload: group.suite.name().to_owned(),
            revision: group.suite.revision(),
            problem: group
                .point
                .iter()
                .map(|(axis, value)| (axis.to_owned(), value.to_owned()))
                .collect(),
            implementation: case.row.name.to_owned(),
            cache: case.cache.name().to_owned(),
            work: work.into(),
            limit,
            verification,
            device_bytes: group.bound.device_bytes(case.index),
            measured_device_bytes: None,
            kernels,
            samples,
        };
        Ok(recorder.add_case(&case.id, record)?)
    }

    /// Says and records why a case has no result.
    fn record_case_error(&mut self, case: &Case, error: &CaseError) -> Result<Exit, HarnessError> {
        let (exit, reason) = match error {
            CaseError::Skip(reason) => (Exit::Fine, reason),
            CaseError::Fail(reason) | CaseError::Lost(reason) => (Exit::Regression, reason),
        };
        if matches!(error, CaseError::Lost(_)) {
            self.lost = Some(format!("not run: {} lost the GPU", case.id));
        }
        let word = if exit == Exit::Fine { "skipped" } else { "error" };
        eprintln!("{word}: {}: {}", case.id, printable(reason));
        match (&self.recorder, error) {
            (None, _) => {}
            (Some(recorder), CaseError::Skip(reason)) => recorder.add_skip(&case.id, reason)?,
            (Some(recorder), _) => recorder.add_failure(&case.id, reason)?,
        }
        Ok(exit)
    }
}

/// Whether samples are slower than what no launch can be faster than, where that was measured. On
/// the host ceilings are measured beside whatever else it computes, and refuse nothing.
///
/// # Errors
/// A failure that says what the launch would take at least.
pub fn check_floor(
    samples: &Samples,
    floor: Option<&TimeLimit>,
    on: BackendKind,
) -> Result<(), CaseError> {
    let floor = floor.filter(|_| on == BackendKind::Cuda);
    let fault = floor.and_then(|floor| floor.broken_by(&samples.per_launch_ns()));
    fault.map_or(Ok(()), |why| Err(CaseError::Fail(why)))
}

/// Goes through the cases; returns with the exit code where a trial spent its time.
pub fn run_cases(
    mut execution: Execution<'_>,
    selection: &Selection<'_>,
    store: &Store,
) -> Result<Exit, HarnessError> {
    let elapsed = Elapsed::default();
    // A trial has no need of Criterion, which looks for gnuplot when it is made.
    let mut criterion =
        execution.trial.is_none().then(|| new_criterion(store, execution.effort, elapsed.clone()));
    let outcome = execution.run(selection, criterion.as_mut(), &elapsed);
    if execution.lost.is_some() {
        // A lost device gives nothing back, and may never answer: it is left to the end of the
        // process.
        std::mem::forget(execution);
    }
    outcome
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
