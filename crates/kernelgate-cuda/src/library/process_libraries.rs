//! The libraries that this process has opened.

use std::ffi::{CStr, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::cudnn;
use super::library_kind::RequiredLibrary;
use super::nvrtc_choice;
use super::opened_library::{self, OpenedLibrary};
use super::search::{self, LibraryCandidate, LibraryOrigin};
use super::version::{CudaVersion, OLDEST_SUPPORTED_DRIVER, SUPPORTED_CUDA_MAJORS};
use crate::architecture;

/// A library that this process has opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedLibrary {
    /// Path of the library, or its name if the system does not report the path.
    pub file: PathBuf,
    /// Version of the library: "13.0", "9.14.0"; for an unused cuDNN, the CUDA that it was built
    /// for.
    pub version: Option<String>,
}

type LibrarySlot = OnceLock<Option<(OpenedLibrary, LoadedLibrary)>>;

fn library_slot(library: RequiredLibrary) -> &'static LibrarySlot {
    static OPENED_LIBRARIES: [LibrarySlot; RequiredLibrary::ALL_LIBRARIES.len()] =
        [const { OnceLock::new() }; RequiredLibrary::ALL_LIBRARIES.len()];
    &OPENED_LIBRARIES[library as usize]
}

fn opened_library(library: RequiredLibrary) -> Option<&'static (OpenedLibrary, LoadedLibrary)> {
    let find = || {
        let opened = match library {
            RequiredLibrary::Nvrtc => open_nvrtc(),
            // The driver's libraries are the files that the loader finds, because they must match
            // the kernel module.
            _ if library.comes_with_driver() => library
                .file_names(0)
                .iter()
                .find_map(|name| OpenedLibrary::open_library(library, Path::new(name))),
            _ => {
                let nvrtc = load_once(RequiredLibrary::Nvrtc).and_then(|nvrtc| nvrtc.file.parent());
                let major = cuda_major_to_use();
                let fits = |opened: &OpenedLibrary| {
                    library != RequiredLibrary::Cudnn
                        || cudnn::fits_cuda_version(opened.library_path(), major)
                };
                search::library_candidates(&library.file_names(major), nvrtc)
                    .filter_map(|candidate| OpenedLibrary::open_library(library, &candidate.file))
                    .find(fits)
            }
        }?;
        let loaded = LoadedLibrary {
            file: opened.library_path().to_owned(),
            version: reported_library_version(library, &opened),
        };
        Some((opened, loaded))
    };
    library_slot(library).get_or_init(find).as_ref()
}

/// Opens a library, once, for the life of the process; `None` if it is not found.
///
/// The folders of `KERNELGATE_CUDA_LIBS` come first, then the loader's path, toolkits, wheels. All
/// libraries except the driver's belong to one major version of CUDA ([`choose_nvrtc`]).
pub fn load_once(library: RequiredLibrary) -> Option<&'static LoadedLibrary> {
    opened_library(library).map(|(_, loaded)| loaded)
}

/// The address of a function of a library; `None` where either is missing.
pub fn function_of_library(library: RequiredLibrary, name: &CStr) -> Option<*const c_void> {
    opened_library(library)?.0.function_address(name)
}

/// A function of a library; `None` where either is missing.
///
/// # Safety
/// The caller chooses `F` as the type of the function with that name.
pub unsafe fn typed_function<F: Copy>(library: RequiredLibrary, name: &CStr) -> Option<F> {
    let address = function_of_library(library, name)?;
    // SAFETY: the caller's promise.
    Some(unsafe { opened_library::cast(address) })
}

/// Names (as in records) and versions of the libraries that this process has opened so far.
pub fn loaded_library_versions() -> impl Iterator<Item = (&'static str, String)> {
    let loaded_version = |library: RequiredLibrary| {
        let (_, loaded) = library_slot(library).get()?.as_ref()?;
        Some((library.record_name(), loaded.version.clone()?))
    };
    RequiredLibrary::ALL_LIBRARIES.into_iter().filter_map(loaded_version)
}

