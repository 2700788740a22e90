//! Rows of a table of any length by their start: sorted in runs, which temporary files keep, and
//! merged. Memory holds one run.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};

use rusqlite::types::ValueRef;

use super::table_row::{CELL, Row, RowCells};

/// Bytes of a run.
pub(super) const RUN: usize = 1 << 26;
/// Bytes of a run that are read at once.
const RUN_BUFFER_BYTES: usize = 1 << 16;

/// Sorts rows by start time, on disk if they are many.
#[derive(Default)]
pub(super) struct Sorter {
    columns: usize,
    /// Number of bytes after which a sorted run is written to disk.
    run: usize,
    /// Start, place in `bytes` and length of each row of the run.
    rows: Vec<(i64, usize, u32)>,
    bytes: Vec<u8>,
    runs: Vec<File>,
}

impl Sorter {
    /// Creates an empty sorter for rows with `columns` columns, in runs of `run` bytes.
    pub fn new(columns: usize, run: usize) -> Self {
        Self { columns, run, ..Self::default() }
    }

    /// Adds a row, given its start time.
    pub fn push(&mut self, start: i64, row: &Row<'_, '_>) -> io::Result<()> {
        let first = self.bytes.len();
        self.bytes.resize(first + self.columns * CELL, 0);
        for column in 0..self.columns {
            let (kind, value) = match row.cell_in_row(column) {
                ValueRef::Null => continue,
                ValueRef::Integer(value) => (1, value.to_le_bytes()),
                ValueRef::Real(value) => (2, value.to_le_bytes()),
                ValueRef::Text(text) | ValueRef::Blob(text) => {
                    let place = length_word(self.bytes.len() - first)?.to_le_bytes();
                    let size = length_word(text.len())?.to_le_bytes();
                    self.bytes.extend_from_slice(text);
                    let mut both = [0; 8];
                    both[..4].copy_from_slice(&place);
                    both[4..].copy_from_slice(&size);
                    (3, both)
                }
            };
            let cell = &mut self.bytes[first + column * CELL..][..CELL];
            cell[0] = kind;
            cell[1..].copy_from_slice(&value);
        }
        self.rows.push((start, first, length_word(self.bytes.len() - first)?));
        if self.bytes.len() >= self.run { self.end_run() } else { Ok(()) }
    }

    /// Sorts the run and writes it to a file.
    fn end_run(&mut self) -> io::Result<()> {
        self.rows.sort_by_key(|row| row.0);
        let mut file = BufWriter::new(tempfile::tempfile()?);
        for &(start, first, size) in &self.rows {
            file.write_all(&start.to_le_bytes())?;
            file.write_all(&size.to_le_bytes())?;
            file.write_all(&self.bytes[first..][..size as usize])?;
        }
        let mut file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.rewind()?;
        self.runs.push(file);
        self.rows.clear();
        self.bytes.clear();
        Ok(())
    }

    /// Visits the rows by start time; rows with equal starts come in the order in which they were
    /// added.
    pub fn finish(mut self, mut each: impl FnMut(&Row<'_, '_>)) -> io::Result<()> {
        if self.runs.is_empty() {
            self.rows.sort_by_key(|row| row.0);
            for &(_, first, size) in &self.rows {
                each(&Row(RowCells::Sorted(&self.bytes[first..][..size as usize])));
            }
            return Ok(());
        }
        self.end_run()?;
        self.bytes = Vec::new();
        let mut runs: Vec<Run> = self.runs.into_iter().map(Run::new).collect();
        let mut order = BinaryHeap::new();
        for (number, run) in runs.iter_mut().enumerate() {
            order.extend(run.next()?.map(|start| Reverse((start, number))));
        }
        while let Some(Reverse((_, number))) = order.pop() {
            let run = &mut runs[number];
            each(&Row(RowCells::Sorted(&run.row)));
            order.extend(run.next()?.map(|start| Reverse((start, number))));
        }
        Ok(())
    }
}

fn length_word(bytes: usize) -> io::Result<u32> {
    u32::try_from(bytes).map_err(|_| io::Error::other("a row has more than 4 GB"))
}

/// A sorted run of rows that is read from disk.
struct Run {
    file: BufReader<File>,
    /// Bytes of the row that comes next.
    row: Vec<u8>,
}

impl Run {
    fn new(file: File) -> Self {
        Self { file: BufReader::with_capacity(RUN_BUFFER_BYTES, file), row: Vec::new() }
    }

    /// Reads the next row in order, and returns its start time.
    fn next(&mut self) -> io::Result<Option<i64>> {
        let mut head = [0; 12];
        match self.file.read_exact(&mut head) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            outcome => outcome?,
        }
        let [a, b, c, d, e, f, g, h, size @ ..] = head;
        self.row.resize(u32::from_le_bytes(size) as usize, 0);
        self.file.read_exact(&mut self.row)?;
        Ok(Some(i64::from_le_bytes([a, b, c, d, e, f, g, h])))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::table_row::{Column, Rows};
    use super::*;

    #[test]
    fn sorted_runs_on_disk_are_merged_in_order() {
        let starts: Vec<i64> = (0..500).map(|row| row * 7919 % 251).collect();
        let rows = Rows {
            count: starts.len(),
            columns: vec![
                Column::Integers((0..500).map(|row| (row % 3 != 0).then_some(row)).collect()),
                Column::Texts(starts.iter().map(|s| Some(s.to_string().as_str().into())).collect()),
                Column::Reals(vec![Some(0.5); 500]),
            ],
        };
        let order = |run: usize| {
            let mut sorter = Sorter::new(3, run);
            for (row, start) in starts.iter().enumerate() {
                sorter.push(*start, &Row(RowCells::Parquet(&rows, row))).unwrap();
            }
            let mut read = Vec::new();
            let each = |row: &Row<'_, '_>| {
                assert_eq!((row.real_cell(2), row.integer_cell(3)), (Some(0.5), None));
                read.push((row.display(1), row.integer_cell(0)));
            };
            sorter.finish(each).unwrap();
            read
        };
        let whole = order(RUN);
        let numbers: Vec<i64> = whole.iter().map(|(text, _)| text.parse().unwrap()).collect();
        assert!(numbers.is_sorted() && numbers.len() == 500);
        assert_eq!(order(1000), whole, "of one start rows come as they were added");
    }
}
