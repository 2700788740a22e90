//! A decoder-only language model: pre-norm blocks with RMSNorm, rotary embedding, causal attention
//! and SwiGLU, an untied head, cross entropy and AdamW.
//!
//! Weights have the dtype of the problem. A training step in bf16 rounds its f32 parameters to bf16
//! before the forward pass. GPU rows update the state in place, so that timed launches continue
//! from each other. Before each comparison the state is copied back from host memory.
//!
//! Activation recomputation, gradient accumulation and clipping, and dropout are excluded on
//! purpose.

use std::collections::BTreeMap;

use super::gradients::expected_step;
use super::reference::LmReference;
use super::shape::{LmShape, MODEL_SIZES};
use kernelgate::workload::{
    Axis, Breakdown, BreakdownPart, Dtype, Expected, FlopUnit, Problem, SampleUnit, Symmetry,
    Tensors, Tolerance, Work, Workload,
};

const AXES: &[Axis] = &[
    Axis::one_of("size", MODEL_SIZES, "width, layers and heads"),
    Axis::number("ctx", "tokens of a sequence"),
    Axis::number("b", "sequences"),
    Axis::one_of("dtype", &["f32", "bf16"], "dtype of weights and activations; sums are f32"),
];

/// Workload of the language model's forward pass: logits and loss.
pub const FORWARD: Workload<ModelForward> = Workload {
    name: "transformer/forward",
    about: "language model: logits of every token and the loss of every sequence",
    revision: 1,
    axes: AXES,
    default: &["size=reduced ctx=64 b=2 dtype=f32"],
    accelerator: &["size=small ctx=512 b=4 dtype=bf16", "size=reduced ctx=100 b=3 dtype=f32,bf16"],
    thorough: &[
        "size=small ctx=128,256,1024 b=4 dtype=bf16",
        "size=medium,large ctx=512 b=4 dtype=bf16",
        "size=xl ctx=1024 b=4 dtype=bf16",
        "size=2.7B ctx=512 b=4 dtype=bf16",
        "size=small ctx=512 b=1,16 dtype=bf16",
        "size=small ctx=512 b=4 dtype=f32",
    ],
    bind: |point| Ok(ModelForward { shape: LmShape::bind(point)? }),
};

/// Workload of a training step: the state after a step of AdamW, and the loss.
pub const TRAIN_STEP: Workload<TrainStep> = Workload {
    name: "transformer/train_step",
    about: "language model: forward, gradients of every parameter, AdamW over f32 state",
    revision: 2,
    axes: AXES,
    default: FORWARD.default,
    accelerator: FORWARD.accelerator,
    thorough: FORWARD.thorough,
    bind: |point| Ok(TrainStep { shape: LmShape::bind(point)? }),
};

/// Problem `transformer/forward`. The inputs are `tokens` and `targets` `[batch, context]` and
/// `parameters [R, d]`. The outputs are `logits [batch, context, padded]` in the dtype of the
/// problem, with 0 in the padding, and the mean `loss [batch, 1]` of each sequence in f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelForward {
    /// Extents and dtype of the model.
    pub shape: LmShape,
}

impl Problem for ModelForward {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = self.shape.draw_tokens_and_targets(seed);
        inputs.insert("parameters", self.shape.draw_weights(seed, self.shape.dtype));
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let LmShape { batch, context, .. } = self.shape;
        let rows = self.shape.compared_tokens();
        let shape = [batch, context, self.shape.padded_vocabulary()];
        let reference = LmReference::new(&self.shape, inputs, |x| x);
        let logits = reference.logits_of_tokens(&rows);
        let whole = rows.len() == self.shape.token_count();
        let rows = (!whole).then_some(rows);
        let (name, shape) = ("logits".to_owned(), shape.to_vec());
        vec![
            Expected { name, shape, rows, values: logits.into() },
            Expected::all("loss", [batch, 1], reference.sequence_losses()),
        ]
    }

    /// The sequences of a batch are independent of each other.
    fn symmetries(&self) -> Vec<Symmetry> {
        let inputs = &[("tokens", 0), ("targets", 0)];
        vec![Symmetry::Roll { inputs, outputs: &[("logits", 0), ("loss", 0)] }]
    }

    fn work(&self) -> Work {
        self.shape.forward_work()
    }

    fn breakdown(&self) -> Breakdown {
        network_breakdown(&self.shape, &["forward"])
    }

    fn tolerance(&self) -> Tolerance {
        match self.shape.dtype {
            Dtype::Bf16 => Tolerance { max_error: 4e-2, relative_l2: 3e-2 },
            _ => Tolerance { max_error: 1e-4, relative_l2: 4e-5 },
        }
    }

    fn tolerances(&self) -> BTreeMap<String, Tolerance> {
        BTreeMap::from([("loss".to_owned(), loss_tolerance(self.shape.dtype))])
    }

    fn host_bytes(&self) -> u64 {
        self.work().total_bytes() * 2 + self.shape.reference_bytes()
    }
}

