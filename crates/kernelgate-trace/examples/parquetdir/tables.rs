//! Converts the tables of an SQLite trace export to a folder of parquet files, one file for each
//! table.

use std::error::Error;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use rusqlite::Connection;
use rusqlite::types::ValueRef;

/// Values of one column in a row group, and for each row 1 if it has a value and 0 if not.
enum ParquetColumnValues {
    IntegersWithPresenceFlags(Vec<i64>, Vec<i16>),
    DoublesWithPresenceFlags(Vec<f64>, Vec<i16>),
    ByteArraysWithPresenceFlags(Vec<ByteArray>, Vec<i16>),
}

impl ParquetColumnValues {
    /// Returns an empty parquet column for the SQL type of a table's column.
    fn empty_column_of_sql_type(sql: &str) -> ParquetColumnValues {
        match sql {
            "TEXT" | "BLOB" => Self::ByteArraysWithPresenceFlags(Vec::new(), Vec::new()),
            "REAL" => Self::DoublesWithPresenceFlags(Vec::new(), Vec::new()),
            _ => Self::IntegersWithPresenceFlags(Vec::new(), Vec::new()),
        }
    }

    fn parquet_schema_type(&self) -> &'static str {
        match self {
            Self::IntegersWithPresenceFlags(..) => "INT64",
            Self::DoublesWithPresenceFlags(..) => "DOUBLE",
            Self::ByteArraysWithPresenceFlags(..) => "BYTE_ARRAY",
        }
    }

    /// Adds the SQLite value of one row; a value of another type than the column's becomes a
    /// missing value.
    #[allow(clippy::cast_precision_loss)]
    fn push_sqlite_value(&mut self, value: ValueRef<'_>) {
        match self {
            Self::IntegersWithPresenceFlags(values, levels) => {
                let value = if let ValueRef::Integer(value) = value { Some(value) } else { None };
                add_value_and_definition_level(values, levels, value);
            }
            Self::DoublesWithPresenceFlags(values, levels) => {
                let value = match value {
                    ValueRef::Real(value) => Some(value),
                    ValueRef::Integer(value) => Some(value as f64),
                    _ => None,
                };
                add_value_and_definition_level(values, levels, value);
            }
            Self::ByteArraysWithPresenceFlags(values, levels) => {
                let value = match value {
                    ValueRef::Text(text) | ValueRef::Blob(text) => Some(text.to_vec().into()),
                    ValueRef::Integer(value) => Some(value.to_string().into_bytes().into()),
                    _ => None,
                };
                add_value_and_definition_level(values, levels, value);
            }
        }
    }

    fn buffered_row_count(&self) -> usize {
        let (Self::IntegersWithPresenceFlags(_, levels)
        | Self::DoublesWithPresenceFlags(_, levels)
        | Self::ByteArraysWithPresenceFlags(_, levels)) = self;
        levels.len()
    }

    /// Writes the buffered values as the next column of a row group, and frees them.
    fn write_column_and_clear_values(
        &mut self,
        group: &mut SerializedRowGroupWriter<'_, File>,
    ) -> Result<(), Box<dyn Error>> {
        let mut column = group.next_column()?.ok_or("the schema has fewer columns")?;
        match self {
            Self::IntegersWithPresenceFlags(values, levels) => {
                column.typed::<Int64Type>().write_batch(values, Some(levels), None)?;
                (*values, *levels) = (Vec::new(), Vec::new());
            }
            Self::DoublesWithPresenceFlags(values, levels) => {
                column.typed::<DoubleType>().write_batch(values, Some(levels), None)?;
                (*values, *levels) = (Vec::new(), Vec::new());
            }
            Self::ByteArraysWithPresenceFlags(values, levels) => {
                column.typed::<ByteArrayType>().write_batch(values, Some(levels), None)?;
                (*values, *levels) = (Vec::new(), Vec::new());
            }
        }
        column.close()?;
        Ok(())
    }
}

fn add_value_and_definition_level<T>(values: &mut Vec<T>, levels: &mut Vec<i16>, value: Option<T>) {
    levels.push(i16::from(value.is_some()));
    values.extend(value);
}

/// Settings of the parquet files that are written: rows of a row group, and compression.
pub struct ParquetFileSettings {
    /// Number of rows of each row group in the parquet files.
    pub rows_per_row_group: usize,
    /// Whether the parquet columns are written without dictionaries and without compression.
    pub uncompressed_without_dictionaries: bool,
}

/// Writes every table of an SQLite export of Nsight Systems as a parquet file in a folder.
pub fn write_tables_as_parquet_files(
    export: &Path,
    folder: &Path,
    layout: &ParquetFileSettings,
) -> Result<(), Box<dyn Error>> {
    let connection = Connection::open(export)?;
    let mut tables = connection.prepare(
        "SELECT name FROM sqlite_master
         WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'",
    )?;
    let names: Vec<String> = tables.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
    for name in names {
        let path = folder.join(format!("{name}.parquet"));
        write_table_as_parquet_file(&connection, &name, &path, layout)?;
    }
    Ok(())
}

fn write_table_as_parquet_file(
    connection: &Connection,
    table: &str,
    path: &Path,
    layout: &ParquetFileSettings,
) -> Result<(), Box<dyn Error>> {
    let mut described = connection.prepare("SELECT name, type FROM pragma_table_info(?1)")?;
    let mut described = described.query([table])?;
    let (mut fields, mut columns) = (String::new(), Vec::new());
    while let Some(row) = described.next()? {
        let (name, sql): (String, String) = (row.get(0)?, row.get(1)?);
        let column = ParquetColumnValues::empty_column_of_sql_type(&sql);
        fields += &format!("OPTIONAL {} {name};", column.parquet_schema_type());
        columns.push(column);
    }
    let schema = Arc::new(parse_message_type(&format!("message t {{ {fields} }}"))?);
    let properties = match layout.uncompressed_without_dictionaries {
        true => WriterProperties::builder().set_dictionary_enabled(false),
        false => WriterProperties::builder().set_compression(Compression::SNAPPY),
    };
    let properties = Arc::new(properties.build());
    let mut writer = SerializedFileWriter::new(File::create(path)?, schema, properties)?;
    let mut end_group = |columns: &mut [ParquetColumnValues]| -> Result<(), Box<dyn Error>> {
        let mut group = writer.next_row_group()?;
        columns
            .iter_mut()
            .try_for_each(|column| column.write_column_and_clear_values(&mut group))?;
        group.close()?;
        Ok(())
    };
    let mut query = connection.prepare(&format!("SELECT * FROM \"{table}\""))?;
    let mut rows = query.query([])?;
    while let Some(row) = rows.next()? {
        for (index, column) in columns.iter_mut().enumerate() {
            column.push_sqlite_value(row.get_ref(index)?);
        }
        if columns[0].buffered_row_count() == layout.rows_per_row_group {
            end_group(&mut columns)?;
        }
    }
    if columns[0].buffered_row_count() > 0 {
        end_group(&mut columns)?;
    }
    writer.close()?;
    Ok(())
}
