//! ResNet-18 on the GPU: from one launch for each operation and time step to the whole network in
//! one launch.
//!
//! Each kernel's file under `kernels/resnet18` explains its computation, thread mapping and bound.
//! A ResNet-18 rung is a `LaunchProgram`: a list of launches and memory regions that the host
//! enqueues one by one or replays as a CUDA graph. For inference, weights are packed on the host
//! while a case is prepared; a training step packs them in its launches. The kernels start the
//! neurons' state in the first time step, so no launch resets it. Frames are stored time-major, as
//! every kernel of the fused rungs reads them, so only the stem's operand is gathered. The
//! ResNet-18 rungs on the GPU support no f32 tensors, on purpose.

mod best;
mod data_parallel;
mod fused;
mod fused_train;
mod kernel_weights;
mod parameter_jobs;
mod per_op;
mod tiles;
mod train;

use crate::family::{check_problem_dtype_is_computed, per_op_and_graph_rows};
use crate::resnet18::data_parallel::DataParallelTrainingStep;
use crate::resnet18::definition::{ResNetInference, ResNetParameters, ResNetTrainingStep};
use kernelgate::backend::program::ProgramLaunchMode;
use kernelgate::backend::{Implementation, PrepareFunction};
use kernelgate::workload::Dtype;
use kernelgate_cuda::spec::{ListedKernelBuild, list_kernel_rows};

/// Lists all CUDA kernels of the ResNet-18 family.
pub fn list_resnet18_kernels() -> Vec<ListedKernelBuild> {
    [
        list_kernel_rows(per_op::PER_OP_INFERENCE_KERNELS),
        list_kernel_rows(fused::FUSED_FORWARD_KERNELS),
        list_kernel_rows(best::BEST_RUNG_KERNELS),
        list_kernel_rows(train::PER_OP_TRAINING_KERNELS),
        list_kernel_rows(fused_train::FUSED_BACKWARD_KERNELS),
        list_kernel_rows(fused_train::ALL_PARAMETER_KERNELS),
    ]
    .concat()
}

/// Ladder of ResNet-18 inference.
pub const CUDA_INFERENCE_LADDER: &[Implementation<ResNetInference>] = &{
    let [per_op, graph] = per_op_and_graph_rows(
        "a launch an operation from the host, neurons a launch a time step: bound by launches, as \
         eager frameworks are",
        |problem: &ResNetInference| {
            check_problem_dtype_is_computed(problem.shape.dtype, Dtype::Bf16)
        },
        |problem: &ResNetInference| per_op::per_op_inference_program(&problem.shape),
    );
    [per_op, graph, FUSED_INFERENCE_ROW, BEST_RUNG_INFERENCE_ROW]
};

const FUSED_INFERENCE_ROW: Implementation<ResNetInference> = Implementation {
    implementation_name: "cuda/fused",
    description: "a kernel a layer in one graph: implicit GEMM on spikes in bf16, bias, residual \
                and neurons of all steps behind it; the stem once an image",
    supports: |problem| {
        check_problem_dtype_is_computed(problem.shape.dtype, Dtype::Bf16)
            .and_then(|()| tiles::check_tile_kernels_are_compiled(&problem.shape))
    },
    prepare: PrepareFunction::Program(
        |problem| fused::fused_inference_program(&problem.shape),
        ProgramLaunchMode::CapturedGraph,
    ),
};

const BEST_RUNG_INFERENCE_ROW: Implementation<ResNetInference> = Implementation {
    implementation_name: "cuda/best",
    description: "the network in one launch, in groups of eight blocks that hand packed spikes on; \
                their weights are on the way ahead of them",
    supports: |problem| {
        check_problem_dtype_is_computed(problem.shape.dtype, Dtype::Bf16)
            .and_then(|()| best::check_all_layers_kernel_is_compiled(&problem.shape))
    },
    prepare: PrepareFunction::Program(
        |problem| best::best_rung_inference_program(&problem.shape),
        ProgramLaunchMode::CapturedGraph,
    ),
};

fn check_training_step_support(
    problem: &ResNetTrainingStep,
    supported: fn(&ResNetParameters) -> Result<(), String>,
) -> Result<(), String> {
    problem.check_comparable_with_reference()?;
    check_problem_dtype_is_computed(problem.shape.dtype, Dtype::Bf16)?;
    supported(&problem.shape)
}

/// GPU implementations (rungs) of a ResNet-18 training step.
pub const CUDA_TRAINING_STEP_LADDER: &[Implementation<ResNetTrainingStep>] = &{
    let [per_op, graph] = per_op_and_graph_rows(
        "a launch an operation from the host, neurons forward a launch a time step, backward by \
         replay",
        |problem: &ResNetTrainingStep| {
            check_training_step_support(problem, train::check_frames_are_a_multiple_of_eight)
        },
        |problem: &ResNetTrainingStep| train::per_op_training_step_program(&problem.shape),
    );
    [per_op, graph, FUSED_TRAINING_STEP_ROW, BEST_RUNG_TRAINING_STEP_ROW]
};

const FUSED_TRAINING_STEP_ROW: Implementation<ResNetTrainingStep> = Implementation {
    implementation_name: "cuda/fused",
    description: "a kernel a layer forward and backward, neurons behind each GEMM; gradients of all \
                weights in one launch, SGD in another; in one graph",
    supports: |problem| {
        check_training_step_support(problem, tiles::check_tile_kernels_are_compiled)
    },
    prepare: PrepareFunction::Program(
        |problem| fused_train::fused_training_program(&problem.shape),
        ProgramLaunchMode::CapturedGraph,
    ),
};

const BEST_RUNG_TRAINING_STEP_ROW: Implementation<ResNetTrainingStep> = Implementation {
    implementation_name: "cuda/best",
    description: "fused with all layers of the forward pass behind the pooling in one launch",
    supports: |problem| {
        check_training_step_support(problem, best::check_all_layers_kernel_is_compiled)
    },
    prepare: PrepareFunction::Program(
        |problem| fused_train::best_rung_training_program(&problem.shape),
        ProgramLaunchMode::CapturedGraph,
    ),
};

/// GPU implementations of a ResNet-18 training step over several GPUs.
pub const CUDA_DATA_PARALLEL_ROWS: &[Implementation<DataParallelTrainingStep>] = &[
    Implementation {
        implementation_name: "cuda/best",
        description: "best on each GPU; gradients are summed over peer memory in three buckets, beside the \
            backward pass",
        supports: |problem| {
            check_training_step_support(
                &problem.training_step_per_gpu(),
                best::check_all_layers_kernel_is_compiled,
            )
        },
        prepare: PrepareFunction::CudaOnGpuSet {
            device_bytes: data_parallel::training_step_device_bytes_per_gpu,
            prepare: data_parallel::prepare_data_parallel_training_step,
        },
    },
];

#[cfg(test)]
mod tests;
