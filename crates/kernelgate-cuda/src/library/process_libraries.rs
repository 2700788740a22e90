//! NVIDIA libraries that this process has opened, each once.

use std::ffi::{CStr, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::cudnn;
use super::library_kind::NvidiaLibrary;
use super::nvrtc_choice;
use super::opened_library::{self, OpenedLibrary};
use super::search::{self, LibraryCandidate, LibraryOrigin};
use super::version::{CudaVersion, OLDEST_SUPPORTED_DRIVER, SUPPORTED_CUDA_MAJORS};
use crate::architecture;

/// Path and version of a library that this process has opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenedLibraryFacts {
    /// Path of the library's file, or the name by which it was opened if the system does not report
    /// the path.
    pub path_or_library_name: PathBuf,
    /// Version that the library reports: "13.0", "9.14.0"; for an unused cuDNN, the CUDA version
    /// that it was built for.
    pub library_version: Option<String>,
}

type OpenedLibrarySlot = OnceLock<Option<(OpenedLibrary, OpenedLibraryFacts)>>;

fn opened_library_slot(library: NvidiaLibrary) -> &'static OpenedLibrarySlot {
    static OPENED_LIBRARIES: [OpenedLibrarySlot; NvidiaLibrary::ALL_NVIDIA_LIBRARIES.len()] =
        [const { OnceLock::new() }; NvidiaLibrary::ALL_NVIDIA_LIBRARIES.len()];
    &OPENED_LIBRARIES[library as usize]
}

fn find_and_open_library_once(
    library: NvidiaLibrary,
) -> Option<&'static (OpenedLibrary, OpenedLibraryFacts)> {
    let find = || {
        let opened = match library {
            NvidiaLibrary::Nvrtc => open_best_nvrtc(),
            // libcuda and libnvidia-ml are the files that the loader finds, because they must match
            // the driver's kernel module.
            _ if library.comes_with_driver_package() => library
                .file_names_for_cuda_major(0)
                .iter()
                .find_map(|name| OpenedLibrary::open_library_if_usable(library, Path::new(name))),
            _ => {
                let nvrtc = open_library_once(NvidiaLibrary::Nvrtc)
                    .and_then(|nvrtc| nvrtc.path_or_library_name.parent());
                let major = cuda_major_of_libraries();
                let fits = |opened: &OpenedLibrary| {
                    library != NvidiaLibrary::Cudnn
                        || cudnn::cudnn_fits_cuda_major(
                            opened.path_or_name_of_opened_library(),
                            major,
                        )
                };
                search::library_candidates_including_wheels(
                    &library.file_names_for_cuda_major(major),
                    nvrtc,
                )
                .filter_map(|candidate| {
                    OpenedLibrary::open_library_if_usable(library, &candidate.path_or_library_name)
                })
                .find(fits)
            }
        }?;
        let loaded = OpenedLibraryFacts {
            path_or_library_name: opened.path_or_name_of_opened_library().to_owned(),
            library_version: ask_opened_library_for_version(library, &opened),
        };
        Some((opened, loaded))
    };
    opened_library_slot(library).get_or_init(find).as_ref()
}

/// Opens an NVIDIA library once, until the process ends; returns `None` if it is not found.
///
/// Libraries are searched in the folders of `KERNELGATE_CUDA_LIBS`, then on the loader's path, in
/// CUDA toolkits and in Python wheels. All libraries except the driver's belong to one CUDA major
/// version ([`choose_nvrtc_library`]).
pub fn open_library_once(library: NvidiaLibrary) -> Option<&'static OpenedLibraryFacts> {
    find_and_open_library_once(library).map(|(_, loaded)| loaded)
}

/// Returns the address of a function of an NVIDIA library; `None` if the library or the function is
/// missing.
pub fn library_function_address(library: NvidiaLibrary, name: &CStr) -> Option<*const c_void> {
    find_and_open_library_once(library)?.0.address_of_library_function(name)
}

/// Returns a function of an NVIDIA library; `None` if the library or the function is missing.
///
/// # Safety
/// The caller chooses `F` as the type of the function with that name.
pub unsafe fn typed_library_function<F: Copy>(library: NvidiaLibrary, name: &CStr) -> Option<F> {
    let address = library_function_address(library, name)?;
    // SAFETY: the caller guarantees that `F` is the type of the library's function with this name.
    Some(unsafe { opened_library::cast_address_to_function(address) })
}

