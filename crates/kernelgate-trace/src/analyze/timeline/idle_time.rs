//! Busy and idle times of a GPU for one process of a trace.

use crate::analyze::operations::{AllGpuOperations, GpuOperationId};
use crate::analyze::time_order::OperationsInOrder;
use crate::model::Trace;
use crate::model::packed_columns::{
    BitPackedColumn, PackableInteger, first_number_that_fails_condition,
};

/// A span of time in which no operation of a process ran on a GPU, between two of its operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuIdleGap {
    /// First idle nanosecond.
    pub start_ns: i64,
    /// Exclusive end of the idle gap: the first nanosecond after its last one.
    pub end_ns: i64,
    /// The operation that ended last before the gap.
    pub operation_before_gap: GpuOperationId,
    /// The operation that started next, at the end of the gap.
    pub operation_after_gap: GpuOperationId,
    /// Number of operations of this process on this GPU that had started before the gap.
    pub operations_started_before_gap: u32,
}

impl GpuIdleGap {
    /// Length of the GPU's idle gap, nanoseconds.
    pub fn idle_gap_length_ns(&self) -> i64 {
        self.end_ns - self.start_ns
    }
}

/// Idle gaps of one process on one GPU, in order of time; a gap's times are computed from the
/// operations before and after it.
#[derive(Debug, Clone, Default)]
pub struct GpuIdleGaps {
    /// For each gap, the operation that ended the gap by starting.
    operation_after_gap: BitPackedColumn<GpuOperationId>,
    /// For each gap, the id of the operation after it minus the id of the operation before it.
    id_after_minus_id_before: BitPackedColumn<i64>,
    /// For each gap, the id of the operation after it minus the number of operations that had
    /// started before the gap.
    id_after_minus_started_count: BitPackedColumn<i64>,
}

impl GpuIdleGaps {
    /// Returns the number of idle gaps.
    pub fn len(&self) -> usize {
        self.operation_after_gap.row_count()
    }

    /// Returns whether the GPU has no idle gap.
    pub fn is_empty(&self) -> bool {
        self.operation_after_gap.has_no_row()
    }

    pub fn idle_gap_at_index(
        &self,
        all: &AllGpuOperations<'_>,
        index: usize,
    ) -> Option<GpuIdleGap> {
        let after = self.operation_after_gap.decoded_row(index)?;
        let from = |of: &BitPackedColumn<i64>| {
            GpuOperationId::from_packed_integer(after.to_packed_integer() - of.at(index))
        };
        let (before, started) =
            (from(&self.id_after_minus_id_before), from(&self.id_after_minus_started_count));
        let start = all.operation_end_exclusive_ns(before).max(all.operation_start_ns(before));
        Some(GpuIdleGap {
            start_ns: start,
            end_ns: all.operation_start_ns(after),
            operation_before_gap: before,
            operation_after_gap: after,
            operations_started_before_gap: started,
        })
    }

    /// Iterates over the idle gaps from an index on, in order of time.
    pub fn idle_gaps_from_index<'a>(
        &'a self,
        all: &'a AllGpuOperations<'_>,
        index: usize,
    ) -> impl Iterator<Item = GpuIdleGap> + 'a {
        (index..self.len()).filter_map(|index| self.idle_gap_at_index(all, index))
    }

    pub fn iter<'a>(
        &'a self,
        all: &'a AllGpuOperations<'_>,
    ) -> impl Iterator<Item = GpuIdleGap> + 'a {
        self.idle_gaps_from_index(all, 0)
    }

    /// Returns the first index at which `holds` is false, if it holds for all gaps before.
    pub fn first_gap_index_where_not(
        &self,
        all: &AllGpuOperations<'_>,
        holds: impl Fn(&GpuIdleGap) -> bool,
    ) -> usize {
        first_number_that_fails_condition(self.len(), |index| {
            self.idle_gap_at_index(all, index).is_some_and(|gap| holds(&gap))
        })
    }

    fn append_idle_gap(&mut self, before: GpuOperationId, after: GpuOperationId, started: u32) {
        self.operation_after_gap.push_row(after);
        self.id_after_minus_id_before
            .push_row(after.to_packed_integer() - before.to_packed_integer());
        self.id_after_minus_started_count
            .push_row(after.to_packed_integer() - started.to_packed_integer());
    }
}

/// Busy and idle time of one process on one GPU; kernels, copies, memsets and graph launches that
/// run at the same time count once.
#[derive(Debug, Clone)]
pub struct ProcessActivityOnGpu {
    /// Index into [`Trace::processes`].
    pub process_index: u32,
    pub gpu_ordinal: u32,
    /// Start of the first and end of the last operation of this process on this GPU, nanoseconds.
    pub first_start_and_last_end_ns: (i64, i64),
    /// Nanoseconds in which at least one operation of this process ran on this GPU.
    pub gpu_busy_ns: i64,
    /// Idle gaps of the process on the GPU, in order of time.
    pub gaps: GpuIdleGaps,
    pub operation_count: usize,
}

