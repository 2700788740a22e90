//! The folder of comparisons: one at a time, one place from which both sides are built and run.
//!
//! What is built at another path is another executable (paths are in symbols and panic messages),
//! and where things lie changes times by itself. So each side's folder is moved to `slot` while it
//! is built, and `slot` is a link to it while it runs: identical revisions give identical
//! executables, and files that an executable reads beside its sources are those of its own
//! revision.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::leftovers;
use crate::compare::CompareError;
use crate::gate::paired::Arm;
use kernelgate::record::{file, lock};

/// How often a lock that is held is tried again: a process that is being started holds its parent's
/// files, and with them a lock that the parent has given back, until it runs its own program.
const LOCK_TRIES: u32 = 10;
/// Longest name of a side that is read.
const MAX_LABEL: u64 = 16;
/// Between two tries.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// The folder, locked until it is dropped.
pub struct Folder {
    root: PathBuf,
    _lock: File,
}

impl Folder {
    /// Opens and locks; puts back what an interrupted build left in the slot.
    pub fn open(root: &Path) -> Result<Self, CompareError> {
        std::fs::create_dir_all(root).map_err(|cause| CompareError::io("make", root, cause))?;
        let root = root.canonicalize().map_err(|cause| CompareError::io("open", root, cause))?;
        let path = root.join("lock");
        let lock = lock::open(&path).map_err(|cause| CompareError::io("open", &path, cause))?;
        let mut tried = lock.try_lock();
        for _ in 0..LOCK_TRIES {
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
            Err(TryLockError::Error(cause)) => return Err(CompareError::io("lock", &path, cause)),
        }
        let folder = Self { root, _lock: lock };
        folder.empty_slot()?;
        for arm in [Arm::Base, Arm::Head] {
            let side = folder.side(arm);
            leftovers::make_folder(&side)
                .map_err(|cause| CompareError::io("make", &side, cause))?;
            let label = side.join("side");
            leftovers::remove(&label)
                .and_then(|()| std::fs::write(&label, arm.name()))
                .map_err(|cause| CompareError::io("write", &label, cause))?;
        }
        Ok(folder)
    }

    /// Where a side lies while it is not in the slot.
    pub fn side(&self, arm: Arm) -> PathBuf {
        self.root.join(arm.name())
    }

    /// The one place.
    pub fn slot(&self) -> PathBuf {
        self.root.join("slot")
    }

    /// A file of the comparison itself.
    pub fn file(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Runs something with the side's folder in the slot.
    pub fn in_slot<T>(
        &self,
        arm: Arm,
        run: impl FnOnce(&Path) -> Result<T, CompareError>,
    ) -> Result<T, CompareError> {
        self.empty_slot()?;
        let (side, slot) = (self.side(arm), self.slot());
        std::fs::rename(&side, &slot).map_err(|cause| CompareError::io("move", &side, cause))?;
        let outcome = run(&slot);
        std::fs::rename(&slot, &side).map_err(|cause| CompareError::io("move", &slot, cause))?;
        outcome
    }

    /// Makes the slot a link to the side, at once; returns the slot.
    pub fn point_slot(&self, arm: Arm) -> Result<PathBuf, CompareError> {
        #[cfg(unix)]
        {
            let fresh = self.root.join("slot.new");
            let linked = leftovers::remove(&fresh)
                .and_then(|()| std::os::unix::fs::symlink(arm.name(), &fresh))
                .and_then(|()| std::fs::rename(&fresh, self.slot()));
            linked.map_err(|cause| CompareError::io("link", &self.slot(), cause))?;
            Ok(self.slot())
        }
        #[cfg(not(unix))]
        Ok(self.side(arm))
    }

    fn empty_slot(&self) -> Result<(), CompareError> {
        let slot = self.slot();
        let Ok(found) = std::fs::symlink_metadata(&slot) else { return Ok(()) };
        let emptied = if found.is_dir() {
            // A build was cut off: its folder says whose it is.
            match file::text_of(&slot.join("side"), MAX_LABEL) {
                Ok(side)
                    if ["base", "head"].contains(&side.as_str())
                        && !self.root.join(&side).join("side").exists() =>
                {
                    let place = self.root.join(&side);
                    leftovers::remove(&place).and_then(|()| std::fs::rename(&slot, place))
                }
                _ => leftovers::remove(&slot),
            }
        } else {
            leftovers::remove(&slot)
        };
        emptied.map_err(|cause| CompareError::io("empty", &slot, cause))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slot_is_one_side_at_a_time_and_survives_an_interrupted_build() {
        let root = tempfile::tempdir().unwrap();
        let folder = Folder::open(root.path()).unwrap();
        assert!(
            Folder::open(root.path())
                .is_err_and(|error| error.to_string().contains("another comparison runs"))
        );
        let mark = |slot: &Path| {
            std::fs::write(slot.join("mark"), "b")
                .map_err(|cause| CompareError::io("write", slot, cause))
        };
        folder.in_slot(Arm::Base, mark).unwrap();
        assert!(folder.side(Arm::Base).join("mark").exists());
        let slot = folder.point_slot(Arm::Base).unwrap();
        assert!(slot.join("mark").exists());
        assert!(!folder.point_slot(Arm::Head).unwrap().join("mark").exists());
        drop(folder);
        std::fs::remove_file(root.path().join("slot")).unwrap();
        std::fs::rename(root.path().join("base"), root.path().join("slot")).unwrap();
        let folder = Folder::open(root.path()).unwrap();
        assert!(folder.side(Arm::Base).join("mark").exists() && !folder.slot().exists());
    }

    #[cfg(unix)]
    #[test]
    fn files_of_others_at_its_paths_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (root, outside) = (folder.path().join("compare"), folder.path().join("outside"));
        std::fs::write(&outside, "x").unwrap();
        std::fs::create_dir_all(root.join("slot")).unwrap();
        std::fs::create_dir_all(root.join("slot.new/deep")).unwrap();
        std::fs::create_dir_all(root.join("base")).unwrap();
        let pipe = |path: &Path| {
            let made = std::process::Command::new("mkfifo").arg(path).status();
            assert!(made.unwrap().success());
        };
        pipe(&root.join("slot/side"));
        pipe(&root.join("base/side"));
        std::os::unix::fs::symlink(&outside, root.join("head")).unwrap();
        let folder = Folder::open(&root).unwrap();
        for arm in [Arm::Base, Arm::Head] {
            let label = folder.point_slot(arm).unwrap().join("side");
            assert_eq!(std::fs::read_to_string(label).unwrap(), arm.name());
        }
        assert_eq!(std::fs::read_to_string(outside).unwrap(), "x");
    }
}
