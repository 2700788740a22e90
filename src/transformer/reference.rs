//! The language model in fp64: the reference against which every implementation is verified.
//!
//! The function `round` is applied to values that a row stores in the dtype of the problem. The
//! reference rounds only weights; tests round all such values, to measure the error that the
//! tolerance has to allow.

use std::sync::{Mutex, PoisonError};

use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, multiply_f64};

use super::shape::{ArenaRows, LmShape, NORM_EPSILON, ROPE_BASE, Weight};
use crate::math::{sigmoid, softmax};
use crate::parallel;
use half::bf16;
use kernelgate::stats::mean;
use kernelgate::workload::{Dtype, Tensors};

/// A row-major matrix in fp64.
pub struct F64Matrix {
    pub values: Vec<f64>,
    pub columns: usize,
}

impl F64Matrix {
    pub fn zero_matrix(rows: usize, columns: usize) -> Self {
        Self { values: vec![0.0; rows * columns], columns }
    }

    pub fn row_count(&self) -> usize {
        self.values.len() / self.columns
    }

    pub fn as_mat_ref(&self) -> MatRef<'_, f64> {
        MatRef::from_row_major_slice(&self.values, self.row_count(), self.columns)
    }

    pub fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.columns..][..self.columns]
    }

    pub fn rounded(mut self, round: fn(f64) -> f64) -> Self {
        each_row(&mut self.values, 1 << 12, &|_, values| {
            values.iter_mut().for_each(|x| *x = round(*x));
        });
        self
    }

    pub fn add_matrix(mut self, other: &Self) -> Self {
        let columns = self.columns;
        each_row(&mut self.values, columns, &|row, values| {
            values.iter_mut().zip(other.row(row)).for_each(|(x, y)| *x += y);
        });
        self
    }
}

/// Memory of matrices that were reclaimed, for reuse. Threads that touch fresh memory wait
/// for each other in the Linux kernel, at every page.
#[derive(Default)]
pub struct MatrixBuffers {
    free: Mutex<Vec<Vec<f64>>>,
}

impl MatrixBuffers {
    /// Returns a matrix with arbitrary values: 0, or those of an earlier matrix.
    pub fn take_matrix(&self, rows: usize, columns: usize) -> F64Matrix {
        let len = rows * columns;
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = free.iter().position(|values| values.len() == len);
        let kept = fits.map(|place| free.swap_remove(place));
        F64Matrix { values: kept.unwrap_or_else(|| vec![0.0; len]), columns }
    }

    /// Returns a copy of a matrix.
    pub fn copy_matrix(&self, from: &F64Matrix) -> F64Matrix {
        let mut to = self.take_matrix(from.row_count(), from.columns);
        each_row(&mut to.values, from.columns, &|row, to| to.copy_from_slice(from.row(row)));
        to
    }

    /// Computes `a · b`, with tiles on all threads.
    pub fn multiply_matrices(&self, a: &F64Matrix, b: MatRef<'_, f64>) -> F64Matrix {
        /// Larger tiles pack their operands less often, smaller tiles keep more threads busy.
        const TILE_EXTENTS: [usize; 2] = [256, 512];
        /// Number of columns in the inner loop of a GEMM.
        const COLUMNS_PER_STEP: usize = 48;
        /// Other processes may delay some threads; idle threads then take their tiles.
        const TILES_PER_THREAD: usize = 3;
        let mut out = self.take_matrix(a.row_count(), b.ncols());
        let columns = out.columns;
        let row_tiles = a.row_count().div_ceil(TILE_EXTENTS[0]);
        let column_tiles = (TILES_PER_THREAD * parallel::worker_threads()).div_ceil(row_tiles);
        let tile_columns =
            columns.div_ceil(column_tiles).next_multiple_of(COLUMNS_PER_STEP).min(TILE_EXTENTS[1]);
        let mut tiles = Vec::new();
        for (number, rows) in out.values.chunks_mut(TILE_EXTENTS[0] * columns).enumerate() {
            let count = rows.len() / columns;
            let mut left = MatMut::from_row_major_slice_mut(rows, count, columns);
            for first in (0..columns).step_by(tile_columns) {
                let width = tile_columns.min(columns - first);
                let (tile, others) = left.split_at_col_mut(width);
                tiles.push((number * TILE_EXTENTS[0], first, tile));
                left = others;
            }
        }
        parallel::for_each_task(tiles, &|_, (row, column, tile)| {
            let a = a.as_mat_ref().subrows(row, tile.nrows());
            let b = b.subcols(column, tile.ncols());
            multiply_f64(tile, Accum::Replace, a, b, 1.0);
        });
        out
    }

