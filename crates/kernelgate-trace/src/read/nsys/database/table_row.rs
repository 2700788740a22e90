//! Rows of an export's table, from SQLite, from decoded pages or from parquet files.

#[cfg(feature = "parquet")]
use parquet::data_type::ByteArray;
use rusqlite::types::ValueRef;

use super::sqlite_pages::DecodedSqliteRow;

/// The order in which the rows of an export's table are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExportRowOrder {
    /// Rows are read in their stored order.
    AsStored,
    /// Rows are read in ascending order of their start time; many rows are sorted on disk.
    ByStartTime,
}

/// A row of a table in an Nsight Systems export.
pub(crate) struct ExportRow<'a, 'b>(pub(super) ExportRowCells<'a, 'b>);

/// The cells of an export's row, by the source that the row was read from.
pub(super) enum ExportRowCells<'a, 'b> {
    Sqlite(&'a rusqlite::Row<'b>),
    Page(&'a DecodedSqliteRow<'b>),
    #[cfg(feature = "parquet")]
    Parquet(&'a DecodedParquetRows, usize),
    #[cfg(feature = "parquet")]
    SortedRowBytes(&'a [u8]),
}

impl ExportRow<'_, '_> {
    #[inline]
    pub(super) fn cell_as_sqlite_value(&self, column: usize) -> ValueRef<'_> {
        match self.0 {
            ExportRowCells::Sqlite(row) => row.get_ref(column).unwrap_or(ValueRef::Null),
            ExportRowCells::Page(row) => row.value_of_requested_column(column),
            #[cfg(feature = "parquet")]
            ExportRowCells::Parquet(rows, row) => rows.cell(row, column),
            #[cfg(feature = "parquet")]
            ExportRowCells::SortedRowBytes(row) => sorted_cell(row, column),
        }
    }

    /// Returns a cell as an integer; a number that is stored as text is converted.
    #[inline]
    pub fn cell_as_integer(&self, column: usize) -> Option<i64> {
        // Fast path: most cells are integers that were decoded from a page.
        if let ExportRowCells::Page(row) = self.0
            && let Some(value) = row.integer_of_requested_column(column)
        {
            return Some(value);
        }
        match self.cell_as_sqlite_value(column) {
            ValueRef::Integer(value) => Some(value),
            #[allow(clippy::cast_possible_truncation)]
            ValueRef::Real(value) => Some(value as i64),
            ValueRef::Text(text) => std::str::from_utf8(text).ok()?.trim().parse().ok(),
            ValueRef::Null | ValueRef::Blob(_) => None,
        }
    }

    /// Returns a cell as a floating-point number; an integer is converted.
    pub fn cell_as_float(&self, column: usize) -> Option<f64> {
        match self.cell_as_sqlite_value(column) {
            #[allow(clippy::cast_precision_loss)]
            ValueRef::Integer(value) => Some(value as f64),
            ValueRef::Real(value) => Some(value),
            _ => None,
        }
    }

    /// Returns the bytes of a text or blob cell, which may be invalid UTF-8.
    #[inline]
    pub fn cell_as_text_bytes(&self, column: usize) -> Option<&[u8]> {
        match self.cell_as_sqlite_value(column) {
            ValueRef::Text(text) | ValueRef::Blob(text) => Some(text),
            _ => None,
        }
    }

    /// Returns a text or number cell as text; empty for other cells.
    pub fn cell_as_displayed_text(&self, column: usize) -> String {
        match (self.cell_as_text_bytes(column), self.cell_as_integer(column)) {
            (Some(text), _) => String::from_utf8_lossy(text).into_owned(),
            (None, Some(value)) => value.to_string(),
            (None, None) => String::new(),
        }
    }
}

/// Size in bytes of a cell in a sorted row: one byte of type, then eight bytes with a number or
/// with offset and length of a text.
#[cfg(feature = "parquet")]
pub(super) const SORTED_CELL_BYTES: usize = 9;

#[cfg(feature = "parquet")]
fn sorted_cell(row: &[u8], column: usize) -> ValueRef<'_> {
    let Some([kind, value @ ..]) =
        row.get(column * SORTED_CELL_BYTES..).and_then(<[u8]>::first_chunk::<SORTED_CELL_BYTES>)
    else {
        return ValueRef::Null;
    };
    match kind {
        1 => ValueRef::Integer(i64::from_le_bytes(*value)),
        2 => ValueRef::Real(f64::from_le_bytes(*value)),
        3 => {
            let [a, b, c, d, size @ ..] = *value;
            let first = u32::from_le_bytes([a, b, c, d]) as usize;
            let text = row.get(first..first + u32::from_le_bytes(size) as usize);
            text.map_or(ValueRef::Null, ValueRef::Text)
        }
        _ => ValueRef::Null,
    }
}

/// A decoded batch of rows of a parquet table, one vector per column.
#[cfg(feature = "parquet")]
pub(super) struct DecodedParquetRows {
    pub row_count: usize,
    pub columns: Vec<DecodedParquetColumn>,
}

/// The values of one column in a decoded batch of a parquet table.
#[cfg(feature = "parquet")]
pub(super) enum DecodedParquetColumn {
    /// The parquet table lacks the column, or the column has an unsupported type.
    MissingOrUnsupported,
    Integers(Vec<Option<i64>>),
    Reals(Vec<Option<f64>>),
    Texts(Vec<Option<ByteArray>>),
}

#[cfg(feature = "parquet")]
impl DecodedParquetRows {
    pub fn cell(&self, row: usize, column: usize) -> ValueRef<'_> {
        match &self.columns[column] {
            DecodedParquetColumn::MissingOrUnsupported => ValueRef::Null,
            DecodedParquetColumn::Integers(values) => {
                values[row].map_or(ValueRef::Null, ValueRef::Integer)
            }
            DecodedParquetColumn::Reals(values) => {
                values[row].map_or(ValueRef::Null, ValueRef::Real)
            }
            DecodedParquetColumn::Texts(values) => {
                values[row].as_ref().map_or(ValueRef::Null, |text| ValueRef::Text(text.data()))
            }
        }
    }
}
