//! Takes the samples of a case by CUDA events: the launches run one by one or captured together in
//! a graph, and the overhead of timing is subtracted.

use std::sync::Arc;

use super::{
    BurstToEnqueue, CUDA_EVENT_RESOLUTION_NS, CapturedLaunchBatch, CudaEventTimer,
    MAX_QUEUED_AHEAD_BURST_NS, MAX_SAMPLE_ATTEMPTS, repeat_burst_until_released_in_time,
};
use crate::backend::{BackendError, LaunchableProblem};
use crate::measure::audit::{commands, cupti, duration, launches, reused_results};
use crate::measure::launch_queue::{
    self, GraphWithOrderingNodes, MAX_COMMANDS_BEHIND_BLOCKER, MAX_LAUNCHES_BEHIND_BLOCKER,
};
use crate::measure::power::NvmlPowerMeter;
use crate::measure::{
    CacheState, CaseSampleConditions, LaunchStopwatch, TimedLaunchSample, TimedReplay,
    enqueue_launches_one_by_one,
};
use crate::stats;
use kernelgate_cuda::driver::graph_set::ExecutableGraphPerGpu;
use kernelgate_cuda::driver::memory::persistence;

/// A replay counts as slower than the next one if it exceeds it by more than this share of a
/// launch, plus this share of the replay, plus these nanoseconds for starting.
const SLOWER_REPLAY_SHARE_OF_LAUNCH: f64 = 0.25;
const SLOWER_REPLAY_SHARE_OF_REPLAY: f64 = 0.03;
const REPLAY_START_TOLERANCE_NS: f64 = 5_000.0;

/// How the launches of one case are timed by events, decided before its first sample.
pub struct CaseTimingPlan {
    cache: CacheState,
    /// Number of GPUs on which the case runs, which are the first GPUs of the timer.
    gpu_count: usize,
    /// Number of launch-queue entries that one launch of the case takes.
    queue_entries_per_launch: usize,
    /// Number of commands of one launch on the GPU with most commands; `None` if the launch could
    /// not be captured.
    commands_of_one_launch: Option<u64>,
    batch: Option<CapturedLaunchBatch>,
    /// Largest number of launches, or of replays of a graph of launches, that are queued behind one
    /// blocking kernel.
    max_launches_behind_blocker: usize,
    /// Whether a sample of the case has included the host's launch time, or every sample must
    /// include it.
    includes_host_launch_time: bool,
    /// Whether the case's launches may leave persisting lines in the L2 cache. If launches may
    /// leave persisting L2 lines, cold launches are timed one by one, and these lines are released
    /// before the next launch.
    may_leave_persisting_l2_lines: bool,
    /// Whether the next burst of launches is enqueued while the present one runs.
    keeps_gpu_loaded: bool,
    /// Duration of the case's last burst of launches, nanoseconds.
    last_burst_ns: f64,
}

/// Times the launches of one case by CUDA events, with the case's plan.
pub struct EventStopwatchOfCase<'a> {
    timer: &'a mut CudaEventTimer,
    plan: CaseTimingPlan,
}

