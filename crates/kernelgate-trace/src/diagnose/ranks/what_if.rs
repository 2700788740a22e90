//! The critical path of a job through its ranks, and what a faster rank, kernel, launch or
//! collective would gain: the operations of all ranks replayed together.

use std::sync::Arc;

use hashbrown::HashMap;

use super::clock::{RankClock, median_rank_value};
use super::joined_collective::CollectiveMeeting;
use super::rank_summary::RankTrace;
use super::recorded::RecordedOperations;
use crate::analyze::classes::{OperationClass, OperationClasses};
use crate::analyze::operations::{AllOperations, OperationId, OperationKind};
use crate::analyze::replay::job_replay::{CollectiveMember, JobReplay};
use crate::analyze::replay::{CriticalPathSegment, ReplayChange, ReplayedHostTime};
use crate::diagnose::labels::readable_name;
use crate::model::Trace;

/// Kernels that are replayed.
const MAX_JOB_KERNELS: usize = 3;

/// The time that a hypothetical change of the job would save.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobChangeGain {
    pub change: String,
    /// Nanoseconds by which the change shortens the job.
    pub gain_ns: i64,
}

/// The critical path through the ranks of a job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JobCriticalPath {
    /// Time from when all ranks are recorded to the last end on any of them, nanoseconds.
    pub total_ns: i64,
    /// Segments of the critical path: rank, its activity, and nanoseconds, the longest first. The
    /// times add up to the total.
    pub segments: Vec<(usize, String, i64)>,
    /// The largest first.
    pub gains: Vec<JobChangeGain>,
}

/// The traces of the parts, each once, and the number of each part's trace.
struct DistinctTraces<'a> {
    recorded: Vec<&'a RecordedOperations>,
    of_part: Vec<usize>,
    classes: Vec<OperationClasses<'a>>,
}

impl<'a> DistinctTraces<'a> {
    fn new(parts: &'a [RankTrace]) -> Self {
        let mut recorded: Vec<&'a Arc<RecordedOperations>> = Vec::new();
        let mut of_part = Vec::new();
        for part in parts {
            let number = recorded.iter().position(|of| Arc::ptr_eq(of, &part.recorded));
            of_part.push(number.unwrap_or(recorded.len()));
            if number.is_none() {
                recorded.push(&part.recorded);
            }
        }
        let recorded: Vec<&RecordedOperations> = recorded.into_iter().map(Arc::as_ref).collect();
        let classes = recorded.iter().map(|of| OperationClasses::new(&of.trace)).collect();
        Self { recorded, of_part, classes }
    }

    fn trace_of_recording(&self, number: usize) -> &'a Trace {
        &self.recorded[number].trace
    }

    /// The part that an operation belongs to.
    fn rank_part_of_operation(&self, parts: &[RankTrace], number: usize, id: OperationId) -> usize {
        let trace = self.trace_of_recording(number);
        let place = &trace.places[AllOperations::new(trace).place(id).0 as usize];
        let own = |part: usize| {
            self.of_part[part] == number && parts[part].owner == (place.process, place.device)
        };
        (0..parts.len()).find(|&part| own(part)).unwrap_or(0)
    }

    /// The name of the function of a kernel that computes.
    fn compute_function_name(&self, number: usize, id: OperationId) -> Option<&'a str> {
        let trace = self.trace_of_recording(number);
        match AllOperations::new(trace).kind_and_row(id) {
            (OperationKind::Kernel, row)
                if self.classes[number].class_of_operation(id) == OperationClass::Compute =>
            {
                Some(trace.kernel_name(row))
            }
            _ => None,
        }
    }
}

/// A change that makes a part faster.
enum SpeedUpChange {
    /// The kernels and the host of a rank take a part of their time.
    Rank { part: usize, compute: f64, host: f64 },
    /// Kernels with this name take half as long.
    Kernel(String),
    /// Operations of a class take no time: of collectives their transfer, not the waiting.
    Class(OperationClass),
    /// Launch calls take no time on any rank.
    Launches,
    /// No host thread waits for its GPU.
    Waits,
}

