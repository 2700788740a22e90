//! The folder of comparisons: one comparison at a time, and one path at which both sides are built
//! and run.
//!
//! A build at another path gives another executable (paths are in symbols and panic messages), and
//! the place of files by itself changes times. So each side's folder is moved to `slot` while it is
//! built, and `slot` is a link to it while it runs: identical revisions give identical executables,
//! and an executable reads the files of its own revision.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::leftover_files;
use crate::compare::CompareError;
use crate::gate::paired::Arm;
use kernelgate::record::{file, lock};

/// Number of attempts at a lock that is held: a process that is being started holds its parent's
/// files, and with them a lock that the parent has released, until it runs its own program.
const LOCK_ATTEMPTS: u32 = 10;
/// Longest name of a side in the file `side`, bytes.
const MAX_SIDE_LABEL_BYTES: u64 = 16;
/// Time between two attempts.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// The folder of a comparison, locked until this value is dropped.
pub struct LockedFolder {
    root: PathBuf,
    _lock: File,
}

impl LockedFolder {
    /// Opens and locks the folder; moves a side that an interrupted build left in the slot back to
    /// its place.
    pub fn open_and_lock(root: &Path) -> Result<LockedFolder, CompareError> {
        std::fs::create_dir_all(root).map_err(CompareError::io("make", root))?;
        let root = root.canonicalize().map_err(CompareError::io("open", root))?;
        let path = root.join("lock");
        let lock = lock::open_lock_file(&path).map_err(CompareError::io("open", &path))?;
        let mut tried = lock.try_lock();
        for _ in 0..LOCK_ATTEMPTS {
            if !matches!(tried, Err(TryLockError::WouldBlock)) {
                break;
            }
            std::thread::sleep(LOCK_PAUSE);
            tried = lock.try_lock();
        }
        match tried {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(CompareError::Busy(root));
            }
            Err(TryLockError::Error(cause)) => return Err(CompareError::io("lock", &path)(cause)),
        }
        let folder = Self { root, _lock: lock };
        folder.empty_slot()?;
        for arm in [Arm::Base, Arm::Head] {
            let side = folder.side_folder_path(arm);
            leftover_files::make_folder(&side).map_err(CompareError::io("make", &side))?;
            let label = side.join("side");
            leftover_files::remove_path(&label)
                .and_then(|()| std::fs::write(&label, arm.name()))
                .map_err(CompareError::io("write", &label))?;
        }
        Ok(folder)
    }

    /// Folder of a side while it is not in the slot.
    pub fn side_folder_path(&self, arm: Arm) -> PathBuf {
        self.root.join(arm.name())
    }

    /// The path at which both sides are built and run.
    pub fn slot_folder_path(&self) -> PathBuf {
        self.root.join("slot")
    }

    /// Path of a file in the comparison's folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Runs a function with the side's folder in the slot.
    pub fn run_in_slot<T>(
        &self,
        arm: Arm,
        run: impl FnOnce(&Path) -> Result<T, CompareError>,
    ) -> Result<T, CompareError> {
        self.empty_slot()?;
        let (side, slot) = (self.side_folder_path(arm), self.slot_folder_path());
        std::fs::rename(&side, &slot).map_err(CompareError::io("move", &side))?;
        let outcome = run(&slot);
        std::fs::rename(&slot, &side).map_err(CompareError::io("move", &slot))?;
        outcome
    }

    /// Makes the slot a link to the folder of a side, in one atomic step, and returns the slot's
    /// path.
    pub fn link_slot_to_side(&self, arm: Arm) -> Result<PathBuf, CompareError> {
        let fresh = self.root.join("slot.new");
        let linked = leftover_files::remove_path(&fresh)
            .and_then(|()| std::os::unix::fs::symlink(arm.name(), &fresh))
            .and_then(|()| std::fs::rename(&fresh, self.slot_folder_path()));
        linked.map_err(CompareError::io("link", &self.slot_folder_path()))?;
        Ok(self.slot_folder_path())
    }

    fn empty_slot(&self) -> Result<(), CompareError> {
        let slot = self.slot_folder_path();
        let Ok(found) = std::fs::symlink_metadata(&slot) else { return Ok(()) };
        let emptied = if found.is_dir() {
            // The file in the folder of an interrupted build names the side.
            match file::read_untrusted_text(&slot.join("side"), MAX_SIDE_LABEL_BYTES) {
                Ok(side)
                    if ["base", "head"].contains(&side.as_str())
                        && !self.root.join(&side).join("side").exists() =>
                {
                    let place = self.root.join(&side);
                    leftover_files::remove_path(&place).and_then(|()| std::fs::rename(&slot, place))
                }
                _ => leftover_files::remove_path(&slot),
            }
        } else {
            leftover_files::remove_path(&slot)
        };
        emptied.map_err(CompareError::io("empty", &slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slot_links_to_one_side_at_a_time_even_after_an_interrupted_build() {
        let root = tempfile::tempdir().unwrap();
        let folder = LockedFolder::open_and_lock(root.path()).unwrap();
        let busy = LockedFolder::open_and_lock(root.path()).err().unwrap().to_string();
        insta::assert_snapshot!(busy.replace(root.path().to_str().unwrap(), "FOLDER"), @"another comparison runs in FOLDER: wait for it");
        let mark = |slot: &Path| {
            std::fs::write(slot.join("mark"), "b").map_err(CompareError::io("write", slot))
        };
        folder.run_in_slot(Arm::Base, mark).unwrap();
        assert!(folder.side_folder_path(Arm::Base).join("mark").exists());
        let slot = folder.link_slot_to_side(Arm::Base).unwrap();
        assert!(slot.join("mark").exists());
        assert!(!folder.link_slot_to_side(Arm::Head).unwrap().join("mark").exists());
        drop(folder);
        std::fs::remove_file(root.path().join("slot")).unwrap();
        std::fs::rename(root.path().join("base"), root.path().join("slot")).unwrap();
        let folder = LockedFolder::open_and_lock(root.path()).unwrap();
        assert!(
            folder.side_folder_path(Arm::Base).join("mark").exists()
                && !folder.slot_folder_path().exists()
        );
    }

    #[test]
    fn foreign_files_at_the_paths_of_a_comparison_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (root, outside) = (folder.path().join("compare"), folder.path().join("outside"));
        std::fs::write(&outside, "x").unwrap();
        std::fs::create_dir_all(root.join("slot")).unwrap();
        std::fs::create_dir_all(root.join("slot.new/deep")).unwrap();
        std::fs::create_dir_all(root.join("base")).unwrap();
        let make_pipe = |path: &Path| {
            let status = std::process::Command::new("mkfifo").arg(path).status();
            assert!(status.unwrap().success());
        };
        make_pipe(&root.join("slot/side"));
        make_pipe(&root.join("base/side"));
        std::os::unix::fs::symlink(&outside, root.join("head")).unwrap();
        let folder = LockedFolder::open_and_lock(&root).unwrap();
        for arm in [Arm::Base, Arm::Head] {
            let label = folder.link_slot_to_side(arm).unwrap().join("side");
            assert_eq!(std::fs::read_to_string(label).unwrap(), arm.name());
        }
        assert_eq!(std::fs::read_to_string(outside).unwrap(), "x");
    }
}
