//! Finds NVIDIA's libraries on this machine, chooses among several, and advises on missing ones.
//!
//! A library is opened once, by its own path, for the life of the process, and every function comes
//! from that handle; all libraries have one major version of CUDA, which the driver supports.
//! Libraries at relative paths are never loaded. The CUDA runtime and `nvcc` are not used.

mod complete_file;
mod cudnn;
mod library_kind;
mod nvrtc_choice;
mod opened_library;
mod process_libraries;
mod search;
mod unusable_files;
mod version;

pub use library_kind::RequiredLibrary;
pub use opened_library::mapped_library_file;
pub use process_libraries::{
    LoadedLibrary, NvrtcChoice, choose_nvrtc, cuda_major_to_use, driver_cuda_version,
    function_of_library, load_once, loaded_library_versions, typed_function, unused_library_files,
};
pub use search::ignored_path_settings;
pub use unusable_files::unusable_library_files;
pub use version::{CudaVersion, OLDEST_SUPPORTED_DRIVER};
