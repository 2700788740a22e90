//! Samples of a case: its launches one by one or captured together, without the overhead of timing.

use std::sync::Arc;

use super::{
    BurstPlan, CapturedBatch, EVENT_RESOLUTION_NS, EventTimer, MAX_BURST_AHEAD_NS,
    MAX_THROTTLED_ATTEMPTS, unless_held_up,
};
use crate::backend::{BackendError, Executable};
use crate::measure::audit::{commands, cupti, duration, launches, reused_results};
use crate::measure::launch_queue::{
    self, MAX_LAUNCHES_PER_BURST, MAX_QUEUED_COMMANDS, OrderedGraphs,
};
use crate::measure::power::PowerMeter;
use crate::measure::{
    CacheState, LaunchSample, ReplayResult, SampleConditions, Stopwatch, launch_one_by_one,
};
use crate::stats;
use kernelgate_cuda::driver::graph_set::GraphSet;
use kernelgate_cuda::driver::memory::persistence;

/// How much longer a replay may take than the next one: of a launch, of all launches, and what
/// starting after an idle moment differs by, nanoseconds.
const MORE_OF_LAUNCH: f64 = 0.25;
const MORE_OF_ALL: f64 = 0.03;
const BATCH_ENQUEUE_NS: f64 = 5_000.0;

/// Plan by which the launches of a case are timed.
pub struct CasePlan {
    cache: CacheState,
    /// GPUs whose streams are timed: the first ones of the set.
    gpus: usize,
    /// Entries of the device's queue that a launch takes.
    commands: usize,
    /// Commands of a launch that could be captured: most of a GPU.
    counted: Option<u64>,
    batch: Option<CapturedBatch>,
    /// Maximum number of launches, or replays of a batch, between one release of the blocker and
    /// the next.
    longest: usize,
    /// Whether a sample included the host's launch time, or cannot avoid it.
    host_bound: bool,
    /// Whether the case's launches may keep lines in L2. If they may, cold launches are timed one
    /// by one, and the lines that a launch kept are released before the next launch.
    keeps_lines: bool,
    /// Whether the next burst is enqueued while one runs.
    keeps_loaded: bool,
    /// Duration of the last burst, nanoseconds.
    burst_ns: f64,
}

/// Times the launches of one case.
pub struct CaseTimer<'a> {
    timer: &'a mut EventTimer,
    plan: CasePlan,
}

