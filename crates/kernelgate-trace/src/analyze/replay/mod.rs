//! Replays a trace with changed durations: a call starts after its thread's previous call, an
//! operation after its launch and its stream's previous operation, a wait ends after the awaited
//! operation. A replay keeps the recorded time between an event and the event that it depends on. A
//! host that makes no recorded call and continues when the GPU has finished the launched work is
//! taken to have waited for the GPU.
//!
//! The time of a replay is proportional to the number of operations; [`ReplayInProgress`] replays
//! single operations, so that `job_replay` can replay all ranks together. This module does not
//! model dependencies between ranks.

pub mod job_replay;

use std::cmp::Reverse;

use hashbrown::HashMap;

use crate::analyze::launches::calls::{LaunchCallTable, OperationLaunchCall};
use crate::analyze::operations::{AllGpuOperations, GpuOperationId, GpuOperationKind};
use crate::analyze::time_order::OperationsInOrder;
use crate::analyze::timeline::span_union::UnionOfTimeSpans;
use crate::model::Trace;
use crate::model::packed_columns::{BitPackedColumn, PackableInteger};

/// Marks a missing operation or a missing thread.
const NO_OPERATION_OR_THREAD: u32 = u32::MAX;
/// An operation that starts later than this after its launch and after its stream's previous
/// operation may have waited for another stream.
const MIN_DELAY_OF_WAIT_FOR_STREAM_NS: i64 = 1_000;

#[derive(Debug, Clone, Copy)]
pub struct HostCallThatWaitsForGpu {
    pub thread_index: u32,
    /// Time at which the host entered the waiting call, nanoseconds.
    pub wait_start_ns: i64,
    /// Time at which the waiting call returned, nanoseconds.
    pub wait_end_ns: i64,
}

/// Time between two operations of a stream in a replay, if the second was launched before the first
/// ended.
const REPLAYED_DELAY_IN_STREAM_NS: i64 = 1_000;
/// Shortest time between two launch calls of a thread in which the host may have waited for the GPU
/// without a recorded call.
const MIN_UNRECORDED_WAIT_NS: i64 = 100_000;
/// Largest number of launched operations that are not finished when a host's wait for the GPU ends.
const MAX_UNFINISHED_OPERATIONS_AFTER_WAIT: i64 = 2;
/// A host pause counts as a wait for the GPU only if the GPU works for at least this share of the
/// pause. On public traces without their wait calls, the rule finds 92 % of 9,748 waits, for any
/// share from 0.7 to 0.95; it also takes 9 % of 17,722 other pauses for waits.
const MIN_GPU_BUSY_SHARE_OF_WAIT: f64 = 0.9;

/// A span of time in which a host thread waited for the GPU.
#[derive(Debug, Clone, Copy)]
struct HostWaitForGpu {
    waiting_call: HostCallThatWaitsForGpu,
    /// The operation whose end ended the wait; [`NO_OPERATION_OR_THREAD`] if the GPU had already
    /// finished.
    operation_that_ended_wait: GpuOperationId,
    /// Whether the wait is a recorded call; otherwise it was inferred from the time between two
    /// launch calls.
    is_recorded_wait_call: bool,
}

/// Changes of a replay: durations of operations, of launch calls, of waits and of the host's own
/// time.
pub struct ReplayChange<'a> {
    /// Returns the replayed duration of an operation from its id and its recorded duration,
    /// nanoseconds.
    pub replayed_duration_ns: &'a dyn Fn(GpuOperationId, i64) -> i64,
    /// Whether launch calls take their recorded time in the replay, instead of no time.
    pub replays_recorded_launch_call_times: bool,
    /// Whether the host waits for the GPU in the replay as it was recorded, instead of not waiting.
    pub keeps_host_waits: bool,
    /// How the host's time between its launch calls is replayed.
    pub host_time_between_launches: ReplayedHostTime<'a>,
}

/// How a replay treats the host's own time between launch calls.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ReplayedHostTime<'a> {
    /// In a replay, the host takes its recorded time between two launch calls.
    RecordedHostTime,
    /// In a replay, the host takes this share, from 0 to 1, of its recorded time between two launch
    /// calls.
    ShareOfRecordedHostTime(f64),
    /// In a replay, neither host code nor launch calls take time in these spans, which do not
    /// overlap.
    WithoutHostPauses(&'a [(i64, i64)]),
}

impl ReplayedHostTime<'_> {
    /// Returns how many nanoseconds of a span of a launch call or of host time lie in the pauses
    /// that the replay removes.
    fn ns_in_removed_pauses(&self, from: i64, to: i64) -> i64 {
        let Self::WithoutHostPauses(spans) = self else { return 0 };
        spans.iter().map(|&(start, end)| (end.min(to) - start.max(from)).max(0)).sum()
    }
}

/// Kind of one segment of the critical path of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CriticalPathSegmentKind {
    /// An operation runs.
    RunningOperation(GpuOperationId),
    /// Time from a launch call to the start of its operation.
    LaunchLatency,
    /// Time from the end of an operation to the start of the next operation that waits for it.
    BetweenOperations,
    /// Time that the host spends in launch calls.
    HostTimeInLaunchCalls,
    /// Time that the host spends between two launch calls.
    HostBetweenLaunchCalls,
    /// Time from the end of an operation to the return of the host call that waits for it.
    HostWaitReturnDelay,
    /// Time for which the trace does not show a dependency of the operation.
    UnknownDependency,
}

