//! Joins GPU operations of a trace with the host calls that launched them, by correlation id within
//! a process.

pub mod calls;
pub mod graph_nodes;
pub(crate) mod passing_calls;

use crate::analyze::operations::{AllGpuOperations, GpuOperationId};
use crate::analyze::time_order::OperationsInOrder;
use crate::model::{Trace, process_and_correlation_key};

/// Marks an operation whose launch call is not known.
pub const NO_LAUNCH_CALL: u32 = u32::MAX;

/// For each GPU operation of a trace, the host call that launched it.
#[derive(Debug, Clone)]
pub struct LaunchCallOfOperations {
    /// Index of the host call that launched each operation, or [`NO_LAUNCH_CALL`].
    pub call_index_of_operation: Vec<u32>,
}

impl LaunchCallOfOperations {
    /// Joins a trace. A graph launch is joined with all operations of its graph, so several
    /// operations may have one call.
    pub fn join_operations_with_host_calls(trace: &Trace) -> LaunchCallOfOperations {
        let all = AllGpuOperations::number_operations_of_trace(trace);
        let mut call_of = vec![NO_LAUNCH_CALL; all.len()];
        let operations = operations_by_correlation_key(trace);
        let calls = &trace.calls;
        let mut callers: Vec<(u64, u32)> = (0u32..)
            .zip(&calls.correlation)
            .filter(|&(_, &correlation)| correlation != 0)
            .map(|(call, &correlation)| {
                let thread = calls.thread_index[call as usize] as usize;
                (
                    process_and_correlation_key(trace.threads[thread].process_index, correlation),
                    call,
                )
            })
            .collect();
        if !callers.is_sorted() {
            callers.sort_unstable();
        }
        let mut next = 0;
        for operation in operations.iter() {
            let key = correlation_key_of_operation(trace, &all, operation);
            while next < callers.len() && callers[next].0 < key {
                next += 1;
            }
            // If several host calls have one correlation id, the first is taken.
            if next < callers.len() && callers[next].0 == key {
                call_of[operation as usize] = callers[next].1;
            }
        }
        Self { call_index_of_operation: call_of }
    }

    /// Returns the number of operations whose launch call the trace does not record.
    pub fn count_operations_without_launch_call(&self) -> usize {
        self.call_index_of_operation.iter().filter(|&&call| call == NO_LAUNCH_CALL).count()
    }
}

/// Returns the operations that have a correlation id, in order of [`correlation_key_of_operation`],
/// operations of one call in order of their ids.
pub(crate) fn operations_by_correlation_key(trace: &Trace) -> OperationsInOrder {
    let all = AllGpuOperations::number_operations_of_trace(trace);
    let key = |id: GpuOperationId| correlation_key_of_operation(trace, &all, id);
    OperationsInOrder::sort_operations_by_key(
        all.all_operation_ids().filter(|&id| all.correlation_id_of_operation(id) != 0),
        key,
    )
}

/// Returns the key of process and correlation id that an operation shares with its launch call.
pub(crate) fn correlation_key_of_operation(
    trace: &Trace,
    all: &AllGpuOperations<'_>,
    id: GpuOperationId,
) -> u64 {
    process_and_correlation_key(
        trace.process_index_of_place(all.place_of_operation(id)),
        all.correlation_id_of_operation(id),
    )
}
