//! Calls cuDNN 9, which has NVIDIA's own kernels for operation graphs, through its backend
//! interface; the library is loaded at run time.
//!
//! This module uses neither cuDNN's C headers nor its C++ frontend, and has only those operations
//! that workloads of this repository need.

pub mod api;
pub mod graph;

pub use api::CudnnUnsupported;
pub use graph::{CudnnExecutionPlan, CudnnGraphTensor, CudnnOperationGraphBuilder};
