//! Reads trace files of several profilers into the trace data model; formats are recognised by
//! content, not by file name.

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

pub use rows::{
    ExportWithoutStreamedRows, StreamedCallRow, StreamedRangeOrCall, StreamedRangeRow,
    for_each_range_and_call_by_time,
};
pub use wanted_parts::WantedTraceParts;

use std::io::Read;
use std::path::Path;

use crate::error::TraceError;
use crate::model::Trace;

/// Reads a trace file: Nsight Systems export or report, Nsight Compute CSV or report, rocprofv3
/// JSON, Chrome trace JSON (also compressed with gzip), or a recording of `kernelgate profile`.
///
/// If a file is damaged, kernelgate reads the intact beginning; [`Trace::quality`] lists the
/// missing parts.
///
/// # Errors
/// The file cannot be read, has an unknown format, or contains nothing that kernelgate can use.
pub fn open_trace_file(path: &Path, wanted: &WantedTraceParts) -> Result<Trace, TraceError> {
    match recognise_trace_file_format(path)? {
        TraceFileFormat::NsightSystemsExport => nsys::read_nsys_export(path, wanted),
        TraceFileFormat::ChromeTraceJson => chrome::read_chrome_trace(path),
        TraceFileFormat::NsightComputeCsv => ncu::read_ncu_csv(path),
        TraceFileFormat::KernelgateRecording => recording::read_kernelgate_recording(path),
        TraceFileFormat::RocprofJson => rocprof::read_rocprofv3_json(path),
        TraceFileFormat::NsightSystemsReport => {
            let (_folder, export) = convert::export_nsys_report_to_sqlite(path)?;
            nsys::read_nsys_export(&export, wanted)
        }
        TraceFileFormat::NsightComputeReport => ncu_report::read_ncu_report(path),
    }
}

/// Reads the wanted parts of an Nsight Systems trace, and passes ranges and API calls one by one to
/// `each` in order of time; `None` for other file formats. Ranges and API calls are not kept in
/// memory, so memory grows only with the number of kernels, not with the length of the export. API
/// calls without a correlation id are passed on only if the caller wants further columns of calls.
pub fn stream_ranges_and_calls(
    path: &Path,
    wanted: &WantedTraceParts,
    each: impl FnMut(&Trace, StreamedRangeOrCall),
) -> Result<Option<ExportWithoutStreamedRows>, TraceError> {
    match recognise_trace_file_format(path)? {
        TraceFileFormat::NsightSystemsExport => {
            nsys::stream::stream_ranges_and_calls_of_export(path, wanted, each).map(Some)
        }
        TraceFileFormat::NsightSystemsReport => {
            let (_folder, export) = convert::export_nsys_report_to_sqlite(path)?;
            nsys::stream::stream_ranges_and_calls_of_export(&export, wanted, each).map(Some)
        }
        _ => Ok(None),
    }
}

/// Recognises a folder of an Nsight Systems parquet export, which contains one parquet file per
/// table.
fn recognise_parquet_export_folder(path: &Path) -> Result<TraceFileFormat, TraceError> {
    let mut files =
        std::fs::read_dir(path).map_err(TraceError::unreadable_file_error(path))?.flatten();
    let is_table = |file: std::fs::DirEntry| {
        file.path().extension().is_some_and(|extension| extension == "parquet")
    };
    if files.any(is_table) {
        return Ok(TraceFileFormat::NsightSystemsExport);
    }
    Err(TraceError::UnknownFormat {
        path: path.to_owned(),
        reason: "it is a folder without the tables of a parquet export of Nsight Systems"
            .to_owned(),
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TraceFileFormat {
    NsightSystemsExport,
    ChromeTraceJson,
    KernelgateRecording,
    RocprofJson,
    NsightComputeCsv,
    NsightSystemsReport,
    NsightComputeReport,
}

/// Number of bytes at the start of a file from which kernelgate recognises the format.
const FORMAT_RECOGNITION_BYTES: u64 = 1 << 16;

fn recognise_trace_file_format(path: &Path) -> Result<TraceFileFormat, TraceError> {
    if path.is_dir() {
        return recognise_parquet_export_folder(path);
    }
    let mut head = Vec::new();
    // Pipes are rejected, because kernelgate opens a trace twice, and because opening a named pipe
    // without a writer blocks forever.
    let kind =
        std::fs::metadata(path).map_err(TraceError::unreadable_file_error(path))?.file_type();
    if !kind.is_file() && !kind.is_dir() {
        let why = std::io::Error::other("it is no file but a device, a pipe or a socket");
        return Err(TraceError::unreadable_file_error(path)(why));
    }
    let file = std::fs::File::open(path).map_err(TraceError::unreadable_file_error(path))?;
    file.take(FORMAT_RECOGNITION_BYTES)
        .read_to_end(&mut head)
        .map_err(TraceError::unreadable_file_error(path))?;
    let extension = path.extension().and_then(|name| name.to_str()).unwrap_or_default();
    let unknown = |reason: &str| {
        Err(TraceError::UnknownFormat { path: path.to_owned(), reason: reason.to_owned() })
    };
    if let Some(reason) = unsupported_files::reason_if_unsupported_file(path, &head) {
        return unknown(&reason);
    }
    if head.starts_with(b"SQLite format 3\0") {
        return Ok(TraceFileFormat::NsightSystemsExport);
    }
    if head.starts_with(ncu_report::NCU_REPORT_MAGIC) {
        return Ok(TraceFileFormat::NsightComputeReport);
    }
    if head.starts_with(&[0x1f, 0x8b]) {
        let head = json_source::first_decompressed_bytes(path, FORMAT_RECOGNITION_BYTES)
            .map_err(TraceError::unreadable_file_error(path))?;
        return match unsupported_files::reason_if_unsupported_file(path, &head) {
            Some(reason) => unknown(&reason),
            None if rocprof::looks_like_rocprof(&head) => Ok(TraceFileFormat::RocprofJson),
            None => Ok(TraceFileFormat::ChromeTraceJson),
        };
    }
    match extension {
        "nsys-rep" | "qdrep" => return Ok(TraceFileFormat::NsightSystemsReport),
        "ncu-rep" => return Ok(TraceFileFormat::NsightComputeReport),
        "qdstrm" => {
            return Err(TraceError::trace_must_be_converted_error(
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
        // A bracket before a letter is TOML, INI or source code, not JSON.
        Some(b'{' | b'[') if bytes.next().is_some_and(u8::is_ascii_alphabetic) => {}
        Some(b'{') if recording::looks_like_kernelgate_recording(start) => {
            return Ok(TraceFileFormat::KernelgateRecording);
        }
        Some(b'{') if rocprof::looks_like_rocprof(start) => {
            return Ok(TraceFileFormat::RocprofJson);
        }
        Some(b'{' | b'[') => return Ok(TraceFileFormat::ChromeTraceJson),
        _ if ncu::contains_ncu_csv_header(path)
            .map_err(TraceError::unreadable_file_error(path))? =>
        {
            return Ok(TraceFileFormat::NsightComputeCsv);
        }
        _ => {}
    }
    if let Some(reason) = unsupported_files::reason_if_unsupported_text(&head) {
        return unknown(&reason);
    }
    unknown(
        "it is neither an SQLite export of Nsight Systems, nor CSV of Nsight Compute, nor Chrome's \
         JSON (PyTorch's profiler), nor a recording of `kernelgate profile`, nor a report with the \
         extension .nsys-rep or .ncu-rep",
    )
}
