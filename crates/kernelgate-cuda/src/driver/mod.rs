//! The driver API: devices, memory, streams, events, graphs, kernels and their launches.

pub mod argument;
mod attributes;
pub mod buffer;
mod check;
mod clusters;
pub mod context_settings;
pub mod device;
pub mod devices;
pub mod dims;
pub mod event;
pub mod foreign_stream;
pub mod graph;
pub mod hold;
pub mod image;
pub mod joined;
pub mod kernel;
pub mod mailbox;
pub mod memory;
pub mod options;
pub mod persistence;
pub mod prepared;
pub mod raw_stream;
pub(crate) mod residency;
pub mod stages;
mod staging;
mod status;
mod stream_settings;
pub mod stream_timer;
pub mod tensor_map;
pub mod thread_state;
mod timed_stream;
pub mod used;
mod wait;
pub mod window;

pub use cudarc::driver::CudaStream;
