//! NVTX ranges: the longest table, read on a thread and a connection of its own.

use std::path::Path;

use hashbrown::HashMap;

use super::super::rows::RangeRow;
use super::super::trace_builder::TraceBuilder;
use super::database::{NsysDatabase, Row, RowOrder};
use super::ids::{
    COPY_TABLE, GRAPH_TABLE, KERNEL_TABLE, MEMSET_TABLE, RUNTIME_CALL_TABLE, split_global_id,
};
use crate::error::TraceError;
use crate::model::InternedValues;
use crate::model::host::{HostMarkTable, HostRangeTable, RangeStyle};
use crate::model::interned_names::{NameId, TraceNames, without_numbers_in_name};
use crate::model::quality::TraceQuality;

const NVTX_EVENT_TABLE: &str = "NVTX_EVENTS";
/// Events other than ranges: a moment with a text, the name of a domain.
const MARK_EVENT_TYPE: i64 = 34;
const DOMAIN_EVENT_TYPE: i64 = 75;
/// Number of texts after which further texts lose their numbers, if few names are requested.
const MAX_TEXTS_WITH_NUMBERS: usize = 1 << 16;

/// The text of a range before it has a name in the trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum RangeText {
    /// The text is one of the export's string table.
    Shared(NameId),
    /// The text is one of the texts in [`ThreadAndTextLabels`].
    Own(NameId),
    None,
}

/// Content of a row, its thread and name by the numbers of its [`ThreadAndTextLabels`].
enum RangeEvent {
    /// End of the range; `None` if the range was never closed.
    Range(i64, Option<i64>, RangeStyle),
    Mark(i64),
}

/// Threads and texts of ranges, before they are added to a trace.
#[derive(Default)]
struct ThreadAndTextLabels {
    /// Global thread ids.
    threads: InternedValues<i64>,
    /// (domain, process, text).
    keys: InternedValues<(i64, u64, RangeText)>,
    texts: TraceNames,
    /// Whether texts lose their numbers once there are many texts.
    few: bool,
    domains: HashMap<(i64, u64), RangeText>,
    quality: TraceQuality,
}

/// Ranges whose threads and names are indices of this part alone.
#[derive(Default)]
pub(super) struct RangeBatch {
    ranges: HostRangeTable,
    marks: HostMarkTable,
    unclosed: Vec<u32>,
    labels: ThreadAndTextLabels,
}

/// Reads the ranges.
///
/// # Errors
/// The database is locked.
pub(super) fn read_ranges(
    path: &Path,
    strings: &HashMap<i64, NameId>,
) -> Result<RangeBatch, TraceError> {
    let database = NsysDatabase::open_export(path)?;
    let RangeBatch { mut ranges, mut marks, mut unclosed, .. } = RangeBatch::default();
    ranges.reserve_rows(database.rows_at_most(NVTX_EVENT_TABLE));
    let how = (RowOrder::Stored, false);
    let labels = scan_range_events(&database, how, strings, |thread, key, event| match event {
        RangeEvent::Range(start, end, style) => {
            if end.is_none() {
                unclosed.push(u32::try_from(ranges.len()).unwrap_or(u32::MAX));
            }
            ranges.push(start, end.unwrap_or(start), thread.0, NameId(key), style);
        }
        RangeEvent::Mark(time) => {
            marks.time.push(time);
            marks.thread.push(thread.0);
            marks.name.push(NameId(key));
        }
    })?;
    Ok(RangeBatch { ranges, marks, unclosed, labels })
}

/// Hands out the ranges in some order, and, where few names suffice, with few; their names are
/// numbers into what is returned.
///
/// # Errors
/// The database is locked.
pub(super) fn stream_ranges(
    path: &Path,
    how: (RowOrder, bool),
    strings: &HashMap<i64, NameId>,
    mut each: impl FnMut(i64, RangeRow),
) -> Result<RangeBatch, TraceError> {
    let database = NsysDatabase::open_export(path)?;
    let labels = scan_range_events(&database, how, strings, |(_, thread), label, event| {
        if let RangeEvent::Range(start, end, style) = event {
            let end = end.unwrap_or(RangeRow::UNCLOSED_RANGE_END);
            each(thread, RangeRow { start, end, thread: 0, label, style, inputs: 0 });
        }
    })?;
    Ok(RangeBatch { labels, ..RangeBatch::default() })
}