/// Library files that were found but not used: another file is newer or comes earlier, or the
/// driver does not support them. Opens all of them.
pub fn unused_library_files(library: RequiredLibrary) -> Vec<LoadedLibrary> {
    if library.comes_with_driver() {
        return Vec::new();
    }
    let mut seen: Vec<PathBuf> =
        load_once(library).map(|loaded| loaded.file.clone()).into_iter().collect();
    let mut others = Vec::new();
    let mut files: Vec<String> =
        SUPPORTED_CUDA_MAJORS.iter().flat_map(|&major| library.file_names(major)).collect();
    files.dedup();
    for candidate in search::library_candidates(&files, None) {
        let Some(opened) = OpenedLibrary::open_library(library, &candidate.file) else { continue };
        let file = opened.library_path().to_owned();
        if !seen.iter().any(|seen| search::same_file(seen, &file)) {
            // The loaded cuDNN would report its own version instead of the other file's version.
            let version = match library {
                RequiredLibrary::Cudnn => {
                    cudnn::cuda_major_of_file(&file).map(|of| format!("for CUDA {of}"))
                }
                _ => reported_library_version(library, &opened),
            };
            others.push(LoadedLibrary { file: file.clone(), version });
            seen.push(file);
        }
        // Some of these libraries cannot be closed again.
        std::mem::forget(opened);
    }
    others
}

/// Version that an opened library reports.
fn reported_library_version(library: RequiredLibrary, opened: &OpenedLibrary) -> Option<String> {
    let address = opened.function_address(library.function_in_every_version())?;
    // SAFETY: each is the function's type in every version of the library; they need nothing to be
    // initialised and write through valid pointers only.
    unsafe {
        match library {
            RequiredLibrary::Driver => {
                let function: unsafe extern "C" fn(*mut c_int) -> c_int =
                    opened_library::cast(address);
                let mut cuda = 0;
                (function(&raw mut cuda) == 0)
                    .then(|| CudaVersion::from_driver_number(cuda).to_string())
            }
            RequiredLibrary::Nvrtc => opened.nvrtc_version().map(|version| version.to_string()),
            RequiredLibrary::CublasLt | RequiredLibrary::Cudnn => {
                let function: unsafe extern "C" fn() -> usize = opened_library::cast(address);
                let number = function();
                Some(format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100))
            }
            RequiredLibrary::Cupti => {
                let function: unsafe extern "C" fn(*mut u32) -> c_int =
                    opened_library::cast(address);
                let mut api = 0;
                (function(&raw mut api) == 0).then(|| format!("API {api}"))
            }
            RequiredLibrary::Nccl => {
                let function: unsafe extern "C" fn(*mut c_int) -> c_int =
                    opened_library::cast(address);
                let mut number = 0;
                (function(&raw mut number) == 0)
                    .then(|| format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100))
            }
            RequiredLibrary::Nvml => None,
        }
    }
}

/// The NVRTC library that is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NvrtcChoice {
    /// CUDA version of the chosen NVRTC.
    pub version: CudaVersion,
    /// Whether the driver can load code that NVRTC generates; true without a driver.
    pub fits: bool,
}

/// Latest CUDA that the driver supports; `None` without a driver.
pub fn driver_cuda_version() -> Option<CudaVersion> {
    CudaVersion::parse(load_once(RequiredLibrary::Driver)?.version.as_ref()?)
}

/// Selects an NVRTC library: the library that the user names, else the newest installed one that
/// fits the driver, else the newest fitting one in Python wheels. If no NVRTC fits the driver, this
/// selects the newest one: its code compiles but does not run. Returns `None` if no NVRTC library
/// was found.
pub fn choose_nvrtc() -> Option<NvrtcChoice> {
    let version = CudaVersion::parse(load_once(RequiredLibrary::Nvrtc)?.version.as_ref()?)?;
    Some(NvrtcChoice { version, fits: driver_accepts_code_of(version) })
}

