//! The collective family, exchanges between GPUs: definition, fp64 reference, a CPU row, NCCL, and
//! our own kernels over peer memory for sums.

mod cpu;
mod cuda;
mod definition;
#[cfg(test)]
mod simulation;

use crate::family::WorkloadFamily;
pub use cuda::{InPlaceSum, kernels};
pub use definition::*;
use kernelgate::harness::PeerProgramSource;
use kernelgate::suite::{Suite, join_rows};

/// All workloads of the collective family, each with its rows.
pub fn suites() -> Vec<Suite> {
    vec![
        join_rows(&ALL_REDUCE, cpu::EXCHANGE_ROWS.iter().chain(cuda::ALL_REDUCE)),
        join_rows(&ALL_GATHER, cpu::EXCHANGE_ROWS.iter().chain(cuda::NCCL_ONLY_ROWS)),
        join_rows(&REDUCE_SCATTER, cpu::EXCHANGE_ROWS.iter().chain(cuda::NCCL_ONLY_ROWS)),
        join_rows(&BROADCAST, cpu::EXCHANGE_ROWS.iter().chain(cuda::NCCL_ONLY_ROWS)),
        join_rows(&SEND, cpu::EXCHANGE_ROWS.iter().chain(cuda::NCCL_ONLY_ROWS)),
    ]
}

/// Entry of the collectives in the list of workload families.
pub const FAMILY: WorkloadFamily = WorkloadFamily {
    name: "collective",
    suites,
    kernels,
    peers: Some(PeerProgramSource {
        family: "collective",
        main: "collective.py",
        files: &[
            ("common.py", include_str!("../../peers/common.py")),
            ("collective.py", include_str!("../../peers/collective.py")),
        ],
    }),
};
