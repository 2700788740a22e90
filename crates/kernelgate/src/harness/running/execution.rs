//! Runs the selected cases: prepares inputs and references, verifies, times and records each case.

use std::time::Instant;

use super::case_error::{WhyCaseHasNoResult, run_with_panics_as_case_failures};
use super::problem::{PreparedProblem, VerifiedImplementation};
use super::progress::BenchProgressPrinter;
use super::sampling::{CaseToTakeSamplesOf, SamplerOfProblemCases};
use super::session::CaseRunningProcess;
use crate::backend::{BackendError, BackendKind, BenchDevices, LaunchableProblem};
use crate::exit::ProcessExitReason;
use crate::harness::auditing::after_timing::{self, FindingsForCasesOfImplementation};
use crate::harness::auditing::device_memory::PeakDeviceMemoryWatch;
use crate::harness::error::HarnessError;
use crate::harness::phase_timer;
use crate::harness::recording::recorder::CaseOutcomeToRecord;
use crate::harness::selection::cases::{SelectedAndSkippedCases, SelectedCase, SelectedProblem};
use crate::harness::settings::BenchSettings;
use crate::measure::anchors::ShardAnchorRecord;
use crate::measure::delay::{ExecutableWithDelayedLaunches, InjectedLaunchDelay};
use crate::measure::events::CudaEventTimer;
use crate::measure::limits::ShortestLaunchTime;
use crate::measure::power::TimingPowerMode;
use crate::measure::wall_time::WallTimeStopwatch;
use crate::measure::{CacheState, LaunchStopwatch};
use crate::record::run::{OutputVerificationRecord, VerificationAfterTiming};
use crate::record::text::clean_message_for_terminal;
use crate::record::{CaseRecordWithSamples, SamplesOfCase};
use kernelgate_cuda::CaseFailureReason;
use kernelgate_cuda::observe::range::NamedRangeGuard;

/// Clock with which the samples of a case are timed.
pub enum CaseTimer {
    /// Host wall time.
    WallClock(WallTimeStopwatch),
    /// CUDA events.
    CudaEvents(Box<CudaEventTimer>),
}

impl CaseTimer {
    /// Creates the timer for a target: CUDA events on GPUs, the host's wall clock on the CPU.
    pub fn for_target(target: &BenchDevices) -> Result<Self, BackendError> {
        match target {
            BenchDevices::Cpu => Ok(Self::WallClock(WallTimeStopwatch)),
            BenchDevices::Cuda(devices) => {
                Ok(Self::CudaEvents(Box::new(CudaEventTimer::new(devices)?)))
            }
        }
    }

    /// Measures the rates of fixed reference work on the target in a power mode, by which shards
    /// are compared.
    pub fn measure_anchor_rates(&mut self, power: TimingPowerMode) -> ShardAnchorRecord {
        let _activity = phase_timer::start_timed_activity("anchors");
        match self {
            Self::WallClock(_) => ShardAnchorRecord::measure_cpu_anchors(power),
            Self::CudaEvents(events) => ShardAnchorRecord::measure_gpu_anchors(events, power),
        }
    }

    /// Wraps a prepared implementation so that its launches get an artificial delay.
    fn with_injected_delay<'a>(
        &mut self,
        executable: &'a mut dyn LaunchableProblem,
        delay: &InjectedLaunchDelay,
        cache: CacheState,
    ) -> Result<ExecutableWithDelayedLaunches<'a>, BackendError> {
        match self {
            Self::WallClock(_) => {
                Ok(ExecutableWithDelayedLaunches::delay_launches_on_host(executable, delay))
            }
            Self::CudaEvents(events) => ExecutableWithDelayedLaunches::delay_launches_on_gpu(
                executable, delay, events, cache,
            ),
        }
    }

    /// Creates the stopwatch for a case, planning how samples are taken.
    fn create_case_stopwatch(
        &mut self,
        executable: &mut dyn LaunchableProblem,
        cache: CacheState,
    ) -> Result<Box<dyn LaunchStopwatch + '_>, BackendError> {
        match self {
            Self::WallClock(_) => Ok(Box::new(WallTimeStopwatch)),
            Self::CudaEvents(events) => {
                Ok(Box::new(events.plan_and_create_case_stopwatch(executable, cache)?))
            }
        }
    }
}

