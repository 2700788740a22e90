//! The language model in fp64: the reference against which every implementation is verified.
//!
//! The function `round` is applied to values that a row stores in the dtype of the problem. The
//! reference rounds only weights; tests round all such values, to measure the error that the
//! tolerance has to allow.

use std::sync::{Mutex, PoisonError};

use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, multiply_f64};

use super::shape::{ArenaRows, NORM_EPSILON, ROPE_BASE, Shape, Weight};
use crate::parallel;
use half::bf16;
use kernelgate::workload::{Dtype, Tensors};

/// A row-major matrix in fp64.
pub struct Matrix {
    pub values: Vec<f64>,
    pub columns: usize,
}

impl Matrix {
    pub fn zeros(rows: usize, columns: usize) -> Self {
        Self { values: vec![0.0; rows * columns], columns }
    }

    pub fn rows(&self) -> usize {
        self.values.len() / self.columns
    }

    pub fn view(&self) -> MatRef<'_, f64> {
        MatRef::from_row_major_slice(&self.values, self.rows(), self.columns)
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

    pub fn plus(mut self, other: &Self) -> Self {
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
    pub fn matrix(&self, rows: usize, columns: usize) -> Matrix {
        let len = rows * columns;
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = free.iter().position(|values| values.len() == len);
        let kept = fits.map(|place| free.swap_remove(place));
        Matrix { values: kept.unwrap_or_else(|| vec![0.0; len]), columns }
    }

    /// Returns a copy of a matrix.
    pub fn copied(&self, from: &Matrix) -> Matrix {
        let mut to = self.matrix(from.rows(), from.columns);
        each_row(&mut to.values, from.columns, &|row, to| to.copy_from_slice(from.row(row)));
        to
    }

    /// Computes `a · b`, with tiles on all threads.
    pub fn multiplied(&self, a: &Matrix, b: MatRef<'_, f64>) -> Matrix {
        /// Larger tiles pack their operands less often, smaller tiles keep more threads busy.
        const TILE_EXTENTS: [usize; 2] = [256, 512];
        /// Number of columns in the inner loop of a GEMM.
        const COLUMNS_PER_STEP: usize = 48;
        /// Other processes may delay some threads; idle threads then take their tiles.
        const TILES_PER_THREAD: usize = 3;
        let mut out = self.matrix(a.rows(), b.ncols());
        let columns = out.columns;
        let row_tiles = a.rows().div_ceil(TILE_EXTENTS[0]);
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
            let a = a.view().subrows(row, tile.nrows());
            let b = b.subcols(column, tile.ncols());
            multiply_f64(tile, Accum::Replace, a, b, 1.0);
        });
        out
    }

    /// Keeps the memory of these matrices for reuse.
    pub fn reclaim(&self, matrices: impl IntoIterator<Item = Matrix>) {
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
    pub rows: Matrix,
    pub inverse_roots: Vec<f64>,
}

/// Activations of a layer from which its gradients are computed.
pub struct ReferenceLayer {
    pub before_attention: NormalizedRows,
    pub qkv_input: Matrix,
    /// Rotated queries and keys, and values.
    pub qkv: Matrix,
    pub attended: Matrix,
    /// The residual stream between attention and SwiGLU.
    pub middle: Matrix,
    pub before_mlp: NormalizedRows,
    pub mlp_input: Matrix,
    pub gate_up: Matrix,
    pub hidden: Matrix,
}

impl ReferenceLayer {
    /// Returns the matrices of the layer, so that their memory can be reused.
    pub fn into_matrices(self) -> [Matrix; 9] {
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
pub struct Reference<'a> {
    pub shape: Shape,
    pub inputs: &'a Tensors,
    pub round: fn(f64) -> f64,
    /// Memory of earlier matrices for reuse.
    pub buffers: MatrixBuffers,
    pub streams: Vec<Matrix>,
    /// Logits of all tokens, `[T, vocabulary]`.
    pub logits: Matrix,
}

impl<'a> Reference<'a> {
    /// Creates a reference that computes single layers from given inputs.
    pub fn for_layers(shape: &Shape, inputs: &'a Tensors, round: fn(f64) -> f64) -> Self {
        let (buffers, logits) = (MatrixBuffers::default(), Matrix::zeros(0, 1));
        Self { shape: *shape, inputs, round, buffers, streams: vec![], logits }
    }

