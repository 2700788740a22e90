//! Reads Nsight Systems exports that are folders with one parquet file per table (`nsys export
//! --type parquetdir`). Row groups of a parquet file are decoded one after the other in batches, so
//! memory does not grow with the length of the table.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::DataType;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};

use super::sorted_rows::{ExternalRowSorter, SORTED_RUN_BYTES};
use super::table_row::{
    DecodedParquetColumn, DecodedParquetRows, ExportRow, ExportRowCells, ExportRowOrder,
};
use crate::error::TraceError;
use crate::model::quality::is_plausible_time_ns;

/// Number of rows that are decoded per batch.
const ROWS_PER_DECODED_BATCH: usize = 8192;

/// A folder of an Nsight Systems export with one parquet file per table.
pub(crate) struct ParquetExportFolder {
    tables: BTreeMap<String, ParquetTableFile>,
}

struct ParquetTableFile {
    parquet_path: PathBuf,
    /// Names of the table's columns, in column order.
    column_names: Vec<String>,
    rows: usize,
    /// Why the table's parquet file could not be opened.
    open_error: Option<String>,
}

impl ParquetExportFolder {
    /// Opens every parquet file of a folder. A file that cannot be opened becomes a table without
    /// rows, which reports the reason when it is read.
    pub fn open_parquet_folder(path: &Path) -> Result<ParquetExportFolder, TraceError> {
        let mut tables = BTreeMap::new();
        for entry in std::fs::read_dir(path).map_err(TraceError::unreadable_file_error(path))? {
            let file = entry.map_err(TraceError::unreadable_file_error(path))?.path();
            let is_table = file.extension().is_some_and(|extension| extension == "parquet");
            let name = file.file_stem().and_then(|name| name.to_str());
            if let (true, Some(name)) = (is_table, name) {
                tables.insert(name.to_owned(), ParquetTableFile::open_parquet_table(&file));
            }
        }
        Ok(Self { tables })
    }

    pub fn parquet_table_names(&self) -> impl Iterator<Item = &str> {
        self.tables.keys().map(String::as_str)
    }

    pub fn has_parquet_table(&self, table: &str) -> bool {
        self.tables.contains_key(table)
    }

    pub fn has_parquet_column(&self, table: &str, column: &str) -> bool {
        self.tables
            .get(table)
            .is_some_and(|table| table.column_names.iter().any(|name| name == column))
    }

    pub fn parquet_row_count(&self, table: &str) -> usize {
        self.tables.get(table).map_or(0, |table| table.rows)
    }

    pub fn latest_end_ns_of_parquet_tables(&self, tables: &[&str]) -> Option<i64> {
        let mut last = None;
        for table in tables {
            self.visit_rows_or_reason(ExportRowOrder::AsStored, table, &["end"], |row| {
                last = last.max(row.cell_as_integer(0).filter(is_plausible_time_ns));
            });
        }
        last
    }

    /// Passes every row of a table to `each`; returns the reason if reading ends early.
    pub fn visit_rows_or_reason(
        &self,
        order: ExportRowOrder,
        table: &str,
        columns: &[&str],
        mut each: impl FnMut(&ExportRow<'_, '_>),
    ) -> Option<String> {
        let file = self.tables.get(table)?;
        if let Some(reason) = &file.open_error {
            return Some(format!("{table}: {reason}"));
        }
        let sorted =
            order == ExportRowOrder::ByStartTime && self.has_parquet_column(table, "start");
        let outcome = if sorted {
            file.visit_rows_sorted_by_start(columns, &mut each)
        } else {
            file.visit_row_batches_as_stored(columns, |rows| {
                (0..rows.row_count)
                    .for_each(|row| each(&ExportRow(ExportRowCells::Parquet(rows, row))));
                Ok(())
            })
        };
        let (read, error) = outcome;
        error.map(|error| format!("{table} after {read} rows: {error}"))
    }
}

impl ParquetTableFile {
    fn open_parquet_table(path: &Path) -> ParquetTableFile {
        let mut table = Self {
            parquet_path: path.to_owned(),
            column_names: Vec::new(),
            rows: 0,
            open_error: None,
        };
        match open_parquet_file(path) {
            Ok(reader) => {
                let metadata = reader.metadata();
                let schema = metadata.file_metadata().schema_descr();
                let columns = schema.columns().iter();
                table.column_names = columns.map(|column| column.name().to_owned()).collect();
                let rows = metadata.file_metadata().num_rows();
                table.rows = usize::try_from(rows).unwrap_or(0);
            }
            Err(error) => table.open_error = Some(error.to_string()),
        }
        table
    }

