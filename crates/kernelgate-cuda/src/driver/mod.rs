//! Wrappers of the CUDA driver API: devices, memory, streams, events, graphs, kernels and their
//! launches.

pub mod context_settings;
pub mod device;
pub mod devices;
mod driver_error;
mod gpu_check;
pub mod graph;
pub mod graph_set;
pub mod launch;
pub mod memory;
pub mod options;
pub mod peers;
pub mod stream;

pub use cudarc::driver::CudaStream;
