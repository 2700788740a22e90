//! The summary of a rank that joins it with others: its collectives in order, and its times.

use std::sync::Arc;

use hashbrown::HashMap;

use super::clock::RankClock;
use super::recorded::RecordedOperations;
use crate::analyze::classes::{CollectiveKind, OperationClasses};
use crate::analyze::operations::{AllOperations, OperationId, OperationKind};
use crate::analyze::time_order::SortedOperations;
use crate::analyze::timeline::idle_time;
use crate::analyze::timeline::{self, BusyTimeLine, TimelinePiece};
use crate::analyze::work::bus_bandwidth;
use crate::model::Trace;

/// A collective operation as one rank recorded it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankCollective {
    /// Which one.
    pub collective: CollectiveKind,
    /// The larger of the bytes that a rank gives and gets; 0 where it was not recorded.
    pub bytes: u64,
    /// Bytes that cross the link, by NCCL's convention.
    pub bus_bytes: f64,
    pub operation: OperationId,
    /// Start time by the rank's own clock, nanoseconds.
    pub start: i64,
    /// Nanosecond after the last.
    pub end: i64,
}

/// A communicator with the collectives that one rank recorded in it.
#[derive(Debug, Clone, PartialEq)]
pub struct RankCommunicator {
    /// Name and ranks of the communicator where recorded, else the number of its stream.
    pub name: String,
    /// Number of ranks in the communicator; 0 if the number is not recorded.
    pub ranks: u32,
    /// Collectives of the communicator in the order of their start.
    pub entries: Vec<RankCollective>,
}

/// The time of a rank in nanoseconds: compute, exposed communication, copies and idle time add up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankTimeParts {
    /// Kernels compute.
    pub compute_ns: i64,
    /// Time in which compute and communication ran in parallel, nanoseconds.
    pub hidden_ns: i64,
    /// Communication without compute.
    pub exposed_ns: i64,
    /// Time of copies, page migrations and memsets with nothing else beside them, nanoseconds.
    pub copies_ns: i64,
    /// Time without any operation of the rank, nanoseconds.
    pub idle_ns: i64,
}

impl RankTimeParts {
    /// The time of operations inside a span of the job's time.
    fn measure_span(
        trace: &Trace,
        classes: &OperationClasses<'_>,
        operations: &SortedOperations,
        inside: impl Fn(i64, i64) -> i64,
    ) -> RankTimeParts {
        let mut times = Self::default();
        timeline::cut_into_pieces(
            &AllOperations::new(trace),
            classes,
            operations.iter(),
            |piece| match piece {
                TimelinePiece::Busy { start, end, line, .. } => {
                    let ns = inside(start, end);
                    match line {
                        BusyTimeLine::Communication => times.exposed_ns += ns,
                        BusyTimeLine::Migration | BusyTimeLine::Copy | BusyTimeLine::Set => {
                            times.copies_ns += ns
                        }
                        _ => times.compute_ns += ns,
                    }
                    if line == BusyTimeLine::ComputeAndCommunication {
                        times.hidden_ns += ns;
                    }
                }
                TimelinePiece::Idle(gap) => times.idle_ns += inside(gap.start, gap.end),
            },
        );
        times
    }

    /// All times together.
    pub fn total_ns(&self) -> i64 {
        self.compute_ns + self.exposed_ns + self.copies_ns + self.idle_ns
    }
}

/// A process on a device, as a rank of a job.
#[derive(Debug, Clone)]
pub struct RankTrace {
    /// Name of the trace, with process and device if the trace holds several.
    pub name: String,
    /// Name of the rank in reports.
    pub label: String,
    /// Rank number that the trace declares, if any.
    pub rank: Option<u32>,
    /// The number of ranks that the trace declares.
    pub world: Option<u32>,
    /// The host, where recorded.
    pub host: Option<String>,
    /// Name of the rank's device, if recorded.
    pub device: Option<String>,
    /// First and last time of an operation, by the rank's clock.
    pub span: (i64, i64),
    /// Times of the rank from the start of its first operation to the end of its last operation.
    pub times: RankTimeParts,
    pub communicators: Vec<RankCommunicator>,
    /// The trace, which other parts may share.
    pub(super) recorded: Arc<RecordedOperations>,
    /// Process and device of the rank in the trace.
    pub(super) owner: (u32, u32),
}

impl RankTrace {
    /// The ranks that a trace holds: every process on every device that communicates. A trace
    /// without communication gives one part without communicators.
    pub fn extract_ranks(name: &str, trace: Trace) -> Vec<RankTrace> {
        let recorded = Arc::new(RecordedOperations::new(trace));
        let trace = &recorded.trace;
        let (all, classes) = (AllOperations::new(trace), OperationClasses::new(trace));
        let operations = idle_time::operations_by_device(trace, &all, |_| true);
        let mut parts: Vec<Self> = operations
            .iter()
            .map(|(owner, ids)| {
                let (process, device) = *owner;
                let pid = trace.processes[process as usize].pid;
                let name = match operations.len() {
                    1 => name.to_owned(),
                    _ => format!("{name}, process {pid}, device {device}"),
                };
                rank_trace_of_owner(name, &recorded, &classes, ids, *owner)
            })
            .collect();
        let communicates = |part: &Self| !part.communicators.is_empty();
        if parts.iter().any(communicates) {
            parts.retain(communicates);
        } else {
            parts.truncate(1);
        }
        let declared = DeclaredRank::read_declared_rank(trace);
        // A trace declares one rank, so with several parts the rank of each is unknown.
        let rank = declared.rank.filter(|_| parts.len() == 1);
        for part in &mut parts {
            part.rank = rank;
            part.world = declared.world;
            part.host = trace.metadata.get("host_name").cloned();
        }
        parts
    }