    /// Passes batches of rows to `each` in stored order; returns the number of rows read, and the
    /// error that ended reading.
    fn visit_row_batches_as_stored(
        &self,
        columns: &[&str],
        mut each: impl FnMut(&DecodedParquetRows) -> Result<(), ParquetError>,
    ) -> (usize, Option<ParquetError>) {
        let mut read = 0;
        let outcome = (|| {
            let reader = open_parquet_file(&self.parquet_path)?;
            for group in 0..reader.num_row_groups() {
                let group = reader.get_row_group(group)?;
                let mut group = ParquetRowGroupReader::open_row_group(self, &*group, columns)?;
                while group.remaining_rows > 0 {
                    let rows = group.decode_next_row_batch()?;
                    read += rows.row_count;
                    each(&rows)?;
                }
            }
            Ok(())
        })();
        (read, outcome.err())
    }

    /// Passes the rows of a table to `each` in order of their start time.
    fn visit_rows_sorted_by_start(
        &self,
        columns: &[&str],
        each: &mut impl FnMut(&ExportRow<'_, '_>),
    ) -> (usize, Option<ParquetError>) {
        let with_start: Vec<&str> = columns.iter().copied().chain(["start"]).collect();
        let external = |error: std::io::Error| ParquetError::External(Box::new(error));
        let mut sorter =
            ExternalRowSorter::with_column_count_and_run_bytes(columns.len(), SORTED_RUN_BYTES);
        let (read, error) = self.visit_row_batches_as_stored(&with_start, |rows| {
            (0..rows.row_count).try_for_each(|row| {
                let row = ExportRow(ExportRowCells::Parquet(rows, row));
                let start = row.cell_as_integer(columns.len()).unwrap_or(i64::MIN);
                sorter.push_row(start, &row).map_err(external)
            })
        });
        let merged = sorter.merge_runs_and_visit_rows(each).map_err(external);
        (read, error.or(merged.err()))
    }
}

fn open_parquet_file(path: &Path) -> Result<SerializedFileReader<File>, ParquetError> {
    let file = File::open(path).map_err(|error| ParquetError::External(Box::new(error)))?;
    SerializedFileReader::new(file)
}

/// A parquet row group that is being decoded batch by batch.
struct ParquetRowGroupReader {
    /// For each requested column, its reader and whether values may be NULL; `None` if the table
    /// lacks the column.
    reader_and_nullability_by_column: Vec<Option<(ColumnReader, bool)>>,
    remaining_rows: usize,
}

impl ParquetRowGroupReader {
    fn open_row_group(
        table: &ParquetTableFile,
        group: &dyn RowGroupReader,
        names: &[&str],
    ) -> Result<ParquetRowGroupReader, ParquetError> {
        let schema = group.metadata().schema_descr();
        let mut columns = Vec::new();
        for name in names {
            let number = table.column_names.iter().position(|column| column == name);
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
        Ok(Self { reader_and_nullability_by_column: columns, remaining_rows: rows })
    }

    fn decode_next_row_batch(&mut self) -> Result<DecodedParquetRows, ParquetError> {
        let count = self.remaining_rows.min(ROWS_PER_DECODED_BATCH);
        let mut columns = Vec::with_capacity(self.reader_and_nullability_by_column.len());
        for column in &mut self.reader_and_nullability_by_column {
            columns.push(match column {
                Some((reader, optional)) => decode_column_values(reader, *optional, count)?,
                None => DecodedParquetColumn::MissingOrUnsupported,
            });
        }
        self.remaining_rows -= count;
        Ok(DecodedParquetRows { row_count: count, columns })
    }
}

fn decode_column_values(
    reader: &mut ColumnReader,
    optional: bool,
    count: usize,
) -> Result<DecodedParquetColumn, ParquetError> {
    Ok(match reader {
        ColumnReader::BoolColumnReader(reader) => DecodedParquetColumn::Integers(
            decode_values_and_nulls(reader, optional, count, i64::from)?,
        ),
        ColumnReader::Int32ColumnReader(reader) => DecodedParquetColumn::Integers(
            decode_values_and_nulls(reader, optional, count, i64::from)?,
        ),
        ColumnReader::Int64ColumnReader(reader) => DecodedParquetColumn::Integers(
            decode_values_and_nulls(reader, optional, count, |value| value)?,
        ),
        ColumnReader::FloatColumnReader(reader) => DecodedParquetColumn::Reals(
            decode_values_and_nulls(reader, optional, count, f64::from)?,
        ),
        ColumnReader::DoubleColumnReader(reader) => DecodedParquetColumn::Reals(
            decode_values_and_nulls(reader, optional, count, |value| value)?,
        ),
        ColumnReader::ByteArrayColumnReader(reader) => DecodedParquetColumn::Texts(
            decode_values_and_nulls(reader, optional, count, |value| value)?,
        ),
        _ => DecodedParquetColumn::MissingOrUnsupported,
    })
}

/// Decodes exactly `count` values of a column; a NULL value becomes `None`.
fn decode_values_and_nulls<T: DataType, V>(
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
