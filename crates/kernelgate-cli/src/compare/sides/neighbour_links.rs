//! Makes files beside the user's repository reachable from a side's copy of it, by links: path
//! dependencies, `[patch]`, `include_str!` or build-script paths may lead out of the repository.
//!
//! A side's copy of the repository lies at `sources/<grandparent>/<parent>/<repository>` below the
//! side's folder; these are the names of the user's own folders. Links beside the copy make
//! `../other` and `../../other` lead to the user's current files, which base and head share. No
//! links are made for paths that lead more than two folders up or for hidden files; cargo finds its
//! configuration files above the target folder without links.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::leftover_files;
use crate::compare::CompareError;

/// Name of the subfolder of a side's folder that holds the copy of the repository and the links
/// beside it.
pub const SIDE_SOURCES_FOLDER: &str = "sources";
/// Files that are not linked beside the copy, because cargo would take them for a workspace around
/// the copied repository.
const CARGO_FILES_NOT_LINKED: [&str; 2] = ["Cargo.toml", "Cargo.lock"];

/// Paths of a side's copy of the repository and of the links beside it.
pub struct CopiedRepositoryPaths {
    repository_root: PathBuf,
    names: [OsString; 3],
}

impl CopiedRepositoryPaths {
    /// Derives the names of the copy's folders from the root folder of the user's repository.
    pub fn for_repository(top: &Path) -> Self {
        let mut above = top.ancestors().map(Path::file_name);
        let mut name = |default: &str| {
            let name = above.next().flatten();
            name.map_or_else(|| default.into(), OsStr::to_owned)
        };
        let (repository, parent) = (name("repository"), name("parent"));
        Self { repository_root: top.to_owned(), names: [name("grandparent"), parent, repository] }
    }

    pub fn repository_copy_folder(&self, side: &Path) -> PathBuf {
        side.join(SIDE_SOURCES_FOLDER).join(self.names.iter().collect::<PathBuf>())
    }

    /// Makes the folder for a side's copy of the repository. A symbolic link on the copy's path is
    /// removed: another repository's comparison with the same target folder may have made the link,
    /// which leads to the user's files.
    pub fn make_repository_copy_folder(&self, side: &Path) -> Result<PathBuf, CompareError> {
        let mut folder = side.join(SIDE_SOURCES_FOLDER);
        for name in [None].into_iter().chain(self.names.iter().map(Some)) {
            folder.extend(name);
            leftover_files::make_folder_replacing_file(&folder)
                .map_err(CompareError::file_error("make", &folder))?;
        }
        Ok(folder)
    }

    /// Links the user's files beside the repository from beside a side's copy, and removes links
    /// whose files are gone.
    pub fn link_files_beside_repository(&self, side: &Path) -> Result<(), CompareError> {
        let copy = self.repository_copy_folder(side);
        let above = |path: &Path, count| path.ancestors().nth(count).map(Path::to_owned);
        for count in [1, 2] {
            let (Some(links), Some(files)) =
                (above(&copy, count), above(&self.repository_root, count))
            else {
                continue;
            };
            let own = above(&self.repository_root, count - 1).unwrap_or_default();
            let linked = link_entries_of_folder(&files, &links, &own, side);
            linked.map_err(CompareError::file_error("link files in", &links))?;
        }
        Ok(())
    }

    /// Returns the folders of packages outside the repository that cargo built for a side, as paths
    /// relative to the repository.
    pub fn packages_outside_repository(
        &self,
        side: &Path,
        manifests: &BTreeSet<PathBuf>,
    ) -> Vec<PathBuf> {
        let copy = self.repository_copy_folder(side);
        let relative = |manifest: &PathBuf| {
            let package = manifest.parent().filter(|package| !package.starts_with(&copy))?;
            (1..=2).find_map(|count| {
                let above = copy.ancestors().nth(count)?;
                let up: PathBuf = std::iter::repeat_n("..", count).collect();
                package.strip_prefix(above).ok().map(|below| up.join(below))
            })
        };
        let packages: BTreeSet<PathBuf> = manifests.iter().filter_map(relative).collect();
        packages.into_iter().collect()
    }
}

