//! The recorded dependencies of a trace, replayed with other lengths: a call starts behind the one
//! before it on its thread, an operation behind its launch, the operation before it on its stream,
//! and the one on another stream whose end it seems to wait for; a wait ends behind the last
//! operation that ended in it. The time between stays as long as it was recorded.
//!
//! A replay takes time proportional to the operations. Absent: dependencies between ranks.

use std::cmp::Reverse;

use hashbrown::HashMap;

use super::operations::{AllOperations, OperationId};
use crate::model::Trace;

/// No operation.
const NONE: u32 = u32::MAX;
/// An operation that starts so long after its launch and its stream's last operation may wait for
/// another stream.
const WAITS_NS: i64 = 1_000;

/// The call that launched an operation.
#[derive(Debug, Clone, Copy)]
pub struct LaunchCall {
    /// When it was entered.
    pub start: i64,
    /// When it returned.
    pub end: i64,
    /// The thread.
    pub thread: u32,
}

/// A call that waits for the GPU.
#[derive(Debug, Clone, Copy)]
pub struct WaitCall {
    /// The thread.
    pub thread: u32,
    /// When it was entered.
    pub start: i64,
    /// When it returned.
    pub end: i64,
}

/// A wait and the operation that ended it.
#[derive(Debug, Clone, Copy)]
struct Wait {
    call: WaitCall,
    ended_by: OperationId,
}

/// Other lengths for a replay.
pub struct Change<'a> {
    /// The length of an operation, from its recorded one.
    pub length: &'a dyn Fn(OperationId, i64) -> i64,
    /// The length of a launch call, from its recorded one.
    pub launch: &'a dyn Fn(i64) -> i64,
    /// Whether the host waits for the GPU.
    pub waits: bool,
}

/// A segment of the critical path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Segment {
    /// An operation runs.
    Operation(OperationId),
    /// From the launch call to the start of its operation.
    LaunchLatency,
    /// From the end of an operation to the start of the next one that waits for it.
    BetweenOperations,
    /// Launch calls of the host.
    LaunchCalls,
    /// The host between launch calls.
    Host,
    /// From the end of an operation to the return of the call that waits for it.
    WaitReturn,
    /// Nothing is recorded that the operation depends on.
    Unknown,
}

/// The dependencies of a trace.
pub struct Dependencies<'a> {
    all: AllOperations<'a>,
    /// By operation; the thread is [`NONE`] where the call is not recorded.
    launches: Vec<Option<LaunchCall>>,
    /// Operations whose launch is recorded, in the order of their launch.
    launched: Vec<OperationId>,
    /// Operations in the order of their start.
    started: Vec<OperationId>,
    /// In the order of their end.
    waits: Vec<Wait>,
    /// The operation before each one on its stream.
    before: Vec<OperationId>,
    /// The operation of another stream that one seems to wait for.
    other: HashMap<OperationId, OperationId>,
    threads: usize,
    span: (i64, i64),
}

impl<'a> Dependencies<'a> {
    /// Collects the dependencies; `None` of a trace without operations.
    pub fn new(
        trace: &'a Trace,
        launch: impl Fn(OperationId) -> Option<LaunchCall>,
        waits: &[WaitCall],
    ) -> Option<Self> {
        let all = AllOperations::of(trace);
        let process = |id: OperationId| trace.process_of(all.place(id)) as usize;
        let launches: Vec<Option<LaunchCall>> = all.ids().map(launch).collect();
        let sorted = |mut ids: Vec<OperationId>, key: &dyn Fn(OperationId) -> i64| {
            if !ids.is_sorted_by_key(|&id| key(id)) {
                ids.sort_by_key(|&id| key(id));
            }
            ids
        };
        let time = |id: OperationId| launches[id as usize].map_or(i64::MAX, |of| of.start);
        let launched = all.ids().filter(|&id| launches[id as usize].is_some()).collect();
        let launched = sorted(launched, &time);
        let started = sorted(all.ids().collect(), &|id| all.start(id));
        let ended = sorted(all.ids().collect(), &|id| all.end(id));
        let first = all.start(*started.first()?);
        let last = all.end(*ended.last()?);
        let mut of = Self {
            all,
            launches,
            launched,
            started,
            waits: Vec::new(),
            before: vec![NONE; all.len()],
            other: HashMap::new(),
            threads: trace.threads.len(),
            span: (first, last),
        };
        of.streams(trace, &ended, process);
        of.waits(trace, waits, &ended, process);
        Some(of)
    }

