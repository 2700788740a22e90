//! Profile of each case: on a GPU every operation that CUPTI records, on the host the time of each
//! phase.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kernelgate_cuda::driver::launch::stage_times::StageClockedKernel;
use kernelgate_cuda::driver::stream::stream_hold::StreamHold;
use kernelgate_cuda::instruments::spin_kernel::EmptyKernel;
use kernelgate_cuda::instruments::timing::StreamBlocker;
use kernelgate_cuda::observe::activity::{KernelRecord, RecordedActivity, RecordedDevice};
use kernelgate_cuda::observe::cupti::{ActivityRecorder, RecordingExtent};
use kernelgate_cuda::observe::range::RangeGuard;
use kernelgate_cuda::{Device, Devices};

use super::per_case::{for_each_implementation, outcome_parts};
use super::phases;
use crate::backend::{BackendError, BenchTarget, Executable};
use crate::harness::running::problem::{CaseError, PreparedProblem};
use crate::harness::selection::cases::{CaseSelectionResult, ProblemGroup, SelectedCase};
use crate::measure::CacheState;
use crate::measure::events::EventTimer;
use crate::measure::limits::{CaseWork, DeviceLimits};
use crate::protocol::{
    BenchResponseBody, CaseRecording, ProfiledCase, RecordedLaunches, RecordedPart, RecordedStages,
};
use crate::record::WorkRecord;
use crate::stats::median;
use crate::trace::RecordedIntervalSummary;
use crate::workload::{Breakdown, BreakdownPart};

/// Number of unrecorded launches before the launches that a profile records.
const WARM_UP_LAUNCHES: u32 = 3;
const RECORDED_LAUNCHES: u32 = 3;
/// How long the streams of several GPUs are held at most while the host enqueues launches.
const STREAM_HOLD: Duration = Duration::from_secs(1);
/// Number of pairs of series, without and with recording, by which the cost of recording an empty
/// kernel is measured. The queue of the device has room for the launches of one series.
const SERIES_PAIRS: usize = 15;
const LAUNCHES_IN_SERIES: usize = 100;

/// Verifies and records one case for each implementation; without repetitions it records one launch
/// and reports only sums.
pub fn profile_cases(
    selection: &CaseSelectionResult<'_>,
    seed: u64,
    target: &BenchTarget,
    wanted: Option<RecordedLaunches>,
) -> Result<BenchResponseBody, BackendError> {
    let repetitions = wanted.unwrap_or_default();
    let by_phase =
        |note: Option<String>| Ok(measure_phases(selection, seed, target, repetitions, note));
    let BenchTarget::Cuda(devices) = target else { return by_phase(None) };
    let device = devices.first_device();
    // The event timer is made before recording begins, because recording slows launches.
    let mut events = EventTimer::new(devices)?;
    let works: Vec<CaseWork> = selection.groups.iter().flat_map(declared_work_with_parts).collect();
    let limits = DeviceLimits::measure_gpu(&mut events, &works, DeviceLimits::default())?;
    drop(events);
    // Recording starts before any graph is captured, because graphs captured earlier are recorded
    // without their ranges.
    let (recorder, launch_cost_ns) = match start_recorder(device) {
        Ok(Some(begun)) => begun,
        Ok(None) => {
            return by_phase(Some(
                "no kernels are recorded: CUPTI is missing, and `kernelgate doctor` says how to \
                 get it"
                    .to_owned(),
            ));
        }
        Err(error) => return by_phase(Some(format!("no kernels are recorded: {error}"))),
    };
    let recording = ProfileRecording {
        recorder,
        limits,
        launch_cost_ns,
        devices: devices.clone(),
        described: devices
            .iter()
            .map(|device| RecordedDevice::read_device_limits(device))
            .collect::<Result<_, _>>()?,
        warm_up: repetitions.warm_up.unwrap_or(WARM_UP_LAUNCHES),
        steps: wanted.map_or(1, |wanted| wanted.steps.unwrap_or(RECORDED_LAUNCHES)),
    };
    let one = |group: &ProblemGroup<'_>, case: &SelectedCase, ready: &mut PreparedProblem| {
        let begun = recording.recorder.clock_ns();
        let (executable, _) = ready.prepare_and_verify(group, case, target)?;
        let staged = !ready.kernels.stage_clocked_kernels().is_empty();
        let mut recorded = recording.record_case_activity(group, case, executable, begun)?;
        add_declared_local_memory(&mut recorded.trace, &ready.kernels.local_bytes_by_kernel());
        if staged && wanted.is_some() {
            let clocked = BenchTarget::Cuda(devices.with_stage_clocks());
            recorded.stages = match ready.prepare_and_verify(group, case, &clocked) {
                Ok((executable, _)) => {
                    recording.measure_stages(executable, &ready.kernels.stage_clocked_kernels())?
                }
                Err(lost @ CaseError::Lost(_)) => return Err(lost),
                Err(error) => {
                    eprintln!("no stage times of {}: {}", case.id, error.text());
                    Vec::new()
                }
            };
        }
        Ok(recorded)
    };
    let (outcomes, lost) = for_each_implementation(selection, seed, target, "profiling", one);
    if lost {
        // A lost device gives nothing back: it is left to the end of the process.
        std::mem::forget((Arc::clone(device), recording));
    }
    let profiled = outcomes.into_iter().map(|(case, outcome)| {
        let (status, recording, reason) = outcome_parts(outcome);
        let summary = recording
            .as_ref()
            .map(|recording| RecordedIntervalSummary::from_activity(&recording.trace));
        let recording = recording.filter(|_| wanted.is_some()).map(Box::new);
        let samples = recording.as_ref().and_then(|recording| recording.samples);
        ProfiledCase { case, status, summary, phases: Vec::new(), samples, reason, recording }
    });
    Ok(BenchResponseBody::Profile(profiled.collect()))
}

