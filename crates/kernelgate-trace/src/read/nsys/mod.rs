//! Nsight Systems exports (`nsys export --type sqlite`), schemas 2.9 to 3.25.
//!
//! Every table and every column of an export is optional. Texts in an export need not be valid
//! UTF-8. Processes are distinguished by the upper bits of their global id, so that correlation ids
//! of two of them never meet. Absent: CPU samples and call chains, network and graphics tables.

mod activity;
mod database;
mod export_information;
mod host;
mod ids;
mod nccl;
mod ranges;
pub(super) mod stream;

use std::path::Path;

use database::{NsysDatabase, Row};
use hashbrown::HashMap;
use ids::{COPY_TABLE, KERNEL_TABLE, RUNTIME_CALL_TABLE};

use super::trace_builder::TraceBuilder;
use super::unsupported_files;
use super::wanted_parts::WantedTraceParts;
use crate::error::TraceError;
use crate::model::Trace;
use crate::model::interned_names::NameId;

/// Reads an export.
///
/// # Errors
/// The file is locked, or not an SQLite database of an export.
pub(super) fn read_nsys_export(
    path: &Path,
    wanted: &WantedTraceParts,
) -> Result<Trace, TraceError> {
    let mut reader = open_with_texts(path)?;
    // Ranges form the longest table, so they are read in parallel with the other tables.
    let strings = reader.strings.clone();
    let (ranges, rest) = std::thread::scope(|scope| {
        let strings = &strings;
        let ranges = wanted.ranges.then(|| scope.spawn(move || ranges::read_ranges(path, strings)));
        let rest = reader.read_all_but_ranges(wanted);
        let ranges =
            ranges.map(|thread| thread.join().expect("the reader of ranges does not panic"));
        (ranges, rest)
    });
    rest?;
    if let Some(ranges) = ranges {
        let ranges = ranges?;
        let last = ranges.end_of_unclosed_ranges(&reader.database);
        ranges.add_ranges_to_trace(&mut reader.builder, last);
    }
    Ok(reader.builder.finish_trace())
}

/// An export of which the texts were read.
fn open_with_texts(path: &Path) -> Result<NsysReader, TraceError> {
    let database = NsysDatabase::open_export(path)?;
    let tables = [
        "StringIds",
        "META_DATA_EXPORT",
        "EXPORT_META_DATA",
        "TARGET_INFO_SYSTEM_ENV",
        KERNEL_TABLE,
        RUNTIME_CALL_TABLE,
    ];
    if !tables.iter().any(|table| database.has_table(table)) {
        let reason =
            unsupported_files::recognise_database(database.table_names()).unwrap_or_else(|| {
                let what = if path.is_dir() { "a folder" } else { "an SQLite database" };
                format!("{what} without the tables of an Nsight Systems export")
            });
        return Err(TraceError::Unknown { path: path.to_owned(), reason });
    }
    let mut reader =
        NsysReader { database, builder: TraceBuilder::default(), strings: HashMap::new() };
    reader.read_strings()?;
    Ok(reader)
}

/// Columns without which little can be concluded from a table.
const NECESSARY_COLUMNS: &[&str] = &[
    "start",
    "end",
    "correlationId",
    "globalPid",
    "globalTid",
    "deviceId",
    "streamId",
    "demangledName",
    "nameId",
];

/// The needed columns among `columns` that a table lacks.
fn absent_columns(database: &NsysDatabase, table: &str, columns: &[&str]) -> Vec<String> {
    let absent =
        |column: &&&str| NECESSARY_COLUMNS.contains(*column) && !database.has_column(table, column);
    let columns = columns.iter().filter(|_| database.has_table(table)).filter(absent);
    columns.map(|column| format!("{table}.{column}")).collect()
}

/// State of an Nsight Systems export while it is read.
struct NsysReader {
    database: NsysDatabase,
    builder: TraceBuilder,
    /// Texts by the id that rows refer to.
    strings: HashMap<i64, NameId>,
}

impl NsysReader {
    fn read_all_but_ranges(&mut self, wanted: &WantedTraceParts) -> Result<(), TraceError> {
        self.read_export_information()?;
        if wanted.operations {
            self.read_operations(wanted)?;
            self.describe_nccl_kernels()?;
        }
        if wanted.calls {
            self.read_host_calls()?;
        }
        if wanted.rest {
            self.read_streams()?;
            self.read_synchronisations()?;
            self.read_graph_node_events()?;
            self.read_os_calls()?;
            self.read_thread_switches()?;
            self.read_allocations()?;
            self.read_page_faults()?;
            self.read_counters()?;
            self.read_diagnostics()?;
        }
        Ok(())
    }

    /// Visits every row of a table of the export. A table that is missing or ends early is noted.
    fn visit_rows(
        &mut self,
        table: &str,
        columns: &[&str],
        mut each: impl FnMut(&mut TraceBuilder, &HashMap<i64, NameId>, &Row<'_, '_>),
    ) -> Result<(), TraceError> {
        let (builder, strings) = (&mut self.builder, &self.strings);
        if [KERNEL_TABLE, COPY_TABLE, RUNTIME_CALL_TABLE].contains(&table) {
            builder.trace.quality.missing.extend(absent_columns(&self.database, table, columns));
        }
        let ended = self.database.visit_rows(table, columns, |row| each(builder, strings, row))?;
        self.builder.trace.quality.unreadable.extend(ended);
        Ok(())
    }

    /// Returns whether a table that findings need exists; a missing table is recorded.
    fn note_if_table_missing(&mut self, table: &str) -> bool {
        let there = self.database.has_table(table);
        if !there {
            self.builder.trace.quality.missing.push(table.to_owned());
        }
        there
    }

    fn read_strings(&mut self) -> Result<(), TraceError> {
        self.note_if_table_missing("StringIds");
        let mut strings = HashMap::new();
        self.visit_rows("StringIds", &["id", "value"], |builder, _, row| {
            if let (Some(id), Some(text)) = (row.integer_cell(0), row.text_cell(1)) {
                builder.trace.quality.text(text);
                strings.insert(id, builder.trace.names.intern_bytes(text));
            }
        })?;
        self.strings = strings;
        Ok(())
    }
}
