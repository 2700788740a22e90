//! The language model on the GPU.

mod components;
mod kernels;

pub use components::COMPONENT;
pub use kernels::kernels;

#[cfg(test)]
mod tests;
