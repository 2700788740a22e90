//! Reduces a rank's trace to what a replay needs: its GPU operations, and the calls that launched
//! them or waited.

use crate::analyze::launches::calls::{LaunchCallTable, OperationLaunchCall};
use crate::analyze::launches::{LaunchCallOfOperations, NO_LAUNCH_CALL};
use crate::analyze::operations::AllGpuOperations;
use crate::analyze::replay::{CallThatWaitsForGpu, TraceDependencies};
use crate::diagnose::host::host_waits::which_names_wait_for_gpu;
use crate::model::Trace;

/// A trace whose host calls were joined with operations and then dropped, with the resulting
/// launches and waits.
#[derive(Debug)]
pub(super) struct OperationsWithLaunches {
    pub trace: Trace,
    launches: LaunchCallTable,
    waits: Vec<CallThatWaitsForGpu>,
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
            let (start, end, thread) = (calls.start[call], calls.end[call], calls.thread[call]);
            launch_calls.set_launch_call_of_operation(
                &all,
                id,
                OperationLaunchCall { start, end, thread },
            );
        }
        let wait = |call: usize| CallThatWaitsForGpu {
            thread: calls.thread[call],
            start: calls.start[call],
            end: calls.end[call],
        };
        let waits = (0..calls.call_count()).filter(|&call| waiting[calls.name[call].0 as usize]);
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
