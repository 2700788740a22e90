//! For each row of a trace table, finds the ranges of its thread that enclose the row, in one pass
//! over time for each thread.

use std::cmp::Reverse;

use crate::model::Trace;

/// Rows of a trace table grouped by thread, and sorted by time within each thread.
#[derive(Debug, Default)]
pub(crate) struct TableRowsByThread {
    row_numbers: Vec<u32>,
    /// For each thread the index of its first entry in `rows`, followed by the end of the last
    /// thread's entries.
    first_row_of_thread: Vec<usize>,
}

impl TableRowsByThread {
    /// Groups the table rows that `wanted` accepts by thread, and sorts the rows of each thread by
    /// `key`.
    pub fn group_rows_by_thread<K: Ord>(
        threads: usize,
        thread: &[u32],
        wanted: impl Fn(u32) -> bool,
        key: impl Fn(u32) -> K,
    ) -> Self {
        let mut bounds = vec![0usize; threads + 1];
        let rows = || (0u32..).zip(thread).filter(|&(row, _)| wanted(row));
        for (_, &thread) in rows() {
            bounds[thread as usize + 1] += 1;
        }
        for index in 1..bounds.len() {
            bounds[index] += bounds[index - 1];
        }
        let mut next = bounds.clone();
        let mut sorted = vec![0u32; bounds[threads]];
        for (row, &thread) in rows() {
            sorted[next[thread as usize]] = row;
            next[thread as usize] += 1;
        }
        for thread in 0..threads {
            let rows = &mut sorted[bounds[thread]..bounds[thread + 1]];
            if !rows.is_sorted_by_key(|&row| key(row)) {
                rows.sort_by_key(|&row| key(row));
            }
        }
        Self { row_numbers: sorted, first_row_of_thread: bounds }
    }

    /// Returns the sorted rows of a thread; empty for a thread that is not in the groups.
    pub fn rows_of_thread(&self, thread: usize) -> &[u32] {
        let end = self.first_row_of_thread.get(thread + 1);
        end.map_or(&[], |&end| &self.row_numbers[self.first_row_of_thread[thread]..end])
    }

    /// Groups the ranges of a trace by thread, in order of their start; an outer range comes before
    /// an inner range with the same start.
    pub fn group_ranges_by_thread(trace: &Trace) -> TableRowsByThread {
        let ranges = &trace.ranges;
        Self::group_rows_by_thread(
            trace.threads.len(),
            &ranges.thread_index,
            |_| true,
            |range| (ranges.start_ns[range as usize], Reverse(ranges.end_ns[range as usize])),
        )
    }
}

/// Calls `visit` with each wanted row, thread by thread in order of time, and with the ranges of
/// its thread that enclose the row's span, earliest first.
///
/// Ranges need not nest. The time is proportional to the number of ranges and rows times the
/// nesting depth.
pub fn visit_rows_with_enclosing_ranges(
    trace: &Trace,
    (thread, wanted): (&[u32], impl Fn(u32) -> bool),
    span: impl Fn(u32) -> (i64, i64),
    mut visit: impl FnMut(u32, &[u32]),
) {
    let ranges = &trace.ranges;
    let range_rows = TableRowsByThread::group_ranges_by_thread(trace);
    let key = |row: u32| {
        let (start, end) = span(row);
        (start, Reverse(end))
    };
    let rows = TableRowsByThread::group_rows_by_thread(trace.threads.len(), thread, wanted, key);
    let mut open: Vec<u32> = Vec::new();
    let mut enclosing: Vec<u32> = Vec::new();
    for thread in 0..trace.threads.len() {
        let mut next = range_rows.rows_of_thread(thread).iter().copied().peekable();
        open.clear();
        for &row in rows.rows_of_thread(thread) {
            let (start, end) = span(row);
            while let Some(range) = next.next_if(|&range| ranges.start_ns[range as usize] <= start)
            {
                // Most ranges end before the next row of their thread starts, so these ranges are
                // not stored.
                if ranges.end_ns[range as usize] >= start {
                    open.push(range);
                }
            }
            open.retain(|&range| ranges.end_ns[range as usize] >= start);
            enclosing.clear();
            enclosing.extend(open.iter().filter(|&&range| ranges.end_ns[range as usize] >= end));
            visit(row, &enclosing);
        }
    }
}
