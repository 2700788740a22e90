//! Reads Nsight Systems exports that are SQLite files.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hashbrown::HashMap;
use rusqlite::config::DbConfig;
use rusqlite::limits::Limit;
use rusqlite::{Connection, ErrorCode, OpenFlags};

use super::sqlite_pages::{DecodedSqliteRow, SqlitePageReader};
use super::table_row::{ExportRow, ExportRowCells, ExportRowOrder};
use crate::error::TraceError;
use crate::model::quality::MAX_PLAUSIBLE_TIME_NS;

/// How long SQLite waits for another program that is writing the export.
const SQLITE_WRITER_TIMEOUT: Duration = Duration::from_millis(500);

/// Maximum size of a value in bytes, because an expression in the export's schema could create a
/// value of any size.
const MAX_SQLITE_VALUE_BYTES: i32 = 1 << 28;
/// SQLite virtual-machine instructions per step, after which the limit on steps of a query is
/// checked.
const SQLITE_INSTRUCTIONS_PER_STEP: u32 = 1 << 16;
/// Steps that every query may take, in addition to one step per [`SQLITE_FILE_BYTES_PER_STEP`]
/// bytes of the file.
const BASE_STEPS_PER_SQLITE_QUERY: u64 = 1 << 12;
/// A query may take one more step for each of this many bytes of the SQLite file.
const SQLITE_FILE_BYTES_PER_STEP: u64 = 1 << 14;

/// An Nsight Systems export in SQLite form, open for reading.
pub(crate) struct SqliteExportDatabase {
    sqlite_path: PathBuf,
    connection: Connection,
    /// Number of steps that the running query may still take before SQLite interrupts it.
    remaining_query_steps: Arc<AtomicU64>,
    /// Size of the SQLite file in bytes.
    file_bytes: u64,
    tables: HashMap<String, SqliteTableSchema>,
}

/// Columns and root page of a table in the SQLite file.
#[derive(Default)]
struct SqliteTableSchema {
    /// Position of each column in a stored row, by column name.
    position_by_column: HashMap<String, usize>,
    /// Number of the root page of the table's B-tree.
    root_page: u32,
    /// Whether rows can be decoded from pages without SQLite: the table has no primary key that
    /// replaces the row id, no column default, and no hidden column.
    decodable_from_pages: bool,
}

