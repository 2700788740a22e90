//! Calls that go by in order of time: the ranges that are open, and what each call launched.

use crate::analyze::launches::{by_correlation, key};
use crate::analyze::operations::{AllOperations, OperationId};
use crate::model::Trace;
use crate::read::{CallRow, RangeRow};

/// A range that is open, and what is known of it so far.
#[derive(Debug)]
pub(super) struct Open<S> {
    pub row: RangeRow,
    pub state: S,
}

/// The open ranges of each thread, outer ones, which opened earlier, first. They need not nest.
#[derive(Debug)]
pub(super) struct OpenRanges<S> {
    threads: Vec<Vec<Open<S>>>,
}

impl<S> Default for OpenRanges<S> {
    fn default() -> Self {
        Self { threads: Vec::new() }
    }
}

impl<S: Default> OpenRanges<S> {
    fn of(&mut self, thread: u32) -> &mut Vec<Open<S>> {
        let thread = thread as usize;
        if self.threads.len() <= thread {
            self.threads.resize_with(thread + 1, Vec::new);
        }
        &mut self.threads[thread]
    }

    /// Opens a range. What it is the first to see as over goes to `closed`.
    pub fn add(&mut self, row: RangeRow, closed: impl FnMut(Open<S>)) {
        let open = self.of(row.thread);
        if open.len() == open.capacity() {
            close(open, row.start, closed);
        }
        open.push(Open { row, state: S::default() });
    }

    /// The ranges of a call's thread that were not over when it was entered.
    pub fn at(&mut self, call: &CallRow, closed: impl FnMut(Open<S>)) -> &mut [Open<S>] {
        let open = self.of(call.thread);
        close(open, call.start, closed);
        open
    }

    /// Closes all.
    pub fn finish(&mut self, closed: impl FnMut(Open<S>)) {
        self.threads.drain(..).flatten().for_each(closed);
    }
}

fn close<S>(open: &mut Vec<Open<S>>, time: i64, closed: impl FnMut(Open<S>)) {
    open.extract_if(.., |range| range.row.end < time).for_each(closed);
}

/// Operations by what joins them with calls.
#[derive(Debug, Default)]
pub(super) struct Launched {
    rows: Vec<(u64, OperationId)>,
    /// Whether the call of each operation went by.
    found: Vec<bool>,
    /// Behind the last that was found: calls come almost in order of their ids.
    next: usize,
}

impl Launched {
    pub fn of(trace: &Trace) -> Self {
        let found = vec![false; AllOperations::of(trace).len()];
        Self { rows: by_correlation(trace), found, next: 0 }
    }

    /// What a call launched. Of several calls with one id the first that goes by did.
    pub fn by(&mut self, call: &CallRow) -> &[(u64, OperationId)] {
        let key = key(call.process, call.correlation);
        let rows = &self.rows;
        if rows.get(self.next).is_none_or(|row| row.0 != key) {
            self.next = rows.partition_point(|row| row.0 < key);
        }
        let first = self.next;
        while rows.get(self.next).is_some_and(|row| row.0 == key) {
            if std::mem::replace(&mut self.found[rows[self.next].1 as usize], true) {
                return &[];
            }
            self.next += 1;
        }
        &rows[first..self.next]
    }

    /// Operations whose call did not go by.
    pub fn orphans(&self) -> impl Iterator<Item = OperationId> {
        (0u32..).zip(&self.found).filter(|&(_, &found)| !found).map(|(id, _)| id)
    }
}
