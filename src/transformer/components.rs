//! Kernels between the GEMMs of the language model, each as a problem with inputs of its own, a
//! reference and the bytes that it must move. Verification and memory ceilings then cover every
//! kernel at every model size.
//!
//! A chain of kernels is excluded on purpose. Inputs of a component are drawn with about the spread
//! that they have in the network.

use std::collections::BTreeMap;

use super::gradients::{WeightGradient, adamw_update};
use super::reference::token_loss;
use super::shape::{ArenaRows, LmShape, MODEL_SIZES, NORM_EPSILON, ROPE_BASE, Weight};
use crate::draw::draw_tensor;
use crate::math::{sigmoid, softmax};
use crate::parallel;
use kernelgate::stats::mean;
use kernelgate::workload::{
    Axis, AxisError, Dtype, Expected, FlopUnit, Point, Problem, Tensor, TensorData, Tensors,
    Tolerance, Work, Workload, random,
};

/// Workload of a single kernel of the language model, or of two that always follow each other.
pub const COMPONENT: Workload<ComponentProblem> = Workload {
    name: "transformer/kernel",
    about: "a kernel of the language model on inputs of its own",
    revision: 1,
    axes: &[
        Axis::one_of("kernel", COMPONENT_NAMES, "the kernel"),
        Axis::one_of("size", MODEL_SIZES, "width, layers and heads"),
        Axis::number("ctx", "tokens of a sequence"),
        Axis::number("b", "sequences"),
        Axis::one_of("dtype", &["f32", "bf16"], "dtype of activations; sums are f32"),
    ],
    default: &["kernel=norm_backward,loss size=small ctx=512 b=4 dtype=bf16"],
    accelerator: &[],
    // In these cases each launch moves at least 256 MB.
    thorough: &[
        "kernel=embed,norm,norm_add,norm_backward,rope size=small ctx=1024 b=64 dtype=bf16",
        "kernel=embedding_gradient size=small ctx=1024 b=64 dtype=bf16",
        "kernel=swiglu,swiglu_backward size=small ctx=1024 b=24 dtype=bf16",
        "kernel=softmax,softmax_f32,softmax_backward,softmax_backward_f32 size=small ctx=1024 b=16 \
         dtype=bf16",
        "kernel=loss,loss_forward size=small ctx=1024 b=16 dtype=bf16",
        "kernel=adamw size=small ctx=64 b=1 dtype=bf16",
    ],
    bind: ComponentProblem::bind,
};

/// A kernel between the GEMMs of the language model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelPart {
    /// Rows of the embedding.
    Embed,
    EmbeddingGradient,
    /// RMSNorm.
    Norm,
    /// RMSNorm of the sum of the residual stream and a branch.
    NormAdd,
    /// Component: gradients of the residual stream and of the gain.
    NormBackward,
    /// Component: rotary embedding of queries and keys.
    Rope,
    /// SwiGLU.
    Swiglu,
    /// Component: gradients of gates and ups.
    SwigluBackward,
    /// Causal softmax.
    Softmax,
    /// Component: causal softmax of f32 scores.
    SoftmaxF32,
    /// Gradients of the scores.
    SoftmaxBackward,
    /// Gradients of f32 scores, from f32 gradients of the probabilities.
    SoftmaxBackwardF32,
    /// Component: losses of the tokens, and gradients of the logits.
    Loss,
    /// Losses.
    LossForward,
    /// A step of AdamW.
    AdamW,
}

impl ModelPart {
    /// Every component, in the order of [`COMPONENT_NAMES`].
    pub const ALL_COMPONENTS: [Self; COMPONENT_NAMES.len()] = [
        Self::Embed,
        Self::EmbeddingGradient,
        Self::Norm,
        Self::NormAdd,
        Self::NormBackward,
        Self::Rope,
        Self::Swiglu,
        Self::SwigluBackward,
        Self::Softmax,
        Self::SoftmaxF32,
        Self::SoftmaxBackward,
        Self::SoftmaxBackwardF32,
        Self::Loss,
        Self::LossForward,
        Self::AdamW,
    ];
}

/// Names of the components as values of the axis `kernel`.
const COMPONENT_NAMES: &[&str] = &[
    "embed",
    "embedding_gradient",
    "norm",
    "norm_add",
    "norm_backward",
    "rope",
    "swiglu",
    "swiglu_backward",
    "softmax",
    "softmax_f32",
    "softmax_backward",
    "softmax_backward_f32",
    "loss",
    "loss_forward",
    "adamw",
];

