//! The language model in fp64: the reference against which every implementation is verified.
//!
//! The reference applies its function `round_to_dtype` to values that an implementation stores in
//! the dtype of the problem. For verification, the reference rounds only weights; a test also
//! rounds all other stored values, to measure the error that the tolerance must allow.

use std::sync::{Mutex, PoisonError};

use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, matmul_f64_on_calling_thread};

use super::shape::{
    ArenaRowsOfTensor, LanguageModelShape, ParameterTensor, RMS_NORM_EPSILON, ROPE_WAVELENGTH_BASE,
};
use crate::math::{sigmoid_f64, softmax_in_place_f64};
use crate::parallel;
use half::bf16;
use kernelgate::stats::mean;
use kernelgate::workload::{Dtype, Tensors};

/// A row-major matrix of fp64 values.
pub struct F64Matrix {
    pub values: Vec<f64>,
    pub columns: usize,
}

impl F64Matrix {
    pub fn zeroed_with_extents(rows: usize, columns: usize) -> Self {
        Self { values: vec![0.0; rows * columns], columns }
    }

    pub fn number_of_rows(&self) -> usize {
        self.values.len() / self.columns
    }

    pub fn as_faer_matrix(&self) -> MatRef<'_, f64> {
        MatRef::from_row_major_slice(&self.values, self.number_of_rows(), self.columns)
    }

    pub fn row_slice(&self, row: usize) -> &[f64] {
        &self.values[row * self.columns..][..self.columns]
    }

    pub fn with_rounded_elements(mut self, round: fn(f64) -> f64) -> Self {
        process_f64_rows_in_parallel(&mut self.values, 1 << 12, &|_, values| {
            values.iter_mut().for_each(|x| *x = round(*x));
        });
        self
    }

    pub fn plus_matrix(mut self, other: &Self) -> Self {
        let columns = self.columns;
        process_f64_rows_in_parallel(&mut self.values, columns, &|row, values| {
            values.iter_mut().zip(other.row_slice(row)).for_each(|(x, y)| *x += y);
        });
        self
    }
}

/// Pool of the memory of earlier matrices, from which new matrices are made. The pool saves time,
/// because threads that touch fresh memory wait for each other in the Linux kernel at every page.
#[derive(Default)]
pub struct MatrixMemoryPool {
    free_buffers: Mutex<Vec<Vec<f64>>>,
}

impl MatrixMemoryPool {
    /// Returns a matrix with arbitrary elements: zeros, or those of an earlier matrix.
    pub fn take_uninitialised_matrix(&self, rows: usize, columns: usize) -> F64Matrix {
        let len = rows * columns;
        let mut free = self.free_buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = free.iter().position(|values| values.len() == len);
        let kept = fits.map(|place| free.swap_remove(place));
        F64Matrix { values: kept.unwrap_or_else(|| vec![0.0; len]), columns }
    }

    /// Returns a copy of a matrix in memory from the pool.
    pub fn copy_into_pooled_matrix(&self, from: &F64Matrix) -> F64Matrix {
        let mut to = self.take_uninitialised_matrix(from.number_of_rows(), from.columns);
        process_f64_rows_in_parallel(&mut to.values, from.columns, &|row, to| {
            to.copy_from_slice(from.row_slice(row))
        });
        to
    }

    /// Computes the matrix product `a · b` in fp64, with tiles on all CPU threads.
    pub fn multiply_in_parallel_tiles(&self, a: &F64Matrix, b: MatRef<'_, f64>) -> F64Matrix {
        /// Maximum rows and columns of a tile: larger tiles pack their operands less often, smaller
        /// tiles keep more threads busy.
        const MAX_TILE_ROWS_AND_COLUMNS: [usize; 2] = [256, 512];
        /// Number of columns in the inner loop of the fp64 GEMM, of which the width of a tile is a
        /// multiple.
        const COLUMNS_PER_INNER_LOOP: usize = 48;
        /// Several tiles for each thread: if other processes delay some threads, idle threads take
        /// their tiles.
        const MIN_TILES_PER_THREAD: usize = 3;
        let mut out = self.take_uninitialised_matrix(a.number_of_rows(), b.ncols());
        let columns = out.columns;
        let row_tiles = a.number_of_rows().div_ceil(MAX_TILE_ROWS_AND_COLUMNS[0]);
        let column_tiles =
            (MIN_TILES_PER_THREAD * parallel::parallel_thread_count()).div_ceil(row_tiles);
        let tile_columns = columns
            .div_ceil(column_tiles)
            .next_multiple_of(COLUMNS_PER_INNER_LOOP)
            .min(MAX_TILE_ROWS_AND_COLUMNS[1]);
        let mut tiles = Vec::new();
        for (number, rows) in
            out.values.chunks_mut(MAX_TILE_ROWS_AND_COLUMNS[0] * columns).enumerate()
        {
            let count = rows.len() / columns;
            let mut left = MatMut::from_row_major_slice_mut(rows, count, columns);
            for first in (0..columns).step_by(tile_columns) {
                let width = tile_columns.min(columns - first);
                let (tile, others) = left.split_at_col_mut(width);
                tiles.push((number * MAX_TILE_ROWS_AND_COLUMNS[0], first, tile));
                left = others;
            }
        }
        parallel::run_tasks_in_parallel(tiles, &|_, (row, column, tile)| {
            let a = a.as_faer_matrix().subrows(row, tile.nrows());
            let b = b.subcols(column, tile.ncols());
            matmul_f64_on_calling_thread(tile, Accum::Replace, a, b, 1.0);
        });
        out
    }

