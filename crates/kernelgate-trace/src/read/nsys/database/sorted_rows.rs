//! Sorts the rows of a table of any length by start time: sorts runs of limited size, writes them
//! to temporary files, and merges the files. Only one run of rows is in memory at a time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};

use rusqlite::types::ValueRef;

use super::table_row::{ExportRow, ExportRowCells, SORTED_CELL_BYTES};

/// Size in bytes of a sorted run of rows, before the run is written to disk.
pub(super) const SORTED_RUN_BYTES: usize = 1 << 26;
/// Size in bytes of the read buffer of each sorted run on disk.
const SORTED_RUN_READ_BUFFER_BYTES: usize = 1 << 16;

/// Sorts rows by start time; writes sorted runs to temporary files if the rows exceed one run.
#[derive(Default)]
pub(super) struct ExternalRowSorter {
    columns: usize,
    /// Number of bytes after which the rows in memory are sorted and written to a temporary file.
    max_bytes_in_memory: usize,
    /// Start time, byte offset in `row_bytes` and byte length of each row in memory.
    start_offset_length_of_rows: Vec<(i64, usize, u32)>,
    row_bytes: Vec<u8>,
    sorted_runs: Vec<File>,
}

impl ExternalRowSorter {
    /// Creates an empty sorter for rows of `columns` columns, with runs of `run` bytes.
    pub fn with_column_count_and_run_bytes(columns: usize, run: usize) -> Self {
        Self { columns, max_bytes_in_memory: run, ..Self::default() }
    }

    /// Adds a row with its start time, and writes a sorted run to disk if the run is full.
    pub fn push_row(&mut self, start: i64, row: &ExportRow<'_, '_>) -> io::Result<()> {
        let first = self.row_bytes.len();
        self.row_bytes.resize(first + self.columns * SORTED_CELL_BYTES, 0);
        for column in 0..self.columns {
            let (kind, value) = match row.cell_as_sqlite_value(column) {
                ValueRef::Null => continue,
                ValueRef::Integer(value) => (1, value.to_le_bytes()),
                ValueRef::Real(value) => (2, value.to_le_bytes()),
                ValueRef::Text(text) | ValueRef::Blob(text) => {
                    let place = byte_length_as_u32(self.row_bytes.len() - first)?.to_le_bytes();
                    let size = byte_length_as_u32(text.len())?.to_le_bytes();
                    self.row_bytes.extend_from_slice(text);
                    let mut both = [0; 8];
                    both[..4].copy_from_slice(&place);
                    both[4..].copy_from_slice(&size);
                    (3, both)
                }
            };
            let cell =
                &mut self.row_bytes[first + column * SORTED_CELL_BYTES..][..SORTED_CELL_BYTES];
            cell[0] = kind;
            cell[1..].copy_from_slice(&value);
        }
        self.start_offset_length_of_rows.push((
            start,
            first,
            byte_length_as_u32(self.row_bytes.len() - first)?,
        ));
        if self.row_bytes.len() >= self.max_bytes_in_memory {
            self.write_sorted_run()
        } else {
            Ok(())
        }
    }

    /// Sorts the rows in memory by start time and writes them to a temporary file as one run.
    fn write_sorted_run(&mut self) -> io::Result<()> {
        self.start_offset_length_of_rows.sort_by_key(|row| row.0);
        let mut file = BufWriter::new(tempfile::tempfile()?);
        for &(start, first, size) in &self.start_offset_length_of_rows {
            file.write_all(&start.to_le_bytes())?;
            file.write_all(&size.to_le_bytes())?;
            file.write_all(&self.row_bytes[first..][..size as usize])?;
        }
        let mut file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.rewind()?;
        self.sorted_runs.push(file);
        self.start_offset_length_of_rows.clear();
        self.row_bytes.clear();
        Ok(())
    }

