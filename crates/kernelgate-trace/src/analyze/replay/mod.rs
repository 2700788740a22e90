//! Replays the recorded dependencies of a trace with other durations: a call starts after the
//! previous call of its thread; an operation starts after its launch, after the previous operation
//! of its stream, and after the operation of another stream that it seems to wait for; a wait ends
//! after the last operation that ended during it. The recorded time between these two events is
//! kept in a replay. A host that makes no recorded call and continues when the GPU has finished the
//! launched work also counts as waiting.
//!
//! A replay takes time proportional to the operations. [`RunningReplay`] goes operation by
//! operation, so that `job_replay` can join the ranks of a job. Absent: dependencies between ranks.

pub mod job_replay;

use std::cmp::Reverse;

use hashbrown::HashMap;

use crate::analyze::launches::calls::{LaunchCall, LaunchCalls};
use crate::analyze::operations::{AllOperations, OperationId, OperationKind};
use crate::analyze::time_order::SortedOperations;
use crate::analyze::timeline::span_union::UnitedSpans;
use crate::model::Trace;
use crate::model::packed_columns::{PackedColumn, PackedValue};

/// Number that stands for a missing operation or thread.
const NO_OPERATION: u32 = u32::MAX;
/// An operation that starts this long after its launch and after the previous operation of its
/// stream may wait for another stream.
const MIN_WAIT_FOR_STREAM_NS: i64 = 1_000;

#[derive(Debug, Clone, Copy)]
pub struct GpuWaitCall {
    pub thread: u32,
    /// Time at which the host entered the call, nanoseconds.
    pub start: i64,
    /// Time at which the call returned, nanoseconds.
    pub end: i64,
}

/// Time from an operation to the next one of its stream, if the next one was launched before the
/// first ended.
const NEXT_OPERATION_DELAY_NS: i64 = 1_000;
/// Time between two launch calls from which a host may have waited for the GPU in between.
const MIN_HOST_PAUSE_NS: i64 = 100_000;
/// Operations that a host that waits leaves in the queue at most.
const MAX_QUEUED_WHILE_WAITING: i64 = 2;
/// Smallest share of a host pause in which the GPU must work for the pause to count as a wait for
/// the GPU. In public traces the rule finds 92 % of 9,748 waits without their calls, with any part
/// from 0.7 to 0.95; 9 % of 17,722 pauses without a call that waits look alike.
const MIN_BUSY_SHARE_OF_WAIT: f64 = 0.9;

/// A time in which the host waits for the GPU.
#[derive(Debug, Clone, Copy)]
struct HostWait {
    call: GpuWaitCall,
    /// The operation that ended the wait; [`NO_OPERATION`] if the GPU had already finished.
    ended_by: OperationId,
    /// Whether the wait was recorded as a call, and is not only the time between two launches.
    recorded: bool,
}

/// Changed durations of operations, calls and waits for a replay.
pub struct ReplayChange<'a> {
    /// Function that gives an operation's replayed duration from its recorded one.
    pub length: &'a dyn Fn(OperationId, i64) -> i64,
    /// Whether launch calls take time in the replay.
    pub launches: bool,
    /// Whether the host waits for the GPU.
    pub waits: bool,
    /// How the host's time between its launch calls is replayed.
    pub host: ReplayedHostTime<'a>,
}

/// How the host's time is replayed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ReplayedHostTime<'a> {
    /// The host takes its recorded time between launch calls.
    Recorded,
    /// A part of the time between launch calls is left, 0 to 1.
    Scaled(f64),
    /// In these spans, which do not overlap, neither host code nor launch calls take time.
    WithoutPauses(&'a [(i64, i64)]),
}

impl ReplayedHostTime<'_> {
    /// Returns how many nanoseconds of a launch call, or of its part, lie in a pause.
    fn ns_in_pauses(&self, from: i64, to: i64) -> i64 {
        let Self::WithoutPauses(spans) = self else { return 0 };
        spans.iter().map(|&(start, end)| (end.min(to) - start.max(from)).max(0)).sum()
    }
}

/// Kind of one segment of the critical path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CriticalPathSegment {
    /// An operation runs.
    Operation(OperationId),
    /// Time from a launch call to the start of its operation.
    LaunchLatency,
    /// Time from the end of an operation to the start of the next operation that waits for it.
    BetweenOperations,
    /// Time in which the host makes launch calls.
    LaunchCalls,
    /// Time of the host between two launch calls.
    Host,
    /// Time from the end of an operation to the return of the host call that waits for it.
    WaitReturn,
    /// The trace does not show what the operation depends on.
    Unknown,
}