    /// Returns the memory of these matrices to the pool for reuse.
    pub fn return_memory_to_pool(&self, matrices: impl IntoIterator<Item = F64Matrix>) {
        let mut free = self.free_buffers.lock().unwrap_or_else(PoisonError::into_inner);
        free.extend(matrices.into_iter().map(|matrix| matrix.values));
    }
}

/// Calls `f(row, values)` in parallel for each row of a row-major slice with `columns` columns.
pub fn process_f64_rows_in_parallel(
    values: &mut [f64],
    columns: usize,
    f: &(dyn Fn(usize, &mut [f64]) + Sync),
) {
    let rows = (1usize << 14).div_ceil(columns);
    parallel::process_chunks_in_parallel(values, rows * columns, &|number, chunk| {
        for (row, values) in chunk.chunks_mut(columns).enumerate() {
            f(number * rows + row, values);
        }
    });
}

/// Rows divided by their root mean squares, without the gain, and the inverse root mean squares.
pub struct RmsNormalizedRows {
    pub normalized_rows: F64Matrix,
    pub inverse_root_mean_squares: Vec<f64>,
}

/// Activations of a layer from which the reference computes the layer's gradients.
pub struct ReferenceLayerActivations {
    pub before_attention: RmsNormalizedRows,
    pub qkv_input: F64Matrix,
    /// Rotated queries, rotated keys, and values of all tokens, `[T, 3·d]`.
    pub qkv: F64Matrix,
    pub attention_output: F64Matrix,
    /// The residual stream between the layer's attention and its SwiGLU block.
    pub residual_after_attention: F64Matrix,
    pub before_mlp: RmsNormalizedRows,
    pub swiglu_input: F64Matrix,
    pub swiglu_gates_and_ups: F64Matrix,
    pub swiglu_hidden: F64Matrix,
}

impl ReferenceLayerActivations {
    /// Returns all matrices of the layer, so that their memory can be reused.
    pub fn into_matrices_for_reuse(self) -> [F64Matrix; 9] {
        [
            self.before_attention.normalized_rows,
            self.qkv_input,
            self.qkv,
            self.attention_output,
            self.residual_after_attention,
            self.before_mlp.normalized_rows,
            self.swiglu_input,
            self.swiglu_gates_and_ups,
            self.swiglu_hidden,
        ]
    }
}

/// Results of the reference's forward pass: the residual stream before every layer and after the
/// last one, and the logits.
pub struct LanguageModelReference<'a> {
    pub shape: LanguageModelShape,
    pub inputs: &'a Tensors,
    pub round_to_dtype: fn(f64) -> f64,
    /// Memory of earlier matrices, for reuse.
    pub memory_pool: MatrixMemoryPool,
    pub residual_streams: Vec<F64Matrix>,
    /// Logits of all tokens without padding, `[T, vocabulary]`.
    pub logits: F64Matrix,
}

impl<'a> LanguageModelReference<'a> {
    /// Creates a reference that runs no forward pass; its methods compute single layers from given
    /// inputs.
    pub fn without_forward_pass(
        shape: &LanguageModelShape,
        inputs: &'a Tensors,
        round: fn(f64) -> f64,
    ) -> Self {
        let (buffers, logits) = (MatrixMemoryPool::default(), F64Matrix::zeroed_with_extents(0, 1));
        Self {
            shape: *shape,
            inputs,
            round_to_dtype: round,
            memory_pool: buffers,
            residual_streams: vec![],
            logits,
        }
    }

