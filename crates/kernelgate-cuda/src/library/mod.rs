//! NVIDIA's libraries: the choice among those on this machine, and advice for missing ones.
//!
//! A library is opened once, by its own path, for the life of the process, and every function comes
//! from that handle; all libraries have one major version of CUDA, which the driver supports.
//! Relative paths are never loaded. Deliberately absent: the CUDA runtime, `nvcc`.

mod choice;
mod cudnn;
mod kind;
mod opened;
mod process;
mod search;
mod unusable;
mod version;
mod whole;

pub use kind::Library;
pub use opened::mapped_file;
pub use process::{
    LoadedLibrary, NvrtcChoice, cuda_major, driver_cuda, function, load, loaded, nvrtc,
    passed_over, typed,
};
pub use search::ignored_settings;
pub use unusable::unusable;
pub use version::{CudaVersion, OLDEST_DRIVER};
