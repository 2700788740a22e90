//! Ranges and calls of an export, handed out in order of time without being kept.
//!
//! Exports are stored almost in order: a buffer mends that. If the buffer does not suffice, SQLite
//! sorts the rows.

use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use hashbrown::HashMap;

use super::super::builder::Builder;
use super::super::rows::{CallRow, Either, InTime, RangeRow, Row, Streamed, merge};
use super::super::wanted::Wanted;
use super::database::{Database, Order};
use super::ids::{RUNTIME, split_global_id};
use super::ranges::{self, Part};
use crate::error::TraceError;
use crate::model::Trace;
use crate::model::names::Name;
use crate::model::quality::Quality;

/// Rows that are handed over together, and by how many a row may be out of order.
const BATCH: usize = 1 << 15;

/// Reads what is wanted but ranges and calls, and hands these out.
///
/// # Errors
/// The file is locked, or not an SQLite database of an export.
pub fn read(
    path: &Path,
    wanted: &Wanted,
    mut each: impl FnMut(&Trace, Row),
) -> Result<Streamed, TraceError> {
    let mut reader = super::open(path)?;
    reader.all_but_ranges(&Wanted { calls: false, ..*wanted })?;
    let super::Reader { mut builder, strings, database } = reader;
    builder.trace.names.intern(super::host::UNKNOWN_CALL);
    builder.share();
    let mut pass = pass(path, wanted, Order::Stored, &mut builder, &strings, &mut each)?;
    if !pass.in_order {
        pass = self::pass(path, wanted, Order::Start, &mut builder, &strings, &mut each)?;
    }
    let last = pass.ranges.last(&database).unwrap_or(RangeRow::UNCLOSED);
    builder.trace.quality.absorb(pass.calls);
    let names = pass.ranges.into_names(&mut builder);
    Ok(Streamed { trace: builder.finish(), names, last })
}

/// Result of one pass over the tables.
struct Pass {
    in_order: bool,
    ranges: Part,
    /// Oddities of the table of calls.
    calls: Quality,
}

fn pass(
    path: &Path,
    wanted: &Wanted,
    order: Order,
    builder: &mut Builder,
    strings: &HashMap<i64, Name>,
    each: &mut impl FnMut(&Trace, Row),
) -> Result<Pass, TraceError> {
    let mut threads: HashMap<i64, (u32, u32)> = HashMap::new();
    let mut thread_of = |builder: &mut Builder, id: i64| {
        *threads.entry(id).or_insert_with(|| {
            let (key, pid, tid) = split_global_id(id);
            let process = builder.process(key, pid);
            (builder.thread(process, tid), process)
        })
    };
    let (range_batches, mut ranges) = batches();
    let (call_batches, mut calls) = batches();
    std::thread::scope(|scope| {
        let how = (order, wanted.few_names);
        let range_reader = scope.spawn(move || ranges_of(path, how, strings, range_batches));
        let unknown = builder.trace.names.intern(super::host::UNKNOWN_CALL);
        let reader = CallReader { path, order, strings, unknown, all: wanted.rest };
        let call_reader = wanted.calls.then(|| scope.spawn(move || reader.send(call_batches)));
        each(&builder.trace, Row::Begin);
        for row in merge(&mut ranges, &mut calls) {
            let row = match row {
                Either::Range((thread, row)) => {
                    Row::Range(RangeRow { thread: thread_of(builder, thread).0, ..row })
                }
                Either::Call((thread, row)) => {
                    let (thread, process) = thread_of(builder, thread);
                    Row::Call(CallRow { thread, process, ..row })
                }
            };
            each(&builder.trace, row);
        }
        let ranges_read = range_reader.join().expect("reading ranges does not panic")?;
        let calls_read = match call_reader {
            Some(reader) => reader.join().expect("reading calls does not panic")?,
            None => Quality::default(),
        };
        let in_order = ranges.in_order && calls.in_order;
        Ok(Pass { in_order, ranges: ranges_read, calls: calls_read })
    })
}

fn ranges_of(
    path: &Path,
    how: (Order, bool),
    strings: &HashMap<i64, Name>,
    mut batches: Batches<(i64, RangeRow)>,
) -> Result<Part, TraceError> {
    let part = ranges::stream(path, how, strings, |thread, row| batches.push((thread, row)))?;
    batches.send();
    Ok(part)
}

/// The reader of the calls, and which of them.
struct CallReader<'a> {
    path: &'a Path,
    order: Order,
    strings: &'a HashMap<i64, Name>,
    /// Name of calls without a recorded name.
    unknown: Name,
    /// Whether calls without a correlation id are read too.
    all: bool,
}