impl CudaEventTimer {
    /// Creates the stopwatch of a case, after making the plan by which its launches are timed.
    pub fn plan_and_create_case_stopwatch(
        &mut self,
        executable: &mut dyn LaunchableProblem,
        cache: CacheState,
    ) -> Result<EventStopwatchOfCase<'_>, BackendError> {
        let plan = self.audit_and_plan_case_timing(executable, cache)?;
        Ok(EventStopwatchOfCase { timer: self, plan })
    }

    /// Audits a launch of the case, counts its commands, times it, and captures several launches in
    /// a graph if they are short.
    ///
    /// # Errors
    /// Fails if a launch fails; [`BackendError::NotTimed`] if it enqueues nothing on the timed
    /// stream, or works on other streams.
    pub fn audit_and_plan_case_timing(
        &mut self,
        executable: &mut dyn LaunchableProblem,
        cache: CacheState,
    ) -> Result<CaseTimingPlan, BackendError> {
        self.discard_burst_enqueued_ahead()?;
        executable.reset_state_and_wait()?;
        let gpus = executable.gpus_used_by_launch();
        self.timing_instruments.use_first_gpus(gpus);
        let devices = self.gpus_in_use();
        let captured = launch_queue::capture_launch_as_graph(&devices, executable)?;
        let alone = captured.as_ref().map(ExecutableGraphPerGpu::command_count_of_each_gpu);
        commands::check_launch_has_commands(alone.as_deref())?;
        commands::check_launch_has_commands_on_each_gpu(captured.as_ref(), &devices)?;
        let fills_queue = launches::refuse_unpermitted_allocations_and_waits(
            &devices,
            &mut self.timing_instruments,
            executable,
            captured.as_ref(),
        )?;
        let commands = match captured.as_ref().map(ExecutableGraphPerGpu::max_nodes_per_gpu) {
            Some(nodes) => nodes,
            None if fills_queue => usize::MAX,
            None => self.commands_per_launch_by_trial(executable)?,
        };
        launches::refuse_launch_with_work_on_other_streams(
            &devices,
            &mut self.timing_instruments,
            executable,
            commands,
        )?;
        // Launches that carry state from one to the next run one by one, as in the verification.
        let repeats = !executable.launches_carry_state();
        let batch = if alone.is_some() && commands <= MAX_COMMANDS_BEHIND_BLOCKER && repeats {
            self.capture_launches_in_graph_if_short(cache, commands, &mut || {
                executable.launch_once()
            })?
        } else {
            None
        };
        if let (Some(batch), Some(alone)) = (&batch, &alone) {
            commands::check_batch_has_commands_of_single_launches(
                &batch.graph.command_count_of_each_gpu(),
                batch.launches_in_graph,
                alone,
            )?;
            self.refuse_reuse_within_batch(batch, executable)?;
        }
        let longest = self.max_launches_behind_blocker(batch.as_ref(), cache, commands)?;
        let host_bound = commands > MAX_COMMANDS_BEHIND_BLOCKER;
        let counted = alone.iter().flatten().max().map(|commands| *commands as u64);
        self.throttle_detector.forget_settled_clock_for_new_case();
        let keeps_lines = persistence::read_persisting_l2_bytes(devices.first_device())
            .is_ok_and(|kept| kept > 0);
        Ok(CaseTimingPlan {
            cache,
            gpu_count: gpus,
            queue_entries_per_launch: commands,
            commands_of_one_launch: counted,
            batch,
            max_launches_behind_blocker: longest,
            includes_host_launch_time: host_bound,
            may_leave_persisting_l2_lines: keeps_lines,
            keeps_gpu_loaded: false,
            last_burst_ns: 0.0,
        })
    }

    /// Returns the largest number of launches, or of replays of a graph of launches, that the
    /// launch queue holds behind the blocking kernel. Graph nodes that only order commands take
    /// queue entries too; if a graph has them, the number is halved until trials show that the host
    /// can enqueue all replays.
    fn max_launches_behind_blocker(
        &mut self,
        batch: Option<&CapturedLaunchBatch>,
        cache: CacheState,
        commands: usize,
    ) -> Result<usize, BackendError> {
        let entries = if batch.is_some() { 1 } else { commands };
        let longest = (MAX_COMMANDS_BEHIND_BLOCKER / entries.max(1))
            .clamp(1, MAX_LAUNCHES_BEHIND_BLOCKER - 1);
        let Some(batch) = batch.filter(|batch| batch.graph.has_noncommand_nodes()) else {
            return Ok(longest);
        };
        let graphs = GraphWithOrderingNodes {
            gpu_count: self.timing_instruments.number_of_gpus_in_use(),
            flushes_l2_before_replay: cache == CacheState::ColdCaches,
            node_count: batch.graph.max_nodes_per_gpu(),
        };
        let mut replay = || batch.graph.launch_graphs_on_all_gpus();
        let mut bursts = std::mem::take(&mut self.max_replays_in_queue);
        let found = bursts.find_max_replays_in_queue(graphs, longest, |burst| {
            self.run_burst_once(burst, cache, 1, &mut replay).map(|burst| !burst.blocker_timed_out)
        });
        self.max_replays_in_queue = bursts;
        found
    }

    /// Fails if a launch captured alone takes longer than each launch of a batch captured together,
    /// with hot caches.
    fn refuse_reuse_within_batch(
        &mut self,
        batch: &CapturedLaunchBatch,
        executable: &mut dyn LaunchableProblem,
    ) -> Result<(), BackendError> {
        if batch.launches_in_graph == 1 {
            return Ok(());
        }
        let (alone_ns, together_ns, begins) =
            self.time_launch_alone_and_in_batch(batch, &mut || executable.launch_once())?;
        Ok(reused_results::refuse_reuse_within_captured_batch(alone_ns, together_ns, begins)?)
    }

    /// Returns the time of a launch captured alone, the time of each launch of the batch (both
    /// nanoseconds), and the number of root nodes of the single launch.
    fn time_launch_alone_and_in_batch(
        &mut self,
        batch: &CapturedLaunchBatch,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<(f64, f64, usize), BackendError> {
        let alone =
            ExecutableGraphPerGpu::capture_repeated_on_all_gpus(&self.gpus_in_use(), 1, launch)?;
        let mut launch_ns = |graph: &ExecutableGraphPerGpu,
                             launches: u64|
         -> Result<f64, BackendError> {
            let burst =
                self.run_burst_until_released_in_time(5, CacheState::HotCaches, 1, &mut || {
                    graph.launch_graphs_on_all_gpus()
                })?;
            let elapsed_ns = stats::median(&burst.event_intervals_ns)
                - self.launch_overhead.events_around_graph_ns;
            Ok(elapsed_ns / launches as f64)
        };
        let alone_ns = launch_ns(&alone, 1)?;
        let together_ns = launch_ns(&batch.graph, batch.launches_in_graph)?;
        // Each GPU after the first adds one root node to the number of root nodes.
        Ok((
            alone_ns,
            together_ns,
            alone.max_root_nodes_per_gpu()? + self.timing_instruments.number_of_gpus_in_use() - 1,
        ))
    }

    /// Takes a sample of at least `launches` launches; batches of launches in a graph can increase
    /// the number. The sample is repeated a few times while the GPU is throttled.
    ///
    /// # Errors
    /// Fails if a launch fails, or takes less time than any kernel can.
    pub fn take_unthrottled_sample(
        &mut self,
        plan: &mut CaseTimingPlan,
        executable: &mut dyn LaunchableProblem,
        launches: u64,
    ) -> Result<TimedLaunchSample, BackendError> {
        for discarded in 0.. {
            let sample = self.take_sample_once(plan, executable, launches)?;
            let throttled =
                self.throttle_detector.was_sample_throttled(sample.sm_clock_mhz, &self.power);
            if discarded + 1 == MAX_SAMPLE_ATTEMPTS || !throttled {
                return Ok(TimedLaunchSample {
                    discarded_attempts: discarded,
                    gpu_was_throttled: throttled,
                    ..sample
                });
            }
        }
        unreachable!("the last attempt is returned")
    }

    fn take_sample_once(
        &mut self,
        plan: &mut CaseTimingPlan,
        executable: &mut dyn LaunchableProblem,
        launches: u64,
    ) -> Result<TimedLaunchSample, BackendError> {
        self.timing_instruments.use_first_gpus(plan.gpu_count);
        let batch = plan.batch.as_ref().map_or(1, |batch| batch.launches_in_graph);
        let commands = if plan.batch.is_some() { 1 } else { plan.queue_entries_per_launch };
        let overhead = self.launch_overhead;
        let around_ns = match plan.batch {
            Some(_) => overhead.events_around_graph_ns,
            None => overhead.events_around_launch_ns,
        };
        let carries_state = executable.launches_carry_state();
        let releases_lines =
            plan.may_leave_persisting_l2_lines && plan.cache == CacheState::ColdCaches;
        let longest = match carries_state || releases_lines {
            true => 1,
            false => plan.max_launches_behind_blocker as u64,
        };
        let bursts = launches.div_ceil(batch);
        let mut left = bursts;
        let mut sample = TimedLaunchSample {
            launches: 0,
            elapsed_ns: 0.0,
            skew_between_gpus_ns: None,
            sm_clock_mhz: None,
            discarded_attempts: 0,
            gpu_was_throttled: false,
        };
        let (mut clocked_ns, mut cycles) = (0.0, 0.0);
        while left > 0 {
            let ahead = plan.keeps_gpu_loaded
                && !(carries_state || releases_lines || plan.includes_host_launch_time)
                && plan.last_burst_ns < MAX_QUEUED_AHEAD_BURST_NS;
            let count = left.min(longest) as usize;
            let next = match left.saturating_sub(longest) {
                0 => bursts,
                rest => rest,
            };
            let following = next.min(longest) as usize;
            let burst_plan = BurstToEnqueue {
                launches: count,
                cache: plan.cache,
                queue_entries_per_launch: commands,
            };
            let burst = repeat_burst_until_released_in_time(|| {
                executable.reset_state()?;
                if releases_lines {
                    executable.wait_for_launches()?;
                    persistence::release_persisting_l2_lines(self.devices.first_device())?;
                }
                let launch: &mut dyn FnMut() -> Result<(), BackendError> = match &plan.batch {
                    Some(batch) => &mut || batch.graph.launch_graphs_on_all_gpus(),
                    None => &mut || executable.launch_once(),
                };
                if ahead {
                    self.finish_burst_and_enqueue_next(burst_plan, following, launch)
                } else {
                    self.run_burst_once(count, plan.cache, commands, launch)
                }
            })?;
            let burst_launches = burst.event_intervals_ns.len() as u64;
            left = left.saturating_sub(burst_launches);
            sample.launches += burst_launches * batch;
            plan.includes_host_launch_time |= burst.may_include_host_launch_time;
            let net_ns: Vec<f64> =
                burst.event_intervals_ns.iter().map(|interval| interval - around_ns).collect();
            let node_ns = overhead.ns_per_further_graph_node;
            duration::refuse_launches_faster_than_empty_kernel(&net_ns, batch, node_ns)?;
            let elapsed_ns: f64 = net_ns.iter().map(|net| net.max(CUDA_EVENT_RESOLUTION_NS)).sum();
            plan.last_burst_ns = elapsed_ns;
            sample.elapsed_ns += elapsed_ns;
            if let Some(skew_ns) = burst.skew_between_gpus_ns {
                *sample.skew_between_gpus_ns.get_or_insert(0.0) += skew_ns;
            }
            if let Some(clock_mhz) = burst.sm_clock_mhz {
                clocked_ns += elapsed_ns;
                cycles += clock_mhz * elapsed_ns;
            }
        }
        if clocked_ns > 0.0 {
            sample.sm_clock_mhz = Some(cycles / clocked_ns);
        }
        Ok(sample)
    }
}

