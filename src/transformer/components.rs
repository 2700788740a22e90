//! The kernels between the GEMMs of the language model, each as a problem of its own with its own
//! inputs, reference and bytes to move. Each kernel between the GEMMs is thereby verified alone and
//! compared with the memory bandwidth limit, at every model size.
//!
//! The workload `transformer/kernel` never chains kernels, except two that always follow each
//! other. The inputs of a kernel problem are drawn with about the spread that they have inside the
//! network.

use std::collections::BTreeMap;

use super::gradients::{SampledWeightGradient, adamw_step_of_gradient_rows};
use super::reference::cross_entropy_of_token;
use super::shape::{
    ArenaRowsOfTensor, LanguageModelShape, MODEL_SIZE_NAMES, ParameterTensor, RMS_NORM_EPSILON,
    ROPE_WAVELENGTH_BASE,
};
use crate::draw::draw_tensor_of_mapped_normals;
use crate::math::{sigmoid_f64, softmax_in_place_f64};
use crate::parallel;
use kernelgate::stats::mean;
use kernelgate::workload::{
    Axis, AxisError, Dtype, Expected, FlopUnit, Point, Problem, Tensor, TensorData, Tensors,
    Tolerance, Work, Workload, random,
};

/// Workload of a single kernel of the language model, or of two kernels that always follow each
/// other.
pub const SINGLE_KERNEL_WORKLOAD: Workload<SingleKernelProblem> = Workload {
    name: "transformer/kernel",
    about: "a kernel of the language model on inputs of its own",
    revision: 1,
    axes: &[
        Axis::one_of("kernel", KERNEL_AXIS_VALUES, "the kernel"),
        Axis::one_of("size", MODEL_SIZE_NAMES, "width, layers and heads"),
        Axis::number("ctx", "tokens of a sequence"),
        Axis::number("b", "sequences"),
        Axis::one_of("dtype", &["f32", "bf16"], "dtype of activations; sums are f32"),
    ],
    default_selection_lines: &["kernel=norm_backward,loss size=small ctx=512 b=4 dtype=bf16"],
    accelerator_selection_lines: &[],
    // In the thorough selection of the single-kernel problems, each launch moves at least 256 MB.
    thorough_selection_lines: &[
        "kernel=embed,norm,norm_add,norm_backward,rope size=small ctx=1024 b=64 dtype=bf16",
        "kernel=embedding_gradient size=small ctx=1024 b=64 dtype=bf16",
        "kernel=swiglu,swiglu_backward size=small ctx=1024 b=24 dtype=bf16",
        "kernel=softmax,softmax_f32,softmax_backward,softmax_backward_f32 size=small ctx=1024 b=16 \
         dtype=bf16",
        "kernel=loss,loss_forward size=small ctx=1024 b=16 dtype=bf16",
        "kernel=adamw size=small ctx=64 b=1 dtype=bf16",
    ],
    bind: SingleKernelProblem::bind_kernel_and_model_axes,
};

/// A kernel between the GEMMs of the language model, or two that always follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LanguageModelKernel {
    /// Kernel that copies the embedding rows of the tokens.
    TokenEmbedding,
    EmbeddingGradient,
    /// RMSNorm.
    RmsNorm,
    /// RMSNorm of the sum of the residual stream and a layer branch.
    AddBranchAndRmsNorm,
    /// Backward pass of RMSNorm: gradients of the residual stream and of the gain.
    RmsNormBackward,
    /// Rotary position embedding of queries and keys.
    Rope,
    /// SwiGLU.
    Swiglu,
    /// Backward pass of SwiGLU: gradients of gates and ups.
    SwigluBackward,
    /// Causal softmax.
    CausalSoftmax,
    /// Causal softmax of attention scores that are f32 whatever the dtype.
    CausalSoftmaxOfF32Scores,
    /// Causal softmax backward: gradients of the attention scores from the gradients of the
    /// probabilities.
    CausalSoftmaxBackward,
    /// Backward pass of the softmax: gradients of f32 attention scores, from f32 gradients of the
    /// probabilities.
    CausalSoftmaxBackwardOfF32Scores,
    /// Cross entropy: losses of the tokens, and gradients of the logits.
    CrossEntropyAndLogitGradients,
    /// Kernel that computes the loss of each token.
    TokenCrossEntropy,
    /// A step of AdamW.
    AdamW,
}

