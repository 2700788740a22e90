//! Locks, so that verbs that change a baseline wait for each other.

use std::path::Path;

use kernelgate::record::Lock;

/// Locks a baseline file for reading, changing and writing it.
pub fn lock_baseline(path: &Path) -> anyhow::Result<Lock> {
    Lock::acquire(path).map_err(|error| anyhow::anyhow!("failed to {error}"))
}
