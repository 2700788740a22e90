//! Replays the dependencies of all ranks of a job together: on every rank a collective ends its
//! transfer time after the last rank has arrived.
//!
//! Ranks are replayed in order of the recorded starts in the job's common time, so that all ranks
//! reach a collective before any later operation is replayed. If the ranks' clocks are not aligned
//! well enough, operations after a collective are shifted only by the arrival of their own rank.
//! Callers decide which operations of the ranks belong to one collective.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hashbrown::HashMap;

use crate::analyze::operations::GpuOperationId;
use crate::analyze::replay::{
    CriticalPathBackwardWalk, CriticalPathSegmentKind, CriticalPathWalkState, ReplayChange,
    ReplayInProgress, TraceDependencies,
};

/// The operation with which one rank takes part in a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectiveOfOneRank {
    /// Index of the rank's trace among the traces of the job.
    pub trace_index: usize,
    pub operation: GpuOperationId,
    /// Start of the operation in the job's common time, nanoseconds.
    pub start_in_job_time_ns: i64,
    /// End of the operation in the job's common time, nanoseconds.
    pub end_in_job_time_ns: i64,
}

/// The operations with which all ranks take part in one collective.
pub type CollectiveOfAllRanks = Vec<CollectiveOfOneRank>;

/// Dependencies among the operations of all ranks of a job, so that the job can be replayed with
/// changed durations.
pub struct JobDependencies<'a> {
    traces: Vec<TraceDependencies<'a>>,
    /// Converts a time of a trace's clock to the job's common time; the first argument is the index
    /// of the trace.
    trace_time_to_job_time: &'a dyn Fn(usize, i64) -> i64,
    collectives: Vec<CollectiveOfAllRanks>,
    /// For each trace, a map from an operation to the index of its collective.
    collective_index_of_operation: Vec<HashMap<GpuOperationId, usize>>,
}

/// Arrivals of ranks at a collective during a replay: the number of ranks that have not arrived,
/// and the latest arrival so far.
#[derive(Clone, Copy)]
struct CollectiveArrivals {
    ranks_not_arrived: usize,
    /// Replayed time, in the job's common time, at which the last rank that has arrived so far
    /// arrived.
    last_rank_arrival_time_ns: i64,
}

impl<'a> JobDependencies<'a> {
    /// Makes the dependencies of a job from the dependencies of its traces and from its
    /// collectives.
    pub fn join_traces_by_collectives(
        traces: Vec<TraceDependencies<'a>>,
        collectives: Vec<CollectiveOfAllRanks>,
        common: &'a dyn Fn(usize, i64) -> i64,
    ) -> Self {
        let mut of_operation = vec![HashMap::new(); traces.len()];
        for (number, members) in collectives.iter().enumerate() {
            for member in members {
                of_operation[member.trace_index].insert(member.operation, number);
            }
        }
        Self {
            traces,
            trace_time_to_job_time: common,
            collectives,
            collective_index_of_operation: of_operation,
        }
    }

    /// First start and last end of each trace, in the job's common time.
    fn spans_of_traces_in_job_time(&self) -> impl Iterator<Item = (i64, i64)> {
        self.traces.iter().enumerate().map(|(trace, of)| {
            let (start, end) = of.first_operation_start_and_last_end();
            ((self.trace_time_to_job_time)(trace, start), (self.trace_time_to_job_time)(trace, end))
        })
    }

    /// First start and last end of an operation on any rank, in the job's common time.
    fn span_recorded_on_any_rank(&self) -> (i64, i64) {
        self.spans_of_traces_in_job_time()
            .reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
            .unwrap_or((0, 0))
    }

    /// The time from which all ranks are recorded, and the last end on any rank, in the job's
    /// common time.
    pub fn span_from_recording_of_all_ranks(&self) -> (i64, i64) {
        let (start, end) = self
            .spans_of_traces_in_job_time()
            .reduce(|a, b| (a.0.max(b.0), a.1.max(b.1)))
            .unwrap_or((0, 0));
        (start.min(end), end)
    }

    /// Returns when the last rank arrived at a collective, and that rank's operation.
    fn last_rank_arrival(members: &[CollectiveOfOneRank]) -> (i64, &CollectiveOfOneRank) {
        let last =
            members.iter().max_by_key(|member| (member.start_in_job_time_ns, member.trace_index));
        let last = last.expect("a collective has ranks");
        (last.start_in_job_time_ns, last)
    }