impl LanguageModelKernel {
    /// Every kernel problem, in the order of [`KERNEL_AXIS_VALUES`].
    pub const ALL_KERNELS: [Self; KERNEL_AXIS_VALUES.len()] = [
        Self::TokenEmbedding,
        Self::EmbeddingGradient,
        Self::RmsNorm,
        Self::AddBranchAndRmsNorm,
        Self::RmsNormBackward,
        Self::Rope,
        Self::Swiglu,
        Self::SwigluBackward,
        Self::CausalSoftmax,
        Self::CausalSoftmaxOfF32Scores,
        Self::CausalSoftmaxBackward,
        Self::CausalSoftmaxBackwardOfF32Scores,
        Self::CrossEntropyAndLogitGradients,
        Self::TokenCrossEntropy,
        Self::AdamW,
    ];
}

/// Names of the kernel problems as values of the axis `kernel`.
const KERNEL_AXIS_VALUES: &[&str] = &[
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
/// of a larger model, a sample of rows is compared.
const MAX_PARAMETERS_OF_WHOLE_ADAMW_REFERENCE: usize = 4 << 20;

/// Name, extents and dtype of an input or output tensor of a kernel problem.
pub struct KernelTensorSpec {
    pub tensor_name: &'static str,
    /// Number of elements along each dimension of the tensor, outermost first.
    pub extents: Vec<usize>,
    pub dtype: Dtype,
}

impl KernelTensorSpec {
    fn with_name_extents_and_dtype(
        name: &'static str,
        extents: impl Into<Vec<usize>>,
        dtype: Dtype,
    ) -> Self {
        Self { tensor_name: name, extents: extents.into(), dtype }
    }

    /// Size in bytes of an input or output tensor of a kernel problem.
    pub fn bytes_of_tensor(&self) -> usize {
        self.extents.iter().product::<usize>() * self.dtype.bytes_per_element()
    }
}

/// Problem `transformer/kernel`: one kernel of the language model at one model size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SingleKernelProblem {
    /// The language model kernel that the problem tests.
    pub tested_kernel: LanguageModelKernel,
    /// Sizes and dtype of the language model whose kernel the problem tests.
    pub shape: LanguageModelShape,
}

impl SingleKernelProblem {
    fn bind_kernel_and_model_axes(point: &Point) -> Result<Self, AxisError> {
        let name = point.word("kernel")?;
        let number = KERNEL_AXIS_VALUES.iter().position(|known| *known == name);
        let component = LanguageModelKernel::ALL_KERNELS[number.expect("the axis lists the names")];
        Ok(Self {
            tested_kernel: component,
            shape: LanguageModelShape::bind_language_model_axes(point)?,
        })
    }

