//! The transformer family, a language model: definitions, fp64 reference, and CPU and CUDA
//! implementations.

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
pub use cuda::list_transformer_kernels;
pub use definition::*;
use kernelgate::harness::EmbeddedPeerProgram;
use kernelgate::suite::{WorkloadSuite, join_workload_with_implementations};

/// All workloads of the transformer family, each with its CPU and GPU implementations.
pub fn transformer_suites() -> Vec<WorkloadSuite> {
    vec![
        join_workload_with_implementations(
            &LM_FORWARD_WORKLOAD,
            cpu::CPU_LM_FORWARD_ROWS.iter().chain(cuda::CUDA_LM_FORWARD_LADDER),
        ),
        join_workload_with_implementations(
            &LM_TRAINING_STEP_WORKLOAD,
            cpu::CPU_LM_TRAINING_STEP_ROWS.iter().chain(cuda::CUDA_LM_TRAINING_STEP_LADDER),
        ),
        join_workload_with_implementations(
            &components::SINGLE_KERNEL_WORKLOAD,
            cuda::CUDA_SINGLE_KERNEL_ROWS.iter(),
        ),
    ]
}

/// The transformer family's entry in the list of all workload families.
pub const TRANSFORMER_FAMILY: WorkloadFamily = WorkloadFamily {
    family_name: "transformer",
    suites: transformer_suites,
    kernels: list_transformer_kernels,
    peer_program: Some(EmbeddedPeerProgram {
        workload_family: "transformer",
        main_file_name: "transformer.py",
        file_names_and_texts: &[
            ("common.py", include_str!("../../peers/common.py")),
            ("transformer_sizes.py", include_str!("../../peers/transformer_sizes.py")),
            ("transformer.py", include_str!("../../peers/transformer.py")),
        ],
    }),
};
