//! Reads Nsight Systems exports (`nsys export --type sqlite`) with schema versions 2.9 to 3.25.
//!
//! Every table and every column of an Nsight Systems export may be missing. Texts in an export need
//! not be valid UTF-8. Processes are distinguished by the upper bits of their global id, because
//! correlation ids are unique only within a process. CPU samples, call chains, and tables of
//! network and graphics events are not read.

mod activity;
mod database;
mod export_information;
mod host;
mod ids;
mod nccl;
mod ranges;
pub(super) mod stream;

use std::path::Path;

use database::{ExportRow, NsysExportDatabase};
use hashbrown::HashMap;
use ids::{COPY_TABLE, CUDA_API_CALL_TABLE, KERNEL_TABLE};

use super::trace_builder::TraceBuilder;
use super::unsupported_files;
use super::wanted_parts::WantedTraceParts;
use crate::error::TraceError;
use crate::model::Trace;
use crate::model::interned_names::InternedNameId;

/// Reads a trace from an Nsight Systems export.
///
/// # Errors
/// The file is locked, or is not an SQLite database of an export.
pub(super) fn read_nsys_export(
    path: &Path,
    wanted: &WantedTraceParts,
) -> Result<Trace, TraceError> {
    let mut reader = open_export_and_read_strings(path)?;
    // The table of ranges is usually the longest, so a second thread reads it while the first
    // thread reads the other tables.
    let strings = reader.name_by_string_id.clone();
    let (ranges, rest) = std::thread::scope(|scope| {
        let strings = &strings;
        let ranges = wanted
            .reads_ranges
            .then(|| scope.spawn(move || ranges::read_nvtx_ranges_and_marks(path, strings)));
        let rest = reader.read_tables_except_ranges(wanted);
        let ranges =
            ranges.map(|thread| thread.join().expect("the reader of ranges does not panic"));
        (ranges, rest)
    });
    rest?;
    if let Some(ranges) = ranges {
        let ranges = ranges?;
        let last = ranges.end_for_unclosed_ranges(&reader.database);
        ranges.add_ranges_and_marks_to_trace(&mut reader.builder, last);
    }
    Ok(reader.builder.finish_trace())
}

/// Opens an export and reads its table of strings.
fn open_export_and_read_strings(path: &Path) -> Result<NsysExportReader, TraceError> {
    let database = NsysExportDatabase::open_sqlite_or_parquet_export(path)?;
    let tables = [
        "StringIds",
        "META_DATA_EXPORT",
        "EXPORT_META_DATA",
        "TARGET_INFO_SYSTEM_ENV",
        KERNEL_TABLE,
        CUDA_API_CALL_TABLE,
    ];
    if !tables.iter().any(|table| database.has_export_table(table)) {
        let reason =
            unsupported_files::reason_if_database_of_other_profiler(database.table_names())
                .unwrap_or_else(|| {
                    let what = if path.is_dir() { "a folder" } else { "an SQLite database" };
                    format!("{what} without the tables of an Nsight Systems export")
                });
        return Err(TraceError::UnknownFormat { path: path.to_owned(), reason });
    }
    let mut reader = NsysExportReader {
        database,
        builder: TraceBuilder::default(),
        name_by_string_id: HashMap::new(),
    };
    reader.read_string_table()?;
    Ok(reader)
}

/// Columns whose absence is reported, because most analyses need them.
const COLUMNS_REPORTED_IF_MISSING: &[&str] = &[
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

/// Names those of the requested columns that the table lacks and most analyses need.
fn missing_necessary_columns(
    database: &NsysExportDatabase,
    table: &str,
    columns: &[&str],
) -> Vec<String> {
    let absent = |column: &&&str| {
        COLUMNS_REPORTED_IF_MISSING.contains(*column) && !database.has_export_column(table, column)
    };
    let columns = columns.iter().filter(|_| database.has_export_table(table)).filter(absent);
    columns.map(|column| format!("{table}.{column}")).collect()
}

/// An Nsight Systems export and the trace that is being built from it.
struct NsysExportReader {
    database: NsysExportDatabase,
    builder: TraceBuilder,
    /// Interned texts by the string id to which rows of the export refer.
    name_by_string_id: HashMap<i64, InternedNameId>,
}

impl NsysExportReader {
    fn read_tables_except_ranges(&mut self, wanted: &WantedTraceParts) -> Result<(), TraceError> {
        self.read_versions_devices_and_process_names()?;
        if wanted.reads_operations {
            self.read_gpu_operations(wanted)?;
            self.attach_nccl_sizes_to_kernels()?;
        }
        if wanted.reads_api_calls {
            self.read_cuda_api_calls()?;
        }
        if wanted.reads_everything_else {
            self.read_null_and_non_blocking_streams()?;
            self.read_synchronisations()?;
            self.read_graph_node_creations()?;
            self.read_long_os_calls()?;
            self.read_thread_context_switches()?;
            self.read_gpu_allocations_and_frees()?;
            self.read_managed_memory_page_faults()?;
            self.read_counters()?;
            self.read_diagnostics_and_profiler_overhead()?;
        }
        Ok(())
    }

    /// Passes every row of a table of the export to `each`. Columns that are missing, and a table
    /// that ends early, are recorded in the quality of the trace.
    fn visit_rows_and_record_problems(
        &mut self,
        table: &str,
        columns: &[&str],
        mut each: impl FnMut(&mut TraceBuilder, &HashMap<i64, InternedNameId>, &ExportRow<'_, '_>),
    ) -> Result<(), TraceError> {
        let (builder, strings) = (&mut self.builder, &self.name_by_string_id);
        if [KERNEL_TABLE, COPY_TABLE, CUDA_API_CALL_TABLE].contains(&table) {
            builder.trace.quality.missing_tables_or_fields.extend(missing_necessary_columns(
                &self.database,
                table,
                columns,
            ));
        }
        let ended = self.database.visit_rows(table, columns, |row| each(builder, strings, row))?;
        self.builder.trace.quality.unreadable_parts.extend(ended);
        Ok(())
    }

    /// Returns whether the export has a table; records a missing table in the quality of the trace.
    fn has_table_or_record_missing(&mut self, table: &str) -> bool {
        let there = self.database.has_export_table(table);
        if !there {
            self.builder.trace.quality.missing_tables_or_fields.push(table.to_owned());
        }
        there
    }

    fn read_string_table(&mut self) -> Result<(), TraceError> {
        self.has_table_or_record_missing("StringIds");
        let mut strings = HashMap::new();
        self.visit_rows_and_record_problems("StringIds", &["id", "value"], |builder, _, row| {
            if let (Some(id), Some(text)) = (row.cell_as_integer(0), row.cell_as_text_bytes(1)) {
                builder.trace.quality.count_invalid_utf8(text);
                strings.insert(id, builder.trace.names.intern_bytes_as_text(text));
            }
        })?;
        self.name_by_string_id = strings;
        Ok(())
    }
}