impl CriticalPathSegment {
    /// Label of the segment; an operation is printed by its own name.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Operation(_) => "operation",
            Self::LaunchLatency => "from launch call to start",
            Self::BetweenOperations => "between dependent operations",
            Self::LaunchCalls => "launch calls",
            Self::Host => "host between launch calls",
            Self::WaitReturn => "return from waits",
            Self::Unknown => "launches that the trace does not hold",
        }
    }
}

/// Dependencies among the operations and host calls of one trace.
pub struct OperationDependencies<'a> {
    all: AllOperations<'a>,
    launches: &'a LaunchCalls,
    /// Operations whose launch is recorded, in the order of their launch.
    launched: SortedOperations,
    /// Operations in the order of their start.
    started: SortedOperations,
    /// Waits of the host, in the order of their end.
    waits: Vec<HostWait>,
    /// Difference between the numbers of each operation and of the previous operation on its
    /// stream; 0 for a stream's first operation.
    step: PackedColumn<i64>,
    /// Difference between the numbers of each operation and of the operation on another stream that
    /// it seems to wait for; 0 if it waits for none.
    other: PackedColumn<i64>,
    threads: usize,
    span: (i64, i64),
}

impl<'a> OperationDependencies<'a> {
    /// Collects the dependencies of a trace's operations; `None` if it has no operations.
    pub fn new(trace: &'a Trace, launches: &'a LaunchCalls, waits: &[GpuWaitCall]) -> Option<Self> {
        let all = AllOperations::new(trace);
        let process = |id: OperationId| trace.process_of_place(all.place(id)) as usize;
        let time = |id: OperationId| launches.get(&all, id).map(|call| call.start);
        let launched = SortedOperations::operations_by_key(
            all.ids().filter(|&id| launches.has_launch(id)),
            time,
        );
        let started = SortedOperations::operations_by_key(all.ids(), |id| all.start(id));
        let ended = SortedOperations::operations_by_key(all.ids(), |id| all.end(id));
        let first = all.start(started.get(0)?);
        let last = all.end(ended.get(ended.len() - 1)?);
        let mut of = Self {
            all,
            launches,
            launched,
            started,
            waits: Vec::new(),
            step: PackedColumn::column_filled_with(all.len(), 0),
            other: PackedColumn::column_filled_with(all.len(), 0),
            threads: trace.threads.len(),
            span: (first, last),
        };
        of.find_stream_dependencies(trace, &ended, process);
        of.find_wait_dependencies(trace, waits, &ended, process);
        of.add_unrecorded_waits(trace, waits, &ended, process);
        of.waits.sort_by_key(|wait| wait.call.end);
        Some(of)
    }

    fn previous_on_stream(&self, id: OperationId) -> Option<OperationId> {
        operation_with_lower_id(id, self.step.at(id as usize))
    }

    /// Returns the operation of another stream for which an operation seems to wait.
    fn awaited_on_other_stream(&self, id: OperationId) -> Option<OperationId> {
        operation_with_lower_id(id, self.other.at(id as usize))
    }

