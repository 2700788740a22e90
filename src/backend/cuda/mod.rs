//! NVIDIA GPUs through the driver API and NVRTC, all loaded at run time: a machine without them builds and runs this program.
//!
//! Deliberately absent: the CUDA runtime, `nvcc`, and toolkit headers (kernels include nothing but `kernels/common`).

#![allow(unsafe_code)]

pub mod argument;
pub mod attention;
pub mod bandwidth;
pub mod blas;
pub mod cache;
pub mod compile;
pub mod cubin;
pub mod cublaslt;
pub mod cudnn;
pub mod denoise;
pub mod device;
pub mod event;
pub mod instruments;
pub mod kernel;
pub mod library;
pub mod memory;
pub mod occupancy;
pub mod persistence;
pub mod range;
pub mod sources;
pub mod spin;
pub mod st_bif;
pub mod task;
pub mod telemetry;
#[cfg(test)]
mod tests;

pub use device::{Argument, Buffer, Device, Kernel, Shape};
pub use sources::Build;
pub use task::{Output, Task};
