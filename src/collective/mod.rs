//! The collective workload family: definitions, fp64 reference, a CPU implementation, NCCL, and
//! kernelgate's own all-reduce kernels over peer memory.

mod cpu;
mod cuda;
mod definition;
#[cfg(test)]
mod simulation;

use crate::family::WorkloadFamily;
pub use cuda::{InPlaceAllReduce, list_collective_kernels};
pub use definition::*;
use kernelgate::harness::EmbeddedPeerProgram;
use kernelgate::suite::{WorkloadSuite, join_workload_with_implementations};

/// All workloads of the collective family, each with its CPU and GPU implementations.
pub fn collective_suites() -> Vec<WorkloadSuite> {
    vec![
        join_workload_with_implementations(
            &ALL_REDUCE,
            cpu::CPU_EXCHANGE_ROWS.iter().chain(cuda::CUDA_ALL_REDUCE_ROWS),
        ),
        join_workload_with_implementations(
            &ALL_GATHER,
            cpu::CPU_EXCHANGE_ROWS.iter().chain(cuda::NCCL_ONLY_ROWS),
        ),
        join_workload_with_implementations(
            &REDUCE_SCATTER,
            cpu::CPU_EXCHANGE_ROWS.iter().chain(cuda::NCCL_ONLY_ROWS),
        ),
        join_workload_with_implementations(
            &BROADCAST,
            cpu::CPU_EXCHANGE_ROWS.iter().chain(cuda::NCCL_ONLY_ROWS),
        ),
        join_workload_with_implementations(
            &SEND,
            cpu::CPU_EXCHANGE_ROWS.iter().chain(cuda::NCCL_ONLY_ROWS),
        ),
    ]
}

/// The collective family's entry in the list of all workload families.
pub const COLLECTIVE_FAMILY: WorkloadFamily = WorkloadFamily {
    family_name: "collective",
    suites: collective_suites,
    kernels: list_collective_kernels,
    peer_program: Some(EmbeddedPeerProgram {
        workload_family: "collective",
        main_file_name: "collective.py",
        file_names_and_texts: &[
            ("common.py", include_str!("../../peers/common.py")),
            ("collective.py", include_str!("../../peers/collective.py")),
        ],
    }),
};