    /// Finds the operations that others wait for: on their own stream, or on another stream.
    fn find_stream_dependencies(
        &mut self,
        trace: &Trace,
        ended: &SortedOperations,
        process: impl Fn(OperationId) -> usize,
    ) {
        let mut last_of_place = vec![NO_OPERATION; trace.places.len()];
        let mut last_of_process = vec![NO_OPERATION; trace.processes.len()];
        let mut devices: HashMap<(u32, u32), usize> = HashMap::new();
        let numbered = trace.places.iter().map(|place| {
            let new = devices.len();
            *devices.entry((place.process, place.device)).or_insert(new)
        });
        let device_of_place: Vec<usize> = numbered.collect();
        let mut last_of_device = vec![NO_OPERATION; devices.len()];
        let mut ended = ended.iter().peekable();
        for id in self.started.iter() {
            let start = self.all.start(id);
            while let Some(done) = ended.next_if(|&done| self.all.end(done) <= start) {
                last_of_process[process(done)] = done;
                last_of_device[device_of_place[self.all.place(done).0 as usize]] = done;
            }
            let place = self.all.place(id).0 as usize;
            let last = last_of_place[place];
            // An operation that runs during another one, such as a migration during a kernel, does
            // not wait for it.
            let inside = last != NO_OPERATION
                && start < self.all.end(last)
                && self.all.end(id) <= self.all.end(last);
            if !inside {
                let step = if last == NO_OPERATION { 0 } else { id.number() - last.number() };
                self.step.set_row(id as usize, step);
                last_of_place[place] = id;
            }
            let ready = self.ready_time_and_if_by_launch(id).map_or(i64::MIN, |(time, _)| time);
            if start.saturating_sub(ready) <= MIN_WAIT_FOR_STREAM_NS {
                continue;
            }
            // The wait's own device comes first, because a process may use several devices.
            let others = [last_of_device[device_of_place[place]], last_of_process[process(id)]];
            let waits_for = |&other: &OperationId| {
                other != NO_OPERATION
                    && other != id
                    && self.all.start(other) < start
                    && self.all.end(other) > ready
            };
            if let Some(other) = others.into_iter().find(waits_for) {
                self.other.set_row(id as usize, id.number() - other.number());
            }
        }
    }

    fn find_wait_dependencies(
        &mut self,
        trace: &Trace,
        calls: &[GpuWaitCall],
        ended: &SortedOperations,
        process: impl Fn(OperationId) -> usize,
    ) {
        let mut last_of_process = vec![NO_OPERATION; trace.processes.len()];
        let mut done = ended.iter().peekable();
        let mut calls: Vec<GpuWaitCall> = calls.to_vec();
        calls.sort_by_key(|call| call.end);
        for call in calls {
            while let Some(id) = done.next_if(|&id| self.all.end(id) <= call.end) {
                last_of_process[process(id)] = id;
            }
            let own = trace.threads[call.thread as usize].process as usize;
            let last = last_of_process[own];
            let waited = last != NO_OPERATION && self.all.end(last) > call.start;
            let ended_by = if waited { last } else { NO_OPERATION };
            self.waits.push(HostWait { call, ended_by, recorded: true });
        }
        let blocking = self.launched.iter().filter_map(|id| {
            let call = self
                .launch_call(id)
                .filter(|call| self.is_blocking_call(id, self.all.span(id), call))?;
            let LaunchCall { start, end, thread } = call;
            Some(HostWait {
                call: GpuWaitCall { thread, start, end },
                ended_by: id,
                recorded: true,
            })
        });
        let blocking: Vec<HostWait> = blocking.collect();
        self.waits.extend(blocking);
    }

    /// Times between two launch calls of a thread, without a wait, in which the GPU works most of
    /// the time and does nearly all that was launched.
    fn add_unrecorded_waits(
        &mut self,
        trace: &Trace,
        calls: &[GpuWaitCall],
        ended: &SortedOperations,
        process: impl Fn(OperationId) -> usize,
    ) {
        let mut pauses: Vec<GpuWaitCall> = Vec::new();
        let mut last_call = vec![i64::MIN; self.threads];
        for call in self.launched.iter().filter_map(|id| self.launch_call(id)) {
            let last = std::mem::replace(&mut last_call[call.thread as usize], call.end);
            if last != i64::MIN && call.start - last >= MIN_HOST_PAUSE_NS {
                pauses.push(GpuWaitCall { thread: call.thread, start: last, end: call.start });
            }
        }
        let mut waited: HashMap<u32, Vec<i64>> = HashMap::new();
        for call in calls {
            waited.entry(call.thread).or_default().push(call.end);
        }
        waited.values_mut().for_each(|ends| ends.sort_unstable());
        pauses.retain(|pause| {
            let ends = waited.get(&pause.thread).map_or(&[][..], |ends| ends);
            let next = ends.partition_point(|&end| end <= pause.start);
            ends.get(next).is_none_or(|&end| end > pause.end)
        });
        if pauses.is_empty() {
            return;
        }
        pauses.sort_by_key(|pause| pause.end);
        let mut worked = vec![UnitedSpans::default(); trace.processes.len()];
        for id in self.started.iter() {
            worked[process(id)].add((self.all.start(id), self.all.end(id)));
        }
        let processes = trace.processes.len();
        let (mut last_of_process, mut pending) =
            (vec![NO_OPERATION; processes], vec![0i64; processes]);
        let mut done = ended.iter().peekable();
        let mut launched = self.launched.iter().peekable();
        for call in pauses {
            let before =
                |id: &OperationId| self.launch_call(*id).is_some_and(|of| of.start < call.end);
            while let Some(id) = launched.next_if(before) {
                pending[process(id)] += 1;
            }
            while let Some(id) = done.next_if(|&id| self.all.end(id) <= call.end) {
                last_of_process[process(id)] = id;
                pending[process(id)] -= i64::from(self.launches.has_launch(id));
            }
            let own = trace.threads[call.thread as usize].process as usize;
            let last = last_of_process[own];
            // The host may go on a moment before the last operation ends.
            let next = done.peek().copied().filter(|&id| {
                let span = (self.all.start(id), self.all.end(id));
                process(id) == own
                    && span.0 < call.end
                    && last != NO_OPERATION
                    && span.1 - call.end < call.end - self.all.end(last)
            });
            #[allow(clippy::cast_precision_loss)]
            let [worked, whole] =
                [worked[own].covered_within((call.start, call.end)), call.end - call.start]
                    .map(|ns| ns as f64);
            let ended = last != NO_OPERATION && self.all.end(last) > call.start;
            if ended
                && pending[own] <= MAX_QUEUED_WHILE_WAITING
                && worked >= MIN_BUSY_SHARE_OF_WAIT * whole
            {
                self.waits.push(HostWait { call, ended_by: next.unwrap_or(last), recorded: false });
            }
        }
    }

