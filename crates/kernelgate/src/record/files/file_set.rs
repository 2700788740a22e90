//! Writes a set of files that belong together, so that all files of an earlier set are replaced
//! together.
//!
//! The new files are first written into a temporary folder. If the earlier set's folder contains
//! only files, it is exchanged with the temporary folder in one step, so that a killed process
//! never leaves a mixture. If the folders cannot be exchanged, the new files are renamed one by
//! one, after all of them are on the disk.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};

use super::file::{
    RecordFileError, create_temporary_folder_in, remove_files_of_dead_writers, write_and_sync_file,
};

/// A set of files in a temporary folder that shall replace the files of an earlier set.
#[derive(Debug)]
pub struct ReplacementFileSet {
    destination_folder: PathBuf,
    new_folder: tempfile::TempDir,
    /// Locked open folder, which shows other writers that this process uses the temporary folder.
    _locked_folder: Option<File>,
}

impl ReplacementFileSet {
    /// Begins a set of files for a folder, which is created if it is missing.
    ///
    /// # Errors
    /// Fails if the folder cannot be made or written.
    pub fn begin_file_set_for_folder(folder: &Path) -> Result<Self, RecordFileError> {
        let io = |cause| RecordFileError::Io {
            failed_operation: "write",
            record_path: folder.to_owned(),
            cause,
        };
        std::fs::create_dir_all(folder).map_err(io)?;
        let folder = folder.canonicalize().map_err(io)?;
        remove_files_of_dead_writers(&folder);
        let beside = folder.parent().map(create_temporary_folder_in);
        let (fresh, held) = match beside {
            Some(Ok(fresh)) => fresh,
            _ => create_temporary_folder_in(&folder).map_err(io)?,
        };
        Ok(Self { destination_folder: folder, new_folder: fresh, _locked_folder: held })
    }

    /// Returns the temporary folder, in which the caller may write files that need no sync to the
    /// disk.
    pub fn temporary_folder_of_set(&self) -> &Path {
        self.new_folder.path()
    }

    /// Adds a file to the set, synced to the disk.
    ///
    /// # Errors
    /// Fails if the file cannot be written. If adding a file fails, the earlier set of files is
    /// unchanged.
    pub fn add_synced_file(
        &self,
        name: &str,
        content: impl AsRef<[u8]>,
    ) -> Result<(), RecordFileError> {
        let file = File::create(self.temporary_folder_of_set().join(name));
        let path = self.destination_folder.join(name);
        file.and_then(|file| write_and_sync_file(&file, content)).map_err(|cause| {
            RecordFileError::Io { failed_operation: "write", record_path: path, cause }
        })
    }

    /// Replaces the earlier set by this one; files named in `absent` are removed, all other files
    /// of the folder stay.
    ///
    /// # Errors
    /// Fails if a file cannot be replaced.
    pub fn replace_earlier_set(self, absent: &[&str]) -> Result<(), RecordFileError> {
        let io = |path: &Path, cause| RecordFileError::Io {
            failed_operation: "write",
            record_path: path.to_owned(),
            cause,
        };
        let fresh = entry_names_of_folder(self.temporary_folder_of_set())
            .map_err(|cause| io(self.temporary_folder_of_set(), cause))?;
        for name in &fresh {
            let path = self.destination_folder.join(name);
            if path.is_dir() && !self.temporary_folder_of_set().join(name).is_dir() {
                return Err(io(&path, std::io::ErrorKind::IsADirectory.into()));
            }
        }
        if self.exchange_with_earlier_folder(&fresh, absent).is_ok() {
            return Ok(());
        }
        for name in &fresh {
            let (from, to) =
                (self.temporary_folder_of_set().join(name), self.destination_folder.join(name));
            if from.is_dir() && to.is_dir() {
                std::fs::remove_dir_all(&to).map_err(|cause| io(&to, cause))?;
            }
            std::fs::rename(&from, &to).map_err(|cause| io(&to, cause))?;
        }
        let removed = |path: PathBuf| match std::fs::remove_file(&path) {
            Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => Err(io(&path, cause)),
            _ => Ok(()),
        };
        absent.iter().try_for_each(|name| removed(self.destination_folder.join(name)))
    }

