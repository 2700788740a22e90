//! Reads NVTX ranges and marks of an Nsight Systems export, on a thread and a database connection
//! of their own.

use std::path::Path;

use hashbrown::HashMap;

use super::super::rows::StreamedRangeRow;
use super::super::trace_builder::TraceBuilder;
use super::database::{ExportRow, ExportRowOrder, NsysExportDatabase};
use super::ids::{
    COPY_TABLE, CUDA_API_CALL_TABLE, GRAPH_TABLE, KERNEL_TABLE, MEMSET_TABLE, NVTX_EVENT_TABLE,
    process_key_pid_and_tid_of_global_id,
};
use crate::error::TraceError;
use crate::model::DistinctValues;
use crate::model::host::{HostMarkerTable, HostRangeStyle, HostRangeTable};
use crate::model::interned_names::{
    InternedNameId, InternedTraceNames, replace_digits_by_number_sign,
};
use crate::model::quality::MissingAndImplausibleTraceData;

/// NVTX event types other than ranges: marks, and registrations of a domain's name.
const NVTX_MARK_EVENT_TYPE: i64 = 34;
const NVTX_DOMAIN_EVENT_TYPE: i64 = 75;
/// If the caller wants few names, digits are removed from further texts after this many distinct
/// texts.
const MAX_DISTINCT_TEXTS_WITH_DIGITS: usize = 1 << 16;

/// The text of an NVTX event, before it is added to the trace's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum NvtxEventText {
    /// The text is in the export's string table and already has a name id.
    InStringTable(InternedNameId),
    /// The text is stored in the NVTX event itself; the id refers to [`NvtxThreadsAndTexts`].
    InNvtxEvent(InternedNameId),
    NoText,
}

/// A range or a mark among the NVTX events, without thread and name.
enum NvtxRangeOrMark {
    /// Start time, end time (`None` if the range was never closed) and style of a range.
    RangeFromTo(i64, Option<i64>, HostRangeStyle),
    MarkAtTime(i64),
}

/// Threads and texts of NVTX events, numbered in order of appearance, before they get indices in
/// the trace.
#[derive(Default)]
struct NvtxThreadsAndTexts {
    /// Global thread ids.
    global_thread_ids: DistinctValues<i64>,
    /// (domain, process, text).
    domain_process_and_text: DistinctValues<(i64, u64, NvtxEventText)>,
    texts: InternedTraceNames,
    /// Whether digits are removed from new texts once there are very many distinct texts.
    removes_digits_if_many_texts: bool,
    domain_name_by_id_and_process: HashMap<(i64, u64), NvtxEventText>,
    quality: MissingAndImplausibleTraceData,
}

/// NVTX ranges and marks whose threads and names are still numbered as in `labels`, not as in the
/// trace.
#[derive(Default)]
pub(super) struct NvtxRangesBeforeNaming {
    ranges: HostRangeTable,
    marks: HostMarkerTable,
    rows_of_unclosed_ranges: Vec<u32>,
    labels: NvtxThreadsAndTexts,
}

/// Reads all NVTX ranges and marks of the export into memory.
///
/// # Errors
/// The database is locked.
pub(super) fn read_nvtx_ranges_and_marks(
    path: &Path,
    strings: &HashMap<i64, InternedNameId>,
) -> Result<NvtxRangesBeforeNaming, TraceError> {
    let database = NsysExportDatabase::open_sqlite_or_parquet_export(path)?;
    let NvtxRangesBeforeNaming {
        mut ranges, mut marks, rows_of_unclosed_ranges: mut unclosed, ..
    } = NvtxRangesBeforeNaming::default();
    ranges.reserve_ranges(database.row_count_upper_bound(NVTX_EVENT_TABLE));
    let how = (ExportRowOrder::AsStored, false);
    let labels =
        visit_nvtx_ranges_and_marks(&database, how, strings, |thread, key, event| match event {
            NvtxRangeOrMark::RangeFromTo(start, end, style) => {
                if end.is_none() {
                    unclosed.push(u32::try_from(ranges.range_count()).unwrap_or(u32::MAX));
                }
                ranges.push_host_range(
                    start,
                    end.unwrap_or(start),
                    thread.0,
                    InternedNameId(key),
                    style,
                );
            }
            NvtxRangeOrMark::MarkAtTime(time) => {
                marks.time_ns.push(time);
                marks.thread_index.push(thread.0);
                marks.mark_name.push(InternedNameId(key));
            }
        })?;
    Ok(NvtxRangesBeforeNaming { ranges, marks, rows_of_unclosed_ranges: unclosed, labels })
}