/// A verified case that is about to be timed, with its problem and prepared implementation.
pub struct VerifiedCaseToTime<'a, 'g> {
    /// Problem that the case computes, with its selected cases.
    pub problem: &'a SelectedProblem<'g>,
    /// Id of the case: `workload/problem/implementation/cache`.
    pub case: &'a SelectedCase,
    /// Inputs and reference.
    pub prepared_problem: &'a mut PreparedProblem,
    /// Prepared and verified implementation of the case.
    pub verified: &'a mut VerifiedImplementation,
    /// Findings of checks after timing, shared by the cases (hot and cold) of this implementation.
    pub findings: &'a mut FindingsForCasesOfImplementation,
}

/// State of a process that verifies and times its selected cases one after the other.
pub struct SelectedCasesRunner<'a> {
    case_running_process: &'a dyn CaseRunningProcess,
    settings: &'a BenchSettings,
    case_device: BenchDevices,
    timer: CaseTimer,
    progress: BenchProgressPrinter,
    /// Reason why no further case can run, after a case lost the GPU; `None` while the GPU works.
    reason_gpu_is_lost: Option<String>,
}

impl<'a> SelectedCasesRunner<'a> {
    /// Creates the runner with all that running cases needs; no case runs yet.
    pub fn for_session_and_target(
        session: &'a dyn CaseRunningProcess,
        settings: &'a BenchSettings,
        target: BenchDevices,
        timer: CaseTimer,
        progress: BenchProgressPrinter,
    ) -> Self {
        Self {
            case_running_process: session,
            settings,
            case_device: target,
            timer,
            progress,
            reason_gpu_is_lost: None,
        }
    }

    /// Verifies and times every selected case.
    ///
    /// # Errors
    /// Fails if the record cannot be written; the error of a case becomes the result of that case.
    pub fn run_selected_cases(
        mut self,
        selection: &SelectedAndSkippedCases<'_>,
    ) -> Result<ProcessExitReason, HarnessError> {
        let outcome = self.run_problems_until_budget_is_over(selection);
        if self.reason_gpu_is_lost.is_some() {
            // After the GPU is lost, freeing its resources may hang, so they are leaked until the
            // process ends.
            std::mem::forget(self);
        }
        outcome
    }

    fn run_problems_until_budget_is_over(
        &mut self,
        selection: &SelectedAndSkippedCases<'_>,
    ) -> Result<ProcessExitReason, HarnessError> {
        let mut sampler = self.case_running_process.sampler_of_process();
        let mut exit = ProcessExitReason::Success;
        for (done, group) in selection.problems_with_cases.iter().enumerate() {
            if self.record_not_begun_if_budget_is_over(
                selection.problems_with_cases[done..].iter().flat_map(|group| &group.cases),
            )? {
                break;
            }
            exit = exit.max(
                self.run_cases_of_problem(group, &mut sampler.begin_sampling_of_problem(group))?,
            );
        }
        Ok(exit)
    }

    fn run_cases_of_problem(
        &mut self,
        group: &SelectedProblem<'_>,
        sampler: &mut SamplerOfProblemCases<'_>,
    ) -> Result<ProcessExitReason, HarnessError> {
        let started = Instant::now();
        let prepared = self
            .error_if_gpu_was_lost()
            .and_then(|()| self.case_running_process.prepare_problem(group, &self.case_device));
        let mut ready = match prepared {
            Ok(ready) => ready,
            Err(error) => return self.print_and_record_missing_results(&group.cases, &error),
        };
        self.progress.print_inputs_and_reference_ready(&ready.inputs, started.elapsed());
        if let Some(remark) = group.problem.problem().remark() {
            self.progress.print_remark_about_problem(&group.workload_and_problem_id(), &remark);
        }
        let mut exit = ProcessExitReason::Success;
        for cases in group.cases.chunk_by(|a, b| a.implementation_index == b.implementation_index) {
            if !self.record_not_begun_if_budget_is_over(cases)? {
                exit = exit
                    .max(self.verify_and_time_implementation(group, cases, &mut ready, sampler)?);
            }
        }
        let _activity = phase_timer::start_timed_activity("free");
        drop(ready);
        self.case_running_process.record_outcome(CaseOutcomeToRecord::ProblemWallSeconds(
            &group.workload_and_problem_id(),
            started.elapsed().as_secs_f64(),
        ))?;
        Ok(exit)
    }

