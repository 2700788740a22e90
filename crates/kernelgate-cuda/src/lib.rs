//! The CUDA layer of kernelgate: it loads the driver, NVRTC, cuBLASLt, cuDNN, NCCL, CUPTI, NVML and
//! NVTX at run time, so that programs also build and run on machines without these libraries.
//!
//! - The module [`architecture`] has resource limits of GPU architectures by name.
//! - The module [`regular_file`] opens and reads regular files, but no devices or pipes.
//! - The module [`library`] searches for NVIDIA's libraries, and advises how to install missing
//!   ones.
//! - The module [`layout`] moves the code and memory of a program to other addresses on purpose.
//! - The module [`driver`] wraps devices, memory, streams, events, graphs, kernels and launches.
//! - The module [`compiler`] compiles kernel source to machine code, caches the machine code on
//!   disk, and reads facts from the machine code.
//! - The module [`libraries`] runs GEMMs by cuBLASLt, operation graphs by cuDNN, and collectives by
//!   NCCL.
//! - The module [`spec`] has specifications of kernels, from which the kernels are compiled,
//!   launched, recorded and tested.
//! - The module [`instruments`] has kernels that measure: memory bandwidth, spins of known length,
//!   stream blocking, clock probes and the L2 flush.
//! - The module [`observe`] has bindings of CUPTI's activity records, NVML's readings and NVTX
//!   ranges.
//!
//! All `unsafe` code of the workspace is in the crate kernelgate-cuda. The functions of this crate
//! are safe, including [`Kernel::launch`], which checks the number and sizes of the arguments
//! against the compiled kernel. A kernel's accesses through its pointer arguments are not checked.
//! A kernel writes to device memory and, if the device can address host memory (HMM, Grace Hopper),
//! could write there too, like any C function behind a safe wrapper. A program that loads a kernel
//! trusts the kernel's code; verification checks only its results.
//!
//! This crate does not use the CUDA runtime, `nvcc` or toolkit headers: kernels include only
//! `kernels/common` and files of their own package.

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

pub use case_failure::CaseFailureReason;
pub use compiler::source::Source;
pub use driver::device::Device;
pub use driver::devices::Devices;
pub use driver::launch::argument::{KernelArgument, KernelArgumentList};
pub use driver::launch::code_image::KernelImage;
pub use driver::launch::kernel::Kernel;
pub use driver::launch::prepared::PreparedLaunch;
pub use driver::launch::shape::Launch;
pub use driver::launch::tensor_map::{TMA_ALIGNMENT_BYTES, TensorMapElement, TensorWithTmaBoxes};
pub use driver::memory::buffer::DeviceBuffer;
pub use driver::options::DeviceOptions;
pub use driver::stream::joined_stream::ForeignStreamJoinedWithDevice;
pub use driver::stream::raw_stream::{RawContextHandle, RawStreamHandle};
pub use error::{BackendError, DriverErrorCode};
pub use spec::{KernelSpec, LoadedKernelWithLaunch, RequiredArchitecture};
