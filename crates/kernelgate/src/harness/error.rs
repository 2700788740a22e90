//! Why a bench binary stopped.

use crate::backend::BackendError;
use crate::record::FileError;
use crate::record::store::StoreError;

/// Why a bench binary stopped.
#[derive(Debug, thiserror::Error)]
pub enum HarnessError {
    /// Flags, filter or axes that make no sense.
    #[error("{0}")]
    Usage(String),
    /// A filter that matches no case.
    #[error("{0}")]
    NoMatch(String),
    /// The device fails before any case.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A record or baseline that cannot be read or written.
    #[error("failed to {0}")]
    File(#[from] FileError),
    /// The run is recorded, but not in the baseline that was asked for.
    #[error(
        "failed to {cause}: the run is kept, and `kernelgate baseline add {name} --session \
         {session}` adds it"
    )]
    Unsaved {
        /// Why not.
        cause: Box<FileError>,
        /// The baseline.
        name: String,
        /// The session's folder, which has the run.
        session: String,
    },
    /// A baseline file cannot be used, or a baseline name is invalid.
    #[error(transparent)]
    Store(#[from] StoreError),
}
