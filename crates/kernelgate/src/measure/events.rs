//! Times launches on one or several GPUs by CUDA events.
//!
//! The launches of a burst are queued behind a kernel that blocks the stream, so the samples do not
//! include the host's launch time. Launches over several GPUs are queued behind a blocking kernel
//! on each GPU, and all are released together; the time of the slowest GPU counts. A clock-probe
//! kernel before and one after each burst measure the SM clock. If the case's caches are cold, the
//! L2 cache is filled with other data before each launch. The event timer allocates all its device
//! memory when it is created, and none while timing.

mod calibration;
mod case;
mod lanes;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub use case::CaseTimingPlan;

use self::lanes::TimingInstrumentsOfGpus;
use super::CacheState;
use super::audit::TimingRefusal;
use super::clock::SampleThrottleDetector;
use super::launch_queue::{self, MAX_COMMANDS_BEHIND_BLOCKER, MaxReplaysOfTriedGraphs};
use super::limits::LaunchAndTimingOverhead;
use super::power::{self, ClockAndThrottleReading, GpuLoadSample, LoadOfGpu, NvmlPowerMeter};
use crate::backend::{BackendError, LaunchableProblem};
use crate::stats;
use kernelgate_cuda::driver::graph_set::ExecutableGraphPerGpu;
use kernelgate_cuda::{Device, Devices};

/// Time after which the kernel that blocks a stream ends even if the host has not released it. A
/// burst of launches is discarded if the kernel that blocks its stream times out.
const BLOCKING_KERNEL_TIMEOUT: Duration = Duration::from_millis(500);
/// Several hot launches, each shorter than this many nanoseconds, are captured in one graph,
/// because the two events would take most of the measured interval.
const MAX_BATCHED_LAUNCH_NS: f64 = 20_000.0;
/// Target duration of a graph of several captured launches, nanoseconds. A launch of several
/// commands below this duration is captured too, hot or cold, because gaps between commands vary in
/// a stream but are constant in a graph.
const LAUNCH_GRAPH_TARGET_NS: f64 = 100_000.0;
/// Largest number of launches that are captured in one graph.
const MAX_LAUNCHES_PER_GRAPH: f64 = 64.0;
/// Number of trial launches that show how long one launch of a ceiling measurement takes.
const TRIAL_LAUNCHES_OF_CEILING: usize = 3;
/// If the fastest earlier candidate for a ceiling takes longer than this many nanoseconds, one
/// trial launch of a further candidate suffices.
const MIN_NS_FOR_SINGLE_TRIAL_LAUNCH: f64 = 1e6;
/// Number of graphs in a brief burst: the time of a graph is already the mean of many launches.
const GRAPHS_PER_BRIEF_BURST: usize = 5;
/// Number of attempts to take a sample; the last attempt is kept even if the GPU was throttled.
const MAX_SAMPLE_ATTEMPTS: u64 = 4;
/// A burst longer than this many nanoseconds is not enqueued while another burst runs, because the
/// GPU then idles for less than 2 % of the time.
const MAX_QUEUED_AHEAD_BURST_NS: f64 = 50e6;
/// Resolution of CUDA event times, nanoseconds; a shorter launch time is raised to this time.
const CUDA_EVENT_RESOLUTION_NS: f64 = 32.0;

/// Times launches on one GPU or on several GPUs by CUDA events.
pub struct CudaEventTimer {
    devices: Devices,
    timing_instruments: TimingInstrumentsOfGpus,
    launch_overhead: LaunchAndTimingOverhead,
    last_ceiling_sm_clock_mhz: Option<f64>,
    throttle_detector: SampleThrottleDetector,
    power: Arc<NvmlPowerMeter>,
    max_replays_in_queue: MaxReplaysOfTriedGraphs,
    /// The burst that was enqueued ahead while the previous burst ran, and whose times were not
    /// read yet.
    burst_enqueued_ahead: Option<EnqueuedBurst>,
}