impl CriticalPathSegmentKind {
    /// Label of the segment; an operation is printed by its own name.
    pub const fn printed_segment_label(self) -> &'static str {
        match self {
            Self::RunningOperation(_) => "operation",
            Self::LaunchLatency => "from launch call to start",
            Self::BetweenOperations => "between dependent operations",
            Self::HostTimeInLaunchCalls => "launch calls",
            Self::HostBetweenLaunchCalls => "host between launch calls",
            Self::HostWaitReturnDelay => "return from waits",
            Self::UnknownDependency => "launches that the trace does not hold",
        }
    }
}

/// Dependencies among the GPU operations and the host calls of one trace, for replays and critical
/// paths.
pub struct TraceDependencies<'a> {
    operations: AllGpuOperations<'a>,
    launch_calls: &'a LaunchCallTable,
    /// Operations whose launch call is recorded, in order of the starts of these calls.
    operations_by_launch: OperationsInOrder,
    /// All operations, in order of their start.
    operations_by_start: OperationsInOrder,
    /// Waits of the host for the GPU, in order of their end.
    host_waits_by_end: Vec<HostWaitForGpu>,
    /// For each operation, its id minus the id of the previous operation on its stream; 0 for a
    /// stream's first operation.
    id_minus_previous_id_on_stream: BitPackedColumn<i64>,
    /// For each operation, its id minus the id of the operation on another stream that it seems to
    /// wait for; 0 if it seems to wait for no other stream.
    id_minus_awaited_operation_id: BitPackedColumn<i64>,
    thread_count: usize,
    trace_start_and_end_ns: (i64, i64),
}

impl<'a> TraceDependencies<'a> {
    /// Finds the dependencies of a trace's operations; returns `None` if the trace has no
    /// operations.
    pub fn find_dependencies(
        trace: &'a Trace,
        launches: &'a LaunchCallTable,
        waits: &[HostCallThatWaitsForGpu],
    ) -> Option<Self> {
        let all = AllGpuOperations::number_operations_of_trace(trace);
        let process =
            |id: GpuOperationId| trace.process_index_of_place(all.place_of_operation(id)) as usize;
        let time = |id: GpuOperationId| {
            launches.launch_call_of_operation(&all, id).map(|call| call.call_start_ns)
        };
        let launched = OperationsInOrder::sort_operations_by_key(
            all.all_operation_ids().filter(|&id| launches.has_recorded_launch_call(id)),
            time,
        );
        let started = OperationsInOrder::sort_operations_by_key(all.all_operation_ids(), |id| {
            all.operation_start_ns(id)
        });
        let ended = OperationsInOrder::sort_operations_by_key(all.all_operation_ids(), |id| {
            all.operation_end_exclusive_ns(id)
        });
        let first = all.operation_start_ns(started.get(0)?);
        let last = all.operation_end_exclusive_ns(ended.get(ended.len() - 1)?);
        let mut of = Self {
            operations: all,
            launch_calls: launches,
            operations_by_launch: launched,
            operations_by_start: started,
            host_waits_by_end: Vec::new(),
            id_minus_previous_id_on_stream: BitPackedColumn::column_filled_with(all.len(), 0),
            id_minus_awaited_operation_id: BitPackedColumn::column_filled_with(all.len(), 0),
            thread_count: trace.threads.len(),
            trace_start_and_end_ns: (first, last),
        };
        of.find_operations_waited_for(trace, &ended, process);
        of.find_operations_that_end_host_waits(trace, waits, &ended, process);
        of.add_waits_without_recorded_call(trace, waits, &ended, process);
        of.host_waits_by_end.sort_by_key(|wait| wait.waiting_call.wait_end_ns);
        Some(of)
    }

    fn previous_operation_on_stream(&self, id: GpuOperationId) -> Option<GpuOperationId> {
        operation_with_id_lower_by(id, self.id_minus_previous_id_on_stream.at(id as usize))
    }

    /// Returns the operation of another stream that an operation seems to wait for.
    fn awaited_operation_on_other_stream(&self, id: GpuOperationId) -> Option<GpuOperationId> {
        operation_with_id_lower_by(id, self.id_minus_awaited_operation_id.at(id as usize))
    }

