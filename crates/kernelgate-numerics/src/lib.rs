//! What kernelgate computes on the host: plain functions on slices.
//!
//! A crate of its own so that debug builds optimise it and nothing else. A function that a loop
//! calls therefore has no type parameter: those are compiled in the crate that calls them.
//! Deliberately absent: cases, devices, files.

#[cfg(feature = "gemm")]
pub mod gemm;
pub mod random;
pub mod simd;
pub mod stats;
pub mod tensor;
