//! The history of case times over commits: stores all recorded and imported runs, and finds where a
//! case's time level changed.
//!
//! A history store is a folder of run records. Bench processes write the run records
//! `runs/<session>/<bench>.json` of the store. The module [`import`] copies run records and
//! baselines from elsewhere into the store's subfolder `imported/`. The modules [`case_index`] and
//! [`store`] keep the file `history.index`, an index of all records that may be deleted. The module
//! [`commit_order`] orders commits by the git history, and [`series`] computes the history of a
//! case from the index. The module `history` does not judge changes (`gate` does) and prints
//! nothing (`report` does).

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

pub use case_index::HistoryStoreIndex;
pub use commit_order::GitCommitOrder;
pub use series::{CaseHistoryQuery, CaseTimeHistory, compute_case_histories};
pub use store::{FileWithoutRun, HistoryRecordStore};

/// The reason why the history of case times cannot be shown or changed.
#[derive(Debug, thiserror::Error)]
pub enum CaseHistoryError {
    /// Error: a file or folder of the history store cannot be read, created or removed.
    #[error("failed to {action} {}: {cause}", .inaccessible_path.display())]
    Io {
        /// The action that failed: "read", "remove".
        action: &'static str,
        inaccessible_path: PathBuf,
        cause: std::io::Error,
    },
    /// Error: a record file of the history store cannot be written.
    #[error(transparent)]
    RecordFile(#[from] RecordFileError),
    /// Error: git does not know the requested revision, or a git command failed.
    #[error(transparent)]
    RevisionLookup(#[from] Box<CompareError>),
    /// Error: the renames of a case in `kernelgate.toml` form a circle.
    #[error("case {case}: its renames go in a circle")]
    RenameCircle { case: String },
}

impl CaseHistoryError {
    fn file_error(action: &'static str, path: &Path, cause: std::io::Error) -> CaseHistoryError {
        Self::Io { action, inaccessible_path: path.to_owned(), cause }
    }
}
