//! A transformer language model: definition, fp64 reference, CPU and CUDA rows.

mod components;
mod cpu;
mod cuda;
mod definition;
mod gradients;
mod reference;
pub mod shape;
#[cfg(test)]
mod tests;

use crate::family::Family;
pub use cuda::kernels;
pub use definition::*;
use kernelgate::suite::{Suite, suite};

/// The workloads of the family, each with its rows.
pub fn suites() -> Vec<Suite> {
    vec![
        suite(&FORWARD, cpu::FORWARD.iter()),
        suite(&TRAIN_STEP, cpu::TRAIN_STEP.iter()),
        suite(&components::COMPONENT, cuda::COMPONENT.iter()),
    ]
}

/// The family.
pub const FAMILY: Family = Family { name: "transformer", suites, kernels, peers: None };
