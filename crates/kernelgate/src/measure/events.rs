//! CUDA events: the clock of the GPU backend.
//!
//! Launches of a burst are queued behind a blocking kernel, so that the host's launch time is not
//! in the samples. Launches over several GPUs are queued behind a blocking kernel on each, which
//! are released together; the slowest GPU counts. A probe before and one after the burst measure
//! the SM clock. In the cold state the L2 cache is filled with other data before each launch. The
//! timer allocates all memory when it is created, and none while timing.

mod calibration;
mod case;
mod lanes;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub use case::CasePlan;

use self::lanes::TimedGpus;
use super::CacheState;
use super::audit::TimingRefusal;
use super::clock::SampleClockWatch;
use super::launch_queue::{self, FoundBursts, MAX_QUEUED_COMMANDS};
use super::limits::LaunchOverhead;
use super::power::{self, CapReading, GpuLoad, PowerMeter, TimedLaunches};
use crate::backend::{BackendError, Executable};
use crate::stats;
use kernelgate_cuda::driver::graph_set::GraphSet;
use kernelgate_cuda::{Device, Devices};

/// Time after which the kernel that blocks a stream gives up. A burst whose blocking kernel times
/// out is discarded.
const BLOCKER_TIMEOUT: Duration = Duration::from_millis(500);
/// Hot launches shorter than this, in nanoseconds, are captured several to a graph: an event pair
/// would take most of the interval.
const SHORT_LAUNCH_NS: f64 = 20_000.0;
/// Minimum duration of a graph of short launches. Launches of several commands that take less are
/// captured, too, hot and cold: the gap between two commands in a stream varies between processes;
/// in a graph it is shorter and constant.
const GRAPH_TARGET_NS: f64 = 100_000.0;
/// Maximum number of short launches in a graph.
const MAX_GRAPH_LAUNCHES: f64 = 64.0;
/// Launches of a ceiling that show how long one is.
const CEILING_TRIAL_LAUNCHES: usize = 3;
/// Number of attempts at a sample; the last one is kept even if it is throttled.
const MAX_THROTTLED_ATTEMPTS: u64 = 4;
/// A burst that takes longer is not enqueued while another one runs: the device idles for less than
/// a fiftieth of the time between two such bursts.
const MAX_BURST_AHEAD_NS: f64 = 50e6;
/// Resolution of event times, nanoseconds: no launch takes less.
const EVENT_RESOLUTION_NS: f64 = 32.0;

/// Times launches on the GPUs of a set.
pub struct EventTimer {
    devices: Devices,
    lanes: TimedGpus,
    overhead: LaunchOverhead,
    typical_clock_mhz: Option<f64>,
    clock: SampleClockWatch,
    power: Arc<PowerMeter>,
    bursts: FoundBursts,
    /// The burst that is queued or running behind the burst that was read last.
    ahead: Option<QueuedBurst>,
}

/// A burst of launches in the device's queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct QueuedBurst {
    slot: usize,
    launches: usize,
    cache: CacheState,
    /// Whether the whole burst was queued before it began, so that its intervals exclude the host's
    /// launch time.
    hidden: bool,
}

/// Launches of a burst: their number, state of the caches, entries of the device's queue that one
/// takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BurstPlan {
    launches: usize,
    cache: CacheState,
    commands: usize,
}

/// Times of a burst of launches.
struct LaunchBurst {
    /// Nanoseconds between the events around each launch, overhead included; of the slowest GPU.
    intervals_ns: Vec<f64>,
    /// By how much the slowest GPU took longer than the fastest, over all launches, nanoseconds;
    /// `None` for one GPU.
    skew_ns: Option<f64>,
    /// SM clock over the burst, MHz, of the slowest GPU; `None` if the probes do not compare.
    clock_mhz: Option<f64>,
    /// Whether the host's launch time may be in the intervals.
    host_bound: bool,
    /// Whether the burst is invalid only because the blocking kernel timed out before the host
    /// released it.
    held_up: bool,
}

impl LaunchBurst {
    /// Returns the burst if none of its intervals includes host time.
    fn without_host(self) -> Result<Self, BackendError> {
        if self.host_bound {
            return Err(TimingRefusal::HostHeldUp.into());
        }
        Ok(self)
    }
}

/// Repeats a burst until the host releases the blocking kernel in time.
fn unless_held_up(
    mut burst: impl FnMut() -> Result<LaunchBurst, BackendError>,
) -> Result<LaunchBurst, BackendError> {
    let mut last = burst()?;
    for _ in 1..MAX_THROTTLED_ATTEMPTS {
        if !last.held_up {
            break;
        }
        last = burst()?;
    }
    Ok(last)
}