    /// Specifications of the kernel's input tensors.
    pub fn input_tensor_specs(&self) -> Vec<KernelTensorSpec> {
        let shape = self.shape;
        let LanguageModelShape {
            model_width: d,
            swiglu_hidden_width: ff,
            dtype,
            context_tokens: context,
            ..
        } = shape;
        let tokens = shape.tokens_in_batch();
        let f32 = |name, extents| {
            KernelTensorSpec::with_name_extents_and_dtype(name, extents, Dtype::F32)
        };
        let element =
            |name, extents| KernelTensorSpec::with_name_extents_and_dtype(name, extents, dtype);
        let token_numbers = |name| f32(name, vec![shape.batch, context]);
        let stream = |name| f32(name, vec![tokens, d]);
        let gain = || element("gain", vec![d]);
        let logits = || element("logits", vec![tokens, shape.padded_logit_columns()]);
        let gate_up = || element("gate_up", vec![tokens, 2, ff]);
        let pairs = vec![shape.batch * shape.heads, context, context];
        match self.tested_kernel {
            LanguageModelKernel::TokenEmbedding => {
                vec![token_numbers("tokens"), element("table", vec![shape.vocabulary_size, d])]
            }
            LanguageModelKernel::EmbeddingGradient => {
                vec![token_numbers("tokens"), stream("grad_x")]
            }
            LanguageModelKernel::RmsNorm => vec![stream("x"), gain()],
            LanguageModelKernel::AddBranchAndRmsNorm => {
                vec![stream("x"), element("branch", vec![tokens, d]), gain()]
            }
            LanguageModelKernel::RmsNormBackward => vec![
                stream("x"),
                f32("inverse", vec![tokens]),
                gain(),
                element("grad_y", vec![tokens, d]),
                stream("residual_gradient"),
            ],
            LanguageModelKernel::Rope => {
                vec![element("qkv", vec![tokens, 3, shape.heads, shape.elements_per_head()])]
            }
            LanguageModelKernel::Swiglu => vec![gate_up()],
            LanguageModelKernel::SwigluBackward => {
                vec![gate_up(), element("grad_h", vec![tokens, ff])]
            }
            LanguageModelKernel::CausalSoftmax => vec![element("scores", pairs)],
            LanguageModelKernel::CausalSoftmaxOfF32Scores => vec![f32("scores", pairs)],
            LanguageModelKernel::CausalSoftmaxBackward => {
                vec![element("probabilities", pairs.clone()), element("grad_probabilities", pairs)]
            }
            LanguageModelKernel::CausalSoftmaxBackwardOfF32Scores => {
                vec![element("probabilities", pairs.clone()), f32("grad_probabilities", pairs)]
            }
            LanguageModelKernel::CrossEntropyAndLogitGradients
            | LanguageModelKernel::TokenCrossEntropy => {
                vec![logits(), token_numbers("targets")]
            }
            LanguageModelKernel::AdamW => {
                let rows = |name, rows| f32(name, vec![rows, d]);
                let matrices =
                    shape.rows_in_parameter_arena() - shape.first_arena_row_of_matrices();
                vec![
                    rows("parameters", shape.rows_in_parameter_arena()),
                    rows("first_moments", shape.rows_in_parameter_arena()),
                    rows("second_moments", shape.rows_in_parameter_arena()),
                    rows("f32_gradients", shape.first_arena_row_of_matrices()),
                    element("gradients", vec![matrices, d]),
                    f32("steps", vec![1]),
                ]
            }
        }
    }

