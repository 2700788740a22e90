//! Reads Nsight Systems exports in the form of an SQLite file.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hashbrown::HashMap;
use rusqlite::config::DbConfig;
use rusqlite::limits::Limit;
use rusqlite::{Connection, ErrorCode, OpenFlags};

use super::sqlite_pages::{SqlitePageRow, SqlitePages};
use super::table_row::{Row, RowCells, RowOrder};
use crate::error::TraceError;
use crate::model::quality::TIME_LIMIT_NS;

/// How long to wait for a program that writes the file.
const SQLITE_WRITER_TIMEOUT: Duration = Duration::from_millis(500);

/// Longest value, bytes: an expression in the schema may make one of any length.
const MAX_SQLITE_VALUE_BYTES: i32 = 1 << 28;
/// Instructions of SQLite's virtual machine between two checks of the limit.
const INSTRUCTIONS_PER_CHECK: u32 = 1 << 16;
/// Most steps of a query, beside one for each [`FILE_BYTES_PER_STEP`] of the file.
const MIN_QUERY_STEPS: u64 = 1 << 12;
/// Bytes of a file that a step takes at least to read through.
const FILE_BYTES_PER_STEP: u64 = 1 << 14;

/// An SQLite export that is open for reading.
pub(crate) struct SqliteDatabase {
    path: PathBuf,
    connection: Connection,
    /// Steps that the query in progress may still take.
    steps: Arc<AtomicU64>,
    /// Bytes of the file.
    size: u64,
    tables: HashMap<String, SqliteTable>,
}

/// A table of the database schema.
#[derive(Default)]
struct SqliteTable {
    /// Position of each column in a row.
    columns: HashMap<String, usize>,
    /// Number of the table's first page.
    root: u32,
    /// Whether the table's rows hold every column as it is read: no key that stands for the row's
    /// id, and no value for rows that were written before the column.
    plain: bool,
}