/// Maximum number of parameters of a model whose whole AdamW step is compared with the reference;
/// of a larger model some rows are.
const MAX_PARAMETERS_COMPARED_WHOLE: usize = 4 << 20;

/// An input or output tensor of a component.
pub struct ComponentTensor {
    pub name: &'static str,
    /// Shape of the tensor.
    pub extents: Vec<usize>,
    pub dtype: Dtype,
}

impl ComponentTensor {
    fn new(name: &'static str, extents: impl Into<Vec<usize>>, dtype: Dtype) -> Self {
        Self { name, extents: extents.into(), dtype }
    }

    /// Size of the tensor in bytes.
    pub fn bytes(&self) -> usize {
        self.extents.iter().product::<usize>() * self.dtype.bytes()
    }
}

/// Problem `transformer/kernel`: one kernel of the language model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ComponentProblem {
    /// The kernel.
    pub component: ModelPart,
    /// Extents and dtype.
    pub shape: LmShape,
}

impl ComponentProblem {
    fn bind(point: &Point) -> Result<Self, AxisError> {
        let name = point.word("kernel")?;
        let number = COMPONENT_NAMES.iter().position(|known| *known == name);
        let component = ModelPart::ALL_COMPONENTS[number.expect("the axis lists the names")];
        Ok(Self { component, shape: LmShape::bind(point)? })
    }

    /// Input tensors of this kernel of the language model.
    pub fn input_tensors(&self) -> Vec<ComponentTensor> {
        let shape = self.shape;
        let LmShape { d, ff, dtype, context, .. } = shape;
        let tokens = shape.token_count();
        let f32 = |name, extents| ComponentTensor::new(name, extents, Dtype::F32);
        let element = |name, extents| ComponentTensor::new(name, extents, dtype);
        let token_numbers = |name| f32(name, vec![shape.batch, context]);
        let stream = |name| f32(name, vec![tokens, d]);
        let gain = || element("gain", vec![d]);
        let logits = || element("logits", vec![tokens, shape.padded_vocabulary()]);
        let gate_up = || element("gate_up", vec![tokens, 2, ff]);
        let pairs = vec![shape.batch * shape.heads, context, context];
        match self.component {
            ModelPart::Embed => {
                vec![token_numbers("tokens"), element("table", vec![shape.vocabulary, d])]
            }
            ModelPart::EmbeddingGradient => vec![token_numbers("tokens"), stream("grad_x")],
            ModelPart::Norm => vec![stream("x"), gain()],
            ModelPart::NormAdd => vec![stream("x"), element("branch", vec![tokens, d]), gain()],
            ModelPart::NormBackward => vec![
                stream("x"),
                f32("inverse", vec![tokens]),
                gain(),
                element("grad_y", vec![tokens, d]),
                stream("residual_gradient"),
            ],
            ModelPart::Rope => {
                vec![element("qkv", vec![tokens, 3, shape.heads, shape.head_dim()])]
            }
            ModelPart::Swiglu => vec![gate_up()],
            ModelPart::SwigluBackward => vec![gate_up(), element("grad_h", vec![tokens, ff])],
            ModelPart::Softmax => vec![element("scores", pairs)],
            ModelPart::SoftmaxF32 => vec![f32("scores", pairs)],
            ModelPart::SoftmaxBackward => {
                vec![element("probabilities", pairs.clone()), element("grad_probabilities", pairs)]
            }
            ModelPart::SoftmaxBackwardF32 => {
                vec![element("probabilities", pairs.clone()), f32("grad_probabilities", pairs)]
            }
            ModelPart::Loss | ModelPart::LossForward => vec![logits(), token_numbers("targets")],
            ModelPart::AdamW => {
                let rows = |name, rows| f32(name, vec![rows, d]);
                let matrices = shape.arena_rows() - shape.first_matrix_row();
                vec![
                    rows("parameters", shape.arena_rows()),
                    rows("first_moments", shape.arena_rows()),
                    rows("second_moments", shape.arena_rows()),
                    rows("f32_gradients", shape.first_matrix_row()),
                    element("gradients", vec![matrices, d]),
                    f32("steps", vec![1]),
                ]
            }
        }
    }