/// Returns whether the driver can load code that an NVRTC of this version generates.
fn driver_accepts_code_of(nvrtc: CudaVersion) -> bool {
    nvrtc_choice::driver_loads_code(
        nvrtc,
        driver_cuda_version(),
        architecture::requested_architecture().is_some(),
    )
}

/// Returns the major version of CUDA that all libraries must have: NVRTC's version, else the newest
/// that the driver supports.
pub fn cuda_major_to_use() -> u32 {
    if let Some(nvrtc) = choose_nvrtc() {
        return nvrtc.version.major;
    }
    let accepted = |major: &u32| driver_cuda_version().is_none_or(|driver| *major <= driver.major);
    SUPPORTED_CUDA_MAJORS.into_iter().find(accepted).unwrap_or(OLDEST_SUPPORTED_DRIVER.major)
}

/// Opens the selected NVRTC, and the library that NVRTC opens by name alone.
fn open_nvrtc() -> Option<OpenedLibrary> {
    let names: Vec<String> = SUPPORTED_CUDA_MAJORS
        .iter()
        .flat_map(|&major| RequiredLibrary::Nvrtc.file_names(major))
        .collect();
    let open = |candidate: LibraryCandidate| {
        let opened = OpenedLibrary::open_library(RequiredLibrary::Nvrtc, &candidate.file)?;
        let version = opened.nvrtc_version()?;
        Some((opened, (candidate.origin, version)))
    };
    let found = nvrtc_choice::with_others_unless_enough(
        search::installed_candidates(&names, None).filter_map(open),
        |(_, (_, version))| driver_accepts_code_of(*version),
        || search::candidates_in_wheels(&names).into_iter().filter_map(open),
    );
    let (mut found, offered): (Vec<OpenedLibrary>, Vec<(LibraryOrigin, CudaVersion)>) =
        found.into_iter().unzip();
    let best = nvrtc_choice::best_candidate(&offered, driver_accepts_code_of)?;
    let opened = found.swap_remove(best);
    // Some NVRTC builds open their built-ins library by name, so that the loader finds the library
    // that is already open.
    let builtins = format!("libnvrtc-builtins.so.{}", offered[best].1);
    if let Some(folder) = opened.library_path().parent().filter(|folder| folder.is_absolute()) {
        opened_library::keep_open(&folder.join(builtins));
    }
    Some(opened)
}

impl RequiredLibrary {
    /// Advice how to install the library for the CUDA version in use.
    pub fn install_advice(self) -> String {
        let get = |name: &str| {
            let major = cuda_major_to_use();
            let wheel = match major {
                13.. => format!("{name}=={major}.*"),
                _ => format!("{name}-cu{major}=={major}.*"),
            };
            format!(
                "pip install '{wheel}', or a CUDA {major} toolkit; {}",
                self.missing_library_effect()
            )
        };
        match self {
            Self::Driver => {
                "install the NVIDIA driver (for containers: start them with --gpus all)".to_owned()
            }
            Self::Nvrtc => get("nvidia-cuda-nvrtc"),
            Self::CublasLt => get("nvidia-cublas"),
            Self::Cupti => get("nvidia-cuda-cupti"),
            Self::Nvml => {
                format!("it comes with the NVIDIA driver; {}", self.missing_library_effect())
            }
            Self::Nccl => {
                format!(
                    "pip install nvidia-nccl-cu{} ({})",
                    cuda_major_to_use(),
                    self.missing_library_effect()
                )
            }
            Self::Cudnn => {
                format!(
                    "pip install nvidia-cudnn-cu{} ({})",
                    cuda_major_to_use(),
                    self.missing_library_effect()
                )
            }
        }
    }
}