    /// Finds for each operation the previous operation on its stream, and the operation on another
    /// stream that it seems to wait for.
    fn find_operations_waited_for(
        &mut self,
        trace: &Trace,
        ended: &OperationsInOrder,
        process: impl Fn(GpuOperationId) -> usize,
    ) {
        let mut last_of_place = vec![NO_OPERATION_OR_THREAD; trace.places.len()];
        let mut last_of_process = vec![NO_OPERATION_OR_THREAD; trace.processes.len()];
        let mut devices: HashMap<(u32, u32), usize> = HashMap::new();
        let numbered = trace.places.iter().map(|place| {
            let new = devices.len();
            *devices.entry((place.process_index, place.device)).or_insert(new)
        });
        let device_of_place: Vec<usize> = numbered.collect();
        let mut last_of_device = vec![NO_OPERATION_OR_THREAD; devices.len()];
        let mut ended = ended.iter().peekable();
        for id in self.operations_by_start.iter() {
            let start = self.operations.operation_start_ns(id);
            while let Some(done) =
                ended.next_if(|&done| self.operations.operation_end_exclusive_ns(done) <= start)
            {
                last_of_process[process(done)] = done;
                last_of_device
                    [device_of_place[self.operations.place_of_operation(done).0 as usize]] = done;
            }
            let place = self.operations.place_of_operation(id).0 as usize;
            let last = last_of_place[place];
            // An operation that runs entirely during another operation of its stream, such as a
            // migration during a kernel, does not wait for it.
            let inside = last != NO_OPERATION_OR_THREAD
                && start < self.operations.operation_end_exclusive_ns(last)
                && self.operations.operation_end_exclusive_ns(id)
                    <= self.operations.operation_end_exclusive_ns(last);
            if !inside {
                let step = if last == NO_OPERATION_OR_THREAD {
                    0
                } else {
                    id.to_packed_integer() - last.to_packed_integer()
                };
                self.id_minus_previous_id_on_stream.replace_row(id as usize, step);
                last_of_place[place] = id;
            }
            let ready =
                self.earliest_start_and_if_launch_bound(id).map_or(i64::MIN, |(time, _)| time);
            if start.saturating_sub(ready) <= MIN_DELAY_OF_WAIT_FOR_STREAM_NS {
                continue;
            }
            // The last operation that ended on the same GPU is tried before the last of the
            // process, because a process may use several GPUs.
            let others = [last_of_device[device_of_place[place]], last_of_process[process(id)]];
            let waits_for = |&other: &GpuOperationId| {
                other != NO_OPERATION_OR_THREAD
                    && other != id
                    && self.operations.operation_start_ns(other) < start
                    && self.operations.operation_end_exclusive_ns(other) > ready
            };
            if let Some(other) = others.into_iter().find(waits_for) {
                self.id_minus_awaited_operation_id
                    .replace_row(id as usize, id.to_packed_integer() - other.to_packed_integer());
            }
        }
    }

    fn find_operations_that_end_host_waits(
        &mut self,
        trace: &Trace,
        calls: &[HostCallThatWaitsForGpu],
        ended: &OperationsInOrder,
        process: impl Fn(GpuOperationId) -> usize,
    ) {
        let mut last_of_process = vec![NO_OPERATION_OR_THREAD; trace.processes.len()];
        let mut done = ended.iter().peekable();
        let mut calls: Vec<HostCallThatWaitsForGpu> = calls.to_vec();
        calls.sort_by_key(|call| call.wait_end_ns);
        for call in calls {
            while let Some(id) = done
                .next_if(|&id| self.operations.operation_end_exclusive_ns(id) <= call.wait_end_ns)
            {
                last_of_process[process(id)] = id;
            }
            let own = trace.threads[call.thread_index as usize].process_index as usize;
            let last = last_of_process[own];
            let waited = last != NO_OPERATION_OR_THREAD
                && self.operations.operation_end_exclusive_ns(last) > call.wait_start_ns;
            let ended_by = if waited { last } else { NO_OPERATION_OR_THREAD };
            self.host_waits_by_end.push(HostWaitForGpu {
                waiting_call: call,
                operation_that_ended_wait: ended_by,
                is_recorded_wait_call: true,
            });
        }
        let blocking = self.operations_by_launch.iter().filter_map(|id| {
            let call = self.launch_call_of(id).filter(|call| {
                self.does_launch_call_block_until_end(
                    id,
                    self.operations.operation_start_and_end_ns(id),
                    call,
                )
            })?;
            let OperationLaunchCall {
                call_start_ns: start,
                call_end_ns: end,
                thread_index: thread,
            } = call;
            Some(HostWaitForGpu {
                waiting_call: HostCallThatWaitsForGpu {
                    thread_index: thread,
                    wait_start_ns: start,
                    wait_end_ns: end,
                },
                operation_that_ended_wait: id,
                is_recorded_wait_call: true,
            })
        });
        let blocking: Vec<HostWaitForGpu> = blocking.collect();
        self.host_waits_by_end.extend(blocking);
    }