fn link_entries_of_folder(
    files: &Path,
    links: &Path,
    own: &Path,
    side: &Path,
) -> std::io::Result<()> {
    std::fs::create_dir_all(links)?;
    for entry in std::fs::read_dir(links)?.flatten() {
        if entry.file_type()?.is_symlink() && !entry.path().exists() {
            std::fs::remove_file(entry.path())?;
        }
    }
    // A folder that cannot be listed is skipped, because the user's own build finds no files in it
    // either.
    for entry in std::fs::read_dir(files).into_iter().flatten().flatten() {
        let (name, file) = (entry.file_name(), entry.path());
        let hidden = name.as_encoded_bytes().starts_with(b".");
        let kind = entry.file_type()?;
        let other = !(kind.is_dir() || kind.is_file() || kind.is_symlink());
        if hidden || other || CARGO_FILES_NOT_LINKED.iter().any(|it| name == *it) {
            continue;
        }
        // No link is made to the repository itself, which is copied, nor to a folder that contains
        // the copy.
        if file != own && !side.starts_with(&file) {
            let link = links.join(name);
            if std::fs::read_link(&link).is_ok_and(|target| target == file) {
                continue;
            }
            // If a folder lies at the link's path, it is the copy of another repository with the
            // same target folder, and is removed.
            leftover_files::remove_file_or_folder_if_present(&link)?;
            std::os::unix::fs::symlink(file, link)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_beside_the_repository_are_found_from_its_copy() {
        let root = tempfile::tempdir().unwrap();
        let top = root.path().join("a/b/own");
        for (file, text) in [
            ("a/b/own/Cargo.toml", "own"),
            ("a/b/other/Cargo.toml", "other"),
            ("a/far/text", "far"),
            ("a/b/.hidden", "hidden"),
            ("a/b/Cargo.toml", "a workspace"),
            ("a/b/text", "beside"),
        ] {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let side = top.join("target/compare/base");
        let surroundings = CopiedRepositoryPaths::for_repository(&top);
        let copy = surroundings.repository_copy_folder(&side);
        assert_eq!(copy, side.join("sources/a/b/own"));
        std::fs::create_dir_all(&copy).unwrap();
        let read = |path: &str| std::fs::read_to_string(copy.join(path)).ok();
        for _ in 0..2 {
            surroundings.link_files_beside_repository(&side).unwrap();
            assert_eq!(read("../other/Cargo.toml").as_deref(), Some("other"));
            assert_eq!(read("../text").as_deref(), Some("beside"));
            assert_eq!(read("../../far/text").as_deref(), Some("far"));
            assert_eq!(read("../../b/text").as_deref(), Some("beside"));
            for absent in ["Cargo.toml", "../own/Cargo.toml", "../Cargo.toml", "../.hidden"] {
                assert_eq!(read(absent), None, "{absent}");
            }
        }
        std::fs::remove_file(root.path().join("a/b/text")).unwrap();
        surroundings.link_files_beside_repository(&side).unwrap();
        assert!(std::fs::symlink_metadata(copy.join("../text")).is_err(), "a link to nothing");
    }

    #[test]
    fn repositories_that_share_a_target_folder_are_never_written_to() {
        let root = tempfile::tempdir().unwrap();
        let side = root.path().join("target/base");
        let text = |path: PathBuf| std::fs::read_to_string(path.join("text")).unwrap();
        let beside = [("a/b/one", "../two"), ("a/b/two", "../one"), ("a/far/three", "../../b/one")];
        let tops = beside.map(|(path, _)| root.path().join(path));
        for top in &tops {
            std::fs::create_dir_all(top).unwrap();
            std::fs::write(top.join("text"), "the user's").unwrap();
        }
        for _ in 0..2 {
            for (top, (_, other)) in tops.iter().zip(beside) {
                let surroundings = CopiedRepositoryPaths::for_repository(top);
                let copy = surroundings.make_repository_copy_folder(&side).unwrap();
                assert_eq!(copy, surroundings.repository_copy_folder(&side));
                std::fs::write(copy.join("text"), "a copy").unwrap();
                surroundings.link_files_beside_repository(&side).unwrap();
                assert_eq!(tops.clone().map(text), ["the user's"; 3]);
                assert_eq!(text(copy.join(other)), "the user's");
            }
        }
    }

    #[test]
    fn packages_outside_the_repository_get_relative_paths() {
        let surroundings = CopiedRepositoryPaths::for_repository(Path::new("/a/b/own"));
        let manifests = ["a/b/own/Cargo.toml", "a/b/x/y/Cargo.toml", "a/z/Cargo.toml"];
        let side = Path::new("/t/slot");
        let below = |path: &&str| side.join(SIDE_SOURCES_FOLDER).join(path);
        let mut manifests: BTreeSet<PathBuf> = manifests.iter().map(below).collect();
        manifests.insert(PathBuf::from("/registry/serde/Cargo.toml"));
        let outside = surroundings.packages_outside_repository(side, &manifests);
        assert_eq!(outside, [PathBuf::from("../../z"), PathBuf::from("../x/y")]);
        let root = CopiedRepositoryPaths::for_repository(Path::new("/own"));
        assert_eq!(root.repository_copy_folder(side), side.join("sources/grandparent/parent/own"));
        root.link_files_beside_repository(&tempfile::tempdir().unwrap().path().join("side"))
            .unwrap();
    }
}
