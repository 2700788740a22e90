//! Kernels: machine code, loaded kernels, their launches, and the list of kernels that a row
//! loaded.

mod admission;
pub mod argument;
pub(crate) mod attributes;
pub(crate) mod clusters;
pub mod code_image;
pub mod kernel;
pub mod prepared;
pub mod shape;
pub mod stage_times;
pub mod tensor_map;
pub mod used_kernels;
