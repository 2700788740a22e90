//! Computations of kernelgate on the host: plain functions on slices.
//!
//! This crate is separate so that debug builds optimise the numerical code alone. A function that a
//! loop calls therefore has no type parameter, because generic functions are compiled in the
//! calling crate. This crate does not use cases, devices or files.

#[cfg(feature = "gemm")]
pub mod gemm;
pub mod random;
pub mod simd;
pub mod stats;
pub mod tensor;
