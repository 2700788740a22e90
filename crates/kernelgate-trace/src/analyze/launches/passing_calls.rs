//! Calls as they are read, in order of time: the ranges that are open, what each call launched, and
//! the nodes of graphs that were created before.

use std::cmp::Reverse;

use crate::analyze::launches::{correlation_key, launches_by_correlation};
use crate::analyze::operations::{AllOperations, OperationId};
use crate::analyze::time_order::SortedOperations;
use crate::model::Trace;
use crate::model::launch_correlation_key;
use crate::read::{CallRow, RangeRow};

/// An open host range with the facts collected about it so far.
#[derive(Debug)]
pub(crate) struct OpenHostRange<S> {
    pub row: RangeRow,
    pub state: S,
}

/// The open ranges of each thread, outer ones, which opened earlier, first. They need not nest.
#[derive(Debug)]
pub(crate) struct OpenRangesByThread<S> {
    threads: Vec<Vec<OpenHostRange<S>>>,
}

impl<S> Default for OpenRangesByThread<S> {
    fn default() -> Self {
        Self { threads: Vec::new() }
    }
}

impl<S> OpenRangesByThread<S> {
    fn open_ranges_of_thread(&mut self, thread: u32) -> &mut Vec<OpenHostRange<S>> {
        let thread = thread as usize;
        if self.threads.len() <= thread {
            self.threads.resize_with(thread + 1, Vec::new);
        }
        &mut self.threads[thread]
    }

    /// Opens a range, and passes ranges of the thread that have ended to `closed`.
    pub fn add(&mut self, row: RangeRow, state: S, closed: impl FnMut(OpenHostRange<S>)) {
        let open = self.open_ranges_of_thread(row.thread);
        if open.len() == open.capacity() {
            close_ended_ranges(open, row.start, closed);
        }
        open.push(OpenHostRange { row, state });
    }

    /// The ranges of a thread that were not over at a time.
    pub fn at(
        &mut self,
        thread: u32,
        time: i64,
        closed: impl FnMut(OpenHostRange<S>),
    ) -> &mut [OpenHostRange<S>] {
        let open = self.open_ranges_of_thread(thread);
        close_ended_ranges(open, time, closed);
        open
    }

    /// The innermost range of a thread that was open from a time to another.
    pub fn innermost_around(
        &mut self,
        thread: u32,
        (start, end): (i64, i64),
    ) -> Option<&OpenHostRange<S>> {
        let open = self.at(thread, start, |_| ());
        open.iter().rev().find(|range| range.row.end >= end)
    }

    /// Closes all.
    pub fn close_all(&mut self, closed: impl FnMut(OpenHostRange<S>)) {
        self.threads.drain(..).flatten().for_each(closed);
    }
}

fn close_ended_ranges<S>(
    open: &mut Vec<OpenHostRange<S>>,
    time: i64,
    closed: impl FnMut(OpenHostRange<S>),
) {
    open.extract_if(.., |range| range.row.end < time).for_each(closed);
}

/// GPU operations by the key that joins them with launch calls.
#[derive(Debug, Default)]
pub(crate) struct LaunchedOperations {
    /// Launched operations in order of their keys.
    operations: SortedOperations,
    /// Whether the launch call of each operation was read; one word holds 64 operations.
    found: Vec<u64>,
    count: u32,
    /// Operations that the last call launched.
    by_call: Vec<OperationId>,
    /// The search starts after the last call that was found, because calls come almost in the order
    /// of their ids.
    next: usize,
}

impl LaunchedOperations {
    pub fn new(trace: &Trace) -> Self {
        let count = AllOperations::new(trace).ids().end;
        let found = vec![0; (count as usize).div_ceil(64)];
        Self {
            operations: launches_by_correlation(trace),
            found,
            count,
            by_call: Vec::new(),
            next: 0,
        }
    }

    /// Operations of a call. If several calls have one correlation id, the first call that is read
    /// gets the operations.
    pub fn by(&mut self, trace: &Trace, call: &CallRow) -> &[OperationId] {
        if call.correlation == 0 {
            return &[];
        }
        let (all, key) =
            (AllOperations::new(trace), launch_correlation_key(call.process, call.correlation));
        let key_of = |id: OperationId| correlation_key(trace, &all, id);
        let operations = &self.operations;
        if operations.get(self.next).is_none_or(|id| key_of(id) != key) {
            self.next = operations.partition_point(|id| key_of(id) < key);
        }
        self.by_call.clear();
        while let Some(id) = operations.get(self.next).filter(|&id| key_of(id) == key) {
            let (word, bit) = (id as usize / 64, 1 << (id % 64));
            if self.found[word] & bit != 0 {
                return &[];
            }
            self.found[word] |= bit;
            self.by_call.push(id);
            self.next += 1;
        }
        &self.by_call
    }

    /// Operations whose launch call was not read.
    pub fn operations_without_call(&self) -> impl Iterator<Item = OperationId> {
        let found = |id: &OperationId| self.found[*id as usize / 64] >> (id % 64) & 1 == 1;
        (0..self.count).filter(move |id| !found(id))
    }
}

/// Creations of nodes of graphs that were not read yet, the last first.
#[derive(Debug, Default)]
pub(crate) struct NodeEvents(Vec<u32>);

impl NodeEvents {
    /// Collects those operations of a trace that `wanted` accepts.
    pub fn new(trace: &Trace, wanted: impl Fn(usize) -> bool) -> Self {
        let times = &trace.node_events.time;
        let mut events: Vec<u32> =
            (0u32..).take(times.len()).filter(|&event| wanted(event as usize)).collect();
        events.sort_by_key(|&event| Reverse(times[event as usize]));
        Self(events)
    }

    /// Takes the next event, if it was before a time.
    pub fn next_if_before(&mut self, trace: &Trace, time: i64) -> Option<usize> {
        let times = &trace.node_events.time;
        self.0.pop_if(|event| times[*event as usize] < time).map(|event| event as usize)
    }
}
