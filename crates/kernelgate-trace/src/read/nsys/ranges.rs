//! NVTX ranges: the longest table, read on a thread and a connection of its own.

use std::path::Path;

use hashbrown::HashMap;

use super::super::builder::Builder;
use super::database::Database;
use super::ids::split_global_id;
use crate::error::TraceError;
use crate::model::Table;
use crate::model::host::{Marks, RangeStyle, Ranges};
use crate::model::names::{Name, Names};
use crate::model::quality::Quality;

const EVENTS: &str = "NVTX_EVENTS";
/// Events that are no ranges: a moment with a text, the name of a domain.
const MARK: i64 = 34;
const DOMAIN: i64 = 75;

/// The text of a range before it has a name in the trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Text {
    /// One of the export's texts.
    Shared(Name),
    /// One of [`Part::texts`].
    Own(Name),
    None,
}

/// Ranges whose threads and names are indices of this part alone.
pub(super) struct Part {
    ranges: Ranges,
    marks: Marks,
    /// Global thread ids.
    threads: Table<i64>,
    /// (domain, process, text).
    keys: Table<(i64, u64, Text)>,
    texts: Names,
    domains: HashMap<(i64, u64), Text>,
    unclosed: Vec<u32>,
    quality: Quality,
}

/// Reads the ranges.
///
/// # Errors
/// The database is locked.
pub(super) fn read(path: &Path, strings: &HashMap<i64, Name>) -> Result<Part, TraceError> {
    let database = Database::open(path)?;
    let mut part = Part {
        ranges: Ranges::default(),
        marks: Marks::default(),
        threads: Table::default(),
        keys: Table::default(),
        texts: Names::default(),
        domains: HashMap::new(),
        unclosed: Vec::new(),
        quality: Quality::default(),
    };
    if !database.has(EVENTS) {
        part.quality.missing.push(EVENTS.to_owned());
        return Ok(part);
    }
    part.ranges.reserve(database.rows_at_most(EVENTS));
    let columns = ["start", "end", "eventType", "globalTid", "text", "textId", "domainId"];
    let ended = database.scan(EVENTS, &columns, |row| {
        let kind = row.integer(2);
        let style = match kind {
            // 59 and 60 are NVTX, 70 and 71 the same from a text file.
            Some(59 | 70) => RangeStyle::PushPop,
            Some(60 | 71) => RangeStyle::StartEnd,
            Some(MARK | DOMAIN) => RangeStyle::PushPop,
            _ => return,
        };
        let text = match (row.integer(5).and_then(|id| strings.get(&id)), row.text(4)) {
            (Some(&name), _) => Text::Shared(name),
            (None, Some(text)) => {
                part.quality.text(text);
                Text::Own(part.texts.intern_bytes(text))
            }
            (None, None) => Text::None,
        };
        let thread = row.integer(3).unwrap_or(0);
        let (process, ..) = split_global_id(thread);
        let domain = row.integer(6).unwrap_or(0);
        if kind == Some(DOMAIN) {
            part.domains.insert((domain, process), text);
            return;
        }
        let Some(start) = row.integer(0) else { return };
        if kind == Some(MARK) {
            part.marks.time.push(start);
            part.marks.thread.push(part.threads.of(thread));
            part.marks.name.push(Name(part.keys.of((domain, process, text))));
            return;
        }
        let end = match row.integer(1) {
            Some(end) => part.quality.span_end(start, end),
            None => {
                part.unclosed.push(u32::try_from(part.ranges.len()).unwrap_or(u32::MAX));
                start
            }
        };
        let key = part.keys.of((domain, process, text));
        part.ranges.push(start, end, part.threads.of(thread), Name(key), style);
    })?;
    part.quality.unreadable.extend(ended);
    part.quality.unclosed_ranges = part.unclosed.len() as u64;
    Ok(part)
}

impl Part {
    /// Puts the ranges into a trace.
    pub fn into_trace(self, builder: &mut Builder) {
        let Self { mut ranges, mut marks, threads, keys, texts, domains, unclosed, quality } = self;
        let threads: Vec<u32> = threads
            .values
            .iter()
            .map(|&id| {
                let (key, pid, tid) = split_global_id(id);
                let process = builder.process(key, pid);
                builder.thread(process, tid)
            })
            .collect();
        let names: Vec<Name> = keys
            .values
            .iter()
            .map(|&(domain, process, text)| {
                let domain = domains.get(&(domain, process)).copied().unwrap_or(Text::None);
                let mut of = |text| match text {
                    Text::Shared(name) => Some(name),
                    Text::Own(name) => Some(builder.trace.names.intern(texts.text(name))),
                    Text::None => None,
                };
                match (of(domain), of(text)) {
                    (None, Some(text)) => text,
                    (None, None) => builder.trace.names.intern(""),
                    (Some(domain), text) => {
                        let all = &builder.trace.names;
                        let text = text.map_or("", |text| all.text(text));
                        let full = format!("{}:{text}", all.text(domain));
                        builder.trace.names.intern(&full)
                    }
                }
            })
            .collect();
        for thread in ranges.thread.iter_mut().chain(&mut marks.thread) {
            *thread = threads[*thread as usize];
        }
        for name in ranges.name.iter_mut().chain(&mut marks.name) {
            *name = names[name.0 as usize];
        }
        (builder.trace.ranges, builder.trace.marks) = (ranges, marks);
        builder.trace.quality.absorb(quality);
        if let Some((_, last)) = builder.trace.span() {
            for &range in &unclosed {
                builder.trace.ranges.end[range as usize] = last;
            }
        }
    }
}
