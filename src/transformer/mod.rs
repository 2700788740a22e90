//! A transformer language model: definition, fp64 reference, CPU and CUDA rows.

mod cpu;
mod definition;
mod gradients;
mod reference;
pub mod shape;
#[cfg(test)]
mod tests;

use crate::family::Family;
pub use definition::*;
use kernelgate::suite::{Suite, suite};
use kernelgate_cuda::spec::ListedKernel;

/// Every kernel of the family.
pub fn kernels() -> Vec<ListedKernel> {
    Vec::new()
}

/// The workloads of the family, each with its rows.
pub fn suites() -> Vec<Suite> {
    vec![suite(&FORWARD, cpu::FORWARD.iter()), suite(&TRAIN_STEP, cpu::TRAIN_STEP.iter())]
}

/// The family.
pub const FAMILY: Family = Family { name: "transformer", suites, kernels, peers: None };
