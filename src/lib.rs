//! kernelgate: a benchmark harness for GPU kernels.
pub mod backend;
pub mod simd;
pub mod suite;
pub mod verify;
pub mod workload;