    /// Adds waits that no call shows: pauses between two launch calls in which the GPU works most
    /// of the time and finishes nearly all launched operations.
    fn add_waits_without_recorded_call(
        &mut self,
        trace: &Trace,
        calls: &[HostCallThatWaitsForGpu],
        ended: &OperationsInOrder,
        process: impl Fn(GpuOperationId) -> usize,
    ) {
        let mut pauses: Vec<HostCallThatWaitsForGpu> = Vec::new();
        let mut last_call = vec![i64::MIN; self.thread_count];
        for call in self.operations_by_launch.iter().filter_map(|id| self.launch_call_of(id)) {
            let last =
                std::mem::replace(&mut last_call[call.thread_index as usize], call.call_end_ns);
            if last != i64::MIN && call.call_start_ns - last >= MIN_UNRECORDED_WAIT_NS {
                pauses.push(HostCallThatWaitsForGpu {
                    thread_index: call.thread_index,
                    wait_start_ns: last,
                    wait_end_ns: call.call_start_ns,
                });
            }
        }
        let mut waited: HashMap<u32, Vec<i64>> = HashMap::new();
        for call in calls {
            waited.entry(call.thread_index).or_default().push(call.wait_end_ns);
        }
        waited.values_mut().for_each(|ends| ends.sort_unstable());
        pauses.retain(|pause| {
            let ends = waited.get(&pause.thread_index).map_or(&[][..], |ends| ends);
            let next = ends.partition_point(|&end| end <= pause.wait_start_ns);
            ends.get(next).is_none_or(|&end| end > pause.wait_end_ns)
        });
        if pauses.is_empty() {
            return;
        }
        pauses.sort_by_key(|pause| pause.wait_end_ns);
        let mut worked = vec![UnionOfTimeSpans::default(); trace.processes.len()];
        for id in self.operations_by_start.iter() {
            worked[process(id)].add_later_span((
                self.operations.operation_start_ns(id),
                self.operations.operation_end_exclusive_ns(id),
            ));
        }
        let processes = trace.processes.len();
        let (mut last_of_process, mut pending) =
            (vec![NO_OPERATION_OR_THREAD; processes], vec![0i64; processes]);
        let end_ns = |id| self.operations.operation_end_exclusive_ns(id);
        let mut done = ended.iter().peekable();
        let mut launched = self.operations_by_launch.iter().peekable();
        for call in pauses {
            let before = |id: &GpuOperationId| {
                self.launch_call_of(*id).is_some_and(|of| of.call_start_ns < call.wait_end_ns)
            };
            while let Some(id) = launched.next_if(before) {
                pending[process(id)] += 1;
            }
            while let Some(id) = done.next_if(|&id| end_ns(id) <= call.wait_end_ns) {
                last_of_process[process(id)] = id;
                pending[process(id)] -= i64::from(self.launch_calls.has_recorded_launch_call(id));
            }
            let own = trace.threads[call.thread_index as usize].process_index as usize;
            let last = last_of_process[own];
            // The host may continue a moment before the last operation's recorded end, so the
            // operation that ends next may have ended the wait.
            let next = done.peek().copied().filter(|&id| {
                let span = (self.operations.operation_start_ns(id), end_ns(id));
                process(id) == own
                    && span.0 < call.wait_end_ns
                    && last != NO_OPERATION_OR_THREAD
                    && span.1 - call.wait_end_ns < call.wait_end_ns - end_ns(last)
            });
            #[allow(clippy::cast_precision_loss)]
            let [worked, whole] = [
                worked[own].covered_ns_within((call.wait_start_ns, call.wait_end_ns)),
                call.wait_end_ns - call.wait_start_ns,
            ]
            .map(|ns| ns as f64);
            let ended = last != NO_OPERATION_OR_THREAD && end_ns(last) > call.wait_start_ns;
            if ended
                && pending[own] <= MAX_UNFINISHED_OPERATIONS_AFTER_WAIT
                && worked >= MIN_GPU_BUSY_SHARE_OF_WAIT * whole
            {
                self.host_waits_by_end.push(HostWaitForGpu {
                    waiting_call: call,
                    operation_that_ended_wait: next.unwrap_or(last),
                    is_recorded_wait_call: false,
                });
            }
        }
    }

    /// Returns whether a launch call blocked the host until its operation ended; a copy from
    /// pageable memory returns a moment before the copy's end. A kernel that ran for less than half
    /// of a long launch call did not block that call.
    fn does_launch_call_block_until_end(
        &self,
        id: GpuOperationId,
        (start, end): (i64, i64),
        call: &OperationLaunchCall,
    ) -> bool {
        let beside = call.call_end_ns.min(end) - call.call_start_ns.max(start);
        if self.operations.kind_and_table_row(id).0 == GpuOperationKind::Kernel
            && beside * 2 < call.call_end_ns - call.call_start_ns
        {
            return false;
        }
        end <= call.call_end_ns
            || (end - start > MIN_DELAY_OF_WAIT_FOR_STREAM_NS && beside * 2 > end - start)
    }

    /// Returns the earliest time at which an operation could start after its launch call: the end
    /// of the call, or its start if the call blocks. A call that waits for its operation may also
    /// have waited for earlier operations, so only its start counts.
    fn earliest_start_allowed_by_launch(
        &self,
        id: GpuOperationId,
        span: (i64, i64),
        call: &OperationLaunchCall,
    ) -> i64 {
        let at = if self.does_launch_call_block_until_end(id, span, call) {
            call.call_start_ns
        } else {
            call.call_end_ns
        };
        at.min(span.0)
    }

    /// Returns the host call that launched an operation, if it was recorded.
    fn launch_call_of(&self, id: GpuOperationId) -> Option<OperationLaunchCall> {
        self.launch_calls.launch_call_of_operation(&self.operations, id)
    }

