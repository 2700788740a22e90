//! Extents of the language model, the arena of its parameters, seeded inputs, and counted work.
//!
//! Layouts that every row and kernel shares, row-major, with T = batch · context tokens:
//!
//! - tokens and targets: `[batch, context]` in f32, whole numbers below the vocabulary. Tensors of
//!   kernelgate support no wider integers, and f32 is exact up to 2^24.
//! - parameters: one arena `[R, d]` in which every tensor is a range of whole rows
//!   ([`LmShape::arena_tensors`]). The tensors are `embedding [V, d]`, norm gains
//!   `[2·layers + 1, d]`, then for each layer `qkv [3d, d]`, `out [d, d]`, `gate_up [2·ff, d]`,
//!   `down [ff, d]`, then `head [V, d]`. `down` is stored as `[in, out]`, the other matrices as
//!   `[out, in]`. Gradients and moments have the same rows.
//! - residual stream: f32 `[T, d]`. Operands and results of GEMMs have the dtype of the problem:
//!   `qkv [T, 3, heads, head_dim]`, gate and up `[T, 2, ff]`, logits `[T, padded]`.

use crate::draw::draw_tensor;
use kernelgate::workload::{AxisError, Dtype, FlopUnit, Point, Tensor, Tensors, Work, random};

/// Epsilon that RMSNorm adds to the mean square before the root.
pub const NORM_EPSILON: f64 = 1e-5;
/// Base of the wavelengths of the rotary embedding.
pub const ROPE_BASE: f64 = 1e4;
/// Decay of AdamW's first moment.
pub const BETA_1: f64 = 0.9;
/// Decay of AdamW's second moment.
pub const BETA_2: f64 = 0.999;
/// Epsilon that AdamW adds to the root of the second moment.
pub const ADAM_EPSILON: f64 = 1e-8;
/// Decoupled weight decay of AdamW, for every parameter.
pub const WEIGHT_DECAY: f64 = 0.1;
pub const LEARNING_RATE: f64 = 1e-3;

/// Logits are padded with zeros to a multiple of this number of columns.
const LOGITS_PADDING_MULTIPLE: usize = 8;
/// Maximum number of parameters of a model that is compared with the reference as a whole.
const MAX_PARAMETERS_COMPARED_WHOLE: usize = 4 << 20;
/// Number of rows of each tensor, and of the logits, that are compared for a larger model.
const SAMPLED_ROWS: usize = 64;

/// Extents and dtype of the language model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LmShape {
    /// Number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// Number of elements of a token's vector between layers.
    pub d: usize,
    /// Number of elements in the hidden layer of SwiGLU.
    pub ff: usize,
    /// Number of layers.
    pub layers: usize,
    /// Number of heads in a layer.
    pub heads: usize,
    /// Number of tokens in a sequence.
    pub context: usize,
    /// Number of sequences in a batch.
    pub batch: usize,
    /// Dtype of weights and activations, bf16 or f32.
    pub dtype: Dtype,
}

/// Names of the state tensors that a step reads.
pub const STATE_INPUTS: [&str; 3] = ["parameters", "first_moments", "second_moments"];
/// Names of the state tensors that a step writes.
pub const STATE_OUTPUTS: [&str; 3] =
    ["next_parameters", "next_first_moments", "next_second_moments"];

/// Names of the model sizes.
pub const MODEL_SIZES: &[&str] = &["reduced", "small", "medium", "large", "xl", "2.7B"];

/// A tensor of the model's parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// Vectors of the tokens.
    Embedding,
    /// Gains of all norms: before attention and before SwiGLU of each layer, and before the head.
    Gains,
    /// Projection to queries, keys and values of a layer.
    Qkv(usize),
    /// Output projection of a layer's attention.
    Out(usize),
    /// Projections to gate and up of a layer's SwiGLU.
    GateUp(usize),
    /// Output projection of a layer's SwiGLU.
    Down(usize),
    /// Projection to the logits.
    Head,
}

