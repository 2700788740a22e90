//! The ST-BIF family of spiking neuron workloads: definitions, fp64 reference, and CPU and CUDA
//! implementations.

pub mod cpu;
pub mod cuda;
mod definition;
pub mod firing_rate;
pub mod neuron;

use crate::family::WorkloadFamily;
pub use cuda::list_st_bif_kernels;
pub use definition::*;
use kernelgate::harness::EmbeddedPeerProgram;
use kernelgate::suite::{
    WorkloadSuite, join_implementations_with_axis_scan, join_workload_with_implementations,
};
use kernelgate_cuda::instruments;

/// All workloads of the ST-BIF family, each with its CPU and GPU implementations.
pub fn st_bif_suites() -> Vec<WorkloadSuite> {
    vec![
        join_implementations_with_axis_scan(
            &ST_BIF_FORWARD_WORKLOAD,
            cpu::CPU_ST_BIF_FORWARD_ROWS.iter().chain(cuda::CUDA_ST_BIF_FORWARD_LADDER),
            ST_BIF_FORWARD_SCAN,
        ),
        join_implementations_with_axis_scan(
            &ST_BIF_BACKWARD_WORKLOAD,
            cpu::CPU_ST_BIF_BACKWARD_ROWS.iter().chain(cuda::CUDA_ST_BIF_BACKWARD_LADDER),
            ST_BIF_BACKWARD_SCAN,
        ),
        join_workload_with_implementations(
            &firing_rate::FIRING_RATE_WORKLOAD,
            firing_rate::CPU_FIRING_RATE_ROWS,
        ),
    ]
}

/// The ST-BIF family's entry in the list of all workload families.
pub const ST_BIF_FAMILY: WorkloadFamily = WorkloadFamily {
    family_name: "st_bif",
    suites: st_bif_suites,
    kernels: || [list_st_bif_kernels(), instruments::all_instrument_kernels()].concat(),
    peer_program: Some(EmbeddedPeerProgram {
        workload_family: "st_bif",
        main_file_name: "st_bif.py",
        file_names_and_texts: &[
            ("common.py", include_str!("../../peers/common.py")),
            ("st_bif.py", include_str!("../../peers/st_bif.py")),
        ],
    }),
};