/// A burst of launches between CUDA events that the host has enqueued and whose times it has not
/// read yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct EnqueuedBurst {
    burst_slot: usize,
    launches: usize,
    cache: CacheState,
    /// Whether the whole burst fits the launch queue behind the blocking kernel, so that its
    /// intervals exclude the host's launch time.
    hides_host_launch_time: bool,
}

/// A burst to enqueue: the number of launches, the state of the caches, and the number of
/// launch-queue entries of one launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BurstToEnqueue {
    launches: usize,
    cache: CacheState,
    queue_entries_per_launch: usize,
}

/// Measured times and SM clock of a finished burst of launches.
struct MeasuredLaunchBurst {
    /// Nanoseconds between the CUDA events around each launch on the slowest GPU, without
    /// subtraction of the timing overhead.
    event_intervals_ns: Vec<f64>,
    /// Time by which the slowest GPU exceeds the fastest GPU over all launches of the burst,
    /// nanoseconds; `None` for one GPU.
    skew_between_gpus_ns: Option<f64>,
    /// SM clock of the slowest GPU during the burst, MHz; `None` if its two clock probes cannot be
    /// compared.
    sm_clock_mhz: Option<f64>,
    /// Whether the intervals may include the host's launch time.
    may_include_host_launch_time: bool,
    /// Whether the burst is invalid because the blocking kernel timed out before the host released
    /// it.
    blocker_timed_out: bool,
}

impl MeasuredLaunchBurst {
    /// Returns the burst if its intervals exclude the host's launch time, and fails otherwise.
    fn refuse_if_host_time_is_included(self) -> Result<Self, BackendError> {
        if self.may_include_host_launch_time {
            return Err(TimingRefusal::HostDelayedLongerThanHold.into());
        }
        Ok(self)
    }
}

/// Repeats a burst until the host releases the blocking kernel before its timeout, for a few
/// attempts.
fn repeat_burst_until_released_in_time(
    mut burst: impl FnMut() -> Result<MeasuredLaunchBurst, BackendError>,
) -> Result<MeasuredLaunchBurst, BackendError> {
    let mut last = burst()?;
    for _ in 1..MAX_SAMPLE_ATTEMPTS {
        if !last.blocker_timed_out {
            break;
        }
        last = burst()?;
    }
    Ok(last)
}

impl CudaEventTimer {
    /// Creates a timer for these GPUs: compiles its kernels, allocates device memory, and measures
    /// the overhead of timing.
    ///
    /// # Errors
    /// Fails if the device fails or memory is short; [`BackendError::NotTimed`] if the host is
    /// delayed all the time.
    pub fn new(devices: impl Into<Devices>) -> Result<Self, BackendError> {
        let devices: Devices = devices.into();
        let device = devices.first_device();
        let nothing = LaunchAndTimingOverhead {
            empty_event_pair_ns: 0.0,
            ns_per_further_stream_kernel: 0.0,
            ns_per_further_graph_node: 0.0,
            host_launch_call_ns: 0.0,
            events_around_launch_ns: 0.0,
            events_around_graph_ns: 0.0,
        };
        let mut timer = Self {
            timing_instruments: TimingInstrumentsOfGpus::new(&devices)?,
            launch_overhead: nothing,
            last_ceiling_sm_clock_mhz: None,
            throttle_detector: SampleThrottleDetector::new(device.gpu_properties()),
            power: Arc::new(NvmlPowerMeter::open_for_gpus(
                device.gpu_properties(),
                devices.iter().skip(1).map(|other| other.gpu_properties()),
            )),
            max_replays_in_queue: MaxReplaysOfTriedGraphs::default(),
            burst_enqueued_ahead: None,
            devices,
        };
        timer.launch_overhead = timer.measure_launch_overhead()?;
        Ok(timer)
    }

    /// Returns the first GPU of the timer, on which all single-GPU work is timed.
    pub fn first_gpu(&self) -> &Arc<Device> {
        self.devices.first_device()
    }

    /// Returns the GPUs on which this timer can time launches.
    pub const fn timed_and_idle_gpus(&self) -> &Devices {
        &self.devices
    }

