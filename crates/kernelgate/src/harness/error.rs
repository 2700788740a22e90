//! The reason why a bench binary stopped.

use crate::backend::BackendError;
use crate::record::FileError;
use crate::record::store::StoreError;

/// The reason why a bench binary stopped.
#[derive(Debug, thiserror::Error)]
pub enum HarnessError {
    /// Flags, filter or axes are invalid.
    #[error("{0}")]
    Usage(String),
    /// The filter matches no case.
    #[error("{0}")]
    NoMatch(String),
    /// The device failed before the first case.
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
        /// Folder of the session with the run's record.
        session: String,
    },
    /// A baseline file cannot be used, or a baseline name is invalid.
    #[error(transparent)]
    Store(#[from] StoreError),
}
