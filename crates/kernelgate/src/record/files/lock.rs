//! Lets one process at a time read, change and write a file.
//!
//! A single write of a record is atomic (`file::write`). But if two processes read a file before
//! either writes it, one of them loses the changes of the other. Readers need no lock.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::file::RecordFileError;
use super::text::printable_path;

/// How long a writer waits for others, whose turns are milliseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);
/// Between two tries.
const LOCK_RETRY_PAUSE: Duration = Duration::from_millis(10);

/// An exclusive lock on a file, which ends when it is dropped. A thread that holds the lock must
/// not request it again.
#[derive(Debug)]
pub struct FileLock {
    path: PathBuf,
    /// `None` if the file system has no locks.
    _held: Option<File>,
}

impl FileLock {
    /// Waits until no other process or thread changes the file, which may not exist yet.
    ///
    /// The lock is a file beside the locked one, so that all writers find it, whichever checkout
    /// and target folder they have. The lock file is removed afterwards, so that git sees no new
    /// file. The system releases the lock of a process that is killed; the next writer in the
    /// folder removes its file.
    ///
    /// # Errors
    /// Fails if others keep it for a minute, or the lock's file cannot be made.
    pub fn acquire_for_file(path: &Path) -> Result<FileLock, RecordFileError> {
        Self::acquire_within(path, LOCK_TIMEOUT)
    }

    fn acquire_within(path: &Path, timeout: Duration) -> Result<FileLock, RecordFileError> {
        let io = |cause| RecordFileError::Io { action: "lock", path: path.to_owned(), cause };
        let mut name = std::ffi::OsString::from(".");
        name.push(path.file_name().unwrap_or_default());
        name.push(".lock");
        let at = path.with_file_name(name);
        if let Some(folder) = at.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(io)?;
        }
        let started = Instant::now();
        loop {
            let file = open_lock_file(&at).map_err(io)?;
            match file.try_lock() {
                Ok(()) if is_same_open_file(&file, &at) => {
                    return Ok(Self { path: at, _held: Some(file) });
                }
                // The last owner of the lock has removed its file; other processes would lock a new
                // file.
                Ok(()) | Err(TryLockError::WouldBlock) => {}
                // If the file system has no locks, the file is changed without one, as cargo does.
                Err(TryLockError::Error(cause))
                    if cause.kind() == std::io::ErrorKind::Unsupported =>
                {
                    return Ok(Self { path: at, _held: None });
                }
                Err(TryLockError::Error(cause)) => return Err(io(cause)),
            }
            if started.elapsed() > timeout {
                let (path, lock) = (path.to_owned(), at);
                return Err(RecordFileError::Locked { path, lock, waited_s: timeout.as_secs() });
            }
            std::thread::sleep(LOCK_RETRY_PAUSE);
        }
    }
}

/// Opens a lock file and creates it if it does not exist. Git or another program may have put
/// something else there; a symbolic link is not followed and a pipe is not waited for.
///
/// # Errors
/// Fails if the path is not a regular file, or the file cannot be created.
pub fn open_lock_file(path: &Path) -> std::io::Result<File> {
    let other = |what: &str| {
        std::io::Error::other(format!(
            "{} is no lock file but {what}: remove it",
            printable_path(path)
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
    // Another process may have put a link at that path just now.
    use rustix::fs::OFlags;
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, flags.bits() as i32);
    let file = options.open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(other("something else")) }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // The file is removed while it is still locked, so that the lock of another process is
        // never removed.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Whether an open file is the file at a path.
fn is_same_open_file(file: &File, path: &Path) -> bool {
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
    fn concurrent_changes_by_many_threads_are_all_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/count.json");
        let add = || {
            for _ in 0..20 {
                let _lock = FileLock::acquire_for_file(&path).unwrap();
                let count: u32 =
                    std::fs::read_to_string(&path).map_or(0, |text| text.parse().unwrap());
                std::thread::yield_now();
                super::super::file::write_text(&path, &(count + 1).to_string()).unwrap();
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
        let first = FileLock::acquire_for_file(&path).unwrap();
        let error = FileLock::acquire_within(&path, Duration::from_millis(30)).unwrap_err();
        let own = folder.path().join(".a.json.lock");
        assert!(
            matches!(&error, RecordFileError::Locked { path: of, lock, waited_s: 0 }
                if *of == path && *lock == own),
            "{error}"
        );
        drop(first);
        // A lock file left by a killed process does not block the next process.
        std::fs::write(folder.path().join(".a.json.lock"), "").unwrap();
        drop(FileLock::acquire_within(&path, Duration::ZERO).unwrap());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