impl ProcessActivityOnGpu {
    /// Nanoseconds from the start of the first to the end of the last operation.
    pub fn first_start_to_last_end_ns(&self) -> i64 {
        self.first_start_and_last_end_ns.1 - self.first_start_and_last_end_ns.0
    }

    /// Nanoseconds between the process's first and last operation in which the GPU ran none of its
    /// operations.
    pub fn idle_time_ns(&self) -> i64 {
        self.first_start_to_last_end_ns() - self.gpu_busy_ns
    }
}

/// Returns the activity of every process on every GPU, computed from the operations that `wanted`
/// accepts.
pub fn activities_by_process_and_gpu(
    trace: &Trace,
    wanted: impl Fn(GpuOperationId) -> bool,
) -> Vec<ProcessActivityOnGpu> {
    let all = AllGpuOperations::number_operations_of_trace(trace);
    let devices = operations_by_process_and_gpu(trace, &all, wanted);
    devices
        .iter()
        .map(|(owner, operations)| activity_of_process_on_gpu(&all, *owner, operations, |_, _| {}))
        .collect()
}

/// Returns for each operation the nanoseconds in which it ran while no operation that had started
/// earlier ran. The operations' exclusive times add up to the busy time of all processes on all
/// GPUs.
pub fn exclusive_busy_ns_of_operations(trace: &Trace) -> BitPackedColumn<i64> {
    let all = AllGpuOperations::number_operations_of_trace(trace);
    let mut own = BitPackedColumn::column_filled_with(all.len(), 0);
    for (owner, operations) in operations_by_process_and_gpu(trace, &all, |_| true) {
        activity_of_process_on_gpu(&all, owner, &operations, |id, own_ns| {
            own.replace_row(id as usize, own_ns)
        });
    }
    own
}

/// Index of a process in the trace, and ordinal of a GPU.
pub type ProcessAndGpu = (u32, u32);

/// Returns each process on each GPU, in order, with its operations in order of their start.
pub fn operations_by_process_and_gpu(
    trace: &Trace,
    all: &AllGpuOperations<'_>,
    wanted: impl Fn(GpuOperationId) -> bool,
) -> Vec<(ProcessAndGpu, OperationsInOrder)> {
    let owner_of = |place: &crate::model::gpu::ProcessDeviceContextAndStream| {
        (place.process_index, place.device)
    };
    let mut owners: Vec<ProcessAndGpu> = trace.places.iter().map(owner_of).collect();
    owners.sort_unstable();
    owners.dedup();
    let number = |place| owners.binary_search(&owner_of(place)).unwrap_or(0);
    let by_place: Vec<usize> = trace.places.iter().map(number).collect();
    let owner = |id: GpuOperationId| by_place[all.place_of_operation(id).0 as usize];
    let ids = || all.all_operation_ids().filter(|&id| wanted(id));
    let start = |id| all.operation_start_ns(id);
    let mut counts = vec![0usize; owners.len()];
    ids().for_each(|id| counts[owner(id)] += 1);
    let mut used = (0..owners.len()).filter(|&number| counts[number] > 0);
    if let (Some(only), None) = (used.next(), used.next()) {
        return vec![(owners[only], OperationsInOrder::sort_operations_by_key(ids(), start))];
    }
    // One pass distributes all operations to lists, independent of the number of processes and
    // GPUs.
    let mut lists: Vec<Vec<GpuOperationId>> = counts.into_iter().map(Vec::with_capacity).collect();
    ids().for_each(|id| lists[owner(id)].push(id));
    let used = owners.into_iter().zip(lists).filter(|(_, list)| !list.is_empty());
    used.map(|(owner, list)| {
        (owner, OperationsInOrder::sort_operations_by_key(list.iter().copied(), start))
    })
    .collect()
}

/// Computes the activity of one process on one GPU; calls `own` with each operation's exclusive
/// nanoseconds.
fn activity_of_process_on_gpu(
    all: &AllGpuOperations<'_>,
    (process, device): ProcessAndGpu,
    operations: &OperationsInOrder,
    mut own: impl FnMut(GpuOperationId, i64),
) -> ProcessActivityOnGpu {
    let id = operations.get(0).expect("an owner has operations");
    let first = all.operation_start_ns(id);
    let (mut busy_ns, mut until, mut last, mut gaps) = (0, first, id, GpuIdleGaps::default());
    for (started, id) in (0u32..).zip(operations.iter()) {
        let (start, end) = (all.operation_start_ns(id), all.operation_end_exclusive_ns(id));
        if start > until {
            gaps.append_idle_gap(last, id, started);
            (until, last) = (start, id);
        }
        if end > until {
            own(id, end - until);
            busy_ns += end - until;
            (until, last) = (end, id);
        }
    }
    let (span, operations) = ((first, until), operations.len());
    ProcessActivityOnGpu {
        process_index: process,
        gpu_ordinal: device,
        first_start_and_last_end_ns: span,
        gpu_busy_ns: busy_ns,
        gaps,
        operation_count: operations,
    }
}
