//! A training step of ResNet-18 over several GPUs with data parallelism, with the launches of the
//! rung `best` on each GPU. The weight gradients of the last stages are summed over the GPUs while
//! the backward pass goes on.

use super::fused_train;
use crate::collective::InPlaceAllReduce;
use crate::resnet18::data_parallel::{DataParallelTrainingStep, tensor_name_on_rank};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::backend::program::program_set::{self, ProgramOfGpu};
use kernelgate::workload::Tensors;
use kernelgate_cuda::Devices;

/// Bytes of device memory of the data-parallel training step on one GPU.
pub fn training_step_device_bytes_per_gpu(problem: &DataParallelTrainingStep) -> u64 {
    let shape = problem.training_step_per_gpu().shape;
    let sums = fused_train::all_reduces_of_gradient_buckets(&shape, problem.gpus);
    fused_train::data_parallel_training_program_of_one_gpu(&shape, problem.gpus, sums)
        .device_bytes()
}

/// Loads a training program on each GPU, and connects the all-reduces of these programs.
pub fn prepare_data_parallel_training_step(
    problem: &DataParallelTrainingStep,
    inputs: &Tensors,
    devices: &Devices,
) -> Result<CudaTask, BackendError> {
    devices.require_peer_access_between_all()?;
    let shape = problem.training_step_per_gpu().shape;
    let sums = fused_train::all_reduces_of_gradient_buckets(&shape, problem.gpus);
    let rank = |rank| ProgramOfGpu {
        program: fused_train::data_parallel_training_program_of_one_gpu(
            &shape,
            problem.gpus,
            sums.clone(),
        ),
        inputs: problem.inputs_of_rank(inputs, rank),
    };
    let ranks = (0..problem.gpus).map(rank).collect();
    program_set::task_from_program_per_gpu(ranks, devices, tensor_name_on_rank, || {
        sums.iter().try_for_each(|sum| InPlaceAllReduce::connect_gpus_by_address_tables(sum))
    })
}
