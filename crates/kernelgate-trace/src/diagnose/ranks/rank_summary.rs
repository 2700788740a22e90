//! Summary of one rank's trace, from which ranks are joined: its collectives in order, and its
//! times.

use std::sync::Arc;

use hashbrown::HashMap;

use super::clock::ClockOfRank;
use super::recorded::OperationsWithLaunches;
use crate::analyze::classes::{CollectiveKind, OperationClassesOfTrace};
use crate::analyze::operations::{AllGpuOperations, GpuOperationId, GpuOperationKind};
use crate::analyze::time_order::OperationsInOrder;
use crate::analyze::timeline::idle_time;
use crate::analyze::timeline::{self, BusyTimeCategoryOfGpu, GpuTimelinePiece};
use crate::analyze::work::bus_bandwidth;
use crate::model::Trace;

/// A collective operation as one rank recorded it, in the rank's own time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RecordedRankCollective {
    /// Kind of the collective.
    pub collective: CollectiveKind,
    /// Larger one of the bytes that the rank gives to the collective and gets from it; 0 if not
    /// recorded.
    pub larger_buffer_bytes: u64,
    /// Bytes that must cross the rank's link, by the convention of nccl-tests.
    pub bus_bytes: f64,
    pub operation: GpuOperationId,
    /// Start by the rank's own clock, nanoseconds.
    pub start_ns: i64,
    /// End of the collective by the rank's own clock, nanoseconds; the time itself is no longer
    /// part of the collective.
    pub end_ns: i64,
}

/// The collectives that one rank recorded in one communicator.
#[derive(Debug, Clone, PartialEq)]
pub struct CommunicatorOfRank {
    /// Name of the communicator if recorded, otherwise the number of its stream.
    pub communicator_name: String,
    /// Number of ranks in the communicator; 0 if the number is not recorded.
    pub ranks: u32,
    /// Collectives of the communicator in order of their start.
    pub collectives: Vec<RecordedRankCollective>,
}

/// The time of a rank in parts that add up: compute, exposed communication, copies and idle time,
/// in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankTimeByActivity {
    /// Kernels compute.
    pub compute_ns: i64,
    /// Time in which compute and communication ran at the same time, nanoseconds.
    pub hidden_communication_ns: i64,
    /// Communication without compute.
    pub exposed_communication_ns: i64,
    /// Time in which copies, page migrations or memsets ran alone, nanoseconds.
    pub copies_alone_ns: i64,
    /// Time without any operation of the rank, nanoseconds.
    pub idle_ns: i64,
}

impl RankTimeByActivity {
    /// Measures a rank's time by activity; `inside` returns how many nanoseconds of a time span
    /// count.
    fn measure_rank_time(
        trace: &Trace,
        classes: &OperationClassesOfTrace<'_>,
        operations: &OperationsInOrder,
        inside: impl Fn(i64, i64) -> i64,
    ) -> RankTimeByActivity {
        let mut times = Self::default();
        timeline::cut_gpu_time_into_pieces(
            &AllGpuOperations::number_operations_of_trace(trace),
            classes,
            operations.iter(),
            |piece| match piece {
                GpuTimelinePiece::Busy {
                    start_ns: start,
                    end_ns: end,
                    busy_category: line,
                    ..
                } => {
                    let ns = inside(start, end);
                    match line {
                        BusyTimeCategoryOfGpu::ExposedCommunication => {
                            times.exposed_communication_ns += ns
                        }
                        BusyTimeCategoryOfGpu::ExposedPageMigration
                        | BusyTimeCategoryOfGpu::ExposedCopies
                        | BusyTimeCategoryOfGpu::OnlyMemsets => times.copies_alone_ns += ns,
                        _ => times.compute_ns += ns,
                    }
                    if line == BusyTimeCategoryOfGpu::ComputeAndCommunication {
                        times.hidden_communication_ns += ns;
                    }
                }
                GpuTimelinePiece::Idle(gap) => times.idle_ns += inside(gap.start_ns, gap.end_ns),
            },
        );
        times
    }

    /// All times together.
    pub fn total_ns_of_all_activities(&self) -> i64 {
        self.compute_ns + self.exposed_communication_ns + self.copies_alone_ns + self.idle_ns
    }
}