    /// Specifications of the kernel's output tensors.
    pub fn output_tensor_specs(&self) -> Vec<KernelTensorSpec> {
        let shape = self.shape;
        let LanguageModelShape {
            model_width: d,
            swiglu_hidden_width: ff,
            dtype,
            context_tokens: context,
            batch,
            ..
        } = shape;
        let tokens = shape.tokens_in_batch();
        let f32 = |name, extents| {
            KernelTensorSpec::with_name_extents_and_dtype(name, extents, Dtype::F32)
        };
        let element =
            |name, extents| KernelTensorSpec::with_name_extents_and_dtype(name, extents, dtype);
        let inverse = || f32("inverse", vec![tokens, 1]);
        let y = || element("y", vec![tokens, d]);
        let pairs = vec![batch * shape.heads, context, context];
        match self.tested_kernel {
            LanguageModelKernel::TokenEmbedding => vec![f32("x", vec![tokens, d])],
            LanguageModelKernel::EmbeddingGradient => {
                vec![f32("grad_table", vec![shape.vocabulary_size, d])]
            }
            LanguageModelKernel::RmsNorm => vec![y(), inverse()],
            LanguageModelKernel::AddBranchAndRmsNorm => {
                vec![f32("sum", vec![tokens, d]), y(), inverse()]
            }
            LanguageModelKernel::RmsNormBackward => vec![
                f32("grad_x", vec![tokens, d]),
                element("rounded", vec![tokens, d]),
                f32("grad_gain", vec![d]),
            ],
            LanguageModelKernel::Rope => vec![element("rotated", vec![tokens, 2 * d])],
            LanguageModelKernel::Swiglu => vec![element("h", vec![tokens, ff])],
            LanguageModelKernel::SwigluBackward => {
                vec![element("grad_gate_up", vec![tokens, 2 * ff])]
            }
            LanguageModelKernel::CausalSoftmax | LanguageModelKernel::CausalSoftmaxOfF32Scores => {
                vec![element("probabilities", pairs)]
            }
            LanguageModelKernel::CausalSoftmaxBackward
            | LanguageModelKernel::CausalSoftmaxBackwardOfF32Scores => {
                vec![element("grad_scores", pairs)]
            }
            LanguageModelKernel::CrossEntropyAndLogitGradients => vec![
                f32("loss", vec![batch, 1]),
                element("grad_logits", vec![tokens, shape.padded_logit_columns()]),
            ],
            LanguageModelKernel::TokenCrossEntropy => vec![f32("loss", vec![batch, 1])],
            LanguageModelKernel::AdamW => {
                let state = |name| f32(name, vec![shape.rows_in_parameter_arena(), d]);
                let mut outputs = vec![state("new_p"), state("new_m"), state("new_v")];
                if dtype != Dtype::F32 {
                    outputs.push(element("copy", vec![shape.rows_in_parameter_arena(), d]));
                }
                outputs
            }
        }
    }

    /// Returns the function that maps samples of N(0, 1) to elements of the named input, with the
    /// spread that they have in the network.
    fn map_from_normal_sample_to_element(&self, name: &str) -> fn(f32) -> f32 {
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

    fn reference_values_of_outputs(&self, inputs: &Tensors) -> Vec<Vec<f64>> {
        let rows = SingleKernelReference { inputs, shape: self.shape };
        match self.tested_kernel {
            LanguageModelKernel::TokenEmbedding => vec![rows.embedding_rows_of_tokens()],
            LanguageModelKernel::EmbeddingGradient => vec![rows.gradient_of_embedding_table()],
            LanguageModelKernel::RmsNorm => {
                vec![rows.rms_norm_of_token_rows(&[]), rows.inverse_rms_of_token_rows(&[])]
            }
            LanguageModelKernel::AddBranchAndRmsNorm => {
                vec![
                    rows.residual_stream_plus_branch(),
                    rows.rms_norm_of_token_rows(&["branch"]),
                    rows.inverse_rms_of_token_rows(&["branch"]),
                ]
            }
            LanguageModelKernel::RmsNormBackward => {
                let grad_x = rows.rms_norm_input_gradients();
                vec![grad_x.clone(), grad_x, rows.rms_norm_gain_gradient()]
            }
            LanguageModelKernel::Rope => vec![rows.rotated_queries_and_keys()],
            LanguageModelKernel::Swiglu => vec![rows.swiglu_hidden_rows()],
            LanguageModelKernel::SwigluBackward => vec![rows.swiglu_gate_and_up_gradients()],
            LanguageModelKernel::CausalSoftmax | LanguageModelKernel::CausalSoftmaxOfF32Scores => {
                vec![rows.causal_softmax_probabilities()]
            }
            LanguageModelKernel::CausalSoftmaxBackward
            | LanguageModelKernel::CausalSoftmaxBackwardOfF32Scores => {
                vec![rows.causal_softmax_score_gradients()]
            }
            LanguageModelKernel::CrossEntropyAndLogitGradients => {
                vec![rows.mean_losses_of_sequences(), rows.gradients_of_padded_logits()]
            }
            LanguageModelKernel::TokenCrossEntropy => vec![rows.mean_losses_of_sequences()],
            LanguageModelKernel::AdamW => {
                rows.adamw_step_of_arena_rows(&self.arena_rows_compared_with_reference())
            }
        }
    }

    /// Rows of the parameter arena (the tensor of all parameters) whose AdamW step is compared with
    /// the reference.
    fn arena_rows_compared_with_reference(&self) -> Vec<usize> {
        let whole = self.shape.number_of_parameters() <= MAX_PARAMETERS_OF_WHOLE_ADAMW_REFERENCE;
        let count = if whole { self.shape.rows_in_parameter_arena() } else { 1000 };
        random::distinct_random_indices(1, "rows", self.shape.rows_in_parameter_arena(), count)
    }
}

impl Problem for SingleKernelProblem {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        for KernelTensorSpec { tensor_name: name, extents, dtype } in self.input_tensor_specs() {
            let tensor = match name {
                "tokens" | "targets" => {
                    let tokens =
                        self.shape.draw_tokens_and_targets(seed).f32_elements(name).to_vec();
                    Tensor::new(extents, TensorData::F32(tokens))
                }
                "steps" => Tensor::new(extents, TensorData::F32(vec![3.0])),
                _ => draw_tensor_of_mapped_normals(
                    seed,
                    name,
                    extents,
                    dtype,
                    self.map_from_normal_sample_to_element(name),
                ),
            };
            inputs.insert(name, tensor);
        }
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let sampled = (self.tested_kernel == LanguageModelKernel::AdamW)
            .then(|| self.arena_rows_compared_with_reference());
        let outputs =
            self.output_tensor_specs().into_iter().zip(self.reference_values_of_outputs(inputs));
        outputs
            .map(|(KernelTensorSpec { tensor_name: name, extents, .. }, values)| Expected {
                row_indices: sampled.clone().filter(|rows| rows.len() < extents[0]),
                ..Expected::all(name, extents, values)
            })
            .collect()
    }

