//! Reduces a rank's trace to what a replay needs: its GPU operations, and the calls that launched
//! them or waited.

use crate::analyze::launches::calls::{LaunchCallTable, OperationLaunchCall};
use crate::analyze::launches::{LaunchCallOfOperations, NO_LAUNCH_CALL};
use crate::analyze::operations::AllGpuOperations;
use crate::analyze::replay::{HostCallThatWaitsForGpu, TraceDependencies};
use crate::diagnose::host::host_waits::which_names_wait_for_gpu;
use crate::model::Trace;

/// A trace whose host calls were joined with operations and then dropped, with the resulting
/// launches and waits.
#[derive(Debug)]
pub(super) struct OperationsWithLaunches {
    pub trace: Trace,
    launches: LaunchCallTable,
    waits: Vec<HostCallThatWaitsForGpu>,
}

impl OperationsWithLaunches {
    /// Joins the trace's host calls with its operations, and drops the calls.
    pub fn join_and_drop_calls(mut trace: Trace) -> Self {
        let launches = LaunchCallOfOperations::join_operations_with_host_calls(&trace);
        let waiting = which_names_wait_for_gpu(&trace);
        let calls = std::mem::take(&mut trace.calls);
        let all = AllGpuOperations::number_operations_of_trace(&trace);
        let mut launch_calls = LaunchCallTable::table_without_launch_calls(all.len());
        for (id, &call) in all
            .all_operation_ids()
            .zip(&launches.call_index_of_operation)
            .filter(|&(_, &call)| call != NO_LAUNCH_CALL)
        {
            let call = call as usize;
            let (start, end, thread) =
                (calls.start_ns[call], calls.end_ns[call], calls.thread_index[call]);
            launch_calls.set_launch_call_of_operation(
                &all,
                id,
                OperationLaunchCall {
                    call_start_ns: start,
                    call_end_ns: end,
                    thread_index: thread,
                },
            );
        }
        let wait = |call: usize| HostCallThatWaitsForGpu {
            thread_index: calls.thread_index[call],
            wait_start_ns: calls.start_ns[call],
            wait_end_ns: calls.end_ns[call],
        };
        let waits =
            (0..calls.call_count()).filter(|&call| waiting[calls.function_name[call].0 as usize]);
        let waits = waits.map(wait).collect();
        Self { launches: launch_calls, waits, trace }
    }

    /// Whether the trace recorded the host calls that launched operations.
    pub fn has_any_launch_call(&self) -> bool {
        self.launches.is_any_launch_call_recorded()
    }

    /// Finds the dependencies among the operations; `None` without operations.
    pub fn dependencies_of_operations(&self) -> Option<TraceDependencies<'_>> {
        TraceDependencies::find_dependencies(&self.trace, &self.launches, &self.waits)
    }
}
