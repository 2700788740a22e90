//! Verbs that change a baseline wait for each other.

use std::path::Path;

use kernelgate::record::Lock;

/// The right to read a baseline file, change it and write it.
pub fn locked(path: &Path) -> anyhow::Result<Lock> {
    Lock::acquire(path).map_err(|error| anyhow::anyhow!("failed to {error}"))
}