/// Rows of the parameter arena that hold a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArenaRows {
    /// The tensor.
    pub weight: Weight,
    /// Index of the tensor's first row.
    pub first: usize,
    /// Number of rows of the tensor.
    pub rows: usize,
}

impl LmShape {
    /// Reads the extents from a point of the axes.
    pub fn bind(point: &Point) -> Result<Self, AxisError> {
        let [d, ff, layers, heads, vocabulary] = match point.word("size")? {
            "reduced" => [128, 384, 2, 2, 1000],
            "small" => [768, 3072, 12, 12, 10_000],
            "medium" => [1024, 4096, 24, 16, 10_000],
            "large" => [1280, 5120, 36, 20, 10_000],
            "xl" => [1600, 6400, 48, 25, 10_000],
            _ => [2560, 10_240, 32, 32, 10_000],
        };
        let dtype = Dtype::parse(point.word("dtype")?).expect("the axis lists dtypes");
        let (context, batch) = (point.number("ctx")?, point.number("b")?);
        let shape = Self { vocabulary, d, ff, layers, heads, context, batch, dtype };
        let widest = [shape.padded_vocabulary(), 2 * ff, 3 * d].into_iter().max().unwrap_or(1);
        let elements = batch.checked_mul(context).and_then(|tokens| tokens.checked_mul(widest));
        if elements.is_none_or(|elements| elements > i32::MAX as usize) {
            let message = "an activation has more than 2^31 elements".to_owned();
            return Err(AxisError::Combination(message));
        }
        Ok(shape)
    }

    /// Number of tokens in all sequences.
    pub const fn token_count(&self) -> usize {
        self.batch * self.context
    }

    /// Number of elements of a head.
    pub const fn head_dim(&self) -> usize {
        self.d / self.heads
    }

    /// Number of columns of the logits, with padding.
    pub const fn padded_vocabulary(&self) -> usize {
        self.vocabulary.next_multiple_of(LOGITS_PADDING_MULTIPLE)
    }

    /// Number of rows of the parameter arena.
    pub const fn arena_rows(&self) -> usize {
        self.first_matrix_row() + self.layers * self.layer_rows() + self.vocabulary
    }

    /// Number of parameters of the model.
    pub const fn parameter_count(&self) -> usize {
        self.arena_rows() * self.d
    }

    /// Index of the arena's first row after the embedding and the gains.
    pub const fn first_matrix_row(&self) -> usize {
        self.vocabulary + self.norm_count()
    }

    /// Number of norms of the model.
    pub const fn norm_count(&self) -> usize {
        2 * self.layers + 1
    }

    const fn layer_rows(&self) -> usize {
        4 * self.d + 3 * self.ff
    }

    /// Rows of the arena that hold a tensor.
    pub const fn arena_rows_of_weight(&self, weight: Weight) -> ArenaRows {
        let Self { vocabulary, d, ff, .. } = *self;
        let matrices = self.first_matrix_row();
        let (first, rows) = match weight {
            Weight::Embedding => (0, vocabulary),
            Weight::Gains => (vocabulary, self.norm_count()),
            Weight::Qkv(layer) => (matrices + layer * self.layer_rows(), 3 * d),
            Weight::Out(layer) => (matrices + layer * self.layer_rows() + 3 * d, d),
            Weight::GateUp(layer) => (matrices + layer * self.layer_rows() + 4 * d, 2 * ff),
            Weight::Down(layer) => (matrices + layer * self.layer_rows() + 4 * d + 2 * ff, ff),
            Weight::Head => (matrices + self.layers * self.layer_rows(), vocabulary),
        };
        ArenaRows { weight, first, rows }
    }

    /// Every tensor of parameters, in the order of the arena.
    pub fn arena_tensors(&self) -> Vec<ArenaRows> {
        let layer = |layer| {
            [Weight::Qkv(layer), Weight::Out(layer), Weight::GateUp(layer), Weight::Down(layer)]
        };
        let layers = (0..self.layers).flat_map(layer);
        let all = [Weight::Embedding, Weight::Gains].into_iter().chain(layers);
        all.chain([Weight::Head]).map(|weight| self.arena_rows_of_weight(weight)).collect()
    }

