//! Going through the selected cases: inputs, reference, verification, timing, record.

use std::time::Instant;

use super::case_error::{CaseError, guard_panics};
use super::problem::{PreparedProblem, VerifiedExecutable};
use super::progress::BenchProgress;
use super::sampling::{CaseToSample, GroupCaseSampler};
use super::session::CaseSession;
use crate::backend::{BackendError, BackendKind, BenchTarget, Executable};
use crate::exit::ExitReason;
use crate::harness::auditing::after_timing::{self, ExecutableFindings};
use crate::harness::auditing::device_memory::CaseMemoryWatch;
use crate::harness::error::HarnessError;
use crate::harness::phase_timer;
use crate::harness::recording::recorder::RecordedCaseEvent;
use crate::harness::selection::cases::{CaseSelectionResult, ProblemGroup, SelectedCase};
use crate::harness::settings::BenchSettings;
use crate::measure::anchors::AnchorRecord;
use crate::measure::delay::{DelayedExecutable, InjectedDelay};
use crate::measure::events::EventTimer;
use crate::measure::limits::TimeLimit;
use crate::measure::power::PowerMode;
use crate::measure::wall_time::WallClock;
use crate::measure::{CacheState, Stopwatch};
use crate::record::run::{AfterTiming, VerificationRecord};
use crate::record::text::printable_on_terminal;
use crate::record::{CaseRecord, CaseSamples};
use kernelgate_cuda::CaseFailure;
use kernelgate_cuda::observe::range::RangeGuard;

/// Clock of the samples.
pub enum SampleTimer {
    /// Host wall time.
    Wall(WallClock),
    /// CUDA events.
    Events(Box<EventTimer>),
}

impl SampleTimer {
    /// The timer for a target: events on GPUs, the wall clock on the CPU.
    pub fn new(target: &BenchTarget) -> Result<Self, BackendError> {
        match target {
            BenchTarget::Cpu => Ok(Self::Wall(WallClock)),
            BenchTarget::Cuda(devices) => Ok(Self::Events(Box::new(EventTimer::new(devices)?))),
        }
    }

    /// Rates of fixed work on the target, in a power state.
    pub fn anchors(&mut self, power: PowerMode) -> AnchorRecord {
        let _activity = phase_timer::start_activity("anchors");
        match self {
            Self::Wall(_) => AnchorRecord::measure_cpu(power),
            Self::Events(events) => AnchorRecord::measure_cuda(events, power),
        }
    }

    /// Wraps an executable so that its launches are delayed on purpose.
    fn wrap_in_delay<'a>(
        &mut self,
        executable: &'a mut dyn Executable,
        delay: &InjectedDelay,
        cache: CacheState,
    ) -> Result<DelayedExecutable<'a>, BackendError> {
        match self {
            Self::Wall(_) => Ok(DelayedExecutable::with_host_delay(executable, delay)),
            Self::Events(events) => {
                DelayedExecutable::delay_on_device(executable, delay, events, cache)
            }
        }
    }

    /// The stopwatch for a case, which decides how it takes samples.
    fn stopwatch_of_case(
        &mut self,
        executable: &mut dyn Executable,
        cache: CacheState,
    ) -> Result<Box<dyn Stopwatch + '_>, BackendError> {
        match self {
            Self::Wall(_) => Ok(Box::new(WallClock)),
            Self::Events(events) => Ok(Box::new(events.stopwatch_of_case(executable, cache)?)),
        }
    }
}

/// A verified case that is about to be timed.
pub struct CaseToTime<'a, 'g> {
    /// Problem of the case.
    pub group: &'a ProblemGroup<'g>,
    /// The case.
    pub case: &'a SelectedCase,
    /// Inputs and reference.
    pub ready: &'a mut PreparedProblem,
    /// Implementation of the case.
    pub verified: &'a mut VerifiedExecutable,
    /// Findings of the checks that earlier cases of this implementation went through.
    pub checked: &'a mut ExecutableFindings,
}

/// State of a process that measures its cases one after the other.
pub struct CaseExecution<'a> {
    session: &'a dyn CaseSession,
    settings: &'a BenchSettings,
    target: BenchTarget,
    timer: SampleTimer,
    progress: BenchProgress,
    /// Reason why nothing more can run, once the device was lost.
    lost: Option<String>,
}

