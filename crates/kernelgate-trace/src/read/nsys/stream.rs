//! Ranges and calls of an export, handed out in order of time without being kept.
//!
//! Exports are stored almost in order: a buffer mends that. If the buffer does not suffice, SQLite
//! sorts the rows.

use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use hashbrown::HashMap;

use super::super::rows::{
    CallRow, OrderedByTime, RangeOrCall, RangeRow, RowOfEitherOrder, StreamedRows, merge_by_time,
};
use super::super::trace_builder::TraceBuilder;
use super::super::wanted_parts::WantedTraceParts;
use super::database::{NsysDatabase, RowOrder};
use super::ids::{RUNTIME_CALL_TABLE, split_global_id};
use super::ranges::{self, RangeBatch};
use crate::error::TraceError;
use crate::model::Trace;
use crate::model::interned_names::NameId;
use crate::model::quality::TraceQuality;

/// Rows that are handed over together, and by how many a row may be out of order.
const ROWS_PER_BATCH: usize = 1 << 15;

/// Reads what is wanted but ranges and calls, and hands these out.
///
/// # Errors
/// The file is locked, or not an SQLite database of an export.
pub fn read_and_stream_rows(
    path: &Path,
    wanted: &WantedTraceParts,
    mut each: impl FnMut(&Trace, RangeOrCall),
) -> Result<StreamedRows, TraceError> {
    let mut reader = super::open_with_texts(path)?;
    reader.read_all_but_ranges(&WantedTraceParts { calls: false, ..*wanted })?;
    let super::NsysReader { mut builder, strings, database } = reader;
    builder.trace.names.intern_text(super::host::UNKNOWN_CALL_NAME);
    builder.copy_tables_to_trace();
    let mut pass = run_row_pass(path, wanted, RowOrder::Stored, &mut builder, &strings, &mut each)?;
    if !pass.in_order {
        pass = run_row_pass(path, wanted, RowOrder::Start, &mut builder, &strings, &mut each)?;
    }
    let last =
        pass.ranges.end_of_unclosed_ranges(&database).unwrap_or(RangeRow::UNCLOSED_RANGE_END);
    builder.trace.quality.add_quality_of(pass.calls);
    let names = pass.ranges.into_trace_names(&mut builder);
    Ok(StreamedRows { trace: builder.finish_trace(), names, last })
}

/// Result of one pass over an export's tables.
struct PassResult {
    in_order: bool,
    ranges: RangeBatch,
    /// Quality problems of the table of calls.
    calls: TraceQuality,
}

fn run_row_pass(
    path: &Path,
    wanted: &WantedTraceParts,
    order: RowOrder,
    builder: &mut TraceBuilder,
    strings: &HashMap<i64, NameId>,
    each: &mut impl FnMut(&Trace, RangeOrCall),
) -> Result<PassResult, TraceError> {
    let mut threads: HashMap<i64, (u32, u32)> = HashMap::new();
    let mut thread_of = |builder: &mut TraceBuilder, id: i64| {
        *threads.entry(id).or_insert_with(|| {
            let (key, pid, tid) = split_global_id(id);
            let process = builder.process_of_key(key, pid);
            (builder.thread_of_tid(process, tid), process)
        })
    };
    let (range_batches, mut ranges) = batch_channel();
    let (call_batches, mut calls) = batch_channel();
    std::thread::scope(|scope| {
        let how = (order, wanted.few_names);
        let range_reader = scope.spawn(move || read_ranges(path, how, strings, range_batches));
        let unknown = builder.trace.names.intern_text(super::host::UNKNOWN_CALL_NAME);
        let reader = CallTableReader { path, order, strings, unknown, all: wanted.rest };
        let call_reader =
            wanted.calls.then(|| scope.spawn(move || reader.send_calls(call_batches)));
        each(&builder.trace, RangeOrCall::Begin);
        for row in merge_by_time(&mut ranges, &mut calls) {
            let row = match row {
                RowOfEitherOrder::Range((thread, row)) => {
                    RangeOrCall::Range(RangeRow { thread: thread_of(builder, thread).0, ..row })
                }
                RowOfEitherOrder::Call((thread, row)) => {
                    let (thread, process) = thread_of(builder, thread);
                    RangeOrCall::Call(CallRow { thread, process, ..row })
                }
            };
            each(&builder.trace, row);
        }
        let ranges_read = range_reader.join().expect("reading ranges does not panic")?;
        let calls_read = match call_reader {
            Some(reader) => reader.join().expect("reading calls does not panic")?,
            None => TraceQuality::default(),
        };
        let in_order = ranges.in_order && calls.in_order;
        Ok(PassResult { in_order, ranges: ranges_read, calls: calls_read })
    })
}

fn read_ranges(
    path: &Path,
    how: (RowOrder, bool),
    strings: &HashMap<i64, NameId>,
    mut batches: RowBatches<(i64, RangeRow)>,
) -> Result<RangeBatch, TraceError> {
    let part =
        ranges::stream_ranges(path, how, strings, |thread, row| batches.push((thread, row)))?;
    batches.send_calls();
    Ok(part)
}

/// Reader of the call table, with the selection of calls.
struct CallTableReader<'a> {
    path: &'a Path,
    order: RowOrder,
    strings: &'a HashMap<i64, NameId>,
    /// Name of calls without a recorded name.
    unknown: NameId,
    /// Whether calls without a correlation id are read as well.
    all: bool,
}

