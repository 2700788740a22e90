//! Files into the activity model: told apart by their content, not by their name.

mod builder;
mod chrome;
mod convert;
mod ncu;
mod nsys;
mod recording;
mod rows;
mod wanted;

pub use rows::{CallRow, RangeRow, Row, Streamed, rows_of};
pub use wanted::Wanted;

use std::io::Read;
use std::path::Path;

use crate::error::TraceError;
use crate::model::Trace;

/// Reads a trace: an SQLite export or report of Nsight Systems, CSV or a report of Nsight Compute,
/// Chrome's JSON (as PyTorch writes it), also compressed by gzip, a recording of
/// `kernelgate profile`.
///
/// What is damaged is read as far as it goes; [`Trace::quality`] says what is missing.
///
/// # Errors
/// The file cannot be read, is of no known format, or holds nothing that can be used.
pub fn open(path: &Path, wanted: &Wanted) -> Result<Trace, TraceError> {
    match recognise(path)? {
        Format::Sqlite => nsys::read(path, wanted),
        Format::Chrome => chrome::read(path),
        Format::ComputeCsv => ncu::read(path),
        Format::Recording => recording::read(path),
        Format::SystemsReport => {
            let (_folder, export) = convert::systems_report(path)?;
            nsys::read(&export, wanted)
        }
        Format::ComputeReport => {
            let (_folder, csv) = convert::compute_report(path)?;
            ncu::read(&csv)
        }
    }
}

/// Reads what is wanted of a trace but its ranges and calls, and hands these out in order of time;
/// `None` for a file that is no export or report of Nsight Systems. What is handed out is nowhere kept, so that an
/// export of any length takes no more memory than its kernels do. Calls without a correlation id
/// are handed out only where the rest is wanted.
///
/// # Errors
/// As [`open`].
pub fn stream(
    path: &Path,
    wanted: &Wanted,
    each: impl FnMut(&Trace, Row),
) -> Result<Option<Streamed>, TraceError> {
    match recognise(path)? {
        Format::Sqlite => nsys::stream::read(path, wanted, each).map(Some),
        Format::SystemsReport => {
            let (_folder, export) = convert::systems_report(path)?;
            nsys::stream::read(&export, wanted, each).map(Some)
        }
        _ => Ok(None),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Sqlite,
    Chrome,
    Recording,
    ComputeCsv,
    SystemsReport,
    ComputeReport,
}

/// How much of a file is looked at to tell its format.
const HEAD: u64 = 1 << 16;

fn recognise(path: &Path) -> Result<Format, TraceError> {
    let mut head = Vec::new();
    // A pipe has its content once, and a trace is opened twice; a named one without a writer would
    // be waited for without end.
    let kind = std::fs::metadata(path).map_err(TraceError::io(path))?.file_type();
    if !kind.is_file() && !kind.is_dir() {
        let why = std::io::Error::other("it is no file but a device, a pipe or a socket");
        return Err(TraceError::io(path)(why));
    }
    let file = std::fs::File::open(path).map_err(TraceError::io(path))?;
    file.take(HEAD).read_to_end(&mut head).map_err(TraceError::io(path))?;
    let extension = path.extension().and_then(|name| name.to_str()).unwrap_or_default();
    let unknown = |reason: &str| {
        Err(TraceError::Unknown { path: path.to_owned(), reason: reason.to_owned() })
    };
    if head.starts_with(b"SQLite format 3\0") {
        return Ok(Format::Sqlite);
    }
    if head.starts_with(&[0x1f, 0x8b]) {
        return Ok(Format::Chrome);
    }
    match extension {
        "nsys-rep" | "qdrep" => return Ok(Format::SystemsReport),
        "ncu-rep" => return Ok(Format::ComputeReport),
        "qdstrm" => {
            return Err(TraceError::convert(
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
    match start.iter().find(|byte| !byte.is_ascii_whitespace()) {
        Some(b'{') if recording::looks_like(start) => return Ok(Format::Recording),
        Some(b'{' | b'[') => return Ok(Format::Chrome),
        _ if ncu::looks_like(path).map_err(TraceError::io(path))? => {
            return Ok(Format::ComputeCsv);
        }
        _ => {}
    }
    unknown(
        "it is neither an SQLite export of Nsight Systems, nor CSV of Nsight Compute, nor Chrome's \
         JSON (PyTorch's profiler), nor a recording of `kernelgate profile`, nor a report with the \
         extension .nsys-rep or .ncu-rep",
    )
}