    /// Returns the cost of launching and timing on this GPU, measured when the timer was created.
    pub fn launch_overhead(&self) -> LaunchAndTimingOverhead {
        self.launch_overhead
    }

    /// Returns the times of `count` launches (at most 63) of one command each, nanoseconds, with
    /// the timing overhead subtracted.
    ///
    /// # Errors
    /// Fails if a launch fails; [`BackendError::NotTimed`] if the host's time is in the launches.
    pub fn time_single_command_launches_ns(
        &mut self,
        count: usize,
        cache: CacheState,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Vec<f64>, BackendError> {
        self.timing_instruments.use_first_gpus(1);
        let around_ns = self.launch_overhead.events_around_launch_ns;
        let intervals_ns = self
            .run_burst_until_released_in_time(count, cache, 1, launch)?
            .refuse_if_host_time_is_included()?
            .event_intervals_ns;
        Ok(intervals_ns.into_iter().map(|interval| interval - around_ns).collect())
    }

    /// Prepares launches that measure a performance ceiling of the GPU; like the launches of a
    /// case, several short hot launches are captured in one graph.
    pub fn prepare_ceiling_launches<'a>(
        &'a mut self,
        cache: CacheState,
        launch: &'a mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<CeilingMeasurementLaunches<'a>, BackendError> {
        self.timing_instruments.use_first_gpus(1);
        let first =
            self.run_burst_until_released_in_time(TRIAL_LAUNCHES_OF_CEILING, cache, 1, launch)?;
        self.prepare_ceiling_launches_after_trial(cache, &first, launch)
    }

    /// Prepares ceiling launches as [`Self::prepare_ceiling_launches`] does, or returns `None` if
    /// the median time of trial launches exceeds `ratio` times the `fastest_ns` of earlier
    /// candidates. The result also contains the median time of the trial launches of this
    /// candidate, nanoseconds.
    pub fn prepare_ceiling_launches_if_short<'a>(
        &'a mut self,
        cache: CacheState,
        (fastest_ns, ratio): (f64, f64),
        launch: &'a mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Option<(f64, CeilingMeasurementLaunches<'a>)>, BackendError> {
        self.timing_instruments.use_first_gpus(1);
        let trials = trial_launches_after_fastest_candidate(fastest_ns);
        let first = self.run_burst_until_released_in_time(trials, cache, 1, launch)?;
        let first_ns =
            stats::median(&first.event_intervals_ns) - self.launch_overhead.events_around_launch_ns;
        if first_ns > ratio * fastest_ns {
            return Ok(None);
        }
        let ceiling = self.prepare_ceiling_launches_after_trial(cache, &first, launch)?;
        Ok(Some((first_ns.max(CUDA_EVENT_RESOLUTION_NS), ceiling)))
    }

    /// Prepares ceiling launches over the first `gpus` GPUs of the timer, as
    /// [`Self::prepare_ceiling_launches`] does for one GPU.
    pub fn prepare_multi_gpu_ceiling_launches<'a>(
        &'a mut self,
        gpus: usize,
        launch: &'a mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<CeilingMeasurementLaunches<'a>, BackendError> {
        self.timing_instruments.use_first_gpus(gpus);
        let first = self.run_burst_until_released_in_time(
            TRIAL_LAUNCHES_OF_CEILING,
            CacheState::HotCaches,
            1,
            launch,
        )?;
        self.prepare_ceiling_launches_after_trial(CacheState::HotCaches, &first, launch)
    }

    fn prepare_ceiling_launches_after_trial<'a>(
        &'a mut self,
        cache: CacheState,
        first: &MeasuredLaunchBurst,
        launch: &'a mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<CeilingMeasurementLaunches<'a>, BackendError> {
        let first_ns =
            stats::median(&first.event_intervals_ns) - self.launch_overhead.events_around_launch_ns;
        let batch = match cache {
            CacheState::HotCaches if first_ns < MAX_BATCHED_LAUNCH_NS => {
                Some(self.capture_launches_filling_graph(first_ns, launch)?)
            }
            _ => None,
        };
        let launches = if first_ns > LAUNCH_GRAPH_TARGET_NS { 5 } else { 15 };
        Ok(CeilingMeasurementLaunches {
            timer: self,
            cache,
            captured_batch: batch,
            launch,
            launches_or_graphs_per_burst: launches,
            last_burst: None,
            keeps_gpu_loaded: false,
        })
    }

