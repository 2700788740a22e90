//! NVIDIA GPUs through the driver API and NVRTC, all loaded at run time: a machine without them builds and runs this program.
//!
//! So far: finding the libraries, compiling the kernels, reading what the compiler made of them. Deliberately absent: the CUDA
//! runtime, `nvcc`, and toolkit headers (kernels include nothing but `kernels/common`).

#![allow(unsafe_code)]

pub mod compile;
pub mod cubin;
pub mod library;
pub mod occupancy;
pub mod sources;