impl SpeedUpChange {
    fn label(&self, parts: &[RankTrace]) -> String {
        match self {
            Self::Rank { part, .. } => {
                format!("{} as fast as the median rank", parts[*part].label)
            }
            Self::Kernel(name) => format!("half the time of {}", readable_name(name)),
            Self::Class(OperationClass::Communication) => "transfers that take no time".to_owned(),
            Self::Class(OperationClass::Copy) => "copies that take no time".to_owned(),
            Self::Class(class) => format!("{}s that take no time", class.label()),
            Self::Launches => "launch calls that take no time".to_owned(),
            Self::Waits => "hosts that do not wait for their GPU".to_owned(),
        }
    }
}

/// The critical path, and by part what it would gain at the speed of the median rank.
pub(super) fn replay_job(
    parts: &[RankTrace],
    clocks: &[RankClock],
    meetings: &[CollectiveMeeting],
) -> (JobCriticalPath, Vec<i64>) {
    let nothing = || (JobCriticalPath::default(), vec![0; parts.len()]);
    if meetings.is_empty() {
        return nothing();
    }
    let traces = DistinctTraces::new(parts);
    let Some(dependencies) = traces.recorded.iter().map(|of| of.recorded_dependencies()).collect()
    else {
        return nothing();
    };
    let clock_of: Vec<&RankClock> = (0..traces.recorded.len())
        .map(|number| traces.of_part.iter().position(|&of| of == number))
        .map(|part| &clocks[part.expect("a trace has a part")])
        .collect();
    let common = |number: usize, time: i64| clock_of[number].job_time(time);
    let members = |meeting: &CollectiveMeeting| {
        let member = |of: &super::joined_collective::RankArrival| CollectiveMember {
            trace: traces.of_part[of.rank],
            operation: of.operation,
            start: of.start,
            end: of.end,
        };
        meeting.ranks.iter().map(member).collect()
    };
    let job = JobReplay::new(dependencies, meetings.iter().map(members).collect(), &common);
    let of_ranks: Vec<Option<SpeedUpChange>> =
        (0..parts.len()).map(|part| rank_at_median_speed(parts, part)).collect();
    let gain = |faster: &SpeedUpChange| gain_of_faster(&job, &traces, parts, faster);
    let by_part: Vec<i64> = of_ranks.iter().map(|of| of.as_ref().map_or(0, &gain)).collect();
    let mut gains: Vec<JobChangeGain> = of_ranks
        .iter()
        .flatten()
        .zip(by_part.iter().zip(&of_ranks).filter(|(_, of)| of.is_some()).map(|(ns, _)| *ns))
        .map(|(of, gain_ns)| JobChangeGain { change: of.label(parts), gain_ns })
        .collect();
    for faster in speed_up_changes(&traces) {
        gains.push(JobChangeGain { change: faster.label(parts), gain_ns: gain(&faster) });
    }
    gains.sort_by(|a, b| b.gain_ns.cmp(&a.gain_ns).then_with(|| a.change.cmp(&b.change)));
    let (start, end) = job.span_recorded_on_all_ranks();
    let path = JobCriticalPath {
        total_ns: end - start,
        segments: critical_path_by_rank(&job, &traces, parts),
        gains,
    };
    (path, by_part)
}

/// A rank that computes or idles longer than the median rank, at its speed.
#[allow(clippy::cast_precision_loss)]
fn rank_at_median_speed(parts: &[RankTrace], part: usize) -> Option<SpeedUpChange> {
    let share = |value: fn(&RankTrace) -> i64| {
        let (own, median) = (value(&parts[part]), median_rank_value(parts.iter().map(value)));
        if own > median { median as f64 / own as f64 } else { 1.0 }
    };
    let compute = share(|of| of.times.compute_ns);
    let host = share(|of| of.times.idle_ns);
    (compute < 1.0 || host < 1.0).then_some(SpeedUpChange::Rank { part, compute, host })
}

