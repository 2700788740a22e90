//! Provides a lock by which only one process at a time reads, changes and writes a file.
//!
//! A single write of a record file is atomic even without the lock (`file::write`). Without the
//! lock, if two processes read a file before either writes it, the changes of one process are lost.
//! Readers need no lock.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::file::RecordFileError;
use super::text::path_for_terminal;

/// How long a process waits for the lock, which other processes usually hold for milliseconds.
const FILE_LOCK_TIMEOUT: Duration = Duration::from_secs(60);
/// Between two tries.
const FILE_LOCK_RETRY_PAUSE: Duration = Duration::from_millis(10);

/// Exclusive right to change a file, among kernelgate processes, until the value is dropped. A
/// thread that holds the lock of a file must not acquire it again, because it would wait for
/// itself.
#[derive(Debug)]
pub struct ExclusiveFileLock {
    lock_file_path: PathBuf,
    /// The locked file; `None` if the file system has no locks.
    _locked_file: Option<File>,
}

impl ExclusiveFileLock {
    /// Waits until no other process or thread holds the lock of a file, which need not exist yet,
    /// and acquires the lock.
    ///
    /// The lock is a separate file beside the locked file, so that all writers find it, whatever
    /// their checkout or target folder is. The lock file is removed when the lock is released, so
    /// that git does not see it. The system releases the lock of a killed process; the next writer
    /// in the folder removes its lock file.
    ///
    /// # Errors
    /// Fails if other processes keep the lock for a minute, or if the lock's file cannot be
    /// created.
    pub fn acquire_lock_for_file(path: &Path) -> Result<ExclusiveFileLock, RecordFileError> {
        Self::acquire_lock_within(path, FILE_LOCK_TIMEOUT)
    }

    fn acquire_lock_within(
        path: &Path,
        timeout: Duration,
    ) -> Result<ExclusiveFileLock, RecordFileError> {
        let io = |cause| RecordFileError::Io {
            failed_operation: "lock",
            record_path: path.to_owned(),
            cause,
        };
        let mut name = std::ffi::OsString::from(".");
        name.push(path.file_name().unwrap_or_default());
        name.push(".lock");
        let at = path.with_file_name(name);
        if let Some(folder) = at.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(io)?;
        }
        let started = Instant::now();
        loop {
            let file = open_or_create_lock_file(&at).map_err(io)?;
            match file.try_lock() {
                Ok(()) if is_open_file_still_at_path(&file, &at) => {
                    return Ok(Self { lock_file_path: at, _locked_file: Some(file) });
                }
                // The previous owner of the lock has removed this lock file, so other processes
                // would lock a new one: try again.
                Ok(()) | Err(TryLockError::WouldBlock) => {}
                // If the file system has no locks, the file is changed without a lock, as cargo
                // does.
                Err(TryLockError::Error(cause))
                    if cause.kind() == std::io::ErrorKind::Unsupported =>
                {
                    return Ok(Self { lock_file_path: at, _locked_file: None });
                }
                Err(TryLockError::Error(cause)) => return Err(io(cause)),
            }
            if started.elapsed() > timeout {
                let (path, lock) = (path.to_owned(), at);
                return Err(RecordFileError::LockTimeout {
                    record_path: path,
                    lock_path: lock,
                    waited_s: timeout.as_secs(),
                });
            }
            std::thread::sleep(FILE_LOCK_RETRY_PAUSE);
        }
    }
}

/// Opens a lock file, and creates it if it does not exist. If git or another program put a symbolic
/// link or a pipe there, the link is not followed and the pipe is not waited for.
///
/// # Errors
/// Fails if the path is not a regular file, or the file cannot be created.
pub fn open_or_create_lock_file(path: &Path) -> std::io::Result<File> {
    let other = |what: &str| {
        std::io::Error::other(format!(
            "{} is no lock file but {what}: remove it",
            path_for_terminal(path)
        ))
    };
    if let Ok(there) = std::fs::symlink_metadata(path) {
        let kind = there.file_type();
        match () {
            () if kind.is_symlink() => return Err(other("a link")),
            () if kind.is_dir() => return Err(other("a folder")),
            () if !kind.is_file() => return Err(other("a device, a pipe or a socket")),
            () => {}
        }
    }
    let mut options = File::options();
    options.create(true).append(true);
    // Another process may have put a symbolic link at the path after the check, so the opened file
    // is checked again.
    use rustix::fs::OFlags;
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, flags.bits() as i32);
    let file = options.open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(other("something else")) }
}

impl Drop for ExclusiveFileLock {
    fn drop(&mut self) {
        // The lock file is removed while this process still holds the lock, so that another
        // process's lock file is never removed.
        let _ = std::fs::remove_file(&self.lock_file_path);
    }
}

/// Returns whether an opened file is still the file at the path.
fn is_open_file_still_at_path(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |facts: std::fs::Metadata| (facts.dev(), facts.ino());
    file.metadata()
        .map(id)
        .ok()
        .is_some_and(|own| std::fs::symlink_metadata(path).is_ok_and(|there| id(there) == own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concurrent_locked_changes_by_many_threads_are_all_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/count.json");
        let add = || {
            for _ in 0..20 {
                let _lock = ExclusiveFileLock::acquire_lock_for_file(&path).unwrap();
                let count: u32 =
                    std::fs::read_to_string(&path).map_or(0, |text| text.parse().unwrap());
                std::thread::yield_now();
                super::super::file::write_text_atomically(&path, &(count + 1).to_string()).unwrap();
            }
        };
        std::thread::scope(|scope| (0..8).for_each(|_| drop(scope.spawn(add))));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "160");
        let left: Vec<_> = std::fs::read_dir(path.parent().unwrap())
            .unwrap()
            .flatten()
            .map(|file| file.file_name())
            .collect();
        assert_eq!(left, ["count.json"]);
    }

    #[test]
    fn a_held_lock_is_waited_for_and_a_timeout_names_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let first = ExclusiveFileLock::acquire_lock_for_file(&path).unwrap();
        let error =
            ExclusiveFileLock::acquire_lock_within(&path, Duration::from_millis(30)).unwrap_err();
        let own = folder.path().join(".a.json.lock");
        assert!(
            matches!(&error, RecordFileError::LockTimeout { record_path: of, lock_path, waited_s: 0 }
                if *of == path && *lock_path == own),
            "{error}"
        );
        drop(first);
        // A lock file left by a killed process does not block the next process.
        std::fs::write(folder.path().join(".a.json.lock"), "").unwrap();
        drop(ExclusiveFileLock::acquire_lock_within(&path, Duration::ZERO).unwrap());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
