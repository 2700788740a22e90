//! Sizes of the language model, the layout of its parameter arena, seeded inputs, and counted work.
//!
//! Row-major layouts that all implementations and kernels of the language model share, with
//! T = batch · context tokens:
//!
//! - tokens and targets: `[batch, context]` in f32, whole numbers below the vocabulary. Tensors of
//!   kernelgate have no integers wider than 8 bits, and f32 represents integers up to 2^24 exactly.
//! - parameters: one arena `[R, d]` in which every parameter tensor is a range of whole rows
//!   ([`LanguageModelShape::arena_rows_of_all_tensors`]). The parameter tensors are
//!   `embedding [V, d]`, norm gains `[2·layers + 1, d]`, then for each layer `qkv [3d, d]`,
//!   `out [d, d]`, `gate_up [2·ff, d]`, `down [ff, d]`, then `head [V, d]`. The matrix `down` is
//!   stored as `[in, out]`, the other matrices as `[out, in]`. The arenas of gradients and AdamW
//!   moments have the same rows as the parameter arena.
//! - residual stream: f32 `[T, d]`. Operands and results of GEMMs have the dtype of the problem:
//!   `qkv [T, 3, heads, head_dim]`, gate and up `[T, 2, ff]`, logits `[T, padded]`.

use crate::draw::draw_tensor_of_mapped_normals;
use kernelgate::workload::{AxisError, Dtype, FlopUnit, Point, Tensor, Tensors, Work, random};

/// Epsilon that RMSNorm adds to the mean square before the square root.
pub const RMS_NORM_EPSILON: f64 = 1e-5;
/// Base of the wavelengths of the rotary position embedding (RoPE).
pub const ROPE_WAVELENGTH_BASE: f64 = 1e4;
/// Decay rate β₁ of AdamW's first moment.
pub const ADAMW_BETA_1: f64 = 0.9;
/// Decay rate β₂ of AdamW's second moment.
pub const ADAMW_BETA_2: f64 = 0.999;
/// Epsilon that AdamW adds to the square root of the second moment.
pub const ADAMW_EPSILON: f64 = 1e-8;
/// Decoupled weight decay of AdamW, applied to every parameter.
pub const ADAMW_WEIGHT_DECAY: f64 = 0.1;
pub const ADAMW_LEARNING_RATE: f64 = 1e-3;

/// The vocabulary dimension of the logits is padded with zeros to a multiple of this number of
/// columns.
const LOGIT_COLUMN_MULTIPLE: usize = 8;
/// Maximum number of parameters of a model whose outputs are compared with the reference as a
/// whole.
const MAX_PARAMETERS_OF_FULLY_COMPARED_MODEL: usize = 4 << 20;
/// Number of rows of each parameter tensor, and a quarter of the number of tokens, that are
/// compared for a larger model.
const COMPARED_ROWS_PER_TENSOR: usize = 64;

/// Sizes and dtype of the language model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LanguageModelShape {
    /// Number of tokens in the vocabulary.
    pub vocabulary_size: usize,
    /// Model width: number of elements of a token's vector in the residual stream.
    pub model_width: usize,
    /// Number of elements of a token in the hidden layer of SwiGLU.
    pub swiglu_hidden_width: usize,
    /// Number of layers.
    pub layers: usize,
    /// Number of attention heads in each layer.
    pub heads: usize,
    /// Number of tokens in each sequence.
    pub context_tokens: usize,
    /// Number of sequences in the batch.
    pub batch: usize,
    /// Dtype of GEMM weights and activations, bf16 or f32.
    pub dtype: Dtype,
}

/// Names of the state tensors (parameters and AdamW moments) that a training step reads.
pub const TRAINING_STATE_INPUTS: [&str; 3] = ["parameters", "first_moments", "second_moments"];
/// Names of the state tensors (new parameters and AdamW moments) that a training step writes.
pub const TRAINING_STATE_OUTPUTS: [&str; 3] =
    ["next_parameters", "next_first_moments", "next_second_moments"];

/// Names of the language model's sizes, the values of the axis `size`.
pub const MODEL_SIZE_NAMES: &[&str] = &["reduced", "small", "medium", "large", "xl", "2.7B"];