    /// Keeps the memory of these matrices for reuse.
    pub fn keep_memory_for_reuse(&self, matrices: impl IntoIterator<Item = F64Matrix>) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.extend(matrices.into_iter().map(|matrix| matrix.values));
    }
}

/// Calls `f(row, values)` for each row of `columns` columns, on all threads.
pub fn each_row(values: &mut [f64], columns: usize, f: &(dyn Fn(usize, &mut [f64]) + Sync)) {
    let rows = (1usize << 14).div_ceil(columns);
    parallel::for_each_chunk(values, rows * columns, &|number, chunk| {
        for (row, values) in chunk.chunks_mut(columns).enumerate() {
            f(number * rows + row, values);
        }
    });
}

/// Rows divided by the roots of their mean squares, without the gain, and the inverse roots.
pub struct NormalizedRows {
    pub rows: F64Matrix,
    pub inverse_roots: Vec<f64>,
}

/// Activations of a layer from which its gradients are computed.
pub struct ReferenceLayer {
    pub before_attention: NormalizedRows,
    pub qkv_input: F64Matrix,
    /// Rotated queries and keys, and values.
    pub qkv: F64Matrix,
    pub attended: F64Matrix,
    /// The residual stream between attention and SwiGLU.
    pub middle: F64Matrix,
    pub before_mlp: NormalizedRows,
    pub mlp_input: F64Matrix,
    pub gate_up: F64Matrix,
    pub hidden: F64Matrix,
}

impl ReferenceLayer {
    /// Returns the matrices of the layer, so that their memory can be reused.
    pub fn into_matrices(self) -> [F64Matrix; 9] {
        [
            self.before_attention.rows,
            self.qkv_input,
            self.qkv,
            self.attended,
            self.middle,
            self.before_mlp.rows,
            self.mlp_input,
            self.gate_up,
            self.hidden,
        ]
    }
}

/// Results of a forward pass: the residual stream before every layer and after the last one, and
/// the logits.
pub struct LmReference<'a> {
    pub shape: LmShape,
    pub inputs: &'a Tensors,
    pub round: fn(f64) -> f64,
    /// Memory of earlier matrices for reuse.
    pub buffers: MatrixBuffers,
    pub streams: Vec<F64Matrix>,
    /// Logits of all tokens, `[T, vocabulary]`.
    pub logits: F64Matrix,
}

impl<'a> LmReference<'a> {
    /// Creates a reference that computes single layers from given inputs.
    pub fn for_single_layers(shape: &LmShape, inputs: &'a Tensors, round: fn(f64) -> f64) -> Self {
        let (buffers, logits) = (MatrixBuffers::default(), F64Matrix::zero_matrix(0, 1));
        Self { shape: *shape, inputs, round, buffers, streams: vec![], logits }
    }

    /// Computes the whole network.
    pub fn new(shape: &LmShape, inputs: &'a Tensors, round: fn(f64) -> f64) -> Self {
        let mut reference = Self::for_single_layers(shape, inputs, round);
        let embedding = reference.rounded_weight(Weight::Embedding);
        let mut x = F64Matrix::zero_matrix(shape.token_count(), shape.d);
        for (token, x) in inputs.f32("tokens").iter().zip(x.values.chunks_mut(shape.d)) {
            x.copy_from_slice(embedding.row(*token as usize));
        }
        for layer in 0..shape.layers {
            let activations = reference.layer(layer, &x);
            let next = reference.stream_after_layer(layer, &activations);
            reference.buffers.keep_memory_for_reuse(activations.into_matrices());
            reference.streams.push(std::mem::replace(&mut x, next));
        }
        reference.streams.push(x);
        let (_, normalized) =
            reference.normalize_rows(2 * shape.layers, reference.last_residual_stream());
        let logits = reference.mul_weight_rows(&normalized, Weight::Head).rounded(round);
        reference.logits = logits;
        reference
    }

    /// Returns the residual stream before the head.
    pub fn last_residual_stream(&self) -> &F64Matrix {
        &self.streams[self.shape.layers]
    }

    /// Multiplies `a` by the rows of a tensor of parameters.
    pub fn mul_weight_rows(&self, a: &F64Matrix, weight: Weight) -> F64Matrix {
        let weight = self.rounded_weight(weight);
        let product = self.buffers.multiply_matrices(a, weight.as_mat_ref().transpose());
        self.buffers.keep_memory_for_reuse([weight]);
        product
    }