    /// Computes the whole network.
    pub fn new(shape: &Shape, inputs: &'a Tensors, round: fn(f64) -> f64) -> Self {
        let mut reference = Self::for_layers(shape, inputs, round);
        let embedding = reference.weight(Weight::Embedding);
        let mut x = Matrix::zeros(shape.tokens(), shape.d);
        for (token, x) in inputs.f32("tokens").iter().zip(x.values.chunks_mut(shape.d)) {
            x.copy_from_slice(embedding.row(*token as usize));
        }
        for layer in 0..shape.layers {
            let activations = reference.layer(layer, &x);
            let next = reference.stream_after_layer(layer, &activations);
            reference.buffers.reclaim(activations.into_matrices());
            reference.streams.push(std::mem::replace(&mut x, next));
        }
        reference.streams.push(x);
        let (_, normalized) = reference.normalize(2 * shape.layers, reference.last_stream());
        let logits = reference.by_rows(&normalized, Weight::Head).rounded(round);
        reference.logits = logits;
        reference
    }

    /// Returns the residual stream before the head.
    pub fn last_stream(&self) -> &Matrix {
        &self.streams[self.shape.layers]
    }

    /// Multiplies `a` by the rows of a tensor of parameters.
    pub fn by_rows(&self, a: &Matrix, weight: Weight) -> Matrix {
        let weight = self.weight(weight);
        let product = self.buffers.multiplied(a, weight.view().transpose());
        self.buffers.reclaim([weight]);
        product
    }

    /// Multiplies `a` by the columns of a tensor of parameters.
    pub fn by_columns(&self, a: &Matrix, weight: Weight) -> Matrix {
        let weight = self.weight(weight);
        let product = self.buffers.multiplied(a, weight.view());
        self.buffers.reclaim([weight]);
        product
    }

