//! Each kernel of the language model as a row of its own.

use super::kernels::{adamw, embedding, loss, norm, rope, softmax, swiglu};
use crate::transformer::components::{Component, ComponentProblem};
use crate::transformer::shape::Shape;
use kernelgate::backend::program::{Capture, Lane, MemoryUse, NULL, Program, int, ints, long};
use kernelgate::backend::{Implementation, Prepare};

/// Rows of the kernels.
pub const COMPONENT: &[Implementation<ComponentProblem>] = &[
    Implementation {
        name: "cuda/kernel",
        about: "the kernel, in a fixed order of additions",
        supports: |_| Ok(()),
        prepare: Prepare::Program(|problem| write(problem, Order::Fixed), Capture::Stream),
    },
    Implementation {
        name: "cuda/atomic",
        about: "atomic additions to zeros",
        supports: |problem| match problem.component {
            Component::EmbeddingGradient => Ok(()),
            _ => Err("has one order of additions".to_owned()),
        },
        prepare: Prepare::Program(|problem| write(problem, Order::Any), Capture::Stream),
    },
];

/// Order of the additions of a gradient.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Fixed,
    Any,
}

/// The launches of a component. Long because each component has its own.
#[expect(clippy::too_many_lines)]
fn write(problem: &ComponentProblem, order: Order) -> Program {
    let shape = &problem.shape;
    let Shape { d, ff, context, heads, vocabulary, .. } = *shape;
    let tokens = shape.tokens();
    let mut program = Program::new();
    for operand in problem.operands() {
        program.input(operand.name, MemoryUse::Inputs, operand.bytes());
    }
    for output in problem.outputs() {
        program.output(output.name, output.extents, output.dtype);
    }
    let scale = 1.0 / (shape.head_dim() as f32).sqrt();
    let rows = long(shape.batch * heads * context);
    let softmax_extents = (rows, int(context), scale);
    let embedding_extents = (long(tokens), ints([d, vocabulary]));
    match problem.component {
        Component::Embed => {
            program.launch(&embedding::EMBED, shape, ("tokens", "table", "x", embedding_extents));
        }
        Component::EmbeddingGradient => {
            let arguments = ("tokens", "grad_x", "grad_table", embedding_extents);
            if order == Order::Fixed {
                program.launch(&embedding::GRADIENT, shape, arguments);
            } else {
                let (to, bytes) = (program.at("grad_table"), program.bytes("grad_table"));
                program.fill(Lane::MAIN, to, bytes, 0);
                program.launch(&embedding::GRADIENT_ATOMIC, shape, arguments);
            }
        }
        Component::Norm => {
            program.launch(&norm::NORM, shape, ("x", "gain", "y", "inverse", int(d)));
        }
        Component::NormAdd => {
            let arguments = ("x", "branch", "sum", "gain", "y", "inverse", int(d));
            program.launch(&norm::NORM_ADD, shape, arguments);
        }
        Component::NormBackward => {
            let blocks = norm::norm_blocks(shape);
            program.scratch("partials", MemoryUse::Workspace, 4 * blocks * d);
            let inputs = ("x", "inverse", "gain", "grad_y", "residual_gradient");
            let outputs = ("grad_x", "rounded", "partials");
            program.launch(&norm::BACKWARD, shape, (inputs, outputs, long(tokens), int(d)));
            let one_gain = Shape { layers: 0, ..*shape };
            let arguments = ("partials", "grad_gain", ints([blocks, d]));
            program.launch(&norm::GAIN_GRADIENT, &one_gain, arguments);
        }
        Component::Rope => {
            let angles = *shape;
            let table =
                program.packed("table", MemoryUse::Weights, 4 * context * shape.head_dim(), {
                    move |_| rope::table(&angles).iter().flat_map(|x| x.to_ne_bytes()).collect()
                });
            let extents = (long(tokens), ints([context, heads, shape.head_dim(), 2 * d]), 1.0f32);
            program.launch(&rope::ROPE, shape, ("qkv", table, "rotated", extents));
        }
        Component::Swiglu => {
            program.launch(&swiglu::SWIGLU, shape, ("gate_up", "h", long(tokens), int(ff)));
        }
        Component::SwigluBackward => {
            let arguments = ("gate_up", "grad_h", "grad_gate_up", long(tokens), int(ff));
            program.launch(&swiglu::BACKWARD, shape, arguments);
        }
        Component::Softmax | Component::SoftmaxF32 => {
            let kernel = match problem.component {
                Component::SoftmaxF32 => &softmax::SOFTMAX_OF_F32_SCORES,
                _ => &softmax::SOFTMAX,
            };
            program.launch(kernel, shape, ("scores", "probabilities", softmax_extents));
        }
        Component::SoftmaxBackward | Component::SoftmaxBackwardF32 => {
            let kernel = match problem.component {
                Component::SoftmaxBackwardF32 => &softmax::BACKWARD_OF_F32_SCORES,
                _ => &softmax::BACKWARD,
            };
            let tensors = ("probabilities", "grad_probabilities", "grad_scores");
            program.launch(kernel, shape, (tensors, softmax_extents));
        }
        Component::Loss | Component::LossForward => {
            program.scratch("losses", MemoryUse::Activations, 4 * tokens);
            let extents = ints([vocabulary, shape.padded()]);
            if problem.component == Component::Loss {
                let tensors = ("logits", "targets", "losses", "grad_logits");
                program.launch(&loss::LOSS, shape, (tensors, extents, 1.0 / tokens as f32));
            } else {
                program.launch(
                    &loss::LOSS_FORWARD,
                    shape,
                    ("logits", "targets", "losses", extents),
                );
            }
            program.launch(&loss::MEAN_LOSS, shape, ("losses", "loss", int(context)));
        }
        Component::AdamW => {
            let state = ["parameters", "first_moments", "second_moments"];
            let gradients = ("f32_gradients", "gradients", "steps");
            let copy = program.find("copy").map_or(NULL, Into::into);
            let extents = (long(shape.matrices() * d), long(shape.parameters()), adamw::RATES);
            let outputs = (["new_p", "new_m", "new_v"], copy);
            program.launch(&adamw::ADAMW, shape, (state, gradients, outputs, extents));
        }
    }
    program
}