    fn work(&self) -> Work {
        let sum = |tensors: Vec<KernelTensorSpec>| {
            tensors.iter().map(KernelTensorSpec::bytes_of_tensor).sum::<usize>()
        };
        let LanguageModelShape { model_width: d, dtype, .. } = self.shape;
        let (all, write) = (sum(self.input_tensor_specs()), sum(self.output_tensor_specs()));
        let used_rows = self.shape.tokens_in_batch().min(self.shape.vocabulary_size);
        let read = match self.tested_kernel {
            LanguageModelKernel::TokenEmbedding => {
                all - (self.shape.vocabulary_size - used_rows) * d * dtype.bytes_per_element()
            }
            LanguageModelKernel::Rope => all / 3 * 2,
            // The causal softmax reads no scores of keys after the diagonal, so their bytes do not
            // count.
            LanguageModelKernel::CausalSoftmax
            | LanguageModelKernel::CausalSoftmaxOfF32Scores
            | LanguageModelKernel::CausalSoftmaxBackward
            | LanguageModelKernel::CausalSoftmaxBackwardOfF32Scores => {
                all / (2 * self.shape.context_tokens) * (self.shape.context_tokens + 1)
            }
            _ => all,
        };
        let elements: usize = self
            .output_tensor_specs()
            .iter()
            .map(|output| output.extents.iter().product::<usize>())
            .sum();
        // The declared work of a single-kernel problem counts about four operations for each
        // element of the outputs.
        Work::bytes(read as u64, write as u64).with_flops(
            FlopUnit::VectorArithmetic,
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

    /// Outputs in f32 have the tolerance of f32 problems, because they are not rounded to bf16.
    fn tolerances(&self) -> BTreeMap<String, Tolerance> {
        let f32s =
            self.output_tensor_specs().into_iter().filter(|output| output.dtype == Dtype::F32);
        let tolerance = Tolerance { max_error: 1e-5, relative_l2: 4e-6 };
        f32s.map(|output| (output.tensor_name.to_owned(), tolerance)).collect()
    }

    fn host_memory_bytes(&self) -> u64 {
        let elements = |tensors: Vec<KernelTensorSpec>| {
            tensors.iter().map(|tensor| tensor.extents.iter().product::<usize>()).sum::<usize>()
        };
        let outputs = elements(self.output_tensor_specs());
        // Host memory holds inputs, outputs, and the fp64 reference twice while its rows are
        // concatenated.
        (4 * elements(self.input_tensor_specs()) + (4 + 2 * 8) * outputs) as u64
    }
}

/// Reads inputs of a kernel problem row by row in fp64 and computes the reference outputs from
/// them.
struct SingleKernelReference<'a> {
    inputs: &'a Tensors,
    shape: LanguageModelShape,
}

impl SingleKernelReference<'_> {
    fn read_row_in_f64(&self, name: &str, row: usize, columns: usize) -> Vec<f64> {
        self.inputs.tensor(name).elements_to_f64(row * columns, columns)
    }