    /// Returns a·W for a stored weight matrix W.
    pub fn mul_weight_columns(&self, a: &F64Matrix, weight: Weight) -> F64Matrix {
        let weight = self.rounded_weight(weight);
        let product = self.buffers.multiply_matrices(a, weight.as_mat_ref());
        self.buffers.keep_memory_for_reuse([weight]);
        product
    }

    /// Returns a tensor of parameters, rounded as the network uses it.
    pub fn rounded_weight(&self, weight: Weight) -> F64Matrix {
        let ArenaRows { first, rows, .. } = self.shape.arena_rows_of_weight(weight);
        let d = self.shape.d;
        let parameters = self.inputs.tensor("parameters");
        let rounds = self.shape.dtype == Dtype::Bf16 && parameters.dtype() != Dtype::Bf16;
        let mut matrix = self.buffers.take_matrix(rows, d);
        each_row(&mut matrix.values, d, &|row, to| {
            parameters.for_each_f64_block((first + row) * d, d, &mut |from, values| {
                to[from..from + values.len()].copy_from_slice(values);
            });
            if rounds {
                to.iter_mut().for_each(|x| *x = bf16::from_f32(*x as f32).to_f64());
            }
        });
        matrix
    }

    /// Computes norm number `norm`, without and with its gain.
    pub fn normalize_rows(&self, norm: usize, x: &F64Matrix) -> (NormalizedRows, F64Matrix) {
        let d = self.shape.d;
        let root = |row: usize| {
            let mean = x.row(row).iter().map(|x| x * x).sum::<f64>() / d as f64;
            1.0 / (mean + NORM_EPSILON).sqrt()
        };
        let inverse_roots = parallel::parallel_map(x.row_count(), &root);
        let mut rows = self.buffers.take_matrix(x.row_count(), d);
        each_row(&mut rows.values, d, &|row, to| {
            let root = inverse_roots[row];
            to.iter_mut().zip(x.row(row)).for_each(|(to, x)| *to = x * root);
        });
        let gains = self.rounded_weight(Weight::Gains);
        let mut scaled = self.buffers.take_matrix(x.row_count(), d);
        each_row(&mut scaled.values, d, &|row, to| {
            let values = rows.row(row).iter().zip(gains.row(norm));
            to.iter_mut().zip(values).for_each(|(to, (x, gain))| *to = (self.round)(x * gain));
        });
        (NormalizedRows { rows, inverse_roots }, scaled)
    }

    /// Computes the activations of a layer from the residual stream before it.
    pub fn layer(&self, layer: usize, x: &F64Matrix) -> ReferenceLayer {
        let (round, ff) = (self.round, self.shape.ff);
        let (before_attention, qkv_input) = self.normalize_rows(2 * layer, x);
        let mut qkv = self.mul_weight_rows(&qkv_input, Weight::Qkv(layer)).rounded(round);
        self.rotate(&mut qkv, 1.0);
        let attended = self.attention_output(&qkv);
        let middle = self.mul_weight_rows(&attended, Weight::Out(layer)).add_matrix(x);
        let (before_mlp, mlp_input) = self.normalize_rows(2 * layer + 1, &middle);
        let gate_up = self.mul_weight_rows(&mlp_input, Weight::GateUp(layer)).rounded(round);
        let mut hidden = self.buffers.take_matrix(self.shape.token_count(), ff);
        each_row(&mut hidden.values, ff, &|token, hidden| {
            let (gate, up) = gate_up.row(token).split_at(ff);
            for (hidden, (gate, up)) in hidden.iter_mut().zip(gate.iter().zip(up)) {
                *hidden = round(gate * sigmoid(*gate) * up);
            }
        });
        ReferenceLayer {
            before_attention,
            qkv_input,
            qkv,
            attended,
            middle,
            before_mlp,
            mlp_input,
            gate_up,
            hidden,
        }
    }

    /// Computes the residual stream after a layer.
    pub fn stream_after_layer(&self, layer: usize, activations: &ReferenceLayer) -> F64Matrix {
        self.mul_weight_columns(&activations.hidden, Weight::Down(layer))
            .add_matrix(&activations.middle)
    }

