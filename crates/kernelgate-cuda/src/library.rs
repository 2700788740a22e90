//! Finding NVIDIA's libraries: on the loader's path, in a toolkit, or in a PyPI wheel; and how to
//! get what is missing.

use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// A library that parts of kernelgate need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// `libcuda`: the driver. Comes with the driver only.
    Driver,
    /// `libnvrtc`: compiles kernels; needs no GPU.
    Nvrtc,
    /// `libcublasLt`: measures the ceilings of GEMMs.
    CublasLt,
    /// `libcupti`: the hardware's own record of kernels.
    Cupti,
    /// `libnvidia-ml`: clocks, power, temperature, other processes. Comes with the driver only.
    Nvml,
    /// `libcudnn`: a peer for attention; optional.
    Cudnn,
}

impl Library {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Driver, Self::Nvrtc, Self::CublasLt, Self::Cupti, Self::Nvml, Self::Cudnn];

    /// What a person calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Driver => "NVIDIA driver (libcuda)",
            Self::Nvrtc => "NVRTC (libnvrtc)",
            Self::CublasLt => "cuBLASLt (libcublasLt)",
            Self::Cupti => "CUPTI (libcupti)",
            Self::Nvml => "NVML (libnvidia-ml)",
            Self::Cudnn => "cuDNN (libcudnn)",
        }
    }

    /// File names to try, best first.
    const fn files(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &["libcuda.so.1", "libcuda.so"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so"],
            Self::CublasLt => &["libcublasLt.so.13"],
            Self::Cupti => &["libcupti.so.13"],
            Self::Nvml => &["libnvidia-ml.so.1"],
            Self::Cudnn => &["libcudnn.so.9"],
        }
    }

    /// Files that it opens itself by bare name, and which must be loaded before it when it is not
    /// on the loader's path.
    const fn companions(self) -> &'static [&'static str] {
        match self {
            // cuDNN's run path leads to its own parts.
            Self::Driver | Self::CublasLt | Self::Cupti | Self::Nvml | Self::Cudnn => &[],
            Self::Nvrtc => &[
                "libnvrtc-builtins.so.13.0",
                "libnvrtc-builtins.so.13.1",
                "libnvrtc-builtins.so.13.2",
            ],
        }
    }

    /// How to get it.
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Driver => {
                "install the NVIDIA driver (for containers: start them with --gpus all)"
            }
            Self::Nvrtc => "pip install 'nvidia-cuda-nvrtc==13.0.*', or a CUDA 13 toolkit",
            Self::CublasLt => {
                "pip install 'nvidia-cublas==13.*', or a CUDA 13 toolkit; without it the ceilings \
                 of GEMMs are not measured"
            }
            Self::Cupti => {
                "pip install 'nvidia-cuda-cupti==13.*', or a CUDA 13 toolkit; only `kernelgate \
                 timing` and `kernelgate profile` need it"
            }
            Self::Nvml => {
                "it comes with the NVIDIA driver; without it clocks, power and other processes are \
                 not recorded"
            }
            Self::Cudnn => "pip install nvidia-cudnn-cu13 (only the cuda/cudnn rows need it)",
        }
    }
}

/// Where a library was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LibraryLocation {
    /// By the loader, on its own path.
    Loader(&'static str),
    /// In this file: a toolkit's or a wheel's.
    File(PathBuf),
}

/// Loads a library, once, for the life of the process; `None` where it is not found.
///
/// A library found outside the loader's path is loaded by its full path, after which every later
/// request by its name gets it.
pub fn load(library: Library) -> Option<LibraryLocation> {
    static FOUND: [OnceLock<Option<LibraryLocation>>; Library::ALL.len()] =
        [const { OnceLock::new() }; Library::ALL.len()];
    FOUND[library as usize].get_or_init(|| find(library)).clone()
}

/// The address of a function of a library; `None` where either is missing.
pub fn function(library: Library, name: &CStr) -> Option<*const c_void> {
    let path = match load(library)? {
        LibraryLocation::Loader(name) => PathBuf::from(name),
        LibraryLocation::File(path) => path,
    };
    // SAFETY: the library is loaded already: nothing runs, only its count of users grows, which
    // `forget` keeps.
    let opened = unsafe { libloading::Library::new(path) }.ok()?;
    // SAFETY: only the address is taken; its type is the caller's business.
    let address =
        unsafe { opened.get::<*const c_void>(name.to_bytes_with_nul()) }.map(|symbol| *symbol).ok();
    std::mem::forget(opened);
    address
}

/// The file of a loaded library whose name begins so, as the system tells (Linux).
pub fn loaded_file(begins: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let mut paths = maps.lines().filter_map(|line| line.splitn(6, ' ').nth(5)).map(str::trim);
    paths
        .find(|path| {
            let name = Path::new(path).file_name().map(|name| name.to_string_lossy());
            name.is_some_and(|name| name.starts_with(begins))
        })
        .map(PathBuf::from)
}

fn find(library: Library) -> Option<LibraryLocation> {
    if let Some(name) = library.files().iter().find(|name| open(Path::new(name))) {
        return Some(LibraryLocation::Loader(name));
    }
    // The driver's libraries must match the kernel's module: no wheel carries them.
    if matches!(library, Library::Driver | Library::Nvml) {
        return None;
    }
    folders().into_iter().find_map(|folder| {
        let path =
            library.files().iter().map(|name| folder.join(name)).find(|path| path.is_file())?;
        library
            .companions()
            .iter()
            .map(|name| folder.join(name))
            .filter(|path| path.is_file())
            .for_each(|path| {
                open(&path);
            });
        open(&path).then_some(LibraryLocation::File(path))
    })
}

/// Opens a library for the whole process and never closes it.
fn open(path: &Path) -> bool {
    #[cfg(unix)]
    {
        use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
        // SAFETY: loading NVIDIA's own libraries runs their initialisers, which have no
        // precondition.
        let opened = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
        opened.map(std::mem::forget).is_ok()
    }
    #[cfg(not(unix))]
    {
        // SAFETY: as above.
        unsafe { libloading::Library::new(path) }.map(std::mem::forget).is_ok()
    }
}

/// Folders to look in: `KERNELGATE_CUDA_LIBS`, toolkits, and wheels of the active Python
/// environments.
fn folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = std::env::var_os("KERNELGATE_CUDA_LIBS")
        .filter(|folders| !folders.is_empty())
        .map(|list| std::env::split_paths(&list).collect())
        .unwrap_or_default();
    let toolkits =
        ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    for toolkit in toolkits.chain([PathBuf::from("/usr/local/cuda")]) {
        folders.extend([toolkit.join("lib64"), toolkit.join("extras/CUPTI/lib64")]);
    }
    folders.extend(python_packages().into_iter().flat_map(|packages| {
        let nvidia = packages.join("nvidia");
        // CUDA 13 wheels share one folder; older ones have a folder a library.
        ["cu13", "cuda_nvrtc", "cublas", "cuda_cupti", "cudnn"]
            .map(|package| nvidia.join(package).join("lib"))
    }));
    folders.retain(|folder| folder.is_dir());
    folders
}

/// Where Python looks for packages.
fn python_packages() -> Vec<PathBuf> {
    let program = std::env::var_os("VIRTUAL_ENV")
        .map_or_else(|| PathBuf::from("python3"), |root| PathBuf::from(root).join("bin/python3"));
    let output = Command::new(program)
        .args(["-c", "import sys; print('\\n'.join(path for path in sys.path if path))"])
        .output();
    let text = output
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    text.lines().map(PathBuf::from).collect()
}
