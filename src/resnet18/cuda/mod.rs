//! ResNet-18 on the GPU: from one launch for each operation and time step to the whole network in
//! one launch.
//!
//! Each kernel's file under `kernels/resnet18` explains its computation, thread mapping and bound.
//! A rung is a `Program`: its launches and their memory. Weights are packed while a case is
//! prepared. Neurons start from their first step, so no launch resets them. Frames are time-major
//! as every kernel reads them, so that only the stem's operand is gathered. The dtype f32 is
//! excluded on purpose.

mod best;
mod data_parallel;
mod fused;
mod fused_train;
mod kernel_weights;
mod parameter_jobs;
mod per_op;
mod tiles;
mod train;

use crate::family::{check_dtype, per_op_and_graph};
use crate::resnet18::data_parallel::DataParallel;
use crate::resnet18::definition::{Inference, NetworkShape, TrainStep};
use kernelgate::backend::program::Capture;
use kernelgate::backend::{Implementation, Prepare};
use kernelgate::workload::Dtype;
use kernelgate_cuda::spec::{ListedKernel, list_kernel_rows};

/// All kernels of the ResNet-18 family.
pub fn kernels() -> Vec<ListedKernel> {
    [
        list_kernel_rows(per_op::KERNELS),
        list_kernel_rows(fused::KERNELS),
        list_kernel_rows(best::KERNELS),
        list_kernel_rows(train::KERNELS),
        list_kernel_rows(fused_train::KERNELS),
        list_kernel_rows(fused_train::STEP_KERNELS),
    ]
    .concat()
}

/// Ladder of ResNet-18 inference.
pub const INFERENCE: &[Implementation<Inference>] = &{
    let [per_op, graph] = per_op_and_graph(
        "a launch an operation from the host, neurons a launch a time step: bound by launches, as \
         eager frameworks are",
        |problem: &Inference| check_dtype(problem.shape.dtype, Dtype::Bf16),
        |problem: &Inference| per_op::inference_program(&problem.shape),
    );
    [per_op, graph, FUSED_INFERENCE, BEST_INFERENCE]
};

const FUSED_INFERENCE: Implementation<Inference> = Implementation {
    name: "cuda/fused",
    about: "a kernel a layer in one graph: implicit GEMM on spikes in bf16, bias, residual \
                and neurons of all steps behind it; the stem once an image",
    supports: |problem| {
        check_dtype(problem.shape.dtype, Dtype::Bf16)
            .and_then(|()| tiles::check_compiled(&problem.shape))
    },
    prepare: Prepare::Program(|problem| fused::inference_program(&problem.shape), Capture::Graph),
};

const BEST_INFERENCE: Implementation<Inference> = Implementation {
    name: "cuda/best",
    about: "the network in one launch, in groups of eight blocks that hand packed spikes on; \
                their weights are on the way ahead of them",
    supports: |problem| {
        check_dtype(problem.shape.dtype, Dtype::Bf16)
            .and_then(|()| best::check_compiled(&problem.shape))
    },
    prepare: Prepare::Program(|problem| best::inference_program(&problem.shape), Capture::Graph),
};

fn prepare_train_step(
    problem: &TrainStep,
    supported: fn(&NetworkShape) -> Result<(), String>,
) -> Result<(), String> {
    problem.is_comparable_with_reference()?;
    check_dtype(problem.shape.dtype, Dtype::Bf16)?;
    supported(&problem.shape)
}

/// Ladder of a ResNet-18 training step.
pub const TRAIN_STEP: &[Implementation<TrainStep>] = &{
    let [per_op, graph] = per_op_and_graph(
        "a launch an operation from the host, neurons forward a launch a time step, backward by \
         replay",
        |problem: &TrainStep| prepare_train_step(problem, train::check_gradient_gemm_support),
        |problem: &TrainStep| train::train_step_program(&problem.shape),
    );
    [per_op, graph, FUSED_TRAIN_STEP, BEST_TRAIN_STEP]
};

const FUSED_TRAIN_STEP: Implementation<TrainStep> = Implementation {
    name: "cuda/fused",
    about: "a kernel a layer forward and backward, neurons behind each GEMM; gradients of all \
                weights in one launch, SGD in another; in one graph",
    supports: |problem| prepare_train_step(problem, tiles::check_compiled),
    prepare: Prepare::Program(
        |problem| fused_train::training_program(&problem.shape),
        Capture::Graph,
    ),
};

const BEST_TRAIN_STEP: Implementation<TrainStep> = Implementation {
    name: "cuda/best",
    about: "fused with all layers of the forward pass behind the pooling in one launch",
    supports: |problem| prepare_train_step(problem, best::check_compiled),
    prepare: Prepare::Program(
        |problem| fused_train::merged_launches(&problem.shape),
        Capture::Graph,
    ),
};

/// Rows of a training step over several GPUs.
pub const DATA_PARALLEL: &[Implementation<DataParallel>] = &[Implementation {
    name: "cuda/best",
    about: "best on each GPU; gradients are summed over peer memory in three buckets, beside the \
            backward pass",
    supports: |problem| prepare_train_step(&problem.step_of_one_gpu(), best::check_compiled),
    prepare: Prepare::CudaSet {
        device_bytes: data_parallel::device_bytes_per_gpu,
        prepare: data_parallel::prepare_rank_programs,
    },
}];

#[cfg(test)]
mod tests;
