//! Search order for NVIDIA's libraries: folders that the user names, the loader's path, CUDA
//! toolkits, and wheels of the active Python environment.
#![allow(clippy::disallowed_methods, reason = "searches where the system loader does")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Environment variable that names the folders in which NVIDIA libraries are searched first.
pub const LIBRARY_FOLDERS_VARIABLE: &str = "KERNELGATE_CUDA_LIBS";
/// Environment variable with the folders that the dynamic loader searches first.
const LOADER_PATH_VARIABLE: &str = "LD_LIBRARY_PATH";
const TOOLKIT_FOLDER_VARIABLES: [&str; 2] = ["CUDA_HOME", "CUDA_PATH"];

/// Kind of place in which a library file was found; earlier variants are preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LibraryOrigin {
    /// The library lies in a folder that `KERNELGATE_CUDA_LIBS` names.
    UserNamedFolder,
    /// A folder that the dynamic loader searches, or a folder of a CUDA toolkit.
    LoaderOrToolkitFolder,
    /// The library lies in a Python wheel that NVIDIA publishes.
    PythonWheel,
}

/// A file that may be the library that is searched for: a path, or a name that the loader looks up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LibraryCandidate {
    /// Path of a library file, or a library's name that the loader looks up.
    pub path_or_library_name: PathBuf,
    /// Kind of place in which the library file was found.
    pub origin: LibraryOrigin,
}

/// Returns candidates for a library with one of these file names, best first. The folder `beside`,
/// which holds the chosen NVRTC, comes before other folders of its kind. Python is started only if
/// the caller takes more candidates than are installed outside wheels.
pub fn library_candidates_including_wheels(
    names: &[String],
    beside: Option<&Path>,
) -> impl Iterator<Item = LibraryCandidate> + use<> {
    let wheels = names.to_vec();
    library_candidates_outside_wheels(names, beside)
        .chain(std::iter::once(()).flat_map(move |()| library_candidates_in_python_wheels(&wheels)))
}

/// Returns library candidates outside Python wheels; no process is started to find them.
pub fn library_candidates_outside_wheels(
    names: &[String],
    beside: Option<&Path>,
) -> impl Iterator<Item = LibraryCandidate> + use<> {
    let beside = beside.filter(|folder| folder.is_absolute()).map(Path::to_owned);
    let by_loader = names.iter().map(|name| LibraryCandidate {
        path_or_library_name: PathBuf::from(name),
        origin: LibraryOrigin::LoaderOrToolkitFolder,
    });
    let by_loader: Vec<LibraryCandidate> = by_loader.collect();
    let names = names.to_vec();
    let in_folders = move |folders, origin| library_candidates_in_folders(&names, folders, origin);
    (0..4).flat_map(move |stage| match stage {
        0 => {
            let mut folders = folders_of_kernelgate_cuda_libs();
            folders.sort_by_key(|folder| Some(folder) != beside.as_ref());
            in_folders(folders, LibraryOrigin::UserNamedFolder)
        }
        1 => in_folders(beside.clone().into_iter().collect(), LibraryOrigin::LoaderOrToolkitFolder),
        2 => by_loader.clone(),
        _ => in_folders(library_folders_of_cuda_toolkits(), LibraryOrigin::LoaderOrToolkitFolder),
    })
}

/// Candidates in wheels. Starts Python for its package folders, which takes about 50 ms.
pub fn library_candidates_in_python_wheels(names: &[String]) -> Vec<LibraryCandidate> {
    library_candidates_in_folders(
        names,
        library_folders_of_python_wheels(),
        LibraryOrigin::PythonWheel,
    )
}

fn library_candidates_in_folders(
    names: &[String],
    folders: Vec<PathBuf>,
    origin: LibraryOrigin,
) -> Vec<LibraryCandidate> {
    let files = folders
        .into_iter()
        .flat_map(|folder| names.iter().map(|name| folder.join(name)).collect::<Vec<_>>());
    files
        .filter(|file| file.is_file())
        .map(|file| LibraryCandidate { path_or_library_name: file, origin })
        .collect()
}

