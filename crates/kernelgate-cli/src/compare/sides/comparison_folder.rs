//! The locked folder of a comparison: only one comparison uses it at a time, and base and head are
//! built and run at one path in it, the slot.
//!
//! A build at another path gives another executable, because symbols and panic messages contain
//! paths, and file locations alone can change times. Each side's folder is moved to `slot` for its
//! build, and `slot` links to the folder while the side's executables run, so identical revisions
//! give identical executables.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::leftover_files;
use crate::compare::CompareError;
use crate::gate::paired::ComparedArm;
use kernelgate::record::{file, lock};

/// Number of attempts to lock the comparison's folder: between fork and exec, a new process still
/// holds lock files that its parent has released.
const FOLDER_LOCK_ATTEMPTS: u32 = 10;
/// Longest content that is read from the file `side`, which names the side (base or head) in a
/// folder, bytes.
const MAX_SIDE_NAME_FILE_BYTES: u64 = 16;
/// Time between two attempts to lock the comparison's folder.
const FOLDER_LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// The folder of a comparison, which stays locked until this value is dropped.
pub struct LockedComparisonFolder {
    comparison_folder: PathBuf,
    _folder_lock: File,
}

impl LockedComparisonFolder {
    /// Opens and locks the comparison's folder; if an interrupted build left a side's folder in the
    /// slot, it is moved back to its own place.
    pub fn open_and_lock_folder(root: &Path) -> Result<LockedComparisonFolder, CompareError> {
        std::fs::create_dir_all(root).map_err(CompareError::file_error("make", root))?;
        let root = root.canonicalize().map_err(CompareError::file_error("open", root))?;
        let path = root.join("lock");
        let lock = lock::open_or_create_lock_file(&path)
            .map_err(CompareError::file_error("open", &path))?;
        let mut tried = lock.try_lock();
        for _ in 0..FOLDER_LOCK_ATTEMPTS {
            if !matches!(tried, Err(TryLockError::WouldBlock)) {
                break;
            }
            std::thread::sleep(FOLDER_LOCK_RETRY_INTERVAL);
            tried = lock.try_lock();
        }
        match tried {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(CompareError::ComparisonFolderBusy(root));
            }
            Err(TryLockError::Error(cause)) => {
                return Err(CompareError::file_error("lock", &path)(cause));
            }
        }
        let folder = Self { comparison_folder: root, _folder_lock: lock };
        folder.empty_slot_folder()?;
        for arm in [ComparedArm::BaseBuild, ComparedArm::HeadBuild] {
            let side = folder.side_folder_path(arm);
            leftover_files::make_folder_replacing_file(&side)
                .map_err(CompareError::file_error("make", &side))?;
            let label = side.join("side");
            leftover_files::remove_file_or_folder_if_present(&label)
                .and_then(|()| std::fs::write(&label, arm.arm_name()))
                .map_err(CompareError::file_error("write", &label))?;
        }
        Ok(folder)
    }

    /// Path of the folder of one side (base or head) while it is not in the slot.
    pub fn side_folder_path(&self, arm: ComparedArm) -> PathBuf {
        self.comparison_folder.join(arm.arm_name())
    }

    /// Path of the slot, at which the executables of both sides are built and run, one side at a
    /// time.
    pub fn slot_folder_path(&self) -> PathBuf {
        self.comparison_folder.join("slot")
    }

    /// Returns the path of a file with this name in the comparison's folder.
    pub fn path_of_file(&self, name: &str) -> PathBuf {
        self.comparison_folder.join(name)
    }

    /// Moves a side's folder to the slot, runs a function, and moves the folder back.
    pub fn run_with_side_in_slot<T>(
        &self,
        arm: ComparedArm,
        run: impl FnOnce(&Path) -> Result<T, CompareError>,
    ) -> Result<T, CompareError> {
        self.empty_slot_folder()?;
        let (side, slot) = (self.side_folder_path(arm), self.slot_folder_path());
        std::fs::rename(&side, &slot).map_err(CompareError::file_error("move", &side))?;
        let outcome = run(&slot);
        std::fs::rename(&slot, &side).map_err(CompareError::file_error("move", &slot))?;
        outcome
    }

    /// Atomically makes the slot a symbolic link to a side's folder, and returns the slot's path.
    pub fn link_slot_to_side(&self, arm: ComparedArm) -> Result<PathBuf, CompareError> {
        let fresh = self.comparison_folder.join("slot.new");
        let linked = leftover_files::remove_file_or_folder_if_present(&fresh)
            .and_then(|()| std::os::unix::fs::symlink(arm.arm_name(), &fresh))
            .and_then(|()| std::fs::rename(&fresh, self.slot_folder_path()));
        linked.map_err(CompareError::file_error("link", &self.slot_folder_path()))?;
        Ok(self.slot_folder_path())
    }

    fn empty_slot_folder(&self) -> Result<(), CompareError> {
        let slot = self.slot_folder_path();
        let Ok(found) = std::fs::symlink_metadata(&slot) else { return Ok(()) };
        let emptied = if found.is_dir() {
            // The file `side` in the folder that an interrupted build left in the slot names the
            // side (base or head) to which the folder belongs.
            match file::read_untrusted_text_up_to(&slot.join("side"), MAX_SIDE_NAME_FILE_BYTES) {
                Ok(side)
                    if ["base", "head"].contains(&side.as_str())
                        && !self.comparison_folder.join(&side).join("side").exists() =>
                {
                    let place = self.comparison_folder.join(&side);
                    leftover_files::remove_file_or_folder_if_present(&place)
                        .and_then(|()| std::fs::rename(&slot, place))
                }
                _ => leftover_files::remove_file_or_folder_if_present(&slot),
            }
        } else {
            leftover_files::remove_file_or_folder_if_present(&slot)
        };
        emptied.map_err(CompareError::file_error("empty", &slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slot_links_to_one_side_at_a_time_even_after_an_interrupted_build() {
        let root = tempfile::tempdir().unwrap();
        let folder = LockedComparisonFolder::open_and_lock_folder(root.path()).unwrap();
        let busy =
            LockedComparisonFolder::open_and_lock_folder(root.path()).err().unwrap().to_string();
        insta::assert_snapshot!(busy.replace(root.path().to_str().unwrap(), "FOLDER"), @"another comparison runs in FOLDER: wait for it");
        let mark = |slot: &Path| {
            std::fs::write(slot.join("mark"), "b").map_err(CompareError::file_error("write", slot))
        };
        folder.run_with_side_in_slot(ComparedArm::BaseBuild, mark).unwrap();
        assert!(folder.side_folder_path(ComparedArm::BaseBuild).join("mark").exists());
        let slot = folder.link_slot_to_side(ComparedArm::BaseBuild).unwrap();
        assert!(slot.join("mark").exists());
        assert!(!folder.link_slot_to_side(ComparedArm::HeadBuild).unwrap().join("mark").exists());
        drop(folder);
        std::fs::remove_file(root.path().join("slot")).unwrap();
        std::fs::rename(root.path().join("base"), root.path().join("slot")).unwrap();
        let folder = LockedComparisonFolder::open_and_lock_folder(root.path()).unwrap();
        assert!(
            folder.side_folder_path(ComparedArm::BaseBuild).join("mark").exists()
                && !folder.slot_folder_path().exists()
        );
    }

    #[test]
    fn foreign_files_at_paths_of_the_comparison_folder_are_removed() {
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
        let folder = LockedComparisonFolder::open_and_lock_folder(&root).unwrap();
        for arm in [ComparedArm::BaseBuild, ComparedArm::HeadBuild] {
            let label = folder.link_slot_to_side(arm).unwrap().join("side");
            assert_eq!(std::fs::read_to_string(label).unwrap(), arm.arm_name());
        }
        assert_eq!(std::fs::read_to_string(outside).unwrap(), "x");
    }
}
