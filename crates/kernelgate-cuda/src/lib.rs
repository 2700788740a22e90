//! The CUDA layer of kernelgate: the driver, NVRTC, cuBLASLt, cuDNN, NCCL, CUPTI, NVML and NVTX,
//! all loaded at run time, so that a machine without them builds and runs every program that links
//! this crate.
//!
//! - [`architecture`]: limits of an architecture by its name alone.
//! - [`regular_file`]: opens and reads regular files only.
//! - [`library`]: search for NVIDIA's libraries, and advice for missing ones.
//! - [`layout`]: the same program at other addresses, on purpose.
//! - [`driver`]: devices, memory, streams, events, graphs, kernels and their launches.
//! - [`compiler`]: kernel source to machine code, its cache on disk, and facts read from the
//!   machine code.
//! - [`libraries`]: GEMMs by cuBLASLt, operation graphs by cuDNN, collectives by NCCL.
//! - [`spec`]: a kernel as one row of data, from which it is loaded, launched, recorded and tested.
//! - [`instruments`]: kernels for measuring: bandwidth passes, spins, blocker, clock probes, L2
//!   flush.
//! - [`observe`]: Bindings of CUPTI's activity records, NVML's readings and NVTX ranges.
//!
//! All `unsafe` code of the workspace is in this crate. The functions of this crate are safe,
//! including [`Kernel::launch`]: the number and sizes of a launch's arguments are checked against
//! the compiled kernel. Accesses through the pointers that a kernel gets are not checked. A kernel
//! writes to device memory and, if the device can address host memory (HMM, Grace Hopper), could
//! write there too, as any C function behind a safe wrapper could. Loading a kernel means trusting
//! it; verification checks its results.
//!
//! Deliberately absent: the CUDA runtime, `nvcc`, toolkit headers (kernels include nothing but
//! `kernels/common` and what their own package adds), workloads, and timing.

pub mod architecture;
mod case_failure;
pub mod compiler;
pub mod driver;
mod error;
pub mod instruments;
pub mod layout;
pub mod libraries;
pub mod library;
pub mod observe;
pub mod regular_file;
pub mod spec;
pub mod testing;

pub use case_failure::CaseFailure;
pub use compiler::source::Source;
pub use driver::device::Device;
pub use driver::devices::Devices;
pub use driver::launch::argument::{Arguments, KernelArgument};
pub use driver::launch::code_image::KernelImage;
pub use driver::launch::kernel::Kernel;
pub use driver::launch::prepared::PreparedLaunch;
pub use driver::launch::shape::Launch;
pub use driver::launch::tensor_map::{COPY_ALIGNMENT, TensorBoxes, TensorMapElement};
pub use driver::memory::buffer::DeviceBuffer;
pub use driver::options::DeviceOptions;
pub use driver::stream::joined_stream::JoinedStreams;
pub use driver::stream::raw_stream::{RawContext, RawStream};
pub use error::{BackendError, DriverStatusCode};
pub use spec::{KernelSpec, LoadedKernel, RequiredArchitecture};
