//! Replays the operations of all ranks of a job: its critical path, and what a faster rank, kernel,
//! launch or collective would gain.

use std::sync::Arc;

use hashbrown::HashMap;

use super::clock::{ClockOfRank, median_value_of_ranks};
use super::joined_collective::CollectiveOnAllRanks;
use super::rank_summary::TraceOfRank;
use super::recorded::OperationsWithLaunches;
use crate::analyze::classes::{OperationClass, OperationClassesOfTrace};
use crate::analyze::operations::{AllGpuOperations, GpuOperationId, GpuOperationKind};
use crate::analyze::replay::job_replay::{CollectiveOfOneRank, JobDependencies};
use crate::analyze::replay::{CriticalPathSegmentKind, ReplayChange, ReplayedHostTime};
use crate::diagnose::labels::shortened_kernel_name_for_readers;
use crate::model::Trace;

/// Largest number of kernels whose speed-up is replayed in a job.
const MAX_KERNELS_IN_JOB_REPLAYS: usize = 3;

/// A hypothetical change of the job, and the time that it would save.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobChangeWithGain {
    pub change: String,
    /// Nanoseconds by which the replayed job is shorter with the change.
    pub gain_ns: i64,
}

/// Critical path through the ranks of a job, with the gains of hypothetical changes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CriticalPathOfJob {
    /// Length of the path, nanoseconds: from the time when all ranks are recorded to the last end
    /// on any rank.
    pub path_length_ns: i64,
    /// Time on the critical path by rank and kind of segment, nanoseconds, the longest first. The
    /// times of the segments add up to the length of the path.
    pub rank_kind_and_ns_of_segments: Vec<(usize, String, i64)>,
    /// The largest first.
    pub gains: Vec<JobChangeWithGain>,
}

/// The distinct traces from which the ranks come, and for each rank the number of its trace.
struct DistinctTracesOfRanks<'a> {
    distinct_traces: Vec<&'a OperationsWithLaunches>,
    trace_index_by_rank: Vec<usize>,
    classes: Vec<OperationClassesOfTrace<'a>>,
}

impl<'a> DistinctTracesOfRanks<'a> {
    fn collect_distinct_traces(parts: &'a [TraceOfRank]) -> Self {
        let mut recorded: Vec<&'a Arc<OperationsWithLaunches>> = Vec::new();
        let mut of_part = Vec::new();
        for part in parts {
            let number = recorded.iter().position(|of| Arc::ptr_eq(of, &part.shared_trace));
            of_part.push(number.unwrap_or(recorded.len()));
            if number.is_none() {
                recorded.push(&part.shared_trace);
            }
        }
        let recorded: Vec<&OperationsWithLaunches> =
            recorded.into_iter().map(Arc::as_ref).collect();
        let classes = recorded
            .iter()
            .map(|of| OperationClassesOfTrace::classify_operations_by_name(&of.trace))
            .collect();
        Self { distinct_traces: recorded, trace_index_by_rank: of_part, classes }
    }

    fn trace_with_number(&self, number: usize) -> &'a Trace {
        &self.distinct_traces[number].trace
    }

    /// Returns the rank that ran an operation of the trace with this number.
    fn rank_that_ran_operation(
        &self,
        parts: &[TraceOfRank],
        number: usize,
        id: GpuOperationId,
    ) -> usize {
        let trace = self.trace_with_number(number);
        let place = &trace.places
            [AllGpuOperations::number_operations_of_trace(trace).place_of_operation(id).0 as usize];
        let own = |part: usize| {
            self.trace_index_by_rank[part] == number
                && parts[part].process_and_gpu == (place.process_index, place.device)
        };
        (0..parts.len()).find(|&part| own(part)).unwrap_or(0)
    }

    /// Returns the function name of a kernel that computes; `None` for other operations.
    fn name_of_compute_kernel(&self, number: usize, id: GpuOperationId) -> Option<&'a str> {
        let trace = self.trace_with_number(number);
        match AllGpuOperations::number_operations_of_trace(trace).kind_and_table_row(id) {
            (GpuOperationKind::Kernel, row)
                if self.classes[number].class_of_gpu_operation(id)
                    == OperationClass::ComputeKernel =>
            {
                Some(trace.demangled_kernel_name(row))
            }
            _ => None,
        }
    }
}

/// A hypothetical change that makes a part of the job faster.
enum JobSpeedUp {
    /// The compute kernels and the host calls of one rank take the given shares (0 to 1) of their
    /// recorded times.
    RankToMedianSpeed { part: usize, compute: f64, host: f64 },
    /// All kernels with this name take half their time.
    KernelAtHalfTime(String),
    /// All operations of a class take no time; for collectives this removes the transfer, not the
    /// waiting.
    ClassWithoutTime(OperationClass),
    /// The host's launch calls take no time on any rank.
    LaunchCallsWithoutTime,
    /// No host thread of any rank waits for its GPU.
    NoHostWaits,
}