    /// Computes `f(token)` for each token in parallel and concatenates the resulting rows.
    fn concatenate_rows_of_tokens(&self, f: &(dyn Fn(usize) -> Vec<f64> + Sync)) -> Vec<f64> {
        parallel::map_numbers_in_parallel(self.shape.tokens_in_batch(), f).concat()
    }

    fn embedding_rows_of_tokens(&self) -> Vec<f64> {
        let tokens = self.inputs.f32_elements("tokens");
        self.concatenate_rows_of_tokens(&|token| {
            self.read_row_in_f64("table", tokens[token] as usize, self.shape.model_width)
        })
    }

    fn gradient_of_embedding_table(&self) -> Vec<f64> {
        let LanguageModelShape { model_width: d, vocabulary_size: vocabulary, .. } = self.shape;
        let mut positions = vec![Vec::new(); vocabulary];
        for (position, token) in self.inputs.f32_elements("tokens").iter().enumerate() {
            positions[*token as usize].push(position);
        }
        let sum = |token: usize| {
            let mut sum = vec![0.0; d];
            for position in &positions[token] {
                let row = self.read_row_in_f64("grad_x", *position, d);
                sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
            }
            sum
        };
        parallel::map_numbers_in_parallel(vocabulary, &sum).concat()
    }

    /// Row of x for a token, plus the rows of the tensors named in `added` for this token.
    fn sum_of_token_rows(&self, token: usize, added: &[&str]) -> Vec<f64> {
        let d = self.shape.model_width;
        let mut x = self.read_row_in_f64("x", token, d);
        for name in added {
            x.iter_mut().zip(self.read_row_in_f64(name, token, d)).for_each(|(x, y)| *x += y);
        }
        x
    }

    fn residual_stream_plus_branch(&self) -> Vec<f64> {
        self.concatenate_rows_of_tokens(&|token| self.sum_of_token_rows(token, &["branch"]))
    }

    fn inverse_rms_of_token_rows(&self, added: &[&str]) -> Vec<f64> {
        self.concatenate_rows_of_tokens(&|token| {
            vec![inverse_rms_of_row(&self.sum_of_token_rows(token, added))]
        })
    }

    fn rms_norm_of_token_rows(&self, added: &[&str]) -> Vec<f64> {
        let gain = self.read_row_in_f64("gain", 0, self.shape.model_width);
        self.concatenate_rows_of_tokens(&|token| {
            let x = self.sum_of_token_rows(token, added);
            let root = inverse_rms_of_row(&x);
            x.iter().zip(&gain).map(|(x, gain)| x * root * gain).collect()
        })
    }

    fn rms_norm_input_gradients(&self) -> Vec<f64> {
        let d = self.shape.model_width;
        let gain = self.read_row_in_f64("gain", 0, d);
        self.concatenate_rows_of_tokens(&|token| {
            let (x, grad) =
                (self.read_row_in_f64("x", token, d), self.read_row_in_f64("grad_y", token, d));
            let root = self.read_row_in_f64("inverse", token, 1)[0];
            let scaled: Vec<f64> = grad.iter().zip(&gain).map(|(grad, gain)| grad * gain).collect();
            let mean = scaled.iter().zip(&x).map(|(grad, x)| grad * x).sum::<f64>() / d as f64;
            let mut out = self.read_row_in_f64("residual_gradient", token, d);
            for (out, (grad, x)) in out.iter_mut().zip(scaled.iter().zip(&x)) {
                *out += root * (grad - x * root * root * mean);
            }
            out
        })
    }

