//! The ST-BIF family, spiking neurons: definition, fp64 reference, CPU and CUDA rows.

pub mod cpu;
pub mod cuda;
mod definition;
pub mod firing_rate;
pub mod neuron;

use crate::family::WorkloadFamily;
pub use cuda::kernels;
pub use definition::*;
use kernelgate::harness::PeerProgramSource;
use kernelgate::suite::{Suite, join_rows, suite_with_scan};
use kernelgate_cuda::instruments;

/// All workloads of the ST-BIF family, each with its rows.
pub fn suites() -> Vec<Suite> {
    vec![
        suite_with_scan(&FORWARD, cpu::FORWARD.iter().chain(cuda::FORWARD), FORWARD_SCAN),
        suite_with_scan(&BACKWARD, cpu::BACKWARD.iter().chain(cuda::BACKWARD), BACKWARD_SCAN),
        join_rows(&firing_rate::RATE_WORKLOAD, firing_rate::FIRING_RATE_ROWS),
    ]
}

/// Entry of ST-BIF in the list of workload families.
pub const FAMILY: WorkloadFamily = WorkloadFamily {
    name: "st_bif",
    suites,
    kernels: || [kernels(), instruments::instrument_kernels()].concat(),
    peers: Some(PeerProgramSource {
        family: "st_bif",
        main: "st_bif.py",
        files: &[
            ("common.py", include_str!("../../peers/common.py")),
            ("st_bif.py", include_str!("../../peers/st_bif.py")),
        ],
    }),
};
