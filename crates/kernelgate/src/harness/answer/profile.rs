//! Profiles each selected case: on a GPU, CUPTI records every operation; on the host, each phase is
//! timed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kernelgate_cuda::driver::launch::stage_times::KernelWithStages;
use kernelgate_cuda::driver::stream::stream_hold::StreamHold;
use kernelgate_cuda::instruments::spin_kernel::EmptyKernel;
use kernelgate_cuda::instruments::timing::StreamBlocker;
use kernelgate_cuda::observe::activity::{
    CuptiRecordedActivity, KernelRecord, RecordedDeviceLimits,
};
use kernelgate_cuda::observe::cupti::{CuptiActivityRecorder, CuptiRecordingExtent};
use kernelgate_cuda::observe::range::NamedRangeGuard;
use kernelgate_cuda::{Device, Devices};

use super::per_case::{run_once_per_implementation, status_result_and_reason_of_outcome};
use super::phases;
use crate::backend::{BackendError, BenchDevices, LaunchableProblem};
use crate::harness::running::problem::{PreparedProblem, WhyCaseHasNoResult};
use crate::harness::selection::cases::{SelectedAndSkippedCases, SelectedCase, SelectedProblem};
use crate::measure::CacheState;
use crate::measure::events::CudaEventTimer;
use crate::measure::limits::{DeclaredWorkAndCacheState, MeasuredDeviceLimits};
use crate::protocol::{
    CaseProfileResponse, CuptiCaseRecording, KernelStageCycles, LaunchesToRecord,
    RecordedNetworkPart, ResponseToBenchAction,
};
use crate::record::DeclaredWorkRecord;
use crate::stats::median;
use crate::trace::RecordedKernelsSummary;
use crate::workload::{ProblemPartForProfile, ProblemPartsForProfile};

/// Number of unrecorded launches before the launches that a profile records.
const WARM_UP_LAUNCHES_BEFORE_RECORDING: u32 = 3;
const DEFAULT_RECORDED_LAUNCHES: u32 = 3;
/// Maximum time for which the streams of several GPUs are blocked while the host enqueues launches.
const MAX_MULTI_GPU_STREAM_HOLD: Duration = Duration::from_secs(1);
/// Number of pairs of launch series, one without and one with CUPTI recording, from which the added
/// host time per launch is measured. The GPU's launch queue has room for all launches of one
/// series.
const SERIES_PAIRS_WITH_AND_WITHOUT_CUPTI: usize = 15;
const LAUNCHES_PER_SERIES: usize = 100;

/// Note of a profile without recorded kernels, because CUPTI is missing.
const NOTE_ON_MISSING_CUPTI: &str =
    "no kernels are recorded: CUPTI is missing, and `kernelgate doctor` says how to get it";