    /// Runs the forward pass of the whole language model in fp64.
    pub fn run_forward_pass(
        shape: &LanguageModelShape,
        inputs: &'a Tensors,
        round: fn(f64) -> f64,
    ) -> Self {
        let mut reference = Self::without_forward_pass(shape, inputs, round);
        let embedding = reference.weight_as_network_uses_it(ParameterTensor::TokenEmbedding);
        let mut x = F64Matrix::zeroed_with_extents(shape.tokens_in_batch(), shape.model_width);
        for (token, x) in
            inputs.f32_elements("tokens").iter().zip(x.values.chunks_mut(shape.model_width))
        {
            x.copy_from_slice(embedding.row_slice(*token as usize));
        }
        for layer in 0..shape.layers {
            let activations = reference.activations_of_layer(layer, &x);
            let next = reference.residual_stream_after_layer(layer, &activations);
            reference.memory_pool.return_memory_to_pool(activations.into_matrices_for_reuse());
            reference.residual_streams.push(std::mem::replace(&mut x, next));
        }
        reference.residual_streams.push(x);
        let (_, normalized) = reference.rms_norm_without_and_with_gain(
            2 * shape.layers,
            reference.residual_stream_before_head(),
        );
        let logits = reference
            .multiply_by_transposed_weight(&normalized, ParameterTensor::LogitProjection)
            .with_rounded_elements(round);
        reference.logits = logits;
        reference
    }

    /// Returns the residual stream after the last layer, which the output head reads.
    pub fn residual_stream_before_head(&self) -> &F64Matrix {
        &self.residual_streams[self.shape.layers]
    }

    /// Computes `a · Wᵀ` for a stored parameter matrix W.
    pub fn multiply_by_transposed_weight(
        &self,
        a: &F64Matrix,
        weight: ParameterTensor,
    ) -> F64Matrix {
        let weight = self.weight_as_network_uses_it(weight);
        let product =
            self.memory_pool.multiply_in_parallel_tiles(a, weight.as_faer_matrix().transpose());
        self.memory_pool.return_memory_to_pool([weight]);
        product
    }

    /// Computes `a · W` for a stored parameter matrix W.
    pub fn multiply_by_weight(&self, a: &F64Matrix, weight: ParameterTensor) -> F64Matrix {
        let weight = self.weight_as_network_uses_it(weight);
        let product = self.memory_pool.multiply_in_parallel_tiles(a, weight.as_faer_matrix());
        self.memory_pool.return_memory_to_pool([weight]);
        product
    }

    /// Reads a parameter tensor, rounded to bf16 if the network uses it in bf16.
    pub fn weight_as_network_uses_it(&self, weight: ParameterTensor) -> F64Matrix {
        let ArenaRowsOfTensor { first_arena_row: first, arena_row_count: rows, .. } =
            self.shape.arena_rows_of_tensor(weight);
        let d = self.shape.model_width;
        let parameters = self.inputs.tensor("parameters");
        let rounds = self.shape.dtype == Dtype::Bf16 && parameters.dtype() != Dtype::Bf16;
        let mut matrix = self.memory_pool.take_uninitialised_matrix(rows, d);
        process_f64_rows_in_parallel(&mut matrix.values, d, &|row, to| {
            parameters.for_each_block_as_f64((first + row) * d, d, &mut |from, values| {
                to[from..from + values.len()].copy_from_slice(values);
            });
            if rounds {
                to.iter_mut().for_each(|x| *x = bf16::from_f32(*x as f32).to_f64());
            }
        });
        matrix
    }

    /// Computes RMSNorm number `norm` of the rows of x; returns the normalised rows without and
    /// with the gain.
    pub fn rms_norm_without_and_with_gain(
        &self,
        norm: usize,
        x: &F64Matrix,
    ) -> (RmsNormalizedRows, F64Matrix) {
        let d = self.shape.model_width;
        let root = |row: usize| {
            let mean = x.row_slice(row).iter().map(|x| x * x).sum::<f64>() / d as f64;
            1.0 / (mean + RMS_NORM_EPSILON).sqrt()
        };
        let inverse_roots = parallel::map_numbers_in_parallel(x.number_of_rows(), &root);
        let mut rows = self.memory_pool.take_uninitialised_matrix(x.number_of_rows(), d);
        process_f64_rows_in_parallel(&mut rows.values, d, &|row, to| {
            let root = inverse_roots[row];
            to.iter_mut().zip(x.row_slice(row)).for_each(|(to, x)| *to = x * root);
        });
        let gains = self.weight_as_network_uses_it(ParameterTensor::RmsNormGains);
        let mut scaled = self.memory_pool.take_uninitialised_matrix(x.number_of_rows(), d);
        process_f64_rows_in_parallel(&mut scaled.values, d, &|row, to| {
            let values = rows.row_slice(row).iter().zip(gains.row_slice(norm));
            to.iter_mut()
                .zip(values)
                .for_each(|(to, (x, gain))| *to = (self.round_to_dtype)(x * gain));
        });
        (
            RmsNormalizedRows { normalized_rows: rows, inverse_root_mean_squares: inverse_roots },
            scaled,
        )
    }

