//! State while host calls are read in order of time: open ranges, operations that each call
//! launched, and graph nodes that were created before.

use std::cmp::Reverse;

use crate::analyze::launches::{correlation_key_of_operation, operations_by_correlation_key};
use crate::analyze::operations::{AllGpuOperations, GpuOperationId};
use crate::analyze::time_order::OperationsInOrder;
use crate::model::Trace;
use crate::model::process_and_correlation_key;
use crate::read::{StreamedCallRow, StreamedRangeRow};

/// An open NVTX range of a host thread, with facts that an analysis has collected about it.
#[derive(Debug)]
pub(crate) struct OpenRangeWithState<S> {
    pub row: StreamedRangeRow,
    pub range_state: S,
}

/// The open NVTX ranges of each host thread, in order of opening. Open ranges of a thread need not
/// nest.
#[derive(Debug)]
pub(crate) struct OpenRangesByThread<S> {
    open_ranges_by_thread: Vec<Vec<OpenRangeWithState<S>>>,
}

impl<S> Default for OpenRangesByThread<S> {
    fn default() -> Self {
        Self { open_ranges_by_thread: Vec::new() }
    }
}

impl<S> OpenRangesByThread<S> {
    fn open_ranges_of_thread(&mut self, thread: u32) -> &mut Vec<OpenRangeWithState<S>> {
        let thread = thread as usize;
        if self.open_ranges_by_thread.len() <= thread {
            self.open_ranges_by_thread.resize_with(thread + 1, Vec::new);
        }
        &mut self.open_ranges_by_thread[thread]
    }

    /// Opens a range; may remove ranges of its thread that have ended, and passes each removed
    /// range to `closed`.
    pub fn open_range_of_thread(
        &mut self,
        row: StreamedRangeRow,
        state: S,
        closed: impl FnMut(OpenRangeWithState<S>),
    ) {
        let open = self.open_ranges_of_thread(row.thread_index);
        if open.len() == open.capacity() {
            remove_ranges_that_ended_before(open, row.start_ns, closed);
        }
        open.push(OpenRangeWithState { row, range_state: state });
    }

    /// Returns the ranges of a thread that have not ended at `time`; passes the ended ranges to
    /// `closed`.
    pub fn ranges_of_thread_open_at(
        &mut self,
        thread: u32,
        time: i64,
        closed: impl FnMut(OpenRangeWithState<S>),
    ) -> &mut [OpenRangeWithState<S>] {
        let open = self.open_ranges_of_thread(thread);
        remove_ranges_that_ended_before(open, time, closed);
        open
    }

    /// Returns the innermost range of a thread that was open from `start` to `end`.
    pub fn innermost_range_around_span(
        &mut self,
        thread: u32,
        (start, end): (i64, i64),
    ) -> Option<&OpenRangeWithState<S>> {
        let open = self.ranges_of_thread_open_at(thread, start, |_| ());
        open.iter().rev().find(|range| range.row.end_ns >= end)
    }

    /// Closes all.
    pub fn close_all_ranges(&mut self, closed: impl FnMut(OpenRangeWithState<S>)) {
        self.open_ranges_by_thread.drain(..).flatten().for_each(closed);
    }
}

fn remove_ranges_that_ended_before<S>(
    open: &mut Vec<OpenRangeWithState<S>>,
    time: i64,
    closed: impl FnMut(OpenRangeWithState<S>),
) {
    open.extract_if(.., |range| range.row.end_ns < time).for_each(closed);
}

/// GPU operations of a trace in order of the key that joins them with launch calls, with marks of
/// those whose call was read.
#[derive(Debug, Default)]
pub(crate) struct OperationsByLaunchKey {
    /// Operations that have a correlation id, in order of their correlation keys.
    operations: OperationsInOrder,
    /// One bit for each operation: whether its launch call was read.
    launch_call_was_read: Vec<u64>,
    operation_count: u32,
    /// Operations that the last call launched, as returned by the last search.
    operations_of_last_call: Vec<GpuOperationId>,
    /// Position at which the next search starts: behind the last operation that was found, because
    /// calls are almost in order of their correlation ids.
    next_search_position: usize,
}

impl OperationsByLaunchKey {
    pub fn operations_without_read_calls(trace: &Trace) -> Self {
        let count = AllGpuOperations::number_operations_of_trace(trace).all_operation_ids().end;
        let found = vec![0; (count as usize).div_ceil(64)];
        Self {
            operations: operations_by_correlation_key(trace),
            launch_call_was_read: found,
            operation_count: count,
            operations_of_last_call: Vec::new(),
            next_search_position: 0,
        }
    }

    /// Returns the GPU operations that a host call launched. If several host calls have one
    /// correlation id, the first call that is read gets the operations.
    pub fn operations_launched_by_host_call(
        &mut self,
        trace: &Trace,
        call: &StreamedCallRow,
    ) -> &[GpuOperationId] {
        if call.correlation == 0 {
            return &[];
        }
        let (all, key) = (
            AllGpuOperations::number_operations_of_trace(trace),
            process_and_correlation_key(call.process_index, call.correlation),
        );
        let key_of = |id: GpuOperationId| correlation_key_of_operation(trace, &all, id);
        let operations = &self.operations;
        if operations.get(self.next_search_position).is_none_or(|id| key_of(id) != key) {
            self.next_search_position = operations.first_position_where_not(|id| key_of(id) < key);
        }
        self.operations_of_last_call.clear();
        while let Some(id) =
            operations.get(self.next_search_position).filter(|&id| key_of(id) == key)
        {
            let (word, bit) = (id as usize / 64, 1 << (id % 64));
            if self.launch_call_was_read[word] & bit != 0 {
                return &[];
            }
            self.launch_call_was_read[word] |= bit;
            self.operations_of_last_call.push(id);
            self.next_search_position += 1;
        }
        &self.operations_of_last_call
    }

    /// Returns the operations whose launch call was not read.
    pub fn operations_whose_call_was_not_read(&self) -> impl Iterator<Item = GpuOperationId> {
        let found = |id: &GpuOperationId| {
            self.launch_call_was_read[*id as usize / 64] >> (id % 64) & 1 == 1
        };
        (0..self.operation_count).filter(move |id| !found(id))
    }
}

/// Events of created or cloned graph nodes that were not processed yet, the latest first.
#[derive(Debug, Default)]
pub(crate) struct UnprocessedGraphNodeEvents(Vec<u32>);

impl UnprocessedGraphNodeEvents {
    /// Collects the trace's graph-node events that `wanted` accepts by their index.
    pub fn collect_graph_node_events(trace: &Trace, wanted: impl Fn(usize) -> bool) -> Self {
        let times = &trace.node_events.time_ns;
        let mut events: Vec<u32> =
            (0u32..).take(times.len()).filter(|&event| wanted(event as usize)).collect();
        events.sort_by_key(|&event| Reverse(times[event as usize]));
        Self(events)
    }

    /// Removes and returns the earliest event, if it happened before `time`.
    pub fn take_earliest_event_before(&mut self, trace: &Trace, time: i64) -> Option<usize> {
        let times = &trace.node_events.time_ns;
        self.0.pop_if(|event| times[*event as usize] < time).map(|event| event as usize)
    }
}
