//! Passes ranges and API calls of an Nsight Systems export to a callback in order of time, without
//! keeping them in memory.
//!
//! Rows of an export are almost sorted by time, so a buffer of two batches can sort them. If a row
//! is too far from its place for the buffer, the pass is repeated with rows that SQLite sorts.

use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use hashbrown::HashMap;

use super::super::rows::{
    ExportWithoutStreamedRows, MergedRangeOrCall, SortedByStartThenLongest, StreamedCallRow,
    StreamedRangeOrCall, StreamedRangeRow, merge_ranges_and_calls_by_time,
};
use super::super::trace_builder::TraceBuilder;
use super::super::wanted_parts::WantedTraceParts;
use super::database::{ExportRowOrder, NsysExportDatabase};
use super::ids::{CUDA_API_CALL_TABLE, process_key_pid_and_tid_of_global_id};
use super::ranges::{self, NvtxRangesBeforeNaming};
use crate::error::TraceError;
use crate::model::Trace;
use crate::model::interned_names::InternedNameId;
use crate::model::quality::MissingAndImplausibleTraceData;

/// Number of rows per batch, and the largest distance of a row from its sorted place that the
/// buffer corrects.
const ROWS_PER_BATCH: usize = 1 << 15;

/// Reads the wanted tables except ranges and API calls into a trace; passes ranges and API calls to
/// `each`.
///
/// # Errors
/// The export is locked or is not an SQLite database.
pub fn stream_ranges_and_calls_of_export(
    path: &Path,
    wanted: &WantedTraceParts,
    mut each: impl FnMut(&Trace, StreamedRangeOrCall),
) -> Result<ExportWithoutStreamedRows, TraceError> {
    let mut reader = super::open_export_and_read_strings(path)?;
    reader.read_tables_except_ranges(&WantedTraceParts { reads_api_calls: false, ..*wanted })?;
    let super::NsysExportReader { mut builder, name_by_string_id: strings, database } = reader;
    builder.trace.names.intern_text(super::host::NAME_OF_UNNAMED_CALLS);
    builder.copy_tables_and_demangle_kernel_names();
    let mut pass = stream_ranges_and_calls_once(
        path,
        wanted,
        ExportRowOrder::AsStored,
        &mut builder,
        &strings,
        &mut each,
    )?;
    if !pass.all_rows_in_order {
        pass = stream_ranges_and_calls_once(
            path,
            wanted,
            ExportRowOrder::ByStartTime,
            &mut builder,
            &strings,
            &mut each,
        )?;
    }
    let last = pass
        .ranges
        .end_for_unclosed_ranges(&database)
        .unwrap_or(StreamedRangeRow::UNCLOSED_RANGE_END);
    builder.trace.quality.add_counts_and_messages(pass.api_call_table_problems);
    let names = pass.ranges.into_trace_names_of_ranges(&mut builder);
    Ok(ExportWithoutStreamedRows {
        trace: builder.finish_trace(),
        name_by_range_name_index: names,
        trace_end_ns: last,
    })
}

/// Outcome of one pass over the tables of ranges and API calls.
struct StreamPassOutcome {
    all_rows_in_order: bool,
    ranges: NvtxRangesBeforeNaming,
    /// Problems found in the table of API calls.
    api_call_table_problems: MissingAndImplausibleTraceData,
}

fn stream_ranges_and_calls_once(
    path: &Path,
    wanted: &WantedTraceParts,
    order: ExportRowOrder,
    builder: &mut TraceBuilder,
    strings: &HashMap<i64, InternedNameId>,
    each: &mut impl FnMut(&Trace, StreamedRangeOrCall),
) -> Result<StreamPassOutcome, TraceError> {
    let mut threads: HashMap<i64, (u32, u32)> = HashMap::new();
    let mut thread_of = |builder: &mut TraceBuilder, id: i64| {
        *threads.entry(id).or_insert_with(|| {
            let (key, pid, tid) = process_key_pid_and_tid_of_global_id(id);
            let process = builder.index_of_process(key, pid);
            (builder.index_of_host_thread(process, tid), process)
        })
    };
    let (range_batches, mut ranges) = row_batch_channel();
    let (call_batches, mut calls) = row_batch_channel();
    std::thread::scope(|scope| {
        let how = (order, wanted.may_remove_digits_from_names);
        let range_reader = scope.spawn(move || send_ranges(path, how, strings, range_batches));
        let unknown = builder.trace.names.intern_text(super::host::NAME_OF_UNNAMED_CALLS);
        let reader = ApiCallTableReader {
            export_path: path,
            order,
            name_by_string_id: strings,
            unknown_name: unknown,
            reads_calls_without_correlation: wanted.reads_everything_else,
        };
        let call_reader = wanted
            .reads_api_calls
            .then(|| scope.spawn(move || reader.send_api_calls(call_batches)));
        each(&builder.trace, StreamedRangeOrCall::PassBegins);
        for row in merge_ranges_and_calls_by_time(&mut ranges, &mut calls) {
            let row = match row {
                MergedRangeOrCall::Range((thread, row)) => {
                    StreamedRangeOrCall::Range(StreamedRangeRow {
                        thread_index: thread_of(builder, thread).0,
                        ..row
                    })
                }
                MergedRangeOrCall::Call((thread, row)) => {
                    let (thread, process) = thread_of(builder, thread);
                    StreamedRangeOrCall::Call(StreamedCallRow {
                        thread_index: thread,
                        process_index: process,
                        ..row
                    })
                }
            };
            each(&builder.trace, row);
        }
        let ranges_read = range_reader.join().expect("reading ranges does not panic")?;
        let calls_read = match call_reader {
            Some(reader) => reader.join().expect("reading calls does not panic")?,
            None => MissingAndImplausibleTraceData::default(),
        };
        let in_order = ranges.all_rows_in_order && calls.all_rows_in_order;
        Ok(StreamPassOutcome {
            all_rows_in_order: in_order,
            ranges: ranges_read,
            api_call_table_problems: calls_read,
        })
    })
}