    /// Whether a call lasts as long as what it launched, and so holds up the host: a copy from
    /// pageable memory returns when its last part is staged, a moment before its end. A kernel that
    /// is over before a long call returns did not hold it up.
    fn is_blocking_call(
        &self,
        id: OperationId,
        (start, end): (i64, i64),
        call: &LaunchCall,
    ) -> bool {
        let beside = call.end.min(end) - call.start.max(start);
        if self.all.kind_and_row(id).0 == OperationKind::Kernel
            && beside * 2 < call.end - call.start
        {
            return false;
        }
        end <= call.end || (end - start > MIN_WAIT_FOR_STREAM_NS && beside * 2 > end - start)
    }

    /// The earliest start of an operation that its launch call alone allows. A call that waits for
    /// its operation may also have waited for earlier operations.
    fn earliest_start_by_launch(
        &self,
        id: OperationId,
        span: (i64, i64),
        call: &LaunchCall,
    ) -> i64 {
        let at = if self.is_blocking_call(id, span, call) { call.start } else { call.end };
        at.min(span.0)
    }

    /// The call that launched an operation, if the call was recorded.
    fn launch_call(&self, id: OperationId) -> Option<LaunchCall> {
        self.launches.get(&self.all, id)
    }

    /// The launch call at a position of their order, with an operation that it launches.
    fn launch_call_at(&self, position: usize) -> Option<(OperationId, LaunchCall)> {
        let id = self.launched.get(position)?;
        Some((id, self.launch_call(id)?))
    }

