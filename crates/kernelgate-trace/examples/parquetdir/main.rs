//! Writes each table of an SQLite trace export as one parquet file, as `nsys export --type
//! parquetdir` does, for benchmarks of large exports.
//!
//! `cargo run --release -p kernelgate-trace --features parquet --example parquetdir -- EXPORT OUT`
//!
//! With `plain` as a third argument, the files have neither dictionaries nor compression.

mod tables;

use std::path::Path;
use std::process::ExitCode;

/// Number of rows of a row group in a parquet file, the same as Arrow's writer uses.
const PARQUET_ROW_GROUP_ROWS: usize = 1 << 20;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (export, folder, plain) = match &arguments[..] {
        [export, folder] => (export, folder, false),
        [export, folder, word] if word == "plain" => (export, folder, true),
        _ => {
            eprintln!("usage: parquetdir EXPORT.sqlite FOLDER [plain]");
            return ExitCode::from(2);
        }
    };
    let layout = tables::ParquetFileSettings {
        rows_per_row_group: PARQUET_ROW_GROUP_ROWS,
        uncompressed_without_dictionaries: plain,
    };
    let written = std::fs::create_dir_all(folder).map_err(Into::into).and_then(|()| {
        tables::write_tables_as_parquet_files(Path::new(export), Path::new(folder), &layout)
    });
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: failed to write {folder}: {error}");
            ExitCode::from(2)
        }
    }
}