impl EventTimer {
    /// Makes a stopwatch for a case, with a plan of its own.
    pub fn stopwatch_of_case(
        &mut self,
        executable: &mut dyn Executable,
        cache: CacheState,
    ) -> Result<CaseTimer<'_>, BackendError> {
        let plan = self.plan_case(executable, cache)?;
        Ok(CaseTimer { timer: self, plan })
    }

    /// Counts the commands of a launch, audits it, times it, and captures short launches in a
    /// graph.
    ///
    /// # Errors
    /// Fails if a launch fails; [`BackendError::NotTimed`] if it enqueues nothing on the timed
    /// stream, or works on other streams.
    pub fn plan_case(
        &mut self,
        executable: &mut dyn Executable,
        cache: CacheState,
    ) -> Result<CasePlan, BackendError> {
        self.discard_ahead()?;
        executable.reset_and_wait()?;
        let gpus = executable.gpus();
        self.lanes.use_first(gpus);
        let devices = self.timed_devices();
        let captured = launch_queue::capture_launch(&devices, executable)?;
        let alone = captured.as_ref().map(GraphSet::commands_per_gpu);
        commands::check_has_commands(alone.as_deref())?;
        commands::check_commands_on_each_gpu(captured.as_ref(), &devices)?;
        let fills_queue = launches::check_launches_allowed(
            &devices,
            &mut self.lanes,
            executable,
            captured.as_ref(),
        )?;
        let commands = match captured.as_ref().map(GraphSet::max_nodes) {
            Some(nodes) => nodes,
            None if fills_queue => usize::MAX,
            None => self.commands_by_trial(executable)?,
        };
        launches::check_timed_stream_alone(&devices, &mut self.lanes, executable, commands)?;
        // Launches that carry state on run one by one, as in the verification.
        let repeats = !executable.carries_state();
        let batch = if alone.is_some() && commands <= MAX_QUEUED_COMMANDS && repeats {
            self.capture_batch_if_short(cache, commands, &mut || executable.launch())?
        } else {
            None
        };
        if let (Some(batch), Some(alone)) = (&batch, &alone) {
            commands::check_captured_commands_match(
                &batch.graph.commands_per_gpu(),
                batch.launches,
                alone,
            )?;
            self.check_batch(batch, executable)?;
        }
        let longest = self.longest_burst(batch.as_ref(), cache, commands)?;
        let host_bound = commands > MAX_QUEUED_COMMANDS;
        let counted = alone.iter().flatten().max().map(|commands| *commands as u64);
        self.clock.begin_case();
        let keeps_lines =
            persistence::persisting_l2_bytes(devices.first_device()).is_ok_and(|kept| kept > 0);
        Ok(CasePlan {
            cache,
            gpus,
            commands,
            counted,
            batch,
            longest,
            host_bound,
            keeps_lines,
            keeps_loaded: false,
            burst_ns: 0.0,
        })
    }

    /// Most launches, or replays of a batch, that the device's queue holds behind the blocker.
    /// Nodes that only order commands, such as events, take entries too: with them the count is
    /// halved until the host can enqueue all replays, once for each kind of graph.
    fn longest_burst(
        &mut self,
        batch: Option<&CapturedBatch>,
        cache: CacheState,
        commands: usize,
    ) -> Result<usize, BackendError> {
        let entries = if batch.is_some() { 1 } else { commands };
        let longest = (MAX_QUEUED_COMMANDS / entries.max(1)).clamp(1, MAX_LAUNCHES_PER_BURST - 1);
        let Some(batch) = batch.filter(|batch| batch.graph.has_ordering_nodes()) else {
            return Ok(longest);
        };
        let graphs = OrderedGraphs {
            gpus: self.lanes.timed_gpu_count(),
            flushed: cache == CacheState::Cold,
            nodes: batch.graph.max_nodes(),
        };
        let mut replay = || batch.graph.launch_all();
        let mut bursts = std::mem::take(&mut self.bursts);
        let found = bursts.find_longest_burst(graphs, longest, |burst| {
            self.burst_once(burst, cache, 1, &mut replay).map(|burst| !burst.held_up)
        });
        self.bursts = bursts;
        found
    }

    /// Checks that launches captured together take as long as one launch captured alone, with hot
    /// caches.
    fn check_batch(
        &mut self,
        batch: &CapturedBatch,
        executable: &mut dyn Executable,
    ) -> Result<(), BackendError> {
        if batch.launches == 1 {
            return Ok(());
        }
        let (alone_ns, together_ns, begins) =
            self.alone_and_together(batch, &mut || executable.launch())?;
        Ok(reused_results::check_batch_reuse(alone_ns, together_ns, begins)?)
    }

    /// Time of a launch that is captured alone and of each of a batch, nanoseconds, and on how many
    /// streams one begins.
    fn alone_and_together(
        &mut self,
        batch: &CapturedBatch,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<(f64, f64, usize), BackendError> {
        let alone = GraphSet::capture_repeated_launches(&self.timed_devices(), 1, launch)?;
        let mut launch_ns = |graph: &GraphSet, launches: u64| -> Result<f64, BackendError> {
            let burst =
                self.burst_with_retries(5, CacheState::Hot, 1, &mut || graph.launch_all())?;
            let elapsed_ns = stats::median(&burst.intervals_ns) - self.overhead.around_graph_ns;
            Ok(elapsed_ns / launches as f64)
        };
        let alone_ns = launch_ns(&alone, 1)?;
        let together_ns = launch_ns(&batch.graph, batch.launches)?;
        // Each GPU after the first adds a root node to the graph.
        Ok((alone_ns, together_ns, alone.max_roots()? + self.lanes.timed_gpu_count() - 1))
    }

    /// Takes a sample of at least this many launches; launches that are captured together make it
    /// longer. The sample is repeated a few times while the device is throttled, or its clock is
    /// not steady.
    ///
    /// # Errors
    /// Fails if a launch fails, or takes less than a kernel can.
    pub fn steady_sample(
        &mut self,
        plan: &mut CasePlan,
        executable: &mut dyn Executable,
        launches: u64,
    ) -> Result<LaunchSample, BackendError> {
        for discarded in 0.. {
            let sample = self.sample_case(plan, executable, launches)?;
            let throttled = self.clock.is_throttled(sample.clock_mhz, &self.power);
            if discarded + 1 == MAX_THROTTLED_ATTEMPTS || !throttled {
                return Ok(LaunchSample { discarded, throttled, ..sample });
            }
        }
        unreachable!("the last attempt is returned")
    }

    fn sample_case(
        &mut self,
        plan: &mut CasePlan,
        executable: &mut dyn Executable,
        launches: u64,
    ) -> Result<LaunchSample, BackendError> {
        self.lanes.use_first(plan.gpus);
        let batch = plan.batch.as_ref().map_or(1, |batch| batch.launches);
        let commands = if plan.batch.is_some() { 1 } else { plan.commands };
        let overhead = self.overhead;
        let around_ns =
            if plan.batch.is_some() { overhead.around_graph_ns } else { overhead.around_launch_ns };
        let carries_state = executable.carries_state();
        let releases_lines = plan.keeps_lines && plan.cache == CacheState::Cold;
        let longest = match carries_state || releases_lines {
            true => 1,
            false => plan.longest as u64,
        };
        let bursts = launches.div_ceil(batch);
        let mut left = bursts;
        let mut sample = LaunchSample {
            launches: 0,
            elapsed_ns: 0.0,
            skew_ns: None,
            clock_mhz: None,
            discarded: 0,
            throttled: false,
        };
        let (mut clocked_ns, mut cycles) = (0.0, 0.0);
        while left > 0 {
            let ahead = plan.keeps_loaded
                && !(carries_state || releases_lines || plan.host_bound)
                && plan.burst_ns < MAX_BURST_AHEAD_NS;
            let count = left.min(longest) as usize;
            let next = match left.saturating_sub(longest) {
                0 => bursts,
                rest => rest,
            };
            let following = next.min(longest) as usize;
            let burst_plan = BurstPlan { launches: count, cache: plan.cache, commands };
            let burst = unless_held_up(|| {
                executable.reset()?;
                if releases_lines {
                    executable.synchronize()?;
                    persistence::reset_persisting_lines(self.devices.first_device())?;
                }
                let launch: &mut dyn FnMut() -> Result<(), BackendError> = match &plan.batch {
                    Some(batch) => &mut || batch.graph.launch_all(),
                    None => &mut || executable.launch(),
                };
                if ahead {
                    self.burst_before_next(burst_plan, following, launch)
                } else {
                    self.burst_once(count, plan.cache, commands, launch)
                }
            })?;
            let burst_launches = burst.intervals_ns.len() as u64;
            left = left.saturating_sub(burst_launches);
            sample.launches += burst_launches * batch;
            plan.host_bound |= burst.host_bound;
            let net_ns: Vec<f64> =
                burst.intervals_ns.iter().map(|interval| interval - around_ns).collect();
            duration::check_launch_times(&net_ns, batch, overhead.graph_node_ns)?;
            let elapsed_ns: f64 = net_ns.iter().map(|net| net.max(EVENT_RESOLUTION_NS)).sum();
            plan.burst_ns = elapsed_ns;
            sample.elapsed_ns += elapsed_ns;
            if let Some(skew_ns) = burst.skew_ns {
                *sample.skew_ns.get_or_insert(0.0) += skew_ns;
            }
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

impl Drop for CaseTimer<'_> {
    /// The launches in the queue end before what they use is freed.
    fn drop(&mut self) {
        let _ = self.timer.discard_ahead();
    }
}

impl Stopwatch for CaseTimer<'_> {
    fn time_launches(
        &mut self,
        executable: &mut dyn Executable,
        launches: u64,
    ) -> Result<LaunchSample, BackendError> {
        self.timer.steady_sample(&mut self.plan, executable, launches)
    }

    fn replay_timed(
        &mut self,
        executable: &mut dyn Executable,
    ) -> Result<Option<ReplayResult>, BackendError> {
        if self.plan.keeps_lines {
            persistence::reset_persisting_lines(self.timer.devices.first_device())?;
        }
        let overhead = self.timer.overhead;
        let timer = &mut *self.timer;
        timer.lanes.use_first(self.plan.gpus);
        let (burst, around_ns, launches) = match &self.plan.batch {
            Some(batch) => {
                let burst =
                    timer.burst_once(1, CacheState::Cold, 1, &mut || batch.graph.launch_all())?;
                (burst, overhead.around_graph_ns, batch.launches)
            }
            None => {
                let mut launch = || executable.launch();
                let burst =
                    timer.burst_once(1, CacheState::Cold, self.plan.commands, &mut launch)?;
                (burst, overhead.around_launch_ns, 1)
            }
        };
        let elapsed_ns = burst.intervals_ns[0] - around_ns;
        let allowed_ns = MORE_OF_LAUNCH * elapsed_ns / launches as f64
            + MORE_OF_ALL * elapsed_ns
            + BATCH_ENQUEUE_NS;
        let replay = ReplayResult { elapsed_ns, clock_mhz: burst.clock_mhz, launches, allowed_ns };
        Ok((!burst.host_bound).then_some(replay))
    }

    fn replay_short(
        &mut self,
        executable: &mut dyn Executable,
    ) -> Result<Option<f64>, BackendError> {
        if executable.carries_state() || self.plan.host_bound || self.plan.keeps_lines {
            return Ok(None);
        }
        let timer = &mut *self.timer;
        timer.lanes.use_first(self.plan.gpus);
        let mut launch = || executable.launch();
        let burst = timer.burst_once(1, CacheState::Cold, self.plan.commands, &mut launch)?;
        let launch_ns = burst.intervals_ns[0] - timer.overhead.around_launch_ns;
        Ok((!burst.host_bound && launch_ns < BATCH_ENQUEUE_NS / MORE_OF_LAUNCH)
            .then_some(launch_ns))
    }

    fn check_elsewhere(
        &mut self,
        executable: &mut dyn Executable,
    ) -> Result<Option<String>, BackendError> {
        self.timer.lanes.use_first(self.plan.gpus);
        let devices = self.timer.timed_devices();
        cupti::check_recorded_streams(&devices, &mut self.timer.lanes, executable)
    }

    fn power(&self) -> Option<&Arc<PowerMeter>> {
        Some(&self.timer.power)
    }

    fn enqueue_launches(
        &mut self,
        executable: &mut dyn Executable,
        launches: u64,
    ) -> Result<u64, BackendError> {
        let Some(batch) = &self.plan.batch else {
            return launch_one_by_one(executable, launches);
        };
        let replays = launches.div_ceil(batch.launches);
        (0..replays).try_for_each(|_| batch.graph.launch_all())?;
        Ok(replays * batch.launches)
    }

    fn keep_loaded(&mut self, loaded: bool) -> Result<(), BackendError> {
        self.plan.keeps_loaded = loaded;
        if loaded { Ok(()) } else { self.timer.discard_ahead() }
    }

    fn settle_clock(&mut self, clock_mhz: Option<f64>) {
        self.timer.clock.set_settled_clock(clock_mhz);
    }

    fn conditions(&self) -> SampleConditions {
        let batch = self.plan.batch.as_ref().map(|batch| batch.launches);
        SampleConditions { batch, host_bound: self.plan.host_bound, ..SampleConditions::default() }
    }

    fn command_count(&self) -> Option<u64> {
        self.plan.counted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate_cuda::instruments::spin_kernel::SpinKernel;
    use kernelgate_cuda::testing::{lock_first_gpu, two_gpus_for_test};
    use std::time::{Duration, Instant};

    /// Bursts of 20 launches of 100 µs, and then of 10.
    #[test]
    fn the_next_burst_waits_in_the_queue_while_the_current_one_is_read() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let mut timer = EventTimer::new(&device).unwrap();
        let spin = SpinKernel::new(&device).unwrap();
        let mut launch = || spin.launch(100_000);
        let plan = BurstPlan { launches: 20, cache: CacheState::Hot, commands: 1 };
        let (begun, mut busy_ns) = (Instant::now(), 0.0);
        for taken in 0..50 {
            let next = if taken < 49 { 20 } else { 10 };
            let burst = timer.burst_before_next(plan, next, &mut launch).unwrap();
            assert_eq!(burst.intervals_ns.len(), 20);
            assert!(burst.intervals_ns.iter().all(|interval| *interval >= 100_000.0));
            assert!(!burst.host_bound);
            busy_ns += burst.intervals_ns.iter().sum::<f64>();
        }
        let wall = begun.elapsed();
        eprintln!("busy for {busy_ns} ns of {wall:?}");
        assert!(wall >= Duration::from_nanos(busy_ns as u64) * 98 / 100);
        let last = timer.burst_before_next(plan, 20, &mut launch).unwrap();
        assert_eq!(last.intervals_ns.len(), 10, "the burst that was in the queue");
        let waiting = timer.ahead.unwrap();
        assert_eq!((waiting.slot, waiting.launches), (1, 20));
        // Any other timing waits for the burst in the queue, and begins anew.
        let cold = timer.launches_ns(3, CacheState::Cold, &mut launch).unwrap();
        assert_eq!((cold.len(), timer.ahead), (3, None));
    }

    #[test]
    fn a_launch_over_two_gpus_takes_equally_long_alone_and_in_a_batch() {
        let Some((devices, _alone)) = two_gpus_for_test() else { return };
        let mut timer = EventTimer::new(&devices).unwrap();
        let mut spins = Vec::new();
        devices
            .for_each_device(|_, device| {
                spins.push(SpinKernel::new(device)?);
                Ok(())
            })
            .unwrap();
        for (gpus, spent_ns) in [1, 2].into_iter().flat_map(|n| [(n, 1_000), (n, 5_000)]) {
            timer.lanes.use_first(gpus);
            let used = timer.timed_devices();
            let mut launch = || used.for_each_device(|rank, _| spins[rank].launch(spent_ns));
            let batch =
                timer.capture_batch_if_short(CacheState::Hot, 1, &mut launch).unwrap().unwrap();
            for _ in 0..5 {
                let (alone_ns, together_ns, begins) =
                    timer.alone_and_together(&batch, &mut launch).unwrap();
                eprintln!("{gpus} GPUs, {spent_ns} ns: alone {alone_ns}, together {together_ns}");
                assert_eq!(begins, gpus);
                reused_results::check_batch_reuse(alone_ns, together_ns, begins).unwrap();
            }
        }
    }
}