impl JobSpeedUp {
    fn printed_job_speed_up(&self, parts: &[TraceOfRank]) -> String {
        match self {
            Self::RankToMedianSpeed { part, .. } => {
                format!("{} as fast as the median rank", parts[*part].rank_label)
            }
            Self::KernelAtHalfTime(name) => {
                format!("half the time of {}", shortened_kernel_name_for_readers(name))
            }
            Self::ClassWithoutTime(OperationClass::Communication) => {
                "transfers that take no time".to_owned()
            }
            Self::ClassWithoutTime(OperationClass::Copy) => "copies that take no time".to_owned(),
            Self::ClassWithoutTime(class) => {
                format!("{}s that take no time", class.printed_operation_class())
            }
            Self::LaunchCallsWithoutTime => "launch calls that take no time".to_owned(),
            Self::NoHostWaits => "hosts that do not wait for their GPU".to_owned(),
        }
    }
}

/// Returns the critical path of the job, and for each rank the nanoseconds that the job would save
/// if the rank were as fast as the median rank.
pub(super) fn replay_job_with_changes(
    parts: &[TraceOfRank],
    clocks: &[ClockOfRank],
    meetings: &[CollectiveOnAllRanks],
) -> (CriticalPathOfJob, Vec<i64>) {
    let nothing = || (CriticalPathOfJob::default(), vec![0; parts.len()]);
    if meetings.is_empty() {
        return nothing();
    }
    let traces = DistinctTracesOfRanks::collect_distinct_traces(parts);
    let Some(dependencies) =
        traces.distinct_traces.iter().map(|of| of.dependencies_of_operations()).collect()
    else {
        return nothing();
    };
    let clock_of: Vec<&ClockOfRank> = (0..traces.distinct_traces.len())
        .map(|number| traces.trace_index_by_rank.iter().position(|&of| of == number))
        .map(|part| &clocks[part.expect("a trace has a part")])
        .collect();
    let common = |number: usize, time: i64| clock_of[number].rank_time_to_job_time(time);
    let members = |meeting: &CollectiveOnAllRanks| {
        let member = |of: &super::joined_collective::CollectiveOnRank| CollectiveOfOneRank {
            trace_index: traces.trace_index_by_rank[of.rank_index],
            operation: of.operation,
            start_in_job_time_ns: of.start_ns,
            end_in_job_time_ns: of.end_ns,
        };
        meeting.ranks.iter().map(member).collect()
    };
    let job = JobDependencies::join_traces_by_collectives(
        dependencies,
        meetings.iter().map(members).collect(),
        &common,
    );
    let of_ranks: Vec<Option<JobSpeedUp>> =
        (0..parts.len()).map(|part| speed_up_to_median_rank(parts, part)).collect();
    let gain = |faster: &JobSpeedUp| job_ns_saved_by_speed_up(&job, &traces, parts, faster);
    let by_part: Vec<i64> = of_ranks.iter().map(|of| of.as_ref().map_or(0, &gain)).collect();
    let mut gains: Vec<JobChangeWithGain> = of_ranks
        .iter()
        .flatten()
        .zip(by_part.iter().zip(&of_ranks).filter(|(_, of)| of.is_some()).map(|(ns, _)| *ns))
        .map(|(of, gain_ns)| JobChangeWithGain { change: of.printed_job_speed_up(parts), gain_ns })
        .collect();
    for faster in job_speed_ups_to_replay(&traces) {
        gains.push(JobChangeWithGain {
            change: faster.printed_job_speed_up(parts),
            gain_ns: gain(&faster),
        });
    }
    gains.sort_by(|a, b| b.gain_ns.cmp(&a.gain_ns).then_with(|| a.change.cmp(&b.change)));
    let (start, end) = job.span_from_recording_of_all_ranks();
    let path = CriticalPathOfJob {
        path_length_ns: end - start,
        rank_kind_and_ns_of_segments: critical_path_time_by_rank_and_kind(&job, &traces, parts),
        gains,
    };
    (path, by_part)
}

/// Returns a change that gives a rank the speed of the median rank, if the rank's compute or idle
/// time is longer.
#[allow(clippy::cast_precision_loss)]
fn speed_up_to_median_rank(parts: &[TraceOfRank], part: usize) -> Option<JobSpeedUp> {
    let share = |value: fn(&TraceOfRank) -> i64| {
        let (own, median) = (value(&parts[part]), median_value_of_ranks(parts.iter().map(value)));
        if own > median { median as f64 / own as f64 } else { 1.0 }
    };
    let compute = share(|of| of.time_by_activity.compute_ns);
    let host = share(|of| of.time_by_activity.idle_ns);
    (compute < 1.0 || host < 1.0).then_some(JobSpeedUp::RankToMedianSpeed { part, compute, host })
}

