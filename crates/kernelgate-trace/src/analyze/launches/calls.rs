//! Tables of the host calls that launched the GPU operations of a trace.

use crate::analyze::operations::{AllGpuOperations, GpuOperationId};
use crate::model::packed_columns::BitPackedColumn;

/// The host call that launched a GPU operation: its times and its thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OperationLaunchCall {
    /// Time at which the host entered the launch call, nanoseconds.
    pub call_start_ns: i64,
    /// Time at which the launch call returned, nanoseconds.
    pub call_end_ns: i64,
    /// Index into [`crate::model::Trace::threads`].
    pub thread_index: u32,
}

/// For each GPU operation of a trace, the host call that launched it, if the trace records the
/// call; stored compactly.
#[derive(Debug, Clone, Default)]
pub struct LaunchCallTable {
    /// Time from the start of the launch call to the start of its GPU operation, nanoseconds; may
    /// be negative.
    call_start_to_operation_start_ns: BitPackedColumn<i64>,
    /// Duration of the launch call, nanoseconds.
    call_duration_ns: BitPackedColumn<i64>,
    /// 1 + index of the calling thread in [`crate::model::Trace::threads`]; 0 if the launch call is
    /// not recorded.
    thread_index_plus_one: BitPackedColumn<u32>,
}

impl LaunchCallTable {
    /// Returns a table for a number of GPU operations, of which no launch call is recorded yet.
    pub fn table_without_launch_calls(operations: usize) -> Self {
        Self {
            call_start_to_operation_start_ns: BitPackedColumn::column_filled_with(operations, 0),
            call_duration_ns: BitPackedColumn::column_filled_with(operations, 0),
            thread_index_plus_one: BitPackedColumn::column_filled_with(operations, 0),
        }
    }

    pub fn set_launch_call_of_operation(
        &mut self,
        all: &AllGpuOperations<'_>,
        id: GpuOperationId,
        call: OperationLaunchCall,
    ) {
        let index = id as usize;
        self.call_start_to_operation_start_ns
            .replace_row(index, all.operation_start_ns(id).wrapping_sub(call.call_start_ns));
        self.call_duration_ns.replace_row(index, call.call_end_ns.wrapping_sub(call.call_start_ns));
        self.thread_index_plus_one.replace_row(index, call.thread_index + 1);
    }

    /// Returns the host call that launched an operation, if it was recorded.
    pub fn launch_call_of_operation(
        &self,
        all: &AllGpuOperations<'_>,
        id: GpuOperationId,
    ) -> Option<OperationLaunchCall> {
        self.launch_call_of_operation_starting_at(all.operation_start_ns(id), id)
    }

    pub fn launch_call_of_operation_starting_at(
        &self,
        start: i64,
        id: GpuOperationId,
    ) -> Option<OperationLaunchCall> {
        let index = id as usize;
        let thread = self.thread_index_plus_one.decoded_row(index)?.checked_sub(1)?;
        let start = start.wrapping_sub(self.call_start_to_operation_start_ns.at(index));
        let end = start.wrapping_add(self.call_duration_ns.at(index));
        Some(OperationLaunchCall { call_start_ns: start, call_end_ns: end, thread_index: thread })
    }

    /// Returns whether the host call that launched an operation was recorded.
    pub fn has_recorded_launch_call(&self, id: GpuOperationId) -> bool {
        self.thread_index_plus_one.decoded_row(id as usize).is_some_and(|thread| thread != 0)
    }

    /// Returns whether the host call that launched any operation was recorded.
    pub fn is_any_launch_call_recorded(&self) -> bool {
        self.thread_index_plus_one.iter_decoded_rows().any(|thread| thread != 0)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::model::Trace;
    use crate::model::gpu::OperationStreamIndex;

    #[test]
    fn launch_calls_of_any_lead_and_length_are_stored_exactly() {
        let mut trace = Trace::default();
        let hour = 3_600_000_000_000;
        for start in [5_000, 2 * hour, 7_000, 9_000] {
            trace.memsets.on_gpu.push_operation(start, start + 10, OperationStreamIndex(0), 0);
        }
        let all = AllGpuOperations::number_operations_of_trace(&trace);
        let calls = [
            OperationLaunchCall { call_start_ns: 1_000, call_end_ns: 3_000, thread_index: 4 },
            OperationLaunchCall { call_start_ns: 2_000, call_end_ns: hour, thread_index: 1 },
            OperationLaunchCall { call_start_ns: 7_500, call_end_ns: 7_600, thread_index: 0 },
        ];
        let mut launches = LaunchCallTable::table_without_launch_calls(4);
        assert!(!launches.is_any_launch_call_recorded());
        (0u32..)
            .zip(calls)
            .for_each(|(id, call)| launches.set_launch_call_of_operation(&all, id, call));
        let read: Vec<OperationLaunchCall> =
            (0..3).map(|id| launches.launch_call_of_operation(&all, id).unwrap()).collect();
        assert_eq!(read, calls);
        assert_eq!(
            (
                launches.launch_call_of_operation(&all, 3),
                launches.has_recorded_launch_call(3),
                launches.has_recorded_launch_call(1)
            ),
            (None, false, true)
        );
    }
}
