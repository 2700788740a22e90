//! Compilation of kernel source to machine code by NVRTC, its cache on disk, and facts read from
//! the machine code.

pub mod cache;
pub mod code;
pub mod cubin;
pub mod nvrtc;
pub mod occupancy;
pub mod source;
