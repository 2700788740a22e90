//! Search order for libraries: the folders that the user names, the loader's path, toolkits, and
//! wheels of the active Python environment.
#![allow(clippy::disallowed_methods, reason = "searches where the system loader does")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// This environment variable names folders that are searched before all others.
pub const LIBRARIES_VARIABLE: &str = "KERNELGATE_CUDA_LIBS";
/// Variable with the folders that the loader searches first.
const LOADER_PATH_VARIABLE: &str = "LD_LIBRARY_PATH";
const TOOLKIT_FOLDER_VARIABLES: [&str; 2] = ["CUDA_HOME", "CUDA_PATH"];

/// Place in which a library file was found; earlier places are preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LibraryOrigin {
    /// A folder of `KERNELGATE_CUDA_LIBS`.
    Named,
    /// A folder of the loader, or of a CUDA toolkit.
    Installed,
    /// A Python wheel of NVIDIA.
    Wheel,
}

/// A file that may be the library: a path, or a name on the loader's path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LibraryCandidate {
    /// Path of the file, or a name that the loader looks up.
    pub file: PathBuf,
    /// Kind of place in which the file was found.
    pub origin: LibraryOrigin,
}

/// Candidates for a library with one of these names, best first. The folder `beside`, which holds
/// another library, comes before other folders of its kind. Python is started only if the earlier
/// candidates are not sufficient.
pub fn library_candidates(
    names: &[String],
    beside: Option<&Path>,
) -> impl Iterator<Item = LibraryCandidate> + use<> {
    let wheels = names.to_vec();
    installed_candidates(names, beside)
        .chain(std::iter::once(()).flat_map(move |()| candidates_in_wheels(&wheels)))
}

/// Library candidates without Python wheels; no process is started to find them.
pub fn installed_candidates(
    names: &[String],
    beside: Option<&Path>,
) -> impl Iterator<Item = LibraryCandidate> + use<> {
    let beside = beside.filter(|folder| folder.is_absolute()).map(Path::to_owned);
    let by_loader = names.iter().map(|name| LibraryCandidate {
        file: PathBuf::from(name),
        origin: LibraryOrigin::Installed,
    });
    let by_loader: Vec<LibraryCandidate> = by_loader.collect();
    let names = names.to_vec();
    let in_folders = move |folders, origin| candidates_in_folders(&names, folders, origin);
    (0..4).flat_map(move |stage| match stage {
        0 => {
            let mut folders = named_folders();
            folders.sort_by_key(|folder| Some(folder) != beside.as_ref());
            in_folders(folders, LibraryOrigin::Named)
        }
        1 => in_folders(beside.clone().into_iter().collect(), LibraryOrigin::Installed),
        2 => by_loader.clone(),
        _ => in_folders(toolkit_folders(), LibraryOrigin::Installed),
    })
}

/// Candidates in wheels. Starts Python, which takes some 50 ms.
pub fn candidates_in_wheels(names: &[String]) -> Vec<LibraryCandidate> {
    candidates_in_folders(names, wheel_folders(), LibraryOrigin::Wheel)
}

fn candidates_in_folders(
    names: &[String],
    folders: Vec<PathBuf>,
    origin: LibraryOrigin,
) -> Vec<LibraryCandidate> {
    let files = folders
        .into_iter()
        .flat_map(|folder| names.iter().map(|name| folder.join(name)).collect::<Vec<_>>());
    files.filter(|file| file.is_file()).map(|file| LibraryCandidate { file, origin }).collect()
}

/// Files with one of the given names in all searched folders, including unusable files.
pub fn library_places(names: &[String]) -> Vec<PathBuf> {
    let folders = named_folders()
        .into_iter()
        .chain(loader_path_folders())
        .chain(toolkit_folders())
        .chain(wheel_folders());
    let there = |path: &PathBuf| std::fs::symlink_metadata(path).is_ok();
    folders
        .flat_map(|folder| names.iter().map(move |name| folder.join(name)))
        .filter(there)
        .collect()
}

/// File that the loader finds for a name, if a variable names the folders that it searches first.
pub fn file_found_by_loader(name: &Path) -> Option<PathBuf> {
    loader_path_folders().into_iter().map(|folder| folder.join(name)).find(|file| file.is_file())
}

fn loader_path_folders() -> Vec<PathBuf> {
    absolute_paths(paths_in_variable(LOADER_PATH_VARIABLE))
}

/// Returns whether two paths lead to one file.
pub fn same_file(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| std::fs::canonicalize(path).ok();
    one == other || real(one).is_some_and(|one| Some(one) == real(other))
}

/// Folders that the user names, without relative ones.
fn named_folders() -> Vec<PathBuf> {
    absolute_paths(paths_in_variable(LIBRARIES_VARIABLE))
}

fn paths_in_variable(variable: &str) -> Vec<PathBuf> {
    let value = std::env::var_os(variable).unwrap_or_default();
    std::env::split_paths(&value).filter(|path| !path.as_os_str().is_empty()).collect()
}

fn absolute_paths(paths: Vec<PathBuf>) -> Vec<PathBuf> {
    paths.into_iter().filter(|path| path.is_absolute()).collect()
}

fn toolkit_folders() -> Vec<PathBuf> {
    let set = TOOLKIT_FOLDER_VARIABLES.into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let roots = absolute_paths(set.chain([PathBuf::from("/usr/local/cuda")]).collect());
    let folders = ["lib64", "extras/CUPTI/lib64"];
    roots.iter().flat_map(|root| folders.map(|folder| root.join(folder))).collect()
}

/// Folders of wheels where Python looks for packages, asked once a process.
fn wheel_folders() -> Vec<PathBuf> {
    static WHEEL_FOLDERS: OnceLock<Vec<PathBuf>> = OnceLock::new();
    let folders = WHEEL_FOLDERS.get_or_init(|| {
        python_package_folders()
            .into_iter()
            .flat_map(|packages| {
                let nvidia = packages.join("nvidia");
                // CUDA 13 wheels share one folder; older ones have a folder a library.
                ["cu13", "cuda_nvrtc", "cublas", "cuda_cupti", "cudnn", "nccl"]
                    .map(|package| nvidia.join(package).join("lib"))
            })
            .collect()
    });
    folders.clone()
}

fn python_package_folders() -> Vec<PathBuf> {
    let environment = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from);
    let program = environment
        .filter(|root| root.is_absolute())
        .map_or_else(|| PathBuf::from("python3"), |root| root.join("bin/python3"));
    let output = Command::new(program)
        .args(["-c", "import sys; print('\\n'.join(path for path in sys.path if path))"])
        .output();
    let text = output
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    absolute_paths(text.lines().map(PathBuf::from).collect())
}

/// Settings that name folders and were not followed, with the reason.
pub fn ignored_path_settings() -> Vec<String> {
    let relative = |variable: &'static str, path: PathBuf| {
        (!path.is_absolute())
            .then(|| format!("{variable}: `{}` is relative and is not searched", path.display()))
    };
    let relative_paths = |variable: &'static str| {
        paths_in_variable(variable).into_iter().filter_map(move |path| relative(variable, path))
    };
    let missing = named_folders().into_iter().filter(|path| !path.is_dir());
    let missing = missing
        .map(|path| format!("{LIBRARIES_VARIABLE}: the folder {} does not exist", path.display()));
    [LIBRARIES_VARIABLE, TOOLKIT_FOLDER_VARIABLES[0], TOOLKIT_FOLDER_VARIABLES[1], "VIRTUAL_ENV"]
        .into_iter()
        .flat_map(relative_paths)
        .chain(missing)
        .collect()
}
