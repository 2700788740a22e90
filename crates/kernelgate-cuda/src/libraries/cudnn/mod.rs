//! cuDNN 9 through its back-end interface, loaded at run time: the library's own kernels for a
//! problem.
//!
//! This module has neither the C headers nor the C++ front end, and only those operations that
//! workloads here need.

pub mod api;
pub mod graph;

pub use api::CudnnRefusal;
pub use graph::{CudnnExecutionPlan, CudnnOperationGraph, GraphTensor};
