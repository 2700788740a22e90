//! The language model on the GPU: one launch for each operation, the same launches as a CUDA graph,
//! and fused kernels.
//!
//! Each implementation of the language model on the GPU is a `LaunchProgram`: a list of launches
//! and memory regions. The GEMMs are cuBLASLt's, except for three GEMMs with fused epilogues on
//! sm_90a; all other kernels are in `kernels/`.

mod attention;
mod components;
mod kernels;
mod network;
mod rung_choices;
mod training;

pub use components::CUDA_SINGLE_KERNEL_ROWS;
pub use kernels::list_transformer_kernels;

use std::sync::Arc;

use super::definition::{
    LanguageModelForward, LanguageModelTrainingStep, check_tokens_are_in_vocabulary,
};
use super::shape::LanguageModelShape;
use crate::attention::cuda::QueryGradientSumOrder;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::backend::program::{LaunchProgram, ProgramLaunchMode};
use kernelgate::backend::{BackendError, Implementation, PrepareFunction};
use kernelgate::workload::Tensors;
use kernelgate_cuda::Device;
use rung_choices::{AttentionOfRung, RungKernelChoice, WeightGradientSchedule};

const FUSED_ATTENTION_IN_ANY_SUM_ORDER: AttentionOfRung =
    AttentionOfRung::FusedAttention(QueryGradientSumOrder::AnyKeyBlockOrder);
const FUSED_ATTENTION_IN_FIXED_SUM_ORDER: AttentionOfRung =
    AttentionOfRung::FusedAttention(QueryGradientSumOrder::FixedKeyBlockOrder);

/// GPU implementations (rungs) of the language model's forward pass.
pub const CUDA_LM_FORWARD_LADDER: &[Implementation<LanguageModelForward>] = &[
    Implementation {
        implementation_name: "cuda/per_op",
        description: "a launch an operation from the host, attention in three with scores in memory",
        supports: |problem| {
            AttentionOfRung::UnfusedAttention.check_attention_kernels_support(&problem.shape)
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: |problem| unfused_forward_program(problem).device_bytes(),
            prepare: |problem, inputs, device| {
                load_program_after_token_check(
                    &problem.shape,
                    unfused_forward_program(problem),
                    inputs,
                    device,
                    ProgramLaunchMode::StepByStep,
                )
            },
        },
    },
    Implementation {
        implementation_name: "cuda/graph",
        description: "per_op captured once and replayed",
        supports: |problem| {
            AttentionOfRung::UnfusedAttention.check_attention_kernels_support(&problem.shape)
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: |problem| unfused_forward_program(problem).device_bytes(),
            prepare: |problem, inputs, device| {
                load_program_after_token_check(
                    &problem.shape,
                    unfused_forward_program(problem),
                    inputs,
                    device,
                    ProgramLaunchMode::CapturedGraph,
                )
            },
        },
    },
    Implementation {
        implementation_name: "cuda/fused",
        description: "this suite's attention, residuals added by GEMMs, in one graph; on sm_90a SwiGLU \
                and rotation in the epilogues of this suite's GEMMs",
        supports: |problem| {
            FUSED_ATTENTION_IN_ANY_SUM_ORDER.check_attention_kernels_support(&problem.shape)
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: |problem| {
                network::language_model_forward_program(
                    &problem.shape,
                    FUSED_ATTENTION_IN_ANY_SUM_ORDER,
                )
                .device_bytes()
            },
            prepare: |problem, inputs, device| {
                let kernels = FUSED_ATTENTION_IN_ANY_SUM_ORDER
                    .kernel_choice_for_device(device, &problem.shape);
                let program = network::language_model_forward_program(&problem.shape, kernels);
                load_program_after_token_check(
                    &problem.shape,
                    program,
                    inputs,
                    device,
                    ProgramLaunchMode::CapturedGraph,
                )
            },
        },
    },
];