/// Returns changes that apply to all ranks: kernels, classes, launches and waits.
fn job_speed_ups_to_replay(traces: &DistinctTracesOfRanks<'_>) -> Vec<JobSpeedUp> {
    let mut kernels: HashMap<&str, i64> = HashMap::new();
    let mut classes: Vec<OperationClass> = Vec::new();
    for number in 0..traces.distinct_traces.len() {
        let all = AllGpuOperations::number_operations_of_trace(traces.trace_with_number(number));
        for id in all.all_operation_ids() {
            if let Some(name) = traces.name_of_compute_kernel(number, id) {
                *kernels.entry(name).or_default() += all.operation_length_ns(id);
            }
            let class = traces.classes[number].class_of_gpu_operation(id);
            if !classes.contains(&class) {
                classes.push(class);
            }
        }
    }
    let mut kernels: Vec<(&str, i64)> = kernels.into_iter().collect();
    kernels.sort_by_key(|&(name, ns)| (std::cmp::Reverse(ns), name));
    let kernels = kernels.into_iter().take(MAX_KERNELS_IN_JOB_REPLAYS);
    let mut changes: Vec<JobSpeedUp> =
        kernels.map(|(name, _)| JobSpeedUp::KernelAtHalfTime(name.to_owned())).collect();
    classes.retain(|class| {
        matches!(
            class,
            OperationClass::Communication | OperationClass::Copy | OperationClass::PageMigration
        )
    });
    changes.extend(classes.into_iter().map(JobSpeedUp::ClassWithoutTime));
    if traces.distinct_traces.iter().any(|of| of.has_any_launch_call()) {
        changes.extend([JobSpeedUp::LaunchCallsWithoutTime, JobSpeedUp::NoHostWaits]);
    }
    changes
}

fn job_ns_saved_by_speed_up(
    job: &JobDependencies<'_>,
    traces: &DistinctTracesOfRanks<'_>,
    parts: &[TraceOfRank],
    faster: &JobSpeedUp,
) -> i64 {
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    let scaled = |ns: i64, share: f64| (ns as f64 * share).round() as i64;
    let length = |number: usize| {
        move |id: GpuOperationId, ns: i64| match faster {
            JobSpeedUp::RankToMedianSpeed { part, compute, .. } => {
                let own = traces.trace_index_by_rank[*part] == number
                    && traces.rank_that_ran_operation(parts, number, id) == *part
                    && traces.classes[number].class_of_gpu_operation(id)
                        == OperationClass::ComputeKernel;
                if own { scaled(ns, *compute) } else { ns }
            }
            JobSpeedUp::KernelAtHalfTime(name)
                if traces.name_of_compute_kernel(number, id) == Some(name) =>
            {
                ns / 2
            }
            JobSpeedUp::ClassWithoutTime(class)
                if traces.classes[number].class_of_gpu_operation(id) == *class =>
            {
                0
            }
            _ => ns,
        }
    };
    let lengths: Vec<_> = (0..traces.distinct_traces.len()).map(length).collect();
    let change = |(number, length)| ReplayChange {
        replayed_duration_ns: length,
        replays_recorded_launch_call_times: !matches!(faster, JobSpeedUp::LaunchCallsWithoutTime),
        keeps_host_waits: !matches!(faster, JobSpeedUp::NoHostWaits),
        host_time_between_launches: match faster {
            JobSpeedUp::RankToMedianSpeed { part, host, .. }
                if traces.trace_index_by_rank[*part] == number =>
            {
                ReplayedHostTime::ShareOfRecordedHostTime(*host)
            }
            _ => ReplayedHostTime::RecordedHostTime,
        },
    };
    let lengths: Vec<&dyn Fn(GpuOperationId, i64) -> i64> =
        lengths.iter().map(|length| length as &dyn Fn(GpuOperationId, i64) -> i64).collect();
    let changes: Vec<ReplayChange<'_>> = lengths.into_iter().enumerate().map(change).collect();
    job.job_ns_saved_by_changes(&changes)
}

/// Sums the time on the job's critical path by rank and kind of segment.
fn critical_path_time_by_rank_and_kind(
    job: &JobDependencies<'_>,
    traces: &DistinctTracesOfRanks<'_>,
    parts: &[TraceOfRank],
) -> Vec<(usize, String, i64)> {
    let first_part = |number: usize| traces.trace_index_by_rank.iter().position(|&of| of == number);
    let mut sums: HashMap<(usize, String), i64> = HashMap::new();
    for (number, segment, ns) in job.critical_path_of_job() {
        let (part, what) = match segment {
            CriticalPathSegmentKind::RunningOperation(id) => {
                let what = match traces.name_of_compute_kernel(number, id) {
                    Some(name) => shortened_kernel_name_for_readers(name),
                    None => traces.classes[number]
                        .class_of_gpu_operation(id)
                        .printed_operation_class()
                        .to_owned(),
                };
                (traces.rank_that_ran_operation(parts, number, id), what)
            }
            other => (first_part(number).unwrap_or(0), other.printed_segment_label().to_owned()),
        };
        *sums.entry((part, what)).or_default() += ns;
    }
    let mut segments: Vec<(usize, String, i64)> =
        sums.into_iter().map(|((part, what), ns)| (part, what, ns)).collect();
    segments.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| (a.0, &a.1).cmp(&(b.0, &b.1))));
    segments
}
