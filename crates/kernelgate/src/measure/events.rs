//! CUDA events: the clock of the GPU backend.
//!
//! Launches of a burst are queued behind a blocking kernel, so that the host's launch time is not
//! in the samples; a probe before and after tells the SM clock; in the cold state the L2 cache is
//! filled with other data before each launch. Everything is allocated here, nothing while timing.

mod calibration;

use std::sync::Arc;
use std::time::Duration;

use super::clock::ClockWatch;
use super::limits::Overhead;
use super::queue::{self, MAX_BURST, MAX_QUEUED};
use super::{Cache, Sample, Stopwatch, Technique, attached, off_stream, recorded};
use crate::backend::{BackendError, Executable};
use crate::stats;
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::event::EventPool;
use kernelgate_cuda::driver::graph::Graph;
use kernelgate_cuda::instruments::timing::Instruments;

/// After this the blocker lets go by itself, and the burst is thrown away.
const BLOCKER_TIMEOUT: Duration = Duration::from_millis(500);
/// Hot launches shorter than this are captured several to a graph: an event pair would be most of
/// what it measures.
const SHORT_NS: f64 = 20_000.0;
/// How long a graph of short launches should last. Launches of several commands that take less are
/// captured, too, hot and cold: the gap between two commands in a stream is another one in the next
/// process, in a graph it is shorter and always the same.
const GRAPH_NS: f64 = 100_000.0;
/// Most short launches in a graph.
const MAX_GRAPH: f64 = 64.0;
/// Attempts a sample before a throttled one is kept.
const ATTEMPTS: u64 = 4;
/// The cold state reads so many times the size of L2.
const FLUSH: u64 = 2;
/// Resolution of events: no launch takes less.
const RESOLUTION_NS: f64 = 32.0;

/// A launch that takes less than this share of an empty kernel is not on the stream.
const MIN_OF_EMPTY: f64 = 0.25;

/// Times launches on one device.
pub struct EventTimer {
    device: Arc<Device>,
    events: EventPool,
    instruments: Instruments,
    overhead: Overhead,
    typical_clock_mhz: Option<f64>,
    clock: ClockWatch,
}

/// What a burst of launches took.
struct Burst {
    /// Nanoseconds between the events around each launch, overhead included.
    intervals_ns: Vec<f64>,
    /// SM clock over the burst, MHz; none where the probes do not compare.
    clock_mhz: Option<f64>,
    /// Whether the host's launch time may be in the intervals.
    host_bound: bool,
}

impl Burst {
    /// The same, where the host's time is in none of the intervals.
    fn without_host(self) -> Result<Self, BackendError> {
        if self.host_bound {
            return Err(BackendError::NotTimed(
                "the host was held up for longer than the GPU can wait for it, in each attempt: \
                 its time would be in what is measured"
                    .to_owned(),
            ));
        }
        Ok(self)
    }
}