    pub fn all_operations(&self) -> AllOperations<'a> {
        self.all
    }

    /// Returns the first start and the last end of the operations.
    pub fn span(&self) -> (i64, i64) {
        self.span
    }

    /// The time from which an operation could start, by its launch and its stream, and whether the
    /// launch decides.
    fn ready_time_and_if_by_launch(&self, id: OperationId) -> Option<(i64, bool)> {
        let span = self.all.span(id);
        let launch = self.launches.call_of_operation(span.0, id);
        let launch = launch.map(|call| self.earliest_start_by_launch(id, span, &call));
        let stream = self.previous_on_stream(id).map(|before| self.all.end(before).min(span.0));
        match (launch, stream) {
            (Some(launch), Some(stream)) => Some((launch.max(stream), launch > stream)),
            (Some(launch), None) => Some((launch, true)),
            (None, Some(stream)) => Some((stream, false)),
            (None, None) => None,
        }
    }

    /// Nanoseconds that the trace is shorter with a change; negative where it is longer.
    pub fn trace_gain_ns(&self, change: &ReplayChange<'_>) -> i64 {
        let mut replay = RunningReplay::new(self);
        let (mut first, mut last) = (i64::MAX, i64::MIN);
        while let Some(id) = replay.next() {
            let by = replay.replay_start(id, change);
            let (start, end) = self.all.span(id);
            first = first.min(start + by);
            let length = (change.length)(id, end - start);
            let by = by + length - (end - start);
            replay.set_end_difference(id, by);
            // An operation that takes no time any more ends nothing.
            if length > 0 || end == start {
                last = last.max(end + by);
            }
        }
        (self.span.1 - self.span.0) - (last.max(first) - first)
    }

    /// Visits the critical path, from its end back to its start: `each` gets segments that add up
    /// to the time from the first start to the last end.
    pub fn critical_path(&self, mut each: impl FnMut(CriticalPathSegment, i64)) {
        let mut walk = BackwardPathWalk::new(self);
        let mut path =
            CriticalPathWalk { first: self.span.0, at: self.span.1, segments: Vec::new() };
        let mut next = Some(self.last_operation());
        // Operations without a duration may lead back to each other.
        for _ in 0..self.all.len() {
            let Some(id) = next.filter(|_| path.at > path.first) else { break };
            path.walk_back_to(CriticalPathSegment::Operation(id), self.all.start(id));
            next = walk.step_back_from_operation(id, &mut path);
            path.segments.drain(..).for_each(|(segment, ns)| each(segment, ns));
        }
        path.walk_back_to(CriticalPathSegment::Unknown, self.span.0);
        path.segments.drain(..).for_each(|(segment, ns)| each(segment, ns));
    }

    /// Returns the time between an operation and the previous one on its stream, nanoseconds.
    pub fn gap_before(&self, id: OperationId) -> i64 {
        self.previous_on_stream(id)
            .map_or(0, |before| (self.all.start(id) - self.all.end(before)).max(0))
    }

    /// The operation of the trace with the latest end.
    pub fn last_operation(&self) -> OperationId {
        let last = self.started.iter().max_by_key(|&id| (self.all.end(id), Reverse(id)));
        last.expect("there are operations")
    }
}

/// The operation that a number of operations is before another one; none before itself.
fn operation_with_lower_id(id: OperationId, step: i64) -> Option<OperationId> {
    (step != 0).then(|| OperationId::from_number(id.number() - step))
}

/// A running replay: the differences between replayed and recorded times.
pub struct RunningReplay<'d, 'a> {
    of: &'d OperationDependencies<'a>,
    /// Replayed time at which the last call of each thread has returned.
    thread: Vec<i64>,
    /// Recorded end of the last call of each thread; empty where the host takes its recorded time.
    called: Vec<i64>,
    /// By operation, of its launch until it starts, of its end from then on.
    by: PackedColumn<i64>,
    /// Thread and start of the last launch call: a graph's call launches several operations.
    last_call: (u32, i64),
    next_call: Option<(OperationId, LaunchCall)>,
    /// Positions in the operations by launch and by start, and in the waits.
    at: (usize, usize, usize),
}

impl<'d, 'a> RunningReplay<'d, 'a> {
    /// Starts a replay of a trace's dependencies.
    pub fn new(of: &'d OperationDependencies<'a>) -> Self {
        Self {
            of,
            thread: vec![0; of.threads],
            called: vec![i64::MIN; of.threads],
            by: PackedColumn::column_filled_with(of.all.len(), 0),
            last_call: (NO_OPERATION, i64::MIN),
            next_call: of.launch_call_at(0),
            at: (0, 0, 0),
        }
    }

    /// The next operation in order of recorded starts.
    pub fn next(&self) -> Option<OperationId> {
        self.of.started.get(self.at.1)
    }

