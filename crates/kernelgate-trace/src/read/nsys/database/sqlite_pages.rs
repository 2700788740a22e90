//! The rows of an SQLite table straight from its pages: three times as fast as through SQLite,
//! which copies every cell through its virtual machine.
//!
//! The form is <https://www.sqlite.org/fileformat2.html>. SQLite holds the file's lock while pages
//! are read. A page that is not as expected ends the scan, and SQLite goes on behind the last row.
//! Indices, tables without row ids and write-ahead logs are not supported.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use rusqlite::types::ValueRef;

/// Deepest tree: each level has two pages for each of the level above.
const MAX_TREE_DEPTH: usize = 32;
/// Longest payload of a row that is read, bytes.
const MAX_ROW_PAYLOAD: u64 = 1 << 28;

/// Pages of a file.
pub(super) struct SqlitePages {
    file: File,
    size: usize,
    /// Number of bytes of a page without the reserved bytes at its end.
    usable: usize,
    /// Pages of the file.
    pages: u64,
    /// Pages that a scan may still visit: a tree has each page of the file at most once.
    left: u64,
}

/// The file's pages are not as SQLite's format requires.
#[derive(Debug)]
pub(super) struct UnexpectedFormat;

type PageResult<T> = Result<T, UnexpectedFormat>;

/// A row of an SQLite page, with the requested columns.
pub(super) struct SqlitePageRow<'a> {
    payload: &'a [u8],
    /// For each column, the serial type of its value and the offset of the value.
    cells: &'a [(u64, usize)],
}

impl SqlitePageRow<'_> {
    /// The value of a requested column.
    #[inline]
    pub fn cell(&self, column: usize) -> ValueRef<'_> {
        let (kind, at) = self.cells[column];
        match kind {
            1..=6 | 8 | 9 => self.integer_cell(column).map_or(ValueRef::Null, ValueRef::Integer),
            7 => {
                let bytes = self.payload.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
                bytes.map_or(ValueRef::Null, |bytes| ValueRef::Real(f64::from_be_bytes(bytes)))
            }
            12.. => {
                let bytes = self.payload.get(at..at + serial_type_length(kind)).unwrap_or_default();
                if kind % 2 == 0 { ValueRef::Blob(bytes) } else { ValueRef::Text(bytes) }
            }
            _ => ValueRef::Null,
        }
    }

    /// The value of a column, if it is an integer.
    #[inline]
    pub fn integer_cell(&self, column: usize) -> Option<i64> {
        let (kind, at) = self.cells[column];
        let bytes = match kind {
            1..=6 => self.payload.get(at..at + serial_type_length(kind))?,
            8 => return Some(0),
            9 => return Some(1),
            _ => return None,
        };
        let negative = bytes[0] & 0x80 != 0;
        let start = if negative { u64::MAX } else { 0 };
        let value = bytes.iter().fold(start, |value, &byte| value << 8 | u64::from(byte));
        Some(value.cast_signed())
    }
}

/// Bytes of a value by its serial type.
#[inline]
fn serial_type_length(kind: u64) -> usize {
    match kind {
        0..=4 => kind as usize,
        5 => 6,
        6 | 7 => 8,
        8..=11 => 0,
        _ => usize::try_from((kind - 12) / 2).unwrap_or(usize::MAX),
    }
}