impl CallReader<'_> {
    /// Sends the calls, each with the global id of its thread.
    fn send(&self, mut batches: Batches<(i64, CallRow)>) -> Result<Quality, TraceError> {
        let database = Database::open(self.path)?;
        let mut quality = Quality::default();
        if !database.has(RUNTIME) {
            quality.missing.push(RUNTIME.to_owned());
        }
        let columns = ["start", "end", "globalTid", "correlationId", "nameId"];
        quality.missing.extend(super::absent(&database, RUNTIME, &columns));
        let ended = database.scan_in(self.order, RUNTIME, &columns, |row| {
            let Some(start) = quality.time(row.integer(0)) else { return };
            let end = quality.time(row.integer(1)).unwrap_or(start);
            let end = quality.span_end(start, end);
            let correlation = quality.correlation(row.integer(3));
            if self.all || correlation != 0 {
                let name = row.integer(4).and_then(|id| self.strings.get(&id)).copied();
                let name = name.unwrap_or(self.unknown);
                let call = CallRow { start, end, thread: 0, process: 0, name, correlation };
                batches.push((row.integer(2).unwrap_or(0), call));
            }
        })?;
        batches.send();
        quality.unreadable.extend(ended);
        Ok(quality)
    }
}

/// Rows on their way to another thread.
struct Batches<T> {
    batch: Vec<T>,
    sender: SyncSender<Vec<T>>,
    /// Batches that the other thread has read: their memory is used again.
    read: Receiver<Vec<T>>,
}

/// Sender and receiver of a channel that passes batches of rows to another thread.
fn batches<T>() -> (Batches<T>, OrderingBuffer<T>) {
    let (sender, receiver) = sync_channel(2);
    let (spent, read) = sync_channel(4);
    let ordered = OrderingBuffer {
        receiver,
        spent,
        ready: Vec::new(),
        next: 0,
        held: Vec::new(),
        last: i64::MIN,
        in_order: true,
    };
    (Batches { batch: Vec::new(), sender, read }, ordered)
}

impl<T> Batches<T> {
    fn push(&mut self, row: T) {
        self.batch.push(row);
        if self.batch.len() == BATCH {
            self.send();
        }
    }

    fn send(&mut self) {
        let empty = self.read.try_recv().unwrap_or_else(|_| Vec::with_capacity(BATCH));
        // Nobody receives any more only if the other thread panicked.
        let _ = self.sender.send(std::mem::replace(&mut self.batch, empty));
    }
}

/// Puts rows that are almost sorted into order.
struct OrderingBuffer<T> {
    receiver: Receiver<Vec<T>>,
    /// Returns batches that were read, so that their memory is used again.
    spent: SyncSender<Vec<T>>,
    ready: Vec<T>,
    next: usize,
    /// Rows that are later than all rows that are ready.
    held: Vec<T>,
    last: i64,
    /// Whether the buffer sufficed.
    in_order: bool,
}

impl<T: InTime + Copy> OrderingBuffer<T> {
    /// Makes the held rows ready, the same number of the earliest ones; `false`: there are
    /// no more.
    fn refill(&mut self) -> bool {
        let mut read = std::mem::take(&mut self.ready);
        read.clear();
        self.next = 0;
        let Ok(batch) = self.receiver.recv() else {
            self.ready = std::mem::take(&mut self.held);
            return !self.ready.is_empty();
        };
        let follows = match (self.held.last(), batch.first()) {
            (Some(last), Some(first)) => last.key() <= first.key(),
            _ => true,
        };
        if follows && batch.is_sorted_by_key(InTime::key) {
            self.ready = std::mem::replace(&mut self.held, batch);
        } else {
            let whole = self.held.len();
            let mut all = std::mem::take(&mut self.held);
            all.extend(batch);
            all.sort_by_key(InTime::key);
            self.held = all.split_off(whole);
            self.ready = all;
        }
        let _ = self.spent.try_send(read);
        true
    }
}

impl<T: InTime + Copy> Iterator for OrderingBuffer<T> {
    type Item = T;

    #[inline]
    fn next(&mut self) -> Option<T> {
        while self.next == self.ready.len() {
            if !self.refill() {
                return None;
            }
        }
        let row = self.ready[self.next];
        self.next += 1;
        let start = row.key().0;
        self.in_order &= start >= self.last;
        self.last = start;
        Some(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(starts: &[i64]) -> Vec<CallRow> {
        let row = |&start| CallRow {
            start,
            end: start,
            thread: 0,
            process: 0,
            name: Name::default(),
            correlation: 1,
        };
        starts.iter().map(row).collect()
    }

    #[test]
    fn a_buffer_mends_what_is_almost_in_order() {
        let read = |batches: &[&[i64]]| {
            let (into, mut ordered) = super::batches();
            let batches: Vec<Vec<CallRow>> = batches.iter().map(|batch| rows(batch)).collect();
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