    /// Output tensors of this kernel of the language model.
    pub fn output_tensors(&self) -> Vec<ComponentTensor> {
        let shape = self.shape;
        let LmShape { d, ff, dtype, context, batch, .. } = shape;
        let tokens = shape.token_count();
        let f32 = |name, extents| ComponentTensor::new(name, extents, Dtype::F32);
        let element = |name, extents| ComponentTensor::new(name, extents, dtype);
        let inverse = || f32("inverse", vec![tokens, 1]);
        let y = || element("y", vec![tokens, d]);
        let pairs = vec![batch * shape.heads, context, context];
        match self.component {
            ModelPart::Embed => vec![f32("x", vec![tokens, d])],
            ModelPart::EmbeddingGradient => vec![f32("grad_table", vec![shape.vocabulary, d])],
            ModelPart::Norm => vec![y(), inverse()],
            ModelPart::NormAdd => vec![f32("sum", vec![tokens, d]), y(), inverse()],
            ModelPart::NormBackward => vec![
                f32("grad_x", vec![tokens, d]),
                element("rounded", vec![tokens, d]),
                f32("grad_gain", vec![d]),
            ],
            ModelPart::Rope => vec![element("rotated", vec![tokens, 2 * d])],
            ModelPart::Swiglu => vec![element("h", vec![tokens, ff])],
            ModelPart::SwigluBackward => vec![element("grad_gate_up", vec![tokens, 2 * ff])],
            ModelPart::Softmax | ModelPart::SoftmaxF32 => vec![element("probabilities", pairs)],
            ModelPart::SoftmaxBackward | ModelPart::SoftmaxBackwardF32 => {
                vec![element("grad_scores", pairs)]
            }
            ModelPart::Loss => vec![
                f32("loss", vec![batch, 1]),
                element("grad_logits", vec![tokens, shape.padded_vocabulary()]),
            ],
            ModelPart::LossForward => vec![f32("loss", vec![batch, 1])],
            ModelPart::AdamW => {
                let state = |name| f32(name, vec![shape.arena_rows(), d]);
                let mut outputs = vec![state("new_p"), state("new_m"), state("new_v")];
                if dtype != Dtype::F32 {
                    outputs.push(element("copy", vec![shape.arena_rows(), d]));
                }
                outputs
            }
        }
    }

    /// Function that maps samples of N(0, 1) to values of an input.
    fn sample_to_input_value(&self, name: &str) -> fn(f32) -> f32 {
        match name {
            "gain" => |x| 1.0 + 0.1 * x,
            "inverse" => |x| 0.5 + x.abs(),
            "scores" | "logits" => |x| 3.0 * x,
            "probabilities" => |x| 0.01 * x * x,
            "parameters" => |x| 0.03 * x,
            "first_moments" | "f32_gradients" | "gradients" => |x| 1e-3 * x,
            "second_moments" => |x| 1e-6 * (0.5 + x.abs()),
            _ => |x| x,
        }
    }

    fn reference_outputs(&self, inputs: &Tensors) -> Vec<Vec<f64>> {
        let rows = ComponentRows { inputs, shape: self.shape };
        match self.component {
            ModelPart::Embed => vec![rows.embedded_tokens()],
            ModelPart::EmbeddingGradient => vec![rows.embedding_gradient()],
            ModelPart::Norm => vec![rows.normalized_rows(&[]), rows.inverse_roots(&[])],
            ModelPart::NormAdd => {
                vec![
                    rows.residual_sums(),
                    rows.normalized_rows(&["branch"]),
                    rows.inverse_roots(&["branch"]),
                ]
            }
            ModelPart::NormBackward => {
                let grad_x = rows.norm_backward();
                vec![grad_x.clone(), grad_x, rows.gain_gradient()]
            }
            ModelPart::Rope => vec![rows.rotated_qkv()],
            ModelPart::Swiglu => vec![rows.swiglu_rows()],
            ModelPart::SwigluBackward => vec![rows.swiglu_backward()],
            ModelPart::Softmax | ModelPart::SoftmaxF32 => vec![rows.causal_softmax()],
            ModelPart::SoftmaxBackward | ModelPart::SoftmaxBackwardF32 => {
                vec![rows.causal_softmax_backward()]
            }
            ModelPart::Loss => vec![rows.token_losses(), rows.grad_logits()],
            ModelPart::LossForward => vec![rows.token_losses()],
            ModelPart::AdamW => rows.adamw_update(&self.compared_rows()),
        }
    }

    /// Rows of the parameter arena that are compared with the reference.
    fn compared_rows(&self) -> Vec<usize> {
        let whole = self.shape.parameter_count() <= MAX_PARAMETERS_COMPARED_WHOLE;
        let count = if whole { self.shape.arena_rows() } else { 1000 };
        random::random_indices(1, "rows", self.shape.arena_rows(), count)
    }
}