/// Passes the ranges to `each` in the requested row order; range names are numbers that the
/// returned value translates.
///
/// # Errors
/// The database is locked.
pub(super) fn stream_nvtx_ranges(
    path: &Path,
    how: (ExportRowOrder, bool),
    strings: &HashMap<i64, InternedNameId>,
    mut each: impl FnMut(i64, StreamedRangeRow),
) -> Result<NvtxRangesBeforeNaming, TraceError> {
    let database = NsysExportDatabase::open_sqlite_or_parquet_export(path)?;
    let labels =
        visit_nvtx_ranges_and_marks(&database, how, strings, |(_, thread), label, event| {
            if let NvtxRangeOrMark::RangeFromTo(start, end, style) = event {
                let end = end.unwrap_or(StreamedRangeRow::UNCLOSED_RANGE_END);
                each(
                    thread,
                    StreamedRangeRow {
                        start_ns: start,
                        end_ns: end,
                        thread_index: 0,
                        name_index: label,
                        style,
                        operator_inputs_number: 0,
                    },
                );
            }
        })?;
    Ok(NvtxRangesBeforeNaming { labels, ..NvtxRangesBeforeNaming::default() })
}

/// Passes each NVTX range and mark to `each`, with the number and the global id of its thread and
/// the number of its name.
fn visit_nvtx_ranges_and_marks(
    database: &NsysExportDatabase,
    (order, few): (ExportRowOrder, bool),
    strings: &HashMap<i64, InternedNameId>,
    mut each: impl FnMut((u32, i64), u32, NvtxRangeOrMark),
) -> Result<NvtxThreadsAndTexts, TraceError> {
    let mut labels =
        NvtxThreadsAndTexts { removes_digits_if_many_texts: few, ..NvtxThreadsAndTexts::default() };
    if !database.has_export_table(NVTX_EVENT_TABLE) {
        labels.quality.missing_tables_or_fields.push(NVTX_EVENT_TABLE.to_owned());
        return Ok(labels);
    }
    let columns = ["start", "end", "eventType", "globalTid", "text", "textId", "domainId"];
    let ended = database.visit_rows_in_order(order, NVTX_EVENT_TABLE, &columns, |row| {
        let kind = row.cell_as_integer(2);
        let style = match kind {
            // Event types 59 and 60 are NVTX push/pop and start/end ranges; 70 and 71 are these
            // ranges in an import from a text file.
            Some(59 | 70) => HostRangeStyle::PushPop,
            Some(60 | 71) => HostRangeStyle::StartEnd,
            Some(NVTX_MARK_EVENT_TYPE | NVTX_DOMAIN_EVENT_TYPE) => HostRangeStyle::PushPop,
            _ => return,
        };
        let shared = row.cell_as_integer(5).and_then(|id| strings.get(&id));
        let text = shared.map_or_else(
            || labels.intern_text_of_row(row),
            |&name| NvtxEventText::InStringTable(name),
        );
        let thread = row.cell_as_integer(3).unwrap_or(0);
        let (process, ..) = process_key_pid_and_tid_of_global_id(thread);
        let domain = row.cell_as_integer(6).unwrap_or(0);
        if kind == Some(NVTX_DOMAIN_EVENT_TYPE) {
            labels.domain_name_by_id_and_process.insert((domain, process), text);
            return;
        }
        let Some(start) = labels.quality.plausible_time_or_count_as_odd(row.cell_as_integer(0))
        else {
            return;
        };
        let event = if kind == Some(NVTX_MARK_EVENT_TYPE) {
            NvtxRangeOrMark::MarkAtTime(start)
        } else {
            let end = labels.quality.plausible_time_or_count_as_odd(row.cell_as_integer(1));
            let end = end.map(|end| labels.quality.plausible_span_end_or_start(start, end));
            labels.quality.unclosed_ranges += u64::from(end.is_none());
            NvtxRangeOrMark::RangeFromTo(start, end, style)
        };
        let key = labels.domain_process_and_text.index_of_value((domain, process, text));
        each((labels.global_thread_ids.index_of_value(thread), thread), key, event);
    })?;
    labels.quality.unreadable_parts.extend(ended);
    Ok(labels)
}

