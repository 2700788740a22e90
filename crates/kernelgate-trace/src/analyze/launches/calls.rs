//! The calls that launched operations, 12 bytes an operation.

use hashbrown::HashMap;

use crate::analyze::operations::{AllOperations, OperationId};

/// No thread: the launch is not recorded.
const NONE: u32 = u32::MAX;
/// The times of a launch are in [`LaunchCalls::long`].
const LONG: i32 = i32::MIN;

/// The call that launched an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchCall {
    /// When it was entered.
    pub start: i64,
    /// When it returned.
    pub end: i64,
    /// Index into [`crate::model::Trace::threads`].
    pub thread: u32,
}

/// The launch of each operation, where it is recorded.
#[derive(Debug, Clone, Default)]
pub struct LaunchCalls {
    /// From the start of the call to that of the operation, in nanoseconds.
    lead: Vec<i32>,
    /// The length of the call in nanoseconds.
    length: Vec<u32>,
    thread: Vec<u32>,
    /// Start and end of calls that are further away from their operation, or longer.
    long: HashMap<OperationId, (i64, i64)>,
}

impl LaunchCalls {
    /// No launch of so many operations is recorded.
    pub fn new(operations: usize) -> Self {
        Self {
            lead: vec![0; operations],
            length: vec![0; operations],
            thread: vec![NONE; operations],
            long: HashMap::new(),
        }
    }

    /// Sets the launch of an operation.
    pub fn set(&mut self, all: &AllOperations<'_>, id: OperationId, call: LaunchCall) {
        let index = id as usize;
        self.thread[index] = call.thread;
        let lead = all.start(id).checked_sub(call.start).and_then(|ns| i32::try_from(ns).ok());
        let length = call.end.checked_sub(call.start).and_then(|ns| u32::try_from(ns).ok());
        match (lead.filter(|&lead| lead != LONG), length) {
            (Some(lead), Some(length)) => (self.lead[index], self.length[index]) = (lead, length),
            _ => {
                self.lead[index] = LONG;
                self.long.insert(id, (call.start, call.end));
            }
        }
    }

    /// The launch of an operation.
    pub fn get(&self, all: &AllOperations<'_>, id: OperationId) -> Option<LaunchCall> {
        let index = id as usize;
        let thread = self.thread.get(index).copied().filter(|&thread| thread != NONE)?;
        let (start, end) = match self.lead[index] {
            LONG => self.long[&id],
            lead => {
                let start = all.start(id) - i64::from(lead);
                (start, start + i64::from(self.length[index]))
            }
        };
        Some(LaunchCall { start, end, thread })
    }

    /// Whether the launch of an operation is recorded.
    pub fn has(&self, id: OperationId) -> bool {
        self.thread.get(id as usize).is_some_and(|&thread| thread != NONE)
    }

    /// Whether any launch is recorded.
    pub fn any(&self) -> bool {
        self.thread.iter().any(|&thread| thread != NONE)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::model::Trace;
    use crate::model::gpu::PlaceId;

    #[test]
    fn launches_of_any_distance_and_length_are_exact() {
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
        assert!(!launches.any());
        (0u32..).zip(calls).for_each(|(id, call)| launches.set(&all, id, call));
        let read: Vec<LaunchCall> = (0..3).map(|id| launches.get(&all, id).unwrap()).collect();
        assert_eq!(read, calls);
        assert_eq!((launches.get(&all, 3), launches.has(3), launches.has(1)), (None, false, true));
    }
}
