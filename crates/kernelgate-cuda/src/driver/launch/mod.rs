//! Kernels: machine code, loaded kernels, their launches, and what a row has loaded.

pub mod argument;
pub(crate) mod attributes;
pub(crate) mod clusters;
pub mod dims;
pub mod image;
pub mod kernel;
pub mod prepared;
pub(crate) mod residency;
pub mod stages;
pub mod tensor_map;
pub mod used;
