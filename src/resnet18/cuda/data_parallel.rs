//! A training step of ResNet-18 over several GPUs: `best` on each GPU. The gradients of the last
//! stages are summed over the GPUs while the backward pass goes on.

use super::fused_train;
use crate::collective::InPlaceSum;
use crate::resnet18::data_parallel::{DataParallel, rank_tensor_name};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::backend::program::program_set::{self, RankProgram};
use kernelgate::workload::Tensors;
use kernelgate_cuda::Devices;

/// Bytes of device memory of the training step on one GPU.
pub fn device_bytes_per_gpu(problem: &DataParallel) -> u64 {
    let shape = problem.step_of_one_gpu().shape;
    let sums = fused_train::gradient_sums_by_bucket(&shape, problem.gpus);
    fused_train::launches_of_one_gpu(&shape, problem.gpus, sums).device_bytes()
}

/// Loads a program on each GPU, and connects the programs' sums over GPUs.
pub fn prepare_rank_programs(
    problem: &DataParallel,
    inputs: &Tensors,
    devices: &Devices,
) -> Result<CudaTask, BackendError> {
    devices.require_peer_access()?;
    let shape = problem.step_of_one_gpu().shape;
    let sums = fused_train::gradient_sums_by_bucket(&shape, problem.gpus);
    let rank = |rank| RankProgram {
        program: fused_train::launches_of_one_gpu(&shape, problem.gpus, sums.clone()),
        inputs: problem.inputs_of_gpu(inputs, rank),
    };
    let ranks = (0..problem.gpus).map(rank).collect();
    program_set::ranks_task(ranks, devices, rank_tensor_name, || {
        sums.iter().try_for_each(|sum| InPlaceSum::connect_gpus(sum))
    })
}
