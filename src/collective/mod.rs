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
use kernelgate::suite::{WorkloadSuite, join_rows};

/// All workloads of the collective family, each with its CPU and GPU implementations.
pub fn collective_suites() -> Vec<WorkloadSuite> {
    vec![
        join_rows(&ALL_REDUCE, cpu::CPU_EXCHANGE_ROWS.iter().chain(cuda::CUDA_ALL_REDUCE_ROWS)),
        join_rows(&ALL_GATHER, cpu::CPU_EXCHANGE_ROWS.iter().chain(cuda::NCCL_ONLY_ROWS)),
        join_rows(&REDUCE_SCATTER, cpu::CPU_EXCHANGE_ROWS.iter().chain(cuda::NCCL_ONLY_ROWS)),
        join_rows(&BROADCAST, cpu::CPU_EXCHANGE_ROWS.iter().chain(cuda::NCCL_ONLY_ROWS)),
        join_rows(&SEND, cpu::CPU_EXCHANGE_ROWS.iter().chain(cuda::NCCL_ONLY_ROWS)),
    ]
}

/// The collective family's entry in the list of all workload families.
pub const COLLECTIVE_FAMILY: WorkloadFamily = WorkloadFamily {
    name: "collective",
    suites: collective_suites,
    kernels: list_collective_kernels,
    peers: Some(EmbeddedPeerProgram {
        family: "collective",
        main: "collective.py",
        files: &[
            ("common.py", include_str!("../../peers/common.py")),
            ("collective.py", include_str!("../../peers/collective.py")),
        ],
    }),
};
