//! Each kernel of the language model as a row of its own.

use super::kernels::{adamw, embedding, loss, norm, rope, softmax, swiglu};
use crate::transformer::components::{ComponentProblem, ModelPart};
use crate::transformer::shape::LmShape;
use kernelgate::backend::program::{
    Capture, Lane, MemoryPurpose, NULL, Program, int, int_operands, long_operand,
};
use kernelgate::backend::{Implementation, Prepare};

/// GPU rows of the component workload.
pub const COMPONENT: &[Implementation<ComponentProblem>] = &[
    Implementation {
        name: "cuda/kernel",
        about: "the kernel, in a fixed order of additions",
        supports: |_| Ok(()),
        prepare: Prepare::Program(
            |problem| component_program(problem, GradientSumOrder::Fixed),
            Capture::Stream,
        ),
    },
    Implementation {
        name: "cuda/atomic",
        about: "atomic additions to zeros",
        supports: |problem| match problem.component {
            ModelPart::EmbeddingGradient => Ok(()),
            _ => Err("has one order of additions".to_owned()),
        },
        prepare: Prepare::Program(
            |problem| component_program(problem, GradientSumOrder::Any),
            Capture::Stream,
        ),
    },
];

/// Order in which addends of the embedding's gradient are summed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum GradientSumOrder {
    Fixed,
    Any,
}

/// Writes the launches of one kernel's problem. The function is long because each component has its
/// own launches.
#[expect(clippy::too_many_lines)]
fn component_program(problem: &ComponentProblem, order: GradientSumOrder) -> Program {
    let shape = &problem.shape;
    let LmShape { d, ff, context, heads, vocabulary, .. } = *shape;
    let tokens = shape.token_count();
    let mut program = Program::new();
    for operand in problem.input_tensors() {
        program.add_input(operand.name, MemoryPurpose::Inputs, operand.bytes());
    }
    for output in problem.output_tensors() {
        program.add_output(output.name, output.extents, output.dtype);
    }
    let scale = 1.0 / (shape.head_dim() as f32).sqrt();
    let rows = long_operand(shape.batch * heads * context);
    let softmax_extents = (rows, int(context), scale);
    let embedding_extents = (long_operand(tokens), int_operands([d, vocabulary]));
    match problem.component {
        ModelPart::Embed => {
            program.add_launch(
                &embedding::EMBED_KERNEL,
                shape,
                ("tokens", "table", "x", embedding_extents),
            );
        }
        ModelPart::EmbeddingGradient => {
            let arguments = ("tokens", "grad_x", "grad_table", embedding_extents);
            if order == GradientSumOrder::Fixed {
                program.add_launch(&embedding::EMBEDDING_GRADIENT_KERNEL, shape, arguments);
            } else {
                let (to, bytes) = (program.at("grad_table"), program.bytes("grad_table"));
                program.fill(Lane::MAIN_LANE, to, bytes, 0);
                program.add_launch(&embedding::EMBEDDING_GRADIENT_ATOMIC_KERNEL, shape, arguments);
            }
        }
        ModelPart::Norm => {
            program.add_launch(&norm::NORM_KERNEL, shape, ("x", "gain", "y", "inverse", int(d)));
        }
        ModelPart::NormAdd => {
            let arguments = ("x", "branch", "sum", "gain", "y", "inverse", int(d));
            program.add_launch(&norm::NORM_ADD_KERNEL, shape, arguments);
        }
        ModelPart::NormBackward => {
            let blocks = norm::norm_backward_blocks(shape);
            program.add_scratch("partials", MemoryPurpose::Workspace, 4 * blocks * d);
            let inputs = ("x", "inverse", "gain", "grad_y", "residual_gradient");
            let outputs = ("grad_x", "rounded", "partials");
            program.add_launch(
                &norm::NORM_BACKWARD_KERNEL,
                shape,
                (inputs, outputs, long_operand(tokens), int(d)),
            );
            let one_gain = LmShape { layers: 0, ..*shape };
            let arguments = ("partials", "grad_gain", int_operands([blocks, d]));
            program.add_launch(&norm::GAIN_GRADIENT_KERNEL, &one_gain, arguments);
        }
        ModelPart::Rope => {
            let angles = *shape;
            let table = program.add_packed(
                "table",
                MemoryPurpose::Weights,
                4 * context * shape.head_dim(),
                {
                    move |_| {
                        rope::rotary_table(&angles).iter().flat_map(|x| x.to_ne_bytes()).collect()
                    }
                },
            );
            let extents = (
                long_operand(tokens),
                int_operands([context, heads, shape.head_dim(), 2 * d]),
                1.0f32,
            );
            program.add_launch(&rope::ROPE_KERNEL, shape, ("qkv", table, "rotated", extents));
        }
        ModelPart::Swiglu => {
            program.add_launch(
                &swiglu::SWIGLU_KERNEL,
                shape,
                ("gate_up", "h", long_operand(tokens), int(ff)),
            );
        }
        ModelPart::SwigluBackward => {
            let arguments = ("gate_up", "grad_h", "grad_gate_up", long_operand(tokens), int(ff));
            program.add_launch(&swiglu::SWIGLU_BACKWARD_KERNEL, shape, arguments);
        }
        ModelPart::Softmax | ModelPart::SoftmaxF32 => {
            let kernel = match problem.component {
                ModelPart::SoftmaxF32 => &softmax::SOFTMAX_OF_F32_KERNEL,
                _ => &softmax::SOFTMAX_KERNEL,
            };
            program.add_launch(kernel, shape, ("scores", "probabilities", softmax_extents));
        }
        ModelPart::SoftmaxBackward | ModelPart::SoftmaxBackwardF32 => {
            let kernel = match problem.component {
                ModelPart::SoftmaxBackwardF32 => &softmax::SOFTMAX_BACKWARD_OF_F32_KERNEL,
                _ => &softmax::SOFTMAX_BACKWARD_KERNEL,
            };
            let tensors = ("probabilities", "grad_probabilities", "grad_scores");
            program.add_launch(kernel, shape, (tensors, softmax_extents));
        }
        ModelPart::Loss | ModelPart::LossForward => {
            program.add_scratch("losses", MemoryPurpose::Activations, 4 * tokens);
            let extents = int_operands([vocabulary, shape.padded_vocabulary()]);
            if problem.component == ModelPart::Loss {
                let tensors = ("logits", "targets", "losses", "grad_logits");
                program.add_launch(
                    &loss::LOSS_KERNEL,
                    shape,
                    (tensors, extents, 1.0 / tokens as f32),
                );
            } else {
                program.add_launch(
                    &loss::LOSS_FORWARD_KERNEL,
                    shape,
                    ("logits", "targets", "losses", extents),
                );
            }
            program.add_launch(&loss::MEAN_LOSS_KERNEL, shape, ("losses", "loss", int(context)));
        }
        ModelPart::AdamW => {
            let state = ["parameters", "first_moments", "second_moments"];
            let gradients = ("f32_gradients", "gradients", "steps");
            let copy = program.find("copy").map_or(NULL, Into::into);
            let extents = (
                long_operand(shape.first_matrix_row() * d),
                long_operand(shape.parameter_count()),
                adamw::ADAMW_RATES,
            );
            let outputs = (["new_p", "new_m", "new_v"], copy);
            program.add_launch(&adamw::ADAMW_KERNEL, shape, (state, gradients, outputs, extents));
        }
    }
    program
}