    /// Rows of a tensor that are compared with the reference, ascending, counted from the tensor's
    /// first row. The compared rows of the embedding include those of some tokens that occur.
    pub fn compared_rows(&self, weight: Weight, inputs: &Tensors) -> Vec<usize> {
        let ArenaRows { rows, .. } = self.arena_rows_of_weight(weight);
        if self.parameter_count() <= MAX_PARAMETERS_COMPARED_WHOLE || weight == Weight::Gains {
            return (0..rows).collect();
        }
        let mut sampled = random::random_indices(1, &format!("{weight:?}"), rows, SAMPLED_ROWS);
        if weight == Weight::Embedding {
            let tokens = inputs.f32("tokens").iter().take(SAMPLED_ROWS);
            sampled.extend(tokens.map(|token| *token as usize));
            sampled.sort_unstable();
            sampled.dedup();
        }
        sampled
    }

    /// Indices of the tokens whose logits are compared with the reference.
    pub fn compared_tokens(&self) -> Vec<usize> {
        let count = if self.parameter_count() <= MAX_PARAMETERS_COMPARED_WHOLE {
            self.token_count()
        } else {
            4 * SAMPLED_ROWS
        };
        random::random_indices(1, "logits", self.token_count(), count)
    }

    /// Draws the input tokens and their target tokens.
    pub fn draw_tokens_and_targets(&self, seed: u64) -> Tensors {
        ["tokens", "targets"].into_iter().fold(Tensors::new(), |text, name| {
            let vocabulary = self.vocabulary as f32;
            // The digits of a normal number after the third are about uniform.
            let token = |x: f32| ((x * 997.0).abs().fract() * vocabulary).floor();
            let tokens = random::map_normal_values(seed, name, self.token_count(), |x| {
                token(x).min(vocabulary - 1.0)
            });
            text.with(name, [self.batch, self.context], tokens)
        })
    }

    /// Draws the parameter arena in a dtype: N(0, 1) in the embedding, gains around 1, matrices
    /// that keep the variance of a row.
    pub fn draw_weights(&self, seed: u64, dtype: Dtype) -> Tensor {
        let mut arena = Tensor::zeroed([self.arena_rows(), self.d], dtype);
        for ArenaRows { weight, first, rows } in self.arena_tensors() {
            let (spread, mean): (f32, f32) = match weight {
                Weight::Embedding => (1.0, 0.0),
                Weight::Gains => (0.1, 1.0),
                Weight::Down(_) => (1.0 / (self.ff as f32).sqrt(), 0.0),
                _ => (1.0 / (self.d as f32).sqrt(), 0.0),
            };
            let len = rows * self.d;
            let value = |x: f32| x.mul_add(spread, mean);
            let tensor = draw_tensor(seed, &format!("{weight:?}"), [len], dtype, value);
            let from = first * self.d * dtype.bytes();
            arena.as_bytes_mut()[from..][..tensor.bytes()].copy_from_slice(tensor.as_bytes());
        }
        arena
    }

    /// Draws the state of AdamW: parameters in f32, both moments as in the middle of a training,
    /// and the number of steps done.
    pub fn draw_optimizer_state(&self, seed: u64) -> Tensors {
        // The spread is about that of a gradient of the mean over this number of tokens.
        let spread = 5e-3 / (self.token_count() as f32).sqrt();
        let moments = |name: &str, value: &(dyn Fn(f32) -> f32 + Sync)| {
            random::map_normal_values(seed, name, self.parameter_count(), value)
        };
        let shape = [self.arena_rows(), self.d];
        let mut state = Tensors::new()
            .with("first_moments", shape, moments("first_moments", &|x| spread * x))
            .with(
                "second_moments",
                shape,
                moments("second_moments", &|x| spread * spread * (10.0 + 20.0 * x.abs())),
            )
            .with("steps", [1], vec![999.0f32]);
        state.insert("parameters", self.draw_weights(seed, Dtype::F32));
        state
    }

