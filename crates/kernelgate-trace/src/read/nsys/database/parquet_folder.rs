//! Exports as a folder of parquet files, one a table (`nsys export --type parquetdir`). Row groups
//! are read one after the other in batches, so that a table of any length takes the memory of a few
//! pages.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::DataType;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};

use super::sorted_rows::{RUN, Sorter};
use super::table_row::{Column, Row, RowCells, RowOrder, Rows};
use crate::error::TraceError;
use crate::model::quality::is_plausible_time;

/// Number of rows that are decoded at a time.
const DECODED_ROWS: usize = 8192;

/// A folder of tables.
pub(crate) struct Folder {
    tables: BTreeMap<String, ParquetTable>,
}

struct ParquetTable {
    path: PathBuf,
    /// Names of the columns by their number.
    columns: Vec<String>,
    rows: usize,
    /// Reason why the table cannot be read to its end.
    broken: Option<String>,
}

impl Folder {
    /// Opens every parquet file of a folder. A file that cannot be read is a table without rows,
    /// which says so when it is read.
    pub fn open(path: &Path) -> Result<Folder, TraceError> {
        let mut tables = BTreeMap::new();
        for entry in std::fs::read_dir(path).map_err(TraceError::io(path))? {
            let file = entry.map_err(TraceError::io(path))?.path();
            let is_table = file.extension().is_some_and(|extension| extension == "parquet");
            let name = file.file_stem().and_then(|name| name.to_str());
            if let (true, Some(name)) = (is_table, name) {
                tables.insert(name.to_owned(), ParquetTable::open(&file));
            }
        }
        Ok(Self { tables })
    }

    pub fn tables(&self) -> impl Iterator<Item = &str> {
        self.tables.keys().map(String::as_str)
    }

    pub fn has(&self, table: &str) -> bool {
        self.tables.contains_key(table)
    }

    pub fn has_column(&self, table: &str, column: &str) -> bool {
        self.tables.get(table).is_some_and(|table| table.columns.iter().any(|name| name == column))
    }

    pub fn rows(&self, table: &str) -> usize {
        self.tables.get(table).map_or(0, |table| table.rows)
    }

    pub fn last_end(&self, tables: &[&str]) -> Option<i64> {
        let mut last = None;
        for table in tables {
            self.scan_in(RowOrder::Stored, table, &["end"], |row| {
                last = last.max(row.integer_cell(0).filter(is_plausible_time));
            });
        }
        last
    }

    /// Visits every row of a table; returns the reason if it ends early.
    pub fn scan_in(
        &self,
        order: RowOrder,
        table: &str,
        columns: &[&str],
        mut each: impl FnMut(&Row<'_, '_>),
    ) -> Option<String> {
        let file = self.tables.get(table)?;
        if let Some(reason) = &file.broken {
            return Some(format!("{table}: {reason}"));
        }
        let sorted = order == RowOrder::Start && self.has_column(table, "start");
        let outcome = if sorted {
            file.sorted(columns, &mut each)
        } else {
            file.stored(columns, |rows| {
                (0..rows.count).for_each(|row| each(&Row(RowCells::Parquet(rows, row))));
                Ok(())
            })
        };
        let (read, error) = outcome;
        error.map(|error| format!("{table} after {read} rows: {error}"))
    }
}

impl ParquetTable {
    fn open(path: &Path) -> ParquetTable {
        let mut table = Self { path: path.to_owned(), columns: Vec::new(), rows: 0, broken: None };
        match parquet_reader(path) {
            Ok(reader) => {
                let metadata = reader.metadata();
                let schema = metadata.file_metadata().schema_descr();
                let columns = schema.columns().iter();
                table.columns = columns.map(|column| column.name().to_owned()).collect();
                let rows = metadata.file_metadata().num_rows();
                table.rows = usize::try_from(rows).unwrap_or(0);
            }
            Err(error) => table.broken = Some(error.to_string()),
        }
        table
    }

    /// Passes on batches of rows as they are stored; returns how many rows were read, and why not
    /// more.
    fn stored(
        &self,
        columns: &[&str],
        mut each: impl FnMut(&Rows) -> Result<(), ParquetError>,
    ) -> (usize, Option<ParquetError>) {
        let mut read = 0;
        let outcome = (|| {
            let reader = parquet_reader(&self.path)?;
            for group in 0..reader.num_row_groups() {
                let group = reader.get_row_group(group)?;
                let mut group = OpenRowGroup::open(self, &*group, columns)?;
                while group.left > 0 {
                    let rows = group.next()?;
                    read += rows.count;
                    each(&rows)?;
                }
            }
            Ok(())
        })();
        (read, outcome.err())
    }