impl Problem for ComponentProblem {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        for ComponentTensor { name, extents, dtype } in self.input_tensors() {
            let tensor = match name {
                "tokens" | "targets" => {
                    let tokens = self.shape.draw_tokens_and_targets(seed).f32(name).to_vec();
                    Tensor::new(extents, TensorData::F32(tokens))
                }
                "steps" => Tensor::new(extents, TensorData::F32(vec![3.0])),
                _ => draw_tensor(seed, name, extents, dtype, self.sample_to_input_value(name)),
            };
            inputs.insert(name, tensor);
        }
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let sampled = (self.component == ModelPart::AdamW).then(|| self.compared_rows());
        let outputs = self.output_tensors().into_iter().zip(self.reference_outputs(inputs));
        outputs
            .map(|(ComponentTensor { name, extents, .. }, values)| Expected {
                rows: sampled.clone().filter(|rows| rows.len() < extents[0]),
                ..Expected::all(name, extents, values)
            })
            .collect()
    }

    fn work(&self) -> Work {
        let sum = |tensors: Vec<ComponentTensor>| {
            tensors.iter().map(ComponentTensor::bytes).sum::<usize>()
        };
        let LmShape { d, dtype, .. } = self.shape;
        let (all, write) = (sum(self.input_tensors()), sum(self.output_tensors()));
        let used_rows = self.shape.token_count().min(self.shape.vocabulary);
        let read = match self.component {
            ModelPart::Embed => all - (self.shape.vocabulary - used_rows) * d * dtype.bytes(),
            ModelPart::Rope => all / 3 * 2,
            // Keys after the diagonal are not read.
            ModelPart::Softmax
            | ModelPart::SoftmaxF32
            | ModelPart::SoftmaxBackward
            | ModelPart::SoftmaxBackwardF32 => {
                all / (2 * self.shape.context) * (self.shape.context + 1)
            }
            _ => all,
        };
        let elements: usize = self
            .output_tensors()
            .iter()
            .map(|output| output.extents.iter().product::<usize>())
            .sum();
        // The work counts about four operations for each element of the outputs.
        Work::bytes(read as u64, write as u64).with_flops(
            FlopUnit::Vector,
            Dtype::F32,
            4 * elements as u64,
        )
    }

    fn tolerance(&self) -> Tolerance {
        match self.shape.dtype {
            Dtype::Bf16 => Tolerance { max_error: 6e-3, relative_l2: 3e-3 },
            _ => Tolerance { max_error: 1e-5, relative_l2: 4e-6 },
        }
    }

    /// Outputs in f32 are not rounded any further.
    fn tolerances(&self) -> BTreeMap<String, Tolerance> {
        let f32s = self.output_tensors().into_iter().filter(|output| output.dtype == Dtype::F32);
        let tolerance = Tolerance { max_error: 1e-5, relative_l2: 4e-6 };
        f32s.map(|output| (output.name.to_owned(), tolerance)).collect()
    }

    fn host_bytes(&self) -> u64 {
        let elements = |tensors: Vec<ComponentTensor>| {
            tensors.iter().map(|tensor| tensor.extents.iter().product::<usize>()).sum::<usize>()
        };
        let outputs = elements(self.output_tensors());
        // Bytes of inputs, outputs, and the reference while its rows are concatenated.
        (4 * elements(self.input_tensors()) + (4 + 2 * 8) * outputs) as u64
    }
}

/// Inputs of a component, read row by row in fp64.
struct ComponentRows<'a> {
    inputs: &'a Tensors,
    shape: LmShape,
}

