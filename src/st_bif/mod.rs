//! ST-BIF spiking neurons: definition, fp64 reference, CPU and CUDA rows.

pub mod cpu;
pub mod cuda;
mod definition;
pub mod neuron;
pub mod rate;

pub use cuda::kernels;
pub use definition::*;
use kernelgate::harness::Peers;
use kernelgate::suite::{Suite, suite, suite_with_scan};

/// The workloads of the family, each with its rows.
pub fn suites() -> Vec<Suite> {
    vec![
        suite_with_scan(&FORWARD, cpu::FORWARD.iter().chain(cuda::FORWARD), FORWARD_SCAN),
        suite_with_scan(&BACKWARD, cpu::BACKWARD.iter().chain(cuda::BACKWARD), BACKWARD_SCAN),
        suite(&rate::RATE, rate::CPU),
    ]
}

/// Other people's kernels for the same problems.
pub const PEERS: Peers = Peers {
    family: "st_bif",
    main: "st_bif.py",
    files: &[
        ("common.py", include_str!("../../peers/common.py")),
        ("st_bif.py", include_str!("../../peers/st_bif.py")),
    ],
};
