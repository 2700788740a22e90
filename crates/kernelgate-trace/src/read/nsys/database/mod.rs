//! Reads tables of an Nsight Systems export, an SQLite file or a folder of parquet files; missing
//! columns read as NULL.

#[cfg(feature = "parquet")]
mod parquet_folder;
#[cfg(feature = "parquet")]
mod sorted_rows;
mod sqlite;
mod sqlite_pages;
mod table_row;

use std::path::Path;

#[cfg(feature = "parquet")]
use parquet_folder::ParquetExportFolder;
use sqlite::SqliteExportDatabase;
pub(super) use table_row::{ExportRow, ExportRowOrder};

use crate::error::TraceError;

/// An Nsight Systems export, open for reading.
pub(super) enum NsysExportDatabase {
    Sqlite(SqliteExportDatabase),
    #[cfg(feature = "parquet")]
    Parquet(ParquetExportFolder),
}

impl NsysExportDatabase {
    /// Opens an Nsight Systems export.
    ///
    /// # Errors
    /// The file is locked, not an SQLite database, or its schema cannot be read. The folder cannot
    /// be read, or kernelgate was built without the feature `parquet`.
    pub fn open_sqlite_or_parquet_export(path: &Path) -> Result<NsysExportDatabase, TraceError> {
        if !path.is_dir() {
            return SqliteExportDatabase::open_sqlite_export(path).map(Self::Sqlite);
        }
        #[cfg(feature = "parquet")]
        return ParquetExportFolder::open_parquet_folder(path).map(Self::Parquet);
        #[cfg(not(feature = "parquet"))]
        Err(TraceError::UnknownFormat {
            path: path.to_owned(),
            reason: "it is a parquet export of Nsight Systems, which this build does not read: \
                     build with `--features parquet`, or export with: nsys export --type sqlite \
                     --output trace.sqlite REPORT.nsys-rep"
                .to_owned(),
        })
    }

    /// Names of all tables in the export.
    pub fn table_names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        match self {
            Self::Sqlite(file) => Box::new(file.table_names()),
            #[cfg(feature = "parquet")]
            Self::Parquet(folder) => Box::new(folder.parquet_table_names()),
        }
    }

    pub fn has_export_table(&self, table: &str) -> bool {
        match self {
            Self::Sqlite(file) => file.has_sqlite_table(table),
            #[cfg(feature = "parquet")]
            Self::Parquet(folder) => folder.has_parquet_table(table),
        }
    }

    pub fn has_export_column(&self, table: &str, column: &str) -> bool {
        match self {
            Self::Sqlite(file) => file.has_sqlite_column(table, column),
            #[cfg(feature = "parquet")]
            Self::Parquet(folder) => folder.has_parquet_column(table, column),
        }
    }

    /// Returns an upper bound of the table's number of rows without counting rows; 0 if unknown.
    pub fn row_count_upper_bound(&self, table: &str) -> usize {
        match self {
            Self::Sqlite(file) => file.rows_at_most(table),
            #[cfg(feature = "parquet")]
            Self::Parquet(folder) => folder.parquet_row_count(table),
        }
    }

    /// The latest end time in nanoseconds over all rows of the given tables.
    pub fn latest_end_ns_of_tables(&self, tables: &[&str]) -> Option<i64> {
        match self {
            Self::Sqlite(file) => file.latest_end_ns_of_sqlite_tables(tables),
            #[cfg(feature = "parquet")]
            Self::Parquet(folder) => folder.latest_end_ns_of_parquet_tables(tables),
        }
    }

    /// Passes the requested columns of every row of a table to `each`; a column that the table
    /// lacks reads as NULL. `Ok(Some(reason))` means that the end of the table could not be read.
    ///
    /// # Errors
    /// The database is locked.
    pub fn visit_rows(
        &self,
        table: &str,
        columns: &[&str],
        each: impl FnMut(&ExportRow<'_, '_>),
    ) -> Result<Option<String>, TraceError> {
        self.visit_rows_in_order(ExportRowOrder::AsStored, table, columns, each)
    }

    /// Passes the requested columns of every row of a table to `each`, in the requested row order.
    pub fn visit_rows_in_order(
        &self,
        order: ExportRowOrder,
        table: &str,
        columns: &[&str],
        each: impl FnMut(&ExportRow<'_, '_>),
    ) -> Result<Option<String>, TraceError> {
        match self {
            Self::Sqlite(file) => file.visit_sqlite_rows_in_order(order, table, columns, each),
            #[cfg(feature = "parquet")]
            Self::Parquet(folder) => Ok(folder.visit_rows_or_reason(order, table, columns, each)),
        }
    }
}