    /// Returns the median time of a hot single-command launch in the steady power state,
    /// nanoseconds.
    pub fn settled_time_of_single_command_launch_ns(
        &mut self,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<f64, BackendError> {
        self.prepare_ceiling_launches(CacheState::HotCaches, launch)?
            .settled_median_launch_time_ns()
    }

    /// Returns the SM clock during the last ceiling burst, MHz; `None` if its clock probes cannot
    /// be compared.
    pub const fn last_ceiling_sm_clock_mhz(&self) -> Option<f64> {
        self.last_ceiling_sm_clock_mhz
    }

    /// Returns whether the power cap may have lowered the SM clock during the last ceiling burst.
    /// The answer takes two calls of NVML.
    pub fn may_power_cap_lower_clock_of_last_ceiling(&self) -> bool {
        let reading = self.power.read_power_cap_and_heat_with_nvml(self.last_ceiling_sm_clock_mhz);
        reading.may_power_cap_lower_sm_clock()
    }

    /// Captures several short hot launches in one graph, or a single launch for a case with cold
    /// caches. Returns `None` if a launch is long enough to be timed without a graph.
    fn capture_launches_in_graph_if_short(
        &mut self,
        cache: CacheState,
        commands: usize,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Option<CapturedLaunchBatch>, BackendError> {
        if cache == CacheState::ColdCaches && commands <= 1 {
            return Ok(None);
        }
        let mut typical_ns = |count: usize| -> Result<f64, BackendError> {
            let burst = self.run_burst_until_released_in_time(
                count,
                CacheState::HotCaches,
                commands,
                launch,
            )?;
            Ok(stats::median(&burst.event_intervals_ns)
                - self.launch_overhead.events_around_launch_ns)
        };
        let short = if commands > 1 { LAUNCH_GRAPH_TARGET_NS } else { MAX_BATCHED_LAUNCH_NS };
        // If launches are far from short, one trial launch shows that reliably.
        let first_ns = typical_ns(1)?;
        let launch_ns = if first_ns > 50.0 * short { first_ns } else { typical_ns(5)? };
        if launch_ns >= short {
            return Ok(None);
        }
        match cache {
            CacheState::HotCaches => {
                self.capture_launches_filling_graph(launch_ns, launch).map(Some)
            }
            CacheState::ColdCaches => {
                let graph = ExecutableGraphPerGpu::capture_repeated_on_all_gpus(
                    &self.gpus_in_use(),
                    1,
                    launch,
                )?;
                Ok(Some(CapturedLaunchBatch { graph, launches_in_graph: 1 }))
            }
        }
    }

    /// Captures as many launches of `launch_ns` nanoseconds in one graph as take
    /// [`LAUNCH_GRAPH_TARGET_NS`] together.
    fn capture_launches_filling_graph(
        &self,
        launch_ns: f64,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<CapturedLaunchBatch, BackendError> {
        let launches = (LAUNCH_GRAPH_TARGET_NS / launch_ns.max(CUDA_EVENT_RESOLUTION_NS))
            .ceil()
            .min(MAX_LAUNCHES_PER_GRAPH) as u64;
        let graph = ExecutableGraphPerGpu::capture_repeated_on_all_gpus(
            &self.gpus_in_use(),
            launches,
            launch,
        )?;
        Ok(CapturedLaunchBatch { graph, launches_in_graph: launches })
    }

    /// Estimates the commands of a launch that cannot be captured: the largest burst that can be
    /// queued behind the blocking kernel is assumed to fill the launch queue.
    fn commands_per_launch_by_trial(
        &mut self,
        executable: &mut dyn LaunchableProblem,
    ) -> Result<usize, BackendError> {
        // A launch that carries state cannot be repeated without a reset, so only a burst of one
        // launch is tried.
        let counts: &[usize] = if executable.launches_carry_state() { &[] } else { &[16, 4] };
        for &count in counts {
            // Each trial of a burst that does not fit the launch queue takes half a second, the
            // timeout of the blocking kernel. The estimated number of commands is too high if
            // another process delays the host during the burst.
            if !self
                .run_burst_once(count, CacheState::HotCaches, 1, &mut || executable.launch_once())?
                .may_include_host_launch_time
            {
                return Ok(MAX_COMMANDS_BEHIND_BLOCKER / count);
            }
        }
        let burst = repeat_burst_until_released_in_time(|| {
            executable.reset_state()?;
            self.run_burst_once(1, CacheState::HotCaches, 1, &mut || executable.launch_once())
        })?;
        Ok(if burst.may_include_host_launch_time {
            usize::MAX
        } else {
            MAX_COMMANDS_BEHIND_BLOCKER
        })
    }

    /// Runs [`Self::run_burst_once`], and repeats it until the host releases the blocking kernel
    /// before its timeout.
    fn run_burst_until_released_in_time(
        &mut self,
        count: usize,
        cache: CacheState,
        commands: usize,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<MeasuredLaunchBurst, BackendError> {
        repeat_burst_until_released_in_time(|| self.run_burst_once(count, cache, commands, launch))
    }

    /// Enqueues `count` launches (at most 63 hot, 64 cold), each between two CUDA events, and waits
    /// for them. The parameter `commands` is the number of launch-queue entries of one launch; if
    /// the burst exceeds the queue, the host's launch time is included.
    fn run_burst_once(
        &mut self,
        count: usize,
        cache: CacheState,
        commands: usize,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<MeasuredLaunchBurst, BackendError> {
        self.discard_burst_enqueued_ahead()?;
        let plan = BurstToEnqueue { launches: count, cache, queue_entries_per_launch: commands };
        let queued = self.enqueue_burst_behind_blocker(0, plan, launch)?;
        self.wait_and_read_burst(queued)
    }

    /// Finishes a burst on a GPU that is kept loaded: the burst that was enqueued ahead, or else a
    /// new one of `plan`. Before the host waits for this burst, it enqueues a burst of `next`
    /// launches behind it, so that the GPU does not idle until the next call.
    fn finish_burst_and_enqueue_next(
        &mut self,
        plan: BurstToEnqueue,
        next: usize,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<MeasuredLaunchBurst, BackendError> {
        let queued = match self.burst_enqueued_ahead.take_if(|ahead| ahead.cache == plan.cache) {
            Some(queued) => queued,
            None => {
                self.discard_burst_enqueued_ahead()?;
                self.enqueue_burst_behind_blocker(0, plan, launch)?
            }
        };
        let following = BurstToEnqueue { launches: next, ..plan };
        let slot = (queued.burst_slot + 1) % lanes::MAX_ENQUEUED_BURSTS;
        self.burst_enqueued_ahead =
            Some(self.enqueue_burst_behind_blocker(slot, following, launch)?);
        self.wait_and_read_burst(queued)
    }

    /// Waits for the burst that was enqueued ahead, and drops its times.
    fn discard_burst_enqueued_ahead(&mut self) -> Result<(), BackendError> {
        let Some(queued) = self.burst_enqueued_ahead.take() else { return Ok(()) };
        self.timing_instruments.use_burst_slot(queued.burst_slot);
        let ended = self.timing_instruments.wait_for_interval_end_on_each_gpu().map(drop);
        self.timing_instruments.use_burst_slot(0);
        ended
    }

    /// Enqueues a burst, with the events of the given slot of the event pool, behind a blocking
    /// kernel, and releases the stream.
    fn enqueue_burst_behind_blocker(
        &mut self,
        slot: usize,
        plan: BurstToEnqueue,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<EnqueuedBurst, BackendError> {
        let BurstToEnqueue { launches, cache, queue_entries_per_launch: commands } = plan;
        let hidden = launch_queue::launches_fit_queue(commands, launches);
        self.timing_instruments.use_burst_slot(slot);
        let begun = self
            .timing_instruments
            .begin_interval_on_each_gpu(hidden.then_some(BLOCKING_KERNEL_TIMEOUT));
        let enqueued = begun
            .and_then(|()| {
                self.timing_instruments.enqueue_launches_between_events(launches, cache, launch)
            })
            .and_then(|()| self.timing_instruments.mark_interval_end_on_each_gpu());
        self.timing_instruments.release_stream_of_each_gpu();
        enqueued.map(|()| EnqueuedBurst {
            burst_slot: slot,
            launches,
            cache,
            hides_host_launch_time: hidden,
        })
    }

    /// Waits for an enqueued burst and reads the times between its CUDA events.
    fn wait_and_read_burst(
        &mut self,
        queued: EnqueuedBurst,
    ) -> Result<MeasuredLaunchBurst, BackendError> {
        let EnqueuedBurst { burst_slot: slot, launches, cache, hides_host_launch_time: hidden } =
            queued;
        self.timing_instruments.use_burst_slot(slot);
        // The blocking kernel times out if the host is delayed for half a second.
        let held_up = self.timing_instruments.wait_for_interval_end_on_each_gpu()? == Some(false);
        let at = |i: usize| {
            if cache == CacheState::ColdCaches { (2 * i, 2 * i + 1) } else { (i, i + 1) }
        };
        let (intervals_ns, skew_ns) =
            self.timing_instruments.event_intervals_of_slowest_gpu((0..launches).map(at))?;
        let clock_mhz = self.timing_instruments.lowest_sm_clock_mhz();
        self.timing_instruments.use_burst_slot(0);
        Ok(MeasuredLaunchBurst {
            event_intervals_ns: intervals_ns,
            skew_between_gpus_ns: skew_ns,
            sm_clock_mhz: clock_mhz,
            may_include_host_launch_time: !hidden || held_up,
            blocker_timed_out: held_up,
        })
    }

    /// Returns the GPUs whose streams the timer uses for the present case.
    fn gpus_in_use(&self) -> Devices {
        self.devices.first_devices(self.timing_instruments.number_of_gpus_in_use())
    }
}

/// Returns how many trial launches show the time of a candidate for a ceiling, if the fastest
/// earlier candidate takes `fastest_ns`; infinite if there is no earlier candidate.
fn trial_launches_after_fastest_candidate(fastest_ns: f64) -> usize {
    let is_long = fastest_ns.is_finite() && fastest_ns > MIN_NS_FOR_SINGLE_TRIAL_LAUNCH;
    if is_long { 1 } else { TRIAL_LAUNCHES_OF_CEILING }
}

/// Launches that measure a performance ceiling of the GPU, timed one burst after the other.
pub struct CeilingMeasurementLaunches<'a> {
    timer: &'a mut CudaEventTimer,
    cache: CacheState,
    captured_batch: Option<CapturedLaunchBatch>,
    launch: &'a mut dyn FnMut() -> Result<(), BackendError>,
    /// Number of launches, or of graphs that each contain several launches, in a burst.
    launches_or_graphs_per_burst: usize,
    last_burst: Option<MeasuredLaunchBurst>,
    /// Whether the next burst is enqueued while the present burst runs, so that the GPU never
    /// idles.
    keeps_gpu_loaded: bool,
}

impl CeilingMeasurementLaunches<'_> {
    /// Runs one burst and returns the median time of its launches, nanoseconds.
    ///
    /// # Errors
    /// Fails if a launch fails; [`BackendError::NotTimed`] if the host's time is in the launches.
    pub fn median_launch_time_of_burst_ns(&mut self) -> Result<f64, BackendError> {
        let Self {
            timer,
            cache,
            captured_batch: batch,
            launch,
            launches_or_graphs_per_burst: count,
            last_burst: last,
            keeps_gpu_loaded: keeps_loaded,
        } = self;
        let launch: &mut dyn FnMut() -> Result<(), BackendError> = match batch {
            Some(batch) => &mut || batch.graph.launch_graphs_on_all_gpus(),
            None => launch,
        };
        let plan = BurstToEnqueue { launches: *count, cache: *cache, queue_entries_per_launch: 1 };
        let burst = repeat_burst_until_released_in_time(|| match keeps_loaded {
            true => timer.finish_burst_and_enqueue_next(plan, plan.launches, launch),
            false => timer.run_burst_once(
                plan.launches,
                plan.cache,
                plan.queue_entries_per_launch,
                launch,
            ),
        })?;
        let burst = last.insert(burst.refuse_if_host_time_is_included()?);
        timer.last_ceiling_sm_clock_mhz = burst.sm_clock_mhz;
        let interval_ns = stats::median(&burst.event_intervals_ns);
        Ok(self.launch_time_in_interval_ns(interval_ns))
    }

    /// Returns the time of one launch, nanoseconds, from the interval between the two CUDA events
    /// around a launch or a graph of launches.
    fn launch_time_in_interval_ns(&self, interval_ns: f64) -> f64 {
        let overhead = &self.timer.launch_overhead;
        let (launches, around_ns) = match &self.captured_batch {
            Some(batch) => (batch.launches_in_graph, overhead.events_around_graph_ns),
            None => (1, overhead.events_around_launch_ns),
        };
        (interval_ns - around_ns).max(CUDA_EVENT_RESOLUTION_NS) / launches as f64
    }

    /// Runs one burst, with fewer replays if launches are captured in graphs, and returns the
    /// median time of its launches, nanoseconds.
    ///
    /// # Errors
    /// Those of [`Self::median_launch_time_of_burst_ns`].
    pub fn median_launch_time_of_brief_burst_ns(&mut self) -> Result<f64, BackendError> {
        let launches = self.launches_or_graphs_per_burst;
        if self.captured_batch.is_some() {
            self.launches_or_graphs_per_burst = launches.min(GRAPHS_PER_BRIEF_BURST);
        }
        let launch_ns = self.median_launch_time_of_burst_ns();
        self.launches_or_graphs_per_burst = launches;
        launch_ns
    }

    /// Loads the GPU until its power state is steady, then returns the median launch time of one
    /// burst, nanoseconds.
    ///
    /// # Errors
    /// Fails if a launch fails; [`BackendError::NotTimed`] if the host's time is in the launches.
    pub fn settled_median_launch_time_ns(&mut self) -> Result<f64, BackendError> {
        power::run_load_until_gpu_is_steady(self)?;
        self.median_launch_time_of_burst_ns()
    }

    /// Returns the mean launch time in the fastest of several windows in the steady power state,
    /// nanoseconds. The fastest window counts, because the clock wanders at the power cap and a
    /// ceiling is a best case. The first of these windows is the last window of a load at the power
    /// cap.
    ///
    /// # Errors
    /// Fails if a launch fails; [`BackendError::NotTimed`] if the host's time is in the launches.
    pub fn fastest_window_mean_launch_time_ns(&mut self) -> Result<f64, BackendError> {
        const MEASURED_WINDOWS: usize = 4;
        let (load, _) = power::run_load_until_gpu_is_steady(self)?;
        let of_load_ns = match load.launch_times_by_window_ns() {
            [_burst, .., last_ns] => Some(self.launch_time_in_interval_ns(*last_ns)),
            _ => None,
        };
        let mut fastest_ns = of_load_ns.unwrap_or(f64::INFINITY);
        for _ in usize::from(of_load_ns.is_some())..MEASURED_WINDOWS {
            let (begun, mut total_ns, mut bursts) = (Instant::now(), 0.0, 0.0);
            while begun.elapsed() < power::LOAD_SETTLING_WINDOW {
                total_ns += self.median_launch_time_of_burst_ns()?;
                bursts += 1.0;
            }
            fastest_ns = fastest_ns.min(total_ns / bursts);
        }
        Ok(fastest_ns)
    }
}

impl Drop for CeilingMeasurementLaunches<'_> {
    /// Waits until the enqueued launches have ended, because the memory that they use may be freed
    /// next.
    fn drop(&mut self) {
        let _ = self.timer.discard_burst_enqueued_ahead();
    }
}

impl LoadOfGpu for CeilingMeasurementLaunches<'_> {
    fn run_load_sample(&mut self) -> Result<GpuLoadSample, BackendError> {
        self.median_launch_time_of_burst_ns()?;
        let intervals_ns = self.last_burst.as_ref().map(|burst| &burst.event_intervals_ns[..]);
        let intervals_ns = intervals_ns.unwrap_or_default();
        Ok(GpuLoadSample {
            launches: intervals_ns.len() as u64,
            elapsed_ns: intervals_ns.iter().sum(),
            sm_clock_mhz: self.timer.last_ceiling_sm_clock_mhz,
        })
    }

    fn read_power_cap_and_heat(&mut self, clock_mhz: Option<f64>) -> ClockAndThrottleReading {
        self.timer.power.read_power_cap_and_heat_with_nvml(clock_mhz)
    }

    fn enqueue_samples_ahead(&mut self) -> Result<(), BackendError> {
        self.keeps_gpu_loaded = true;
        Ok(())
    }

    fn wait_for_hot_gpu_to_cool(&mut self) {
        self.timer.power.wait_until_gpu_is_cooler();
    }
}

/// Several short launches that were captured together in one CUDA graph.
struct CapturedLaunchBatch {
    graph: ExecutableGraphPerGpu,
    launches_in_graph: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn burst_with_hidden_launch_time(hidden: bool, released: bool) -> MeasuredLaunchBurst {
        let held_up = hidden && !released;
        MeasuredLaunchBurst {
            event_intervals_ns: Vec::new(),
            skew_between_gpus_ns: None,
            sm_clock_mhz: None,
            may_include_host_launch_time: !hidden || held_up,
            blocker_timed_out: held_up,
        }
    }

    #[test]
    fn a_burst_is_repeated_if_the_blocking_kernel_timed_out() {
        let bursts = |hidden, held_up: u64| {
            let mut done = 0;
            let last = repeat_burst_until_released_in_time(|| {
                done += 1;
                Ok(burst_with_hidden_launch_time(hidden, done > held_up))
            });
            (done, last.unwrap().may_include_host_launch_time)
        };
        assert_eq!(bursts(true, 0), (1, false));
        assert_eq!(bursts(true, 2), (3, false));
        assert_eq!(bursts(true, MAX_SAMPLE_ATTEMPTS), (MAX_SAMPLE_ATTEMPTS, true));
        assert_eq!(bursts(false, MAX_SAMPLE_ATTEMPTS), (1, true));
        let failed = repeat_burst_until_released_in_time(|| {
            Err(BackendError::DeviceLost("gone".to_owned()))
        });
        assert!(matches!(failed, Err(BackendError::DeviceLost(_))));
    }

    #[test]
    fn candidates_beside_a_long_one_have_one_trial_launch() {
        let trials = [f64::INFINITY, 3e3, 9e5, 2e6].map(trial_launches_after_fastest_candidate);
        assert_eq!(trials, [3, 3, 3, 1]);
    }

    #[test]
    fn a_burst_that_includes_host_time_is_refused() {
        let burst = |host_bound: bool| MeasuredLaunchBurst {
            event_intervals_ns: vec![1.0, 2.0],
            ..burst_with_hidden_launch_time(!host_bound, true)
        };
        assert_eq!(
            burst(false).refuse_if_host_time_is_included().unwrap().event_intervals_ns,
            [1.0, 2.0]
        );
        let error = burst(true).refuse_if_host_time_is_included().err().unwrap();
        assert_eq!(
            error.to_string(),
            "has no time: the host was held up for longer than the GPU can wait for it, in each attempt: its time would be in what is measured"
        );
    }
}
