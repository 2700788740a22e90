//! A trace of a job, reduced to what a replay needs: its operations, and the calls that launched
//! them.

use crate::analyze::launches::calls::{LaunchCall, LaunchCalls};
use crate::analyze::launches::{NO_CALL, TraceLaunches};
use crate::analyze::operations::AllOperations;
use crate::analyze::replay::{GpuWaitCall, OperationDependencies};
use crate::diagnose::host::host_waits::names_that_wait;
use crate::model::Trace;

/// A trace whose calls were joined with operations and then dropped.
#[derive(Debug)]
pub(super) struct RecordedOperations {
    pub trace: Trace,
    launches: LaunchCalls,
    waits: Vec<GpuWaitCall>,
}

impl RecordedOperations {
    /// Joins the calls of a trace with its operations, and drops the calls.
    pub fn new(mut trace: Trace) -> Self {
        let launches = TraceLaunches::join_operations_with_calls(&trace);
        let waiting = names_that_wait(&trace);
        let calls = std::mem::take(&mut trace.calls);
        let all = AllOperations::new(&trace);
        let mut launch_calls = LaunchCalls::new(all.len());
        for (id, &call) in all.ids().zip(&launches.call_of).filter(|&(_, &call)| call != NO_CALL) {
            let call = call as usize;
            let (start, end, thread) = (calls.start[call], calls.end[call], calls.thread[call]);
            launch_calls.set_launch_call(&all, id, LaunchCall { start, end, thread });
        }
        let wait = |call: usize| GpuWaitCall {
            thread: calls.thread[call],
            start: calls.start[call],
            end: calls.end[call],
        };
        let waits = (0..calls.len()).filter(|&call| waiting[calls.name[call].0 as usize]);
        let waits = waits.map(wait).collect();
        Self { launches: launch_calls, waits, trace }
    }

    /// Whether the calls that launch were recorded.
    pub fn has_launch_calls(&self) -> bool {
        self.launches.is_any_recorded()
    }

    /// Builds the dependencies among the recorded operations.
    pub fn recorded_dependencies(&self) -> Option<OperationDependencies<'_>> {
        OperationDependencies::new(&self.trace, &self.launches, &self.waits)
    }
}