/// One process on one GPU of a trace, as a rank of a job.
#[derive(Debug, Clone)]
pub struct TraceOfRank {
    /// Name of the trace, with process and GPU if the trace contains several ranks.
    pub trace_name: String,
    /// Name by which reports call the rank.
    pub rank_label: String,
    /// Rank number that the trace declares; `None` if it declares none.
    pub rank: Option<u32>,
    /// Number of ranks of the job that the trace declares (`world_size`).
    pub world_size: Option<u32>,
    /// Name of the host on which the rank ran, if recorded.
    pub host_name: Option<String>,
    /// Name of the rank's GPU, if recorded.
    pub gpu_name: Option<String>,
    /// Start of the first and end of the last operation, by the rank's clock, nanoseconds.
    pub first_start_and_last_end_ns: (i64, i64),
    /// Times of the rank between the start of its first and the end of its last operation.
    pub time_by_activity: RankTimeByActivity,
    pub communicators: Vec<CommunicatorOfRank>,
    /// The trace of the rank, which ranks of the same trace share.
    pub(super) shared_trace: Arc<OperationsWithLaunches>,
    /// Index of the process and ordinal of the GPU in the trace.
    pub(super) process_and_gpu: (u32, u32),
}

impl TraceOfRank {
    /// Splits a trace into its ranks: each process on each GPU that communicates. A trace without
    /// communication gives one rank without communicators.
    pub fn split_trace_into_ranks(name: &str, trace: Trace) -> Vec<TraceOfRank> {
        let recorded = Arc::new(OperationsWithLaunches::join_and_drop_calls(trace));
        let trace = &recorded.trace;
        let (all, classes) = (
            AllGpuOperations::number_operations_of_trace(trace),
            OperationClassesOfTrace::classify_operations_by_name(trace),
        );
        let operations = idle_time::operations_by_process_and_gpu(trace, &all, |_| true);
        let mut parts: Vec<Self> = operations
            .iter()
            .map(|(owner, ids)| {
                let (process, device) = *owner;
                let pid = trace.processes[process as usize].pid;
                let name = match operations.len() {
                    1 => name.to_owned(),
                    _ => format!("{name}, process {pid}, device {device}"),
                };
                summarise_rank_of_process_and_gpu(name, &recorded, &classes, ids, *owner)
            })
            .collect();
        let communicates = |part: &Self| !part.communicators.is_empty();
        if parts.iter().any(communicates) {
            parts.retain(communicates);
        } else {
            parts.truncate(1);
        }
        let declared = DeclaredRankAndWorldSize::read_declared_rank_of_trace(trace);
        // A trace declares only one rank number, so the numbers are unknown if it contains several
        // ranks.
        let rank = declared.rank.filter(|_| parts.len() == 1);
        for part in &mut parts {
            part.rank = rank;
            part.world_size = declared.world_size;
            part.host_name = trace.metadata.get("host_name").cloned();
        }
        parts
    }

    /// Measures the rank's time inside a span of the job's common time.
    pub(super) fn rank_time_inside_job_span(
        &self,
        clock: &ClockOfRank,
        (first, last): (i64, i64),
    ) -> RankTimeByActivity {
        let trace = &self.shared_trace.trace;
        let all = AllGpuOperations::number_operations_of_trace(trace);
        let devices = idle_time::operations_by_process_and_gpu(trace, &all, |_| true);
        let own = devices.iter().find(|(owner, _)| *owner == self.process_and_gpu);
        own.map_or_else(RankTimeByActivity::default, |(_, operations)| {
            let inside = |start: i64, end: i64| {
                let [start, end] =
                    [start, end].map(|time| clock.rank_time_to_job_time(time).clamp(first, last));
                end - start
            };
            RankTimeByActivity::measure_rank_time(
                trace,
                &OperationClassesOfTrace::classify_operations_by_name(trace),
                operations,
                inside,
            )
        })
    }

    /// Whether two ranks come from the same trace, which has one clock.
    pub(super) fn is_from_same_trace(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared_trace, &other.shared_trace)
    }
}