    /// Returns the launch call at a position in launch order, and one operation that it launched.
    fn nth_launch_call_and_operation(
        &self,
        position: usize,
    ) -> Option<(GpuOperationId, OperationLaunchCall)> {
        let id = self.operations_by_launch.get(position)?;
        Some((id, self.launch_call_of(id)?))
    }

    pub fn operations_of_trace(&self) -> AllGpuOperations<'a> {
        self.operations
    }

    /// First start and last end of the trace's operations, nanoseconds.
    pub fn first_operation_start_and_last_end(&self) -> (i64, i64) {
        self.trace_start_and_end_ns
    }

    /// Earliest time at which an operation could start, by its launch and its stream, and whether
    /// the launch is the later of both.
    fn earliest_start_and_if_launch_bound(&self, id: GpuOperationId) -> Option<(i64, bool)> {
        let span = self.operations.operation_start_and_end_ns(id);
        let launch = self.launch_calls.launch_call_of_operation_starting_at(span.0, id);
        let launch = launch.map(|call| self.earliest_start_allowed_by_launch(id, span, &call));
        let stream = self
            .previous_operation_on_stream(id)
            .map(|before| self.operations.operation_end_exclusive_ns(before).min(span.0));
        match (launch, stream) {
            (Some(launch), Some(stream)) => Some((launch.max(stream), launch > stream)),
            (Some(launch), None) => Some((launch, true)),
            (None, Some(stream)) => Some((stream, false)),
            (None, None) => None,
        }
    }

    /// Replays the trace with a change; returns by how many nanoseconds the trace is shorter,
    /// negative if it is longer.
    pub fn trace_ns_saved_by_change(&self, change: &ReplayChange<'_>) -> i64 {
        let mut replay = ReplayInProgress::begin_replay(self);
        let (mut first, mut last) = (i64::MAX, i64::MIN);
        while let Some(id) = replay.next_operation_to_replay() {
            let by = replay.replay_start_of_operation(id, change);
            let (start, end) = self.operations.operation_start_and_end_ns(id);
            first = first.min(start + by);
            let length = (change.replayed_duration_ns)(id, end - start);
            let by = by + length - (end - start);
            replay.set_replayed_minus_recorded_end(id, by);
            // An operation whose replayed duration is 0 does not determine the end of the replay.
            if length > 0 || end == start {
                last = last.max(end + by);
            }
        }
        (self.trace_start_and_end_ns.1 - self.trace_start_and_end_ns.0) - (last.max(first) - first)
    }

    /// Calls `each` for every segment of the critical path, from the end of the trace back to its
    /// start: the segments' nanoseconds add up to the time from the first start to the last end.
    pub fn visit_critical_path_of_trace(&self, mut each: impl FnMut(CriticalPathSegmentKind, i64)) {
        let mut walk = CriticalPathBackwardWalk::prepare_backward_walk(self);
        let mut path = CriticalPathWalkState {
            path_start_ns: self.trace_start_and_end_ns.0,
            walk_reached_time_ns: self.trace_start_and_end_ns.1,
            path_segments_with_ns: Vec::new(),
        };
        let mut next = Some(self.operation_that_ends_last());
        // The loop is bounded, because operations of zero duration may lead back to each other.
        for _ in 0..self.operations.len() {
            let Some(id) = next.filter(|_| path.walk_reached_time_ns > path.path_start_ns) else {
                break;
            };
            path.walk_back_and_add_segment(
                CriticalPathSegmentKind::RunningOperation(id),
                self.operations.operation_start_ns(id),
            );
            next = walk.step_back_from_operation(id, &mut path);
            path.path_segments_with_ns.drain(..).for_each(|(segment, ns)| each(segment, ns));
        }
        path.walk_back_and_add_segment(
            CriticalPathSegmentKind::UnknownDependency,
            self.trace_start_and_end_ns.0,
        );
        path.path_segments_with_ns.drain(..).for_each(|(segment, ns)| each(segment, ns));
    }

    /// Returns the time between the end of the previous operation on its stream and the start of an
    /// operation, nanoseconds.
    pub fn gap_before_operation_on_stream_ns(&self, id: GpuOperationId) -> i64 {
        self.previous_operation_on_stream(id).map_or(0, |before| {
            (self.operations.operation_start_ns(id)
                - self.operations.operation_end_exclusive_ns(before))
            .max(0)
        })
    }

    /// Returns the operation of the trace that ends last.
    pub fn operation_that_ends_last(&self) -> GpuOperationId {
        let last = self
            .operations_by_start
            .iter()
            .max_by_key(|&id| (self.operations.operation_end_exclusive_ns(id), Reverse(id)));
        last.expect("there are operations")
    }
}

/// Returns the operation whose id is lower by `step`; `None` if `step` is 0, which means no
/// operation.
fn operation_with_id_lower_by(id: GpuOperationId, step: i64) -> Option<GpuOperationId> {
    (step != 0).then(|| GpuOperationId::from_packed_integer(id.to_packed_integer() - step))
}