/// Returns names, as run records write them, and versions of the libraries that this process has
/// opened so far.
pub fn opened_library_names_and_versions() -> impl Iterator<Item = (&'static str, String)> {
    let loaded_version = |library: NvidiaLibrary| {
        let (_, loaded) = opened_library_slot(library).get()?.as_ref()?;
        Some((library.name_in_run_records(), loaded.library_version.clone()?))
    };
    NvidiaLibrary::ALL_NVIDIA_LIBRARIES.into_iter().filter_map(loaded_version)
}

/// Returns library files that were found but not used, because another file has priority or the
/// driver does not support them. The function opens each found library file.
pub fn found_but_unused_library_files(library: NvidiaLibrary) -> Vec<OpenedLibraryFacts> {
    if library.comes_with_driver_package() {
        return Vec::new();
    }
    let mut seen: Vec<PathBuf> = open_library_once(library)
        .map(|loaded| loaded.path_or_library_name.clone())
        .into_iter()
        .collect();
    let mut others = Vec::new();
    let mut files: Vec<String> = SUPPORTED_CUDA_MAJORS
        .iter()
        .flat_map(|&major| library.file_names_for_cuda_major(major))
        .collect();
    files.dedup();
    for candidate in search::library_candidates_including_wheels(&files, None) {
        let Some(opened) =
            OpenedLibrary::open_library_if_usable(library, &candidate.path_or_library_name)
        else {
            continue;
        };
        let file = opened.path_or_name_of_opened_library().to_owned();
        if !seen.iter().any(|seen| search::paths_lead_to_one_file(seen, &file)) {
            // An unused cuDNN is not asked for its version, because the cuDNN that is already
            // loaded would answer.
            let version = match library {
                NvidiaLibrary::Cudnn => {
                    cudnn::cuda_major_of_cudnn_file(&file).map(|of| format!("for CUDA {of}"))
                }
                _ => ask_opened_library_for_version(library, &opened),
            };
            others.push(OpenedLibraryFacts {
                path_or_library_name: file.clone(),
                library_version: version,
            });
            seen.push(file);
        }
        // The opened library is kept open, because some NVIDIA libraries cannot be closed.
        std::mem::forget(opened);
    }
    others
}

/// Asks an opened library for its version.
fn ask_opened_library_for_version(
    library: NvidiaLibrary,
    opened: &OpenedLibrary,
) -> Option<String> {
    let address =
        opened.address_of_library_function(library.function_exported_by_every_version())?;
    // SAFETY: each version function has this type in every version of its library, needs no
    // initialisation and writes only through valid pointers.
    unsafe {
        match library {
            NvidiaLibrary::CudaDriver => {
                let function: unsafe extern "C" fn(*mut c_int) -> c_int =
                    opened_library::cast_address_to_function(address);
                let mut cuda = 0;
                (function(&raw mut cuda) == 0)
                    .then(|| CudaVersion::cuda_version_from_driver_number(cuda).to_string())
            }
            NvidiaLibrary::Nvrtc => {
                opened.reported_nvrtc_version().map(|version| version.to_string())
            }
            NvidiaLibrary::CublasLt | NvidiaLibrary::Cudnn => {
                let function: unsafe extern "C" fn() -> usize =
                    opened_library::cast_address_to_function(address);
                let number = function();
                Some(format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100))
            }
            NvidiaLibrary::Cupti => {
                let function: unsafe extern "C" fn(*mut u32) -> c_int =
                    opened_library::cast_address_to_function(address);
                let mut api = 0;
                (function(&raw mut api) == 0).then(|| format!("API {api}"))
            }
            NvidiaLibrary::Nccl => {
                let function: unsafe extern "C" fn(*mut c_int) -> c_int =
                    opened_library::cast_address_to_function(address);
                let mut number = 0;
                (function(&raw mut number) == 0)
                    .then(|| format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100))
            }
            NvidiaLibrary::Nvml => None,
        }
    }
}

/// Version of the NVRTC library that kernelgate uses, and whether it fits the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChosenNvrtcVersion {
    /// CUDA version of the chosen NVRTC.
    pub nvrtc_version: CudaVersion,
    /// Whether the driver can load the code that this NVRTC generates; true if no driver is
    /// installed.
    pub driver_can_load_generated_code: bool,
}

/// Newest CUDA version that the installed driver supports; `None` if no driver is installed.
pub fn newest_cuda_version_of_driver() -> Option<CudaVersion> {
    CudaVersion::parse_major_dot_minor(
        open_library_once(NvidiaLibrary::CudaDriver)?.library_version.as_ref()?,
    )
}

