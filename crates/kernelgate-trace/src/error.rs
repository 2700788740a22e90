//! Errors of files.

use std::path::{Path, PathBuf};

/// The reason why a trace file could not be read. Each `TraceError` message names the trace file
/// and continues the words "failed to …".
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The trace file could not be opened or read.
    #[error("read {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// The content of the file matches no trace format that kernelgate reads.
    #[error("recognise {}: {reason}", path.display())]
    UnknownFormat {
        path: PathBuf,
        /// Names the trace format or table that is missing, as a fragment of the error sentence.
        reason: String,
    },
    /// The trace format was recognised, but the content of the file is invalid.
    #[error("read {}: {reason}", path.display())]
    InvalidContent { path: PathBuf, reason: String },
    /// The user must first convert the trace file with another program, such as nsys.
    #[error("convert {}: {reason}", path.display())]
    MustBeConverted {
        path: PathBuf,
        /// Why kernelgate did not convert the file, and the command with which the user can convert
        /// it.
        reason: String,
    },
    /// The trace file exceeds a limit on size or nesting depth that protects the reader.
    #[error("read {}: {reason}", path.display())]
    TooLarge { path: PathBuf, reason: String },
}

impl TraceError {
    pub(crate) fn unreadable_file_error(path: &Path) -> impl FnOnce(std::io::Error) -> TraceError {
        move |source| Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn broken_trace_file_error(path: &Path, reason: impl ToString) -> TraceError {
        Self::InvalidContent { path: path.to_owned(), reason: reason.to_string() }
    }

    pub(crate) fn trace_must_be_converted_error(path: &Path, reason: impl ToString) -> TraceError {
        Self::MustBeConverted { path: path.to_owned(), reason: reason.to_string() }
    }
}