/// State of a replay: for threads and operations, replayed minus recorded times.
pub struct ReplayInProgress<'d, 'a> {
    dependencies: &'d TraceDependencies<'a>,
    /// For each host thread, replayed minus recorded time after its last replayed call,
    /// nanoseconds.
    replayed_minus_recorded_ns_by_thread: Vec<i64>,
    /// For each host thread, the recorded end of its last replayed call; `i64::MIN` before the
    /// first.
    recorded_end_of_last_call_ns: Vec<i64>,
    /// For each operation, replayed minus recorded time: of its launch until the operation is
    /// replayed, then of its end.
    replayed_minus_recorded_ns: BitPackedColumn<i64>,
    /// Thread and start of the last replayed launch call; one call of a graph launches several
    /// operations.
    last_call_thread_and_start_ns: (u32, i64),
    next_launch_call: Option<(GpuOperationId, OperationLaunchCall)>,
    /// Next positions in the operations by launch, in the operations by start, and in the waits.
    next_launch_start_wait_positions: (usize, usize, usize),
}

impl<'d, 'a> ReplayInProgress<'d, 'a> {
    /// Creates a replay in which no operation of the trace has been replayed yet.
    pub fn begin_replay(of: &'d TraceDependencies<'a>) -> Self {
        Self {
            dependencies: of,
            replayed_minus_recorded_ns_by_thread: vec![0; of.thread_count],
            recorded_end_of_last_call_ns: vec![i64::MIN; of.thread_count],
            replayed_minus_recorded_ns: BitPackedColumn::column_filled_with(of.operations.len(), 0),
            last_call_thread_and_start_ns: (NO_OPERATION_OR_THREAD, i64::MIN),
            next_launch_call: of.nth_launch_call_and_operation(0),
            next_launch_start_wait_positions: (0, 0, 0),
        }
    }

    /// Returns the operation to replay next, in order of recorded starts.
    pub fn next_operation_to_replay(&self) -> Option<GpuOperationId> {
        self.dependencies.operations_by_start.get(self.next_launch_start_wait_positions.1)
    }

    /// Replays the host calls before an operation, and the operation's start; returns replayed
    /// minus recorded start. Callers set the end of an operation before they replay operations that
    /// depend on it.
    pub fn replay_start_of_operation(
        &mut self,
        id: GpuOperationId,
        change: &ReplayChange<'_>,
    ) -> i64 {
        let source = self.dependencies;
        let span = source.operations.operation_start_and_end_ns(id);
        let start = span.0;
        loop {
            let wait = source.host_waits_by_end.get(self.next_launch_start_wait_positions.2);
            let returned = wait.map_or(i64::MAX, |wait| wait.waiting_call.wait_end_ns);
            match (self.next_launch_call, wait) {
                (Some((launched, call)), _)
                    if call.call_start_ns <= start && call.call_start_ns < returned =>
                {
                    self.next_launch_start_wait_positions.0 += 1;
                    self.next_launch_call = source
                        .nth_launch_call_and_operation(self.next_launch_start_wait_positions.0);
                    self.replay_launch_call(launched, &call, change);
                }
                (_, Some(wait)) if returned <= start => {
                    self.next_launch_start_wait_positions.2 += 1;
                    self.replay_wait_for_gpu(wait, change);
                }
                _ => break,
            }
        }
        self.next_launch_start_wait_positions.1 += 1;
        let launch = source
            .launch_calls
            .launch_call_of_operation_starting_at(start, id)
            .map(|call| source.earliest_start_allowed_by_launch(id, span, &call));
        let others =
            [source.previous_operation_on_stream(id), source.awaited_operation_on_other_stream(id)]
                .map(|other| {
                    other.map(|other| {
                        (other, source.operations.operation_end_exclusive_ns(other).min(start))
                    })
                });
        let others = || others.iter().flatten();
        let ended = others().map(|&(_, end)| end).max();
        let Some(recorded) = launch.max(ended) else { return 0 };
        // If its launch determined when the operation started, the operation's recorded latency is
        // not added to a later replayed end of its stream.
        let latency = start - recorded;
        let between =
            if launch > ended { latency.min(REPLAYED_DELAY_IN_STREAM_NS) } else { latency };
        let launched =
            launch.map(|time| time + self.replayed_minus_recorded_ns.at(id as usize) + latency);
        let ready = others()
            .map(|&(other, end)| end + self.replayed_minus_recorded_ns.at(other as usize) + between)
            .max();
        launched.max(ready).map_or(0, |replayed| replayed - start)
    }

    pub fn set_replayed_minus_recorded_end(&mut self, id: GpuOperationId, by: i64) {
        self.replayed_minus_recorded_ns.replace_row(id as usize, by);
    }

