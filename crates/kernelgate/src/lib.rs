//! kernelgate: a benchmark harness for GPU kernels, built on Criterion.
//!
//! A [`workload`] defines a computation: seeded inputs, an fp64 reference, declared work. A
//! [`backend`] implements a workload, with one [`backend::Implementation`] for each row. The
//! [`harness`] verifies each case, times it, relates its time to the device's measured limits and
//! records the run. The program, `kernelgate`, drives bench executables that link this crate
//! through one [`protocol`], and decides whether they got slower. Your own kernel goes through the
//! same `main` as ours: see [`prelude`] and the repository's `examples/`.
//!
//! Modules are in reading order; each imports only from earlier ones, which a test of the
//! repository checks.

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

/// The names that a bench binary imports.
pub mod prelude {
    pub use crate::backend::cpu::CpuTask;
    pub use crate::backend::{BackendError, Implementation, Prepare, cuda};
    pub use crate::harness::Harness;
    pub use crate::suite::join_rows;
    pub use crate::workload::{
        Axis, AxisError, Dtype, Expected, FlopUnit, Point, Problem, Tensor, TensorData, Tensors,
        Tolerance, Work, Workload, random,
    };
}
