//! Errors of files.

use std::path::{Path, PathBuf};

/// The reason why a trace file cannot be read. Each error message names the file and continues the
/// words "failed to …".
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file cannot be opened or read.
    #[error("read {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// The content of the file has no known trace format.
    #[error("recognise {}: {reason}", path.display())]
    Unknown {
        path: PathBuf,
        /// The missing format or table, as a fragment of a sentence.
        reason: String,
    },
    /// The format is known, the content is broken.
    #[error("read {}: {reason}", path.display())]
    Broken { path: PathBuf, reason: String },
    /// Another program must convert the trace file first.
    #[error("convert {}: {reason}", path.display())]
    Convert {
        path: PathBuf,
        /// Reason why the file was not converted, and the command that converts it.
        reason: String,
    },
    /// A limit that protects the reader, of size or of depth, was exceeded.
    #[error("read {}: {reason}", path.display())]
    TooLarge { path: PathBuf, reason: String },
}

impl TraceError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> TraceError {
        move |source| Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn broken_file(path: &Path, reason: impl ToString) -> TraceError {
        Self::Broken { path: path.to_owned(), reason: reason.to_string() }
    }

    pub(crate) fn conversion_error(path: &Path, reason: impl ToString) -> TraceError {
        Self::Convert { path: path.to_owned(), reason: reason.to_string() }
    }
}