/// Identifies a parameter tensor of the language model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParameterTensor {
    /// Token embedding: one vector for each token of the vocabulary.
    TokenEmbedding,
    /// Gains of all RMSNorms: before attention and before SwiGLU in each layer, and before the
    /// head.
    RmsNormGains,
    /// Projection to queries, keys and values of the layer with this number.
    QkvProjectionOfLayer(usize),
    /// Output projection of attention in the layer with this number.
    AttentionOutputProjectionOfLayer(usize),
    /// Projections to gate and up of SwiGLU in the layer with this number.
    GateUpProjectionOfLayer(usize),
    /// Output projection of SwiGLU in the layer with this number.
    DownProjectionOfLayer(usize),
    /// Projection to the logits.
    LogitProjection,
}

impl ParameterTensor {
    /// Name that selects the random numbers of the tensor's values; another name would draw other
    /// weights.
    fn name_in_random_draws(self) -> String {
        match self {
            Self::TokenEmbedding => "Embedding".to_owned(),
            Self::RmsNormGains => "Gains".to_owned(),
            Self::QkvProjectionOfLayer(layer) => format!("Qkv({layer})"),
            Self::AttentionOutputProjectionOfLayer(layer) => format!("Out({layer})"),
            Self::GateUpProjectionOfLayer(layer) => format!("GateUp({layer})"),
            Self::DownProjectionOfLayer(layer) => format!("Down({layer})"),
            Self::LogitProjection => "Head".to_owned(),
        }
    }
}

/// Position of a parameter tensor in the parameter arena: a range of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArenaRowsOfTensor {
    /// The parameter tensor.
    pub weight: ParameterTensor,
    /// Index of the tensor's first row in the arena.
    pub first_arena_row: usize,
    /// Number of arena rows of the parameter tensor.
    pub arena_row_count: usize,
}

impl LanguageModelShape {
    /// Reads the model's sizes and dtype from the axes of a point.
    pub fn bind_language_model_axes(point: &Point) -> Result<Self, AxisError> {
        let [d, ff, layers, heads, vocabulary] = match point.word("size")? {
            "reduced" => [128, 384, 2, 2, 1000],
            "small" => [768, 3072, 12, 12, 10_000],
            "medium" => [1024, 4096, 24, 16, 10_000],
            "large" => [1280, 5120, 36, 20, 10_000],
            "xl" => [1600, 6400, 48, 25, 10_000],
            _ => [2560, 10_240, 32, 32, 10_000],
        };
        let dtype = Dtype::parse_dtype_name(point.word("dtype")?).expect("the axis lists dtypes");
        let (context, batch) = (point.number("ctx")?, point.number("b")?);
        let shape = Self {
            vocabulary_size: vocabulary,
            model_width: d,
            swiglu_hidden_width: ff,
            layers,
            heads,
            context_tokens: context,
            batch,
            dtype,
        };
        let widest = [shape.padded_logit_columns(), 2 * ff, 3 * d].into_iter().max().unwrap_or(1);
        let elements = batch.checked_mul(context).and_then(|tokens| tokens.checked_mul(widest));
        if elements.is_none_or(|elements| elements > i32::MAX as usize) {
            let message = "an activation has more than 2^31 elements".to_owned();
            return Err(AxisError::InvalidCombinationOfValues(message));
        }
        Ok(shape)
    }

    /// Number of tokens in all sequences of the batch, T = batch · context.
    pub const fn tokens_in_batch(&self) -> usize {
        self.batch * self.context_tokens
    }

    /// Number of elements of an attention head, d / heads.
    pub const fn elements_per_head(&self) -> usize {
        self.model_width / self.heads
    }

    /// Number of columns of the logits: the vocabulary with padding.
    pub const fn padded_logit_columns(&self) -> usize {
        self.vocabulary_size.next_multiple_of(LOGIT_COLUMN_MULTIPLE)
    }

    /// Number of rows of the parameter arena, R.
    pub const fn rows_in_parameter_arena(&self) -> usize {
        self.first_arena_row_of_matrices()
            + self.layers * self.arena_rows_per_layer()
            + self.vocabulary_size
    }

    /// Number of parameters of the model, R · d.
    pub const fn number_of_parameters(&self) -> usize {
        self.rows_in_parameter_arena() * self.model_width
    }