    /// The operations that others wait for: on their stream, or on another one.
    fn streams(
        &mut self,
        trace: &Trace,
        ended: &[OperationId],
        process: impl Fn(OperationId) -> usize,
    ) {
        let mut last_of_place = vec![NONE; trace.places.len()];
        let mut last_of_process = vec![NONE; trace.processes.len()];
        let mut ended = ended.iter().copied().peekable();
        for &id in &self.started {
            let start = self.all.start(id);
            while let Some(done) = ended.next_if(|&done| self.all.end(done) <= start) {
                last_of_process[process(done)] = done;
            }
            let place = self.all.place(id).0 as usize;
            self.before[id as usize] = last_of_place[place];
            last_of_place[place] = id;
            let other = last_of_process[process(id)];
            if other != NONE && other != id {
                let ready = self.ready(id).map_or(i64::MIN, |(time, _)| time);
                let end = self.all.end(other);
                let earlier = self.all.start(other) < start;
                if earlier && start.saturating_sub(ready) > WAITS_NS && end > ready {
                    self.other.insert(id, other);
                }
            }
        }
    }

    fn waits(
        &mut self,
        trace: &Trace,
        calls: &[WaitCall],
        ended: &[OperationId],
        process: impl Fn(OperationId) -> usize,
    ) {
        let mut last_of_process = vec![NONE; trace.processes.len()];
        let mut done = ended.iter().copied().peekable();
        let mut calls: Vec<WaitCall> = calls.to_vec();
        calls.sort_by_key(|call| call.end);
        for call in calls {
            while let Some(id) = done.next_if(|&id| self.all.end(id) <= call.end) {
                last_of_process[process(id)] = id;
            }
            let own = trace.threads[call.thread as usize].process as usize;
            let last = last_of_process[own];
            if last != NONE && self.all.end(last) > call.start {
                self.waits.push(Wait { call, ended_by: last });
            }
        }
        // Calls that return behind the end of what they launched hold up the host, too.
        let blocking = self.launched.iter().filter_map(|&id| {
            let LaunchCall { start, end, thread } = self.launches[id as usize]?;
            let call = WaitCall { thread, start, end };
            (self.all.end(id) <= end).then_some(Wait { call, ended_by: id })
        });
        let blocking: Vec<Wait> = blocking.collect();
        if !blocking.is_empty() {
            self.waits.extend(blocking);
            self.waits.sort_by_key(|wait| wait.call.end);
        }
    }

    /// The time from which an operation could start, by its launch and its stream, and whether the
    /// launch decides.
    fn ready(&self, id: OperationId) -> Option<(i64, bool)> {
        let start = self.all.start(id);
        let launch = self.launches[id as usize].map(|of| of.end.min(start));
        let before = self.before[id as usize];
        let stream = (before != NONE).then(|| self.all.end(before).min(start));
        match (launch, stream) {
            (Some(launch), Some(stream)) => Some((launch.max(stream), launch > stream)),
            (Some(launch), None) => Some((launch, true)),
            (None, Some(stream)) => Some((stream, false)),
            (None, None) => None,
        }
    }

    /// Nanoseconds that the trace is shorter with a change; negative where it is longer.
    pub fn gain(&self, change: &Change<'_>) -> i64 {
        let mut replay = Replay {
            thread: vec![0; self.threads],
            launch: vec![0; self.all.len()],
            end: vec![0; self.all.len()],
            last_call: (NONE, i64::MIN),
        };
        let mut launched = self.launched.iter().copied().peekable();
        let mut waits = self.waits.iter().peekable();
        let mut latest = i64::MIN;
        let call_start = |id: OperationId| self.launches[id as usize].map_or(0, |of| of.start);
        for &id in &self.started {
            let start = self.all.start(id);
            loop {
                let call = launched.peek().map_or(i64::MAX, |&id| call_start(id));
                let wait = waits.peek().map_or(i64::MAX, |wait| wait.call.end);
                if call <= start && call <= wait {
                    launched.next().into_iter().for_each(|id| replay.launch(self, id, change));
                } else if wait <= start {
                    waits.next().into_iter().for_each(|wait| replay.wait(self, wait, change));
                } else {
                    break;
                }
            }
            latest = latest.max(replay.start(self, id, change));
        }
        self.span.1 - latest
    }

    /// The critical path, from its end back to its start: segments that add up to the time from the
    /// first start to the last end.
    pub fn critical_path(&self) -> Vec<(Segment, i64)> {
        let mut path = Path { first: self.span.0, at: self.span.1, segments: Vec::new() };
        let hosts = Hosts::new(self);
        let last = self.started.iter().copied().max_by_key(|&id| (self.all.end(id), Reverse(id)));
        let mut next = last;
        while let Some(id) = next.filter(|_| path.at > path.first) {
            path.back(Segment::Operation(id), self.all.start(id));
            let other = self.other.get(&id);
            next = match (self.ready(id), other) {
                (_, Some(&other)) => {
                    path.back(Segment::BetweenOperations, self.all.end(other));
                    Some(other)
                }
                (Some((ready, false)), None) => {
                    path.back(Segment::BetweenOperations, ready);
                    Some(self.before[id as usize])
                }
                (Some((ready, true)), None) => {
                    path.back(Segment::LaunchLatency, ready);
                    let call = self.launches[id as usize].expect("the launch decides");
                    path.back(Segment::LaunchCalls, call.start);
                    hosts.back(self, call, &mut path)
                }
                (None, None) => None,
            };
        }
        path.back(Segment::Unknown, self.span.0);
        path.segments
    }
}