impl<'a> CaseExecution<'a> {
    /// Holds what measuring cases on a target needs; nothing runs before the run begins.
    pub fn new(
        session: &'a dyn CaseSession,
        settings: &'a BenchSettings,
        target: BenchTarget,
        timer: SampleTimer,
        progress: BenchProgress,
    ) -> Self {
        Self { session, settings, target, timer, progress, lost: None }
    }

    /// Verifies and times every selected case.
    ///
    /// # Errors
    /// Fails if the record cannot be written; an error of a case is that case's result.
    pub fn run(mut self, selection: &CaseSelectionResult<'_>) -> Result<ExitReason, HarnessError> {
        let outcome = self.run_selected_groups(selection);
        if self.lost.is_some() {
            // A lost device gives nothing back, and may never answer: it is left to the end of the
            // process.
            std::mem::forget(self);
        }
        outcome
    }

    fn run_selected_groups(
        &mut self,
        selection: &CaseSelectionResult<'_>,
    ) -> Result<ExitReason, HarnessError> {
        let mut sampler = self.session.trial_sampler();
        let mut exit = ExitReason::Fine;
        for (done, group) in selection.groups.iter().enumerate() {
            if self
                .is_budget_over(selection.groups[done..].iter().flat_map(|group| &group.cases))?
            {
                break;
            }
            exit = exit.max(self.run_case_group(group, &mut sampler.begin_problem(group))?);
        }
        Ok(exit)
    }

    fn run_case_group(
        &mut self,
        group: &ProblemGroup<'_>,
        sampler: &mut GroupCaseSampler<'_>,
    ) -> Result<ExitReason, HarnessError> {
        let started = Instant::now();
        let prepared = self
            .error_if_device_was_lost()
            .and_then(|()| self.session.prepare_problem(group, &self.target));
        let mut ready = match prepared {
            Ok(ready) => ready,
            Err(error) => return self.record_failure(&group.cases, &error),
        };
        self.progress.print_prepared(&ready.inputs, started.elapsed());
        if let Some(remark) = group.bound.problem().remark() {
            self.progress.remark(&group.id(), &remark);
        }
        let mut exit = ExitReason::Fine;
        for cases in group.cases.chunk_by(|a, b| a.index == b.index) {
            if !self.is_budget_over(cases)? {
                exit = exit.max(self.run_implementation(group, cases, &mut ready, sampler)?);
            }
        }
        let _activity = phase_timer::start_activity("free");
        drop(ready);
        self.session
            .record(RecordedCaseEvent::Problem(&group.id(), started.elapsed().as_secs_f64()))?;
        Ok(exit)
    }

    /// Verifies an implementation, and times it in each state of the caches.
    fn run_implementation(
        &mut self,
        group: &ProblemGroup<'_>,
        cases: &[SelectedCase],
        ready: &mut PreparedProblem,
        sampler: &mut GroupCaseSampler<'_>,
    ) -> Result<ExitReason, HarnessError> {
        self.progress.print_case(&cases[0].id);
        let started = Instant::now();
        let verified = self
            .error_if_device_was_lost()
            .and_then(|()| self.verify_case(ready, group, &cases[0]));
        let mut verified = match verified {
            Ok(verified) => verified,
            Err(error) => return self.record_failure(cases, &error),
        };
        self.progress.print_verified(&verified.record, started.elapsed());
        let (mut exit, mut checked) = (ExitReason::Fine, ExecutableFindings::default());
        for (i, case) in cases.iter().enumerate() {
            if i > 0 {
                if self.is_budget_over(&cases[i..])? {
                    break;
                }
                self.progress.print_case(&case.id);
            }
            let (verified, checked) = (&mut verified, &mut checked);
            let timed = CaseToTime { group, case, ready, verified, checked };
            match self.time_within_limits(timed, sampler) {
                Ok(record) => {
                    let _activity = phase_timer::start_activity("record");
                    self.session.record(RecordedCaseEvent::Timed(&case.id, Box::new(record)))?;
                }
                Err(error) => {
                    exit = exit.max(self.record_failure(std::slice::from_ref(case), &error)?);
                    if matches!(error, CaseError::Fail(_)) {
                        self.fail_other_cache_states(case, cases)?;
                        break;
                    }
                }
            }
        }
        let _activity = phase_timer::start_activity("free");
        if self.lost.is_some() {
            // Freeing memory that a hung kernel uses would wait for the kernel.
            std::mem::forget(verified.executable);
            return Ok(exit);
        }
        drop(verified.executable);
        if let Some(bytes) = ready.memory.peak_bytes_of_case() {
            let ids: Vec<&str> = cases.iter().map(|case| case.id.as_str()).collect();
            self.session.record(RecordedCaseEvent::DeviceMemory(&ids, bytes))?;
        }
        Ok(exit)
    }

