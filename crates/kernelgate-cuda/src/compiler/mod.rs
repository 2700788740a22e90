//! Kernel source to machine code by NVRTC, its cache on disk, and what the machine code says of
//! itself.

pub mod cache;
pub mod code;
pub mod cubin;
pub mod nvrtc;
pub mod occupancy;
pub mod source;