/// Verifies and records one case per implementation; without `wanted`, records one launch and
/// returns only sums.
pub fn profile_one_case_per_implementation(
    selection: &SelectedAndSkippedCases<'_>,
    seed: u64,
    target: &BenchDevices,
    wanted: Option<LaunchesToRecord>,
) -> Result<ResponseToBenchAction, BackendError> {
    let repetitions = wanted.unwrap_or_default();
    let by_phase = |note: Option<String>| {
        Ok(measure_phases_and_verify_cases(selection, seed, target, repetitions, note))
    };
    let BenchDevices::Cuda(devices) = target else { return by_phase(None) };
    let device = devices.first_device();
    // The event timer is created before CUPTI recording starts, because recording slows launches
    // down.
    let mut events = CudaEventTimer::new(devices)?;
    let works = selection.problems_with_cases.iter().flat_map(hot_cache_work_of_problem_and_parts);
    let works: Vec<DeclaredWorkAndCacheState> = works.collect();
    let limits = MeasuredDeviceLimits::measure_missing_gpu_limits(
        &mut events,
        &works,
        MeasuredDeviceLimits::default(),
    )?;
    drop(events);
    // Recording starts before any CUDA graph is captured, because CUPTI records earlier graphs
    // without their ranges.
    let (recorder, launch_cost_ns) = match start_recorder_and_measure_launch_cost(device) {
        Ok(Some(begun)) => begun,
        Ok(None) => return by_phase(Some(NOTE_ON_MISSING_CUPTI.to_owned())),
        Err(error) => return by_phase(Some(format!("no kernels are recorded: {error}"))),
    };
    let recording = ProfileRecorderAndSettings {
        recorder,
        limits,
        cupti_overhead_per_launch_ns: launch_cost_ns,
        devices: devices.clone(),
        device_limits: devices
            .iter()
            .map(|device| RecordedDeviceLimits::read_device_limits_from_driver(device))
            .collect::<Result<_, _>>()?,
        warm_up_launches: repetitions.warm_up_launches.unwrap_or(WARM_UP_LAUNCHES_BEFORE_RECORDING),
        recorded_launches: wanted
            .map_or(1, |wanted| wanted.recorded_launches.unwrap_or(DEFAULT_RECORDED_LAUNCHES)),
    };
    let one = |group: &SelectedProblem<'_>, case: &SelectedCase, ready: &mut PreparedProblem| {
        let begun = recording.recorder.record_clock_now_ns();
        let (executable, _) = ready.prepare_and_verify_case(group, case, target)?;
        let staged = !ready.kernels.kernels_with_stages().is_empty();
        let mut recorded =
            recording.record_launches_of_verified_case(group, case, executable, begun)?;
        set_local_memory_from_machine_code(
            &mut recorded.trace,
            &ready.kernels.stack_bytes_per_thread_by_symbol(),
        );
        if staged && wanted.is_some() {
            let clocked = BenchDevices::Cuda(devices.views_with_stage_clocks());
            recorded.stages = match ready.prepare_and_verify_case(group, case, &clocked) {
                Ok((executable, _)) => recording
                    .read_stage_clocks_of_case(executable, &ready.kernels.kernels_with_stages())?,
                Err(lost @ WhyCaseHasNoResult::GpuLost(_)) => return Err(lost),
                Err(error) => {
                    eprintln!("no stage times of {}: {}", case.case_id, error.reason_text());
                    Vec::new()
                }
            };
        }
        Ok(recorded)
    };
    let (outcomes, lost) = run_once_per_implementation(selection, seed, target, "profiling", one);
    if lost {
        // After the GPU is lost, freeing its resources may hang, so they are leaked until the
        // process ends.
        std::mem::forget((Arc::clone(device), recording));
    }
    let profiled = outcomes.into_iter().map(|(case, outcome)| {
        let (status, recording, reason) = status_result_and_reason_of_outcome(outcome);
        let summary = recording
            .as_ref()
            .map(|recording| RecordedKernelsSummary::summarize_recorded_activity(&recording.trace));
        let recording = recording.filter(|_| wanted.is_some()).map(Box::new);
        let samples = recording.as_ref().and_then(|recording| recording.items_per_launch);
        CaseProfileResponse {
            case_id: case,
            status,
            summary,
            phases: Vec::new(),
            items_per_launch: samples,
            reason_without_full_profile: reason,
            recording,
        }
    });
    Ok(ResponseToBenchAction::Profile(profiled.collect()))
}

/// The declared work of a problem and of its parts, each for hot caches.
fn hot_cache_work_of_problem_and_parts(
    group: &SelectedProblem<'_>,
) -> Vec<DeclaredWorkAndCacheState> {
    let problem = group.problem.problem();
    let parts = problem.breakdown().parts.into_iter().map(|part| part.work);
    let all = std::iter::once(problem.work()).chain(parts);
    all.map(|work| DeclaredWorkAndCacheState { work, cache: CacheState::HotCaches }).collect()
}

/// Starts a CUPTI recorder, and measures by how many nanoseconds recording prolongs the host's part
/// of a launch. Returns `None` if the CUPTI library is missing.
///
/// The host's launch rate varies by half from moment to moment, and so does the fastest of many
/// launch series. The added time is therefore the median difference between consecutive series
/// without and with recording.
fn start_recorder_and_measure_launch_cost(
    device: &Device,
) -> Result<Option<(CuptiActivityRecorder, f64)>, BackendError> {
    let empty = EmptyKernel::compile_and_load(device)?;
    let mut costs_ns = Vec::new();
    loop {
        let unrecorded_ns = host_ns_per_empty_launch(&empty, device)?;
        let Some(recorder) =
            CuptiActivityRecorder::start_cupti_recording(CuptiRecordingExtent::AllActivityLists)?
        else {
            return Ok(None);
        };
        costs_ns.push(host_ns_per_empty_launch(&empty, device)? - unrecorded_ns);
        if costs_ns.len() == SERIES_PAIRS_WITH_AND_WITHOUT_CUPTI {
            recorder.take_all_new_records()?;
            return Ok(Some((recorder, median(&costs_ns))));
        }
    }
}

