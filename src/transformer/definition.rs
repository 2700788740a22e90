//! Workloads of a decoder-only language model: pre-norm blocks with RMSNorm, rotary embedding,
//! causal attention and SwiGLU, an untied head, cross entropy and AdamW.
//!
//! The language model's GEMMs read weights in the dtype of the problem. A bf16 training step rounds
//! its f32 parameters to bf16 before the forward pass. GPU implementations of the training step
//! update parameters and moments in place, so that each timed launch continues from the one before.
//! Before each comparison with the reference, the initial parameters and moments are copied to the
//! GPU again.
//!
//! The training workload has no activation recomputation, gradient accumulation, gradient clipping
//! or dropout.

use std::collections::BTreeMap;

use super::gradients::expected_training_step_outputs;
use super::reference::LanguageModelReference;
use super::shape::{LanguageModelShape, MODEL_SIZE_NAMES};
use kernelgate::workload::{
    Axis, Dtype, Expected, FlopUnit, InputSymmetry, Problem, ProblemPartForProfile,
    ProblemPartsForProfile, Tensors, ThroughputItemUnit, Tolerance, Work, Workload,
};

const LANGUAGE_MODEL_AXES: &[Axis] = &[
    Axis::one_of("size", MODEL_SIZE_NAMES, "width, layers and heads"),
    Axis::number("ctx", "tokens of a sequence"),
    Axis::number("b", "sequences"),
    Axis::one_of("dtype", &["f32", "bf16"], "dtype of weights and activations; sums are f32"),
];

/// Workload of the language model's forward pass, which computes logits and losses.
pub const LM_FORWARD_WORKLOAD: Workload<LanguageModelForward> = Workload {
    name: "transformer/forward",
    about: "language model: logits of every token and the loss of every sequence",
    revision: 1,
    axes: LANGUAGE_MODEL_AXES,
    default_selection_lines: &["size=reduced ctx=64 b=2 dtype=f32"],
    accelerator_selection_lines: &[
        "size=small ctx=512 b=4 dtype=bf16",
        "size=reduced ctx=100 b=3 dtype=f32,bf16",
    ],
    thorough_selection_lines: &[
        "size=small ctx=128,256,1024 b=4 dtype=bf16",
        "size=medium,large ctx=512 b=4 dtype=bf16",
        "size=xl ctx=1024 b=4 dtype=bf16",
        "size=2.7B ctx=512 b=4 dtype=bf16",
        "size=small ctx=512 b=1,16 dtype=bf16",
        "size=small ctx=512 b=4 dtype=f32",
    ],
    bind: |point| {
        Ok(LanguageModelForward { shape: LanguageModelShape::bind_language_model_axes(point)? })
    },
};

/// Workload of a training step of the language model: parameters and moments after one AdamW step,
/// and the losses before it.
pub const LM_TRAINING_STEP_WORKLOAD: Workload<LanguageModelTrainingStep> = Workload {
    name: "transformer/train_step",
    about: "language model: forward, gradients of every parameter, AdamW over f32 state",
    revision: 2,
    axes: LANGUAGE_MODEL_AXES,
    default_selection_lines: LM_FORWARD_WORKLOAD.default_selection_lines,
    accelerator_selection_lines: LM_FORWARD_WORKLOAD.accelerator_selection_lines,
    thorough_selection_lines: LM_FORWARD_WORKLOAD.thorough_selection_lines,
    bind: |point| {
        Ok(LanguageModelTrainingStep {
            shape: LanguageModelShape::bind_language_model_axes(point)?,
        })
    },
};

/// Problem `transformer/forward`. The inputs of the forward problem are `tokens` and `targets`
/// `[batch, context]` (token ids, stored as f32), and `parameters [R, d]`, the arena of all
/// parameter tensors in R rows. The outputs are `logits [batch, context, padded]` in the problem's
/// dtype, with 0 in the padding, and each sequence's mean `loss [batch, 1]` in f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LanguageModelForward {
    /// Sizes and dtype of the language model.
    pub shape: LanguageModelShape,
}

impl Problem for LanguageModelForward {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = self.shape.draw_tokens_and_targets(seed);
        inputs.insert("parameters", self.shape.draw_parameter_arena(seed, self.shape.dtype));
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let LanguageModelShape { batch, context_tokens: context, .. } = self.shape;
        let rows = self.shape.tokens_with_compared_logits();
        let shape = [batch, context, self.shape.padded_logit_columns()];
        let reference = LanguageModelReference::run_forward_pass(&self.shape, inputs, |x| x);
        let logits = reference.padded_logits_of_tokens(&rows);
        let whole = rows.len() == self.shape.tokens_in_batch();
        let rows = (!whole).then_some(rows);
        let (name, shape) = ("logits".to_owned(), shape.to_vec());
        vec![
            Expected {
                output_name: name,
                output_shape: shape,
                row_indices: rows,
                expected_values: logits.into(),
            },
            Expected::all("loss", [batch, 1], reference.mean_losses_of_sequences()),
        ]
    }

    /// The sequences of a batch are independent of each other, so permuting the sequences permutes
    /// logits and losses.
    fn symmetries(&self) -> Vec<InputSymmetry> {
        let inputs = &[("tokens", 0), ("targets", 0)];
        vec![InputSymmetry::RotateAlongAxis {
            inputs_with_axes: inputs,
            outputs_with_axes: &[("logits", 0), ("loss", 0)],
        }]
    }

    fn work(&self) -> Work {
        self.shape.work_of_forward_pass()
    }

    fn breakdown(&self) -> ProblemPartsForProfile {
        breakdown_of_phases(&self.shape, &["forward"])
    }

    fn tolerance(&self) -> Tolerance {
        match self.shape.dtype {
            Dtype::Bf16 => Tolerance { max_error: 4e-2, relative_l2: 3e-2 },
            _ => Tolerance { max_error: 1e-4, relative_l2: 4e-5 },
        }
    }

    fn tolerances(&self) -> BTreeMap<String, Tolerance> {
        BTreeMap::from([("loss".to_owned(), tolerance_of_losses(self.shape.dtype))])
    }

    fn host_memory_bytes(&self) -> u64 {
        self.work().total_bytes() * 2 + self.shape.host_bytes_of_reference()
    }
}