impl SqliteExportDatabase {
    /// Opens an export in SQLite form.
    ///
    /// # Errors
    /// The file is locked, is not an SQLite database, or has an unreadable schema.
    pub fn open_sqlite_export(path: &Path) -> Result<SqliteExportDatabase, TraceError> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let failed = |error: rusqlite::Error| {
            TraceError::broken_trace_file_error(path, explain_sqlite_error(&error))
        };
        let mut connection = Connection::open_with_flags(path, flags).map_err(failed)?;
        connection.busy_timeout(SQLITE_WRITER_TIMEOUT).map_err(failed)?;
        // Views, triggers and functions in the schema are disabled, because an untrusted schema
        // could compute endlessly or change data.
        for (option, on) in [
            (DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false),
            (DbConfig::SQLITE_DBCONFIG_ENABLE_VIEW, false),
            (DbConfig::SQLITE_DBCONFIG_ENABLE_TRIGGER, false),
        ] {
            connection.set_db_config(option, on).map_err(failed)?;
        }
        connection.set_limit(Limit::SQLITE_LIMIT_LENGTH, MAX_SQLITE_VALUE_BYTES).map_err(failed)?;
        let size = std::fs::metadata(path).map_or(0, |file| file.len());
        let steps = Arc::new(AtomicU64::new(max_query_steps_for_file_size(size)));
        let left = Arc::clone(&steps);
        let step = SQLITE_INSTRUCTIONS_PER_STEP.cast_signed();
        connection
            .progress_handler(step, Some(move || takes_step_beyond_limit(&left)))
            .map_err(failed)?;
        let tables = match read_sqlite_table_schemas(&connection) {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseCorrupt) => {
                // SQLite opens a truncated file only with `writable_schema`; kernelgate never
                // writes through this connection.
                connection.pragma_update(None, "writable_schema", true).map_err(failed)?;
                read_sqlite_table_schemas(&connection)
            }
            tables => tables,
        };
        Ok(Self {
            sqlite_path: path.to_owned(),
            tables: tables.map_err(failed)?,
            connection,
            remaining_query_steps: steps,
            file_bytes: size,
        })
    }

    /// Names of all tables in the SQLite file.
    pub fn table_names(&self) -> impl Iterator<Item = &str> {
        self.tables.keys().map(String::as_str)
    }

    pub fn has_sqlite_table(&self, table: &str) -> bool {
        self.tables.contains_key(table)
    }

    pub fn has_sqlite_column(&self, table: &str, column: &str) -> bool {
        self.tables.get(table).is_some_and(|table| table.position_by_column.contains_key(column))
    }

    /// Returns an upper bound of the table's number of rows from the largest row id, without
    /// counting rows; 0 if unknown.
    pub fn rows_at_most(&self, table: &str) -> usize {
        let last = self
            .connection_with_reset_step_limit()
            .query_row(&format!("SELECT max(rowid) FROM \"{table}\""), [], |row| row.get(0))
            .unwrap_or(Some(0i64))
            .unwrap_or(0);
        usize::try_from(last).unwrap_or(0).min(self.max_rows_of_any_table())
    }

    /// Upper bound of the number of rows in any table: every row takes at least 8 bytes of the
    /// file.
    fn max_rows_of_any_table(&self) -> usize {
        usize::try_from(self.file_bytes / 8).unwrap_or(usize::MAX)
    }

    /// Returns the connection after resetting the number of steps that the next query may take,
    /// which grows with the file size.
    fn connection_with_reset_step_limit(&self) -> &Connection {
        self.remaining_query_steps
            .store(max_query_steps_for_file_size(self.file_bytes), Ordering::Relaxed);
        &self.connection
    }

    /// The latest end time in nanoseconds over all rows of the given tables.
    pub fn latest_end_ns_of_sqlite_tables(&self, tables: &[&str]) -> Option<i64> {
        let last = |table: &&str| -> Option<i64> {
            let sql = format!(
                "SELECT max(\"end\") FROM \"{table}\" WHERE \"end\" < {MAX_PLAUSIBLE_TIME_NS}"
            );
            self.connection_with_reset_step_limit()
                .query_row(&sql, [], |row| row.get(0))
                .ok()
                .flatten()
        };
        tables.iter().filter(|table| self.has_sqlite_column(table, "end")).filter_map(last).max()
    }

    /// Decodes the rows of a table directly from the pages of the SQLite file; returns `false` if
    /// decoding stopped early. After `false`, SQLite must read the rows after row id `last`.
    fn visit_rows_from_pages(
        &self,
        table: &SqliteTableSchema,
        columns: &[&str],
        last: &mut Option<i64>,
        each: &mut impl FnMut(&DecodedSqliteRow<'_>),
    ) -> rusqlite::Result<bool> {
        // The open transaction holds the file lock that prevents other programs from writing.
        let _reading = self.connection.unchecked_transaction()?;
        self.connection.query_row("SELECT count(*) FROM sqlite_master", [], |_| Ok(()))?;
        let Ok(mut pages) = SqlitePageReader::open_sqlite_pages(&self.sqlite_path) else {
            return Ok(false);
        };
        let columns: Vec<Option<usize>> =
            columns.iter().map(|column| table.position_by_column.get(*column).copied()).collect();
        Ok(pages.visit_rows_of_table_at_root_page(table.root_page, &columns, last, each).is_ok())
    }

    /// Passes every row of a table to `each`, in stored order or by start time; returns the reason
    /// if reading ends early.
    pub fn visit_sqlite_rows_in_order(
        &self,
        order: ExportRowOrder,
        table: &str,
        columns: &[&str],
        mut each: impl FnMut(&ExportRow<'_, '_>),
    ) -> Result<Option<String>, TraceError> {
        let Some(known) = self.tables.get(table) else { return Ok(None) };
        let select: Vec<String> = columns
            .iter()
            .map(|column| {
                if self.has_sqlite_column(table, column) {
                    format!("\"{column}\"")
                } else {
                    "NULL".to_owned()
                }
            })
            .collect();
        let by_start =
            order == ExportRowOrder::ByStartTime && self.has_sqlite_column(table, "start");
        let order = if by_start { " ORDER BY start" } else { "" };
        let select = select.join(", ");
        let mut read = 0usize;
        let outcome = (|| {
            let mut last = None;
            if !by_start && known.decodable_from_pages {
                let mut each = |row: &DecodedSqliteRow<'_>| {
                    each(&ExportRow(ExportRowCells::Page(row)));
                    read += 1;
                };
                if self.visit_rows_from_pages(known, columns, &mut last, &mut each)? {
                    return Ok(None);
                }
            }
            let behind = last.map_or(String::new(), |last| format!(" WHERE rowid > {last}"));
            let sql = format!("SELECT {select} FROM \"{table}\"{behind}{order}");
            let mut query = self.connection_with_reset_step_limit().prepare(&sql)?;
            let mut rows = query.query([])?;
            while let Some(row) = rows.next()? {
                // In a damaged file, several pages may point to the same page, so rows could repeat
                // endlessly.
                if read == self.max_rows_of_any_table() {
                    return Ok(Some(format!("{table} after {read} rows: more than fit the file")));
                }
                each(&ExportRow(ExportRowCells::Sqlite(row)));
                read += 1;
            }
            Ok(None)
        })();
        match outcome {
            Ok(problem) => Ok(problem),
            Err(error) if is_database_locked(&error) => Err(TraceError::broken_trace_file_error(
                &self.sqlite_path,
                explain_sqlite_error(&error),
            )),
            Err(error) => {
                Ok(Some(format!("{table} after {read} rows: {}", explain_sqlite_error(&error))))
            }
        }
    }
}

