//! Implementations that launch each kernel of the language model alone on the GPU.

use super::kernels::{adamw, embedding, loss, norm, rope, softmax, swiglu};
use crate::transformer::components::{LanguageModelKernel, SingleKernelProblem};
use crate::transformer::shape::LanguageModelShape;
use kernelgate::backend::program::{
    LaunchProgram, MemoryPurpose, NULL, ProgramLane, ProgramLaunchMode, int_operand, int_operands,
    long_operand,
};
use kernelgate::backend::{Implementation, PrepareFunction};

/// GPU implementations of the workload `transformer/kernel`.
pub const CUDA_SINGLE_KERNEL_ROWS: &[Implementation<SingleKernelProblem>] = &[
    Implementation {
        implementation_name: "cuda/kernel",
        description: "the kernel, in a fixed order of additions",
        supports: |_| Ok(()),
        prepare: PrepareFunction::Program(
            |problem| single_kernel_program(problem, EmbeddingGradientSumOrder::FixedTokenOrder),
            ProgramLaunchMode::StepByStep,
        ),
    },
    Implementation {
        implementation_name: "cuda/atomic",
        description: "atomic additions to zeros",
        supports: |problem| match problem.tested_kernel {
            LanguageModelKernel::EmbeddingGradient => Ok(()),
            _ => Err("has one order of additions".to_owned()),
        },
        prepare: PrepareFunction::Program(
            |problem| single_kernel_program(problem, EmbeddingGradientSumOrder::AnyOrderByAtomics),
            ProgramLaunchMode::StepByStep,
        ),
    },
];

/// Order in which the embedding gradient adds up the gradients of equal tokens: fixed, or any order
/// by atomics.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EmbeddingGradientSumOrder {
    FixedTokenOrder,
    AnyOrderByAtomics,
}