    /// Time of the rank inside a span of the job's time.
    pub(super) fn rank_times_inside(
        &self,
        clock: &RankClock,
        (first, last): (i64, i64),
    ) -> RankTimeParts {
        let trace = &self.recorded.trace;
        let all = AllOperations::new(trace);
        let devices = idle_time::operations_by_device(trace, &all, |_| true);
        let own = devices.iter().find(|(owner, _)| *owner == self.owner);
        own.map_or_else(RankTimeParts::default, |(_, operations)| {
            let inside = |start: i64, end: i64| {
                let [start, end] = [start, end].map(|time| clock.job_time(time).clamp(first, last));
                end - start
            };
            RankTimeParts::measure_span(trace, &OperationClasses::new(trace), operations, inside)
        })
    }

    /// Whether two parts are of one trace, which has one clock.
    pub(super) fn is_same_trace(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.recorded, &other.recorded)
    }
}

fn rank_trace_of_owner(
    name: String,
    recorded: &Arc<RecordedOperations>,
    classes: &OperationClasses<'_>,
    operations: &SortedOperations,
    owner: (u32, u32),
) -> RankTrace {
    let trace = &recorded.trace;
    let all = AllOperations::new(trace);
    let start = operations.get(0).map_or(0, |id| all.start(id));
    let end = operations.iter().map(|id| all.end(id)).max().unwrap_or(start).max(start);
    let times = RankTimeParts::measure_span(trace, classes, operations, |start, end| end - start);
    let mut communicators: Vec<RankCommunicator> = Vec::new();
    let mut numbers: HashMap<(Option<u32>, u32), usize> = HashMap::new();
    let mut streams = 0;
    for id in operations.iter() {
        let Some(communication) = classes.communication_of_operation(id) else { continue };
        // A copy has no partner on another rank.
        if matches!(all.kind_and_row(id), (OperationKind::Copy, _)) {
            continue;
        }
        let call = trace.collectives.call_of_kernel(id);
        let place = all.place(id).0;
        let key = call.map_or((None, place), |call| (Some(call.group.0), 0));
        let at = *numbers.entry(key).or_insert_with(|| {
            let name = call.map(|call| trace.names.text(call.group).to_owned());
            communicators.push(RankCommunicator {
                name: name.unwrap_or_else(|| {
                    streams += 1;
                    format!("communication stream {streams}")
                }),
                ranks: call.map_or(0, |call| call.ranks),
                entries: Vec::new(),
            });
            communicators.len() - 1
        });
        // The framework's name of a collective is more exact than the name of a generic kernel.
        let collective = call.map(|call| CollectiveKind::from_name(trace.names.text(call.name)));
        let collective = collective
            .filter(|&known| known != CollectiveKind::Unknown)
            .unwrap_or(communication.collective);
        communicators[at].entries.push(RankCollective {
            collective,
            bytes: call.map_or(0, |call| call.bytes_in.max(call.bytes_out)),
            bus_bytes: call.map_or(0.0, |call| {
                bus_bandwidth::bytes_across_link(
                    collective,
                    call.ranks,
                    call.bytes_in,
                    call.bytes_out,
                )
            }),
            operation: id,
            start: all.start(id),
            end: all.end(id),
        });
    }
    let device = trace.devices.iter().find(|of| of.id == owner.1).map(|of| of.name.clone());
    RankTrace {
        label: name.clone(),
        name,
        rank: None,
        world: None,
        host: None,
        device,
        span: (start, end),
        times,
        communicators,
        recorded: Arc::clone(recorded),
        owner,
    }
}

/// Labels the parts by their declared ranks, or by the piece of their names that differs.
pub(super) fn label(parts: &mut [RankTrace]) {
    let names: Vec<&str> = parts.iter().map(|part| part.name.as_str()).collect();
    let first = names.first().copied().unwrap_or_default();
    let common = |&end: &usize| names.iter().all(|name| name.starts_with(&first[..end]));
    let ends = ["/", ", "]
        .into_iter()
        .flat_map(|separator| first.match_indices(separator).map(|(at, text)| at + text.len()));
    let common = ends.filter(common).max().unwrap_or(0);
    for part in parts {
        part.label = match part.rank {
            Some(rank) => format!("rank {rank}"),
            None => part.name[common..].to_owned(),
        };
    }
}

/// Rank and number of ranks, as PyTorch declares them.
#[derive(Default)]
struct DeclaredRank {
    rank: Option<u32>,
    world: Option<u32>,
}

impl DeclaredRank {
    fn read_declared_rank(trace: &Trace) -> DeclaredRank {
        let Some(text) = trace.metadata.get("distributedInfo") else { return Self::default() };
        let Ok(value) = serde_json::from_str::<serde_json::Value>(text) else {
            return Self::default();
        };
        let number = |key: &str| value[key].as_u64().and_then(|number| u32::try_from(number).ok());
        Self { rank: number("rank"), world: number("world_size") }
    }
}