fn send_ranges(
    path: &Path,
    how: (ExportRowOrder, bool),
    strings: &HashMap<i64, InternedNameId>,
    mut batches: RowBatchSender<(i64, StreamedRangeRow)>,
) -> Result<NvtxRangesBeforeNaming, TraceError> {
    let part = ranges::stream_nvtx_ranges(path, how, strings, |thread, row| {
        batches.push_and_send_full_batch((thread, row))
    })?;
    batches.send_batch();
    Ok(part)
}

/// Reads the table of API calls on its own thread.
struct ApiCallTableReader<'a> {
    export_path: &'a Path,
    order: ExportRowOrder,
    name_by_string_id: &'a HashMap<i64, InternedNameId>,
    /// Name for API calls for which the export contains no function name.
    unknown_name: InternedNameId,
    /// Whether API calls without a correlation id are read as well.
    reads_calls_without_correlation: bool,
}

impl ApiCallTableReader<'_> {
    /// Sends the API calls in batches to the merging thread, each call with the global id of its
    /// host thread.
    fn send_api_calls(
        &self,
        mut batches: RowBatchSender<(i64, StreamedCallRow)>,
    ) -> Result<MissingAndImplausibleTraceData, TraceError> {
        let database = NsysExportDatabase::open_sqlite_or_parquet_export(self.export_path)?;
        let mut quality = MissingAndImplausibleTraceData::default();
        if !database.has_export_table(CUDA_API_CALL_TABLE) {
            quality.missing_tables_or_fields.push(CUDA_API_CALL_TABLE.to_owned());
        }
        let columns = ["start", "end", "globalTid", "correlationId", "nameId"];
        quality.missing_tables_or_fields.extend(super::missing_necessary_columns(
            &database,
            CUDA_API_CALL_TABLE,
            &columns,
        ));
        let ended =
            database.visit_rows_in_order(self.order, CUDA_API_CALL_TABLE, &columns, |row| {
                let Some(start) = quality.plausible_time_or_count_as_odd(row.cell_as_integer(0))
                else {
                    return;
                };
                let end =
                    quality.plausible_time_or_count_as_odd(row.cell_as_integer(1)).unwrap_or(start);
                let end = quality.plausible_span_end_or_start(start, end);
                let correlation = quality.correlation_id_or_zero(row.cell_as_integer(3));
                if self.reads_calls_without_correlation || correlation != 0 {
                    let name = row
                        .cell_as_integer(4)
                        .and_then(|id| self.name_by_string_id.get(&id))
                        .copied();
                    let name = name.unwrap_or(self.unknown_name);
                    let call = StreamedCallRow {
                        start_ns: start,
                        end_ns: end,
                        thread_index: 0,
                        process_index: 0,
                        function_name: name,
                        correlation,
                    };
                    batches.push_and_send_full_batch((row.cell_as_integer(2).unwrap_or(0), call));
                }
            })?;
        batches.send_batch();
        quality.unreadable_parts.extend(ended);
        Ok(quality)
    }
}

/// The sending end of batches of rows that one thread reads and another thread merges.
struct RowBatchSender<T> {
    batch: Vec<T>,
    sender: SyncSender<Vec<T>>,
    /// Empty vectors that the receiver returns, so that their memory is reused for new batches.
    returned_batches: Receiver<Vec<T>>,
}