impl EventTimer {
    /// Compiles the timer's kernels, allocates memory, and measures the cost of timing.
    ///
    /// # Errors
    /// Fails if the device fails or memory is short; [`BackendError::NotTimed`] if the host is
    /// delayed all the time.
    pub fn new(devices: impl Into<Devices>) -> Result<Self, BackendError> {
        let devices: Devices = devices.into();
        let device = devices.first_device();
        let nothing = LaunchOverhead {
            event_pair_ns: 0.0,
            launch_ns: 0.0,
            graph_node_ns: 0.0,
            host_launch_ns: 0.0,
            around_launch_ns: 0.0,
            around_graph_ns: 0.0,
        };
        let mut timer = Self {
            lanes: TimedGpus::new(&devices)?,
            overhead: nothing,
            typical_clock_mhz: None,
            clock: SampleClockWatch::new(device.facts()),
            power: Arc::new(PowerMeter::open_for_devices(
                device.facts(),
                devices.iter().skip(1).map(|other| other.facts()),
            )),
            bursts: FoundBursts::default(),
            ahead: None,
            devices,
        };
        timer.overhead = timer.calibrate()?;
        Ok(timer)
    }

    /// The first GPU, on which all work for one GPU is timed.
    pub fn device(&self) -> &Arc<Device> {
        self.devices.first_device()
    }

    /// The GPUs of the set whose launches can be timed.
    pub const fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Cost of launching and timing, measured when this timer was made.
    pub fn overhead(&self) -> LaunchOverhead {
        self.overhead
    }

    /// The time of each of `count` launches of one command (at most 63), nanoseconds, without
    /// overhead.
    ///
    /// # Errors
    /// Fails if a launch fails; [`BackendError::NotTimed`] if the host's time is in the launches.
    pub fn launches_ns(
        &mut self,
        count: usize,
        cache: CacheState,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Vec<f64>, BackendError> {
        self.lanes.use_first(1);
        let around_ns = self.overhead.around_launch_ns;
        let intervals_ns =
            self.burst_with_retries(count, cache, 1, launch)?.without_host()?.intervals_ns;
        Ok(intervals_ns.into_iter().map(|interval| interval - around_ns).collect())
    }

    /// Prepares launches of a ceiling for timing in the same way as a case: short hot launches are
    /// captured together.
    pub fn ceiling_launches<'a>(
        &'a mut self,
        cache: CacheState,
        launch: &'a mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<CeilingLaunches<'a>, BackendError> {
        self.lanes.use_first(1);
        let first = self.burst_with_retries(CEILING_TRIAL_LAUNCHES, cache, 1, launch)?;
        self.ceiling_of_set(cache, &first, launch)
    }

    /// Prepares a ceiling as [`Self::ceiling_launches`] does, unless the median time of trial
    /// launches exceeds `most_ns`. Also returns the median time of the trial launches, nanoseconds.
    pub fn ceiling_within<'a>(
        &'a mut self,
        cache: CacheState,
        most_ns: f64,
        launch: &'a mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Option<(f64, CeilingLaunches<'a>)>, BackendError> {
        self.lanes.use_first(1);
        let first = self.burst_with_retries(CEILING_TRIAL_LAUNCHES, cache, 1, launch)?;
        let first_ns = stats::median(&first.intervals_ns) - self.overhead.around_launch_ns;
        if first_ns > most_ns {
            return Ok(None);
        }
        let ceiling = self.ceiling_of_set(cache, &first, launch)?;
        Ok(Some((first_ns.max(EVENT_RESOLUTION_NS), ceiling)))
    }

    /// Prepares launches over the first `gpus` GPUs of the set, as [`Self::ceiling_launches`] does
    /// for one GPU.
    pub fn ceiling_over<'a>(
        &'a mut self,
        gpus: usize,
        launch: &'a mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<CeilingLaunches<'a>, BackendError> {
        self.lanes.use_first(gpus);
        let first = self.burst_with_retries(CEILING_TRIAL_LAUNCHES, CacheState::Hot, 1, launch)?;
        self.ceiling_of_set(CacheState::Hot, &first, launch)
    }

    fn ceiling_of_set<'a>(
        &'a mut self,
        cache: CacheState,
        first: &LaunchBurst,
        launch: &'a mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<CeilingLaunches<'a>, BackendError> {
        let first_ns = stats::median(&first.intervals_ns) - self.overhead.around_launch_ns;
        let batch = match cache {
            CacheState::Hot if first_ns < SHORT_LAUNCH_NS => {
                Some(self.capture_batch(first_ns, launch)?)
            }
            _ => None,
        };
        let launches = if first_ns > GRAPH_TARGET_NS { 5 } else { 15 };
        Ok(CeilingLaunches {
            timer: self,
            cache,
            batch,
            launch,
            launches,
            last: None,
            keeps_loaded: false,
        })
    }

