//! The driver API: devices, memory, streams, events, graphs, kernels and their launches.

pub mod argument;
pub mod buffer;
mod check;
pub mod device;
pub mod event;
pub mod graph;
pub mod kernel;
pub mod mailbox;
pub mod memory;
pub mod persistence;
mod staging;
mod status;
mod wait;
pub mod window;

pub use cudarc::driver::CudaStream;