    /// Returns a tensor of parameters, rounded as the network uses it.
    pub fn weight(&self, weight: Weight) -> Matrix {
        let ArenaRows { first, rows, .. } = self.shape.rows_of(weight);
        let d = self.shape.d;
        let parameters = self.inputs.tensor("parameters");
        let rounds = self.shape.dtype == Dtype::Bf16 && parameters.dtype() != Dtype::Bf16;
        let mut matrix = self.buffers.matrix(rows, d);
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
    pub fn normalize(&self, norm: usize, x: &Matrix) -> (NormalizedRows, Matrix) {
        let d = self.shape.d;
        let root = |row: usize| {
            let mean = x.row(row).iter().map(|x| x * x).sum::<f64>() / d as f64;
            1.0 / (mean + NORM_EPSILON).sqrt()
        };
        let inverse_roots = parallel::map(x.rows(), &root);
        let mut rows = self.buffers.matrix(x.rows(), d);
        each_row(&mut rows.values, d, &|row, to| {
            let root = inverse_roots[row];
            to.iter_mut().zip(x.row(row)).for_each(|(to, x)| *to = x * root);
        });
        let gains = self.weight(Weight::Gains);
        let mut scaled = self.buffers.matrix(x.rows(), d);
        each_row(&mut scaled.values, d, &|row, to| {
            let values = rows.row(row).iter().zip(gains.row(norm));
            to.iter_mut().zip(values).for_each(|(to, (x, gain))| *to = (self.round)(x * gain));
        });
        (NormalizedRows { rows, inverse_roots }, scaled)
    }

    /// Computes the activations of a layer from the residual stream before it.
    pub fn layer(&self, layer: usize, x: &Matrix) -> ReferenceLayer {
        let (round, ff) = (self.round, self.shape.ff);
        let (before_attention, qkv_input) = self.normalize(2 * layer, x);
        let mut qkv = self.by_rows(&qkv_input, Weight::Qkv(layer)).rounded(round);
        self.rotate(&mut qkv, 1.0);
        let attended = self.attention_output(&qkv);
        let middle = self.by_rows(&attended, Weight::Out(layer)).plus(x);
        let (before_mlp, mlp_input) = self.normalize(2 * layer + 1, &middle);
        let gate_up = self.by_rows(&mlp_input, Weight::GateUp(layer)).rounded(round);
        let mut hidden = self.buffers.matrix(self.shape.tokens(), ff);
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
    pub fn stream_after_layer(&self, layer: usize, activations: &ReferenceLayer) -> Matrix {
        self.by_columns(&activations.hidden, Weight::Down(layer)).plus(&activations.middle)
    }

    /// Rotates pairs of queries and keys by their position, forward or back.
    pub fn rotate(&self, qkv: &mut Matrix, direction: f64) {
        let Shape { d, context, .. } = self.shape;
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
    pub fn head(&self, rows: &Matrix, operand: usize, number: usize) -> Matrix {
        let Shape { d, heads, context, .. } = self.shape;
        let head_dim = self.shape.head_dim();
        let (sequence, head) = (number / heads, number % heads);
        let from = operand * d + head * head_dim;
        let mut values = Vec::with_capacity(context * head_dim);
        for token in sequence * context..(sequence + 1) * context {
            values.extend_from_slice(&rows.row(token)[from..from + head_dim]);
        }
        Matrix { values, columns: head_dim }
    }

    /// Computes the probabilities of a sequence's head, `[context, context]`.
    pub fn probabilities(&self, query: &Matrix, key: &Matrix) -> Matrix {
        let (context, scale) = (self.shape.context, 1.0 / (self.shape.head_dim() as f64).sqrt());
        let mut scores = Matrix::zeros(context, context);
        let to = MatMut::from_row_major_slice_mut(&mut scores.values, context, context);
        multiply_f64(to, Accum::Replace, query.view(), key.view().transpose(), scale);
        for (row, scores) in scores.values.chunks_mut(context).enumerate() {
            let (seen, hidden) = scores.split_at_mut(row + 1);
            softmax(seen);
            seen.iter_mut().for_each(|p| *p = (self.round)(*p));
            hidden.fill(0.0);
        }
        scores
    }

    fn attention_output(&self, qkv: &Matrix) -> Matrix {
        let Shape { d, heads, context, batch, .. } = self.shape;
        let head_dim = self.shape.head_dim();
        let outputs = parallel::map(batch * heads, &|number| {
            let [query, key, value] = [0, 1, 2].map(|operand| self.head(qkv, operand, number));
            let p = self.probabilities(&query, &key);
            let mut out = vec![0.0; context * head_dim];
            let to = MatMut::from_row_major_slice_mut(&mut out, context, head_dim);
            multiply_f64(to, Accum::Replace, p.view(), value.view(), 1.0);
            out
        });
        let mut attended = self.buffers.matrix(self.shape.tokens(), d);
        self.scatter(&mut attended, 0, &outputs);
        attended.rounded(self.round)
    }

    /// Writes `[context, head_dim]` of each sequence's head to its rows and columns, from
    /// `first_column` on.
    pub fn scatter(&self, to: &mut Matrix, first_column: usize, heads: &[Vec<f64>]) {
        let Shape { heads: of_sequence, context, .. } = self.shape;
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
    pub fn logits_of(&self, tokens: &[usize]) -> Vec<f64> {
        let padding = self.shape.padded() - self.shape.vocabulary;
        let padded = |token: &usize| {
            let row = self.logits.row(*token).iter().copied();
            row.chain(std::iter::repeat_n(0.0, padding)).collect::<Vec<_>>()
        };
        tokens.iter().flat_map(padded).collect()
    }

    /// Returns the mean loss of each sequence.
    pub fn losses(&self) -> Vec<f64> {
        let targets = self.inputs.f32("targets");
        let loss = |token: usize| {
            let logits = self.logits.row(token);
            let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = logits.iter().map(|x| (x - largest).exp()).sum();
            sum.ln() + largest - logits[targets[token] as usize]
        };
        let losses = parallel::map(self.shape.tokens(), &loss);
        let context = self.shape.context;
        losses.chunks(context).map(|losses| losses.iter().sum::<f64>() / context as f64).collect()
    }
}

pub fn softmax(row: &mut [f64]) {
    let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    row.iter_mut().for_each(|x| *x = (*x - largest).exp());
    let sum: f64 = row.iter().sum();
    row.iter_mut().for_each(|x| *x /= sum);
}

pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
