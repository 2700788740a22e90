//! cuDNN 9 through its back-end interface, loaded at run time: the library's own kernels for a
//! problem.
//!
//! Deliberately absent: the C headers, the C++ front end, and every operation that no workload here
//! needs.

pub mod api;
pub mod graph;

pub use api::CudnnRefusal;
pub use graph::{CudnnExecutionPlan, CudnnOperationGraph, GraphTensor};