    /// Exchanges the temporary folder with the earlier set's folder, after linking the latter's
    /// other files into the temporary folder.
    fn exchange_with_earlier_folder(
        &self,
        fresh: &[OsString],
        absent: &[&str],
    ) -> std::io::Result<()> {
        #[cfg(any(target_os = "linux", target_os = "macos"))]
        {
            use rustix::fs::{CWD, RenameFlags, renameat_with};
            use std::os::unix::fs::MetadataExt as _;
            let facts = std::fs::metadata(&self.destination_folder)?;
            let own = std::fs::metadata(self.temporary_folder_of_set())?;
            let same_owner = (facts.uid(), facts.gid()) == (own.uid(), own.gid());
            // The folders are not exchanged if a process, such as a shell, has the old folder as
            // its working directory, because that process would stay in the old folder.
            let in_use = Path::new(".")
                .canonicalize()
                .is_ok_and(|here| here.starts_with(&self.destination_folder));
            if !same_owner
                || in_use
                || self.temporary_folder_of_set().starts_with(&self.destination_folder)
            {
                return Err(std::io::ErrorKind::Unsupported.into());
            }
            let is_other = |name: &OsString| {
                !fresh.contains(name) && absent.iter().all(|absent| name != absent)
            };
            for name in
                entry_names_of_folder(&self.destination_folder)?.into_iter().filter(is_other)
            {
                let from = self.destination_folder.join(&name);
                if !std::fs::symlink_metadata(&from)?.is_file() {
                    return Err(std::io::ErrorKind::Unsupported.into());
                }
                std::fs::hard_link(&from, self.temporary_folder_of_set().join(&name))?;
            }
            std::fs::set_permissions(self.temporary_folder_of_set(), facts.permissions())?;
            renameat_with(
                CWD,
                self.temporary_folder_of_set(),
                CWD,
                &self.destination_folder,
                RenameFlags::EXCHANGE,
            )?;
            // Meanwhile another process may have created a file in the old folder; such a file is
            // moved into the new folder.
            for name in entry_names_of_folder(self.temporary_folder_of_set())
                .into_iter()
                .flatten()
                .filter(is_other)
            {
                let to = self.destination_folder.join(&name);
                if !to.exists() {
                    let _ = std::fs::rename(self.temporary_folder_of_set().join(&name), to);
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

/// Returns the names of the entries of a folder.
fn entry_names_of_folder(folder: &Path) -> std::io::Result<Vec<OsString>> {
    std::fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.file_name())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_set_with_one_file(
        folder: &Path,
        content: &str,
        absent: &[&str],
    ) -> Result<(), RecordFileError> {
        let set = ReplacementFileSet::begin_file_set_for_folder(folder)?;
        set.add_synced_file("a", content)?;
        set.add_synced_file("b", content)?;
        set.replace_earlier_set(absent)
    }

    fn text_of_file(path: PathBuf) -> String {
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn a_new_file_set_replaces_earlier_files_and_keeps_others() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("out");
        for (content, inner) in [("one", false), ("two", false), ("three", true)] {
            if inner {
                std::fs::create_dir(folder.join("folder")).unwrap();
            }
            write_set_with_one_file(&folder, content, &["stale"]).unwrap();
            assert_eq!(
                [text_of_file(folder.join("a")), text_of_file(folder.join("b"))],
                [content, content]
            );
            assert!(!folder.join("stale").exists() && folder.join("folder").exists() == inner);
            std::fs::write(folder.join("stale"), "x").unwrap();
            std::fs::write(folder.join("other"), "y").unwrap();
        }
        assert_eq!(text_of_file(folder.join("other")), "y");
        assert_eq!(
            entry_names_of_folder(parent.path()).unwrap(),
            ["out"],
            "no temporary folder is left"
        );
    }

    #[test]
    fn an_unwritable_file_set_leaves_the_folder_unchanged() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("out");
        write_set_with_one_file(&folder, "one", &[]).unwrap();
        std::fs::create_dir(folder.join("c")).unwrap();
        let set = ReplacementFileSet::begin_file_set_for_folder(&folder).unwrap();
        set.add_synced_file("a", "two").unwrap();
        set.add_synced_file("c", "two").unwrap();
        let why = set.replace_earlier_set(&["b"]).unwrap_err().to_string();
        assert!(why.contains("/c: is a directory"), "{why}");
        assert_eq!(
            [text_of_file(folder.join("a")), text_of_file(folder.join("b"))],
            ["one", "one"]
        );
        std::fs::write(parent.path().join("file"), "x").unwrap();
        assert!(
            ReplacementFileSet::begin_file_set_for_folder(&parent.path().join("file")).is_err()
        );
    }

    #[test]
    fn replacing_a_file_set_keeps_the_folders_permissions() {
        use std::os::unix::fs::PermissionsExt as _;
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("out");
        write_set_with_one_file(&folder, "one", &[]).unwrap();
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o750)).unwrap();
        write_set_with_one_file(&folder, "two", &[]).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder), 0o750);
        let fresh = parent.path().join("fresh");
        File::create(&fresh).unwrap();
        assert_eq!(mode(&folder.join("a")), mode(&fresh), "as the umask says");
    }
}