/// Work of a problem and of its parts, with hot caches.
fn declared_work_with_parts(group: &ProblemGroup<'_>) -> Vec<CaseWork> {
    let problem = group.bound.problem();
    let parts = problem.breakdown().parts.into_iter().map(|part| part.work);
    let all = std::iter::once(problem.work()).chain(parts);
    all.map(|work| CaseWork { work, cache: CacheState::Hot }).collect()
}

/// Starts a recorder and measures how much it adds to the host's part of a launch, nanoseconds.
/// Returns `None` if the CUPTI library is missing.
///
/// The host's launch rate varies by half from one moment to the next, and so does the fastest of
/// many launch series. The cost is therefore the median of the differences between neighbouring
/// series.
fn start_recorder(device: &Device) -> Result<Option<(ActivityRecorder, f64)>, BackendError> {
    let empty = EmptyKernel::new(device)?;
    let mut costs_ns = Vec::new();
    loop {
        let unrecorded_ns = host_launch_ns(&empty, device)?;
        let Some(recorder) = ActivityRecorder::start(RecordingExtent::Everything)? else {
            return Ok(None);
        };
        costs_ns.push(host_launch_ns(&empty, device)? - unrecorded_ns);
        if costs_ns.len() == SERIES_PAIRS {
            recorder.take_records()?;
            return Ok(Some((recorder, median(&costs_ns))));
        }
    }
}

/// The host's part of a launch, nanoseconds, in a series behind another.
fn host_launch_ns(empty: &EmptyKernel, device: &Device) -> Result<f64, BackendError> {
    let mut elapsed_ns = 0.0;
    for _ in 0..2 {
        let clock = Instant::now();
        (0..LAUNCHES_IN_SERIES).try_for_each(|_| empty.launch())?;
        elapsed_ns = clock.elapsed().as_nanos() as f64;
        device.synchronize()?;
    }
    Ok(elapsed_ns / LAUNCHES_IN_SERIES as f64)
}

/// Measures the phases of one case of each implementation, and verifies the case.
fn measure_phases(
    selection: &CaseSelectionResult<'_>,
    seed: u64,
    target: &BenchTarget,
    repetitions: RecordedLaunches,
    note: Option<String>,
) -> BenchResponseBody {
    let one = |group: &ProblemGroup<'_>, case: &SelectedCase, ready: &mut PreparedProblem| {
        let phases = phases::measure_case_phases(group, case, ready, target, repetitions)?;
        ready.prepare_and_verify(group, case, target)?;
        Ok((phases, group.bound.problem().breakdown().samples))
    };
    let (outcomes, _) = for_each_implementation(selection, seed, target, "profiling", one);
    let profiled = outcomes.into_iter().map(|(case, outcome)| {
        let (status, measured, reason) = outcome_parts(outcome);
        let (phases, samples) = measured.unwrap_or_default();
        let reason = reason.or_else(|| note.clone());
        ProfiledCase { case, status, summary: None, phases, samples, reason, recording: None }
    });
    BenchResponseBody::Profile(profiled.collect())
}

