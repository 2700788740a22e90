//! Which ranges of a thread enclose a row: one pass over time, thread by thread.

use std::cmp::Reverse;

use crate::model::Trace;

/// Rows by thread, each thread's in an order of time.
#[derive(Debug, Default)]
pub(crate) struct RowsByThread {
    rows: Vec<u32>,
    /// Index of the first row of each thread, and the end of the last thread's rows.
    bounds: Vec<usize>,
}

impl RowsByThread {
    /// Sorts the wanted rows by thread and, within a thread, by a key.
    pub fn sorted_by_thread<K: Ord>(
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
        Self { rows: sorted, bounds }
    }

    /// The rows of a thread; none of a thread that came later.
    pub fn rows_of_thread(&self, thread: usize) -> &[u32] {
        let end = self.bounds.get(thread + 1);
        end.map_or(&[], |&end| &self.rows[self.bounds[thread]..end])
    }

    /// The ranges of a trace in order of their start; an outer range comes before an inner range
    /// with the same start.
    pub fn group_ranges_by_thread(trace: &Trace) -> RowsByThread {
        let ranges = &trace.ranges;
        Self::sorted_by_thread(
            trace.threads.len(),
            &ranges.thread,
            |_| true,
            |range| (ranges.start[range as usize], Reverse(ranges.end[range as usize])),
        )
    }
}

/// Visits wanted rows thread by thread, in order of time, each with the ranges of its thread that
/// enclose its span: outer ones, which opened earlier, first.
///
/// Ranges need not nest. Time is linear in the number of ranges and rows, times the depth.
pub fn visit_enclosing_ranges(
    trace: &Trace,
    (thread, wanted): (&[u32], impl Fn(u32) -> bool),
    span: impl Fn(u32) -> (i64, i64),
    mut visit: impl FnMut(u32, &[u32]),
) {
    let ranges = &trace.ranges;
    let range_rows = RowsByThread::group_ranges_by_thread(trace);
    let key = |row: u32| {
        let (start, end) = span(row);
        (start, Reverse(end))
    };
    let rows = RowsByThread::sorted_by_thread(trace.threads.len(), thread, wanted, key);
    let mut open: Vec<u32> = Vec::new();
    let mut enclosing: Vec<u32> = Vec::new();
    for thread in 0..trace.threads.len() {
        let mut next = range_rows.rows_of_thread(thread).iter().copied().peekable();
        open.clear();
        for &row in rows.rows_of_thread(thread) {
            let (start, end) = span(row);
            while let Some(range) = next.next_if(|&range| ranges.start[range as usize] <= start) {
                // Most ranges have ended before the next call, so they are not stored.
                if ranges.end[range as usize] >= start {
                    open.push(range);
                }
            }
            open.retain(|&range| ranges.end[range as usize] >= start);
            enclosing.clear();
            enclosing.extend(open.iter().filter(|&&range| ranges.end[range as usize] >= end));
            visit(row, &enclosing);
        }
    }
}
