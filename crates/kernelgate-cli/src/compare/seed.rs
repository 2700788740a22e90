//! A first build of the head that starts from the base's target folder, so that dependencies are
//! built once.

use std::path::Path;
use std::time::SystemTime;

/// Copies `from/target` to `to/target`, times of change kept, where there is none yet; the sources
/// of `to` then count as changed just now, because what was copied was built from other sources.
///
/// # Errors
/// When a file cannot be copied: the caller then builds from nothing.
pub fn seed(from: &Path, to: &Path) -> std::io::Result<()> {
    let (built, fresh) = (from.join("target"), to.join("target"));
    if fresh.exists() || !built.is_dir() {
        return Ok(());
    }
    // Under another name until it is whole.
    let partial = to.join("target.partial");
    if partial.exists() {
        std::fs::remove_dir_all(&partial)?;
    }
    copy(&built, &partial)?;
    touch(&to.join("src"), SystemTime::now())?;
    std::fs::rename(partial, fresh)
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let (path, at, kind) = (entry.path(), to.join(entry.file_name()), entry.file_type()?);
        if kind.is_dir() {
            copy(&path, &at)?;
        } else if kind.is_file() {
            std::fs::copy(&path, &at)?;
            let modified = entry.metadata()?.modified()?;
            std::fs::File::open(&at)?.set_modified(modified)?;
        }
    }
    Ok(())
}

fn touch(folder: &Path, now: SystemTime) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        if kind.is_dir() && entry.file_name() != ".git" {
            touch(&path, now)?;
        } else if kind.is_file() {
            std::fs::File::open(&path)?.set_modified(now)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_target_folder_is_copied_once_with_its_times_and_sources_are_newer() {
        let root = tempfile::tempdir().unwrap();
        let (from, to) = (root.path().join("base"), root.path().join("head"));
        std::fs::create_dir_all(from.join("target/release")).unwrap();
        std::fs::create_dir_all(to.join("src/src")).unwrap();
        let (built, source) = (from.join("target/release/x"), to.join("src/src/lib.rs"));
        let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        for path in [&built, &source] {
            std::fs::write(path, "1").unwrap();
            std::fs::File::options().write(true).open(path).unwrap().set_modified(old).unwrap();
        }
        seed(&from, &to).unwrap();
        let modified = |path: &Path| std::fs::metadata(path).unwrap().modified().unwrap();
        assert_eq!(modified(&to.join("target/release/x")), old);
        assert!(modified(&source) > old);
        std::fs::write(&built, "2").unwrap();
        seed(&from, &to).unwrap();
        assert_eq!(
            std::fs::read_to_string(to.join("target/release/x")).unwrap(),
            "1",
            "a target folder that is there stays"
        );
    }
}
