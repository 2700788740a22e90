//! Joins operations with the calls that launched them: by correlation id, within a process.

pub mod calls;
pub mod graph_nodes;
pub(crate) mod passing_calls;

use crate::analyze::operations::{AllOperations, OperationId};
use crate::analyze::time_order::SortedOperations;
use crate::model::{Trace, launch_correlation_key};

/// No call is known.
pub const NO_CALL: u32 = u32::MAX;

/// Records which host call launched which operation.
#[derive(Debug, Clone)]
pub struct TraceLaunches {
    /// Index of the launch call of each operation, or [`NO_CALL`].
    pub call_of: Vec<u32>,
}

impl TraceLaunches {
    /// Joins a trace. Joins a graph launch with all nodes of its graph, so several operations may
    /// have one call.
    pub fn join_operations_with_calls(trace: &Trace) -> TraceLaunches {
        let all = AllOperations::new(trace);
        let mut call_of = vec![NO_CALL; all.len()];
        let operations = launches_by_correlation(trace);
        let calls = &trace.calls;
        let mut callers: Vec<(u64, u32)> = (0u32..)
            .zip(&calls.correlation)
            .filter(|&(_, &correlation)| correlation != 0)
            .map(|(call, &correlation)| {
                let thread = calls.thread[call as usize] as usize;
                (launch_correlation_key(trace.threads[thread].process, correlation), call)
            })
            .collect();
        if !callers.is_sorted() {
            callers.sort_unstable();
        }
        let mut next = 0;
        for operation in operations.iter() {
            let key = correlation_key(trace, &all, operation);
            while next < callers.len() && callers[next].0 < key {
                next += 1;
            }
            // If several calls have one correlation id, the first is used.
            if next < callers.len() && callers[next].0 == key {
                call_of[operation as usize] = callers[next].1;
            }
        }
        Self { call_of }
    }

    /// Returns the number of operations whose launch call is not in the trace.
    pub fn operations_without_call(&self) -> usize {
        self.call_of.iter().filter(|&&call| call == NO_CALL).count()
    }
}

/// Operations with a correlation id, in order of their [`correlation_key`]; of one call by their
/// numbers.
pub(crate) fn launches_by_correlation(trace: &Trace) -> SortedOperations {
    let all = AllOperations::new(trace);
    let key = |id: OperationId| correlation_key(trace, &all, id);
    SortedOperations::operations_by_key(all.ids().filter(|&id| all.correlation(id) != 0), key)
}

/// The key that joins an operation with its launch call.
pub(crate) fn correlation_key(trace: &Trace, all: &AllOperations<'_>, id: OperationId) -> u64 {
    launch_correlation_key(trace.process_of_place(all.place(id)), all.correlation(id))
}
