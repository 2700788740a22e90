//! Times over commits: every run that was recorded or imported, and where a case's level changed.
//!
//! A store is a folder: `runs/<session>/<bench>.json`, which bench processes write, `imported/`,
//! which [`import`] fills with runs and baselines from elsewhere, and `history.sqlite`, an index
//! that is made of both ([`index`], [`store`]) and may be deleted. [`order`] puts commits in order,
//! [`series`] makes of the index what a case did. Deliberately absent: judging a change (`gate`),
//! printing (`report`).

pub mod import;
pub mod index;
pub mod indexed_run;
pub mod order;
pub mod prune;
pub mod series;
pub mod store;

use std::path::{Path, PathBuf};

use kernelgate::record::FileError;

pub use index::Index;
pub use order::CommitOrder;
pub use series::{CaseHistory, Query, histories};
pub use store::{HistoryStore, Skipped};

/// Why a history cannot be told.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The operating system said no.
    #[error("failed to {action} {}: {cause}", .path.display())]
    Io {
        /// "read", "remove".
        action: &'static str,
        /// Which file or folder.
        path: PathBuf,
        /// What it said.
        cause: std::io::Error,
    },
    /// A record cannot be written.
    #[error("failed to {0}")]
    File(FileError),
    /// The index cannot be used: busy for a minute, or the disk is full.
    #[error("failed to use the index {}: {cause}", .path.display())]
    Index {
        /// Its file.
        path: PathBuf,
        /// What SQLite said.
        cause: String,
    },
    /// What was asked for cannot be done.
    #[error("{0}")]
    Usage(String),
}

impl From<FileError> for HistoryError {
    /// No source of it: the text has it already.
    fn from(error: FileError) -> Self {
        Self::File(error)
    }
}

impl HistoryError {
    fn io(action: &'static str, path: &Path, cause: std::io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), cause }
    }
}