    fn replay_launch_call(
        &mut self,
        id: GpuOperationId,
        call: &OperationLaunchCall,
        change: &ReplayChange<'_>,
    ) {
        let thread = call.thread_index as usize;
        let removed = |from: i64| match change.replays_recorded_launch_call_times {
            true => change.host_time_between_launches.ns_in_removed_pauses(from, call.call_end_ns),
            false => (call.call_end_ns - from).max(0),
        };
        if self.last_call_thread_and_start_ns != (call.thread_index, call.call_start_ns) {
            self.last_call_thread_and_start_ns = (call.thread_index, call.call_start_ns);
            self.replay_own_time_of_host(thread, call.call_start_ns, change);
            self.replayed_minus_recorded_ns_by_thread[thread] -= removed(call.call_start_ns);
            self.recorded_end_of_last_call_ns[thread] =
                self.recorded_end_of_last_call_ns[thread].max(call.call_end_ns);
        }
        let start = self.dependencies.operations.operation_start_ns(id);
        // If clocks disagree, an operation may start before its launch call; such an operation was
        // replayed before the call.
        if start >= call.call_start_ns {
            // An operation that starts before its launch call returns was delayed only by the part
            // of the call before its start.
            self.replayed_minus_recorded_ns.replace_row(
                id as usize,
                self.replayed_minus_recorded_ns_by_thread[thread] + removed(start),
            );
        }
    }

    /// Replays the host's own time of a thread, from its last call to the recorded time `until`.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    fn replay_own_time_of_host(&mut self, thread: usize, until: i64, change: &ReplayChange<'_>) {
        let since = self.recorded_end_of_last_call_ns[thread];
        self.replayed_minus_recorded_ns_by_thread[thread] -= match change.host_time_between_launches
        {
            ReplayedHostTime::ShareOfRecordedHostTime(left)
                if since != i64::MIN && until > since =>
            {
                ((until - since) as f64 * (1.0 - left)).round() as i64
            }
            ReplayedHostTime::ShareOfRecordedHostTime(_) | ReplayedHostTime::RecordedHostTime => 0,
            ReplayedHostTime::WithoutHostPauses(_) => {
                change.host_time_between_launches.ns_in_removed_pauses(since, until)
            }
        };
    }

    fn replay_wait_for_gpu(&mut self, wait: &HostWaitForGpu, change: &ReplayChange<'_>) {
        let HostCallThatWaitsForGpu {
            thread_index: thread,
            wait_start_ns: start,
            wait_end_ns: end,
        } = wait.waiting_call;
        let index = thread as usize;
        if !wait.is_recorded_wait_call
            && matches!(
                change.host_time_between_launches,
                ReplayedHostTime::ShareOfRecordedHostTime(_)
            )
        {
            return;
        }
        self.replay_own_time_of_host(index, start, change);
        self.recorded_end_of_last_call_ns[index] =
            self.recorded_end_of_last_call_ns[index].max(end);
        let not_before = self.replayed_minus_recorded_ns_by_thread[index] + start - end;
        self.replayed_minus_recorded_ns_by_thread[index] = match (
            wait.operation_that_ended_wait,
            change.keeps_host_waits || !wait.is_recorded_wait_call,
        ) {
            (_, false) => not_before,
            (NO_OPERATION_OR_THREAD, true) => self.replayed_minus_recorded_ns_by_thread[index],
            // The replayed wait returns as long after the operation's end (or before it) as
            // recorded, but not before the wait was entered.
            (ended_by, true) => {
                let paused = change.host_time_between_launches.ns_in_removed_pauses(
                    self.dependencies.operations.operation_end_exclusive_ns(ended_by),
                    end,
                );
                (self.replayed_minus_recorded_ns.at(ended_by as usize) - paused).max(not_before)
            }
        };
    }
}

/// State of a walk back along the critical path: the time reached and the segments found.
pub struct CriticalPathWalkState {
    /// Start of the critical path, nanoseconds.
    pub path_start_ns: i64,
    /// Time that the backward walk along the critical path has reached, nanoseconds.
    pub walk_reached_time_ns: i64,
    /// Segments of the critical path that the walk has found so far, with their nanoseconds.
    pub path_segments_with_ns: Vec<(CriticalPathSegmentKind, i64)>,
}

impl CriticalPathWalkState {
    /// Moves the walk back to an earlier time, and adds the time between as one segment.
    pub fn walk_back_and_add_segment(&mut self, segment: CriticalPathSegmentKind, to: i64) {
        let to = to.max(self.path_start_ns);
        if to < self.walk_reached_time_ns {
            self.path_segments_with_ns.push((segment, self.walk_reached_time_ns - to));
            self.walk_reached_time_ns = to;
        }
    }
}

/// Walks back along the critical path of a trace, from each operation to the operation that it
/// waited for.
pub struct CriticalPathBackwardWalk<'d, 'a> {
    dependencies: &'d TraceDependencies<'a>,
    /// For each thread, the positions of its waits in order of their end.
    wait_positions_of_thread: Vec<Vec<u32>>,
    launch_call_sums: Vec<RunningSumOfLaunchCalls>,
}

/// Launch calls of a thread, and the sum of the durations of the calls before a position that moves
/// back in time with the walk.
#[derive(Debug, Clone, Default)]
struct RunningSumOfLaunchCalls {
    /// One operation of each launch call, in order of the calls' starts.
    one_operation_per_call: BitPackedColumn<GpuOperationId>,
    /// Current position in the list of the thread's launch calls.
    call_list_position: usize,
    /// Sum of the durations of all calls before the current position, nanoseconds.
    sum_before_current_call_ns: i64,
}

