//! Compares compiled kernels: their machine code in two builds, their resources with a record, and
//! their role in a slow-down.

pub mod code;
pub mod explanation;
pub mod resources;