/// Problem `transformer/train_step`. The inputs of a training step are `tokens` and `targets`
/// `[batch, context]`, `parameters`, `first_moments` and `second_moments` `[R, d]` in f32, and
/// `steps [1]`, the number of steps done. The outputs of a training step are parameters and moments
/// after one more step (`next_parameters` and so on), and each sequence's mean `loss [batch, 1]`
/// before that step. A training step descends along the gradient of the mean loss over all tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LanguageModelTrainingStep {
    /// Sizes and dtype of the language model.
    pub shape: LanguageModelShape,
}

impl Problem for LanguageModelTrainingStep {
    fn inputs(&self, seed: u64) -> Tensors {
        let text = self.shape.draw_tokens_and_targets(seed);
        text.iter().fold(
            self.shape.draw_parameters_and_moments(seed),
            |mut inputs, (name, tensor)| {
                inputs.insert(name, tensor.clone());
                inputs
            },
        )
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        expected_training_step_outputs(&self.shape, inputs, |x| x)
    }

    fn work(&self) -> Work {
        self.shape.work_of_training_step()
    }

    fn breakdown(&self) -> ProblemPartsForProfile {
        breakdown_of_phases(&self.shape, &["forward", "backward", "optimizer"])
    }

    /// Tolerance of the new parameters and moments after a training step; the first moment is
    /// linear in the gradient, so its error is that of the gradient.
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
        let loss = tolerance_of_losses(self.shape.dtype);
        [("loss", loss), ("next_parameters", parameters), ("next_second_moments", second_moments)]
            .map(|(name, tolerance)| (name.to_owned(), tolerance))
            .into()
    }

    fn host_memory_bytes(&self) -> u64 {
        self.work().total_bytes() * 2 + self.shape.host_bytes_of_reference()
    }
}

fn tolerance_of_losses(dtype: Dtype) -> Tolerance {
    let most = if dtype == Dtype::Bf16 { 2e-3 } else { 1e-5 };
    Tolerance { max_error: most, relative_l2: most }
}

/// Breakdown of the named phases into NVTX ranges and work, with the attention operations that only
/// unfused implementations show, as `scaled_dot_product_attention`.
fn breakdown_of_phases(shape: &LanguageModelShape, phases: &[&str]) -> ProblemPartsForProfile {
    let LanguageModelShape { layers, heads, context_tokens: context, dtype, .. } = *shape;
    let phase = |name: &&str| ProblemPartForProfile {
        profile_table: "phase",
        label: (*name).to_owned(),
        range_path: (*name).to_owned(),
        work: match *name {
            "forward" => shape.work_of_forward_pass(),
            "backward" => {
                let flops = 2 * shape.gemm_flops_of_forward_pass();
                Work::default().with_flops(FlopUnit::Matmul, dtype, flops)
            }
            _ => Work::bytes(
                16 * shape.number_of_parameters() as u64,
                12 * shape.number_of_parameters() as u64,
            ),
        },
    };
    let pairs = (layers * heads * shape.tokens_in_batch() * context) as u64;
    let gemm = 2 * pairs * shape.elements_per_head() as u64;
    let attention = [
        ("scores", "computing_attention_scores", FlopUnit::Matmul, gemm),
        ("softmax", "computing_softmax", FlopUnit::VectorArithmetic, 5 * pairs),
        ("values", "final_matmul", FlopUnit::Matmul, gemm),
    ]
    .map(|(label, name, unit, flops)| ProblemPartForProfile {
        profile_table: "attention",
        label: label.to_owned(),
        range_path: format!("scaled_dot_product_attention/{name}"),
        work: Work::default().with_flops(unit, dtype, flops),
    });
    ProblemPartsForProfile {
        data_items_per_execution: Some(shape.tokens_in_batch() as u64),
        unit: ThroughputItemUnit::Tokens,
        parts: phases.iter().map(phase).chain(attention).collect(),
    }
}

/// Checks that all tokens and targets are in the vocabulary.
///
/// # Errors
/// Fails with the first token or target that is not in the vocabulary.
pub fn check_tokens_are_in_vocabulary(
    shape: &LanguageModelShape,
    inputs: &Tensors,
) -> Result<(), String> {
    for name in ["tokens", "targets"] {
        let valid = |x: f32| x >= 0.0 && x < shape.vocabulary_size as f32 && x.fract() == 0.0;
        let tokens = inputs.f32_elements(name);
        if let Some(place) = tokens.iter().position(|token| !valid(*token)) {
            let (token, vocabulary) = (tokens[place], shape.vocabulary_size);
            return Err(format!(
                "`{name}` has {token} at {place}, a vocabulary of {vocabulary} ends before"
            ));
        }
    }
    Ok(())
}