/// Average host time in nanoseconds to enqueue one empty kernel, in the second of two consecutive
/// series.
fn host_ns_per_empty_launch(empty: &EmptyKernel, device: &Device) -> Result<f64, BackendError> {
    let mut elapsed_ns = 0.0;
    for _ in 0..2 {
        let clock = Instant::now();
        (0..LAUNCHES_PER_SERIES).try_for_each(|_| empty.enqueue_empty_kernel())?;
        elapsed_ns = clock.elapsed().as_nanos() as f64;
        device.synchronize()?;
    }
    Ok(elapsed_ns / LAUNCHES_PER_SERIES as f64)
}

/// Measures the phases of one case per implementation with the host's clock, and then verifies the
/// case.
fn measure_phases_and_verify_cases(
    selection: &SelectedAndSkippedCases<'_>,
    seed: u64,
    target: &BenchDevices,
    repetitions: LaunchesToRecord,
    note: Option<String>,
) -> ResponseToBenchAction {
    let one = |group: &SelectedProblem<'_>, case: &SelectedCase, ready: &mut PreparedProblem| {
        let phases = phases::measure_phases_by_host_clock(group, case, ready, target, repetitions)?;
        ready.prepare_and_verify_case(group, case, target)?;
        Ok((phases, group.problem.problem().breakdown().data_items_per_execution))
    };
    let (outcomes, _) = run_once_per_implementation(selection, seed, target, "profiling", one);
    let profiled = outcomes.into_iter().map(|(case, outcome)| {
        let (status, measured, reason) = status_result_and_reason_of_outcome(outcome);
        let (phases, samples) = measured.unwrap_or_default();
        let reason = reason.or_else(|| note.clone());
        CaseProfileResponse {
            case_id: case,
            status,
            summary: None,
            phases,
            items_per_launch: samples,
            reason_without_full_profile: reason,
            recording: None,
        }
    });
    ResponseToBenchAction::Profile(profiled.collect())
}

/// Recorder and settings that all recorded cases share.
struct ProfileRecorderAndSettings {
    recorder: CuptiActivityRecorder,
    limits: MeasuredDeviceLimits,
    cupti_overhead_per_launch_ns: f64,
    devices: Devices,
    /// Properties of each GPU of the set, which are stored in the recording.
    device_limits: Vec<RecordedDeviceLimits>,
    warm_up_launches: u32,
    recorded_launches: u32,
}