    /// Rotates pairs of queries and keys by their position, forward or back.
    pub fn rotate(&self, qkv: &mut F64Matrix, direction: f64) {
        let LmShape { d, context, .. } = self.shape;
        let (head_dim, round) = (self.shape.head_dim(), self.round);
        let rotation = |position: usize, pair: usize| {
            let power = 2.0 * pair as f64 / head_dim as f64;
            (direction * position as f64 * ROPE_BASE.powf(-power)).sin_cos()
        };
        each_row(&mut qkv.values, 3 * d, &|token, row| {
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

    /// Returns the queries (0), keys (1) or values (2) of a sequence's head, `[context, head_dim]`.
    pub fn head(&self, rows: &F64Matrix, operand: usize, number: usize) -> F64Matrix {
        let LmShape { d, heads, context, .. } = self.shape;
        let head_dim = self.shape.head_dim();
        let (sequence, head) = (number / heads, number % heads);
        let from = operand * d + head * head_dim;
        let mut values = Vec::with_capacity(context * head_dim);
        for token in sequence * context..(sequence + 1) * context {
            values.extend_from_slice(&rows.row(token)[from..from + head_dim]);
        }
        F64Matrix { values, columns: head_dim }
    }

    /// Computes the probabilities of a sequence's head, `[context, context]`.
    pub fn probabilities(&self, query: &F64Matrix, key: &F64Matrix) -> F64Matrix {
        let (context, scale) = (self.shape.context, 1.0 / (self.shape.head_dim() as f64).sqrt());
        let mut scores = F64Matrix::zero_matrix(context, context);
        let to = MatMut::from_row_major_slice_mut(&mut scores.values, context, context);
        multiply_f64(to, Accum::Replace, query.as_mat_ref(), key.as_mat_ref().transpose(), scale);
        for (row, scores) in scores.values.chunks_mut(context).enumerate() {
            let (seen, hidden) = scores.split_at_mut(row + 1);
            softmax(seen);
            seen.iter_mut().for_each(|p| *p = (self.round)(*p));
            hidden.fill(0.0);
        }
        scores
    }

    fn attention_output(&self, qkv: &F64Matrix) -> F64Matrix {
        let LmShape { d, heads, context, batch, .. } = self.shape;
        let head_dim = self.shape.head_dim();
        let outputs = parallel::parallel_map(batch * heads, &|number| {
            let [query, key, value] = [0, 1, 2].map(|operand| self.head(qkv, operand, number));
            let p = self.probabilities(&query, &key);
            let mut out = vec![0.0; context * head_dim];
            let to = MatMut::from_row_major_slice_mut(&mut out, context, head_dim);
            multiply_f64(to, Accum::Replace, p.as_mat_ref(), value.as_mat_ref(), 1.0);
            out
        });
        let mut attended = self.buffers.take_matrix(self.shape.token_count(), d);
        self.scatter(&mut attended, 0, &outputs);
        attended.rounded(self.round)
    }

    /// Writes `[context, head_dim]` of each sequence's head to its rows and columns, from
    /// `first_column` on.
    pub fn scatter(&self, to: &mut F64Matrix, first_column: usize, heads: &[Vec<f64>]) {
        let LmShape { heads: of_sequence, context, .. } = self.shape;
        let (head_dim, columns) = (self.shape.head_dim(), to.columns);
        each_row(&mut to.values, columns, &|token, to| {
            let (sequence, position) = (token / context, token % context);
            let places = to[first_column..].chunks_mut(head_dim);
            for (place, values) in places.zip(&heads[sequence * of_sequence..][..of_sequence]) {
                place.copy_from_slice(&values[position * head_dim..][..head_dim]);
            }
        });
    }

    /// Returns the padded logits of some tokens.
    pub fn logits_of_tokens(&self, tokens: &[usize]) -> Vec<f64> {
        let padding = self.shape.padded_vocabulary() - self.shape.vocabulary;
        let padded = |token: &usize| {
            let row = self.logits.row(*token).iter().copied();
            row.chain(std::iter::repeat_n(0.0, padding)).collect::<Vec<_>>()
        };
        tokens.iter().flat_map(padded).collect()
    }

    /// Returns the mean loss of each sequence.
    pub fn sequence_losses(&self) -> Vec<f64> {
        let targets = self.inputs.f32("targets");
        let loss = |token: usize| token_loss(self.logits.row(token), targets[token] as usize);
        let losses = parallel::parallel_map(self.shape.token_count(), &loss);
        losses.chunks(self.shape.context).map(mean).collect()
    }
}

/// Cross-entropy of a token: the negative logarithm of its target's probability.
pub fn token_loss(logits: &[f64], target: usize) -> f64 {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|x| (x - largest).exp()).sum();
    sum.ln() + largest - logits[target]
}
