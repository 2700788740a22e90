//! kernelgate is a benchmark harness for GPU kernels, built on the Rust crate Criterion.
//!
//! A [`workload`] defines a computation: inputs from a seed, a reference result in fp64, and the
//! declared bytes and operations. A [`backend`] implements a workload: each
//! [`backend::Implementation`] is one row of the result table. The [`harness`] verifies the outputs
//! of each case, times it, compares its time with the device's measured limits, and writes the run
//! record. The program `kernelgate` runs bench executables that link this crate, over one
//! [`protocol`], and decides whether their kernels became slower. One `main` function benchmarks
//! both users' kernels and the kernels of this repository: see [`prelude`] and `examples/`.
//!
//! The modules below are in reading order; each module imports only from modules above it, which a
//! test checks.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "files of tests"))]

pub mod exit;
pub use kernelgate_numerics::stats;
pub mod workload;

pub mod backend;

pub mod attach;
pub mod suite;
pub mod verify;

pub mod trace;

pub mod measure;

pub mod record;

pub mod display;

pub mod protocol;

pub mod harness;

pub use harness::gpu_time;

/// The names that a bench file imports by `use kernelgate::prelude::*`.
pub mod prelude {
    pub use crate::backend::cpu::CpuTask;
    pub use crate::backend::{BackendError, Implementation, PrepareFunction, cuda};
    pub use crate::harness::Harness;
    pub use crate::suite::join_workload_with_implementations;
    pub use crate::workload::{
        Axis, AxisError, Dtype, Expected, FlopUnit, Point, Problem, Tensor, TensorData, Tensors,
        Tolerance, Work, Workload, random,
    };
}