impl ProfileRecorderAndSettings {
    /// Launches a verified case, and takes the activity that CUPTI recorded; `begun` is the time at
    /// which the case's preparation began.
    fn record_launches_of_verified_case(
        &self,
        group: &SelectedProblem<'_>,
        case: &SelectedCase,
        mut executable: Box<dyn LaunchableProblem>,
        begun: u64,
    ) -> Result<CuptiCaseRecording, WhyCaseHasNoResult> {
        let Self { recorder, limits, device_limits: described, .. } = self;
        let recorded = (|| {
            reset_and_launch_repeatedly(executable.as_mut(), self.warm_up_launches)?;
            let held = BlockedStreamsOfSeveralGpus::block_streams_of_gpus(
                &self.devices,
                executable.gpus_used_by_launch(),
            )?;
            let (clock, start) = (Instant::now(), recorder.record_clock_now_ns());
            self.launch_all_then_release_streams(&case.case_id, executable.as_mut(), held)?;
            let wall_ns = clock.elapsed().as_nanos();
            executable.wait_for_launches()?;
            let mut trace = recorder.take_new_records_since(start, begun)?;
            remove_stream_blocking_kernels(&mut trace);
            Ok::<_, BackendError>((trace, wall_ns))
        })();
        let problem = group.problem.problem();
        let ProblemPartsForProfile { data_items_per_execution: samples, unit, parts } =
            problem.breakdown();
        let devices =
            described.iter().take(executable.gpus_used_by_launch()).cloned().collect::<Vec<_>>();
        let recorded_part = |part: ProblemPartForProfile| RecordedNetworkPart {
            profile_table: part.profile_table.to_owned(),
            part_label: part.label,
            range_path_ending: part.range_path,
            limits: limits.shortest_times_by_each_ceiling(&part.work, CacheState::HotCaches),
            work: DeclaredWorkRecord::from(&part.work),
        };
        let uses = executable
            .device_memory_by_purpose()
            .iter()
            .map(|(of, bytes)| ((*of).to_owned(), *bytes));
        let memory_uses = uses.collect();
        match recorded {
            Ok((trace, wall_ns)) => Ok(CuptiCaseRecording {
                case_id: case.case_id.clone(),
                warm_up_launches: self.warm_up_launches,
                recorded_launches: self.recorded_launches,
                recorded_launches_wall_ns: u64::try_from(wall_ns).unwrap_or(u64::MAX),
                cupti_overhead_per_launch_ns: Some(self.cupti_overhead_per_launch_ns),
                limits: limits
                    .shortest_times_by_each_ceiling(&problem.work(), CacheState::HotCaches),
                work: DeclaredWorkRecord::from(&problem.work()),
                items_per_launch: samples,
                sample_unit: unit,
                parts: parts.into_iter().map(recorded_part).collect(),
                stages: Vec::new(),
                memory_bytes_by_purpose: memory_uses,
                device: devices.first().cloned().unwrap_or_default(),
                other_devices: devices.into_iter().skip(1).collect(),
                trace,
            }),
            Err(error) => {
                std::mem::forget(executable);
                Err(WhyCaseHasNoResult::GpuLost((&error).into()))
            }
        }
    }

    /// Launches a case whose kernels were compiled with stage clocks, and reads the clock cycles of
    /// each stage.
    fn read_stage_clocks_of_case(
        &self,
        mut executable: Box<dyn LaunchableProblem>,
        staged: &[Arc<KernelWithStages>],
    ) -> Result<Vec<KernelStageCycles>, WhyCaseHasNoResult> {
        let recorded = (|| {
            reset_and_launch_repeatedly(executable.as_mut(), self.warm_up_launches)?;
            staged.iter().try_for_each(|kernel| kernel.clear_stage_counters())?;
            reset_and_launch_repeatedly(executable.as_mut(), self.recorded_launches)?;
            let recorded_stages = |kernel: &Arc<KernelWithStages>| {
                Ok(KernelStageCycles {
                    kernel_name: kernel.kernel_symbol().to_owned(),
                    stage_names: kernel.stage_names().iter().map(|&name| name.to_owned()).collect(),
                    summed_launches: self.recorded_launches,
                    stage_cycles_by_block: kernel.read_stage_cycles_by_block()?,
                })
            };
            staged.iter().map(recorded_stages).collect::<Result<_, BackendError>>()
        })();
        recorded.map_err(|error| {
            std::mem::forget(executable);
            WhyCaseHasNoResult::GpuLost((&error).into())
        })
    }

    /// Enqueues all launches without waiting in between, so that the GPU is never idle except for
    /// the launches themselves. If several GPUs are used, their streams are blocked until all
    /// launches are enqueued, because the host enqueues on one GPU after the other.
    fn launch_all_then_release_streams(
        &self,
        id: &str,
        executable: &mut dyn LaunchableProblem,
        mut held: BlockedStreamsOfSeveralGpus,
    ) -> Result<(), BackendError> {
        let _case = NamedRangeGuard::open_named_range(id);
        for _ in 0..self.recorded_launches {
            if executable.launches_carry_state() {
                let _reset = NamedRangeGuard::open_named_range("reset");
                executable.reset_state()?;
            }
            let _step = NamedRangeGuard::open_named_range(CuptiCaseRecording::RANGE_NAME_OF_LAUNCH);
            executable.launch_once()?;
        }
        held.release_streams();
        let _wait = NamedRangeGuard::open_named_range("wait");
        executable.wait_for_launches()
    }
}

