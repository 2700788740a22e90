//! The host calls that launched GPU operations.

use crate::analyze::operations::{AllOperations, OperationId};
use crate::model::packed_columns::PackedColumn;

/// The host call that launched an operation, with its times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchCall {
    /// Time at which the host entered the call, nanoseconds.
    pub start: i64,
    /// Time at which the call returned, nanoseconds.
    pub end: i64,
    /// Index into [`crate::model::Trace::threads`].
    pub thread: u32,
}

/// The launch call of each operation, if it was recorded.
#[derive(Debug, Clone, Default)]
pub struct LaunchCalls {
    /// Time from the start of the call to the start of its operation, nanoseconds.
    lead: PackedColumn<i64>,
    /// The length of the call in nanoseconds.
    length: PackedColumn<i64>,
    /// 1 + index into [`crate::model::Trace::threads`]; 0: the launch is not recorded.
    thread: PackedColumn<u32>,
}

impl LaunchCalls {
    /// A table for a number of operations in which no launch is known yet.
    pub fn new(operations: usize) -> Self {
        Self {
            lead: PackedColumn::column_filled_with(operations, 0),
            length: PackedColumn::column_filled_with(operations, 0),
            thread: PackedColumn::column_filled_with(operations, 0),
        }
    }

    pub fn set_launch_call(&mut self, all: &AllOperations<'_>, id: OperationId, call: LaunchCall) {
        let index = id as usize;
        self.lead.set_row(index, all.start(id).wrapping_sub(call.start));
        self.length.set_row(index, call.end.wrapping_sub(call.start));
        self.thread.set_row(index, call.thread + 1);
    }

    /// The launch call of an operation, if it was recorded.
    pub fn get(&self, all: &AllOperations<'_>, id: OperationId) -> Option<LaunchCall> {
        self.call_of_operation(all.start(id), id)
    }

    pub fn call_of_operation(&self, start: i64, id: OperationId) -> Option<LaunchCall> {
        let index = id as usize;
        let thread = self.thread.get(index)?.checked_sub(1)?;
        let start = start.wrapping_sub(self.lead.at(index));
        let end = start.wrapping_add(self.length.at(index));
        Some(LaunchCall { start, end, thread })
    }

    /// Returns whether the launch call of an operation was recorded.
    pub fn has_launch(&self, id: OperationId) -> bool {
        self.thread.get(id as usize).is_some_and(|thread| thread != 0)
    }

    /// Whether the launch call of any operation was recorded.
    pub fn is_any_recorded(&self) -> bool {
        self.thread.iter().any(|thread| thread != 0)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::model::Trace;
    use crate::model::gpu::PlaceId;

    #[test]
    fn launch_calls_of_any_distance_and_length_are_stored_exactly() {
        let mut trace = Trace::default();
        let hour = 3_600_000_000_000;
        for start in [5_000, 2 * hour, 7_000, 9_000] {
            trace.sets.on_gpu.push(start, start + 10, PlaceId(0), 0);
        }
        let all = AllOperations::new(&trace);
        let calls = [
            LaunchCall { start: 1_000, end: 3_000, thread: 4 },
            LaunchCall { start: 2_000, end: hour, thread: 1 },
            LaunchCall { start: 7_500, end: 7_600, thread: 0 },
        ];
        let mut launches = LaunchCalls::new(4);
        assert!(!launches.is_any_recorded());
        (0u32..).zip(calls).for_each(|(id, call)| launches.set_launch_call(&all, id, call));
        let read: Vec<LaunchCall> = (0..3).map(|id| launches.get(&all, id).unwrap()).collect();
        assert_eq!(read, calls);
        assert_eq!(
            (launches.get(&all, 3), launches.has_launch(3), launches.has_launch(1)),
            (None, false, true)
        );
    }
}