    /// Verifies an implementation once, and then times it with hot and with cold caches, as
    /// selected.
    fn verify_and_time_implementation(
        &mut self,
        group: &SelectedProblem<'_>,
        cases: &[SelectedCase],
        ready: &mut PreparedProblem,
        sampler: &mut SamplerOfProblemCases<'_>,
    ) -> Result<ProcessExitReason, HarnessError> {
        self.progress.print_case_begins(&cases[0].case_id);
        let started = Instant::now();
        let verified = self
            .error_if_gpu_was_lost()
            .and_then(|()| self.verify_case_and_watch_memory(ready, group, &cases[0]));
        let mut verified = match verified {
            Ok(verified) => verified,
            Err(error) => return self.print_and_record_missing_results(cases, &error),
        };
        self.progress.print_verified(&verified.record, started.elapsed());
        let (mut exit, mut checked) =
            (ProcessExitReason::Success, FindingsForCasesOfImplementation::default());
        for (i, case) in cases.iter().enumerate() {
            if i > 0 {
                if self.record_not_begun_if_budget_is_over(&cases[i..])? {
                    break;
                }
                self.progress.print_case_begins(&case.case_id);
            }
            let (verified, checked) = (&mut verified, &mut checked);
            let timed = VerifiedCaseToTime {
                problem: group,
                case,
                prepared_problem: ready,
                verified,
                findings: checked,
            };
            match self.time_case_and_make_record(timed, sampler) {
                Ok(record) => {
                    let _activity = phase_timer::start_timed_activity("record");
                    self.case_running_process.record_outcome(CaseOutcomeToRecord::Timed(
                        &case.case_id,
                        Box::new(record),
                    ))?;
                }
                Err(error) => {
                    exit = exit.max(
                        self.print_and_record_missing_results(std::slice::from_ref(case), &error)?,
                    );
                    if matches!(error, WhyCaseHasNoResult::Failed(_)) {
                        self.fail_cases_in_other_cache_states(case, cases)?;
                        break;
                    }
                }
            }
        }
        let _activity = phase_timer::start_timed_activity("free");
        if self.reason_gpu_is_lost.is_some() {
            // The implementation is leaked, because freeing memory that a hung kernel uses would
            // wait for the kernel forever.
            std::mem::forget(verified.executable);
            return Ok(exit);
        }
        drop(verified.executable);
        if let Some(bytes) = ready.memory.finish_and_return_peak_bytes() {
            let ids: Vec<&str> = cases.iter().map(|case| case.case_id.as_str()).collect();
            self.case_running_process
                .record_outcome(CaseOutcomeToRecord::DeviceMemoryBytes(&ids, bytes))?;
        }
        Ok(exit)
    }

    /// Marks the implementation's cases in other cache states as failed, because outputs were wrong
    /// or work is missing, which another cache state may only hide.
    fn fail_cases_in_other_cache_states(
        &mut self,
        failed: &SelectedCase,
        cases: &[SelectedCase],
    ) -> Result<(), HarnessError> {
        let why = format!("has no time: {} of the same implementation failed", failed.case_id);
        let error = WhyCaseHasNoResult::failed_with(
            CaseFailureReason::failure_with_kind_and_sentence("withheld", why)
                .with_name_fact("case", &failed.case_id),
        );
        for case in cases.iter().filter(|case| case.case_id != failed.case_id) {
            self.print_and_record_missing_results(std::slice::from_ref(case), &error)?;
        }
        Ok(())
    }

    /// Returns an error if an earlier case lost the GPU.
    fn error_if_gpu_was_lost(&self) -> Result<(), WhyCaseHasNoResult> {
        self.reason_gpu_is_lost
            .as_ref()
            .map_or(Ok(()), |lost| Err(WhyCaseHasNoResult::failed_with(lost.clone())))
    }