/// Creates a sender of row batches and the buffer that receives, sorts and yields the rows.
fn row_batch_channel<T>() -> (RowBatchSender<T>, NearlySortedRowBuffer<T>) {
    let (sender, receiver) = sync_channel(2);
    let (spent, read) = sync_channel(4);
    let ordered = NearlySortedRowBuffer {
        receiver,
        returned_batches: spent,
        ready_rows: Vec::new(),
        next_ready_row: 0,
        later_rows: Vec::new(),
        last_row_start_ns: i64::MIN,
        all_rows_in_order: true,
    };
    (RowBatchSender { batch: Vec::new(), sender, returned_batches: read }, ordered)
}

impl<T> RowBatchSender<T> {
    fn push_and_send_full_batch(&mut self, row: T) {
        self.batch.push(row);
        if self.batch.len() == ROWS_PER_BATCH {
            self.send_batch();
        }
    }

    fn send_batch(&mut self) {
        let empty =
            self.returned_batches.try_recv().unwrap_or_else(|_| Vec::with_capacity(ROWS_PER_BATCH));
        // Sending fails only if the receiving thread panicked, which the join reports.
        let _ = self.sender.send(std::mem::replace(&mut self.batch, empty));
    }
}

/// Receives batches of rows that are almost sorted by time, and yields the rows in order of time.
struct NearlySortedRowBuffer<T> {
    receiver: Receiver<Vec<T>>,
    /// Returns the vectors of batches that were read to the sender, so that their memory is reused.
    returned_batches: SyncSender<Vec<T>>,
    ready_rows: Vec<T>,
    next_ready_row: usize,
    /// Rows that are not earlier than any row in `ready_rows`.
    later_rows: Vec<T>,
    last_row_start_ns: i64,
    /// Whether the rows that the buffer has yielded so far were in order of start time.
    all_rows_in_order: bool,
}

impl<T: SortedByStartThenLongest + Copy> NearlySortedRowBuffer<T> {
    /// Receives one batch and makes the earliest rows ready; returns `false` if no rows are left.
    fn refill_with_earliest_rows(&mut self) -> bool {
        let mut read = std::mem::take(&mut self.ready_rows);
        read.clear();
        self.next_ready_row = 0;
        let Ok(batch) = self.receiver.recv() else {
            self.ready_rows = std::mem::take(&mut self.later_rows);
            return !self.ready_rows.is_empty();
        };
        let follows = match (self.later_rows.last(), batch.first()) {
            (Some(last), Some(first)) => {
                last.start_and_reversed_end() <= first.start_and_reversed_end()
            }
            _ => true,
        };
        if follows && batch.is_sorted_by_key(SortedByStartThenLongest::start_and_reversed_end) {
            self.ready_rows = std::mem::replace(&mut self.later_rows, batch);
        } else {
            let whole = self.later_rows.len();
            let mut all = std::mem::take(&mut self.later_rows);
            all.extend(batch);
            all.sort_by_key(SortedByStartThenLongest::start_and_reversed_end);
            self.later_rows = all.split_off(whole);
            self.ready_rows = all;
        }
        let _ = self.returned_batches.try_send(read);
        true
    }
}

impl<T: SortedByStartThenLongest + Copy> Iterator for NearlySortedRowBuffer<T> {
    type Item = T;

    #[inline]
    fn next(&mut self) -> Option<T> {
        while self.next_ready_row == self.ready_rows.len() {
            if !self.refill_with_earliest_rows() {
                return None;
            }
        }
        let row = self.ready_rows[self.next_ready_row];
        self.next_ready_row += 1;
        let start = row.start_and_reversed_end().0;
        self.all_rows_in_order &= start >= self.last_row_start_ns;
        self.last_row_start_ns = start;
        Some(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call_rows(starts: &[i64]) -> Vec<StreamedCallRow> {
        let row = |&start| StreamedCallRow {
            start_ns: start,
            end_ns: start,
            thread_index: 0,
            process_index: 0,
            function_name: InternedNameId::default(),
            correlation: 1,
        };
        starts.iter().map(row).collect()
    }

    #[test]
    fn nearly_sorted_rows_are_sorted_by_a_small_buffer() {
        let read = |batches: &[&[i64]]| {
            let (into, mut ordered) = row_batch_channel();
            let batches: Vec<Vec<StreamedCallRow>> =
                batches.iter().map(|batch| call_rows(batch)).collect();
            std::thread::spawn(move || {
                batches.into_iter().for_each(|batch| into.sender.send(batch).expect("it is read"));
            });
            let starts: Vec<i64> = ordered.by_ref().map(|row| row.start_ns).collect();
            (starts, ordered.all_rows_in_order)
        };
        assert_eq!(read(&[&[3, 1], &[2, 5], &[4, 6]]), (vec![1, 2, 3, 4, 5, 6], true));
        assert_eq!(read(&[]), (vec![], true));
        assert!(!read(&[&[7, 8], &[9, 10], &[1, 2]]).1, "a batch too late");
    }
}