/// Blockers of the streams of several GPUs; empty for a single GPU.
struct BlockedStreamsOfSeveralGpus(Vec<StreamBlocker>);

impl BlockedStreamsOfSeveralGpus {
    fn block_streams_of_gpus(devices: &Devices, gpus: usize) -> Result<Self, BackendError> {
        let mut blockers = Vec::new();
        if gpus > 1 {
            devices.first_devices(gpus).for_each_with_context_current(|_, device| {
                let mut blocker = StreamBlocker::compile_and_allocate_mailbox(device)?;
                blocker.enqueue_hold(MAX_MULTI_GPU_STREAM_HOLD)?;
                blockers.push(blocker);
                Ok(())
            })?;
        }
        Ok(Self(blockers))
    }

    fn release_streams(&mut self) {
        self.0.iter_mut().for_each(StreamHold::release_stream);
    }
}

fn remove_stream_blocking_kernels(trace: &mut CuptiRecordedActivity) {
    let CuptiRecordedActivity { kernels, interned_names: names, .. } = trace;
    let holds = |kernel: &KernelRecord| {
        names
            .get(kernel.name_index as usize)
            .is_some_and(|name| name == StreamBlocker::BLOCKING_KERNEL_SYMBOL)
    };
    kernels.retain(|kernel| !holds(kernel));
}

/// Resets and launches a case `times` times, and waits for the last launch.
fn reset_and_launch_repeatedly(
    executable: &mut dyn LaunchableProblem,
    times: u32,
) -> Result<(), BackendError> {
    for _ in 0..times {
        executable.reset_state()?;
        executable.launch_once()?;
    }
    executable.wait_for_launches()
}

/// Sets the local memory per thread of recorded kernels to the value in their machine code, by
/// kernel symbol: CUPTI reports 0 bytes even for kernels that spill registers. Kernels whose symbol
/// exists in several builds with different values stay unchanged.
fn set_local_memory_from_machine_code(
    trace: &mut CuptiRecordedActivity,
    local_bytes: &BTreeMap<String, BTreeSet<u32>>,
) {
    let CuptiRecordedActivity { kernels, interned_names: names, .. } = trace;
    for kernel in kernels.iter_mut().filter(|kernel| kernel.local_bytes_per_thread == 0) {
        let builds =
            names.get(kernel.name_index as usize).and_then(|name| local_bytes.get(&**name));
        if let Some(bytes) = builds.filter(|builds| builds.len() == 1).and_then(BTreeSet::first) {
            kernel.local_bytes_per_thread = *bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_blocking_kernels_are_removed_from_recordings() {
        let record = |name| KernelRecord { name_index: name, ..KernelRecord::default() };
        let names = [StreamBlocker::BLOCKING_KERNEL_SYMBOL, "own"].map(str::to_owned);
        let kernels = vec![record(0), record(1), record(7), record(0)];
        let mut trace = CuptiRecordedActivity {
            interned_names: names.into(),
            kernels,
            ..CuptiRecordedActivity::default()
        };
        remove_stream_blocking_kernels(&mut trace);
        assert_eq!(trace.kernels, [record(1), record(7)]);
    }

    #[test]
    fn local_memory_is_taken_from_machine_code() {
        let local_bytes = [
            ("spills", BTreeSet::from([184])),
            ("of_two_builds", BTreeSet::from([8, 16])),
            ("one_build", BTreeSet::from([24])),
        ];
        let names = ["spills", "of_two_builds", "one_build", "of a library"].map(str::to_owned);
        let record = |name, local| KernelRecord {
            name_index: name,
            local_bytes_per_thread: local,
            ..KernelRecord::default()
        };
        let kernels = vec![record(0, 0), record(1, 0), record(2, 32), record(3, 0), record(9, 0)];
        let mut trace = CuptiRecordedActivity {
            interned_names: names.into(),
            kernels,
            ..CuptiRecordedActivity::default()
        };
        let local_bytes = local_bytes.map(|(name, bytes)| (name.to_owned(), bytes));
        set_local_memory_from_machine_code(&mut trace, &local_bytes.into());
        let local: Vec<u32> =
            trace.kernels.iter().map(|kernel| kernel.local_bytes_per_thread).collect();
        assert_eq!(local, [184, 0, 32, 0, 0]);
    }
}