/// Returns the paths with one of the given file names in all searched folders, including files that
/// cannot be loaded.
pub fn library_paths_in_all_folders(names: &[String]) -> Vec<PathBuf> {
    let folders = folders_of_kernelgate_cuda_libs()
        .into_iter()
        .chain(folders_of_ld_library_path())
        .chain(library_folders_of_cuda_toolkits())
        .chain(library_folders_of_python_wheels());
    let there = |path: &PathBuf| std::fs::symlink_metadata(path).is_ok();
    folders
        .flat_map(|folder| names.iter().map(move |name| folder.join(name)))
        .filter(there)
        .collect()
}

/// Returns the file that the loader finds for a library's name in the folders of `LD_LIBRARY_PATH`.
pub fn file_found_on_loader_path(name: &Path) -> Option<PathBuf> {
    folders_of_ld_library_path()
        .into_iter()
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

fn folders_of_ld_library_path() -> Vec<PathBuf> {
    without_relative_paths(paths_in_environment_variable(LOADER_PATH_VARIABLE))
}

/// Returns whether two paths lead to one file, also through symbolic links.
pub fn paths_lead_to_one_file(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| std::fs::canonicalize(path).ok();
    one == other || real(one).is_some_and(|one| Some(one) == real(other))
}

/// Returns the absolute folders of `KERNELGATE_CUDA_LIBS`.
fn folders_of_kernelgate_cuda_libs() -> Vec<PathBuf> {
    without_relative_paths(paths_in_environment_variable(LIBRARY_FOLDERS_VARIABLE))
}

fn paths_in_environment_variable(variable: &str) -> Vec<PathBuf> {
    let value = std::env::var_os(variable).unwrap_or_default();
    std::env::split_paths(&value).filter(|path| !path.as_os_str().is_empty()).collect()
}

fn without_relative_paths(paths: Vec<PathBuf>) -> Vec<PathBuf> {
    paths.into_iter().filter(|path| path.is_absolute()).collect()
}

fn library_folders_of_cuda_toolkits() -> Vec<PathBuf> {
    let set = TOOLKIT_FOLDER_VARIABLES.into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let roots = without_relative_paths(set.chain([PathBuf::from("/usr/local/cuda")]).collect());
    let folders = ["lib64", "extras/CUPTI/lib64"];
    roots.iter().flat_map(|root| folders.map(|folder| root.join(folder))).collect()
}

/// Returns library folders of NVIDIA's Python wheels; Python is asked for its package folders once
/// a process.
fn library_folders_of_python_wheels() -> Vec<PathBuf> {
    static WHEEL_FOLDERS: OnceLock<Vec<PathBuf>> = OnceLock::new();
    let folders = WHEEL_FOLDERS.get_or_init(|| {
        ask_python_for_package_folders()
            .into_iter()
            .flat_map(|packages| {
                let nvidia = packages.join("nvidia");
                // CUDA 13 wheels share one folder; wheels of older CUDA versions have one folder
                // for each library.
                ["cu13", "cuda_nvrtc", "cublas", "cuda_cupti", "cudnn", "nccl"]
                    .map(|package| nvidia.join(package).join("lib"))
            })
            .collect()
    });
    folders.clone()
}

fn ask_python_for_package_folders() -> Vec<PathBuf> {
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
    without_relative_paths(text.lines().map(PathBuf::from).collect())
}

/// Returns messages about environment variables whose folders are not searched, because they are
/// relative or do not exist.
pub fn ignored_folders_in_variables() -> Vec<String> {
    let relative = |variable: &'static str, path: PathBuf| {
        (!path.is_absolute())
            .then(|| format!("{variable}: `{}` is relative and is not searched", path.display()))
    };
    let relative_paths = |variable: &'static str| {
        paths_in_environment_variable(variable)
            .into_iter()
            .filter_map(move |path| relative(variable, path))
    };
    let missing = folders_of_kernelgate_cuda_libs().into_iter().filter(|path| !path.is_dir());
    let missing = missing.map(|path| {
        format!("{LIBRARY_FOLDERS_VARIABLE}: the folder {} does not exist", path.display())
    });
    [
        LIBRARY_FOLDERS_VARIABLE,
        TOOLKIT_FOLDER_VARIABLES[0],
        TOOLKIT_FOLDER_VARIABLES[1],
        "VIRTUAL_ENV",
    ]
    .into_iter()
    .flat_map(relative_paths)
    .chain(missing)
    .collect()
}
