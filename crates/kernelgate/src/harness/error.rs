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
    /// The device fails before any case.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A record or baseline that cannot be read or written.
    #[error("failed to {0}")]
    File(#[from] FileError),
    /// As [`HarnessError::File`], or a bad baseline name.
    #[error(transparent)]
    Store(#[from] StoreError),
}