    /// Replays the calls before the next operation and its start; returns the difference of its
    /// start. The end of an operation is set before the operations that depend on it are replayed.
    pub fn replay_start(&mut self, id: OperationId, change: &ReplayChange<'_>) -> i64 {
        let source = self.of;
        let span = source.all.span(id);
        let start = span.0;
        loop {
            let wait = source.waits.get(self.at.2);
            let returned = wait.map_or(i64::MAX, |wait| wait.call.end);
            match (self.next_call, wait) {
                (Some((launched, call)), _) if call.start <= start && call.start < returned => {
                    self.at.0 += 1;
                    self.next_call = source.launch_call_at(self.at.0);
                    self.call(launched, &call, change);
                }
                (_, Some(wait)) if returned <= start => {
                    self.at.2 += 1;
                    self.replay_wait(wait, change);
                }
                _ => break,
            }
        }
        self.at.1 += 1;
        let launch = source
            .launches
            .call_of_operation(start, id)
            .map(|call| source.earliest_start_by_launch(id, span, &call));
        let others = [source.previous_on_stream(id), source.awaited_on_other_stream(id)]
            .map(|other| other.map(|other| (other, source.all.end(other).min(start))));
        let others = || others.iter().flatten();
        let ended = others().map(|&(_, end)| end).max();
        let Some(recorded) = launch.max(ended) else { return 0 };
        // If the launch decided the start, its recorded latency does not delay the replayed
        // operation further.
        let latency = start - recorded;
        let between = if launch > ended { latency.min(NEXT_OPERATION_DELAY_NS) } else { latency };
        let launched = launch.map(|time| time + self.by.at(id as usize) + latency);
        let ready = others().map(|&(other, end)| end + self.by.at(other as usize) + between).max();
        launched.max(ready).map_or(0, |replayed| replayed - start)
    }

    pub fn set_end_difference(&mut self, id: OperationId, by: i64) {
        self.by.set_row(id as usize, by);
    }

    fn call(&mut self, id: OperationId, call: &LaunchCall, change: &ReplayChange<'_>) {
        let thread = call.thread as usize;
        let removed = |from: i64| match change.launches {
            true => change.host.ns_in_pauses(from, call.end),
            false => (call.end - from).max(0),
        };
        if self.last_call != (call.thread, call.start) {
            self.last_call = (call.thread, call.start);
            self.replay_host_time(thread, call.start, change);
            self.thread[thread] -= removed(call.start);
            self.called[thread] = self.called[thread].max(call.end);
        }
        let start = self.of.all.start(id);
        // If clocks disagree, an operation may start before its launch call; it was replayed
        // already.
        if start >= call.start {
            // A start before the call returns was delayed by a part of the call only.
            self.by.set_row(id as usize, self.thread[thread] + removed(start));
        }
    }

    /// Replays the host's own time from its last call to a given time.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    fn replay_host_time(&mut self, thread: usize, until: i64, change: &ReplayChange<'_>) {
        let since = self.called[thread];
        self.thread[thread] -= match change.host {
            ReplayedHostTime::Scaled(left) if since != i64::MIN && until > since => {
                ((until - since) as f64 * (1.0 - left)).round() as i64
            }
            ReplayedHostTime::Scaled(_) | ReplayedHostTime::Recorded => 0,
            ReplayedHostTime::WithoutPauses(_) => change.host.ns_in_pauses(since, until),
        };
    }

    fn replay_wait(&mut self, wait: &HostWait, change: &ReplayChange<'_>) {
        let GpuWaitCall { thread, start, end } = wait.call;
        let index = thread as usize;
        if !wait.recorded && matches!(change.host, ReplayedHostTime::Scaled(_)) {
            return;
        }
        self.replay_host_time(index, start, change);
        self.called[index] = self.called[index].max(end);
        let not_before = self.thread[index] + start - end;
        self.thread[index] = match (wait.ended_by, change.waits || !wait.recorded) {
            (_, false) => not_before,
            (NO_OPERATION, true) => self.thread[index],
            // The call returns as long after (or before) the end of the operation as it was
            // recorded, and not before it was entered.
            (ended_by, true) => {
                let paused = change.host.ns_in_pauses(self.of.all.end(ended_by), end);
                (self.by.at(ended_by as usize) - paused).max(not_before)
            }
        };
    }
}

/// The critical path while it is walked back.
pub struct CriticalPathWalk {
    /// Beginning of the path.
    pub first: i64,
    /// The time that the walk has reached.
    pub at: i64,
    /// Segments of the critical path that were found so far.
    pub segments: Vec<(CriticalPathSegment, i64)>,
}

impl CriticalPathWalk {
    /// Moves the walk back to an earlier time.
    pub fn walk_back_to(&mut self, segment: CriticalPathSegment, to: i64) {
        let to = to.max(self.first);
        if to < self.at {
            self.segments.push((segment, self.at - to));
            self.at = to;
        }
    }
}

/// A walk back along the critical path, from an operation to the one that it waited for.
pub struct BackwardPathWalk<'d, 'a> {
    of: &'d OperationDependencies<'a>,
    /// Positions of the waits of each thread, in the order of their end.
    waits: Vec<Vec<u32>>,
    launches: Vec<LaunchCallSums>,
}

