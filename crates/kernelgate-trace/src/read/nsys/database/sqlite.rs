//! Exports as an SQLite file.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hashbrown::{HashMap, HashSet};
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags};

use super::row::{Cells, Order, Row};
use crate::error::TraceError;
use crate::model::quality::NO_TIME_NS;

/// How long to wait for a program that writes the file.
const PATIENCE: Duration = Duration::from_millis(500);

/// An export, opened for reading.
pub(crate) struct Sqlite {
    path: PathBuf,
    connection: Connection,
    /// Columns by table.
    tables: HashMap<String, HashSet<String>>,
}

impl Sqlite {
    /// Opens an export.
    ///
    /// # Errors
    /// The file is no SQLite database, is locked, or its schema cannot be read.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let failed = |error: rusqlite::Error| TraceError::broken(path, explain(&error));
        let connection = Connection::open_with_flags(path, flags).map_err(failed)?;
        connection.busy_timeout(PATIENCE).map_err(failed)?;
        // A view may compute without end, and a trigger or a function in the schema may act.
        for (option, on) in [
            (DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false),
            (DbConfig::SQLITE_DBCONFIG_ENABLE_VIEW, false),
            (DbConfig::SQLITE_DBCONFIG_ENABLE_TRIGGER, false),
        ] {
            connection.set_db_config(option, on).map_err(failed)?;
        }
        let tables = match tables(&connection) {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseCorrupt) => {
                // SQLite takes a file that is shorter than its header says only so; nothing is
                // written through this connection.
                connection.pragma_update(None, "writable_schema", true).map_err(failed)?;
                tables(&connection)
            }
            tables => tables,
        };
        Ok(Self { path: path.to_owned(), tables: tables.map_err(failed)?, connection })
    }

    /// The names of all tables.
    pub fn tables(&self) -> impl Iterator<Item = &str> {
        self.tables.keys().map(String::as_str)
    }

    pub fn has(&self, table: &str) -> bool {
        self.tables.contains_key(table)
    }

    pub fn has_column(&self, table: &str, column: &str) -> bool {
        self.tables.get(table).is_some_and(|columns| columns.contains(column))
    }

    /// No fewer rows than a table has, without counting them; 0 where that is not known.
    pub fn rows_at_most(&self, table: &str) -> usize {
        let size = std::fs::metadata(&self.path).map_or(0, |file| file.len());
        let last = self
            .connection
            .query_row(&format!("SELECT max(rowid) FROM \"{table}\""), [], |row| row.get(0))
            .unwrap_or(Some(0i64))
            .unwrap_or(0);
        // No row takes fewer than 8 bytes of the file, whatever its number.
        usize::try_from(last).unwrap_or(0).min(usize::try_from(size / 8).unwrap_or(0))
    }

    /// The last end of any row of some tables.
    pub fn last_end(&self, tables: &[&str]) -> Option<i64> {
        let last = |table: &&str| -> Option<i64> {
            let sql = format!("SELECT max(\"end\") FROM \"{table}\" WHERE \"end\" < {NO_TIME_NS}");
            self.connection.query_row(&sql, [], |row| row.get(0)).ok().flatten()
        };
        tables.iter().filter(|table| self.has_column(table, "end")).filter_map(last).max()
    }

    /// Every row of a table in an order.
    pub fn scan_in(
        &self,
        order: Order,
        table: &str,
        columns: &[&str],
        mut each: impl FnMut(&Row<'_, '_>),
    ) -> Result<Option<String>, TraceError> {
        if !self.has(table) {
            return Ok(None);
        }
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
        let by_start = order == Order::Start && self.has_column(table, "start");
        let order = if by_start { " ORDER BY start" } else { "" };
        let sql = format!("SELECT {} FROM \"{table}\"{order}", select.join(", "));
        let mut read = 0usize;
        let outcome = (|| {
            let mut query = self.connection.prepare(&sql)?;
            let mut rows = query.query([])?;
            while let Some(row) = rows.next()? {
                each(&Row(Cells::Sqlite(row)));
                read += 1;
            }
            Ok(())
        })();
        match outcome {
            Ok(()) => Ok(None),
            Err(error) if is_locked(&error) => Err(TraceError::broken(&self.path, explain(&error))),
            Err(error) => Ok(Some(format!("{table} after {read} rows: {}", explain(&error)))),
        }
    }
}

/// The columns of each table.
fn tables(connection: &Connection) -> rusqlite::Result<HashMap<String, HashSet<String>>> {
    let mut tables: HashMap<String, HashSet<String>> = HashMap::new();
    let mut query = connection.prepare(
        "SELECT m.name, i.name FROM sqlite_master m, pragma_table_info(m.name) i \
         WHERE m.type = 'table' AND m.rootpage > 0",
    )?;
    let mut rows = query.query([])?;
    while let Some(row) = rows.next()? {
        let row = Row(Cells::Sqlite(row));
        tables.entry(row.display(0)).or_default().insert(row.display(1));
    }
    Ok(tables)
}

fn is_locked(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

/// SQLite's error in words that say what to do.
fn explain(error: &rusqlite::Error) -> String {
    match error.sqlite_error_code() {
        Some(ErrorCode::NotADatabase) => "it is not an SQLite database".to_owned(),
        Some(ErrorCode::DatabaseCorrupt) => {
            "the database is truncated or damaged; export it again".to_owned()
        }
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            "it is locked: another program is writing it".to_owned()
        }
        _ => error.to_string(),
    }
}
