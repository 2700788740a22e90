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
use kernelgate::harness::Peers;
use kernelgate::suite::{Suite, suite};

/// The workloads of the family, each with its rows.
pub fn suites() -> Vec<Suite> {
    vec![
        suite(&FORWARD, cpu::FORWARD.iter().chain(cuda::FORWARD)),
        suite(&TRAIN_STEP, cpu::TRAIN_STEP.iter().chain(cuda::TRAIN_STEP)),
        suite(&components::COMPONENT, cuda::COMPONENT.iter()),
    ]
}

/// The family.
pub const FAMILY: Family = Family {
    name: "transformer",
    suites,
    kernels,
    peers: Some(Peers {
        family: "transformer",
        main: "transformer.py",
        files: &[
            ("common.py", include_str!("../../peers/common.py")),
            ("transformer.py", include_str!("../../peers/transformer.py")),
        ],
    }),
};
