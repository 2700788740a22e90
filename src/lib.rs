//! kernelgate: a benchmark harness for GPU kernels.
pub mod backend;
pub mod builtin;
pub mod cli;
pub mod exit;
pub mod gate;
pub mod harness;
pub mod measure;
pub mod record;
pub mod report;
pub mod stats;
pub mod suite;
pub mod verify;
pub mod workload;
