//! The ResNet-18 family, a complete ST-BIF network: definition, fp64 reference, CPU and CUDA rows.

mod breakdown;
mod convolution;
mod cpu;
mod cuda;
mod data_parallel;
mod definition;
mod gradient;
pub mod network;
#[cfg(test)]
mod plain;
pub mod reference;
mod shape;
mod weights_file;

use crate::family::WorkloadFamily;
pub use cuda::kernels;
pub use data_parallel::{DATA_PARALLEL, DataParallel};
pub use definition::*;
use kernelgate::harness::PeerProgramSource;
use kernelgate::suite::{Suite, join_rows, suite_with_scan};

/// All workloads of the ResNet-18 family, each with its rows.
pub fn suites() -> Vec<Suite> {
    vec![
        suite_with_scan(&INFERENCE, cpu::INFERENCE.iter().chain(cuda::INFERENCE), INFERENCE_SCAN),
        suite_with_scan(
            &TRAIN_STEP,
            cpu::TRAIN_STEP.iter().chain(cuda::TRAIN_STEP),
            TRAIN_STEP_SCAN,
        ),
        join_rows(&DATA_PARALLEL, cuda::DATA_PARALLEL),
    ]
}

/// Entry of ResNet-18 in the list of workload families.
pub const FAMILY: WorkloadFamily = WorkloadFamily {
    name: "resnet18",
    suites,
    kernels,
    peers: Some(PeerProgramSource {
        family: "resnet18",
        main: "resnet18.py",
        files: &[
            ("common.py", include_str!("../../peers/common.py")),
            ("resnet18.py", include_str!("../../peers/resnet18.py")),
            ("resnet18_triton.py", include_str!("../../peers/resnet18_triton.py")),
        ],
    }),
};
