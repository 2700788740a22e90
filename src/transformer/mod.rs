//! The transformer family, a language model: definition, fp64 reference, CPU and CUDA rows.

mod components;
mod cpu;
mod cuda;
mod definition;
mod gradients;
mod reference;
pub mod shape;
#[cfg(test)]
mod tests;

use crate::family::WorkloadFamily;
pub use cuda::kernels;
pub use definition::*;
use kernelgate::harness::PeerProgramSource;
use kernelgate::suite::{Suite, join_rows};

/// All workloads of the transformer family, each with its rows.
pub fn suites() -> Vec<Suite> {
    vec![
        join_rows(&FORWARD, cpu::FORWARD.iter().chain(cuda::FORWARD)),
        join_rows(&TRAIN_STEP, cpu::TRAIN_STEP.iter().chain(cuda::TRAIN_STEP)),
        join_rows(&components::COMPONENT, cuda::COMPONENT.iter()),
    ]
}

/// Entry of the transformer in the list of workload families.
pub const FAMILY: WorkloadFamily = WorkloadFamily {
    name: "transformer",
    suites,
    kernels,
    peers: Some(PeerProgramSource {
        family: "transformer",
        main: "transformer.py",
        files: &[
            ("common.py", include_str!("../../peers/common.py")),
            ("transformer_sizes.py", include_str!("../../peers/transformer_sizes.py")),
            ("transformer.py", include_str!("../../peers/transformer.py")),
        ],
    }),
};
