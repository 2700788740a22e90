//! The dependencies of all ranks of a job, replayed together: a collective ends, on every rank, its
//! transfer after its last rank has arrived.
//!
//! Ranks go on in the order of their recorded starts in the job's time, so that all ranks have
//! arrived at a collective before anything behind it is replayed. If the clocks are not aligned
//! well enough, operations behind the collective move with the arrival of their own rank. This
//! module does not decide which operations belong to one collective.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hashbrown::HashMap;

use crate::analyze::operations::OperationId;
use crate::analyze::replay::{
    BackwardPathWalk, CriticalPathSegment, CriticalPathWalk, OperationDependencies, ReplayChange,
    RunningReplay,
};

/// The operation of one rank in a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectiveMember {
    /// Index into the traces of the job.
    pub trace: usize,
    pub operation: OperationId,
    /// When the operation starts, in the job's time.
    pub start: i64,
    /// When the operation ends, in the job's time.
    pub end: i64,
}

/// Operations of all ranks that take part in one collective.
pub type CollectiveMembers = Vec<CollectiveMember>;

/// Dependencies among the operations of all ranks of a job, for replays.
pub struct JobReplay<'a> {
    traces: Vec<OperationDependencies<'a>>,
    /// Converts a time of a trace's clock to the job's time.
    common: &'a dyn Fn(usize, i64) -> i64,
    collectives: Vec<CollectiveMembers>,
    /// The collective that each operation belongs to; one map for each trace.
    of_operation: Vec<HashMap<OperationId, usize>>,
}

/// State of a collective in a replay: how many ranks have not reached it, and when the latest did.
#[derive(Clone, Copy)]
struct PendingArrivals {
    missing: usize,
    /// Replayed arrival time of the last rank that arrived so far.
    ready: i64,
}

impl<'a> JobReplay<'a> {
    /// Joins the traces of a job by their collectives.
    pub fn new(
        traces: Vec<OperationDependencies<'a>>,
        collectives: Vec<CollectiveMembers>,
        common: &'a dyn Fn(usize, i64) -> i64,
    ) -> Self {
        let mut of_operation = vec![HashMap::new(); traces.len()];
        for (number, members) in collectives.iter().enumerate() {
            for member in members {
                of_operation[member.trace].insert(member.operation, number);
            }
        }
        Self { traces, common, collectives, of_operation }
    }

    /// First and last time of each trace, in the job's time.
    fn trace_spans(&self) -> impl Iterator<Item = (i64, i64)> {
        self.traces.iter().enumerate().map(|(trace, of)| {
            let (start, end) = of.span();
            ((self.common)(trace, start), (self.common)(trace, end))
        })
    }

