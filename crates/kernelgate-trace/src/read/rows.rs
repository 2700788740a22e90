//! Ranges and API calls as single rows in order of time, for exports that do not fit into memory.

use std::cmp::Reverse;

use crate::model::Trace;
use crate::model::host::HostRangeStyle;
use crate::model::interned_names::InternedNameId;

/// A named range.
#[derive(Debug, Clone, Copy)]
pub struct StreamedRangeRow {
    /// Time at which the range was opened, in nanoseconds.
    pub start_ns: i64,
    /// Time at which the range was closed, in nanoseconds, or [`Self::UNCLOSED_RANGE_END`].
    pub end_ns: i64,
    /// Index into [`Trace::threads`].
    pub thread_index: u32,
    /// Index of the range's name in [`ExportWithoutStreamedRows::name_by_range_name_index`]; for a
    /// trace in memory, the name id itself.
    pub name_index: u32,
    /// Whether the range was opened by push/pop or by start/end calls.
    pub style: HostRangeStyle,
    /// For a range that is an operator call, the number of its inputs, as in
    /// [`crate::model::host::HostRangeTable::operator_inputs_number`].
    pub operator_inputs_number: u32,
}

impl StreamedRangeRow {
    /// Placeholder for the end time of a range that was never closed.
    pub const UNCLOSED_RANGE_END: i64 = i64::MAX;
}

/// A host call of a CUDA API function.
#[derive(Debug, Clone, Copy)]
pub struct StreamedCallRow {
    /// Time at which the host entered the API call, in nanoseconds.
    pub start_ns: i64,
    /// Time at which the API call returned, in nanoseconds.
    pub end_ns: i64,
    /// Index into [`Trace::threads`].
    pub thread_index: u32,
    /// Index into [`Trace::processes`].
    pub process_index: u32,
    /// The function.
    pub function_name: InternedNameId,
    /// The correlation id that connects the API call with its GPU operations in the same process;
    /// 0: the call launched nothing.
    pub correlation: u32,
}

/// A row of an export that is streamed in order of time: a range or an API call.
#[derive(Debug, Clone, Copy)]
pub enum StreamedRangeOrCall {
    /// A pass begins; if an earlier pass was not sorted, its rows must be discarded.
    PassBegins,
    Range(StreamedRangeRow),
    Call(StreamedCallRow),
}

/// The remaining trace and the names of ranges, after all rows of an export were streamed.
#[derive(Debug)]
pub struct ExportWithoutStreamedRows {
    /// The trace without its ranges and API calls.
    pub trace: Trace,
    /// The name id for each value of [`StreamedRangeRow::name_index`]. Several range labels may
    /// have the same name id.
    pub name_by_range_name_index: Vec<InternedNameId>,
    /// End time in nanoseconds for ranges that were never closed.
    pub trace_end_ns: i64,
}

/// A row that is sorted by start time; if starts are equal, the row with the later end comes first.
pub(super) trait SortedByStartThenLongest {
    fn start_and_reversed_end(&self) -> (i64, Reverse<i64>);
}

impl SortedByStartThenLongest for StreamedRangeRow {
    fn start_and_reversed_end(&self) -> (i64, Reverse<i64>) {
        (self.start_ns, Reverse(self.end_ns))
    }
}

/// Row whose first element is the global id of its host thread.
impl<T: SortedByStartThenLongest> SortedByStartThenLongest for (i64, T) {
    fn start_and_reversed_end(&self) -> (i64, Reverse<i64>) {
        self.1.start_and_reversed_end()
    }
}

impl SortedByStartThenLongest for StreamedCallRow {
    fn start_and_reversed_end(&self) -> (i64, Reverse<i64>) {
        (self.start_ns, Reverse(self.end_ns))
    }
}

/// Passes ranges and API calls of a trace in memory to `each` in order of start time; at equal
/// starts, ranges come first. The range labels are name ids of the trace.
pub fn for_each_range_and_call_by_time(trace: &Trace, mut each: impl FnMut(StreamedRangeOrCall)) {
    let (ranges, calls) = (&trace.ranges, &trace.calls);
    let range = |row: u32| {
        let at = row as usize;
        StreamedRangeRow {
            start_ns: ranges.start_ns[at],
            end_ns: ranges.end_ns[at],
            thread_index: ranges.thread_index[at],
            name_index: ranges.range_name[at].0,
            style: ranges.style[at],
            operator_inputs_number: ranges.operator_inputs_number_of_range(at),
        }
    };
    let call = |row: u32| {
        let at = row as usize;
        StreamedCallRow {
            start_ns: calls.start_ns[at],
            end_ns: calls.end_ns[at],
            thread_index: calls.thread_index[at],
            process_index: trace.threads[calls.thread_index[at] as usize].process_index,
            function_name: calls.function_name[at],
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
    let range_order = ordered(ranges.range_count(), &|row| range(row).start_and_reversed_end());
    let call_order = ordered(calls.call_count(), &|row| call(row).start_and_reversed_end());
    each(StreamedRangeOrCall::PassBegins);
    for row in merge_ranges_and_calls_by_time(
        range_order.into_iter().map(range),
        call_order.into_iter().map(call),
    ) {
        each(match row {
            MergedRangeOrCall::Range(range) => StreamedRangeOrCall::Range(range),
            MergedRangeOrCall::Call(call) => StreamedRangeOrCall::Call(call),
        });
    }
}

/// A row of two series that were merged by time: a range or an API call.
pub(super) enum MergedRangeOrCall<R, C> {
    Range(R),
    Call(C),
}

/// Merges ranges and API calls, each sorted by start time, into one series.
pub(super) fn merge_ranges_and_calls_by_time<
    R: SortedByStartThenLongest,
    C: SortedByStartThenLongest,
>(
    ranges: impl Iterator<Item = R>,
    calls: impl Iterator<Item = C>,
) -> impl Iterator<Item = MergedRangeOrCall<R, C>> {
    let (mut ranges, mut calls) = (ranges.peekable(), calls.peekable());
    std::iter::from_fn(move || {
        let start = calls.peek().map_or(i64::MAX, |call| call.start_and_reversed_end().0);
        match ranges.next_if(|range| range.start_and_reversed_end().0 <= start) {
            Some(range) => Some(MergedRangeOrCall::Range(range)),
            None => calls.next().map(MergedRangeOrCall::Call),
        }
    })
}
