//! Compiled kernels: their machine code in two builds, their recorded resources, and the cause of a
//! slow-down.

pub mod code;
pub mod explanation;
pub mod resources;