/// Builds the GPU program of a kernel problem: its memory regions and its one or two launches. The
/// function `single_kernel_program` is long because each kernel has its own arguments.
#[expect(clippy::too_many_lines)]
fn single_kernel_program(
    problem: &SingleKernelProblem,
    order: EmbeddingGradientSumOrder,
) -> LaunchProgram {
    let shape = &problem.shape;
    let LanguageModelShape {
        model_width: d,
        swiglu_hidden_width: ff,
        context_tokens: context,
        heads,
        vocabulary_size: vocabulary,
        ..
    } = *shape;
    let tokens = shape.tokens_in_batch();
    let mut program = LaunchProgram::new();
    for operand in problem.input_tensor_specs() {
        program.add_input(operand.tensor_name, MemoryPurpose::Inputs, operand.bytes_of_tensor());
    }
    for output in problem.output_tensor_specs() {
        program.add_output(output.tensor_name, output.extents, output.dtype);
    }
    let scale = 1.0 / (shape.elements_per_head() as f32).sqrt();
    let rows = long_operand(shape.batch * heads * context);
    let softmax_extents = (rows, int_operand(context), scale);
    let embedding_extents = (long_operand(tokens), int_operands([d, vocabulary]));
    match problem.tested_kernel {
        LanguageModelKernel::TokenEmbedding => {
            program.add_launch(
                &embedding::TOKEN_EMBEDDING_KERNEL,
                shape,
                ("tokens", "table", "x", embedding_extents),
            );
        }
        LanguageModelKernel::EmbeddingGradient => {
            let arguments = ("tokens", "grad_x", "grad_table", embedding_extents);
            if order == EmbeddingGradientSumOrder::FixedTokenOrder {
                program.add_launch(
                    &embedding::FIXED_ORDER_EMBEDDING_GRADIENT_KERNEL,
                    shape,
                    arguments,
                );
            } else {
                let (to, bytes) =
                    (program.pointer_to("grad_table"), program.bytes_of_region("grad_table"));
                program.add_byte_fill(ProgramLane::MAIN_LANE, to, bytes, 0);
                program.add_launch(&embedding::ATOMIC_EMBEDDING_GRADIENT_KERNEL, shape, arguments);
            }
        }
        LanguageModelKernel::RmsNorm => {
            program.add_launch(
                &norm::RMS_NORM_KERNEL,
                shape,
                ("x", "gain", "y", "inverse", int_operand(d)),
            );
        }
        LanguageModelKernel::AddBranchAndRmsNorm => {
            let arguments = ("x", "branch", "sum", "gain", "y", "inverse", int_operand(d));
            program.add_launch(&norm::ADD_BRANCH_AND_RMS_NORM_KERNEL, shape, arguments);
        }
        LanguageModelKernel::RmsNormBackward => {
            let blocks = norm::norm_backward_block_count(shape);
            program.add_scratch("partials", MemoryPurpose::Workspace, 4 * blocks * d);
            let inputs = ("x", "inverse", "gain", "grad_y", "residual_gradient");
            let outputs = ("grad_x", "rounded", "partials");
            program.add_launch(
                &norm::RMS_NORM_BACKWARD_KERNEL,
                shape,
                (inputs, outputs, long_operand(tokens), int_operand(d)),
            );
            let one_gain = LanguageModelShape { layers: 0, ..*shape };
            let arguments = ("partials", "grad_gain", int_operands([blocks, d]));
            program.add_launch(&norm::SUM_GAIN_GRADIENTS_KERNEL, &one_gain, arguments);
        }
        LanguageModelKernel::Rope => {
            let angles = *shape;
            let table = program.add_packed_from_inputs(
                "table",
                MemoryPurpose::Weights,
                4 * context * shape.elements_per_head(),
                {
                    move |_| {
                        rope::rope_cosine_and_sine_table(&angles)
                            .iter()
                            .flat_map(|x| x.to_ne_bytes())
                            .collect()
                    }
                },
            );
            let extents = (
                long_operand(tokens),
                int_operands([context, heads, shape.elements_per_head(), 2 * d]),
                1.0f32,
            );
            program.add_launch(
                &rope::ROTATE_QUERIES_AND_KEYS_KERNEL,
                shape,
                ("qkv", table, "rotated", extents),
            );
        }
        LanguageModelKernel::Swiglu => {
            program.add_launch(
                &swiglu::SWIGLU_FORWARD_KERNEL,
                shape,
                ("gate_up", "h", long_operand(tokens), int_operand(ff)),
            );
        }
        LanguageModelKernel::SwigluBackward => {
            let arguments =
                ("gate_up", "grad_h", "grad_gate_up", long_operand(tokens), int_operand(ff));
            program.add_launch(&swiglu::SWIGLU_BACKWARD_KERNEL, shape, arguments);
        }
        LanguageModelKernel::CausalSoftmax | LanguageModelKernel::CausalSoftmaxOfF32Scores => {
            let kernel = match problem.tested_kernel {
                LanguageModelKernel::CausalSoftmaxOfF32Scores => {
                    &softmax::CAUSAL_SOFTMAX_OF_F32_KERNEL
                }
                _ => &softmax::CAUSAL_SOFTMAX_KERNEL,
            };
            program.add_launch(kernel, shape, ("scores", "probabilities", softmax_extents));
        }
        LanguageModelKernel::CausalSoftmaxBackward
        | LanguageModelKernel::CausalSoftmaxBackwardOfF32Scores => {
            let kernel = match problem.tested_kernel {
                LanguageModelKernel::CausalSoftmaxBackwardOfF32Scores => {
                    &softmax::CAUSAL_SOFTMAX_BACKWARD_OF_F32_KERNEL
                }
                _ => &softmax::CAUSAL_SOFTMAX_BACKWARD_KERNEL,
            };
            let tensors = ("probabilities", "grad_probabilities", "grad_scores");
            program.add_launch(kernel, shape, (tensors, softmax_extents));
        }
        LanguageModelKernel::CrossEntropyAndLogitGradients
        | LanguageModelKernel::TokenCrossEntropy => {
            program.add_scratch("losses", MemoryPurpose::Activations, 4 * tokens);
            let extents = int_operands([vocabulary, shape.padded_logit_columns()]);
            if problem.tested_kernel == LanguageModelKernel::CrossEntropyAndLogitGradients {
                let tensors = ("logits", "targets", "losses", "grad_logits");
                program.add_launch(
                    &loss::LOSS_AND_LOGIT_GRADIENT_KERNEL,
                    shape,
                    (tensors, extents, 1.0 / tokens as f32),
                );
            } else {
                program.add_launch(
                    &loss::TOKEN_LOSS_KERNEL,
                    shape,
                    ("logits", "targets", "losses", extents),
                );
            }
            program.add_launch(
                &loss::MEAN_LOSS_OF_SEQUENCE_KERNEL,
                shape,
                ("losses", "loss", int_operand(context)),
            );
        }
        LanguageModelKernel::AdamW => {
            let state = ["parameters", "first_moments", "second_moments"];
            let gradients = ("f32_gradients", "gradients", "steps");
            let copy = program.pointer_if_declared("copy").map_or(NULL, Into::into);
            let extents = (
                long_operand(shape.first_arena_row_of_matrices() * d),
                long_operand(shape.number_of_parameters()),
                adamw::ADAMW_LEARNING_RATE_AND_WEIGHT_DECAY,
            );
            let outputs = (["new_p", "new_m", "new_v"], copy);
            program.add_launch(
                &adamw::ADAMW_UPDATE_KERNEL,
                shape,
                (state, gradients, outputs, extents),
            );
        }
    }
    program
}
