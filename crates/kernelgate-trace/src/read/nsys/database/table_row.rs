//! Rows of a table, whichever format they come from.

#[cfg(feature = "parquet")]
use parquet::data_type::ByteArray;
use rusqlite::types::ValueRef;

use super::sqlite_pages::SqlitePageRow;

/// The order in which rows are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// Rows are read in their stored order.
    Stored,
    /// Rows are sorted by start time, on disk if they are many.
    Start,
}

/// A row of a table, from any kind of export.
pub(crate) struct Row<'a, 'b>(pub(super) RowCells<'a, 'b>);

/// The cells of a row, by the kind of export.
pub(super) enum RowCells<'a, 'b> {
    Sqlite(&'a rusqlite::Row<'b>),
    Page(&'a SqlitePageRow<'b>),
    #[cfg(feature = "parquet")]
    Parquet(&'a Rows, usize),
    #[cfg(feature = "parquet")]
    Sorted(&'a [u8]),
}

impl Row<'_, '_> {
    #[inline]
    pub(super) fn cell_in_row(&self, column: usize) -> ValueRef<'_> {
        match self.0 {
            RowCells::Sqlite(row) => row.get_ref(column).unwrap_or(ValueRef::Null),
            RowCells::Page(row) => row.cell(column),
            #[cfg(feature = "parquet")]
            RowCells::Parquet(rows, row) => rows.cell(row, column),
            #[cfg(feature = "parquet")]
            RowCells::Sorted(row) => sorted_cell(row, column),
        }
    }

    /// Value of an integer cell; numbers that were stored as text count too.
    #[inline]
    pub fn integer_cell(&self, column: usize) -> Option<i64> {
        // Most cells by far are integers of a page.
        if let RowCells::Page(row) = self.0
            && let Some(value) = row.integer_cell(column)
        {
            return Some(value);
        }
        match self.cell_in_row(column) {
            ValueRef::Integer(value) => Some(value),
            #[allow(clippy::cast_possible_truncation)]
            ValueRef::Real(value) => Some(value as i64),
            ValueRef::Text(text) => std::str::from_utf8(text).ok()?.trim().parse().ok(),
            ValueRef::Null | ValueRef::Blob(_) => None,
        }
    }

    /// A cell with a fractional number.
    pub fn real_cell(&self, column: usize) -> Option<f64> {
        match self.cell_in_row(column) {
            #[allow(clippy::cast_precision_loss)]
            ValueRef::Integer(value) => Some(value as f64),
            ValueRef::Real(value) => Some(value),
            _ => None,
        }
    }

    /// A cell with a text, which need not be valid UTF-8.
    #[inline]
    pub fn text_cell(&self, column: usize) -> Option<&[u8]> {
        match self.cell_in_row(column) {
            ValueRef::Text(text) | ValueRef::Blob(text) => Some(text),
            _ => None,
        }
    }

    /// Returns a number or a text as text.
    pub fn display(&self, column: usize) -> String {
        match (self.text_cell(column), self.integer_cell(column)) {
            (Some(text), _) => String::from_utf8_lossy(text).into_owned(),
            (None, Some(value)) => value.to_string(),
            (None, None) => String::new(),
        }
    }
}

/// Bytes of a cell of a sorted row: its kind and a number, or the place of a text behind the cells.
#[cfg(feature = "parquet")]
pub(super) const CELL: usize = 9;

#[cfg(feature = "parquet")]
fn sorted_cell(row: &[u8], column: usize) -> ValueRef<'_> {
    let Some([kind, value @ ..]) = row.get(column * CELL..).and_then(<[u8]>::first_chunk::<CELL>)
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

/// A batch of rows, a column a vector.
#[cfg(feature = "parquet")]
pub(super) struct Rows {
    pub count: usize,
    pub columns: Vec<Column>,
}

/// A column of a batch of rows.
#[cfg(feature = "parquet")]
pub(super) enum Column {
    /// The table lacks the column, or has it with an unexpected type.
    Missing,
    Integers(Vec<Option<i64>>),
    Reals(Vec<Option<f64>>),
    Texts(Vec<Option<ByteArray>>),
}

#[cfg(feature = "parquet")]
impl Rows {
    pub fn cell(&self, row: usize, column: usize) -> ValueRef<'_> {
        match &self.columns[column] {
            Column::Missing => ValueRef::Null,
            Column::Integers(values) => values[row].map_or(ValueRef::Null, ValueRef::Integer),
            Column::Reals(values) => values[row].map_or(ValueRef::Null, ValueRef::Real),
            Column::Texts(values) => {
                values[row].as_ref().map_or(ValueRef::Null, |text| ValueRef::Text(text.data()))
            }
        }
    }
}