impl RunningSumOfLaunchCalls {
    /// Returns the sum of the durations of the thread's launch calls that start before `time`,
    /// nanoseconds.
    fn total_ns_of_calls_before(&mut self, of: &TraceDependencies<'_>, time: i64) -> i64 {
        let call = |at: usize| {
            self.one_operation_per_call.decoded_row(at).and_then(|id| of.launch_call_of(id))
        };
        while let Some(call) =
            call(self.call_list_position).filter(|call| call.call_start_ns < time)
        {
            self.sum_before_current_call_ns += call.call_end_ns - call.call_start_ns;
            self.call_list_position += 1;
        }
        while let Some(last) = self.call_list_position.checked_sub(1)
            && let Some(call) = call(last).filter(|call| call.call_start_ns >= time)
        {
            self.sum_before_current_call_ns -= call.call_end_ns - call.call_start_ns;
            self.call_list_position = last;
        }
        self.sum_before_current_call_ns
    }
}

impl<'d, 'a> CriticalPathBackwardWalk<'d, 'a> {
    /// Prepares a walk: groups waits and launch calls of the trace by thread.
    pub fn prepare_backward_walk(of: &'d TraceDependencies<'a>) -> Self {
        let mut waits = vec![Vec::new(); of.thread_count];
        for (position, wait) in (0u32..)
            .zip(&of.host_waits_by_end)
            .filter(|(_, of)| of.operation_that_ended_wait != NO_OPERATION_OR_THREAD)
        {
            waits[wait.waiting_call.thread_index as usize].push(position);
        }
        let mut launches = vec![RunningSumOfLaunchCalls::default(); of.thread_count];
        let mut last = vec![i64::MIN; of.thread_count];
        for (id, call) in
            of.operations_by_launch.iter().filter_map(|id| Some((id, of.launch_call_of(id)?)))
        {
            // One launch call of a graph launches several operations, so only the first operation
            // of each call is added.
            let last = &mut last[call.thread_index as usize];
            if std::mem::replace(last, call.call_start_ns) != call.call_start_ns {
                launches[call.thread_index as usize].one_operation_per_call.push_row(id);
            }
        }
        Self { dependencies: of, wait_positions_of_thread: waits, launch_call_sums: launches }
    }

    /// Steps back from the start of an operation to the end of the operation that it waited for,
    /// and returns that operation.
    pub fn step_back_from_operation(
        &mut self,
        id: GpuOperationId,
        path: &mut CriticalPathWalkState,
    ) -> Option<GpuOperationId> {
        let source = self.dependencies;
        match (
            source.earliest_start_and_if_launch_bound(id),
            source.awaited_operation_on_other_stream(id),
        ) {
            (_, Some(other)) => {
                path.walk_back_and_add_segment(
                    CriticalPathSegmentKind::BetweenOperations,
                    source.operations.operation_end_exclusive_ns(other),
                );
                Some(other)
            }
            (Some((ready, false)), None) => {
                path.walk_back_and_add_segment(CriticalPathSegmentKind::BetweenOperations, ready);
                source.previous_operation_on_stream(id)
            }
            (Some((ready, true)), None) => {
                path.walk_back_and_add_segment(CriticalPathSegmentKind::LaunchLatency, ready);
                let call = source.launch_call_of(id)?;
                path.walk_back_and_add_segment(
                    CriticalPathSegmentKind::HostTimeInLaunchCalls,
                    call.call_start_ns,
                );
                self.step_back_from_launch_call(call, path)
            }
            (None, None) => None,
        }
    }

    /// Steps back from a launch call to the last wait of its thread, and returns the operation that
    /// ended that wait.
    fn step_back_from_launch_call(
        &mut self,
        call: OperationLaunchCall,
        path: &mut CriticalPathWalkState,
    ) -> Option<GpuOperationId> {
        let source = self.dependencies;
        let waits = &self.wait_positions_of_thread[call.thread_index as usize];
        let end =
            |position: u32| source.host_waits_by_end[position as usize].waiting_call.wait_end_ns;
        let after = waits.partition_point(|&position| end(position) <= call.call_start_ns);
        let wait = after.checked_sub(1).map(|last| &source.host_waits_by_end[waits[last] as usize]);
        let until = wait
            .map_or(path.path_start_ns, |wait| wait.waiting_call.wait_end_ns)
            .max(path.path_start_ns);
        let calls = &mut self.launch_call_sums[call.thread_index as usize];
        let host = path.walk_reached_time_ns - until;
        let launching = calls.total_ns_of_calls_before(source, call.call_start_ns)
            - calls.total_ns_of_calls_before(source, until);
        let launching = launching.clamp(0, host.max(0));
        path.walk_back_and_add_segment(
            CriticalPathSegmentKind::HostTimeInLaunchCalls,
            path.walk_reached_time_ns - launching,
        );
        path.walk_back_and_add_segment(CriticalPathSegmentKind::HostBetweenLaunchCalls, until);
        let wait = wait?;
        path.walk_back_and_add_segment(
            CriticalPathSegmentKind::HostWaitReturnDelay,
            source.operations.operation_end_exclusive_ns(wait.operation_that_ended_wait),
        );
        Some(wait.operation_that_ended_wait)
    }
}
