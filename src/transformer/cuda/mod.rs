//! The language model on the GPU: one launch for each operation, the same in a graph, and fused
//! kernels.
//!
//! Each rung of the ladders is a `Program`. The GEMMs of a rung are the library's, except for three
//! that fused rows have on sm_90a; all other kernels are in `kernels/`.

mod attention;
mod components;
mod kernels;
mod network;
mod rung_choices;
mod training;

pub use components::COMPONENT;
pub use kernels::kernels;

use std::sync::Arc;

use super::definition::{ModelForward, TrainStep, check_tokens_and_targets};
use super::shape::LmShape;
use crate::attention::cuda::QueryGradientSumOrder;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::backend::program::{Capture, Program};
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::Tensors;
use kernelgate_cuda::Device;
use rung_choices::{GradientSchedule, RungAttention, RungKernels};

const FUSED: RungAttention = RungAttention::Fused(QueryGradientSumOrder::Any);
const DETERMINISTIC: RungAttention = RungAttention::Fused(QueryGradientSumOrder::Fixed);

/// Ladder of the forward pass.
pub const FORWARD: &[Implementation<ModelForward>] = &[
    Implementation {
        name: "cuda/per_op",
        about: "a launch an operation from the host, attention in three with scores in memory",
        supports: |problem| RungAttention::Unfused.check_attention_support(&problem.shape),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| unfused_forward(problem).device_bytes(),
            prepare: |problem, inputs, device| {
                program_task(
                    &problem.shape,
                    unfused_forward(problem),
                    inputs,
                    device,
                    Capture::Stream,
                )
            },
        },
    },
    Implementation {
        name: "cuda/graph",
        about: "per_op captured once and replayed",
        supports: |problem| RungAttention::Unfused.check_attention_support(&problem.shape),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| unfused_forward(problem).device_bytes(),
            prepare: |problem, inputs, device| {
                program_task(
                    &problem.shape,
                    unfused_forward(problem),
                    inputs,
                    device,
                    Capture::Graph,
                )
            },
        },
    },
    Implementation {
        name: "cuda/fused",
        about: "this suite's attention, residuals added by GEMMs, in one graph; on sm_90a SwiGLU \
                and rotation in the epilogues of this suite's GEMMs",
        supports: |problem| FUSED.check_attention_support(&problem.shape),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| network::forward_program(&problem.shape, FUSED).device_bytes(),
            prepare: |problem, inputs, device| {
                let kernels = FUSED.on(device, &problem.shape);
                let program = network::forward_program(&problem.shape, kernels);
                program_task(&problem.shape, program, inputs, device, Capture::Graph)
            },
        },
    },
];

/// Ladder of the training step.
pub const TRAIN_STEP: &[Implementation<TrainStep>] = &[
    Implementation {
        name: "cuda/per_op",
        about: "a launch an operation from the host, attention in three with scores in memory",
        supports: |problem| RungAttention::Unfused.check_attention_support(&problem.shape),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| unfused_step(problem).device_bytes(),
            prepare: |problem, inputs, device| {
                program_task(&problem.shape, unfused_step(problem), inputs, device, Capture::Stream)
            },
        },
    },
    Implementation {
        name: "cuda/graph",
        about: "per_op captured once and replayed",
        supports: |problem| RungAttention::Unfused.check_attention_support(&problem.shape),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| unfused_step(problem).device_bytes(),
            prepare: |problem, inputs, device| {
                program_task(&problem.shape, unfused_step(problem), inputs, device, Capture::Graph)
            },
        },
    },
    Implementation {
        name: "cuda/fused",
        about: "this suite's attention forward and backward; gradients of matrices and AdamW beside \
                the gradients of activations, in one graph; the order of the sums of attention's \
                gradient is not fixed; on sm_90a SwiGLU, its gradient and rotation in the \
                epilogues of this suite's GEMMs",
        supports: |problem| FUSED.check_attention_support(&problem.shape),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| fused_step(problem, FUSED).device_bytes(),
            prepare: |problem, inputs, device| {
                let program = fused_step(problem, FUSED.on(device, &problem.shape));
                program_task(&problem.shape, program, inputs, device, Capture::Graph)
            },
        },
    },
    Implementation {
        name: "cuda/fused_deterministic",
        about: "fused with every sum in a fixed order: two runs give the same bits; sm_90a only",
        supports: |problem| DETERMINISTIC.check_attention_support(&problem.shape),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| fused_step(problem, DETERMINISTIC).device_bytes(),
            prepare: |problem, inputs, device| {
                let program = fused_step(problem, DETERMINISTIC.on(device, &problem.shape));
                program_task(&problem.shape, program, inputs, device, Capture::Graph)
            },
        },
    },
];

fn unfused_forward(problem: &ModelForward) -> Program {
    network::forward_program(&problem.shape, RungAttention::Unfused)
}

fn unfused_step(problem: &TrainStep) -> Program {
    training::step_program(&problem.shape, RungAttention::Unfused, GradientSchedule::Serial)
}

fn fused_step(problem: &TrainStep, kernels: impl Into<RungKernels>) -> Program {
    training::step_program(
        &problem.shape,
        kernels,
        GradientSchedule::overlapped_schedule(&problem.shape),
    )
}

/// Loads a program as a task, after checking that its tokens are in the vocabulary.
fn program_task(
    shape: &LmShape,
    program: Program,
    inputs: &Tensors,
    device: &Arc<Device>,
    capture: Capture,
) -> Result<CudaTask, BackendError> {
    check_tokens_and_targets(shape, inputs).map_err(BackendError::Launch)?;
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