impl ComponentRows<'_> {
    fn f64_row(&self, name: &str, row: usize, columns: usize) -> Vec<f64> {
        self.inputs.tensor(name).to_f64(row * columns, columns)
    }

    /// Concatenates the rows that `f` computes for each token.
    fn token_rows(&self, f: &(dyn Fn(usize) -> Vec<f64> + Sync)) -> Vec<f64> {
        parallel::parallel_map(self.shape.token_count(), f).concat()
    }

    fn embedded_tokens(&self) -> Vec<f64> {
        let tokens = self.inputs.f32("tokens");
        self.token_rows(&|token| self.f64_row("table", tokens[token] as usize, self.shape.d))
    }

    fn embedding_gradient(&self) -> Vec<f64> {
        let LmShape { d, vocabulary, .. } = self.shape;
        let mut positions = vec![Vec::new(); vocabulary];
        for (position, token) in self.inputs.f32("tokens").iter().enumerate() {
            positions[*token as usize].push(position);
        }
        let sum = |token: usize| {
            let mut sum = vec![0.0; d];
            for position in &positions[token] {
                let row = self.f64_row("grad_x", *position, d);
                sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
            }
            sum
        };
        parallel::parallel_map(vocabulary, &sum).concat()
    }

    /// Row of x for a token, plus the rows of the tensors `added` for the same token.
    fn residual_row_of_token(&self, token: usize, added: &[&str]) -> Vec<f64> {
        let d = self.shape.d;
        let mut x = self.f64_row("x", token, d);
        for name in added {
            x.iter_mut().zip(self.f64_row(name, token, d)).for_each(|(x, y)| *x += y);
        }
        x
    }

    fn residual_sums(&self) -> Vec<f64> {
        self.token_rows(&|token| self.residual_row_of_token(token, &["branch"]))
    }

    fn inverse_roots(&self, added: &[&str]) -> Vec<f64> {
        self.token_rows(&|token| vec![inverse_root(&self.residual_row_of_token(token, added))])
    }

    fn normalized_rows(&self, added: &[&str]) -> Vec<f64> {
        let gain = self.f64_row("gain", 0, self.shape.d);
        self.token_rows(&|token| {
            let x = self.residual_row_of_token(token, added);
            let root = inverse_root(&x);
            x.iter().zip(&gain).map(|(x, gain)| x * root * gain).collect()
        })
    }

    fn norm_backward(&self) -> Vec<f64> {
        let d = self.shape.d;
        let gain = self.f64_row("gain", 0, d);
        self.token_rows(&|token| {
            let (x, grad) = (self.f64_row("x", token, d), self.f64_row("grad_y", token, d));
            let root = self.f64_row("inverse", token, 1)[0];
            let scaled: Vec<f64> = grad.iter().zip(&gain).map(|(grad, gain)| grad * gain).collect();
            let mean = scaled.iter().zip(&x).map(|(grad, x)| grad * x).sum::<f64>() / d as f64;
            let mut out = self.f64_row("residual_gradient", token, d);
            for (out, (grad, x)) in out.iter_mut().zip(scaled.iter().zip(&x)) {
                *out += root * (grad - x * root * root * mean);
            }
            out
        })
    }

    fn gain_gradient(&self) -> Vec<f64> {
        const TOKENS_PER_PARTIAL_SUM: usize = 256;
        let (d, tokens) = (self.shape.d, self.shape.token_count());
        let partial = |number: usize| {
            let mut sum = vec![0.0; d];
            for token in
                number * TOKENS_PER_PARTIAL_SUM..tokens.min((number + 1) * TOKENS_PER_PARTIAL_SUM)
            {
                let (x, grad) = (self.f64_row("x", token, d), self.f64_row("grad_y", token, d));
                let root = self.f64_row("inverse", token, 1)[0];
                let products = x.iter().zip(&grad).map(|(x, grad)| x * grad * root);
                sum.iter_mut().zip(products).for_each(|(sum, product)| *sum += product);
            }
            sum
        };
        let mut total = vec![0.0; d];
        for sum in parallel::parallel_map(tokens.div_ceil(TOKENS_PER_PARTIAL_SUM), &partial) {
            total.iter_mut().zip(sum).for_each(|(total, x)| *total += x);
        }
        total
    }

    fn rotated_qkv(&self) -> Vec<f64> {
        let LmShape { d, context, .. } = self.shape;
        let head_dim = self.shape.head_dim();
        self.token_rows(&|token| {
            let mut row = self.f64_row("qkv", token, 3 * d);
            row.truncate(2 * d);
            for (number, pair) in row.chunks_exact_mut(2).enumerate() {
                let power = (2 * number % head_dim) as f64 / head_dim as f64;
                let (sin, cos) = ((token % context) as f64 * ROPE_BASE.powf(-power)).sin_cos();
                let [a, b] = [pair[0], pair[1]];
                pair.copy_from_slice(&[a * cos - b * sin, a * sin + b * cos]);
            }
            row
        })
    }

    fn swiglu_rows(&self) -> Vec<f64> {
        let ff = self.shape.ff;
        self.token_rows(&|token| {
            let row = self.f64_row("gate_up", token, 2 * ff);
            let (gate, up) = row.split_at(ff);
            gate.iter().zip(up).map(|(gate, up)| gate * sigmoid(*gate) * up).collect()
        })
    }

    fn swiglu_backward(&self) -> Vec<f64> {
        let ff = self.shape.ff;
        self.token_rows(&|token| {
            let row = self.f64_row("gate_up", token, 2 * ff);
            let grad = self.f64_row("grad_h", token, ff);
            let (gate, up) = row.split_at(ff);
            let grad_gate = gate.iter().zip(up).zip(&grad).map(|((gate, up), grad)| {
                let s = sigmoid(*gate);
                grad * up * s * (1.0 + gate * (1.0 - s))
            });
            let grad_up = gate.iter().zip(&grad).map(|(gate, grad)| grad * gate * sigmoid(*gate));
            grad_gate.chain(grad_up).collect()
        })
    }

    /// Concatenates rows of all heads: `f` receives a row's index and the number of keys that it
    /// sees.
    fn causal_rows(&self, f: &(dyn Fn(usize, usize) -> Vec<f64> + Sync)) -> Vec<f64> {
        let LmShape { context, batch, heads, .. } = self.shape;
        let row = |row: usize| {
            let mut values = f(row, row % context + 1);
            values.resize(context, 0.0);
            values
        };
        parallel::parallel_map(batch * heads * context, &row).concat()
    }

    fn attention_scale(&self) -> f64 {
        1.0 / (self.shape.head_dim() as f64).sqrt()
    }

    fn causal_softmax(&self) -> Vec<f64> {
        self.causal_rows(&|row, seen| {
            let scores = self.inputs.tensor("scores").to_f64(row * self.shape.context, seen);
            let mut scores: Vec<f64> = scores.iter().map(|x| x * self.attention_scale()).collect();
            softmax(&mut scores);
            scores
        })
    }

    fn causal_softmax_backward(&self) -> Vec<f64> {
        self.causal_rows(&|row, seen| {
            let [p, grad] = ["probabilities", "grad_probabilities"]
                .map(|name| self.inputs.tensor(name).to_f64(row * self.shape.context, seen));
            let mean: f64 = p.iter().zip(&grad).map(|(p, grad)| p * grad).sum();
            p.iter()
                .zip(&grad)
                .map(|(p, grad)| self.attention_scale() * p * (grad - mean))
                .collect()
        })
    }

    /// Logits of a token, without the padding.
    fn logits_of_token(&self, token: usize) -> Vec<f64> {
        let mut logits = self.f64_row("logits", token, self.shape.padded_vocabulary());
        logits.truncate(self.shape.vocabulary);
        logits
    }

    fn token_losses(&self) -> Vec<f64> {
        let targets = self.inputs.f32("targets");
        let losses = self.token_rows(&|token| {
            vec![token_loss(&self.logits_of_token(token), targets[token] as usize)]
        });
        losses.chunks(self.shape.context).map(mean).collect()
    }

    fn grad_logits(&self) -> Vec<f64> {
        let targets = self.inputs.f32("targets");
        self.token_rows(&|token| {
            let mut row = self.logits_of_token(token);
            softmax(&mut row);
            row[targets[token] as usize] -= 1.0;
            row.iter_mut().for_each(|x| *x /= self.shape.token_count() as f64);
            row.resize(self.shape.padded_vocabulary(), 0.0);
            row
        })
    }

    /// Rows of the new parameters, of both moments and of the rounded copy.
    fn adamw_update(&self, rows: &[usize]) -> Vec<Vec<f64>> {
        let LmShape { d, dtype, .. } = self.shape;
        let gradient = |number: usize| match rows[number].checked_sub(self.shape.first_matrix_row())
        {
            None => self.f64_row("f32_gradients", rows[number], d),
            Some(row) => self.f64_row("gradients", row, d),
        };
        let values = parallel::parallel_map(rows.len(), &gradient).concat();
        let tensor =
            ArenaRows { first: 0, rows: self.shape.arena_rows(), weight: Weight::Embedding };
        let gradient = WeightGradient { tensor, rows: rows.to_vec(), values };
        let mut outputs = adamw_update(&self.shape, self.inputs, &gradient).to_vec();
        if dtype != Dtype::F32 {
            outputs.push(outputs[0].clone());
        }
        outputs
    }
}

fn inverse_root(x: &[f64]) -> f64 {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    1.0 / (mean + NORM_EPSILON).sqrt()
}
