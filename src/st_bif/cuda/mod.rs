//! The ST-BIF neuron on the GPU: the ladder from one launch for each time step to vectorised
//! kernels at the memory limit.
//!
//! Each kernel's file under `kernels/st_bif` explains its computation, thread mapping and bound.
//! The file of a ladder has the rows of its kernels and its implementations.

mod backward;
mod forward;
mod row;

pub use backward::{BACKWARD, replay_kernel};
pub use forward::{FORWARD, PER_STEP_KERNEL};
use kernelgate_cuda::spec::{ListedKernel, list_kernel_rows};
pub use row::arguments;

/// All kernels of the ST-BIF family.
pub fn kernels() -> Vec<ListedKernel> {
    [list_kernel_rows(forward::KERNELS), list_kernel_rows(backward::KERNELS)].concat()
}
