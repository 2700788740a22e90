//! Helpers that the GPU tests of the launchers share.

use std::sync::Arc;

use kernelgate::backend::cuda::CudaTask;
use kernelgate::backend::{BackendError, Implementation};
use kernelgate::workload::{Problem, Tensors};
use kernelgate_cuda::Device;
pub use kernelgate_cuda::testing::lock_first_gpu;

/// Prepares a row; `None`, with the reason printed, if it needs a library that is missing or
/// declines.
pub fn prepare_row<P: Problem>(
    row: &Implementation<P>,
    problem: &P,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Option<CudaTask> {
    match row.prepare_cuda(problem, inputs, device) {
        Ok(task) => Some(task),
        Err(BackendError::Unsupported(reason)) => {
            eprintln!("skipped: {}: {reason}", row.name);
            None
        }
        Err(error) => panic!("{}: {error}", row.name),
    }
}