    /// Visits the rows of a table in the order of their start.
    fn sorted(
        &self,
        columns: &[&str],
        each: &mut impl FnMut(&Row<'_, '_>),
    ) -> (usize, Option<ParquetError>) {
        let with_start: Vec<&str> = columns.iter().copied().chain(["start"]).collect();
        let external = |error: std::io::Error| ParquetError::External(Box::new(error));
        let mut sorter = Sorter::new(columns.len(), RUN);
        let (read, error) = self.stored(&with_start, |rows| {
            (0..rows.count).try_for_each(|row| {
                let row = Row(RowCells::Parquet(rows, row));
                let start = row.integer_cell(columns.len()).unwrap_or(i64::MIN);
                sorter.push(start, &row).map_err(external)
            })
        });
        let merged = sorter.finish(each).map_err(external);
        (read, error.or(merged.err()))
    }
}

fn parquet_reader(path: &Path) -> Result<SerializedFileReader<File>, ParquetError> {
    let file = File::open(path).map_err(|error| ParquetError::External(Box::new(error)))?;
    SerializedFileReader::new(file)
}

/// A row group while it is read.
struct OpenRowGroup {
    /// For each requested column, its reader and whether its values may be missing.
    columns: Vec<Option<(ColumnReader, bool)>>,
    left: usize,
}

impl OpenRowGroup {
    fn open(
        table: &ParquetTable,
        group: &dyn RowGroupReader,
        names: &[&str],
    ) -> Result<OpenRowGroup, ParquetError> {
        let schema = group.metadata().schema_descr();
        let mut columns = Vec::new();
        for name in names {
            let number = table.columns.iter().position(|column| column == name);
            let flat = number.filter(|&number| schema.column(number).max_rep_level() == 0);
            columns.push(match flat {
                Some(number) => {
                    let optional = schema.column(number).max_def_level() > 0;
                    Some((group.get_column_reader(number)?, optional))
                }
                None => None,
            });
        }
        let rows = usize::try_from(group.metadata().num_rows()).unwrap_or(0);
        Ok(Self { columns, left: rows })
    }

    fn next(&mut self) -> Result<Rows, ParquetError> {
        let count = self.left.min(DECODED_ROWS);
        let mut columns = Vec::with_capacity(self.columns.len());
        for column in &mut self.columns {
            columns.push(match column {
                Some((reader, optional)) => read_values(reader, *optional, count)?,
                None => Column::Missing,
            });
        }
        self.left -= count;
        Ok(Rows { count, columns })
    }
}

fn read_values(
    reader: &mut ColumnReader,
    optional: bool,
    count: usize,
) -> Result<Column, ParquetError> {
    Ok(match reader {
        ColumnReader::BoolColumnReader(reader) => {
            Column::Integers(read(reader, optional, count, i64::from)?)
        }
        ColumnReader::Int32ColumnReader(reader) => {
            Column::Integers(read(reader, optional, count, i64::from)?)
        }
        ColumnReader::Int64ColumnReader(reader) => {
            Column::Integers(read(reader, optional, count, |value| value)?)
        }
        ColumnReader::FloatColumnReader(reader) => {
            Column::Reals(read(reader, optional, count, f64::from)?)
        }
        ColumnReader::DoubleColumnReader(reader) => {
            Column::Reals(read(reader, optional, count, |value| value)?)
        }
        ColumnReader::ByteArrayColumnReader(reader) => {
            Column::Texts(read(reader, optional, count, |value| value)?)
        }
        _ => Column::Missing,
    })
}

/// Reads exactly `count` values of a column, which may be missing.
fn read<T: DataType, V>(
    reader: &mut ColumnReaderImpl<T>,
    optional: bool,
    count: usize,
    convert: impl Fn(T::T) -> V,
) -> Result<Vec<Option<V>>, ParquetError> {
    let (mut values, mut levels) = (Vec::with_capacity(count), Vec::with_capacity(count));
    let mut records = 0;
    while records < count {
        let levels = optional.then_some(&mut levels);
        let (read, ..) = reader.read_records(count - records, levels, None, &mut values)?;
        if read == 0 {
            let reason = format!("a column has {records} of {count} values");
            return Err(ParquetError::General(reason));
        }
        records += read;
    }
    let mut values = values.into_iter();
    if !optional {
        return Ok(values.map(|value| Some(convert(value))).collect());
    }
    let present = levels.iter().copied().max().unwrap_or(0).max(1);
    let value = |level: &i16| (*level == present).then(|| values.next()).flatten().map(&convert);
    Ok(levels.iter().map(value).collect())
}