    fn rms_norm_gain_gradient(&self) -> Vec<f64> {
        const TOKENS_PER_PARTIAL_GAIN_SUM: usize = 256;
        let (d, tokens) = (self.shape.model_width, self.shape.tokens_in_batch());
        let partial = |number: usize| {
            let mut sum = vec![0.0; d];
            for token in number * TOKENS_PER_PARTIAL_GAIN_SUM
                ..tokens.min((number + 1) * TOKENS_PER_PARTIAL_GAIN_SUM)
            {
                let (x, grad) =
                    (self.read_row_in_f64("x", token, d), self.read_row_in_f64("grad_y", token, d));
                let root = self.read_row_in_f64("inverse", token, 1)[0];
                let products = x.iter().zip(&grad).map(|(x, grad)| x * grad * root);
                sum.iter_mut().zip(products).for_each(|(sum, product)| *sum += product);
            }
            sum
        };
        let mut total = vec![0.0; d];
        for sum in parallel::map_numbers_in_parallel(
            tokens.div_ceil(TOKENS_PER_PARTIAL_GAIN_SUM),
            &partial,
        ) {
            total.iter_mut().zip(sum).for_each(|(total, x)| *total += x);
        }
        total
    }

    fn rotated_queries_and_keys(&self) -> Vec<f64> {
        let LanguageModelShape { model_width: d, context_tokens: context, .. } = self.shape;
        let head_dim = self.shape.elements_per_head();
        self.concatenate_rows_of_tokens(&|token| {
            let mut row = self.read_row_in_f64("qkv", token, 3 * d);
            row.truncate(2 * d);
            for (number, pair) in row.chunks_exact_mut(2).enumerate() {
                let power = (2 * number % head_dim) as f64 / head_dim as f64;
                let (sin, cos) =
                    ((token % context) as f64 * ROPE_WAVELENGTH_BASE.powf(-power)).sin_cos();
                let [a, b] = [pair[0], pair[1]];
                pair.copy_from_slice(&[a * cos - b * sin, a * sin + b * cos]);
            }
            row
        })
    }

    fn swiglu_hidden_rows(&self) -> Vec<f64> {
        let ff = self.shape.swiglu_hidden_width;
        self.concatenate_rows_of_tokens(&|token| {
            let row = self.read_row_in_f64("gate_up", token, 2 * ff);
            let (gate, up) = row.split_at(ff);
            gate.iter().zip(up).map(|(gate, up)| gate * sigmoid_f64(*gate) * up).collect()
        })
    }

    fn swiglu_gate_and_up_gradients(&self) -> Vec<f64> {
        let ff = self.shape.swiglu_hidden_width;
        self.concatenate_rows_of_tokens(&|token| {
            let row = self.read_row_in_f64("gate_up", token, 2 * ff);
            let grad = self.read_row_in_f64("grad_h", token, ff);
            let (gate, up) = row.split_at(ff);
            let grad_gate = gate.iter().zip(up).zip(&grad).map(|((gate, up), grad)| {
                let s = sigmoid_f64(*gate);
                grad * up * s * (1.0 + gate * (1.0 - s))
            });
            let grad_up =
                gate.iter().zip(&grad).map(|(gate, grad)| grad * gate * sigmoid_f64(*gate));
            grad_gate.chain(grad_up).collect()
        })
    }

    /// Concatenates the causal score rows of all heads, which `f` computes from a row's index and
    /// the number of keys that its query sees; hidden keys get 0.
    fn concatenate_causal_score_rows(
        &self,
        f: &(dyn Fn(usize, usize) -> Vec<f64> + Sync),
    ) -> Vec<f64> {
        let LanguageModelShape { context_tokens: context, batch, heads, .. } = self.shape;
        let row = |row: usize| {
            let mut values = f(row, row % context + 1);
            values.resize(context, 0.0);
            values
        };
        parallel::map_numbers_in_parallel(batch * heads * context, &row).concat()
    }