/// GPU implementations (rungs) of the language model's training step.
pub const CUDA_LM_TRAINING_STEP_LADDER: &[Implementation<LanguageModelTrainingStep>] = &[
    Implementation {
        implementation_name: "cuda/per_op",
        description: "a launch an operation from the host, attention in three with scores in memory",
        supports: |problem| {
            AttentionOfRung::UnfusedAttention.check_attention_kernels_support(&problem.shape)
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: |problem| unfused_training_step_program(problem).device_bytes(),
            prepare: |problem, inputs, device| {
                load_program_after_token_check(
                    &problem.shape,
                    unfused_training_step_program(problem),
                    inputs,
                    device,
                    ProgramLaunchMode::StepByStep,
                )
            },
        },
    },
    Implementation {
        implementation_name: "cuda/graph",
        description: "per_op captured once and replayed",
        supports: |problem| {
            AttentionOfRung::UnfusedAttention.check_attention_kernels_support(&problem.shape)
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: |problem| unfused_training_step_program(problem).device_bytes(),
            prepare: |problem, inputs, device| {
                load_program_after_token_check(
                    &problem.shape,
                    unfused_training_step_program(problem),
                    inputs,
                    device,
                    ProgramLaunchMode::CapturedGraph,
                )
            },
        },
    },
    Implementation {
        implementation_name: "cuda/fused",
        description: "this suite's attention forward and backward; gradients of matrices and AdamW beside \
                the gradients of activations, in one graph; the order of the sums of attention's \
                gradient is not fixed; on sm_90a SwiGLU, its gradient and rotation in the \
                epilogues of this suite's GEMMs",
        supports: |problem| {
            FUSED_ATTENTION_IN_ANY_SUM_ORDER.check_attention_kernels_support(&problem.shape)
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: |problem| {
                fused_training_step_program(problem, FUSED_ATTENTION_IN_ANY_SUM_ORDER)
                    .device_bytes()
            },
            prepare: |problem, inputs, device| {
                let program = fused_training_step_program(
                    problem,
                    FUSED_ATTENTION_IN_ANY_SUM_ORDER
                        .kernel_choice_for_device(device, &problem.shape),
                );
                load_program_after_token_check(
                    &problem.shape,
                    program,
                    inputs,
                    device,
                    ProgramLaunchMode::CapturedGraph,
                )
            },
        },
    },
    Implementation {
        implementation_name: "cuda/fused_deterministic",
        description: "fused with every sum in a fixed order: two runs give the same bits; sm_90a only",
        supports: |problem| {
            FUSED_ATTENTION_IN_FIXED_SUM_ORDER.check_attention_kernels_support(&problem.shape)
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: |problem| {
                fused_training_step_program(problem, FUSED_ATTENTION_IN_FIXED_SUM_ORDER)
                    .device_bytes()
            },
            prepare: |problem, inputs, device| {
                let program = fused_training_step_program(
                    problem,
                    FUSED_ATTENTION_IN_FIXED_SUM_ORDER
                        .kernel_choice_for_device(device, &problem.shape),
                );
                load_program_after_token_check(
                    &problem.shape,
                    program,
                    inputs,
                    device,
                    ProgramLaunchMode::CapturedGraph,
                )
            },
        },
    },
];

fn unfused_forward_program(problem: &LanguageModelForward) -> LaunchProgram {
    network::language_model_forward_program(&problem.shape, AttentionOfRung::UnfusedAttention)
}

fn unfused_training_step_program(problem: &LanguageModelTrainingStep) -> LaunchProgram {
    training::training_step_program(
        &problem.shape,
        AttentionOfRung::UnfusedAttention,
        WeightGradientSchedule::SerialLaunches,
    )
}

fn fused_training_step_program(
    problem: &LanguageModelTrainingStep,
    kernels: impl Into<RungKernelChoice>,
) -> LaunchProgram {
    training::training_step_program(
        &problem.shape,
        kernels,
        WeightGradientSchedule::overlapped_in_groups_of_layers(&problem.shape),
    )
}

/// Checks that all tokens and targets are in the vocabulary, then loads a program on the device as
/// a timed task.
fn load_program_after_token_check(
    shape: &LanguageModelShape,
    program: LaunchProgram,
    inputs: &Tensors,
    device: &Arc<Device>,
    capture: ProgramLaunchMode,
) -> Result<CudaTask, BackendError> {
    check_tokens_are_in_vocabulary(shape, inputs).map_err(BackendError::ComputationFailed)?;
    program.into_task(device, inputs, capture)
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod gemm_tests;
#[cfg(test)]
mod layer_tests;
#[cfg(test)]
mod network_tests;
#[cfg(test)]
mod range_tests;