impl SqliteDatabase {
    /// Opens an export.
    ///
    /// # Errors
    /// The file is locked, not an SQLite database, or its schema cannot be read.
    pub fn open_sqlite(path: &Path) -> Result<SqliteDatabase, TraceError> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let failed =
            |error: rusqlite::Error| TraceError::broken_file(path, explain_sqlite_error(&error));
        let mut connection = Connection::open_with_flags(path, flags).map_err(failed)?;
        connection.busy_timeout(SQLITE_WRITER_TIMEOUT).map_err(failed)?;
        // A view may compute without end, and a trigger or a function in the schema may act.
        for (option, on) in [
            (DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false),
            (DbConfig::SQLITE_DBCONFIG_ENABLE_VIEW, false),
            (DbConfig::SQLITE_DBCONFIG_ENABLE_TRIGGER, false),
        ] {
            connection.set_db_config(option, on).map_err(failed)?;
        }
        connection.set_limit(Limit::SQLITE_LIMIT_LENGTH, MAX_SQLITE_VALUE_BYTES).map_err(failed)?;
        let size = std::fs::metadata(path).map_or(0, |file| file.len());
        let steps = Arc::new(AtomicU64::new(max_steps_for_size(size)));
        let left = Arc::clone(&steps);
        let step = INSTRUCTIONS_PER_CHECK.cast_signed();
        connection.progress_handler(step, Some(move || is_time_over(&left))).map_err(failed)?;
        let tables = match table_names(&connection) {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseCorrupt) => {
                // SQLite opens a file that is shorter than its header states only so; nothing is
                // written through this connection.
                connection.pragma_update(None, "writable_schema", true).map_err(failed)?;
                table_names(&connection)
            }
            tables => tables,
        };
        Ok(Self { path: path.to_owned(), tables: tables.map_err(failed)?, connection, steps, size })
    }

    /// Names of all tables of the database.
    pub fn table_names(&self) -> impl Iterator<Item = &str> {
        self.tables.keys().map(String::as_str)
    }

    pub fn has_table(&self, table: &str) -> bool {
        self.tables.contains_key(table)
    }

    pub fn has_column(&self, table: &str, column: &str) -> bool {
        self.tables.get(table).is_some_and(|table| table.columns.contains_key(column))
    }

    /// No fewer rows than a table has, without counting them; 0 where that is not known.
    pub fn rows_at_most(&self, table: &str) -> usize {
        let last = self
            .connection_for_query()
            .query_row(&format!("SELECT max(rowid) FROM \"{table}\""), [], |row| row.get(0))
            .unwrap_or(Some(0i64))
            .unwrap_or(0);
        usize::try_from(last).unwrap_or(0).min(self.max_rows_of_any_table())
    }

    /// Most rows of any table: none takes fewer than 8 bytes of the file.
    fn max_rows_of_any_table(&self) -> usize {
        usize::try_from(self.size / 8).unwrap_or(usize::MAX)
    }

    /// The connection, for a query that takes no longer than the file's size explains.
    fn connection_for_query(&self) -> &Connection {
        self.steps.store(max_steps_for_size(self.size), Ordering::Relaxed);
        &self.connection
    }

    /// The latest end time of all rows of some tables.
    pub fn last_end_in_tables(&self, tables: &[&str]) -> Option<i64> {
        let last = |table: &&str| -> Option<i64> {
            let sql =
                format!("SELECT max(\"end\") FROM \"{table}\" WHERE \"end\" < {TIME_LIMIT_NS}");
            self.connection_for_query().query_row(&sql, [], |row| row.get(0)).ok().flatten()
        };
        tables.iter().filter(|table| self.has_column(table, "end")).filter_map(last).max()
    }

    /// Hands out the rows of a table straight from its pages; `false`: If `each` returns `false`,
    /// SQLite must continue after the last row.
    fn scan_table_pages(
        &self,
        table: &SqliteTable,
        columns: &[&str],
        last: &mut Option<i64>,
        each: &mut impl FnMut(&SqlitePageRow<'_>),
    ) -> rusqlite::Result<bool> {
        // Holds the file lock that keeps other programs from writing.
        let _reading = self.connection.unchecked_transaction()?;
        self.connection.query_row("SELECT count(*) FROM sqlite_master", [], |_| Ok(()))?;
        let Ok(mut pages) = SqlitePages::open_sqlite_pages(&self.path) else { return Ok(false) };
        let columns: Vec<Option<usize>> =
            columns.iter().map(|column| table.columns.get(*column).copied()).collect();
        Ok(pages.visit_rows_below_page(table.root, &columns, last, each).is_ok())
    }

    /// Reads every row of a table, in the requested order.
    pub fn scan_in_order(
        &self,
        order: RowOrder,
        table: &str,
        columns: &[&str],
        mut each: impl FnMut(&Row<'_, '_>),
    ) -> Result<Option<String>, TraceError> {
        let Some(known) = self.tables.get(table) else { return Ok(None) };
        let select: Vec<String> = columns
            .iter()
            .map(|column| {
                if self.has_column(table, column) {
                    format!("\"{column}\"")
                } else {
                    "NULL".to_owned()
                }
            })
            .collect();
        let by_start = order == RowOrder::Start && self.has_column(table, "start");
        let order = if by_start { " ORDER BY start" } else { "" };
        let select = select.join(", ");
        let mut read = 0usize;
        let outcome = (|| {
            let mut last = None;
            if !by_start && known.plain {
                let mut each = |row: &SqlitePageRow<'_>| {
                    each(&Row(RowCells::Page(row)));
                    read += 1;
                };
                if self.scan_table_pages(known, columns, &mut last, &mut each)? {
                    return Ok(None);
                }
            }
            let behind = last.map_or(String::new(), |last| format!(" WHERE rowid > {last}"));
            let sql = format!("SELECT {select} FROM \"{table}\"{behind}{order}");
            let mut query = self.connection_for_query().prepare(&sql)?;
            let mut rows = query.query([])?;
            while let Some(row) = rows.next()? {
                // Pages of a damaged file may lead to others more than once.
                if read == self.max_rows_of_any_table() {
                    return Ok(Some(format!("{table} after {read} rows: more than fit the file")));
                }
                each(&Row(RowCells::Sqlite(row)));
                read += 1;
            }
            Ok(None)
        })();
        match outcome {
            Ok(problem) => Ok(problem),
            Err(error) if is_database_locked(&error) => {
                Err(TraceError::broken_file(&self.path, explain_sqlite_error(&error)))
            }
            Err(error) => {
                Ok(Some(format!("{table} after {read} rows: {}", explain_sqlite_error(&error))))
            }
        }
    }
}

/// Steps that a query over a file of that size may take.
const fn max_steps_for_size(size: u64) -> u64 {
    MIN_QUERY_STEPS + size / FILE_BYTES_PER_STEP
}

/// Counts a step, and returns whether it was the last allowed step.
fn is_time_over(left: &AtomicU64) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_err()
}

/// The tables of a database schema, by name.
fn table_names(connection: &Connection) -> rusqlite::Result<HashMap<String, SqliteTable>> {
    let mut tables: HashMap<String, SqliteTable> = HashMap::new();
    let mut query = connection.prepare(
        "SELECT m.name, i.name, i.cid, m.rootpage, i.hidden + i.pk + (i.dflt_value IS NOT NULL) \
         FROM sqlite_master m, pragma_table_xinfo(m.name) i \
         WHERE m.type = 'table' AND m.rootpage > 0",
    )?;
    let mut rows = query.query([])?;
    while let Some(row) = rows.next()? {
        let row = Row(RowCells::Sqlite(row));
        let number =
            |column| row.integer_cell(column).and_then(|number| u32::try_from(number).ok());
        let root = number(3).unwrap_or(0);
        let new = SqliteTable { root, plain: true, ..SqliteTable::default() };
        let table = tables.entry(row.display(0)).or_insert(new);
        table.columns.insert(row.display(1), number(2).map_or(usize::MAX, |place| place as usize));
        table.plain &= row.integer_cell(4) == Some(0);
    }
    Ok(tables)
}

fn is_database_locked(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

/// Translates an SQLite error into text that states what to do.
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
