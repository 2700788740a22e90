//! Numerical code of kernelgate for the host: plain functions on slices, and tensors in host
//! memory.
//!
//! This crate is separate so that debug builds of the workspace can optimise the numerical code
//! alone. A function that callers call in a loop has no type parameter, because a generic function
//! would be compiled, without optimisation, in the calling crate. This crate knows nothing of
//! benchmark cases, GPUs or files.

#[cfg(feature = "gemm")]
pub mod gemm;
pub mod random;
pub mod simd;
pub mod stats;
pub mod tensor;