    /// Index of the first row of the parameter arena after the embedding and the gains.
    pub const fn first_arena_row_of_matrices(&self) -> usize {
        self.vocabulary_size + self.number_of_norms()
    }

    /// Number of RMSNorms of the model: two in each layer and one before the head.
    pub const fn number_of_norms(&self) -> usize {
        2 * self.layers + 1
    }

    const fn arena_rows_per_layer(&self) -> usize {
        4 * self.model_width + 3 * self.swiglu_hidden_width
    }

    /// Position of a parameter tensor in the parameter arena.
    pub const fn arena_rows_of_tensor(&self, weight: ParameterTensor) -> ArenaRowsOfTensor {
        let Self { vocabulary_size: vocabulary, model_width: d, swiglu_hidden_width: ff, .. } =
            *self;
        let matrices = self.first_arena_row_of_matrices();
        let (first, rows) = match weight {
            ParameterTensor::TokenEmbedding => (0, vocabulary),
            ParameterTensor::RmsNormGains => (vocabulary, self.number_of_norms()),
            ParameterTensor::QkvProjectionOfLayer(layer) => {
                (matrices + layer * self.arena_rows_per_layer(), 3 * d)
            }
            ParameterTensor::AttentionOutputProjectionOfLayer(layer) => {
                (matrices + layer * self.arena_rows_per_layer() + 3 * d, d)
            }
            ParameterTensor::GateUpProjectionOfLayer(layer) => {
                (matrices + layer * self.arena_rows_per_layer() + 4 * d, 2 * ff)
            }
            ParameterTensor::DownProjectionOfLayer(layer) => {
                (matrices + layer * self.arena_rows_per_layer() + 4 * d + 2 * ff, ff)
            }
            ParameterTensor::LogitProjection => {
                (matrices + self.layers * self.arena_rows_per_layer(), vocabulary)
            }
        };
        ArenaRowsOfTensor { weight, first_arena_row: first, arena_row_count: rows }
    }

    /// Positions of all parameter tensors, in the order of the parameter arena.
    pub fn arena_rows_of_all_tensors(&self) -> Vec<ArenaRowsOfTensor> {
        let layer = |layer| {
            [
                ParameterTensor::QkvProjectionOfLayer(layer),
                ParameterTensor::AttentionOutputProjectionOfLayer(layer),
                ParameterTensor::GateUpProjectionOfLayer(layer),
                ParameterTensor::DownProjectionOfLayer(layer),
            ]
        };
        let layers = (0..self.layers).flat_map(layer);
        let all = [ParameterTensor::TokenEmbedding, ParameterTensor::RmsNormGains]
            .into_iter()
            .chain(layers);
        all.chain([ParameterTensor::LogitProjection])
            .map(|weight| self.arena_rows_of_tensor(weight))
            .collect()
    }

    /// Rows of a parameter tensor that are compared with the reference; the indices are ascending
    /// and count from the tensor's first row. The compared rows of the embedding include those of
    /// some tokens that occur in the inputs.
    pub fn rows_compared_with_reference(
        &self,
        weight: ParameterTensor,
        inputs: &Tensors,
    ) -> Vec<usize> {
        let ArenaRowsOfTensor { arena_row_count: rows, .. } = self.arena_rows_of_tensor(weight);
        if self.number_of_parameters() <= MAX_PARAMETERS_OF_FULLY_COMPARED_MODEL
            || weight == ParameterTensor::RmsNormGains
        {
            return (0..rows).collect();
        }
        let mut sampled = random::distinct_random_indices(
            1,
            &weight.name_in_random_draws(),
            rows,
            COMPARED_ROWS_PER_TENSOR,
        );
        if weight == ParameterTensor::TokenEmbedding {
            let tokens = inputs.f32_elements("tokens").iter().take(COMPARED_ROWS_PER_TENSOR);
            sampled.extend(tokens.map(|token| *token as usize));
            sampled.sort_unstable();
            sampled.dedup();
        }
        sampled
    }

    /// Indices of the tokens whose logits are compared with the reference.
    pub fn tokens_with_compared_logits(&self) -> Vec<usize> {
        let count = if self.number_of_parameters() <= MAX_PARAMETERS_OF_FULLY_COMPARED_MODEL {
            self.tokens_in_batch()
        } else {
            4 * COMPARED_ROWS_PER_TENSOR
        };
        random::distinct_random_indices(1, "logits", self.tokens_in_batch(), count)
    }

