//! Files that have a library's name but cannot be used.

use std::path::{Path, PathBuf};

use super::library_kind::RequiredLibrary;
use super::opened_library::OpenedLibrary;
use super::search;
use super::version::SUPPORTED_CUDA_MAJORS;

/// Files of the library's names that were found in folders and cannot be loaded, each with the
/// reason, a fragment. Tries to open the library files, and returns those that cannot be opened
/// with the reason.
pub fn unusable_library_files(library: RequiredLibrary) -> Vec<(PathBuf, String)> {
    if library.comes_with_driver() {
        return Vec::new();
    }
    let mut names: Vec<String> =
        SUPPORTED_CUDA_MAJORS.iter().flat_map(|&major| library.file_names(major)).collect();
    names.dedup();
    let mut found: Vec<(PathBuf, String)> = Vec::new();
    for path in search::library_places(&names) {
        if found.iter().any(|(known, _)| *known == path) {
            continue;
        }
        if let Err(why) = try_library_file(library, &path) {
            found.push((path, why));
        }
    }
    found
}

fn try_library_file(library: RequiredLibrary, path: &Path) -> Result<(), String> {
    // The metadata are read from the symbolic link's target.
    match std::fs::metadata(path) {
        Err(_) => return Err("it is a link that leads nowhere".to_owned()),
        Ok(facts) if facts.is_dir() => return Err("it is a folder".to_owned()),
        Ok(_) => {}
    }
    // Some libraries cannot be closed again, so an opened library stays open.
    OpenedLibrary::try_open(library, path).map(std::mem::forget)
}
