//! Finds files that have an NVIDIA library's name but cannot be loaded.

use std::path::{Path, PathBuf};

use super::library_kind::NvidiaLibrary;
use super::opened_library::OpenedLibrary;
use super::search;
use super::version::SUPPORTED_CUDA_MAJORS;

/// Returns the files in searched folders that have the library's name but cannot be loaded, each
/// with the reason as a sentence fragment. The function tries to open each file that it finds.
pub fn library_files_that_cannot_be_loaded(library: NvidiaLibrary) -> Vec<(PathBuf, String)> {
    if library.comes_with_driver_package() {
        return Vec::new();
    }
    let mut names: Vec<String> = SUPPORTED_CUDA_MAJORS
        .iter()
        .flat_map(|&major| library.file_names_for_cuda_major(major))
        .collect();
    names.dedup();
    let mut found: Vec<(PathBuf, String)> = Vec::new();
    for path in search::library_paths_in_all_folders(&names) {
        if found.iter().any(|(known, _)| *known == path) {
            continue;
        }
        if let Err(why) = try_to_open_library_file(library, &path) {
            found.push((path, why));
        }
    }
    found
}

fn try_to_open_library_file(library: NvidiaLibrary, path: &Path) -> Result<(), String> {
    // `metadata` follows a symbolic link, so it fails for a link whose target is missing.
    match std::fs::metadata(path) {
        Err(_) => return Err("it is a link that leads nowhere".to_owned()),
        Ok(facts) if facts.is_dir() => return Err("it is a folder".to_owned()),
        Ok(_) => {}
    }
    // Some NVIDIA libraries cannot be closed, so an opened library stays open.
    OpenedLibrary::open_library_or_reason(library, path).map(std::mem::forget)
}