    /// Replays the job with one change for each trace; returns by how many nanoseconds the job is
    /// shorter.
    pub fn job_ns_saved_by_changes(&self, changes: &[ReplayChange<'_>]) -> i64 {
        let mut replays: Vec<ReplayInProgress<'_, '_>> =
            self.traces.iter().map(ReplayInProgress::begin_replay).collect();
        let mut arrivals: Vec<CollectiveArrivals> = self
            .collectives
            .iter()
            .map(|members| CollectiveArrivals {
                ranks_not_arrived: members.len(),
                last_rank_arrival_time_ns: i64::MIN,
            })
            .collect();
        let next = |replay: &ReplayInProgress<'_, '_>, trace: usize| {
            let id = replay.next_operation_to_replay()?;
            let start = self.traces[trace].operations_of_trace().operation_start_ns(id);
            Some(Reverse(((self.trace_time_to_job_time)(trace, start), trace, id)))
        };
        let mut order: BinaryHeap<_> =
            replays.iter().enumerate().filter_map(|(trace, of)| next(of, trace)).collect();
        let (mut first, mut last) = (i64::MAX, i64::MIN);
        while let Some(Reverse((start, trace, id))) = order.pop() {
            let by = replays[trace].replay_start_of_operation(id, &changes[trace]);
            first = first.min(start + by);
            if let Some(&number) = self.collective_index_of_operation[trace].get(&id) {
                replays[trace].set_replayed_minus_recorded_end(id, by);
                let arrived = &mut arrivals[number];
                arrived.ranks_not_arrived -= 1;
                arrived.last_rank_arrival_time_ns =
                    arrived.last_rank_arrival_time_ns.max(start + by);
                if arrived.ranks_not_arrived == 0 {
                    let ends = self.set_replayed_ends_of_collective(
                        number,
                        arrived.last_rank_arrival_time_ns,
                        changes,
                        &mut replays,
                    );
                    last = last.max(ends);
                }
            } else {
                let all = self.traces[trace].operations_of_trace();
                let length = all.operation_length_ns(id);
                let by = by + (changes[trace].replayed_duration_ns)(id, length) - length;
                replays[trace].set_replayed_minus_recorded_end(id, by);
                last = last.max(
                    (self.trace_time_to_job_time)(trace, all.operation_end_exclusive_ns(id)) + by,
                );
            }
            order.extend(next(&replays[trace], trace));
        }
        let (start, end) = self.span_recorded_on_any_rank();
        (end - start) - (last - first)
    }

    /// Sets the replayed end of a collective on each rank, once all ranks have arrived; returns the
    /// latest of these ends.
    fn set_replayed_ends_of_collective(
        &self,
        number: usize,
        ready: i64,
        changes: &[ReplayChange<'_>],
        replays: &mut [ReplayInProgress<'_, '_>],
    ) -> i64 {
        let members = &self.collectives[number];
        let (recorded, _) = Self::last_rank_arrival(members);
        let mut last = i64::MIN;
        for member in members {
            let transfer = (member.end_in_job_time_ns - recorded).max(0);
            let shorter =
                (changes[member.trace_index].replayed_duration_ns)(member.operation, transfer);
            let by = ready - recorded + shorter - transfer;
            replays[member.trace_index].set_replayed_minus_recorded_end(member.operation, by);
            last = last.max(member.end_in_job_time_ns + by);
        }
        last
    }

    /// Returns the critical path of the job, from its end back to when all ranks are recorded:
    /// trace, kind and nanoseconds of each segment.
    pub fn critical_path_of_job(&self) -> Vec<(usize, CriticalPathSegmentKind, i64)> {
        let end = |trace: &usize| {
            (self.trace_time_to_job_time)(
                *trace,
                self.traces[*trace].first_operation_start_and_last_end().1,
            )
        };
        let Some(mut trace) = (0..self.traces.len()).max_by_key(end) else { return Vec::new() };
        let mut walks: Vec<CriticalPathBackwardWalk<'_, '_>> =
            self.traces.iter().map(CriticalPathBackwardWalk::prepare_backward_walk).collect();
        let mut segments = Vec::new();
        let mut next = Some(self.traces[trace].operation_that_ends_last());
        let mut at = self.traces[trace].first_operation_start_and_last_end().1;
        // The loop is bounded, because operations of zero duration may lead back to each other.
        let steps: usize = self.traces.iter().map(|of| of.operations_of_trace().len()).sum();
        for _ in 0..steps {
            let Some(id) = next else { break };
            let all = self.traces[trace].operations_of_trace();
            let mut path = CriticalPathWalkState {
                path_start_ns: self.traces[trace].first_operation_start_and_last_end().0,
                walk_reached_time_ns: at,
                path_segments_with_ns: Vec::new(),
            };
            let last = self.collective_index_of_operation[trace].get(&id).map(|&number| {
                let (ready, last) = Self::last_rank_arrival(&self.collectives[number]);
                (ready, *last)
            });
            next = match last {
                Some((ready, last)) if last.trace_index != trace => {
                    // The critical path goes back over the collective's transfer, and then to the
                    // operation of the rank that arrived last.
                    let transfer =
                        (self.trace_time_to_job_time)(trace, all.operation_end_exclusive_ns(id))
                            - ready;
                    path.walk_back_and_add_segment(
                        CriticalPathSegmentKind::RunningOperation(id),
                        (all.operation_end_exclusive_ns(id) - transfer)
                            .min(path.walk_reached_time_ns),
                    );
                    segments.extend(
                        path.path_segments_with_ns.drain(..).map(|(of, ns)| (trace, of, ns)),
                    );
                    trace = last.trace_index;
                    let start =
                        self.traces[trace].operations_of_trace().operation_start_ns(last.operation);
                    path = CriticalPathWalkState {
                        path_start_ns: self.traces[trace].first_operation_start_and_last_end().0,
                        walk_reached_time_ns: start,
                        ..path
                    };
                    walks[trace].step_back_from_operation(last.operation, &mut path)
                }
                _ => {
                    path.walk_back_and_add_segment(
                        CriticalPathSegmentKind::RunningOperation(id),
                        all.operation_start_ns(id),
                    );
                    walks[trace].step_back_from_operation(id, &mut path)
                }
            };
            at = path.walk_reached_time_ns;
            segments.extend(path.path_segments_with_ns.into_iter().map(|(of, ns)| (trace, of, ns)));
            if at <= self.traces[trace].first_operation_start_and_last_end().0 {
                break;
            }
        }
        let (start, end) = self.span_from_recording_of_all_ranks();
        let rest = (self.trace_time_to_job_time)(trace, at) - start;
        if rest > 0 {
            segments.push((trace, CriticalPathSegmentKind::UnknownDependency, rest));
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
