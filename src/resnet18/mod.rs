//! The ResNet-18 family, a complete ST-BIF spiking network: definitions, fp64 reference, and CPU
//! and CUDA implementations.

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
pub use cuda::list_resnet18_kernels;
pub use data_parallel::{DATA_PARALLEL_WORKLOAD, DataParallelTrainingStep};
pub use definition::*;
use kernelgate::harness::EmbeddedPeerProgram;
use kernelgate::suite::{
    WorkloadSuite, join_implementations_with_axis_scan, join_workload_with_implementations,
};

/// All workloads of the ResNet-18 family, each with its CPU and GPU implementations.
pub fn resnet18_suites() -> Vec<WorkloadSuite> {
    vec![
        join_implementations_with_axis_scan(
            &INFERENCE_WORKLOAD,
            cpu::CPU_INFERENCE_ROWS.iter().chain(cuda::CUDA_INFERENCE_LADDER),
            RESNET_INFERENCE_SCAN,
        ),
        join_implementations_with_axis_scan(
            &TRAINING_STEP_WORKLOAD,
            cpu::CPU_TRAINING_STEP_ROWS.iter().chain(cuda::CUDA_TRAINING_STEP_LADDER),
            RESNET_TRAINING_STEP_SCAN,
        ),
        join_workload_with_implementations(&DATA_PARALLEL_WORKLOAD, cuda::CUDA_DATA_PARALLEL_ROWS),
    ]
}

/// The ResNet-18 family's entry in the list of all workload families.
pub const RESNET18_FAMILY: WorkloadFamily = WorkloadFamily {
    family_name: "resnet18",
    suites: resnet18_suites,
    kernels: list_resnet18_kernels,
    peer_program: Some(EmbeddedPeerProgram {
        workload_family: "resnet18",
        main_file_name: "resnet18.py",
        file_names_and_texts: &[
            ("common.py", include_str!("../../peers/common.py")),
            ("resnet18.py", include_str!("../../peers/resnet18.py")),
            ("resnet18_triton.py", include_str!("../../peers/resnet18_triton.py")),
        ],
    }),
};