impl CallTableReader<'_> {
    /// Sends the calls, each with the global id of its thread.
    fn send_calls(
        &self,
        mut batches: RowBatches<(i64, CallRow)>,
    ) -> Result<TraceQuality, TraceError> {
        let database = NsysDatabase::open_export(self.path)?;
        let mut quality = TraceQuality::default();
        if !database.has_table(RUNTIME_CALL_TABLE) {
            quality.missing.push(RUNTIME_CALL_TABLE.to_owned());
        }
        let columns = ["start", "end", "globalTid", "correlationId", "nameId"];
        quality.missing.extend(super::absent_columns(&database, RUNTIME_CALL_TABLE, &columns));
        let ended =
            database.visit_rows_in_order(self.order, RUNTIME_CALL_TABLE, &columns, |row| {
                let Some(start) = quality.time(row.integer_cell(0)) else { return };
                let end = quality.time(row.integer_cell(1)).unwrap_or(start);
                let end = quality.plausible_span_end(start, end);
                let correlation = quality.correlation(row.integer_cell(3));
                if self.all || correlation != 0 {
                    let name = row.integer_cell(4).and_then(|id| self.strings.get(&id)).copied();
                    let name = name.unwrap_or(self.unknown);
                    let call = CallRow { start, end, thread: 0, process: 0, name, correlation };
                    batches.push((row.integer_cell(2).unwrap_or(0), call));
                }
            })?;
        batches.send_calls();
        quality.unreadable.extend(ended);
        Ok(quality)
    }
}

/// The receiving end of rows that another thread reads.
struct RowBatches<T> {
    batch: Vec<T>,
    sender: SyncSender<Vec<T>>,
    /// Batches that the other thread has read: their memory is used again.
    read: Receiver<Vec<T>>,
}

/// Sender and receiver of a channel that passes batches of rows to another thread.
fn batch_channel<T>() -> (RowBatches<T>, RowOrderingBuffer<T>) {
    let (sender, receiver) = sync_channel(2);
    let (spent, read) = sync_channel(4);
    let ordered = RowOrderingBuffer {
        receiver,
        spent,
        ready: Vec::new(),
        next: 0,
        held: Vec::new(),
        last: i64::MIN,
        in_order: true,
    };
    (RowBatches { batch: Vec::new(), sender, read }, ordered)
}

impl<T> RowBatches<T> {
    fn push(&mut self, row: T) {
        self.batch.push(row);
        if self.batch.len() == ROWS_PER_BATCH {
            self.send_calls();
        }
    }

    fn send_calls(&mut self) {
        let empty = self.read.try_recv().unwrap_or_else(|_| Vec::with_capacity(ROWS_PER_BATCH));
        // Nobody receives any more only if the other thread panicked.
        let _ = self.sender.send(std::mem::replace(&mut self.batch, empty));
    }
}

/// Puts rows that are almost sorted into order.
struct RowOrderingBuffer<T> {
    receiver: Receiver<Vec<T>>,
    /// Returns batches that were read, so that their memory can be used again.
    spent: SyncSender<Vec<T>>,
    ready: Vec<T>,
    next: usize,
    /// Rows that are later than all rows that are ready.
    held: Vec<T>,
    last: i64,
    /// Whether the buffer sufficed.
    in_order: bool,
}

impl<T: OrderedByTime + Copy> RowOrderingBuffer<T> {
    /// Makes the held rows ready, the same number of the earliest ones; `false`: there are
    /// no more.
    fn refill_in_order(&mut self) -> bool {
        let mut read = std::mem::take(&mut self.ready);
        read.clear();
        self.next = 0;
        let Ok(batch) = self.receiver.recv() else {
            self.ready = std::mem::take(&mut self.held);
            return !self.ready.is_empty();
        };
        let follows = match (self.held.last(), batch.first()) {
            (Some(last), Some(first)) => last.time_key() <= first.time_key(),
            _ => true,
        };
        if follows && batch.is_sorted_by_key(OrderedByTime::time_key) {
            self.ready = std::mem::replace(&mut self.held, batch);
        } else {
            let whole = self.held.len();
            let mut all = std::mem::take(&mut self.held);
            all.extend(batch);
            all.sort_by_key(OrderedByTime::time_key);
            self.held = all.split_off(whole);
            self.ready = all;
        }
        let _ = self.spent.try_send(read);
        true
    }
}

impl<T: OrderedByTime + Copy> Iterator for RowOrderingBuffer<T> {
    type Item = T;

    #[inline]
    fn next(&mut self) -> Option<T> {
        while self.next == self.ready.len() {
            if !self.refill_in_order() {
                return None;
            }
        }
        let row = self.ready[self.next];
        self.next += 1;
        let start = row.time_key().0;
        self.in_order &= start >= self.last;
        self.last = start;
        Some(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call_rows(starts: &[i64]) -> Vec<CallRow> {
        let row = |&start| CallRow {
            start,
            end: start,
            thread: 0,
            process: 0,
            name: NameId::default(),
            correlation: 1,
        };
        starts.iter().map(row).collect()
    }

    #[test]
    fn nearly_sorted_rows_are_sorted_by_a_small_buffer() {
        let read = |batches: &[&[i64]]| {
            let (into, mut ordered) = batch_channel();
            let batches: Vec<Vec<CallRow>> = batches.iter().map(|batch| call_rows(batch)).collect();
            std::thread::spawn(move || {
                batches.into_iter().for_each(|batch| into.sender.send(batch).expect("it is read"));
            });
            let starts: Vec<i64> = ordered.by_ref().map(|row| row.start).collect();
            (starts, ordered.in_order)
        };
        assert_eq!(read(&[&[3, 1], &[2, 5], &[4, 6]]), (vec![1, 2, 3, 4, 5, 6], true));
        assert_eq!(read(&[]), (vec![], true));
        assert!(!read(&[&[7, 8], &[9, 10], &[1, 2]]).1, "a batch too late");
    }
}