/// State that the recordings of all cases share.
struct ProfileRecording {
    recorder: ActivityRecorder,
    limits: DeviceLimits,
    launch_cost_ns: f64,
    devices: Devices,
    /// Description of each GPU of the set, for the recording.
    described: Vec<RecordedDevice>,
    warm_up: u32,
    steps: u32,
}

impl ProfileRecording {
    /// Launches a verified case, whose preparation began at `began`, and takes the recorded
    /// activity.
    fn record_case_activity(
        &self,
        group: &ProblemGroup<'_>,
        case: &SelectedCase,
        mut executable: Box<dyn Executable>,
        begun: u64,
    ) -> Result<CaseRecording, CaseError> {
        let Self { recorder, limits, described, .. } = self;
        let recorded = (|| {
            launch_repeatedly(executable.as_mut(), self.warm_up)?;
            let held = HeldDeviceStreams::new(&self.devices, executable.gpus())?;
            let (clock, start) = (Instant::now(), recorder.clock_ns());
            self.launch_behind_hold(&case.id, executable.as_mut(), held)?;
            let wall_ns = clock.elapsed().as_nanos();
            executable.synchronize()?;
            let mut trace = recorder.take_records_since(start, begun)?;
            remove_blocking_kernels(&mut trace);
            Ok::<_, BackendError>((trace, wall_ns))
        })();
        let problem = group.bound.problem();
        let Breakdown { samples, unit, parts } = problem.breakdown();
        let devices = described.iter().take(executable.gpus()).cloned().collect::<Vec<_>>();
        let recorded_part = |part: BreakdownPart| RecordedPart {
            table: part.table.to_owned(),
            label: part.label,
            range: part.range,
            limits: limits.bounds(&part.work, CacheState::Hot),
            work: WorkRecord::from(&part.work),
        };
        let uses = executable.memory_uses().iter().map(|(of, bytes)| ((*of).to_owned(), *bytes));
        let memory_uses = uses.collect();
        match recorded {
            Ok((trace, wall_ns)) => Ok(CaseRecording {
                case: case.id.clone(),
                warm_up: self.warm_up,
                steps: self.steps,
                wall_ns: u64::try_from(wall_ns).unwrap_or(u64::MAX),
                launch_cost_ns: Some(self.launch_cost_ns),
                limits: limits.bounds(&problem.work(), CacheState::Hot),
                work: WorkRecord::from(&problem.work()),
                samples,
                sample_unit: unit,
                parts: parts.into_iter().map(recorded_part).collect(),
                stages: Vec::new(),
                memory_uses,
                device: devices.first().cloned().unwrap_or_default(),
                other_devices: devices.into_iter().skip(1).collect(),
                trace,
            }),
            Err(error) => {
                std::mem::forget(executable);
                Err(CaseError::Lost((&error).into()))
            }
        }
    }

    /// Launches a case whose kernels were built with clocks of their stages, and reads the clocks.
    fn measure_stages(
        &self,
        mut executable: Box<dyn Executable>,
        staged: &[Arc<StageClockedKernel>],
    ) -> Result<Vec<RecordedStages>, CaseError> {
        let recorded = (|| {
            launch_repeatedly(executable.as_mut(), self.warm_up)?;
            staged.iter().try_for_each(|kernel| kernel.clear_counters())?;
            launch_repeatedly(executable.as_mut(), self.steps)?;
            let recorded_stages = |kernel: &Arc<StageClockedKernel>| {
                Ok(RecordedStages {
                    kernel: kernel.kernel_symbol().to_owned(),
                    names: kernel.stage_names().iter().map(|&name| name.to_owned()).collect(),
                    launches: self.steps,
                    cycles: kernel.stage_cycles()?,
                })
            };
            staged.iter().map(recorded_stages).collect::<Result<_, BackendError>>()
        })();
        recorded.map_err(|error| {
            std::mem::forget(executable);
            CaseError::Lost((&error).into())
        })
    }

