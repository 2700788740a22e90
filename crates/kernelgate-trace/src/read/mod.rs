//! Files into the activity model: recognised by their content, not by their name.

mod chrome;
mod convert;
mod demangle;
mod json_source;
mod locale_numbers;
mod ncu;
mod ncu_report;
mod nsys;
mod recording;
mod rocprof;
mod rows;
mod trace_builder;
mod unsupported_files;
mod wanted_parts;

pub use rows::{CallRow, RangeOrCall, RangeRow, StreamedRows, for_each_row};
pub use wanted_parts::WantedTraceParts;

use std::io::Read;
use std::path::Path;

use crate::error::TraceError;
use crate::model::Trace;

/// Reads a trace: an SQLite export or report of Nsight Systems, CSV or a report of Nsight Compute,
/// Chrome's JSON (as PyTorch writes it), also compressed by gzip, a recording of
/// `kernelgate profile`.
///
/// A damaged file is read as far as it goes; [`Trace::quality`] lists the missing parts.
///
/// # Errors
/// The file cannot be read, is of no known format, or holds nothing that can be used.
pub fn open_trace_file(path: &Path, wanted: &WantedTraceParts) -> Result<Trace, TraceError> {
    match recognise_format(path)? {
        TraceFormat::SystemsExport => nsys::read_nsys_export(path, wanted),
        TraceFormat::Chrome => chrome::read_chrome_trace(path),
        TraceFormat::ComputeCsv => ncu::read_ncu_csv(path),
        TraceFormat::Recording => recording::read_recording(path),
        TraceFormat::Rocprof => rocprof::read_rocprof_json(path),
        TraceFormat::SystemsReport => {
            let (_folder, export) = convert::convert_nsys_report(path)?;
            nsys::read_nsys_export(&export, wanted)
        }
        TraceFormat::ComputeReport => ncu_report::read_ncu_report(path),
    }
}

/// Reads what is wanted of a trace but its ranges and calls, and hands these out in order of time;
/// `None` for a file of another format than Nsight Systems. Rows are not kept in memory, so that an
/// export of any length takes no more memory than its kernels. Calls without a correlation id are
/// passed on only if other columns are requested.
pub fn stream_trace_rows(
    path: &Path,
    wanted: &WantedTraceParts,
    each: impl FnMut(&Trace, RangeOrCall),
) -> Result<Option<StreamedRows>, TraceError> {
    match recognise_format(path)? {
        TraceFormat::SystemsExport => {
            nsys::stream::read_and_stream_rows(path, wanted, each).map(Some)
        }
        TraceFormat::SystemsReport => {
            let (_folder, export) = convert::convert_nsys_report(path)?;
            nsys::stream::read_and_stream_rows(&export, wanted, each).map(Some)
        }
        _ => Ok(None),
    }
}

/// Recognises a folder that has a parquet file for each table.
fn recognise_folder(path: &Path) -> Result<TraceFormat, TraceError> {
    let mut files = std::fs::read_dir(path).map_err(TraceError::io(path))?.flatten();
    let is_table = |file: std::fs::DirEntry| {
        file.path().extension().is_some_and(|extension| extension == "parquet")
    };
    if files.any(is_table) {
        return Ok(TraceFormat::SystemsExport);
    }
    Err(TraceError::Unknown {
        path: path.to_owned(),
        reason: "it is a folder without the tables of a parquet export of Nsight Systems"
            .to_owned(),
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TraceFormat {
    SystemsExport,
    Chrome,
    Recording,
    Rocprof,
    ComputeCsv,
    SystemsReport,
    ComputeReport,
}

/// Bytes of a file by which its format is recognised.
const RECOGNISED_HEAD_BYTES: u64 = 1 << 16;

fn recognise_format(path: &Path) -> Result<TraceFormat, TraceError> {
    if path.is_dir() {
        return recognise_folder(path);
    }
    let mut head = Vec::new();
    // A pipe has its content once, and a trace is opened twice; a named one without a writer would
    // be waited for without end.
    let kind = std::fs::metadata(path).map_err(TraceError::io(path))?.file_type();
    if !kind.is_file() && !kind.is_dir() {
        let why = std::io::Error::other("it is no file but a device, a pipe or a socket");
        return Err(TraceError::io(path)(why));
    }
    let file = std::fs::File::open(path).map_err(TraceError::io(path))?;
    file.take(RECOGNISED_HEAD_BYTES).read_to_end(&mut head).map_err(TraceError::io(path))?;
    let extension = path.extension().and_then(|name| name.to_str()).unwrap_or_default();
    let unknown = |reason: &str| {
        Err(TraceError::Unknown { path: path.to_owned(), reason: reason.to_owned() })
    };
    if let Some(reason) = unsupported_files::recognise_unsupported(path, &head) {
        return unknown(&reason);
    }
    if head.starts_with(b"SQLite format 3\0") {
        return Ok(TraceFormat::SystemsExport);
    }
    if head.starts_with(ncu_report::REPORT_MAGIC) {
        return Ok(TraceFormat::ComputeReport);
    }
    if head.starts_with(&[0x1f, 0x8b]) {
        let head = json_source::first_unpacked_bytes(path, RECOGNISED_HEAD_BYTES)
            .map_err(TraceError::io(path))?;
        return match unsupported_files::recognise_unsupported(path, &head) {
            Some(reason) => unknown(&reason),
            None if rocprof::looks_like_rocprof(&head) => Ok(TraceFormat::Rocprof),
            None => Ok(TraceFormat::Chrome),
        };
    }
    match extension {
        "nsys-rep" | "qdrep" => return Ok(TraceFormat::SystemsReport),
        "ncu-rep" => return Ok(TraceFormat::ComputeReport),
        "qdstrm" => {
            return Err(TraceError::conversion_error(
                path,
                format!(
                    "`nsys profile` left it because it could not make its report; where Nsight \
                     Systems is whole, run: QdstrmImporter -i {}",
                    path.display()
                ),
            ));
        }
        "sqlite" | "db" => return unknown("it is not an SQLite database"),
        _ if head.is_empty() => return unknown("it is empty"),
        _ => {}
    }
    let start = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&head);
    let mut bytes = start.iter().filter(|byte| !byte.is_ascii_whitespace());
    match bytes.next() {
        // The file is TOML, INI or code, not JSON.
        Some(b'{' | b'[') if bytes.next().is_some_and(u8::is_ascii_alphabetic) => {}
        Some(b'{') if recording::looks_like_recording(start) => return Ok(TraceFormat::Recording),
        Some(b'{') if rocprof::looks_like_rocprof(start) => return Ok(TraceFormat::Rocprof),
        Some(b'{' | b'[') => return Ok(TraceFormat::Chrome),
        _ if ncu::looks_like_ncu_csv(path).map_err(TraceError::io(path))? => {
            return Ok(TraceFormat::ComputeCsv);
        }
        _ => {}
    }
    if let Some(reason) = unsupported_files::recognise_text(&head) {
        return unknown(&reason);
    }
    unknown(
        "it is neither an SQLite export of Nsight Systems, nor CSV of Nsight Compute, nor Chrome's \
         JSON (PyTorch's profiler), nor a recording of `kernelgate profile`, nor a report with the \
         extension .nsys-rep or .ncu-rep",
    )
}