    fn softmax_scale(&self) -> f64 {
        1.0 / (self.shape.elements_per_head() as f64).sqrt()
    }

    fn causal_softmax_probabilities(&self) -> Vec<f64> {
        self.concatenate_causal_score_rows(&|row, seen| {
            let scores =
                self.inputs.tensor("scores").elements_to_f64(row * self.shape.context_tokens, seen);
            let mut scores: Vec<f64> = scores.iter().map(|x| x * self.softmax_scale()).collect();
            softmax_in_place_f64(&mut scores);
            scores
        })
    }

    fn causal_softmax_score_gradients(&self) -> Vec<f64> {
        self.concatenate_causal_score_rows(&|row, seen| {
            let [p, grad] = ["probabilities", "grad_probabilities"].map(|name| {
                self.inputs.tensor(name).elements_to_f64(row * self.shape.context_tokens, seen)
            });
            let mean: f64 = p.iter().zip(&grad).map(|(p, grad)| p * grad).sum();
            p.iter().zip(&grad).map(|(p, grad)| self.softmax_scale() * p * (grad - mean)).collect()
        })
    }

    /// Logits of a token, without the columns that pad the vocabulary.
    fn unpadded_logits_of_token(&self, token: usize) -> Vec<f64> {
        let mut logits = self.read_row_in_f64("logits", token, self.shape.padded_logit_columns());
        logits.truncate(self.shape.vocabulary_size);
        logits
    }

    fn mean_losses_of_sequences(&self) -> Vec<f64> {
        let targets = self.inputs.f32_elements("targets");
        let losses = self.concatenate_rows_of_tokens(&|token| {
            vec![cross_entropy_of_token(
                &self.unpadded_logits_of_token(token),
                targets[token] as usize,
            )]
        });
        losses.chunks(self.shape.context_tokens).map(mean).collect()
    }

    fn gradients_of_padded_logits(&self) -> Vec<f64> {
        let targets = self.inputs.f32_elements("targets");
        self.concatenate_rows_of_tokens(&|token| {
            let mut row = self.unpadded_logits_of_token(token);
            softmax_in_place_f64(&mut row);
            row[targets[token] as usize] -= 1.0;
            row.iter_mut().for_each(|x| *x /= self.shape.tokens_in_batch() as f64);
            row.resize(self.shape.padded_logit_columns(), 0.0);
            row
        })
    }

    /// Computes the AdamW step for some arena rows: new parameters, both new moments, and the new
    /// parameters once more for the bf16 copy.
    fn adamw_step_of_arena_rows(&self, rows: &[usize]) -> Vec<Vec<f64>> {
        let LanguageModelShape { model_width: d, dtype, .. } = self.shape;
        let gradient = |number: usize| match rows[number]
            .checked_sub(self.shape.first_arena_row_of_matrices())
        {
            None => self.read_row_in_f64("f32_gradients", rows[number], d),
            Some(row) => self.read_row_in_f64("gradients", row, d),
        };
        let values = parallel::map_numbers_in_parallel(rows.len(), &gradient).concat();
        let tensor = ArenaRowsOfTensor {
            first_arena_row: 0,
            arena_row_count: self.shape.rows_in_parameter_arena(),
            weight: ParameterTensor::TokenEmbedding,
        };
        let gradient = SampledWeightGradient {
            tensor,
            sampled_row_indices: rows.to_vec(),
            sampled_row_gradients: values,
        };
        let mut outputs = adamw_step_of_gradient_rows(&self.shape, self.inputs, &gradient).to_vec();
        if dtype != Dtype::F32 {
            outputs.push(outputs[0].clone());
        }
        outputs
    }
}

fn inverse_rms_of_row(x: &[f64]) -> f64 {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    1.0 / (mean + RMS_NORM_EPSILON).sqrt()
}