    /// Passes all rows to `each` by ascending start time; rows with equal start times keep their
    /// order of addition.
    pub fn merge_runs_and_visit_rows(
        mut self,
        mut each: impl FnMut(&ExportRow<'_, '_>),
    ) -> io::Result<()> {
        if self.sorted_runs.is_empty() {
            self.start_offset_length_of_rows.sort_by_key(|row| row.0);
            for &(_, first, size) in &self.start_offset_length_of_rows {
                each(&ExportRow(ExportRowCells::SortedRowBytes(
                    &self.row_bytes[first..][..size as usize],
                )));
            }
            return Ok(());
        }
        self.write_sorted_run()?;
        self.row_bytes = Vec::new();
        let mut runs: Vec<SortedRunOnDisk> =
            self.sorted_runs.into_iter().map(SortedRunOnDisk::from_run_file).collect();
        let mut order = BinaryHeap::new();
        for (number, run) in runs.iter_mut().enumerate() {
            order.extend(run.read_next_row_and_start()?.map(|start| Reverse((start, number))));
        }
        while let Some(Reverse((_, number))) = order.pop() {
            let run = &mut runs[number];
            each(&ExportRow(ExportRowCells::SortedRowBytes(&run.last_row_bytes)));
            order.extend(run.read_next_row_and_start()?.map(|start| Reverse((start, number))));
        }
        Ok(())
    }
}

fn byte_length_as_u32(bytes: usize) -> io::Result<u32> {
    u32::try_from(bytes).map_err(|_| io::Error::other("a row has more than 4 GB"))
}

/// A sorted run of rows that is read from its temporary file.
struct SortedRunOnDisk {
    file: BufReader<File>,
    /// Bytes of the row that was read last.
    last_row_bytes: Vec<u8>,
}

impl SortedRunOnDisk {
    fn from_run_file(file: File) -> Self {
        Self {
            file: BufReader::with_capacity(SORTED_RUN_READ_BUFFER_BYTES, file),
            last_row_bytes: Vec::new(),
        }
    }

    /// Reads the next row of the run, and returns its start time; `None` at the end of the run.
    fn read_next_row_and_start(&mut self) -> io::Result<Option<i64>> {
        let mut head = [0; 12];
        match self.file.read_exact(&mut head) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            outcome => outcome?,
        }
        let [a, b, c, d, e, f, g, h, size @ ..] = head;
        self.last_row_bytes.resize(u32::from_le_bytes(size) as usize, 0);
        self.file.read_exact(&mut self.last_row_bytes)?;
        Ok(Some(i64::from_le_bytes([a, b, c, d, e, f, g, h])))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::table_row::{DecodedParquetColumn, DecodedParquetRows};
    use super::*;

    #[test]
    fn rows_from_several_sorted_runs_merge_in_order() {
        let starts: Vec<i64> = (0..500).map(|row| row * 7919 % 251).collect();
        let rows = DecodedParquetRows {
            row_count: starts.len(),
            columns: vec![
                DecodedParquetColumn::Integers(
                    (0..500).map(|row| (row % 3 != 0).then_some(row)).collect(),
                ),
                DecodedParquetColumn::Texts(
                    starts.iter().map(|s| Some(s.to_string().as_str().into())).collect(),
                ),
                DecodedParquetColumn::Reals(vec![Some(0.5); 500]),
            ],
        };
        let order = |run: usize| {
            let mut sorter = ExternalRowSorter::with_column_count_and_run_bytes(3, run);
            for (row, start) in starts.iter().enumerate() {
                sorter.push_row(*start, &ExportRow(ExportRowCells::Parquet(&rows, row))).unwrap();
            }
            let mut read = Vec::new();
            let each = |row: &ExportRow<'_, '_>| {
                assert_eq!((row.cell_as_float(2), row.cell_as_integer(3)), (Some(0.5), None));
                read.push((row.cell_as_displayed_text(1), row.cell_as_integer(0)));
            };
            sorter.merge_runs_and_visit_rows(each).unwrap();
            read
        };
        let whole = order(SORTED_RUN_BYTES);
        let numbers: Vec<i64> = whole.iter().map(|(text, _)| text.parse().unwrap()).collect();
        assert!(numbers.is_sorted() && numbers.len() == 500);
        assert_eq!(order(1000), whole, "of one start rows come as they were added");
    }
}
