//! The denoise workload family (actions of a robot policy): definitions, fp64 reference, and CPU
//! and CUDA implementations.

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
pub use cuda::list_denoise_kernels;
pub use definition::*;
use kernelgate::harness::EmbeddedPeerProgram;
use kernelgate::suite::{WorkloadSuite, join_implementations_with_axis_scan};

/// All workloads that denoise a robot policy's actions, each with its CPU and GPU implementations.
pub fn denoise_suites() -> Vec<WorkloadSuite> {
    vec![
        join_implementations_with_axis_scan(
            &DENOISE_STEP_WORKLOAD,
            cpu::CPU_DENOISE_STEP_ROWS.iter().chain(cuda::CUDA_DENOISE_STEP_LADDER),
            DENOISE_STEP_SCAN,
        ),
        join_implementations_with_axis_scan(
            &DENOISE_LOOP_WORKLOAD,
            cpu::CPU_DENOISE_LOOP_ROWS.iter().chain(cuda::CUDA_DENOISE_LOOP_LADDER),
            DENOISE_LOOP_SCAN,
        ),
    ]
}

/// The denoise family's entry in the list of all workload families.
pub const DENOISE_FAMILY: WorkloadFamily = WorkloadFamily {
    family_name: "denoise",
    suites: denoise_suites,
    kernels: list_denoise_kernels,
    peer_program: Some(EmbeddedPeerProgram {
        workload_family: "denoise",
        main_file_name: "denoise.py",
        file_names_and_texts: &[
            ("common.py", include_str!("../../peers/common.py")),
            ("denoise.py", include_str!("../../peers/denoise.py")),
        ],
    }),
};