fn summarise_rank_of_process_and_gpu(
    name: String,
    recorded: &Arc<OperationsWithLaunches>,
    classes: &OperationClassesOfTrace<'_>,
    operations: &OperationsInOrder,
    owner: (u32, u32),
) -> TraceOfRank {
    let trace = &recorded.trace;
    let all = AllGpuOperations::number_operations_of_trace(trace);
    let start = operations.get(0).map_or(0, |id| all.operation_start_ns(id));
    let end = operations
        .iter()
        .map(|id| all.operation_end_exclusive_ns(id))
        .max()
        .unwrap_or(start)
        .max(start);
    let times =
        RankTimeByActivity::measure_rank_time(trace, classes, operations, |start, end| end - start);
    let mut communicators: Vec<CommunicatorOfRank> = Vec::new();
    let mut numbers: HashMap<(Option<u32>, u32), usize> = HashMap::new();
    let mut streams = 0;
    for id in operations.iter() {
        let Some(communication) = classes.communication_of_operation(id) else { continue };
        // A copy between GPUs is not a collective with a partner in another rank's trace, so
        // copies are skipped.
        if matches!(all.kind_and_table_row(id), (GpuOperationKind::Copy, _)) {
            continue;
        }
        let call = trace.collectives.recorded_collective_of_kernel(id);
        let place = all.place_of_operation(id).0;
        let key = call.map_or((None, place), |call| (Some(call.communicator_name.0), 0));
        let at = *numbers.entry(key).or_insert_with(|| {
            let name = call.map(|call| trace.names.text_of_name(call.communicator_name).to_owned());
            communicators.push(CommunicatorOfRank {
                communicator_name: name.unwrap_or_else(|| {
                    streams += 1;
                    format!("communication stream {streams}")
                }),
                ranks: call.map_or(0, |call| call.ranks),
                collectives: Vec::new(),
            });
            communicators.len() - 1
        });
        // The framework names a collective more exactly than a generic kernel name does, so its
        // name is preferred.
        let collective = call.map(|call| {
            CollectiveKind::from_kernel_name(trace.names.text_of_name(call.collective_name))
        });
        let collective = collective
            .filter(|&known| known != CollectiveKind::Unknown)
            .unwrap_or(communication.collective);
        communicators[at].collectives.push(RecordedRankCollective {
            collective,
            larger_buffer_bytes: call
                .map_or(0, |call| call.contributed_bytes.max(call.received_bytes)),
            bus_bytes: call.map_or(0.0, |call| {
                bus_bandwidth::bytes_across_link_of_rank(
                    collective,
                    call.ranks,
                    call.contributed_bytes,
                    call.received_bytes,
                )
            }),
            operation: id,
            start_ns: all.operation_start_ns(id),
            end_ns: all.operation_end_exclusive_ns(id),
        });
    }
    let device = trace
        .devices
        .iter()
        .find(|of| of.device_ordinal == owner.1)
        .map(|of| of.device_name.clone());
    TraceOfRank {
        rank_label: name.clone(),
        trace_name: name,
        rank: None,
        world_size: None,
        host_name: None,
        gpu_name: device,
        first_start_and_last_end_ns: (start, end),
        time_by_activity: times,
        communicators,
        shared_trace: Arc::clone(recorded),
        process_and_gpu: owner,
    }
}

/// Sets the names of ranks for reports: the declared rank, or else the part in which the trace
/// names differ.
pub(super) fn set_report_names_of_ranks(parts: &mut [TraceOfRank]) {
    let names: Vec<&str> = parts.iter().map(|part| part.trace_name.as_str()).collect();
    let first = names.first().copied().unwrap_or_default();
    let common = |&end: &usize| names.iter().all(|name| name.starts_with(&first[..end]));
    let ends = ["/", ", "]
        .into_iter()
        .flat_map(|separator| first.match_indices(separator).map(|(at, text)| at + text.len()));
    let common = ends.filter(common).max().unwrap_or(0);
    for part in parts {
        part.rank_label = match part.rank {
            Some(rank) => format!("rank {rank}"),
            None => part.trace_name[common..].to_owned(),
        };
    }
}

/// Rank number and number of ranks that a trace declares, in PyTorch's metadata.
#[derive(Default)]
struct DeclaredRankAndWorldSize {
    rank: Option<u32>,
    world_size: Option<u32>,
}

impl DeclaredRankAndWorldSize {
    fn read_declared_rank_of_trace(trace: &Trace) -> DeclaredRankAndWorldSize {
        let Some(text) = trace.metadata.get("distributedInfo") else { return Self::default() };
        let Ok(value) = serde_json::from_str::<serde_json::Value>(text) else {
            return Self::default();
        };
        let number = |key: &str| value[key].as_u64().and_then(|number| u32::try_from(number).ok());
        Self { rank: number("rank"), world_size: number("world_size") }
    }
}