/// Differences between replayed and recorded times.
struct Replay {
    /// By thread, behind its last call.
    thread: Vec<i64>,
    /// By operation, of its launch.
    launch: Vec<i64>,
    /// By operation, of its end.
    end: Vec<i64>,
    /// Thread and start of the last launch call: a graph's call launches several operations.
    last_call: (u32, i64),
}

impl Replay {
    fn launch(&mut self, of: &Dependencies<'_>, id: OperationId, change: &Change<'_>) {
        let Some(call) = of.launches[id as usize] else { return };
        let thread = &mut self.thread[call.thread as usize];
        if self.last_call != (call.thread, call.start) {
            self.last_call = (call.thread, call.start);
            let recorded = call.end - call.start;
            *thread += (change.launch)(recorded) - recorded;
        }
        self.launch[id as usize] = *thread;
    }

    fn wait(&mut self, of: &Dependencies<'_>, wait: &Wait, change: &Change<'_>) {
        let WaitCall { thread, start, end } = wait.call;
        let thread = &mut self.thread[thread as usize];
        let ended = of.all.end(wait.ended_by);
        let not_before = *thread + start - end;
        *thread = match change.waits {
            // The call returns as long after the operation as it was recorded, and not before it
            // was entered.
            true => self.end[wait.ended_by as usize].max(not_before),
            false => not_before + (end - ended.max(start)),
        };
    }

    /// The replayed end of an operation.
    fn start(&mut self, of: &Dependencies<'_>, id: OperationId, change: &Change<'_>) -> i64 {
        let (start, end) = (of.all.start(id), of.all.end(id));
        let mut recorded = i64::MIN;
        let mut replayed = i64::MIN;
        let mut depends = |time: i64, by: i64| {
            recorded = recorded.max(time.min(start));
            replayed = replayed.max(time.min(start) + by);
        };
        if let Some(call) = of.launches[id as usize] {
            depends(call.end, self.launch[id as usize]);
        }
        let before = of.before[id as usize];
        for other in [before, of.other.get(&id).copied().unwrap_or(NONE)] {
            if other != NONE {
                depends(of.all.end(other), self.end[other as usize]);
            }
        }
        let by = if recorded == i64::MIN { 0 } else { replayed - recorded };
        let length = end - start;
        self.end[id as usize] = by + (change.length)(id, length) - length;
        end + self.end[id as usize]
    }
}

/// The critical path while it is walked back.
struct Path {
    first: i64,
    at: i64,
    segments: Vec<(Segment, i64)>,
}

impl Path {
    /// Goes back to a time.
    fn back(&mut self, segment: Segment, to: i64) {
        let to = to.max(self.first);
        if to < self.at {
            self.segments.push((segment, self.at - to));
            self.at = to;
        }
    }
}

/// Calls by thread.
struct Hosts {
    /// By thread, waits in the order of their end.
    waits: Vec<Vec<Wait>>,
    /// By thread, start of each launch call in order, and the length of all before it.
    launches: Vec<Vec<(i64, i64)>>,
}

impl Hosts {
    fn new(of: &Dependencies<'_>) -> Self {
        let mut waits = vec![Vec::new(); of.threads];
        of.waits.iter().for_each(|wait| waits[wait.call.thread as usize].push(*wait));
        let mut launches: Vec<Vec<(i64, i64)>> = vec![Vec::new(); of.threads];
        let mut sum = vec![0; of.threads];
        for call in of.launched.iter().filter_map(|&id| of.launches[id as usize]) {
            let calls = &mut launches[call.thread as usize];
            if calls.last().is_none_or(|&(start, _)| start != call.start) {
                calls.push((call.start, sum[call.thread as usize]));
                sum[call.thread as usize] += call.end - call.start;
            }
        }
        Self { waits, launches }
    }

    /// Goes back from a launch call to the last wait of its thread, and to the operation that ended
    /// it.
    fn back(
        &self,
        of: &Dependencies<'_>,
        call: LaunchCall,
        path: &mut Path,
    ) -> Option<OperationId> {
        let waits = &self.waits[call.thread as usize];
        let after = waits.partition_point(|wait| wait.call.end <= call.start);
        let wait = after.checked_sub(1).map(|last| waits[last]);
        let until = wait.map_or(path.first, |wait| wait.call.end).max(path.first);
        let calls = &self.launches[call.thread as usize];
        let sum_before = |time: i64| {
            let at = calls.partition_point(|&(start, _)| start < time);
            calls.get(at).map_or(0, |&(_, sum)| sum)
        };
        let host = path.at - until;
        let launching = (sum_before(call.start) - sum_before(until)).clamp(0, host.max(0));
        path.back(Segment::LaunchCalls, path.at - launching);
        path.back(Segment::Host, until);
        let wait = wait?;
        path.back(Segment::WaitReturn, of.all.end(wait.ended_by));
        Some(wait.ended_by)
    }
}
