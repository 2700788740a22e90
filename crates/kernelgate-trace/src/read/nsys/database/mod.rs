//! The tables of an export, each with the columns that it happens to have: an SQLite file, or a
//! folder of parquet files.

#[cfg(feature = "parquet")]
mod parquet_folder;
#[cfg(feature = "parquet")]
mod sorted_rows;
mod sqlite;
mod sqlite_pages;
mod table_row;

use std::path::Path;

#[cfg(feature = "parquet")]
use parquet_folder::Folder;
use sqlite::SqliteDatabase;
pub(super) use table_row::{Row, RowOrder};

use crate::error::TraceError;

/// An Nsight Systems export that is open for reading.
pub(super) enum NsysDatabase {
    Sqlite(SqliteDatabase),
    #[cfg(feature = "parquet")]
    Parquet(Folder),
}

impl NsysDatabase {
    /// Opens an export.
    ///
    /// # Errors
    /// The file is locked, not an SQLite database, or its schema cannot be read. The folder cannot
    /// be read, or this build cannot read parquet.
    pub fn open_export(path: &Path) -> Result<NsysDatabase, TraceError> {
        if !path.is_dir() {
            return SqliteDatabase::open_sqlite(path).map(Self::Sqlite);
        }
        #[cfg(feature = "parquet")]
        return Folder::open(path).map(Self::Parquet);
        #[cfg(not(feature = "parquet"))]
        Err(TraceError::Unknown {
            path: path.to_owned(),
            reason: "it is a parquet export of Nsight Systems, which this build does not read: \
                     build with `--features parquet`, or export with: nsys export --type sqlite \
                     --output trace.sqlite REPORT.nsys-rep"
                .to_owned(),
        })
    }

    /// Names of all tables of the export.
    pub fn table_names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        match self {
            Self::Sqlite(file) => Box::new(file.table_names()),
            #[cfg(feature = "parquet")]
            Self::Parquet(folder) => Box::new(folder.tables()),
        }
    }

    pub fn has_table(&self, table: &str) -> bool {
        match self {
            Self::Sqlite(file) => file.has_table(table),
            #[cfg(feature = "parquet")]
            Self::Parquet(folder) => folder.has(table),
        }
    }

    pub fn has_column(&self, table: &str, column: &str) -> bool {
        match self {
            Self::Sqlite(file) => file.has_column(table, column),
            #[cfg(feature = "parquet")]
            Self::Parquet(folder) => folder.has_column(table, column),
        }
    }

    /// Returns a number that is at least the table's number of rows, without counting them; 0 if
    /// unknown.
    pub fn rows_at_most(&self, table: &str) -> usize {
        match self {
            Self::Sqlite(file) => file.rows_at_most(table),
            #[cfg(feature = "parquet")]
            Self::Parquet(folder) => folder.rows(table),
        }
    }

    /// The latest end time of all rows of some tables.
    pub fn last_end_ns(&self, tables: &[&str]) -> Option<i64> {
        match self {
            Self::Sqlite(file) => file.last_end_in_tables(tables),
            #[cfg(feature = "parquet")]
            Self::Parquet(folder) => folder.last_end(tables),
        }
    }

    /// Reads every row of a table with these columns in this order; a column that the table lacks
    /// reads as NULL. The result `Ok(Some(reason))` means that the table ends early.
    ///
    /// # Errors
    /// The database is locked.
    pub fn visit_rows(
        &self,
        table: &str,
        columns: &[&str],
        each: impl FnMut(&Row<'_, '_>),
    ) -> Result<Option<String>, TraceError> {
        self.visit_rows_in_order(RowOrder::Stored, table, columns, each)
    }

    /// Reads every row of a table, in the requested order.
    pub fn visit_rows_in_order(
        &self,
        order: RowOrder,
        table: &str,
        columns: &[&str],
        each: impl FnMut(&Row<'_, '_>),
    ) -> Result<Option<String>, TraceError> {
        match self {
            Self::Sqlite(file) => file.scan_in_order(order, table, columns, each),
            #[cfg(feature = "parquet")]
            Self::Parquet(folder) => Ok(folder.scan_in(order, table, columns, each)),
        }
    }
}
