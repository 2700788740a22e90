//! Finds NVIDIA's libraries on this machine, chooses among several versions, and advises how to
//! install missing ones.
//!
//! Each library is opened once, by its path, until the process ends; all opened libraries are for
//! one CUDA major version, which the driver supports. kernelgate never loads a library from a
//! relative path. kernelgate uses neither the CUDA runtime library nor `nvcc`.

mod complete_file;
mod cudnn;
mod library_kind;
mod nvrtc_choice;
mod opened_library;
mod process_libraries;
mod search;
mod unusable_files;
mod version;

pub use library_kind::NvidiaLibrary;
pub use opened_library::library_file_mapped_at_address;
pub use process_libraries::{
    ChosenNvrtcVersion, OpenedLibraryFacts, choose_nvrtc_library, cuda_major_of_libraries,
    found_but_unused_library_files, library_function_address, newest_cuda_version_of_driver,
    open_library_once, opened_library_names_and_versions, typed_library_function,
};
pub use search::ignored_folders_in_variables;
pub use unusable_files::library_files_that_cannot_be_loaded;
pub use version::{CudaVersion, OLDEST_SUPPORTED_DRIVER};
