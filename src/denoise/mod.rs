//! The denoise family, actions of a robot policy: definition, fp64 reference, CPU and CUDA rows.

mod cpu;
mod cuda;
mod definition;
mod fp8;
mod int4;
pub mod model;
#[cfg(test)]
mod plain;
pub mod reference;
mod shape;

use crate::family::WorkloadFamily;
pub use cuda::kernels;
pub use definition::*;
use kernelgate::harness::PeerProgramSource;
use kernelgate::suite::{Suite, suite_with_scan};

/// All workloads of the denoise family, each with its rows.
pub fn suites() -> Vec<Suite> {
    vec![
        suite_with_scan(&STEP_WORKLOAD, cpu::STEP.iter().chain(cuda::STEP), STEP_SCAN),
        suite_with_scan(&LOOP_WORKLOAD, cpu::LOOP.iter().chain(cuda::LOOP), LOOP_SCAN),
    ]
}

/// Entry of denoise in the list of workload families.
pub const FAMILY: WorkloadFamily = WorkloadFamily {
    name: "denoise",
    suites,
    kernels,
    peers: Some(PeerProgramSource {
        family: "denoise",
        main: "denoise.py",
        files: &[
            ("common.py", include_str!("../../peers/common.py")),
            ("denoise.py", include_str!("../../peers/denoise.py")),
        ],
    }),
};