/// Number of steps that a query may take over a file of `size` bytes.
const fn max_query_steps_for_file_size(size: u64) -> u64 {
    BASE_STEPS_PER_SQLITE_QUERY + size / SQLITE_FILE_BYTES_PER_STEP
}

/// Takes one of the query's remaining steps; returns `true` if no step was left, which interrupts
/// the query.
fn takes_step_beyond_limit(left: &AtomicU64) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_err()
}

/// Reads column positions and root page of each table from the schema of the SQLite file.
fn read_sqlite_table_schemas(
    connection: &Connection,
) -> rusqlite::Result<HashMap<String, SqliteTableSchema>> {
    let mut tables: HashMap<String, SqliteTableSchema> = HashMap::new();
    let mut query = connection.prepare(
        "SELECT m.name, i.name, i.cid, m.rootpage, i.hidden + i.pk + (i.dflt_value IS NOT NULL) \
         FROM sqlite_master m, pragma_table_xinfo(m.name) i \
         WHERE m.type = 'table' AND m.rootpage > 0",
    )?;
    let mut rows = query.query([])?;
    while let Some(row) = rows.next()? {
        let row = ExportRow(ExportRowCells::Sqlite(row));
        let number =
            |column| row.cell_as_integer(column).and_then(|number| u32::try_from(number).ok());
        let root = number(3).unwrap_or(0);
        let new = SqliteTableSchema {
            root_page: root,
            decodable_from_pages: true,
            ..SqliteTableSchema::default()
        };
        let table = tables.entry(row.cell_as_displayed_text(0)).or_insert(new);
        table.position_by_column.insert(
            row.cell_as_displayed_text(1),
            number(2).map_or(usize::MAX, |place| place as usize),
        );
        table.decodable_from_pages &= row.cell_as_integer(4) == Some(0);
    }
    Ok(tables)
}

fn is_database_locked(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

/// Describes an SQLite error, with advice if the file is locked, damaged or not a database.
fn explain_sqlite_error(error: &rusqlite::Error) -> String {
    match error.sqlite_error_code() {
        Some(ErrorCode::NotADatabase) => "it is not an SQLite database".to_owned(),
        Some(ErrorCode::DatabaseCorrupt) => {
            "the database is truncated or damaged; export it again".to_owned()
        }
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            "it is locked: another program is writing it".to_owned()
        }
        Some(ErrorCode::OperationInterrupted) => {
            "reading it takes longer than its size explains: its schema computes, or it is damaged"
                .to_owned()
        }
        _ => error.to_string(),
    }
}
