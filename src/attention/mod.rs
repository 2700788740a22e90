//! The attention family: definition, fp64 reference, CPU and CUDA rows, and the three steps of
//! attention alone.

pub mod components;
mod cpu;
pub mod cuda;
mod definition;
mod gradients;
mod quantised;
pub mod reference;
mod ring;
pub mod sample;

use crate::family::WorkloadFamily;
pub use cuda::kernels;
pub use definition::*;
pub use gradients::*;
use kernelgate::harness::PeerProgramSource;
use kernelgate::suite::{Suite, join_rows, suite_with_scan};
pub use ring::{RING_WORKLOAD, RingProblem};

/// All workloads of the attention family, each with its rows.
pub fn suites() -> Vec<Suite> {
    vec![
        suite_with_scan(&FORWARD, cpu::FORWARD.iter().chain(cuda::forward_rows()), FORWARD_SCAN),
        suite_with_scan(
            &BACKWARD,
            cpu::BACKWARD.iter().chain(cuda::backward_rows()),
            FORWARD_SCAN_AXES,
        ),
        join_rows(&RING_WORKLOAD, cpu::RING.iter().chain(cuda::RING)),
        join_rows(&components::SCORES, cpu::SCORES.iter().chain(cuda::SCORES_ROWS)),
        join_rows(&components::SOFTMAX, cpu::SOFTMAX.iter().chain(cuda::SOFTMAX)),
        join_rows(&components::VALUES, cpu::VALUES.iter().chain(cuda::VALUES_ROWS)),
    ]
}

/// Entry of attention in the list of workload families.
pub const FAMILY: WorkloadFamily = WorkloadFamily {
    name: "attention",
    suites,
    kernels,
    peers: Some(PeerProgramSource {
        family: "attention",
        main: "attention.py",
        files: &[
            ("common.py", include_str!("../../peers/common.py")),
            ("flash_attention4.py", include_str!("../../peers/flash_attention4.py")),
            ("attention.py", include_str!("../../peers/attention.py")),
        ],
    }),
};