    /// Computes the activations of a layer from the residual stream before the layer.
    pub fn activations_of_layer(&self, layer: usize, x: &F64Matrix) -> ReferenceLayerActivations {
        let (round, ff) = (self.round_to_dtype, self.shape.swiglu_hidden_width);
        let (before_attention, qkv_input) = self.rms_norm_without_and_with_gain(2 * layer, x);
        let mut qkv = self
            .multiply_by_transposed_weight(&qkv_input, ParameterTensor::QkvProjectionOfLayer(layer))
            .with_rounded_elements(round);
        self.apply_rope_in_place(&mut qkv, 1.0);
        let attended = self.attention_output_of_all_heads(&qkv);
        let middle = self
            .multiply_by_transposed_weight(
                &attended,
                ParameterTensor::AttentionOutputProjectionOfLayer(layer),
            )
            .plus_matrix(x);
        let (before_mlp, mlp_input) = self.rms_norm_without_and_with_gain(2 * layer + 1, &middle);
        let gate_up = self
            .multiply_by_transposed_weight(
                &mlp_input,
                ParameterTensor::GateUpProjectionOfLayer(layer),
            )
            .with_rounded_elements(round);
        let mut hidden =
            self.memory_pool.take_uninitialised_matrix(self.shape.tokens_in_batch(), ff);
        process_f64_rows_in_parallel(&mut hidden.values, ff, &|token, hidden| {
            let (gate, up) = gate_up.row_slice(token).split_at(ff);
            for (hidden, (gate, up)) in hidden.iter_mut().zip(gate.iter().zip(up)) {
                *hidden = round(gate * sigmoid_f64(*gate) * up);
            }
        });
        ReferenceLayerActivations {
            before_attention,
            qkv_input,
            qkv,
            attention_output: attended,
            residual_after_attention: middle,
            before_mlp,
            swiglu_input: mlp_input,
            swiglu_gates_and_ups: gate_up,
            swiglu_hidden: hidden,
        }
    }

    /// Computes the residual stream after a layer from the layer's activations.
    pub fn residual_stream_after_layer(
        &self,
        layer: usize,
        activations: &ReferenceLayerActivations,
    ) -> F64Matrix {
        self.multiply_by_weight(
            &activations.swiglu_hidden,
            ParameterTensor::DownProjectionOfLayer(layer),
        )
        .plus_matrix(&activations.residual_after_attention)
    }

    /// Applies RoPE in place to the queries and keys of `[T, 3·d]`; with `direction` -1 it applies
    /// the inverse rotation.
    pub fn apply_rope_in_place(&self, qkv: &mut F64Matrix, direction: f64) {
        let LanguageModelShape { model_width: d, context_tokens: context, .. } = self.shape;
        let (head_dim, round) = (self.shape.elements_per_head(), self.round_to_dtype);
        let rotation = |position: usize, pair: usize| {
            let power = 2.0 * pair as f64 / head_dim as f64;
            (direction * position as f64 * ROPE_WAVELENGTH_BASE.powf(-power)).sin_cos()
        };
        process_f64_rows_in_parallel(&mut qkv.values, 3 * d, &|token, row| {
            let rotations: Vec<(f64, f64)> =
                (0..head_dim / 2).map(|pair| rotation(token % context, pair)).collect();
            for head in row[..2 * d].chunks_mut(head_dim) {
                for (values, (sin, cos)) in head.chunks_exact_mut(2).zip(&rotations) {
                    let [a, b] = [values[0], values[1]];
                    values[0] = round(a * cos - b * sin);
                    values[1] = round(a * sin + b * cos);
                }
            }
        });
    }

    /// Copies the queries (0), keys (1) or values (2) of one head of one sequence, `[context,
    /// head_dim]`.
    pub fn copy_head_of_sequence(
        &self,
        rows: &F64Matrix,
        operand: usize,
        number: usize,
    ) -> F64Matrix {
        let LanguageModelShape { model_width: d, heads, context_tokens: context, .. } = self.shape;
        let head_dim = self.shape.elements_per_head();
        let (sequence, head) = (number / heads, number % heads);
        let from = operand * d + head * head_dim;
        let mut values = Vec::with_capacity(context * head_dim);
        for token in sequence * context..(sequence + 1) * context {
            values.extend_from_slice(&rows.row_slice(token)[from..from + head_dim]);
        }
        F64Matrix { values, columns: head_dim }
    }

