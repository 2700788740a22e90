//! The ST-BIF neuron on the GPU: a ladder of kernels from one launch for each time step to
//! vectorised kernels at the memory bandwidth limit.
//!
//! Each kernel's file under `kernels/st_bif` explains its computation, thread mapping and bound.
//! The Rust files `forward` and `backward` of the ST-BIF family each have the kernels of a ladder
//! and its implementations.

mod backward;
mod forward;
mod row;

pub use backward::{CUDA_ST_BIF_BACKWARD_LADDER, select_replay_kernel_and_arguments};
pub use forward::{CUDA_ST_BIF_FORWARD_LADDER, ONE_TIME_STEP_KERNEL};
use kernelgate_cuda::spec::{ListedKernelBuild, list_kernel_rows};
pub use row::neuron_constant_arguments;

/// Lists all CUDA kernels of the ST-BIF family, firing rate excluded.
pub fn list_st_bif_kernels() -> Vec<ListedKernelBuild> {
    [
        list_kernel_rows(forward::ST_BIF_FORWARD_KERNELS),
        list_kernel_rows(backward::ST_BIF_BACKWARD_KERNELS),
    ]
    .concat()
}