/// Parses a number of up to nine bytes, and returns it with the remaining bytes.
#[inline]
fn parse_varint(bytes: &[u8]) -> PageResult<(u64, &[u8])> {
    let mut value = 0;
    for (index, &byte) in bytes.iter().take(9).enumerate() {
        if index == 8 {
            return Ok((value << 8 | u64::from(byte), &bytes[9..]));
        }
        value = value << 7 | u64::from(byte & 0x7F);
        if byte & 0x80 == 0 {
            return Ok((value, &bytes[index + 1..]));
        }
    }
    Err(UnexpectedFormat)
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> PageResult<[u8; N]> {
    bytes.get(at..at + N).and_then(|bytes| bytes.try_into().ok()).ok_or(UnexpectedFormat)
}

impl SqlitePages {
    /// The pages of a file with UTF-8 texts and without a write-ahead log.
    pub fn open_sqlite_pages(path: &Path) -> PageResult<SqlitePages> {
        let mut file = File::open(path).map_err(|_| UnexpectedFormat)?;
        let mut header = [0; 100];
        file.read_exact(&mut header).map_err(|_| UnexpectedFormat)?;
        let is_sqlite =
            header.starts_with(b"SQLite format 3\0") && header[18] == 1 && header[19] == 1;
        let size = match u16::from_be_bytes(bytes_at(&header, 16)?) {
            1 => 1 << 16,
            size => usize::from(size),
        };
        let utf8 = u32::from_be_bytes(bytes_at(&header, 56)?) == 1;
        let usable = size.saturating_sub(usize::from(header[20]));
        if !is_sqlite || !utf8 || !size.is_power_of_two() || size < 512 || usable < 480 {
            return Err(UnexpectedFormat);
        }
        let pages = file.metadata().map_err(|_| UnexpectedFormat)?.len() / size as u64;
        Ok(Self { file, size, usable, pages, left: pages })
    }

    fn read_page(&mut self, number: u32, into: &mut Vec<u8>) -> PageResult<()> {
        let at = u64::from(number.checked_sub(1).ok_or(UnexpectedFormat)?) * self.size as u64;
        into.resize(self.size, 0);
        self.file.seek(SeekFrom::Start(at)).map_err(|_| UnexpectedFormat)?;
        self.file.read_exact(into).map_err(|_| UnexpectedFormat)
    }

    /// Passes on the rows of the table that begins at a page, in the order of their ids, with the
    /// columns of these numbers. `last` is the id of the last row that was handed out.
    pub fn visit_rows_below_page(
        &mut self,
        root: u32,
        columns: &[Option<usize>],
        last: &mut Option<i64>,
        each: &mut impl FnMut(&SqlitePageRow<'_>),
    ) -> PageResult<()> {
        self.left = self.pages;
        let mut pages = vec![Vec::new(); MAX_TREE_DEPTH];
        let mut row = PageRowReader::new(columns);
        self.walk_page_tree(root, &mut pages, &mut |pages, id, payload| {
            // Ids rise; a tree that has a loop would not end.
            if last.is_some_and(|last| id <= last) {
                return Err(UnexpectedFormat);
            }
            row.read_record(pages, payload, each)?;
            *last = Some(id);
            Ok(())
        })
    }

    fn walk_page_tree(
        &mut self,
        root: u32,
        pages: &mut [Vec<u8>],
        each: &mut impl FnMut(&mut Self, i64, RowPayload<'_>) -> PageResult<()>,
    ) -> PageResult<()> {
        self.left = self.left.checked_sub(1).ok_or(UnexpectedFormat)?;
        let (page, deeper) = pages.split_first_mut().ok_or(UnexpectedFormat)?;
        self.read_page(root, page)?;
        let at = if root == 1 { 100 } else { 0 };
        let cells = usize::from(u16::from_be_bytes(bytes_at(page, at + 3)?));
        let cell = |index: usize, header: usize| -> PageResult<&[u8]> {
            let at = u16::from_be_bytes(bytes_at(page, at + header + 2 * index)?);
            page.get(usize::from(at)..).ok_or(UnexpectedFormat)
        };
        match page.get(at) {
            Some(0x0D) => {
                for index in 0..cells {
                    let (bytes, rest) = parse_varint(cell(index, 8)?)?;
                    let (id, local) = parse_varint(rest)?;
                    each(self, id.cast_signed(), RowPayload { bytes, local })?;
                }
                Ok(())
            }
            Some(0x05) => {
                for index in 0..cells {
                    let child = u32::from_be_bytes(bytes_at(cell(index, 12)?, 0)?);
                    self.walk_page_tree(child, deeper, each)?;
                }
                self.walk_page_tree(u32::from_be_bytes(bytes_at(page, at + 8)?), deeper, each)
            }
            _ => Err(UnexpectedFormat),
        }
    }
}

/// The payload of a row: its length, and its beginning on the page.
#[derive(Clone, Copy)]
struct RowPayload<'a> {
    bytes: u64,
    local: &'a [u8],
}

/// Decodes rows.
struct PageRowReader {
    /// For each column of the table, up to the last one that is read, its position in the result.
    wanted: Vec<Option<usize>>,
    /// Columns that are requested repeatedly, with the index of their first request.
    again: Vec<(usize, usize)>,
    cells: Vec<(u64, usize)>,
    /// Payloads that do not fit on a page.
    whole: Vec<u8>,
    page: Vec<u8>,
}

impl PageRowReader {
    fn new(columns: &[Option<usize>]) -> Self {
        let count = columns.iter().flatten().max().map_or(0, |last| last + 1);
        let (mut wanted, mut again) = (vec![None; count], Vec::new());
        for (column, stored) in columns.iter().enumerate() {
            let Some(stored) = stored else { continue };
            match wanted[*stored] {
                Some(first) => again.push((column, first)),
                None => wanted[*stored] = Some(column),
            }
        }
        let cells = vec![(0, 0); columns.len()];
        Self { wanted, again, cells, whole: Vec::new(), page: Vec::new() }
    }

    fn read_record(
        &mut self,
        pages: &mut SqlitePages,
        payload: RowPayload<'_>,
        each: &mut impl FnMut(&SqlitePageRow<'_>),
    ) -> PageResult<()> {
        let bytes = usize::try_from(payload.bytes).map_err(|_| UnexpectedFormat)?;
        let most = pages.usable - 35;
        if bytes <= most {
            let local = payload.local.get(..bytes).ok_or(UnexpectedFormat)?;
            self.find_column_offsets(local)?;
            each(&SqlitePageRow { payload: local, cells: &self.cells });
            return Ok(());
        }
        self.read_overflow_pages(pages, payload, bytes)?;
        let whole = std::mem::take(&mut self.whole);
        self.find_column_offsets(&whole)?;
        each(&SqlitePageRow { payload: &whole, cells: &self.cells });
        self.whole = whole;
        Ok(())
    }

    /// Assembles a payload that continues on overflow pages.
    fn read_overflow_pages(
        &mut self,
        pages: &mut SqlitePages,
        of: RowPayload<'_>,
        bytes: usize,
    ) -> PageResult<()> {
        if of.bytes > MAX_ROW_PAYLOAD {
            return Err(UnexpectedFormat);
        }
        let least = (pages.usable - 12) * 32 / 255 - 23;
        let kept = least + (bytes - least) % (pages.usable - 4);
        let kept = if kept <= pages.usable - 35 { kept } else { least };
        self.whole.clear();
        self.whole.extend(of.local.get(..kept).ok_or(UnexpectedFormat)?);
        let mut next = u32::from_be_bytes(bytes_at(of.local, kept)?);
        while self.whole.len() < bytes {
            pages.read_page(next, &mut self.page)?;
            let part = (bytes - self.whole.len()).min(pages.usable - 4);
            self.whole.extend(&self.page[4..4 + part]);
            next = u32::from_be_bytes(bytes_at(&self.page, 0)?);
        }
        Ok(())
    }

    /// Finds the position of each column in the payload.
    #[inline]
    fn find_column_offsets(&mut self, payload: &[u8]) -> PageResult<()> {
        let (header, _) = parse_varint(payload)?;
        let header = usize::try_from(header).map_err(|_| UnexpectedFormat)?;
        let (_, mut kinds) = parse_varint(payload.get(..header).ok_or(UnexpectedFormat)?)?;
        let mut at = header;
        for column in &self.wanted {
            // A row that was written before a column was added ends early.
            let kind = match kinds {
                [] => 0,
                [kind, rest @ ..] if *kind < 0x80 => {
                    kinds = rest;
                    u64::from(*kind)
                }
                _ => {
                    let (kind, rest) = parse_varint(kinds)?;
                    kinds = rest;
                    kind
                }
            };
            if let Some(column) = column {
                self.cells[*column] = (kind, at);
            }
            at = at.checked_add(serial_type_length(kind)).ok_or(UnexpectedFormat)?;
        }
        for &(column, first) in &self.again {
            self.cells[column] = self.cells[first];
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table with values of every length, rows that overflow, and more than one level of pages.
    fn write_example_database(path: &Path) -> rusqlite::Connection {
        let connection = rusqlite::Connection::open(path).expect("it opens");
        connection
            .execute_batch("CREATE TABLE t (a INTEGER, b TEXT, c REAL, d BLOB); BEGIN")
            .expect("sql");
        let mut insert = connection.prepare("INSERT INTO t VALUES (?1, ?2, ?3, ?4)").expect("sql");
        for row in 0..3000i64 {
            let value = [0, 1, -1, 127, -128, 40_000, -9_000_000, 1 << 40, i64::MIN, i64::MAX]
                [usize::try_from(row % 10).expect("small")];
            let text = "text ".repeat(usize::try_from(row % 7 * row % 900).expect("small"));
            let blob = (row % 3 == 0).then(|| vec![7u8; 20]);
            insert
                .execute(rusqlite::params![value, text, 0.5 * row as f64 + 0.25, blob])
                .expect("it is inserted");
        }
        drop(insert);
        connection.execute_batch("COMMIT").expect("sql");
        connection
    }

    #[test]
    fn pages_read_here_contain_the_rows_that_sqlite_reads() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.sqlite");
        let connection = write_example_database(&path);
        let root = connection
            .query_row("SELECT rootpage FROM sqlite_master WHERE name = 't'", [], |row| row.get(0))
            .expect("a page");
        let mut found = Vec::new();
        let mut pages = SqlitePages::open_sqlite_pages(&path).expect("a database");
        let mut last = None;
        // Columns d, a, one that is missing, b, c, and a again.
        let columns = [Some(3), Some(0), None, Some(1), Some(2), Some(0)];
        let scanned = pages.visit_rows_below_page(root, &columns, &mut last, &mut |row| {
            found.push((0..6).map(|column| format!("{:?}", row.cell(column))).collect::<Vec<_>>());
        });
        assert!(scanned.is_ok());
        assert_eq!(last, Some(3000));
        let mut query = connection.prepare("SELECT d, a, NULL, b, c, a FROM t").expect("sql");
        let mut rows = query.query([]).expect("rows");
        for row in &found {
            let expected = rows.next().expect("a row").expect("a row");
            let expected: Vec<String> = (0..6)
                .map(|column| format!("{:?}", expected.get_ref(column).expect("a cell")))
                .collect();
            assert_eq!(*row, expected);
        }
        assert_eq!(found.len(), 3000);
    }

    #[test]
    fn a_truncated_database_file_is_read_up_to_the_last_whole_row() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.sqlite");
        drop(write_example_database(&path));
        let bytes = std::fs::read(&path).expect("it is read");
        std::fs::write(&path, &bytes[..bytes.len() / 2]).expect("it is written");
        let mut pages = SqlitePages::open_sqlite_pages(&path).expect("a database");
        let (mut last, mut rows) = (None, 0);
        let scanned = pages.visit_rows_below_page(2, &[Some(0)], &mut last, &mut |_| rows += 1);
        assert!(scanned.is_err() && last == Some(rows) && rows < 3000, "{last:?} {rows}");
    }
}