/// Selects an NVRTC library: one in a folder that the user names, else the newest installed one
/// that fits the driver, else the newest fitting one in Python wheels. If no NVRTC fits the driver,
/// the newest installed one is selected: its code compiles but does not run. Returns `None` if no
/// NVRTC library was found.
pub fn choose_nvrtc_library() -> Option<ChosenNvrtcVersion> {
    let version = CudaVersion::parse_major_dot_minor(
        open_library_once(NvidiaLibrary::Nvrtc)?.library_version.as_ref()?,
    )?;
    Some(ChosenNvrtcVersion {
        nvrtc_version: version,
        driver_can_load_generated_code: can_installed_driver_load_nvrtc_code(version),
    })
}

/// Returns whether the installed driver can load code that an NVRTC of this version generates.
fn can_installed_driver_load_nvrtc_code(nvrtc: CudaVersion) -> bool {
    nvrtc_choice::can_driver_load_nvrtc_code(
        nvrtc,
        newest_cuda_version_of_driver(),
        architecture::architecture_from_environment().is_some(),
    )
}

/// Returns the major version of CUDA that all opened libraries must have: the major version of the
/// chosen NVRTC, else the newest that the driver supports.
pub fn cuda_major_of_libraries() -> u32 {
    if let Some(nvrtc) = choose_nvrtc_library() {
        return nvrtc.nvrtc_version.major;
    }
    let accepted =
        |major: &u32| newest_cuda_version_of_driver().is_none_or(|driver| *major <= driver.major);
    SUPPORTED_CUDA_MAJORS.into_iter().find(accepted).unwrap_or(OLDEST_SUPPORTED_DRIVER.major)
}

/// Opens the best NVRTC, and the built-ins library that NVRTC may open by name alone.
fn open_best_nvrtc() -> Option<OpenedLibrary> {
    let names: Vec<String> = SUPPORTED_CUDA_MAJORS
        .iter()
        .flat_map(|&major| NvidiaLibrary::Nvrtc.file_names_for_cuda_major(major))
        .collect();
    let open = |candidate: LibraryCandidate| {
        let opened = OpenedLibrary::open_library_if_usable(
            NvidiaLibrary::Nvrtc,
            &candidate.path_or_library_name,
        )?;
        let version = opened.reported_nvrtc_version()?;
        Some((opened, (candidate.origin, version)))
    };
    let found = nvrtc_choice::add_wheel_libraries_if_needed(
        search::library_candidates_outside_wheels(&names, None).filter_map(open),
        |(_, (_, version))| can_installed_driver_load_nvrtc_code(*version),
        || search::library_candidates_in_python_wheels(&names).into_iter().filter_map(open),
    );
    let (mut found, offered): (Vec<OpenedLibrary>, Vec<(LibraryOrigin, CudaVersion)>) =
        found.into_iter().unzip();
    let best = nvrtc_choice::index_of_best_nvrtc(&offered, can_installed_driver_load_nvrtc_code)?;
    let opened = found.swap_remove(best);
    // Some NVRTC builds open their built-ins library by name alone; the loader then finds the copy
    // that is already open.
    let builtins = format!("libnvrtc-builtins.so.{}", offered[best].1);
    if let Some(folder) =
        opened.path_or_name_of_opened_library().parent().filter(|folder| folder.is_absolute())
    {
        opened_library::keep_library_file_open(&folder.join(builtins));
    }
    Some(opened)
}

impl NvidiaLibrary {
    /// Returns advice for the user on how to install this library for the CUDA version in use.
    pub fn advice_to_install_library(self) -> String {
        let get = |name: &str| {
            let major = cuda_major_of_libraries();
            let wheel = match major {
                13.. => format!("{name}=={major}.*"),
                _ => format!("{name}-cu{major}=={major}.*"),
            };
            format!(
                "pip install '{wheel}', or a CUDA {major} toolkit; {}",
                self.effect_of_missing_library_text()
            )
        };
        match self {
            Self::CudaDriver => {
                "install the NVIDIA driver (for containers: start them with --gpus all)".to_owned()
            }
            Self::Nvrtc => get("nvidia-cuda-nvrtc"),
            Self::CublasLt => get("nvidia-cublas"),
            Self::Cupti => get("nvidia-cuda-cupti"),
            Self::Nvml => {
                format!(
                    "it comes with the NVIDIA driver; {}",
                    self.effect_of_missing_library_text()
                )
            }
            Self::Nccl => {
                format!(
                    "pip install nvidia-nccl-cu{} ({})",
                    cuda_major_of_libraries(),
                    self.effect_of_missing_library_text()
                )
            }
            Self::Cudnn => {
                format!(
                    "pip install nvidia-cudnn-cu{} ({})",
                    cuda_major_of_libraries(),
                    self.effect_of_missing_library_text()
                )
            }
        }
    }
}