impl EventTimer {
    /// Compiles what it needs, allocates, and measures what timing costs.
    ///
    /// # Errors
    /// When the device fails or memory is short; [`BackendError::NotTimed`] where the host is held up
    /// all the time.
    pub fn new(device: &Arc<Device>) -> Result<Self, BackendError> {
        let nothing = Overhead {
            event_pair_ns: 0.0,
            launch_ns: 0.0,
            graph_node_ns: 0.0,
            host_launch_ns: 0.0,
            around_launch_ns: 0.0,
            around_graph_ns: 0.0,
        };
        let mut timer = Self {
            device: Arc::clone(device),
            events: EventPool::new(device, 2 * MAX_BURST)?,
            instruments: Instruments::new(device, FLUSH * device.facts().l2_bytes)?,
            overhead: nothing,
            typical_clock_mhz: None,
            clock: ClockWatch::of(device.facts()),
        };
        timer.overhead = timer.calibrate()?;
        Ok(timer)
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// What launching and timing cost here, as measured when this was made.
    pub fn overhead(&self) -> Overhead {
        self.overhead
    }

    /// What each of some launches of one command takes (at most 63), nanoseconds, overhead
    /// subtracted.
    ///
    /// # Errors
    /// When a launch fails; [`BackendError::NotTimed`] where the host's time is in them.
    pub fn launches_ns(
        &mut self,
        count: usize,
        cache: Cache,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Vec<f64>, BackendError> {
        let around_ns = self.overhead.around_launch_ns;
        let intervals_ns = self.burst(count, cache, 1, launch)?.without_host()?.intervals_ns;
        Ok(intervals_ns.into_iter().map(|interval| interval - around_ns).collect())
    }

    /// What a hot launch of few commands takes, nanoseconds: the median, short ones captured
    /// together as in a case.
    ///
    /// # Errors
    /// As [`Self::launches_ns`].
    pub fn typical_ns(
        &mut self,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<f64, BackendError> {
        const REPEATS: usize = 15;
        self.burst(3, Cache::Hot, 1, launch)?;
        let batch = self.batch(Cache::Hot, 1, launch)?;
        let mut attempt = |timer: &mut Self| match &batch {
            Some(batch) => timer.burst(REPEATS, Cache::Hot, 1, &mut || batch.graph.launch()),
            None => timer.burst(REPEATS, Cache::Hot, 1, launch),
        };
        self.clock.begin();
        let mut burst = attempt(self)?;
        for _ in 1..ATTEMPTS {
            if !self.clock.throttled(burst.clock_mhz) {
                break;
            }
            burst = attempt(self)?;
        }
        let burst = burst.without_host()?;
        self.typical_clock_mhz = burst.clock_mhz;
        let (around_ns, launches) = match &batch {
            Some(batch) => (self.overhead.around_graph_ns, batch.launches),
            None => (self.overhead.around_launch_ns, 1),
        };
        let elapsed_ns = (stats::median(&burst.intervals_ns) - around_ns).max(RESOLUTION_NS);
        Ok(elapsed_ns / launches as f64)
    }

    /// SM clock of the last time that [`Self::typical_ns`] gave, MHz, where the probes compare.
    pub const fn typical_clock_mhz(&self) -> Option<f64> {
        self.typical_clock_mhz
    }

    /// Captures short launches together, or if they are to be cold, one; none where one is long
    /// enough.
    fn batch(
        &mut self,
        cache: Cache,
        commands: usize,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Option<Batch>, BackendError> {
        let mut typical_ns = |count: usize| -> Result<f64, BackendError> {
            let burst = self.burst(count, Cache::Hot, commands, launch)?;
            Ok(stats::median(&burst.intervals_ns) - self.overhead.around_launch_ns)
        };
        let short = if commands > 1 { GRAPH_NS } else { SHORT_NS };
        // One launch says enough of what is far from short.
        let first_ns = typical_ns(1)?;
        let launch_ns = if first_ns > 50.0 * short { first_ns } else { typical_ns(5)? };
        if launch_ns >= short || (cache == Cache::Cold && commands <= 1) {
            return Ok(None);
        }
        let launches = match cache {
            Cache::Hot => (GRAPH_NS / launch_ns.max(RESOLUTION_NS)).ceil().min(MAX_GRAPH) as u64,
            Cache::Cold => 1,
        };
        let device = Arc::clone(&self.device);
        let graph = Graph::capture_repeated(&device, launches, launch)?;
        Ok(Some(Batch { graph, launches }))
    }

    /// A stopwatch for a case: looks at how many commands a launch is and how long it takes, and
    /// captures short ones in a graph.
    ///
    /// # Errors
    /// When a launch fails; [`BackendError::NotTimed`] where it enqueues nothing on the stream that
    /// is timed, or works on others.
    pub fn case(
        &mut self,
        executable: &mut dyn Executable,
        cache: Cache,
    ) -> Result<CaseTimer<'_>, BackendError> {
        executable.synchronize()?;
        let device = Arc::clone(&self.device);
        let captured = queue::captured(&device, executable)?;
        let counted = captured.as_ref().map(Graph::nodes);
        if counted == Some(0) {
            return Err(off_stream::nothing());
        }
        let mut fills_queue = false;
        if executable.is_attached() {
            attached::check_memory(&device, executable)?;
            match &captured {
                Some(graph) => attached::check_graph(graph)?,
                None => {
                    let instruments = &mut self.instruments;
                    fills_queue = attached::check_waits(&device, instruments, executable)?;
                }
            }
        }
        let commands = match counted {
            Some(commands) => commands,
            None if fills_queue => usize::MAX,
            None => self.commands_by_trial(executable)?,
        };
        if commands <= MAX_QUEUED {
            off_stream::check_writes(&mut self.instruments, executable)?;
        }
        off_stream::check_duration(&device, executable)?;
        // What carries state on is launched one by one, as it is verified.
        let repeats = !executable.carries_state();
        let batch = if counted.is_some() && commands <= MAX_QUEUED && repeats {
            self.batch(cache, commands, &mut || executable.launch())?
        } else {
            None
        };
        let host_bound = commands > MAX_QUEUED;
        let counted = counted.map(|nodes| nodes as u64);
        self.clock.begin();
        Ok(CaseTimer { timer: self, cache, commands, counted, batch, host_bound })
    }

    /// As how many commands a launch is to be counted that cannot be captured: the largest burst of
    /// it that can be queued behind the blocker takes all of the queue.
    fn commands_by_trial(
        &mut self,
        executable: &mut dyn Executable,
    ) -> Result<usize, BackendError> {
        // What carries state on may have room for no more.
        let counts: &[usize] = if executable.carries_state() { &[1] } else { &[16, 4, 1] };
        for &count in counts {
            if !self.burst(count, Cache::Hot, 1, &mut || executable.launch())?.host_bound {
                return Ok(MAX_QUEUED / count);
            }
        }
        Ok(usize::MAX)
    }

    /// Enqueues `count` launches (at most 63 hot, 64 cold), each between two events, and waits for
    /// them. `commands` is how many entries of the device's queue a launch takes; with too many
    /// of them the host's launch time cannot be hidden.
    ///
    /// # Errors
    /// When a launch fails or hangs.
    fn burst(
        &mut self,
        count: usize,
        cache: Cache,
        commands: usize,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Burst, BackendError> {
        let hidden = queue::fits(commands, count);
        let mut held = false;
        for _ in 0..ATTEMPTS {
            if hidden {
                self.instruments.block(BLOCKER_TIMEOUT)?;
            }
            let enqueued = self.enqueue(count, cache, launch);
            self.instruments.release();
            enqueued?;
            self.device.synchronize()?;
            // A host that was held up for half a second: the launches did not wait for it.
            held = hidden && self.instruments.released();
            if !hidden || held {
                break;
            }
        }
        let at = |i: usize| if cache == Cache::Cold { (2 * i, 2 * i + 1) } else { (i, i + 1) };
        let intervals_ns = (0..count)
            .map(at)
            .map(|(from, to)| self.events.elapsed_ns(from, to))
            .collect::<Result<_, _>>()?;
        Ok(Burst { intervals_ns, clock_mhz: self.instruments.clock_mhz()?, host_bound: !held })
    }

    fn enqueue(
        &self,
        count: usize,
        cache: Cache,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        self.instruments.probe(0)?;
        if cache == Cache::Hot {
            self.events.record(0)?;
        }
        for i in 0..count {
            if cache == Cache::Cold {
                self.instruments.flush()?;
                self.events.record(2 * i)?;
            }
            launch()?;
            self.events.record(if cache == Cache::Cold { 2 * i + 1 } else { i + 1 })?;
        }
        self.instruments.probe(1)
    }
}

/// Times the launches of one case.
pub struct CaseTimer<'a> {
    timer: &'a mut EventTimer,
    cache: Cache,
    commands: usize,
    /// Nodes of a launch that could be captured.
    counted: Option<u64>,
    batch: Option<Batch>,
    /// Whether the host's launch time was in a sample, or must be.
    host_bound: bool,
}

/// Short launches, captured together.
struct Batch {
    graph: Graph,
    launches: u64,
}

impl CaseTimer<'_> {
    fn attempt(
        &mut self,
        executable: &mut dyn Executable,
        launches: u64,
    ) -> Result<Sample, BackendError> {
        let batch = self.batch.as_ref().map_or(1, |batch| batch.launches);
        let commands = if self.batch.is_some() { 1 } else { self.commands };
        let overhead = self.timer.overhead;
        let around_ns =
            if self.batch.is_some() { overhead.around_graph_ns } else { overhead.around_launch_ns };
        let carries_state = executable.carries_state();
        let longest = match carries_state {
            // Each after a reset of its own.
            true => 1,
            false => (MAX_QUEUED / commands.max(1)).clamp(1, MAX_BURST - 1) as u64,
        };
        let mut left = launches.div_ceil(batch);
        let mut sample = Sample {
            launches: left * batch,
            elapsed_ns: 0.0,
            clock_mhz: None,
            discarded: 0,
            throttled: false,
        };
        let (mut clocked_ns, mut cycles) = (0.0, 0.0);
        while left > 0 {
            let count = left.min(longest);
            left -= count;
            if carries_state {
                executable.reset()?;
            }
            let burst = match &self.batch {
                Some(batch) => {
                    self.timer
                        .burst(count as usize, self.cache, commands, &mut || batch.graph.launch())?
                }
                None => self
                    .timer
                    .burst(count as usize, self.cache, commands, &mut || executable.launch())?,
            };
            self.host_bound |= burst.host_bound;
            let net_ns: Vec<f64> =
                burst.intervals_ns.iter().map(|interval| interval - around_ns).collect();
            let launch_ns = stats::median(&net_ns) / batch as f64;
            if launch_ns < MIN_OF_EMPTY * overhead.graph_node_ns {
                return Err(off_stream::impossible(launch_ns, overhead.graph_node_ns));
            }
            let elapsed_ns: f64 = net_ns.iter().map(|net| net.max(RESOLUTION_NS)).sum();
            sample.elapsed_ns += elapsed_ns;
            if let Some(clock_mhz) = burst.clock_mhz {
                clocked_ns += elapsed_ns;
                cycles += clock_mhz * elapsed_ns;
            }
        }
        if clocked_ns > 0.0 {
            sample.clock_mhz = Some(cycles / clocked_ns);
        }
        Ok(sample)
    }
}

impl Stopwatch for CaseTimer<'_> {
    fn time(
        &mut self,
        executable: &mut dyn Executable,
        launches: u64,
    ) -> Result<Sample, BackendError> {
        for discarded in 0.. {
            let sample = self.attempt(executable, launches)?;
            let throttled = self.timer.clock.throttled(sample.clock_mhz);
            if discarded + 1 == ATTEMPTS || !throttled {
                return Ok(Sample { discarded, throttled, ..sample });
            }
        }
        unreachable!("the last attempt is returned")
    }

    fn replay(&mut self, executable: &mut dyn Executable) -> Result<(), BackendError> {
        match &self.batch {
            Some(batch) => batch.graph.launch(),
            None => executable.launch(),
        }
    }

    fn check_elsewhere(
        &mut self,
        executable: &mut dyn Executable,
    ) -> Result<Option<String>, BackendError> {
        let EventTimer { device, instruments, .. } = &mut *self.timer;
        recorded::check(device, instruments, executable)
    }

    fn technique(&self) -> Technique {
        let batch = self.batch.as_ref().map(|batch| batch.launches);
        Technique { batch, host_bound: self.host_bound, commands: self.counted }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_with_the_hosts_time_is_no_figure() {
        let burst =
            |host_bound| Burst { intervals_ns: vec![1.0, 2.0], clock_mhz: None, host_bound };
        assert_eq!(burst(false).without_host().unwrap().intervals_ns, [1.0, 2.0]);
        let error = burst(true).without_host().err().unwrap();
        assert!(error.to_string().contains("the host was held up"), "{error}");
    }
}