    /// Computes the causal softmax probabilities of one head of one sequence, `[context, context]`.
    pub fn causal_probabilities(&self, query: &F64Matrix, key: &F64Matrix) -> F64Matrix {
        let (context, scale) =
            (self.shape.context_tokens, 1.0 / (self.shape.elements_per_head() as f64).sqrt());
        let mut scores = F64Matrix::zeroed_with_extents(context, context);
        let to = MatMut::from_row_major_slice_mut(&mut scores.values, context, context);
        matmul_f64_on_calling_thread(
            to,
            Accum::Replace,
            query.as_faer_matrix(),
            key.as_faer_matrix().transpose(),
            scale,
        );
        for (row, scores) in scores.values.chunks_mut(context).enumerate() {
            let (seen, hidden) = scores.split_at_mut(row + 1);
            softmax_in_place_f64(seen);
            seen.iter_mut().for_each(|p| *p = (self.round_to_dtype)(*p));
            hidden.fill(0.0);
        }
        scores
    }

    fn attention_output_of_all_heads(&self, qkv: &F64Matrix) -> F64Matrix {
        let LanguageModelShape { model_width: d, heads, context_tokens: context, batch, .. } =
            self.shape;
        let head_dim = self.shape.elements_per_head();
        let outputs = parallel::map_numbers_in_parallel(batch * heads, &|number| {
            let [query, key, value] =
                [0, 1, 2].map(|operand| self.copy_head_of_sequence(qkv, operand, number));
            let p = self.causal_probabilities(&query, &key);
            let mut out = vec![0.0; context * head_dim];
            let to = MatMut::from_row_major_slice_mut(&mut out, context, head_dim);
            matmul_f64_on_calling_thread(
                to,
                Accum::Replace,
                p.as_faer_matrix(),
                value.as_faer_matrix(),
                1.0,
            );
            out
        });
        let mut attended =
            self.memory_pool.take_uninitialised_matrix(self.shape.tokens_in_batch(), d);
        self.copy_heads_into_columns(&mut attended, 0, &outputs);
        attended.with_rounded_elements(self.round_to_dtype)
    }

    /// Copies the matrices `[context, head_dim]` of all sequences' heads into the rows and columns
    /// of `to`, from `first_column` on.
    pub fn copy_heads_into_columns(
        &self,
        to: &mut F64Matrix,
        first_column: usize,
        heads: &[Vec<f64>],
    ) {
        let LanguageModelShape { heads: of_sequence, context_tokens: context, .. } = self.shape;
        let (head_dim, columns) = (self.shape.elements_per_head(), to.columns);
        process_f64_rows_in_parallel(&mut to.values, columns, &|token, to| {
            let (sequence, position) = (token / context, token % context);
            let places = to[first_column..].chunks_mut(head_dim);
            for (place, values) in places.zip(&heads[sequence * of_sequence..][..of_sequence]) {
                place.copy_from_slice(&values[position * head_dim..][..head_dim]);
            }
        });
    }

    /// Returns the logits of some tokens, padded with zeros.
    pub fn padded_logits_of_tokens(&self, tokens: &[usize]) -> Vec<f64> {
        let padding = self.shape.padded_logit_columns() - self.shape.vocabulary_size;
        let padded = |token: &usize| {
            let row = self.logits.row_slice(*token).iter().copied();
            row.chain(std::iter::repeat_n(0.0, padding)).collect::<Vec<_>>()
        };
        tokens.iter().flat_map(padded).collect()
    }

    /// Returns the mean loss of each sequence over its tokens.
    pub fn mean_losses_of_sequences(&self) -> Vec<f64> {
        let targets = self.inputs.f32_elements("targets");
        let loss = |token: usize| {
            cross_entropy_of_token(self.logits.row_slice(token), targets[token] as usize)
        };
        let losses = parallel::map_numbers_in_parallel(self.shape.tokens_in_batch(), &loss);
        losses.chunks(self.shape.context_tokens).map(mean).collect()
    }
}

/// Cross-entropy loss of a token: the negative logarithm of its target's softmax probability.
pub fn cross_entropy_of_token(logits: &[f64], target: usize) -> f64 {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|x| (x - largest).exp()).sum();
    sum.ln() + largest - logits[target]
}