    /// The first start and the last end of the collective on any rank, in the job's time.
    fn first_start_to_last_end(&self) -> (i64, i64) {
        self.trace_spans().reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).unwrap_or((0, 0))
    }

    /// The time from which all ranks are recorded, and the last end on any rank, in the job's time.
    pub fn span_recorded_on_all_ranks(&self) -> (i64, i64) {
        let (start, end) =
            self.trace_spans().reduce(|a, b| (a.0.max(b.0), a.1.max(b.1))).unwrap_or((0, 0));
        (start.min(end), end)
    }

    /// When the last rank arrived at a collective, and which.
    fn last_rank_arrival(members: &[CollectiveMember]) -> (i64, &CollectiveMember) {
        let last = members.iter().max_by_key(|member| (member.start, member.trace));
        let last = last.expect("a collective has ranks");
        (last.start, last)
    }

    /// Nanoseconds that the job is shorter with a change for each trace.
    pub fn job_gain_ns(&self, changes: &[ReplayChange<'_>]) -> i64 {
        let mut replays: Vec<RunningReplay<'_, '_>> =
            self.traces.iter().map(RunningReplay::new).collect();
        let mut arrivals: Vec<PendingArrivals> = self
            .collectives
            .iter()
            .map(|members| PendingArrivals { missing: members.len(), ready: i64::MIN })
            .collect();
        let next = |replay: &RunningReplay<'_, '_>, trace: usize| {
            let id = replay.next()?;
            let start = self.traces[trace].all_operations().start(id);
            Some(Reverse(((self.common)(trace, start), trace, id)))
        };
        let mut order: BinaryHeap<_> =
            replays.iter().enumerate().filter_map(|(trace, of)| next(of, trace)).collect();
        let (mut first, mut last) = (i64::MAX, i64::MIN);
        while let Some(Reverse((start, trace, id))) = order.pop() {
            let by = replays[trace].replay_start(id, &changes[trace]);
            first = first.min(start + by);
            if let Some(&number) = self.of_operation[trace].get(&id) {
                replays[trace].set_end_difference(id, by);
                let arrived = &mut arrivals[number];
                arrived.missing -= 1;
                arrived.ready = arrived.ready.max(start + by);
                if arrived.missing == 0 {
                    let ends = self.set_replayed_ends_of_collective(
                        number,
                        arrived.ready,
                        changes,
                        &mut replays,
                    );
                    last = last.max(ends);
                }
            } else {
                let all = self.traces[trace].all_operations();
                let length = all.length(id);
                let by = by + (changes[trace].length)(id, length) - length;
                replays[trace].set_end_difference(id, by);
                last = last.max((self.common)(trace, all.end(id)) + by);
            }
            order.extend(next(&replays[trace], trace));
        }
        let (start, end) = self.first_start_to_last_end();
        (end - start) - (last - first)
    }

    /// Sets the replayed ends of a collective at which all ranks have arrived; returns the latest of
    /// these ends.
    fn set_replayed_ends_of_collective(
        &self,
        number: usize,
        ready: i64,
        changes: &[ReplayChange<'_>],
        replays: &mut [RunningReplay<'_, '_>],
    ) -> i64 {
        let members = &self.collectives[number];
        let (recorded, _) = Self::last_rank_arrival(members);
        let mut last = i64::MIN;
        for member in members {
            let transfer = (member.end - recorded).max(0);
            let shorter = (changes[member.trace].length)(member.operation, transfer);
            let by = ready - recorded + shorter - transfer;
            replays[member.trace].set_end_difference(member.operation, by);
            last = last.max(member.end + by);
        }
        last
    }

    /// The critical path, from its end back to when all ranks are recorded: the trace and length of
    /// each segment.
    pub fn critical_path(&self) -> Vec<(usize, CriticalPathSegment, i64)> {
        let end = |trace: &usize| (self.common)(*trace, self.traces[*trace].span().1);
        let Some(mut trace) = (0..self.traces.len()).max_by_key(end) else { return Vec::new() };
        let mut walks: Vec<BackwardPathWalk<'_, '_>> =
            self.traces.iter().map(BackwardPathWalk::new).collect();
        let mut segments = Vec::new();
        let mut next = Some(self.traces[trace].last_operation());
        let mut at = self.traces[trace].span().1;
        // Operations without a duration may lead back to each other.
        let steps: usize = self.traces.iter().map(|of| of.all_operations().len()).sum();
        for _ in 0..steps {
            let Some(id) = next else { break };
            let all = self.traces[trace].all_operations();
            let mut path =
                CriticalPathWalk { first: self.traces[trace].span().0, at, segments: Vec::new() };
            let last = self.of_operation[trace].get(&id).map(|&number| {
                let (ready, last) = Self::last_rank_arrival(&self.collectives[number]);
                (ready, *last)
            });
            next = match last {
                Some((ready, last)) if last.trace != trace => {
                    // The path goes back over the transfer, then to the rank that arrived last.
                    let transfer = (self.common)(trace, all.end(id)) - ready;
                    path.walk_back_to(
                        CriticalPathSegment::Operation(id),
                        (all.end(id) - transfer).min(path.at),
                    );
                    segments.extend(path.segments.drain(..).map(|(of, ns)| (trace, of, ns)));
                    trace = last.trace;
                    let start = self.traces[trace].all_operations().start(last.operation);
                    path =
                        CriticalPathWalk { first: self.traces[trace].span().0, at: start, ..path };
                    walks[trace].step_back_from_operation(last.operation, &mut path)
                }
                _ => {
                    path.walk_back_to(CriticalPathSegment::Operation(id), all.start(id));
                    walks[trace].step_back_from_operation(id, &mut path)
                }
            };
            at = path.at;
            segments.extend(path.segments.into_iter().map(|(of, ns)| (trace, of, ns)));
            if at <= self.traces[trace].span().0 {
                break;
            }
        }
        let (start, end) = self.span_recorded_on_all_ranks();
        let rest = (self.common)(trace, at) - start;
        if rest > 0 {
            segments.push((trace, CriticalPathSegment::Unknown, rest));
        }
        let mut left = end - start;
        for (.., ns) in &mut segments {
            *ns = (*ns).min(left);
            left -= *ns;
        }
        segments.retain(|(.., ns)| *ns > 0);
        segments
    }
}