    /// Fails the other cache states of an implementation that failed in one of them: its outputs
    /// are wrong, or it does not do its work, and another state may only hide that.
    fn fail_other_cache_states(
        &mut self,
        failed: &SelectedCase,
        cases: &[SelectedCase],
    ) -> Result<(), HarnessError> {
        let why = format!("has no time: {} of the same implementation failed", failed.id);
        let error =
            CaseError::failed(CaseFailure::new("withheld", why).with_name("case", &failed.id));
        for case in cases.iter().filter(|case| case.id != failed.id) {
            self.record_failure(std::slice::from_ref(case), &error)?;
        }
        Ok(())
    }

    /// Returns an error if an earlier case lost the device.
    fn error_if_device_was_lost(&self) -> Result<(), CaseError> {
        self.lost.as_ref().map_or(Ok(()), |lost| Err(CaseError::failed(lost.clone())))
    }

    /// Returns whether the time budget is over; the named cases are then recorded as not begun.
    fn is_budget_over<'c>(
        &self,
        cases: impl IntoIterator<Item = &'c SelectedCase>,
    ) -> Result<bool, HarnessError> {
        let Some(why) = self.session.budget_over_reason() else { return Ok(false) };
        let ids: Vec<&str> = cases.into_iter().map(|case| case.id.as_str()).collect();
        self.progress.report_skipped(ids.len(), &why);
        self.session.record(RecordedCaseEvent::Skipped(&ids, &why))?;
        Ok(true)
    }

    fn verify_case(
        &self,
        ready: &mut PreparedProblem,
        group: &ProblemGroup<'_>,
        case: &SelectedCase,
    ) -> Result<VerifiedExecutable, CaseError> {
        ready.memory = match self.session.measures_costs() {
            true => CaseMemoryWatch::start_watching(&self.target),
            false => CaseMemoryWatch::default(),
        };
        let verified = self.session.verify_case(ready, group, case, &self.target)?;
        ready.memory.observe_memory();
        Ok(verified)
    }

    /// Times a case, and refuses samples that no launch can have taken.
    fn time_within_limits(
        &mut self,
        timed: CaseToTime<'_, '_>,
        sampler: &mut GroupCaseSampler<'_>,
    ) -> Result<CaseRecord, CaseError> {
        let CaseToTime { group, case, ready, verified, checked } = timed;
        let session = self.session;
        let (work, limits) = (group.bound.problem().work(), session.limits());
        let limit = limits.and_then(|limits| limits.bound(&work, case.cache));
        let timed =
            CaseToTime { group, case, ready: &mut *ready, verified: &mut *verified, checked };
        let (samples, after) = self.time_case(timed, limit.as_ref(), sampler)?;
        check_samples_within_limit(&samples, limit.as_ref(), self.target.kind())?;
        let axes = group.point.iter().map(|(axis, value)| (axis.to_owned(), value.to_owned()));
        let breakdown = group.bound.problem().breakdown();
        Ok(CaseRecord {
            workload: group.suite.name().to_owned(),
            revision: group.suite.revision(),
            problem: axes.collect(),
            implementation: case.row.name.to_owned(),
            cache: case.cache.name().to_owned(),
            work: (&work).into(),
            computed_samples: breakdown.samples,
            sample_unit: breakdown.unit,
            limit,
            verification: VerificationRecord { after: Some(after), ..verified.record.clone() },
            kernels: session.kernels(ready),
            samples,
        })
    }

    /// Times a verified case and checks the samples.
    ///
    /// # Errors
    /// The error is the reason why the case has no time.
    pub fn time_case(
        &mut self,
        timed: CaseToTime<'_, '_>,
        limit: Option<&TimeLimit>,
        sampler: &mut GroupCaseSampler<'_>,
    ) -> Result<(CaseSamples, AfterTiming), CaseError> {
        self.error_if_device_was_lost()?;
        let CaseToTime { group, case, ready, verified, checked } = timed;
        let VerifiedExecutable { executable, record, launch } = verified;
        let _case = RangeGuard::new(&case.id);
        let (timer, executable) = (&mut self.timer, executable.as_mut());
        let mut delayed = match InjectedDelay::find_for_case(&self.settings.delays, &case.id) {
            Some(delay) => {
                Some(guard_panics(|| timer.wrap_in_delay(executable, delay, case.cache))?)
            }
            None => None,
        };
        if delayed.is_some() {
            // Memory that an injected delay takes is not charged to the case.
            ready.memory.exclude_own_memory();
        }
        let delay_size = delayed.as_ref().and_then(DelayedExecutable::delay_size);
        let executable = match &mut delayed {
            Some(delayed) => delayed as &mut dyn Executable,
            None => executable,
        };
        ready.memory.observe_memory();
        let making = phase_timer::start_activity("stopwatch");
        let mut stopwatch = guard_panics(|| timer.stopwatch_of_case(executable, case.cache))?;
        drop(making);
        let timing = phase_timer::start_activity("time");
        let sampled = CaseToSample { case, limit, launch: *launch };
        let mut samples =
            guard_panics(|| sampler.sample_case(&sampled, executable, stopwatch.as_mut()))?;
        samples.delay_size = delay_size;
        samples.costs.device_bytes = group.bound.device_bytes(case.index);
        if self.target.kind() == BackendKind::Cuda && self.session.measures_costs() {
            samples.costs.host_launch_ns =
                Some(guard_panics(|| super::timing::shortest_host_launch_ns(executable))?);
        }
        drop(timing);
        ready.memory.observe_memory();
        // Digest of outputs that an earlier process of this executable verified.
        let digest = record.by.as_ref().and(record.digest.as_deref());
        let clock = Instant::now();
        let _activity = phase_timer::start_activity(after_timing::PHASE_NAME);
        let inputs = &mut checked.inputs;
        let after = after_timing::check_after_timing(
            ready,
            group,
            executable,
            inputs,
            stopwatch.as_mut(),
            digest,
        );
        if after.is_err() {
            // The memory of an implementation that served as the reference is not measured for its
            // cold case either.
            ready.memory.exclude_own_memory();
        }
        let after = after?;
        // If there is a digest, an earlier process of this executable has recorded which streams
        // the launches use.
        if digest.is_none() {
            let _activity = phase_timer::start_activity("record of streams");
            samples.unrecorded = match &checked.elsewhere {
                Some(known) => known.clone(),
                None => {
                    let unrecorded = guard_panics(|| stopwatch.check_elsewhere(executable))?;
                    checked.elsewhere.insert(unrecorded).clone()
                }
            };
        }
        ready.memory.exclude_own_memory();
        self.progress.print_changed_inputs_passed(&after, clock.elapsed());
        Ok((samples, after))
    }

    /// Prints and records the reason why cases have no result.
    fn record_failure(
        &mut self,
        cases: &[SelectedCase],
        error: &CaseError,
    ) -> Result<ExitReason, HarnessError> {
        let (exit, word) = match error {
            CaseError::Skip(_) => (ExitReason::Fine, "skipped"),
            CaseError::Fail(_) | CaseError::Lost(_) => (ExitReason::Regression, "error"),
        };
        for SelectedCase { id, .. } in cases {
            let event = match error {
                CaseError::Skip(reason) => RecordedCaseEvent::Skipped(&[id], reason),
                CaseError::Fail(reason) | CaseError::Lost(reason) => {
                    RecordedCaseEvent::Failed(id, reason)
                }
            };
            if matches!(error, CaseError::Lost(_)) {
                self.lost = Some(format!("not run: {id} lost the GPU"));
            }
            eprintln!("{word}: {id}: {}", printable_on_terminal(error.text()));
            self.session.record(event)?;
        }
        Ok(exit)
    }
}

/// Refuses samples of a GPU that are far faster than the limit. On the host, ceilings are measured
/// while other programs may run, so they refuse nothing.
///
/// # Errors
/// The case fails, with the least time that a launch can take.
pub fn check_samples_within_limit(
    samples: &CaseSamples,
    limit: Option<&TimeLimit>,
    on: BackendKind,
) -> Result<(), CaseError> {
    let limit = limit.filter(|_| on == BackendKind::Cuda);
    let fault = limit.and_then(|limit| {
        let why = CaseFailure::new("faster_than_limit", limit.broken_by(&samples.per_launch_ns())?);
        Some(why.with_number("limit_ns", limit.time_ns).with_name("limit", &limit.by))
    });
    fault.map_or(Ok(()), |why| Err(CaseError::Fail(why)))
}