impl NvtxThreadsAndTexts {
    /// Interns the text that is stored in the row itself, for a row without an entry in the string
    /// table.
    fn intern_text_of_row(&mut self, row: &ExportRow<'_, '_>) -> NvtxEventText {
        let Some(text) = row.cell_as_text_bytes(4) else { return NvtxEventText::NoText };
        self.quality.count_invalid_utf8(text);
        NvtxEventText::InNvtxEvent(
            match self.removes_digits_if_many_texts
                && self.texts.interned_text_count() >= MAX_DISTINCT_TEXTS_WITH_DIGITS
            {
                true => self
                    .texts
                    .intern_text(&replace_digits_by_number_sign(&String::from_utf8_lossy(text))),
                false => self.texts.intern_bytes_as_text(text),
            },
        )
    }

    /// Returns, for each text number, the id of the text in the trace, with the NVTX domain as
    /// prefix.
    fn trace_names_of_numbered_texts(&self, builder: &mut TraceBuilder) -> Vec<InternedNameId> {
        self.domain_process_and_text
            .values
            .iter()
            .map(|&(domain, process, text)| {
                let domain = self
                    .domain_name_by_id_and_process
                    .get(&(domain, process))
                    .copied()
                    .unwrap_or(NvtxEventText::NoText);
                let mut of = |text| match text {
                    NvtxEventText::InStringTable(name) => Some(name),
                    NvtxEventText::InNvtxEvent(name) => {
                        Some(builder.trace.names.intern_text(self.texts.text_of_name(name)))
                    }
                    NvtxEventText::NoText => None,
                };
                match (of(domain), of(text)) {
                    (None, Some(text)) => text,
                    (None, None) => builder.trace.names.intern_text(""),
                    (Some(domain), text) => {
                        let all = &builder.trace.names;
                        let text = text.map_or("", |text| all.text_of_name(text));
                        let full = format!("{}:{text}", all.text_of_name(domain));
                        builder.trace.names.intern_text(&full)
                    }
                }
            })
            .collect()
    }
}

impl NvtxRangesBeforeNaming {
    /// Returns the trace's name id for each range-name number of [`stream_nvtx_ranges`].
    pub fn into_trace_names_of_ranges(self, builder: &mut TraceBuilder) -> Vec<InternedNameId> {
        let names = self.labels.trace_names_of_numbered_texts(builder);
        builder.trace.quality.add_counts_and_messages(self.labels.quality);
        names
    }

    /// Returns the last time of the whole trace in nanoseconds, which becomes the end of ranges
    /// that were never closed. Returns `None` if all ranges of the trace were closed.
    pub fn end_for_unclosed_ranges(&self, database: &NsysExportDatabase) -> Option<i64> {
        let tables = [
            NVTX_EVENT_TABLE,
            KERNEL_TABLE,
            COPY_TABLE,
            MEMSET_TABLE,
            GRAPH_TABLE,
            CUDA_API_CALL_TABLE,
        ];
        (self.labels.quality.unclosed_ranges > 0)
            .then(|| database.latest_end_ns_of_tables(&tables))
            .flatten()
    }

    /// Adds the ranges and marks to the trace; ranges that were never closed end at `last`.
    pub fn add_ranges_and_marks_to_trace(self, builder: &mut TraceBuilder, last: Option<i64>) {
        let Self { mut ranges, mut marks, rows_of_unclosed_ranges: unclosed, labels } = self;
        let threads: Vec<u32> = labels
            .global_thread_ids
            .values
            .iter()
            .map(|&id| {
                let (key, pid, tid) = process_key_pid_and_tid_of_global_id(id);
                let process = builder.index_of_process(key, pid);
                builder.index_of_host_thread(process, tid)
            })
            .collect();
        let names = labels.trace_names_of_numbered_texts(builder);
        for thread in ranges.thread_index.iter_mut().chain(&mut marks.thread_index) {
            *thread = threads[*thread as usize];
        }
        for name in ranges.range_name.iter_mut().chain(&mut marks.mark_name) {
            *name = names[name.0 as usize];
        }
        (builder.trace.ranges, builder.trace.host_marks) = (ranges, marks);
        builder.trace.quality.add_counts_and_messages(labels.quality);
        if let Some(last) = last {
            for &range in &unclosed {
                let end = &mut builder.trace.ranges.end_ns[range as usize];
                *end = last.max(*end);
            }
        }
    }
}
