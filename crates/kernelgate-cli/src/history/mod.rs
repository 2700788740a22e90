//! Times over commits: every run that was recorded or imported, and the changes of a case's level.
//!
//! The history store is a folder of recorded runs: `runs/<session>/<bench>.json`, which bench
//! processes write, `imported/`, which [`import`] fills with runs and baselines from elsewhere, and
//! `history.index`, an index of both ([`case_index`], [`store`]) that may be deleted.
//! [`commit_order`] puts commits in order, [`series`] computes the history of a case from the
//! index. Judging a change (`gate`) and printing (`report`) are deliberately elsewhere.

pub mod case_index;
pub mod commit_order;
pub mod import;
pub mod indexed_run;
pub mod prune;
pub mod series;
pub mod store;

use std::path::{Path, PathBuf};

use crate::compare::CompareError;
use kernelgate::record::RecordFileError;

pub use case_index::HistoryIndex;
pub use commit_order::CommitOrder;
pub use series::{CaseHistory, HistoryQuery, case_histories};
pub use store::{HistoryStore, SkippedRecordFile};

/// The reason why a history of times cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The operating system reported a file error.
    #[error("failed to {action} {}: {cause}", .path.display())]
    Io {
        /// The action that failed: "read", "remove".
        action: &'static str,
        path: PathBuf,
        cause: std::io::Error,
    },
    /// A record file cannot be written.
    #[error(transparent)]
    File(#[from] RecordFileError),
    /// Git does not know the revision, or fails.
    #[error(transparent)]
    Revision(#[from] Box<CompareError>),
    /// The renames of a case form a circle.
    #[error("case {case}: its renames go in a circle")]
    RenameCircle { case: String },
}

impl HistoryError {
    fn io(action: &'static str, path: &Path, cause: std::io::Error) -> HistoryError {
        Self::Io { action, path: path.to_owned(), cause }
    }
}
