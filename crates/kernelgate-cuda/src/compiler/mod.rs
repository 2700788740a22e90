//! Compiles kernel sources to machine code with NVRTC, caches the machine code on disk, and reads
//! facts from the machine code.

pub mod cache;
pub mod code;
pub mod cubin;
pub mod nvrtc;
pub mod occupancy;
pub mod source;
