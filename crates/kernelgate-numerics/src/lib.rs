//! Computations of kernelgate on the host: plain functions on slices.
//!
//! It is a crate of its own so that debug builds optimise it and nothing else. A function that a
//! loop calls therefore has no type parameter, because generic functions are compiled in the
//! calling crate. Deliberately absent: cases, devices, files.

#[cfg(feature = "gemm")]
pub mod gemm;
pub mod random;
pub mod simd;
pub mod stats;
pub mod tensor;