    /// The median time of a hot launch of one command in the steady power state, nanoseconds.
    pub fn typical_ns(
        &mut self,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<f64, BackendError> {
        self.ceiling_launches(CacheState::Hot, launch)?.settled_ns()
    }

    /// SM clock of the last ceiling that was timed, MHz, if its probes are comparable.
    pub const fn typical_clock_mhz(&self) -> Option<f64> {
        self.typical_clock_mhz
    }

    /// Captures short launches together, or one launch if it is to be cold. Returns `None` if a
    /// launch is long enough to be timed alone.
    fn capture_batch_if_short(
        &mut self,
        cache: CacheState,
        commands: usize,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Option<CapturedBatch>, BackendError> {
        if cache == CacheState::Cold && commands <= 1 {
            return Ok(None);
        }
        let mut typical_ns = |count: usize| -> Result<f64, BackendError> {
            let burst = self.burst_with_retries(count, CacheState::Hot, commands, launch)?;
            Ok(stats::median(&burst.intervals_ns) - self.overhead.around_launch_ns)
        };
        let short = if commands > 1 { GRAPH_TARGET_NS } else { SHORT_LAUNCH_NS };
        // One launch shows reliably that launches are far from short.
        let first_ns = typical_ns(1)?;
        let launch_ns = if first_ns > 50.0 * short { first_ns } else { typical_ns(5)? };
        if launch_ns >= short {
            return Ok(None);
        }
        match cache {
            CacheState::Hot => self.capture_batch(launch_ns, launch).map(Some),
            CacheState::Cold => {
                let graph = GraphSet::capture_repeated_launches(&self.timed_devices(), 1, launch)?;
                Ok(Some(CapturedBatch { graph, launches: 1 }))
            }
        }
    }

    /// Captures a graph of as many launches of this duration as fill [`GRAPH_TARGET_NS`].
    fn capture_batch(
        &self,
        launch_ns: f64,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<CapturedBatch, BackendError> {
        let launches = (GRAPH_TARGET_NS / launch_ns.max(EVENT_RESOLUTION_NS))
            .ceil()
            .min(MAX_GRAPH_LAUNCHES) as u64;
        let graph = GraphSet::capture_repeated_launches(&self.timed_devices(), launches, launch)?;
        Ok(CapturedBatch { graph, launches })
    }

    /// Counts the commands of a launch that cannot be captured: the largest burst of it that can be
    /// queued behind the blocker is taken to fill the queue.
    fn commands_by_trial(
        &mut self,
        executable: &mut dyn Executable,
    ) -> Result<usize, BackendError> {
        // A launch that carries state on may have room for one only.
        let counts: &[usize] = if executable.carries_state() { &[] } else { &[16, 4] };
        for &count in counts {
            // A burst that does not fit the queue takes half a second until it is given up. The
            // count is too high if another process delays the burst.
            if !self.burst_once(count, CacheState::Hot, 1, &mut || executable.launch())?.host_bound
            {
                return Ok(MAX_QUEUED_COMMANDS / count);
            }
        }
        let burst = unless_held_up(|| {
            executable.reset()?;
            self.burst_once(1, CacheState::Hot, 1, &mut || executable.launch())
        })?;
        Ok(if burst.host_bound { usize::MAX } else { MAX_QUEUED_COMMANDS })
    }

    /// Runs [`Self::burst_once`], and repeats it until the host releases the blocking kernel in
    /// time.
    fn burst_with_retries(
        &mut self,
        count: usize,
        cache: CacheState,
        commands: usize,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<LaunchBurst, BackendError> {
        unless_held_up(|| self.burst_once(count, cache, commands, launch))
    }

    /// Enqueues `count` launches (at most 63 hot, 64 cold), each between two events, and waits for
    /// them. `commands` is how many entries of the device's queue a launch takes; with too many
    /// of them the host's launch time cannot be hidden.
    fn burst_once(
        &mut self,
        count: usize,
        cache: CacheState,
        commands: usize,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<LaunchBurst, BackendError> {
        self.discard_ahead()?;
        let plan = BurstPlan { launches: count, cache, commands };
        let queued = self.enqueue_burst(0, plan, launch)?;
        self.finish_burst(queued)
    }

    /// Takes the next burst of a device that is kept loaded: the burst in the queue, if there is
    /// one, else one of `count` launches. Before the host waits for it, a burst of `next` launches
    /// is enqueued behind it, so that the device does not idle until the next call.
    fn burst_before_next(
        &mut self,
        plan: BurstPlan,
        next: usize,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<LaunchBurst, BackendError> {
        let queued = match self.ahead.take_if(|ahead| ahead.cache == plan.cache) {
            Some(queued) => queued,
            None => {
                self.discard_ahead()?;
                self.enqueue_burst(0, plan, launch)?
            }
        };
        let following = BurstPlan { launches: next, ..plan };
        let slot = (queued.slot + 1) % lanes::BURST_SLOTS;
        self.ahead = Some(self.enqueue_burst(slot, following, launch)?);
        self.finish_burst(queued)
    }

    /// Waits for a burst in the queue whose times nobody needs.
    fn discard_ahead(&mut self) -> Result<(), BackendError> {
        let Some(queued) = self.ahead.take() else { return Ok(()) };
        self.lanes.use_slot(queued.slot);
        let ended = self.lanes.wait_for_end().map(drop);
        self.lanes.use_slot(0);
        ended
    }

    /// Enqueues a burst in a slot of the event pool, behind a held stream, and releases the stream.
    fn enqueue_burst(
        &mut self,
        slot: usize,
        plan: BurstPlan,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<QueuedBurst, BackendError> {
        let BurstPlan { launches, cache, commands } = plan;
        let hidden = launch_queue::fits_queue(commands, launches);
        self.lanes.use_slot(slot);
        let begun = self.lanes.begin(hidden.then_some(BLOCKER_TIMEOUT));
        let enqueued = begun
            .and_then(|()| self.lanes.enqueue_launches(launches, cache, launch))
            .and_then(|()| self.lanes.mark_end());
        self.lanes.release();
        enqueued.map(|()| QueuedBurst { slot, launches, cache, hidden })
    }

    /// Waits for a burst in the queue and reads its events.
    fn finish_burst(&mut self, queued: QueuedBurst) -> Result<LaunchBurst, BackendError> {
        let QueuedBurst { slot, launches, cache, hidden } = queued;
        self.lanes.use_slot(slot);
        // The hold times out if the host is delayed for half a second.
        let held_up = self.lanes.wait_for_end()? == Some(false);
        let at = |i: usize| if cache == CacheState::Cold { (2 * i, 2 * i + 1) } else { (i, i + 1) };
        let (intervals_ns, skew_ns) = self.lanes.slowest_intervals((0..launches).map(at))?;
        let clock_mhz = self.lanes.clock_mhz();
        self.lanes.use_slot(0);
        Ok(LaunchBurst {
            intervals_ns,
            skew_ns,
            clock_mhz,
            host_bound: !hidden || held_up,
            held_up,
        })
    }

    /// The GPUs of the set whose streams are being timed.
    fn timed_devices(&self) -> Devices {
        self.devices.first(self.lanes.timed_gpu_count())
    }
}

/// Launches of a ceiling, which are timed one burst after the other.
pub struct CeilingLaunches<'a> {
    timer: &'a mut EventTimer,
    cache: CacheState,
    batch: Option<CapturedBatch>,
    launch: &'a mut dyn FnMut() -> Result<(), BackendError>,
    /// Number of launches, or of graphs of launches, in a burst.
    launches: usize,
    last: Option<LaunchBurst>,
    /// Whether the next burst is enqueued while the current one runs, so that the GPU never idles.
    keeps_loaded: bool,
}

impl CeilingLaunches<'_> {
    /// Median time of a launch in one burst, nanoseconds.
    ///
    /// # Errors
    /// Fails if a launch fails; [`BackendError::NotTimed`] if the host's time is in the launches.
    pub fn burst_ns(&mut self) -> Result<f64, BackendError> {
        let Self { timer, cache, batch, launch, launches: count, last, keeps_loaded } = self;
        let overhead = timer.overhead;
        let (launches, around_ns) = match batch {
            Some(batch) => (batch.launches, overhead.around_graph_ns),
            None => (1, overhead.around_launch_ns),
        };
        let launch: &mut dyn FnMut() -> Result<(), BackendError> = match batch {
            Some(batch) => &mut || batch.graph.launch_all(),
            None => launch,
        };
        let plan = BurstPlan { launches: *count, cache: *cache, commands: 1 };
        let burst = unless_held_up(|| match keeps_loaded {
            true => timer.burst_before_next(plan, plan.launches, launch),
            false => timer.burst_once(plan.launches, plan.cache, plan.commands, launch),
        })?;
        let burst = last.insert(burst.without_host()?);
        timer.typical_clock_mhz = burst.clock_mhz;
        let elapsed_ns = (stats::median(&burst.intervals_ns) - around_ns).max(EVENT_RESOLUTION_NS);
        Ok(elapsed_ns / launches as f64)
    }

    /// Median time of a launch in the steady power state, nanoseconds, behind a load.
    ///
    /// # Errors
    /// Fails if a launch fails; [`BackendError::NotTimed`] if the host's time is in the launches.
    pub fn settled_ns(&mut self) -> Result<f64, BackendError> {
        power::wait_until_steady(self)?;
        self.burst_ns()
    }

    /// Mean time of a launch in the fastest of some windows in the steady power state, nanoseconds:
    /// at the power cap the clock wanders, and a ceiling is at its highest.
    ///
    /// # Errors
    /// Fails if a launch fails; [`BackendError::NotTimed`] if the host's time is in the launches.
    pub fn fastest_window_ns(&mut self) -> Result<f64, BackendError> {
        const BURST_WINDOWS: usize = 4;
        power::wait_until_steady(self)?;
        let mut fastest_ns = f64::INFINITY;
        for _ in 0..BURST_WINDOWS {
            let (begun, mut total_ns, mut bursts) = (Instant::now(), 0.0, 0.0);
            while begun.elapsed() < power::SETTLING_WINDOW {
                total_ns += self.burst_ns()?;
                bursts += 1.0;
            }
            fastest_ns = fastest_ns.min(total_ns / bursts);
        }
        Ok(fastest_ns)
    }

    /// Whether the power cap may have held the clock down in the last burst.
    pub fn may_be_capped(&mut self) -> bool {
        let clock_mhz = self.timer.typical_clock_mhz;
        self.cap_reading(clock_mhz).may_be_capped()
    }
}

impl Drop for CeilingLaunches<'_> {
    /// Waits until queued launches end, before the memory that they use is freed.
    fn drop(&mut self) {
        let _ = self.timer.discard_ahead();
    }
}

impl GpuLoad for CeilingLaunches<'_> {
    fn take_load_sample(&mut self) -> Result<TimedLaunches, BackendError> {
        self.burst_ns()?;
        let intervals_ns = self.last.as_ref().map(|burst| &burst.intervals_ns[..]);
        let intervals_ns = intervals_ns.unwrap_or_default();
        Ok(TimedLaunches {
            launches: intervals_ns.len() as u64,
            elapsed_ns: intervals_ns.iter().sum(),
            clock_mhz: self.timer.typical_clock_mhz,
        })
    }

    fn cap_reading(&mut self, clock_mhz: Option<f64>) -> CapReading {
        self.timer.power.cap_reading(clock_mhz)
    }

    fn keep_loaded(&mut self) -> Result<(), BackendError> {
        self.keeps_loaded = true;
        Ok(())
    }

    fn cool_card(&mut self) {
        self.timer.power.cool_card();
    }
}

/// Short launches, captured together.
struct CapturedBatch {
    graph: GraphSet,
    launches: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn burst(hidden: bool, released: bool) -> LaunchBurst {
        let held_up = hidden && !released;
        LaunchBurst {
            intervals_ns: Vec::new(),
            skew_ns: None,
            clock_mhz: None,
            host_bound: !hidden || held_up,
            held_up,
        }
    }

    #[test]
    fn a_burst_is_repeated_if_the_host_was_held_up() {
        let bursts = |hidden, held_up: u64| {
            let mut done = 0;
            let last = unless_held_up(|| {
                done += 1;
                Ok(burst(hidden, done > held_up))
            });
            (done, last.unwrap().host_bound)
        };
        assert_eq!(bursts(true, 0), (1, false));
        assert_eq!(bursts(true, 2), (3, false));
        assert_eq!(bursts(true, MAX_THROTTLED_ATTEMPTS), (MAX_THROTTLED_ATTEMPTS, true));
        assert_eq!(bursts(false, MAX_THROTTLED_ATTEMPTS), (1, true));
        let failed = unless_held_up(|| Err(BackendError::Lost("gone".to_owned())));
        assert!(matches!(failed, Err(BackendError::Lost(_))));
    }

    #[test]
    fn a_burst_that_includes_host_time_is_an_error() {
        let burst = |host_bound: bool| LaunchBurst {
            intervals_ns: vec![1.0, 2.0],
            ..burst(!host_bound, true)
        };
        assert_eq!(burst(false).without_host().unwrap().intervals_ns, [1.0, 2.0]);
        let error = burst(true).without_host().err().unwrap();
        assert_eq!(
            error.to_string(),
            "has no time: the host was held up for longer than the GPU can wait for it, in each attempt: its time would be in what is measured"
        );
    }
}