    /// Draws the input tokens and their target tokens uniformly from the vocabulary.
    pub fn draw_tokens_and_targets(&self, seed: u64) -> Tensors {
        ["tokens", "targets"].into_iter().fold(Tensors::new(), |text, name| {
            let vocabulary = self.vocabulary_size as f32;
            // The decimal digits of a normal sample after the third are about uniformly
            // distributed, so they select a token.
            let token = |x: f32| ((x * 997.0).abs().fract() * vocabulary).floor();
            let tokens =
                random::map_standard_normal_values(seed, name, self.tokens_in_batch(), |x| {
                    token(x).min(vocabulary - 1.0)
                });
            text.with_tensor(name, [self.batch, self.context_tokens], tokens)
        })
    }

    /// Draws the parameter arena in the given dtype: In the drawn arena, the embedding is N(0, 1),
    /// gains are around 1, and matrices keep the variance of a row.
    pub fn draw_parameter_arena(&self, seed: u64, dtype: Dtype) -> Tensor {
        let mut arena =
            Tensor::filled_with_zeros([self.rows_in_parameter_arena(), self.model_width], dtype);
        for ArenaRowsOfTensor { weight, first_arena_row: first, arena_row_count: rows } in
            self.arena_rows_of_all_tensors()
        {
            let (spread, mean): (f32, f32) = match weight {
                ParameterTensor::TokenEmbedding => (1.0, 0.0),
                ParameterTensor::RmsNormGains => (0.1, 1.0),
                ParameterTensor::DownProjectionOfLayer(_) => {
                    (1.0 / (self.swiglu_hidden_width as f32).sqrt(), 0.0)
                }
                _ => (1.0 / (self.model_width as f32).sqrt(), 0.0),
            };
            let len = rows * self.model_width;
            let value = |x: f32| x.mul_add(spread, mean);
            let tensor = draw_tensor_of_mapped_normals(
                seed,
                &weight.name_in_random_draws(),
                [len],
                dtype,
                value,
            );
            let from = first * self.model_width * dtype.bytes_per_element();
            arena.as_bytes_mut()[from..][..tensor.size_in_bytes()]
                .copy_from_slice(tensor.as_bytes());
        }
        arena
    }

    /// Draws the state of a training step: f32 parameters, both AdamW moments as in the middle of a
    /// training, and the number of steps done.
    pub fn draw_parameters_and_moments(&self, seed: u64) -> Tensors {
        // The drawn AdamW moments have about the spread of a gradient of the mean loss over
        // `tokens_in_batch` tokens.
        let spread = 5e-3 / (self.tokens_in_batch() as f32).sqrt();
        let moments = |name: &str, value: &(dyn Fn(f32) -> f32 + Sync)| {
            random::map_standard_normal_values(seed, name, self.number_of_parameters(), value)
        };
        let shape = [self.rows_in_parameter_arena(), self.model_width];
        let mut state = Tensors::new()
            .with_tensor("first_moments", shape, moments("first_moments", &|x| spread * x))
            .with_tensor(
                "second_moments",
                shape,
                moments("second_moments", &|x| spread * spread * (10.0 + 20.0 * x.abs())),
            )
            .with_tensor("steps", [1], vec![999.0f32]);
        state.insert("parameters", self.draw_parameter_arena(seed, Dtype::F32));
        state
    }

    /// FLOPs of all GEMMs of a forward pass, without the masked half of attention.
    pub const fn gemm_flops_of_forward_pass(&self) -> u64 {
        let matrices = self.layers * self.arena_rows_per_layer() + self.vocabulary_size;
        let attention = 2 * self.layers * self.context_tokens * self.model_width;
        self.tokens_in_batch() as u64
            * (2 * (matrices * self.model_width) as u64 + attention as u64)
    }