/// Problem `transformer/train_step`. The inputs of a training step are `tokens` and `targets`
/// `[batch, context]`, `parameters`, `first_moments` and `second_moments` `[R, d]` in f32, and the
/// number of `steps [1]` done. The outputs of a training step are the three state tensors after one
/// more step (`next_parameters` and so on), and the mean `loss [batch, 1]` of each sequence before
/// that step. The gradient is that of the mean over all tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainStep {
    /// Extents and dtype of the model.
    pub shape: LmShape,
}

impl Problem for TrainStep {
    fn inputs(&self, seed: u64) -> Tensors {
        let text = self.shape.draw_tokens_and_targets(seed);
        text.iter().fold(self.shape.draw_optimizer_state(seed), |mut inputs, (name, tensor)| {
            inputs.insert(name, tensor.clone());
            inputs
        })
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        expected_step(&self.shape, inputs, |x| x)
    }

    fn work(&self) -> Work {
        self.shape.training_step_work()
    }

    fn breakdown(&self) -> Breakdown {
        network_breakdown(&self.shape, &["forward", "backward", "optimizer"])
    }

    /// Tolerance of parameters and moments; the first moment is linear in the gradient.
    fn tolerance(&self) -> Tolerance {
        match self.shape.dtype {
            Dtype::Bf16 => Tolerance { max_error: 4e-2, relative_l2: 2e-2 },
            _ => Tolerance { max_error: 1e-4, relative_l2: 2e-5 },
        }
    }

    fn tolerances(&self) -> BTreeMap<String, Tolerance> {
        let parameters = match self.shape.dtype {
            Dtype::Bf16 => Tolerance { max_error: 1e-3, relative_l2: 5e-4 },
            _ => Tolerance { max_error: 4e-6, relative_l2: 1e-6 },
        };
        let second_moments = match self.shape.dtype {
            Dtype::Bf16 => Tolerance { max_error: 3e-2, relative_l2: 1.5e-2 },
            _ => Tolerance { max_error: 2e-5, relative_l2: 1e-5 },
        };
        let loss = loss_tolerance(self.shape.dtype);
        [("loss", loss), ("next_parameters", parameters), ("next_second_moments", second_moments)]
            .map(|(name, tolerance)| (name.to_owned(), tolerance))
            .into()
    }

    fn host_bytes(&self) -> u64 {
        self.work().total_bytes() * 2 + self.shape.reference_bytes()
    }
}

fn loss_tolerance(dtype: Dtype) -> Tolerance {
    let most = if dtype == Dtype::Bf16 { 2e-3 } else { 1e-5 };
    Tolerance { max_error: most, relative_l2: most }
}

/// Breakdown of a step into phases, with the operations of attention that an unfused row shows by
/// the names of `scaled_dot_product_attention`.
fn network_breakdown(shape: &LmShape, phases: &[&str]) -> Breakdown {
    let LmShape { layers, heads, context, dtype, .. } = *shape;
    let phase = |name: &&str| BreakdownPart {
        table: "phase",
        label: (*name).to_owned(),
        range: (*name).to_owned(),
        work: match *name {
            "forward" => shape.forward_work(),
            "backward" => {
                let flops = 2 * shape.forward_flops();
                Work::default().with_flops(FlopUnit::Matmul, dtype, flops)
            }
            _ => Work::bytes(
                16 * shape.parameter_count() as u64,
                12 * shape.parameter_count() as u64,
            ),
        },
    };
    let pairs = (layers * heads * shape.token_count() * context) as u64;
    let gemm = 2 * pairs * shape.head_dim() as u64;
    let attention = [
        ("scores", "computing_attention_scores", FlopUnit::Matmul, gemm),
        ("softmax", "computing_softmax", FlopUnit::Vector, 5 * pairs),
        ("values", "final_matmul", FlopUnit::Matmul, gemm),
    ]
    .map(|(label, name, unit, flops)| BreakdownPart {
        table: "attention",
        label: label.to_owned(),
        range: format!("scaled_dot_product_attention/{name}"),
        work: Work::default().with_flops(unit, dtype, flops),
    });
    Breakdown {
        samples: Some(shape.token_count() as u64),
        unit: SampleUnit::Tokens,
        parts: phases.iter().map(phase).chain(attention).collect(),
    }
}

/// Checks that tokens and targets are in the vocabulary.
///
/// # Errors
/// Fails with the first token or target that is not in the vocabulary.
pub fn check_tokens_and_targets(shape: &LmShape, inputs: &Tensors) -> Result<(), String> {
    for name in ["tokens", "targets"] {
        let valid = |x: f32| x >= 0.0 && x < shape.vocabulary as f32 && x.fract() == 0.0;
        let tokens = inputs.f32(name);
        if let Some(place) = tokens.iter().position(|token| !valid(*token)) {
            let (token, vocabulary) = (tokens[place], shape.vocabulary);
            return Err(format!(
                "`{name}` has {token} at {place}, a vocabulary of {vocabulary} ends before"
            ));
        }
    }
    Ok(())
}