/// Launch calls of a thread with the sum of their durations up to a position: the walk goes back in
/// time, and the sum follows.
#[derive(Debug, Clone, Default)]
struct LaunchCallSums {
    /// One operation of each launch call, in the order of the calls.
    calls: PackedColumn<OperationId>,
    /// The place.
    at: usize,
    /// Nanoseconds of all calls before this position.
    sum: i64,
}

impl LaunchCallSums {
    /// Nanoseconds of the calls that start before a time.
    fn call_ns_before(&mut self, of: &OperationDependencies<'_>, time: i64) -> i64 {
        let call = |at: usize| self.calls.get(at).and_then(|id| of.launch_call(id));
        while let Some(call) = call(self.at).filter(|call| call.start < time) {
            self.sum += call.end - call.start;
            self.at += 1;
        }
        while let Some(last) = self.at.checked_sub(1)
            && let Some(call) = call(last).filter(|call| call.start >= time)
        {
            self.sum -= call.end - call.start;
            self.at = last;
        }
        self.sum
    }
}

impl<'d, 'a> BackwardPathWalk<'d, 'a> {
    /// Sorts the launch calls of a trace by thread.
    pub fn new(of: &'d OperationDependencies<'a>) -> Self {
        let mut waits = vec![Vec::new(); of.threads];
        for (position, wait) in
            (0u32..).zip(&of.waits).filter(|(_, of)| of.ended_by != NO_OPERATION)
        {
            waits[wait.call.thread as usize].push(position);
        }
        let mut launches = vec![LaunchCallSums::default(); of.threads];
        let mut last = vec![i64::MIN; of.threads];
        for (id, call) in of.launched.iter().filter_map(|id| Some((id, of.launch_call(id)?))) {
            // One launch call of a graph launches several operations.
            let last = &mut last[call.thread as usize];
            if std::mem::replace(last, call.start) != call.start {
                launches[call.thread as usize].calls.push(id);
            }
        }
        Self { of, waits, launches }
    }

    /// Goes back from the start of an operation to the end of the operation that it waited for.
    pub fn step_back_from_operation(
        &mut self,
        id: OperationId,
        path: &mut CriticalPathWalk,
    ) -> Option<OperationId> {
        let source = self.of;
        match (source.ready_time_and_if_by_launch(id), source.awaited_on_other_stream(id)) {
            (_, Some(other)) => {
                path.walk_back_to(CriticalPathSegment::BetweenOperations, source.all.end(other));
                Some(other)
            }
            (Some((ready, false)), None) => {
                path.walk_back_to(CriticalPathSegment::BetweenOperations, ready);
                source.previous_on_stream(id)
            }
            (Some((ready, true)), None) => {
                path.walk_back_to(CriticalPathSegment::LaunchLatency, ready);
                let call = source.launch_call(id)?;
                path.walk_back_to(CriticalPathSegment::LaunchCalls, call.start);
                self.step_back_from_call(call, path)
            }
            (None, None) => None,
        }
    }

    /// Goes back from a launch call to the last wait of its thread, and to the operation that ended
    /// that wait.
    fn step_back_from_call(
        &mut self,
        call: LaunchCall,
        path: &mut CriticalPathWalk,
    ) -> Option<OperationId> {
        let source = self.of;
        let waits = &self.waits[call.thread as usize];
        let end = |position: u32| source.waits[position as usize].call.end;
        let after = waits.partition_point(|&position| end(position) <= call.start);
        let wait = after.checked_sub(1).map(|last| &source.waits[waits[last] as usize]);
        let until = wait.map_or(path.first, |wait| wait.call.end).max(path.first);
        let calls = &mut self.launches[call.thread as usize];
        let host = path.at - until;
        let launching =
            calls.call_ns_before(source, call.start) - calls.call_ns_before(source, until);
        let launching = launching.clamp(0, host.max(0));
        path.walk_back_to(CriticalPathSegment::LaunchCalls, path.at - launching);
        path.walk_back_to(CriticalPathSegment::Host, until);
        let wait = wait?;
        path.walk_back_to(CriticalPathSegment::WaitReturn, source.all.end(wait.ended_by));
        Some(wait.ended_by)
    }
}