    /// Work of a forward pass: bytes, GEMM FLOPs, and vector FLOPs of norms, rotary embedding,
    /// softmax, SwiGLU and cross entropy.
    pub fn work_of_forward_pass(&self) -> Work {
        let tokens = self.tokens_in_batch() as u64;
        let element = self.dtype.bytes_per_element() as u64;
        let matrices =
            (self.number_of_parameters() - self.vocabulary_size * self.model_width) as u64;
        let used = (self.tokens_in_batch().min(self.vocabulary_size) * self.model_width) as u64;
        let read = element * (matrices + used) + 8 * tokens;
        let write = element * tokens * self.padded_logit_columns() as u64 + 4 * self.batch as u64;
        Work::bytes(read, write)
            .with_flops(FlopUnit::Matmul, self.dtype, self.gemm_flops_of_forward_pass())
            .with_flops(FlopUnit::VectorArithmetic, Dtype::F32, self.vector_flops_of_forward_pass())
    }

    /// Vector FLOPs of a forward pass outside the GEMMs.
    const fn vector_flops_of_forward_pass(&self) -> u64 {
        let scores = 5 * self.heads * self.context_tokens / 2;
        let layer = 2 * 4 * self.model_width
            + 2 * 3 * self.model_width
            + 6 * self.swiglu_hidden_width
            + scores;
        (self.tokens_in_batch() * (self.layers * layer + 5 * self.vocabulary_size)) as u64
    }

    /// Work of a training step, which reads and writes parameters and moments once.
    pub fn work_of_training_step(&self) -> Work {
        let parameters = self.number_of_parameters() as u64;
        let read = 12 * parameters + 8 * self.tokens_in_batch() as u64;
        Work::bytes(read, 12 * parameters + 4 * self.batch as u64)
            .with_flops(FlopUnit::Matmul, self.dtype, 3 * self.gemm_flops_of_forward_pass())
            .with_flops(
                FlopUnit::VectorArithmetic,
                Dtype::F32,
                3 * self.vector_flops_of_forward_pass() + 14 * parameters,
            )
    }

    /// Bytes of the reference's fp64 values besides inputs and outputs: one layer's activations and
    /// gradients, and the residual stream before every layer.
    pub const fn host_bytes_of_reference(&self) -> u64 {
        let layer =
            10 * self.model_width + 6 * self.swiglu_hidden_width + self.heads * self.context_tokens;
        let tokens = self.tokens_in_batch() as u64;
        let activations = tokens
            * (layer + self.layers * self.model_width + 3 * self.padded_logit_columns()) as u64;
        let widest = if self.vocabulary_size > 2 * self.swiglu_hidden_width {
            self.vocabulary_size
        } else {
            2 * self.swiglu_hidden_width
        };
        8 * (activations + (widest * self.model_width) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_tensors_fill_the_arena_in_order_without_gaps() {
        let [d, ff, layers, heads] = [768, 3072, 12, 12];
        let (vocabulary, context, batch, dtype) = (10_000, 512, 4, Dtype::Bf16);
        let small = LanguageModelShape {
            vocabulary_size: vocabulary,
            model_width: d,
            swiglu_hidden_width: ff,
            layers,
            heads,
            context_tokens: context,
            batch,
            dtype,
        };
        let end = small.arena_rows_of_all_tensors().into_iter().fold(0, |end, tensor| {
            assert_eq!(tensor.first_arena_row, end, "{:?}", tensor.weight);
            end + tensor.arena_row_count
        });
        assert_eq!(end, small.rows_in_parameter_arena());
        assert_eq!(small.number_of_parameters() / 100_000, 1286, "128.6 million");
        // The published number of FLOPs counts full attention, without the causal mask.
        let masked = 2 * (small.batch * context * context * d * layers) as u64;
        assert_eq!(
            (small.gemm_flops_of_forward_pass() + masked + 500_000_000) / 1_000_000_000,
            534
        );
    }

    #[test]
    fn drawn_tokens_use_the_vocabulary_and_repeat() {
        let shape = LanguageModelShape {
            vocabulary_size: 13,
            model_width: 8,
            swiglu_hidden_width: 8,
            layers: 1,
            heads: 1,
            context_tokens: 50,
            batch: 2,
            dtype: Dtype::F32,
        };
        let text = shape.draw_tokens_and_targets(1);
        for name in ["tokens", "targets"] {
            let valid = |x: &f32| *x >= 0.0 && *x < 13.0 && x.fract() == 0.0;
            assert!(text.f32_elements(name).iter().all(valid));
        }
        assert_ne!(text.f32_elements("tokens"), text.f32_elements("targets"));
    }
}