    /// Launches back to back, so that the device waits for nothing but the launches. Launches while
    /// all streams are held until the host has enqueued every launch, because the host serves one
    /// GPU after the other.
    fn launch_behind_hold(
        &self,
        id: &str,
        executable: &mut dyn Executable,
        mut held: HeldDeviceStreams,
    ) -> Result<(), BackendError> {
        let _case = RangeGuard::new(id);
        for _ in 0..self.steps {
            if executable.carries_state() {
                let _reset = RangeGuard::new("reset");
                executable.reset()?;
            }
            let _step = RangeGuard::new(CaseRecording::LAUNCH_RANGE);
            executable.launch()?;
        }
        held.release();
        let _wait = RangeGuard::new("wait");
        executable.synchronize()
    }
}

/// Streams of several GPUs that wait for the host; nothing of one GPU.
struct HeldDeviceStreams(Vec<StreamBlocker>);

impl HeldDeviceStreams {
    fn new(devices: &Devices, gpus: usize) -> Result<Self, BackendError> {
        let mut blockers = Vec::new();
        if gpus > 1 {
            devices.first(gpus).for_each_device(|_, device| {
                let mut blocker = StreamBlocker::new(device)?;
                blocker.hold(STREAM_HOLD)?;
                blockers.push(blocker);
                Ok(())
            })?;
        }
        Ok(Self(blockers))
    }

    fn release(&mut self) {
        self.0.iter_mut().for_each(StreamHold::release);
    }
}

fn remove_blocking_kernels(trace: &mut RecordedActivity) {
    let RecordedActivity { kernels, names, .. } = trace;
    let holds = |kernel: &KernelRecord| {
        names
            .get(kernel.name as usize)
            .is_some_and(|name| name == StreamBlocker::BLOCKING_KERNEL_SYMBOL)
    };
    kernels.retain(|kernel| !holds(kernel));
}

/// Launches `times` times, beginning with the state that the reference begins with, and waits for
/// the last launch.
fn launch_repeatedly(executable: &mut dyn Executable, times: u32) -> Result<(), BackendError> {
    for _ in 0..times {
        executable.reset()?;
        executable.launch()?;
    }
    executable.synchronize()
}

/// Adds the local memory that the machine code of kernels declares, by symbol: CUPTI reports 0
/// bytes even for kernels that spill. Records of one symbol stay unchanged if several builds have
/// it and differ.
fn add_declared_local_memory(
    trace: &mut RecordedActivity,
    local_bytes: &BTreeMap<String, BTreeSet<u32>>,
) {
    let RecordedActivity { kernels, names, .. } = trace;
    for kernel in kernels.iter_mut().filter(|kernel| kernel.local == 0) {
        let builds = names.get(kernel.name as usize).and_then(|name| local_bytes.get(&**name));
        if let Some(bytes) = builds.filter(|builds| builds.len() == 1).and_then(BTreeSet::first) {
            kernel.local = *bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_that_hold_streams_are_no_part_of_a_recording() {
        let record = |name| KernelRecord { name, ..KernelRecord::default() };
        let names = [StreamBlocker::BLOCKING_KERNEL_SYMBOL, "own"].map(str::to_owned);
        let kernels = vec![record(0), record(1), record(7), record(0)];
        let mut trace =
            RecordedActivity { names: names.into(), kernels, ..RecordedActivity::default() };
        remove_blocking_kernels(&mut trace);
        assert_eq!(trace.kernels, [record(1), record(7)]);
    }

    #[test]
    fn local_memory_comes_from_the_machine_code() {
        let local_bytes = [
            ("spills", BTreeSet::from([184])),
            ("of_two_builds", BTreeSet::from([8, 16])),
            ("one_build", BTreeSet::from([24])),
        ];
        let names = ["spills", "of_two_builds", "one_build", "of a library"].map(str::to_owned);
        let record = |name, local| KernelRecord { name, local, ..KernelRecord::default() };
        let kernels = vec![record(0, 0), record(1, 0), record(2, 32), record(3, 0), record(9, 0)];
        let mut trace =
            RecordedActivity { names: names.into(), kernels, ..RecordedActivity::default() };
        let local_bytes = local_bytes.map(|(name, bytes)| (name.to_owned(), bytes));
        add_declared_local_memory(&mut trace, &local_bytes.into());
        let local: Vec<u32> = trace.kernels.iter().map(|kernel| kernel.local).collect();
        assert_eq!(local, [184, 0, 32, 0, 0]);
    }
}