    /// Whether the time budget is over; if so, records the given cases as not begun.
    fn record_not_begun_if_budget_is_over<'c>(
        &self,
        cases: impl IntoIterator<Item = &'c SelectedCase>,
    ) -> Result<bool, HarnessError> {
        let Some(why) = self.case_running_process.reason_if_budget_is_over() else {
            return Ok(false);
        };
        let ids: Vec<&str> = cases.into_iter().map(|case| case.case_id.as_str()).collect();
        self.progress.print_skipped_cases(ids.len(), &why);
        self.case_running_process.record_outcome(CaseOutcomeToRecord::Skipped(&ids, &why))?;
        Ok(true)
    }

    fn verify_case_and_watch_memory(
        &self,
        ready: &mut PreparedProblem,
        group: &SelectedProblem<'_>,
        case: &SelectedCase,
    ) -> Result<VerifiedImplementation, WhyCaseHasNoResult> {
        ready.memory = match self.case_running_process.measures_memory_and_host_launch_time() {
            true => PeakDeviceMemoryWatch::start_watching(&self.case_device),
            false => PeakDeviceMemoryWatch::default(),
        };
        let verified =
            self.case_running_process.verify_case(ready, group, case, &self.case_device)?;
        ready.memory.update_peak_from_memory_in_use();
        Ok(verified)
    }

    /// Times a case, and rejects samples that are faster than the device can be.
    fn time_case_and_make_record(
        &mut self,
        timed: VerifiedCaseToTime<'_, '_>,
        sampler: &mut SamplerOfProblemCases<'_>,
    ) -> Result<CaseRecordWithSamples, WhyCaseHasNoResult> {
        let VerifiedCaseToTime {
            problem: group,
            case,
            prepared_problem: ready,
            verified,
            findings,
        } = timed;
        let session = self.case_running_process;
        let (work, limits) = (group.problem.problem().work(), session.measured_ceilings());
        let limit = limits.and_then(|limits| limits.shortest_time_of_work(&work, case.cache));
        let timed = VerifiedCaseToTime {
            problem: group,
            case,
            prepared_problem: &mut *ready,
            verified: &mut *verified,
            findings,
        };
        let (samples, after) = self.time_and_check_verified_case(timed, limit.as_ref(), sampler)?;
        reject_gpu_samples_faster_than_limit(
            &samples,
            limit.as_ref(),
            self.case_device.backend_kind(),
        )?;
        let axes =
            group.axis_values.iter().map(|(axis, value)| (axis.to_owned(), value.to_owned()));
        let breakdown = group.problem.problem().breakdown();
        Ok(CaseRecordWithSamples {
            workload: group.suite.workload_name().to_owned(),
            workload_revision: group.suite.workload_revision(),
            axis_values: axes.collect(),
            implementation: case.implementation.name.to_owned(),
            cache_state: case.cache.cache_state_name().to_owned(),
            work: (&work).into(),
            data_items_per_launch: breakdown.data_items_per_execution,
            data_item_unit: breakdown.unit,
            limit,
            verification: OutputVerificationRecord {
                after_timing: Some(after),
                ..verified.record.clone()
            },
            kernels: session.kernels_of_last_implementation(ready),
            samples,
        })
    }

    /// Times a verified case, and then checks it with changed inputs.
    ///
    /// # Errors
    /// The error is the reason why the case has no time.
    pub fn time_and_check_verified_case(
        &mut self,
        timed: VerifiedCaseToTime<'_, '_>,
        limit: Option<&ShortestLaunchTime>,
        sampler: &mut SamplerOfProblemCases<'_>,
    ) -> Result<(SamplesOfCase, VerificationAfterTiming), WhyCaseHasNoResult> {
        self.error_if_gpu_was_lost()?;
        let VerifiedCaseToTime {
            problem: group,
            case,
            prepared_problem: ready,
            verified,
            findings: checked,
        } = timed;
        let VerifiedImplementation { executable, record, earlier_launch_wall_time } = verified;
        let _case = NamedRangeGuard::open_named_range(&case.case_id);
        let (timer, executable) = (&mut self.timer, executable.as_mut());
        let mut delayed =
            match InjectedLaunchDelay::find_delay_for_case(&self.settings.delays, &case.case_id) {
                Some(delay) => Some(run_with_panics_as_case_failures(|| {
                    timer.with_injected_delay(executable, delay, case.cache)
                })?),
                None => None,
            };
        if delayed.is_some() {
            // Device memory for the injected delay is not charged to the case.
            ready.memory.exclude_memory_of_harness();
        }
        let delay_size = delayed.as_ref().and_then(ExecutableWithDelayedLaunches::gpu_delay_size);
        let executable = match &mut delayed {
            Some(delayed) => delayed as &mut dyn LaunchableProblem,
            None => executable,
        };
        ready.memory.update_peak_from_memory_in_use();
        let making = phase_timer::start_timed_activity("stopwatch");
        let mut stopwatch = run_with_panics_as_case_failures(|| {
            timer.create_case_stopwatch(executable, case.cache)
        })?;
        drop(making);
        let timing = phase_timer::start_timed_activity("time");
        let earlier_launch_wall_time = *earlier_launch_wall_time;
        let sampled = CaseToTakeSamplesOf { case, limit, earlier_launch_wall_time };
        let mut samples = run_with_panics_as_case_failures(|| {
            sampler.take_samples_of_case(&sampled, executable, stopwatch.as_mut())
        })?;
        samples.delay_ns_or_bytes = delay_size;
        samples.costs.declared_device_bytes =
            group.problem.device_bytes_declared_by_implementation(case.implementation_index);
        if self.case_device.backend_kind() == BackendKind::Cuda
            && self.case_running_process.measures_memory_and_host_launch_time()
        {
            samples.costs.host_launch_ns = Some(run_with_panics_as_case_failures(|| {
                super::timing::shortest_host_time_to_launch_ns(executable)
            })?);
        }
        drop(timing);
        ready.memory.update_peak_from_memory_in_use();
        // The digest exists if an earlier process of this executable verified these outputs.
        let digest = record.reused_from_run.as_ref().and(record.output_bits_hash.as_deref());
        let clock = Instant::now();
        let _activity = phase_timer::start_timed_activity(after_timing::CHECK_AFTER_TIMING_PHASE);
        let inputs = &mut checked.current_inputs;
        let watch = stopwatch.as_mut();
        let after = after_timing::check_outputs_after_timing(
            ready, group, executable, inputs, watch, digest,
        );
        if after.is_err() {
            // A reference computed by another row may have used memory, so memory since the last
            // update is not charged to the next case.
            ready.memory.exclude_memory_of_harness();
        }
        let after = after?;
        // If the digest exists, an earlier process of this executable has already recorded which
        // streams the launches use.
        if digest.is_none() {
            let _activity = phase_timer::start_timed_activity("record of streams");
            let reason = &mut checked.checked_reason_without_cupti_record;
            samples.reason_cupti_did_not_check = match reason {
                Some(known) => known.clone(),
                None => {
                    let unrecorded = run_with_panics_as_case_failures(|| {
                        stopwatch.check_for_work_on_other_streams(executable)
                    })?;
                    reason.insert(unrecorded).clone()
                }
            };
        }
        ready.memory.exclude_memory_of_harness();
        self.progress.print_changed_inputs_passed(&after, clock.elapsed());
        Ok((samples, after))
    }

    /// Prints and records why the given cases have no result.
    fn print_and_record_missing_results(
        &mut self,
        cases: &[SelectedCase],
        error: &WhyCaseHasNoResult,
    ) -> Result<ProcessExitReason, HarnessError> {
        let (exit, word) = match error {
            WhyCaseHasNoResult::Skipped(_) => (ProcessExitReason::Success, "skipped"),
            WhyCaseHasNoResult::Failed(_) | WhyCaseHasNoResult::GpuLost(_) => {
                (ProcessExitReason::Regression, "error")
            }
        };
        for SelectedCase { case_id: id, .. } in cases {
            let event = match error {
                WhyCaseHasNoResult::Skipped(reason) => CaseOutcomeToRecord::Skipped(&[id], reason),
                WhyCaseHasNoResult::Failed(reason) | WhyCaseHasNoResult::GpuLost(reason) => {
                    CaseOutcomeToRecord::Failed(id, reason)
                }
            };
            if matches!(error, WhyCaseHasNoResult::GpuLost(_)) {
                self.reason_gpu_is_lost = Some(format!("not run: {id} lost the GPU"));
            }
            eprintln!("{word}: {id}: {}", clean_message_for_terminal(error.reason_text()));
            self.case_running_process.record_outcome(event)?;
        }
        Ok(exit)
    }
}

/// Rejects samples on a GPU that are far faster than the case's limit. On the host, ceilings are
/// measured while other programs may run, so no sample is rejected.
///
/// # Errors
/// The case fails; the error states the shortest possible time of a launch.
pub fn reject_gpu_samples_faster_than_limit(
    samples: &SamplesOfCase,
    limit: Option<&ShortestLaunchTime>,
    on: BackendKind,
) -> Result<(), WhyCaseHasNoResult> {
    let limit = limit.filter(|_| on == BackendKind::Cuda);
    let fault = limit.and_then(|limit| {
        let why = CaseFailureReason::failure_with_kind_and_sentence(
            "faster_than_limit",
            limit.refusal_of_times_far_below_limit(&samples.launch_times_by_sample_ns())?,
        );
        Some(
            why.with_number_fact("limit_ns", limit.shortest_launch_ns)
                .with_name_fact("limit", &limit.deciding_ceiling),
        )
    });
    fault.map_or(Ok(()), |why| Err(WhyCaseHasNoResult::Failed(why)))
}
