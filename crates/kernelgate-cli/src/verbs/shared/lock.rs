//! Locks, so that verbs that change a baseline wait for each other.

use std::path::Path;

use kernelgate::record::FileLock;

/// Locks a baseline file while it is read, changed and written.
pub fn lock_baseline(path: &Path) -> anyhow::Result<FileLock> {
    Ok(FileLock::acquire_for_file(path)?)
}
