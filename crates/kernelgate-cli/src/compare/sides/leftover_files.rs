//! Removes what an interrupted comparison or a bench left at the paths that a comparison uses:
//! files, folders, links and FIFOs.

use std::path::Path;

/// Removes a file, symbolic link, FIFO, or folder with its contents; a link's target is not
/// removed. A symbolic link is not followed when it is removed. If nothing exists at the path,
/// removing succeeds.
pub fn remove_file_or_folder_if_present(path: &Path) -> std::io::Result<()> {
    let removed = match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => std::fs::remove_dir_all(path),
        Ok(_) => std::fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Makes a folder if it is missing; a file or link at its path is removed first.
///
/// # Errors
/// Fails if the file or link cannot be removed, or the folder cannot be made.
pub fn make_folder_replacing_file(path: &Path) -> std::io::Result<()> {
    if !std::fs::symlink_metadata(path).is_ok_and(|found| found.is_dir()) {
        remove_file_or_folder_if_present(path)?;
    }
    std::fs::create_dir_all(path)
}

/// Makes a folder if it is missing, and removes all of its contents except the subfolders to keep.
/// Files and links in the folder, and a file or link at the folder's own path, are removed.
pub fn clean_folder_except_subfolders(path: &Path, keep: &[&str]) -> std::io::Result<()> {
    make_folder_replacing_file(path)?;
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        let kept = keep.iter().any(|name| entry.file_name() == *name);
        if !kept || !entry.file_type()?.is_dir() {
            remove_file_or_folder_if_present(&entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftover_files_folders_and_links_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let work = folder.path().join("work");
        std::fs::create_dir_all(work.join("run.json/deep")).unwrap();
        std::fs::create_dir_all(work.join("outputs")).unwrap();
        std::fs::write(work.join("outputs/kept"), "x").unwrap();
        let outside = folder.path().join("outside");
        std::fs::write(&outside, "x").unwrap();
        std::os::unix::fs::symlink(&outside, work.join("link")).unwrap();
        clean_folder_except_subfolders(&work, &["outputs"]).unwrap();
        let left: Vec<_> =
            std::fs::read_dir(&work).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["outputs"]);
        assert!(work.join("outputs/kept").exists() && outside.exists());
    }

    #[test]
    fn a_file_at_the_folders_path_is_replaced_by_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let work = folder.path().join("work");
        std::fs::write(&work, "x").unwrap();
        clean_folder_except_subfolders(&work, &[]).unwrap();
        assert!(work.is_dir());
        remove_file_or_folder_if_present(&work).unwrap();
        remove_file_or_folder_if_present(&work).unwrap();
        assert!(!work.exists());
    }
}
