//! Writes a set of files that belong together and replace the files of an earlier set together.
//!
//! A set of files is first written into a temporary folder. If the folder of the earlier set
//! contains only files, both folders are exchanged in one step: a process that is killed leaves the
//! old set or the new one, never a mixture. If the folders cannot be exchanged, the files are
//! renamed one by one, once all of them are on the disk.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};

use super::file::{RecordFileError, remove_abandoned_files, temporary_folder, write_synced};

/// A set of files that is being written.
#[derive(Debug)]
pub struct PreparedFileSet {
    folder: PathBuf,
    fresh: tempfile::TempDir,
    /// Shows other writers that the temporary folder is in use.
    _held: Option<File>,
}

impl PreparedFileSet {
    /// Starts a set for a folder, which is created if it is missing.
    ///
    /// # Errors
    /// Fails if the folder cannot be made or written.
    pub fn new(folder: &Path) -> Result<Self, RecordFileError> {
        let io = |cause| RecordFileError::Io { action: "write", path: folder.to_owned(), cause };
        std::fs::create_dir_all(folder).map_err(io)?;
        let folder = folder.canonicalize().map_err(io)?;
        remove_abandoned_files(&folder);
        let beside = folder.parent().map(temporary_folder);
        let (fresh, held) = match beside {
            Some(Ok(fresh)) => fresh,
            _ => temporary_folder(&folder).map_err(io)?,
        };
        Ok(Self { folder, fresh, _held: held })
    }

    /// The temporary folder, for files that are not synced to the disk.
    pub fn path(&self) -> &Path {
        self.fresh.path()
    }

    /// Adds a file, synced to the disk.
    ///
    /// # Errors
    /// Fails if the file cannot be written. After an error the earlier set of files is unchanged.
    pub fn add(&self, name: &str, content: impl AsRef<[u8]>) -> Result<(), RecordFileError> {
        let file = File::create(self.path().join(name));
        let path = self.folder.join(name);
        file.and_then(|file| write_synced(&file, content)).map_err(|cause| RecordFileError::Io {
            action: "write",
            path,
            cause,
        })
    }

    /// Replaces the earlier set. `absent` are names that an earlier set may have and this one has
    /// not; other files of the folder stay.
    ///
    /// # Errors
    /// Fails if a file cannot be replaced.
    pub fn replace_file_set(self, absent: &[&str]) -> Result<(), RecordFileError> {
        let io = |path: &Path, cause| RecordFileError::Io {
            action: "write",
            path: path.to_owned(),
            cause,
        };
        let fresh = folder_names(self.path()).map_err(|cause| io(self.path(), cause))?;
        for name in &fresh {
            let path = self.folder.join(name);
            if path.is_dir() && !self.path().join(name).is_dir() {
                return Err(io(&path, std::io::ErrorKind::IsADirectory.into()));
            }
        }
        if self.exchange_folders(&fresh, absent).is_ok() {
            return Ok(());
        }
        for name in &fresh {
            let (from, to) = (self.path().join(name), self.folder.join(name));
            if from.is_dir() && to.is_dir() {
                std::fs::remove_dir_all(&to).map_err(|cause| io(&to, cause))?;
            }
            std::fs::rename(&from, &to).map_err(|cause| io(&to, cause))?;
        }
        let removed = |path: PathBuf| match std::fs::remove_file(&path) {
            Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => Err(io(&path, cause)),
            _ => Ok(()),
        };
        absent.iter().try_for_each(|name| removed(self.folder.join(name)))
    }