/// Visits events: their thread as number and global id, the number of their name, what they are.
fn scan_range_events(
    database: &NsysDatabase,
    (order, few): (RowOrder, bool),
    strings: &HashMap<i64, NameId>,
    mut each: impl FnMut((u32, i64), u32, RangeEvent),
) -> Result<ThreadAndTextLabels, TraceError> {
    let mut labels = ThreadAndTextLabels { few, ..ThreadAndTextLabels::default() };
    if !database.has_table(NVTX_EVENT_TABLE) {
        labels.quality.missing.push(NVTX_EVENT_TABLE.to_owned());
        return Ok(labels);
    }
    let columns = ["start", "end", "eventType", "globalTid", "text", "textId", "domainId"];
    let ended = database.visit_rows_in_order(order, NVTX_EVENT_TABLE, &columns, |row| {
        let kind = row.integer_cell(2);
        let style = match kind {
            // The event types 59 and 60 are NVTX ranges, 70 and 71 the same from a text file.
            Some(59 | 70) => RangeStyle::PushPop,
            Some(60 | 71) => RangeStyle::StartEnd,
            Some(MARK_EVENT_TYPE | DOMAIN_EVENT_TYPE) => RangeStyle::PushPop,
            _ => return,
        };
        let shared = row.integer_cell(5).and_then(|id| strings.get(&id));
        let text = shared.map_or_else(|| labels.own_text(row), |&name| RangeText::Shared(name));
        let thread = row.integer_cell(3).unwrap_or(0);
        let (process, ..) = split_global_id(thread);
        let domain = row.integer_cell(6).unwrap_or(0);
        if kind == Some(DOMAIN_EVENT_TYPE) {
            labels.domains.insert((domain, process), text);
            return;
        }
        let Some(start) = labels.quality.time(row.integer_cell(0)) else { return };
        let event = if kind == Some(MARK_EVENT_TYPE) {
            RangeEvent::Mark(start)
        } else {
            let end = labels.quality.time(row.integer_cell(1));
            let end = end.map(|end| labels.quality.plausible_span_end(start, end));
            labels.quality.unclosed_ranges += u64::from(end.is_none());
            RangeEvent::Range(start, end, style)
        };
        let key = labels.keys.intern((domain, process, text));
        each((labels.threads.intern(thread), thread), key, event);
    })?;
    labels.quality.unreadable.extend(ended);
    Ok(labels)
}

impl ThreadAndTextLabels {
    /// Text for a row whose string the export lacks.
    fn own_text(&mut self, row: &Row<'_, '_>) -> RangeText {
        let Some(text) = row.text_cell(4) else { return RangeText::None };
        self.quality.text(text);
        RangeText::Own(match self.few && self.texts.len() >= MAX_TEXTS_WITH_NUMBERS {
            true => {
                self.texts.intern_text(&without_numbers_in_name(&String::from_utf8_lossy(text)))
            }
            false => self.texts.intern_bytes(text),
        })
    }

    /// The trace name of each text number.
    fn names_of_texts(&self, builder: &mut TraceBuilder) -> Vec<NameId> {
        self.keys
            .values
            .iter()
            .map(|&(domain, process, text)| {
                let domain =
                    self.domains.get(&(domain, process)).copied().unwrap_or(RangeText::None);
                let mut of = |text| match text {
                    RangeText::Shared(name) => Some(name),
                    RangeText::Own(name) => {
                        Some(builder.trace.names.intern_text(self.texts.text(name)))
                    }
                    RangeText::None => None,
                };
                match (of(domain), of(text)) {
                    (None, Some(text)) => text,
                    (None, None) => builder.trace.names.intern_text(""),
                    (Some(domain), text) => {
                        let all = &builder.trace.names;
                        let text = text.map_or("", |text| all.text(text));
                        let full = format!("{}:{text}", all.text(domain));
                        builder.trace.names.intern_text(&full)
                    }
                }
            })
            .collect()
    }
}

impl RangeBatch {
    /// The names that rows of [`stream_ranges`] mean.
    pub fn into_trace_names(self, builder: &mut TraceBuilder) -> Vec<NameId> {
        let names = self.labels.names_of_texts(builder);
        builder.trace.quality.add_quality_of(self.labels.quality);
        names
    }

    /// Returns the end time given to ranges that were never closed: the last time of the whole
    /// trace. Returns `None` if all ranges were closed.
    pub fn end_of_unclosed_ranges(&self, database: &NsysDatabase) -> Option<i64> {
        let tables = [
            NVTX_EVENT_TABLE,
            KERNEL_TABLE,
            COPY_TABLE,
            MEMSET_TABLE,
            GRAPH_TABLE,
            RUNTIME_CALL_TABLE,
        ];
        (self.labels.quality.unclosed_ranges > 0).then(|| database.last_end_ns(&tables)).flatten()
    }

    /// Adds the ranges to a trace; ranges that were never closed get the end `last`.
    pub fn add_ranges_to_trace(self, builder: &mut TraceBuilder, last: Option<i64>) {
        let Self { mut ranges, mut marks, unclosed, labels } = self;
        let threads: Vec<u32> = labels
            .threads
            .values
            .iter()
            .map(|&id| {
                let (key, pid, tid) = split_global_id(id);
                let process = builder.process_of_key(key, pid);
                builder.thread_of_tid(process, tid)
            })
            .collect();
        let names = labels.names_of_texts(builder);
        for thread in ranges.thread.iter_mut().chain(&mut marks.thread) {
            *thread = threads[*thread as usize];
        }
        for name in ranges.name.iter_mut().chain(&mut marks.name) {
            *name = names[name.0 as usize];
        }
        (builder.trace.ranges, builder.trace.marks) = (ranges, marks);
        builder.trace.quality.add_quality_of(labels.quality);
        if let Some(last) = last {
            for &range in &unclosed {
                let end = &mut builder.trace.ranges.end[range as usize];
                *end = last.max(*end);
            }
        }
    }
}
