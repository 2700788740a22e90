//! The attention workload family: definitions, fp64 reference, CPU and CUDA implementations, and
//! the separate workloads for scores, softmax and values.

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
pub use cuda::list_attention_kernels;
pub use definition::*;
pub use gradients::*;
use kernelgate::harness::EmbeddedPeerProgram;
use kernelgate::suite::{
    WorkloadSuite, join_implementations_with_axis_scan, join_workload_with_implementations,
};
pub use ring::{RING_WORKLOAD, RingAttentionProblem};

/// All workloads of the attention family, each with its implementations for CPU and GPU.
pub fn attention_suites() -> Vec<WorkloadSuite> {
    vec![
        join_implementations_with_axis_scan(
            &FORWARD,
            cpu::CPU_ATTENTION_FORWARD_ROWS.iter().chain(cuda::attention_forward_rows()),
            FORWARD_SCAN_WITH_DECODE,
        ),
        join_implementations_with_axis_scan(
            &BACKWARD,
            cpu::CPU_ATTENTION_BACKWARD_ROWS.iter().chain(cuda::attention_backward_rows()),
            FORWARD_SCAN_AXES,
        ),
        join_workload_with_implementations(&RING_WORKLOAD, cpu::RING.iter().chain(cuda::RING)),
        join_workload_with_implementations(
            &components::SCORES_STEP_WORKLOAD,
            cpu::CPU_SCORES_STEP_ROWS.iter().chain(cuda::CUDA_SCORES_STEP_ROWS),
        ),
        join_workload_with_implementations(
            &components::SOFTMAX_STEP_WORKLOAD,
            cpu::CPU_SOFTMAX_STEP_ROWS.iter().chain(cuda::CUDA_SOFTMAX_STEP_ROWS),
        ),
        join_workload_with_implementations(
            &components::VALUES_STEP_WORKLOAD,
            cpu::CPU_VALUES_STEP_ROWS.iter().chain(cuda::CUDA_VALUES_STEP_ROWS),
        ),
    ]
}

/// The attention family's entry in the list of all workload families.
pub const ATTENTION_FAMILY: WorkloadFamily = WorkloadFamily {
    family_name: "attention",
    suites: attention_suites,
    kernels: list_attention_kernels,
    peer_program: Some(EmbeddedPeerProgram {
        workload_family: "attention",
        main_file_name: "attention.py",
        file_names_and_texts: &[
            ("common.py", include_str!("../../peers/common.py")),
            ("flash_attention4.py", include_str!("../../peers/flash_attention4.py")),
            ("attention.py", include_str!("../../peers/attention.py")),
        ],
    }),
};