    /// Number of GEMM operations in a forward pass, without the masked half of attention.
    pub const fn forward_flops(&self) -> u64 {
        let matrices = self.layers * self.layer_rows() + self.vocabulary;
        let attention = 2 * self.layers * self.context * self.d;
        self.token_count() as u64 * (2 * (matrices * self.d) as u64 + attention as u64)
    }

    /// Work of a forward pass: norms, rotary embedding, softmax, SwiGLU, cross entropy and GEMMs.
    pub fn forward_work(&self) -> Work {
        let tokens = self.token_count() as u64;
        let element = self.dtype.bytes() as u64;
        let matrices = (self.parameter_count() - self.vocabulary * self.d) as u64;
        let used = (self.token_count().min(self.vocabulary) * self.d) as u64;
        let read = element * (matrices + used) + 8 * tokens;
        let write = element * tokens * self.padded_vocabulary() as u64 + 4 * self.batch as u64;
        Work::bytes(read, write)
            .with_flops(FlopUnit::Matmul, self.dtype, self.forward_flops())
            .with_flops(FlopUnit::Vector, Dtype::F32, self.vector_flops())
    }

    /// Number of operations of a forward pass outside the GEMMs.
    const fn vector_flops(&self) -> u64 {
        let scores = 5 * self.heads * self.context / 2;
        let layer = 2 * 4 * self.d + 2 * 3 * self.d + 6 * self.ff + scores;
        (self.token_count() * (self.layers * layer + 5 * self.vocabulary)) as u64
    }

    /// Work of a training step, which reads and writes the state once.
    pub fn training_step_work(&self) -> Work {
        let parameters = self.parameter_count() as u64;
        let read = 12 * parameters + 8 * self.token_count() as u64;
        Work::bytes(read, 12 * parameters + 4 * self.batch as u64)
            .with_flops(FlopUnit::Matmul, self.dtype, 3 * self.forward_flops())
            .with_flops(FlopUnit::Vector, Dtype::F32, 3 * self.vector_flops() + 14 * parameters)
    }

    /// Bytes of the f64 values that the reference holds besides inputs and outputs: a layer's
    /// activations and their gradients, and the residual stream before every layer.
    pub const fn reference_bytes(&self) -> u64 {
        let layer = 10 * self.d + 6 * self.ff + self.heads * self.context;
        let tokens = self.token_count() as u64;
        let activations =
            tokens * (layer + self.layers * self.d + 3 * self.padded_vocabulary()) as u64;
        let widest = if self.vocabulary > 2 * self.ff { self.vocabulary } else { 2 * self.ff };
        8 * (activations + (widest * self.d) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_tensors_fill_the_arena_in_order() {
        let [d, ff, layers, heads] = [768, 3072, 12, 12];
        let (vocabulary, context, batch, dtype) = (10_000, 512, 4, Dtype::Bf16);
        let small = LmShape { vocabulary, d, ff, layers, heads, context, batch, dtype };
        let end = small.arena_tensors().into_iter().fold(0, |end, tensor| {
            assert_eq!(tensor.first, end, "{:?}", tensor.weight);
            end + tensor.rows
        });
        assert_eq!(end, small.arena_rows());
        assert_eq!(small.parameter_count() / 100_000, 1286, "128.6 million");
        // The published number of operations is that of full attention.
        let masked = 2 * (small.batch * context * context * d * layers) as u64;
        assert_eq!((small.forward_flops() + masked + 500_000_000) / 1_000_000_000, 534);
    }

    #[test]
    fn the_drawn_text_uses_the_vocabulary_and_repeats_tokens() {
        let shape = LmShape {
            vocabulary: 13,
            d: 8,
            ff: 8,
            layers: 1,
            heads: 1,
            context: 50,
            batch: 2,
            dtype: Dtype::F32,
        };
        let text = shape.draw_tokens_and_targets(1);
        for name in ["tokens", "targets"] {
            let valid = |x: &f32| *x >= 0.0 && *x < 13.0 && x.fract() == 0.0;
            assert!(text.f32(name).iter().all(valid));
        }
        assert_ne!(text.f32("tokens"), text.f32("targets"));
    }
}
