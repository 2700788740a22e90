//! Helpers that GPU tests of several workload families share.

use std::sync::Arc;

use kernelgate::backend::cuda::CudaTask;
use kernelgate::backend::{BackendError, Implementation};
use kernelgate::workload::{Problem, Tensors};
use kernelgate_cuda::Device;
pub use kernelgate_cuda::testing::lock_first_gpu;

/// Prepares an implementation on the GPU; returns `None` and prints the reason if its library is
/// missing or declines the problem.
pub fn prepare_row_or_skip_unsupported<P: Problem>(
    row: &Implementation<P>,
    problem: &P,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Option<CudaTask> {
    match row.prepare_on_one_gpu(problem, inputs, device) {
        Ok(task) => Some(task),
        Err(BackendError::Unsupported(reason)) => {
            eprintln!("skipped: {}: {reason}", row.implementation_name);
            None
        }
        Err(error) => panic!("{}: {error}", row.implementation_name),
    }
}
