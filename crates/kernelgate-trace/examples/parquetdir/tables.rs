//! The tables of an SQLite export as a folder of parquet files, one a table.

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

/// Values of a column in a row group, and for each row 1 if it has a value.
enum ParquetColumn {
    Integers(Vec<i64>, Vec<i16>),
    Reals(Vec<f64>, Vec<i16>),
    Texts(Vec<ByteArray>, Vec<i16>),
}

impl ParquetColumn {
    /// An empty column of the type that SQL declares.
    fn empty_column_of_sql_type(sql: &str) -> ParquetColumn {
        match sql {
            "TEXT" | "BLOB" => Self::Texts(Vec::new(), Vec::new()),
            "REAL" => Self::Reals(Vec::new(), Vec::new()),
            _ => Self::Integers(Vec::new(), Vec::new()),
        }
    }

    fn parquet_type(&self) -> &'static str {
        match self {
            Self::Integers(..) => "INT64",
            Self::Reals(..) => "DOUBLE",
            Self::Texts(..) => "BYTE_ARRAY",
        }
    }

    /// Adds the value of a row; one of another type reads as missing.
    #[allow(clippy::cast_precision_loss)]
    fn push(&mut self, value: ValueRef<'_>) {
        match self {
            Self::Integers(values, levels) => {
                let value = if let ValueRef::Integer(value) = value { Some(value) } else { None };
                add(values, levels, value);
            }
            Self::Reals(values, levels) => {
                let value = match value {
                    ValueRef::Real(value) => Some(value),
                    ValueRef::Integer(value) => Some(value as f64),
                    _ => None,
                };
                add(values, levels, value);
            }
            Self::Texts(values, levels) => {
                let value = match value {
                    ValueRef::Text(text) | ValueRef::Blob(text) => Some(text.to_vec().into()),
                    ValueRef::Integer(value) => Some(value.to_string().into_bytes().into()),
                    _ => None,
                };
                add(values, levels, value);
            }
        }
    }

    fn row_count(&self) -> usize {
        let (Self::Integers(_, levels) | Self::Reals(_, levels) | Self::Texts(_, levels)) = self;
        levels.len()
    }

    /// Writes values as the next column of a row group, and frees the values.
    fn write_column(
        &mut self,
        group: &mut SerializedRowGroupWriter<'_, File>,
    ) -> Result<(), Box<dyn Error>> {
        let mut column = group.next_column()?.ok_or("the schema has fewer columns")?;
        match self {
            Self::Integers(values, levels) => {
                column.typed::<Int64Type>().write_batch(values, Some(levels), None)?;
                (*values, *levels) = (Vec::new(), Vec::new());
            }
            Self::Reals(values, levels) => {
                column.typed::<DoubleType>().write_batch(values, Some(levels), None)?;
                (*values, *levels) = (Vec::new(), Vec::new());
            }
            Self::Texts(values, levels) => {
                column.typed::<ByteArrayType>().write_batch(values, Some(levels), None)?;
                (*values, *levels) = (Vec::new(), Vec::new());
            }
        }
        column.close()?;
        Ok(())
    }
}

fn add<T>(values: &mut Vec<T>, levels: &mut Vec<i16>, value: Option<T>) {
    levels.push(i16::from(value.is_some()));
    values.extend(value);
}

/// Size of row groups and other settings of the parquet files.
pub struct ParquetLayout {
    /// Number of rows of a row group.
    pub group_rows: usize,
    /// Whether columns are written without dictionaries and without compression.
    pub plain: bool,
}

/// Writes every table of an Nsight Systems export as a parquet file.
pub fn write_parquet_folder(
    export: &Path,
    folder: &Path,
    layout: &ParquetLayout,
) -> Result<(), Box<dyn Error>> {
    let connection = Connection::open(export)?;
    let mut tables = connection.prepare(
        "SELECT name FROM sqlite_master
         WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'",
    )?;
    let names: Vec<String> = tables.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
    for name in names {
        let path = folder.join(format!("{name}.parquet"));
        write_table(&connection, &name, &path, layout)?;
    }
    Ok(())
}

fn write_table(
    connection: &Connection,
    table: &str,
    path: &Path,
    layout: &ParquetLayout,
) -> Result<(), Box<dyn Error>> {
    let mut described = connection.prepare("SELECT name, type FROM pragma_table_info(?1)")?;
    let mut described = described.query([table])?;
    let (mut fields, mut columns) = (String::new(), Vec::new());
    while let Some(row) = described.next()? {
        let (name, sql): (String, String) = (row.get(0)?, row.get(1)?);
        let column = ParquetColumn::empty_column_of_sql_type(&sql);
        fields += &format!("OPTIONAL {} {name};", column.parquet_type());
        columns.push(column);
    }
    let schema = Arc::new(parse_message_type(&format!("message t {{ {fields} }}"))?);
    let properties = match layout.plain {
        true => WriterProperties::builder().set_dictionary_enabled(false),
        false => WriterProperties::builder().set_compression(Compression::SNAPPY),
    };
    let properties = Arc::new(properties.build());
    let mut writer = SerializedFileWriter::new(File::create(path)?, schema, properties)?;
    let mut end_group = |columns: &mut [ParquetColumn]| -> Result<(), Box<dyn Error>> {
        let mut group = writer.next_row_group()?;
        columns.iter_mut().try_for_each(|column| column.write_column(&mut group))?;
        group.close()?;
        Ok(())
    };
    let mut query = connection.prepare(&format!("SELECT * FROM \"{table}\""))?;
    let mut rows = query.query([])?;
    while let Some(row) = rows.next()? {
        for (index, column) in columns.iter_mut().enumerate() {
            column.push(row.get_ref(index)?);
        }
        if columns[0].row_count() == layout.group_rows {
            end_group(&mut columns)?;
        }
    }
    if columns[0].row_count() > 0 {
        end_group(&mut columns)?;
    }
    writer.close()?;
    Ok(())
}