impl Drop for EventStopwatchOfCase<'_> {
    /// The enqueued launches must end before the memory that they use is freed.
    fn drop(&mut self) {
        let _ = self.timer.discard_burst_enqueued_ahead();
    }
}

impl LaunchStopwatch for EventStopwatchOfCase<'_> {
    fn take_sample_of_launches(
        &mut self,
        executable: &mut dyn LaunchableProblem,
        launches: u64,
    ) -> Result<TimedLaunchSample, BackendError> {
        self.timer.take_unthrottled_sample(&mut self.plan, executable, launches)
    }

    fn time_one_replay(
        &mut self,
        executable: &mut dyn LaunchableProblem,
    ) -> Result<Option<TimedReplay>, BackendError> {
        if self.plan.may_leave_persisting_l2_lines {
            persistence::release_persisting_l2_lines(self.timer.devices.first_device())?;
        }
        let overhead = self.timer.launch_overhead;
        let timer = &mut *self.timer;
        timer.timing_instruments.use_first_gpus(self.plan.gpu_count);
        let (burst, around_ns, launches) = match &self.plan.batch {
            Some(batch) => {
                let burst = timer.run_burst_once(1, CacheState::ColdCaches, 1, &mut || {
                    batch.graph.launch_graphs_on_all_gpus()
                })?;
                (burst, overhead.events_around_graph_ns, batch.launches_in_graph)
            }
            None => {
                let mut launch = || executable.launch_once();
                let burst = timer.run_burst_once(
                    1,
                    CacheState::ColdCaches,
                    self.plan.queue_entries_per_launch,
                    &mut launch,
                )?;
                (burst, overhead.events_around_launch_ns, 1)
            }
        };
        let elapsed_ns = burst.event_intervals_ns[0] - around_ns;
        let allowed_ns = SLOWER_REPLAY_SHARE_OF_LAUNCH * elapsed_ns / launches as f64
            + SLOWER_REPLAY_SHARE_OF_REPLAY * elapsed_ns
            + REPLAY_START_TOLERANCE_NS;
        let replay = TimedReplay {
            replay_ns: elapsed_ns,
            sm_clock_mhz: burst.sm_clock_mhz,
            launches,
            allowed_excess_ns: allowed_ns,
        };
        Ok((!burst.may_include_host_launch_time).then_some(replay))
    }

    fn time_one_short_launch(
        &mut self,
        executable: &mut dyn LaunchableProblem,
    ) -> Result<Option<f64>, BackendError> {
        if executable.launches_carry_state()
            || self.plan.includes_host_launch_time
            || self.plan.may_leave_persisting_l2_lines
        {
            return Ok(None);
        }
        let timer = &mut *self.timer;
        timer.timing_instruments.use_first_gpus(self.plan.gpu_count);
        let mut launch = || executable.launch_once();
        let burst = timer.run_burst_once(
            1,
            CacheState::ColdCaches,
            self.plan.queue_entries_per_launch,
            &mut launch,
        )?;
        let launch_ns = burst.event_intervals_ns[0] - timer.launch_overhead.events_around_launch_ns;
        Ok((!burst.may_include_host_launch_time
            && launch_ns < REPLAY_START_TOLERANCE_NS / SLOWER_REPLAY_SHARE_OF_LAUNCH)
            .then_some(launch_ns))
    }

    fn check_for_work_on_other_streams(
        &mut self,
        executable: &mut dyn LaunchableProblem,
    ) -> Result<Option<String>, BackendError> {
        self.timer.timing_instruments.use_first_gpus(self.plan.gpu_count);
        let devices = self.timer.gpus_in_use();
        cupti::check_launch_streams_with_cupti(
            &devices,
            &mut self.timer.timing_instruments,
            executable,
        )
    }

    fn power_meter(&self) -> Option<&Arc<NvmlPowerMeter>> {
        Some(&self.timer.power)
    }

    fn enqueue_launches_without_waiting(
        &mut self,
        executable: &mut dyn LaunchableProblem,
        launches: u64,
    ) -> Result<u64, BackendError> {
        let Some(batch) = &self.plan.batch else {
            return enqueue_launches_one_by_one(executable, launches);
        };
        let replays = launches.div_ceil(batch.launches_in_graph);
        (0..replays).try_for_each(|_| batch.graph.launch_graphs_on_all_gpus())?;
        Ok(replays * batch.launches_in_graph)
    }

    fn keep_gpu_loaded_between_samples(&mut self, loaded: bool) -> Result<(), BackendError> {
        self.plan.keeps_gpu_loaded = loaded;
        if loaded { Ok(()) } else { self.timer.discard_burst_enqueued_ahead() }
    }

    fn set_settled_sm_clock_of_case(&mut self, clock_mhz: Option<f64>) {
        self.timer.throttle_detector.set_settled_sm_clock(clock_mhz);
    }

    fn sample_conditions(&self) -> CaseSampleConditions {
        let batch = self.plan.batch.as_ref().map(|batch| batch.launches_in_graph);
        CaseSampleConditions {
            launches_per_graph: batch,
            includes_host_launch_time: self.plan.includes_host_launch_time,
            ..CaseSampleConditions::default()
        }
    }

    fn commands_per_launch(&self) -> Option<u64> {
        self.plan.commands_of_one_launch
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate_cuda::instruments::spin_kernel::SpinKernel;
    use kernelgate_cuda::testing::{lock_first_gpu, lock_two_gpus};
    use std::time::{Duration, Instant};

    /// Takes samples that consist of a burst of 20 launches of 100 µs and then a burst of 10.
    #[test]
    fn the_next_burst_is_enqueued_before_the_current_is_read() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let mut timer = CudaEventTimer::new(&device).unwrap();
        let spin = SpinKernel::compile_and_allocate_report(&device).unwrap();
        let mut launch = || spin.enqueue_spin(100_000);
        let plan = BurstToEnqueue {
            launches: 20,
            cache: CacheState::HotCaches,
            queue_entries_per_launch: 1,
        };
        let (begun, mut busy_ns) = (Instant::now(), 0.0);
        for taken in 0..50 {
            let next = if taken < 49 { 20 } else { 10 };
            let burst = timer.finish_burst_and_enqueue_next(plan, next, &mut launch).unwrap();
            assert_eq!(burst.event_intervals_ns.len(), 20);
            assert!(burst.event_intervals_ns.iter().all(|interval| *interval >= 100_000.0));
            assert!(!burst.may_include_host_launch_time);
            busy_ns += burst.event_intervals_ns.iter().sum::<f64>();
        }
        let wall = begun.elapsed();
        eprintln!("busy for {busy_ns} ns of {wall:?}");
        assert!(wall >= Duration::from_nanos(busy_ns as u64) * 98 / 100);
        let last = timer.finish_burst_and_enqueue_next(plan, 20, &mut launch).unwrap();
        assert_eq!(last.event_intervals_ns.len(), 10, "the burst that was in the queue");
        let waiting = timer.burst_enqueued_ahead.unwrap();
        assert_eq!((waiting.burst_slot, waiting.launches), (1, 20));
        // Any other measurement first waits for the burst that was enqueued ahead, and drops its
        // times.
        let cold =
            timer.time_single_command_launches_ns(3, CacheState::ColdCaches, &mut launch).unwrap();
        assert_eq!((cold.len(), timer.burst_enqueued_ahead), (3, None));
    }

    #[test]
    fn a_two_gpu_launch_takes_equally_long_alone_and_in_a_batch() {
        let Some((devices, _alone)) = lock_two_gpus() else { return };
        let mut timer = CudaEventTimer::new(&devices).unwrap();
        let mut spins = Vec::new();
        devices
            .for_each_with_context_current(|_, device| {
                spins.push(SpinKernel::compile_and_allocate_report(device)?);
                Ok(())
            })
            .unwrap();
        for (gpus, spent_ns) in [1, 2].into_iter().flat_map(|n| [(n, 1_000), (n, 5_000)]) {
            timer.timing_instruments.use_first_gpus(gpus);
            let used = timer.gpus_in_use();
            let mut launch =
                || used.for_each_with_context_current(|rank, _| spins[rank].enqueue_spin(spent_ns));
            let batch = timer
                .capture_launches_in_graph_if_short(CacheState::HotCaches, 1, &mut launch)
                .unwrap()
                .unwrap();
            for _ in 0..5 {
                let (alone_ns, together_ns, begins) =
                    timer.time_launch_alone_and_in_batch(&batch, &mut launch).unwrap();
                eprintln!("{gpus} GPUs, {spent_ns} ns: alone {alone_ns}, together {together_ns}");
                assert_eq!(begins, gpus);
                reused_results::refuse_reuse_within_captured_batch(alone_ns, together_ns, begins)
                    .unwrap();
            }
        }
    }
}
