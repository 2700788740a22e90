//! The two-layer perceptron family: definitions, fp64 reference, and CPU and CUDA implementations.
//! The perceptron is the smallest network of the suite and the example for a new family ("How to
//! add" in CONTRIBUTING).

mod cpu;
mod cuda;
mod definition;
mod reference;
mod shape;

use crate::family::WorkloadFamily;
pub use cuda::list_mlp_kernels;
pub use definition::*;
use kernelgate::suite::{WorkloadSuite, join_workload_with_implementations};

/// All workloads of the perceptron family, each with its CPU and GPU implementations.
pub fn mlp_suites() -> Vec<WorkloadSuite> {
    vec![
        join_workload_with_implementations(
            &MLP_FORWARD_WORKLOAD,
            cpu::CPU_MLP_FORWARD_ROWS.iter().chain(cuda::CUDA_MLP_FORWARD_LADDER),
        ),
        join_workload_with_implementations(
            &MLP_BACKWARD_WORKLOAD,
            cpu::CPU_MLP_BACKWARD_ROWS.iter().chain(cuda::CUDA_MLP_BACKWARD_LADDER),
        ),
    ]
}

/// The perceptron family's entry in the list of all workload families.
pub const MLP_FAMILY: WorkloadFamily = WorkloadFamily {
    family_name: "mlp",
    suites: mlp_suites,
    kernels: list_mlp_kernels,
    peer_program: None,
};
