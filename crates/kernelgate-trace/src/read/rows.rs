//! Ranges and calls as rows that are handed out in order of time, for exports too large to hold.

use std::cmp::Reverse;

use crate::model::Trace;
use crate::model::host::RangeStyle;
use crate::model::interned_names::NameId;

/// A named range.
#[derive(Debug, Clone, Copy)]
pub struct RangeRow {
    /// Time at which the range was opened, nanoseconds.
    pub start: i64,
    /// Time at which the range was closed, or [`Self::UNCLOSED_RANGE_END`].
    pub end: i64,
    /// Index into [`Trace::threads`].
    pub thread: u32,
    /// Index into [`StreamedRows::names`]; of a trace in memory the number of its name.
    pub label: u32,
    /// The way in which the range was opened.
    pub style: RangeStyle,
    /// Inputs of the operator that the range stands for, as in
    /// [`crate::model::host::HostRangeTable::inputs`].
    pub inputs: u32,
}

impl RangeRow {
    /// The end of a range that was never closed.
    pub const UNCLOSED_RANGE_END: i64 = i64::MAX;
}

/// A call of CUDA.
#[derive(Debug, Clone, Copy)]
pub struct CallRow {
    /// Time at which the call was entered, nanoseconds.
    pub start: i64,
    /// Time at which the call returned, nanoseconds.
    pub end: i64,
    /// Index into [`Trace::threads`].
    pub thread: u32,
    /// Index into [`Trace::processes`].
    pub process: u32,
    /// The function.
    pub name: NameId,
    /// The correlation id that joins the call with its operations, within its process; 0: it
    /// launched nothing.
    pub correlation: u32,
}

/// A row of a streamed export: a range or a call.
#[derive(Debug, Clone, Copy)]
pub enum RangeOrCall {
    /// The stream begins, maybe anew: earlier rows are discarded.
    Begin,
    Range(RangeRow),
    Call(CallRow),
}

/// Returns the results after all rows were passed on.
#[derive(Debug)]
pub struct StreamedRows {
    /// The trace without its ranges and calls.
    pub trace: Trace,
    /// The names that [`RangeRow::label`] refers to. Several labels may refer to one name.
    pub names: Vec<NameId>,
    /// End time that is assumed for ranges that were never closed.
    pub last: i64,
}

/// A row with an order in time: by its start, the outer one of two first.
pub(super) trait OrderedByTime {
    fn time_key(&self) -> (i64, Reverse<i64>);
}

impl OrderedByTime for RangeRow {
    fn time_key(&self) -> (i64, Reverse<i64>) {
        (self.start, Reverse(self.end))
    }
}

/// A row with the global id of its thread.
impl<T: OrderedByTime> OrderedByTime for (i64, T) {
    fn time_key(&self) -> (i64, Reverse<i64>) {
        self.1.time_key()
    }
}

impl OrderedByTime for CallRow {
    fn time_key(&self) -> (i64, Reverse<i64>) {
        (self.start, Reverse(self.end))
    }
}

/// Visits the ranges and calls of a trace in time order; a range comes before a call with the same
/// start. The labels of the ranges are names of the trace.
pub fn for_each_row(trace: &Trace, mut each: impl FnMut(RangeOrCall)) {
    let (ranges, calls) = (&trace.ranges, &trace.calls);
    let range = |row: u32| {
        let at = row as usize;
        RangeRow {
            start: ranges.start[at],
            end: ranges.end[at],
            thread: ranges.thread[at],
            label: ranges.name[at].0,
            style: ranges.style[at],
            inputs: ranges.operator_inputs_of_range(at),
        }
    };
    let call = |row: u32| {
        let at = row as usize;
        CallRow {
            start: calls.start[at],
            end: calls.end[at],
            thread: calls.thread[at],
            process: trace.threads[calls.thread[at] as usize].process,
            name: calls.name[at],
            correlation: calls.correlation[at],
        }
    };
    let ordered = |length: usize, key: &dyn Fn(u32) -> (i64, Reverse<i64>)| {
        let mut order: Vec<u32> = (0u32..).take(length).collect();
        if !order.is_sorted_by_key(|&row| key(row)) {
            order.sort_by_key(|&row| key(row));
        }
        order
    };
    let range_order = ordered(ranges.len(), &|row| range(row).time_key());
    let call_order = ordered(calls.len(), &|row| call(row).time_key());
    each(RangeOrCall::Begin);
    for row in merge_by_time(range_order.into_iter().map(range), call_order.into_iter().map(call)) {
        each(match row {
            RowOfEitherOrder::Range(range) => RangeOrCall::Range(range),
            RowOfEitherOrder::Call(call) => RangeOrCall::Call(call),
        });
    }
}

/// A row of one of two orders.
pub(super) enum RowOfEitherOrder<R, C> {
    Range(R),
    Call(C),
}

/// Merges two series that are sorted by time.
pub(super) fn merge_by_time<R: OrderedByTime, C: OrderedByTime>(
    ranges: impl Iterator<Item = R>,
    calls: impl Iterator<Item = C>,
) -> impl Iterator<Item = RowOfEitherOrder<R, C>> {
    let (mut ranges, mut calls) = (ranges.peekable(), calls.peekable());
    std::iter::from_fn(move || {
        let start = calls.peek().map_or(i64::MAX, |call| call.time_key().0);
        match ranges.next_if(|range| range.time_key().0 <= start) {
            Some(range) => Some(RowOfEitherOrder::Range(range)),
            None => calls.next().map(RowOfEitherOrder::Call),
        }
    })
}