    /// Exchanges the new folder with the old one, after it got links to the other files of the old
    /// folder.
    fn exchange_folders(&self, fresh: &[OsString], absent: &[&str]) -> std::io::Result<()> {
        #[cfg(any(target_os = "linux", target_os = "macos"))]
        {
            use rustix::fs::{CWD, RenameFlags, renameat_with};
            use std::os::unix::fs::MetadataExt as _;
            let facts = std::fs::metadata(&self.folder)?;
            let own = std::fs::metadata(self.path())?;
            let same_owner = (facts.uid(), facts.gid()) == (own.uid(), own.gid());
            // Folders are not exchanged if a process works in the old one, such as a shell, which
            // would stay in it.
            let in_use =
                Path::new(".").canonicalize().is_ok_and(|here| here.starts_with(&self.folder));
            if !same_owner || in_use || self.path().starts_with(&self.folder) {
                return Err(std::io::ErrorKind::Unsupported.into());
            }
            let is_other = |name: &OsString| {
                !fresh.contains(name) && absent.iter().all(|absent| name != absent)
            };
            for name in folder_names(&self.folder)?.into_iter().filter(is_other) {
                let from = self.folder.join(&name);
                if !std::fs::symlink_metadata(&from)?.is_file() {
                    return Err(std::io::ErrorKind::Unsupported.into());
                }
                std::fs::hard_link(&from, self.path().join(&name))?;
            }
            std::fs::set_permissions(self.path(), facts.permissions())?;
            renameat_with(CWD, self.path(), CWD, &self.folder, RenameFlags::EXCHANGE)?;
            // Another process may have created a file in the new folder.
            for name in folder_names(self.path()).into_iter().flatten().filter(is_other) {
                let to = self.folder.join(&name);
                if !to.exists() {
                    let _ = std::fs::rename(self.path().join(&name), to);
                }
            }
            Ok(())
        }
        #[cfg(not(any(target_os = "linux", target_os = "macos")))]
        {
            let _ = (fresh, absent);
            Err(std::io::ErrorKind::Unsupported.into())
        }
    }
}

/// Names of the entries of a folder.
fn folder_names(folder: &Path) -> std::io::Result<Vec<OsString>> {
    std::fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.file_name())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, content: &str, absent: &[&str]) -> Result<(), RecordFileError> {
        let set = PreparedFileSet::new(folder)?;
        set.add("a", content)?;
        set.add("b", content)?;
        set.replace_file_set(absent)
    }

    fn file_text(path: PathBuf) -> String {
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn a_new_set_replaces_the_earlier_files_and_keeps_foreign_files() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("out");
        for (content, inner) in [("one", false), ("two", false), ("three", true)] {
            if inner {
                std::fs::create_dir(folder.join("folder")).unwrap();
            }
            write(&folder, content, &["stale"]).unwrap();
            assert_eq!(
                [file_text(folder.join("a")), file_text(folder.join("b"))],
                [content, content]
            );
            assert!(!folder.join("stale").exists() && folder.join("folder").exists() == inner);
            std::fs::write(folder.join("stale"), "x").unwrap();
            std::fs::write(folder.join("other"), "y").unwrap();
        }
        assert_eq!(file_text(folder.join("other")), "y");
        assert_eq!(folder_names(parent.path()).unwrap(), ["out"], "no temporary folder is left");
    }

    #[test]
    fn a_set_that_cannot_be_written_leaves_the_folder_unchanged() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("out");
        write(&folder, "one", &[]).unwrap();
        std::fs::create_dir(folder.join("c")).unwrap();
        let set = PreparedFileSet::new(&folder).unwrap();
        set.add("a", "two").unwrap();
        set.add("c", "two").unwrap();
        let why = set.replace_file_set(&["b"]).unwrap_err().to_string();
        assert!(why.contains("/c: is a directory"), "{why}");
        assert_eq!([file_text(folder.join("a")), file_text(folder.join("b"))], ["one", "one"]);
        std::fs::write(parent.path().join("file"), "x").unwrap();
        assert!(PreparedFileSet::new(&parent.path().join("file")).is_err());
    }

    #[test]
    fn replacing_a_set_keeps_the_folders_permissions() {
        use std::os::unix::fs::PermissionsExt as _;
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("out");
        write(&folder, "one", &[]).unwrap();
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o750)).unwrap();
        write(&folder, "two", &[]).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder), 0o750);
        let fresh = parent.path().join("fresh");
        File::create(&fresh).unwrap();
        assert_eq!(mode(&folder.join("a")), mode(&fresh), "as the umask says");
    }
}
