//! Kernels on a GPU: loaded kernel images, their arguments and launches, and the record of the
//! kernels that an implementation loaded.

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
