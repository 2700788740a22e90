//! The driver API: devices, memory, streams, events, graphs, kernels and their launches.

mod check;
pub mod context_settings;
pub mod device;
pub mod devices;
pub mod graph;
pub mod graph_set;
pub mod launch;
pub mod memory;
pub mod options;
pub mod peers;
mod status;
pub mod stream;

pub use cudarc::driver::CudaStream;