/// The changes of all ranks at once.
fn speed_up_changes(traces: &DistinctTraces<'_>) -> Vec<SpeedUpChange> {
    let mut kernels: HashMap<&str, i64> = HashMap::new();
    let mut classes: Vec<OperationClass> = Vec::new();
    for number in 0..traces.recorded.len() {
        let all = AllOperations::new(traces.trace_of_recording(number));
        for id in all.ids() {
            if let Some(name) = traces.compute_function_name(number, id) {
                *kernels.entry(name).or_default() += all.length(id);
            }
            let class = traces.classes[number].class_of_operation(id);
            if !classes.contains(&class) {
                classes.push(class);
            }
        }
    }
    let mut kernels: Vec<(&str, i64)> = kernels.into_iter().collect();
    kernels.sort_by_key(|&(name, ns)| (std::cmp::Reverse(ns), name));
    let kernels = kernels.into_iter().take(MAX_JOB_KERNELS);
    let mut changes: Vec<SpeedUpChange> =
        kernels.map(|(name, _)| SpeedUpChange::Kernel(name.to_owned())).collect();
    classes.retain(|class| {
        matches!(
            class,
            OperationClass::Communication | OperationClass::Copy | OperationClass::Migration
        )
    });
    changes.extend(classes.into_iter().map(SpeedUpChange::Class));
    if traces.recorded.iter().any(|of| of.has_launch_calls()) {
        changes.extend([SpeedUpChange::Launches, SpeedUpChange::Waits]);
    }
    changes
}

fn gain_of_faster(
    job: &JobReplay<'_>,
    traces: &DistinctTraces<'_>,
    parts: &[RankTrace],
    faster: &SpeedUpChange,
) -> i64 {
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    let scaled = |ns: i64, share: f64| (ns as f64 * share).round() as i64;
    let length = |number: usize| {
        move |id: OperationId, ns: i64| match faster {
            SpeedUpChange::Rank { part, compute, .. } => {
                let own = traces.of_part[*part] == number
                    && traces.rank_part_of_operation(parts, number, id) == *part
                    && traces.classes[number].class_of_operation(id) == OperationClass::Compute;
                if own { scaled(ns, *compute) } else { ns }
            }
            SpeedUpChange::Kernel(name)
                if traces.compute_function_name(number, id) == Some(name) =>
            {
                ns / 2
            }
            SpeedUpChange::Class(class)
                if traces.classes[number].class_of_operation(id) == *class =>
            {
                0
            }
            _ => ns,
        }
    };
    let lengths: Vec<_> = (0..traces.recorded.len()).map(length).collect();
    let change = |(number, length)| ReplayChange {
        length,
        launches: !matches!(faster, SpeedUpChange::Launches),
        waits: !matches!(faster, SpeedUpChange::Waits),
        host: match faster {
            SpeedUpChange::Rank { part, host, .. } if traces.of_part[*part] == number => {
                ReplayedHostTime::Scaled(*host)
            }
            _ => ReplayedHostTime::Recorded,
        },
    };
    let lengths: Vec<&dyn Fn(OperationId, i64) -> i64> =
        lengths.iter().map(|length| length as &dyn Fn(OperationId, i64) -> i64).collect();
    let changes: Vec<ReplayChange<'_>> = lengths.into_iter().enumerate().map(change).collect();
    job.job_gain_ns(&changes)
}

/// The time on the critical path by rank and kind of work.
fn critical_path_by_rank(
    job: &JobReplay<'_>,
    traces: &DistinctTraces<'_>,
    parts: &[RankTrace],
) -> Vec<(usize, String, i64)> {
    let first_part = |number: usize| traces.of_part.iter().position(|&of| of == number);
    let mut sums: HashMap<(usize, String), i64> = HashMap::new();
    for (number, segment, ns) in job.critical_path() {
        let (part, what) = match segment {
            CriticalPathSegment::Operation(id) => {
                let what = match traces.compute_function_name(number, id) {
                    Some(name) => readable_name(name),
                    None => traces.classes[number].class_of_operation(id).label().to_owned(),
                };
                (traces.rank_part_of_operation(parts, number, id), what)
            }
            other => (first_part(number).unwrap_or(0), other.label().to_owned()),
        };
        *sums.entry((part, what)).or_default() += ns;
    }
    let mut segments: Vec<(usize, String, i64)> =
        sums.into_iter().map(|((part, what), ns)| (part, what, ns)).collect();
    segments.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| (a.0, &a.1).cmp(&(b.0, &b.1))));
    segments
}
