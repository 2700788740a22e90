//! Exchanges between GPUs: definition, fp64 reference, a CPU row, NCCL, and own kernels over peer
//! memory for sums.

mod cpu;
mod cuda;
mod definition;
#[cfg(test)]
mod simulation;

use crate::family::Family;
pub use cuda::{InPlaceSum, kernels};
pub use definition::*;
use kernelgate::harness::Peers;
use kernelgate::suite::{Suite, suite};

/// The workloads of the family, each with its rows.
pub fn suites() -> Vec<Suite> {
    vec![
        suite(&ALL_REDUCE, cpu::ROWS.iter().chain(cuda::ALL_REDUCE)),
        suite(&ALL_GATHER, cpu::ROWS.iter().chain(cuda::OTHERS)),
        suite(&REDUCE_SCATTER, cpu::ROWS.iter().chain(cuda::OTHERS)),
        suite(&BROADCAST, cpu::ROWS.iter().chain(cuda::OTHERS)),
        suite(&SEND, cpu::ROWS.iter().chain(cuda::OTHERS)),
    ]
}

/// The family.
pub const FAMILY: Family = Family {
    name: "collective",
    suites,
    kernels,
    peers: Some(Peers {
        family: "collective",
        main: "collective.py",
        files: &[
            ("common.py", include_str!("../../peers/common.py")),
            ("collective.py", include_str!("../../peers/collective.py")),
        ],
    }),
};
