//! The language model in fp64: the definition that every implementation is verified against.
//!
//! `round` is applied to values that a row stores in the dtype of the problem. The reference rounds
//! weights only; tests round everything, to measure the error that the tolerance has to allow.

use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, multiply_f64};

use super::shape::{ArenaRows, NORM_EPSILON, ROPE_BASE, Shape, Weight};
use crate::parallel;
use half::bf16;
use kernelgate::workload::{Dtype, Tensors};

/// A row-major matrix.
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

    /// `self · other`, tiles on all threads.
    pub fn times(&self, other: MatRef<'_, f64>) -> Self {
        /// Larger tiles pack their operands less often, smaller ones keep more threads busy.
        const TILE: [usize; 2] = [256, 512];
        /// Fewer columns would pack `self` for too little work.
        const LEAST_COLUMNS: usize = 64;
        let mut out = Self::zeros(self.rows(), other.ncols());
        let columns = out.columns;
        let row_tiles = self.rows().div_ceil(TILE[0]);
        let each_thread = columns.div_ceil(parallel::threads().div_ceil(row_tiles));
        let tile_columns = each_thread.clamp(LEAST_COLUMNS, TILE[1]);
        let mut tiles = Vec::new();
        for (number, rows) in out.values.chunks_mut(TILE[0] * columns).enumerate() {
            let count = rows.len() / columns;
            let mut left = MatMut::from_row_major_slice_mut(rows, count, columns);
            for first in (0..columns).step_by(tile_columns) {
                let width = tile_columns.min(columns - first);
                let (tile, others) = left.split_at_col_mut(width);
                tiles.push((number * TILE[0], first, tile));
                left = others;
            }
        }
        parallel::each(tiles, &|_, (row, column, tile)| {
            let a = self.view().subrows(row, tile.nrows());
            let b = other.subcols(column, tile.ncols());
            multiply_f64(tile, Accum::Replace, a, b, 1.0);
        });
        out
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

/// Calls `f(row, values)` for each row of `columns` columns, on all threads.
pub fn each_row(values: &mut [f64], columns: usize, f: &(dyn Fn(usize, &mut [f64]) + Sync)) {
    let rows = (1usize << 14).div_ceil(columns);
    parallel::chunks_mut(values, rows * columns, &|number, chunk| {
        for (row, values) in chunk.chunks_mut(columns).enumerate() {
            f(number * rows + row, values);
        }
    });
}

/// Rows over the roots of their mean squares, without the gain, and the inverse roots.
pub struct Normalized {
    pub rows: Matrix,
    pub inverse_roots: Vec<f64>,
}

/// Activations of a layer that its gradients are made of.
pub struct Layer {
    pub before_attention: Normalized,
    pub qkv_input: Matrix,
    /// Queries and keys rotated.
    pub qkv: Matrix,
    pub attended: Matrix,
    pub before_mlp: Normalized,
    pub mlp_input: Matrix,
    pub gate_up: Matrix,
    pub hidden: Matrix,
    /// The residual stream behind the layer.
    pub x: Matrix,
}

/// A forward pass: the residual stream before every layer and behind the last one, and the logits.
pub struct Reference<'a> {
    pub shape: Shape,
    pub inputs: &'a Tensors,
    pub round: fn(f64) -> f64,
    pub streams: Vec<Matrix>,
    /// `[T, vocabulary]`.
    pub logits: Matrix,
}

impl<'a> Reference<'a> {
    /// A reference that computes layers of given inputs only.
    pub fn for_layers(shape: &Shape, inputs: &'a Tensors, round: fn(f64) -> f64) -> Self {
        Self { shape: *shape, inputs, round, streams: vec![], logits: Matrix::zeros(0, 1) }
    }

    /// Computes the network.
    pub fn new(shape: &Shape, inputs: &'a Tensors, round: fn(f64) -> f64) -> Self {
        let mut reference = Self::for_layers(shape, inputs, round);
        let embedding = reference.weight(Weight::Embedding);
        let mut x = Matrix::zeros(shape.tokens(), shape.d);
        for (token, x) in inputs.f32("tokens").iter().zip(x.values.chunks_mut(shape.d)) {
            x.copy_from_slice(embedding.row(*token as usize));
        }
        for layer in 0..shape.layers {
            let next = reference.layer(layer, &x).x;
            reference.streams.push(std::mem::replace(&mut x, next));
        }
        reference.streams.push(x);
        let (_, normalized) = reference.normalize(2 * shape.layers, reference.last_stream());
        let head = reference.weight(Weight::Head);
        reference.logits = normalized.times(head.view().transpose()).rounded(round);
        reference
    }

    /// The residual stream before the head.
    pub fn last_stream(&self) -> &Matrix {
        &self.streams[self.shape.layers]
    }

    /// A tensor of parameters as the network multiplies by it.
    pub fn weight(&self, weight: Weight) -> Matrix {
        let ArenaRows { first, rows, .. } = self.shape.rows_of(weight);
        let d = self.shape.d;
        let parameters = self.inputs.tensor("parameters");
        let rounds = self.shape.dtype == Dtype::Bf16 && parameters.dtype() != Dtype::Bf16;
        let mut matrix = Matrix::zeros(rows, d);
        each_row(&mut matrix.values, d, &|row, to| {
            parameters.for_each_f64_block((first + row) * d, d, &mut |from, values| {
                to[from..from + values.len()].copy_from_slice(values);
            });
            if rounds {
                to.iter_mut().for_each(|x| *x = bf16::from_f64(*x).to_f64());
            }
        });
        matrix
    }

    /// The norm of that number: without and with its gain.
    pub fn normalize(&self, norm: usize, x: &Matrix) -> (Normalized, Matrix) {
        let d = self.shape.d;
        let root = |row: usize| {
            let mean = x.row(row).iter().map(|x| x * x).sum::<f64>() / d as f64;
            1.0 / (mean + NORM_EPSILON).sqrt()
        };
        let inverse_roots = parallel::map(x.rows(), &root);
        let mut rows = Matrix::zeros(x.rows(), d);
        each_row(&mut rows.values, d, &|row, to| {
            let root = inverse_roots[row];
            to.iter_mut().zip(x.row(row)).for_each(|(to, x)| *to = x * root);
        });
        let gains = self.weight(Weight::Gains);
        let mut scaled = Matrix::zeros(x.rows(), d);
        each_row(&mut scaled.values, d, &|row, to| {
            let values = rows.row(row).iter().zip(gains.row(norm));
            to.iter_mut().zip(values).for_each(|(to, (x, gain))| *to = (self.round)(x * gain));
        });
        (Normalized { rows, inverse_roots }, scaled)
    }

    /// A layer, from the residual stream before it.
    pub fn layer(&self, layer: usize, x: &Matrix) -> Layer {
        let (round, ff) = (self.round, self.shape.ff);
        let (before_attention, qkv_input) = self.normalize(2 * layer, x);
        let weights = self.weight(Weight::Qkv(layer));
        let mut qkv = qkv_input.times(weights.view().transpose()).rounded(round);
        self.rotate(&mut qkv, 1.0);
        let attended = self.attend(&qkv);
        let out = self.weight(Weight::Out(layer));
        let middle = attended.times(out.view().transpose()).plus(x);
        let (before_mlp, mlp_input) = self.normalize(2 * layer + 1, &middle);
        let weights = self.weight(Weight::GateUp(layer));
        let gate_up = mlp_input.times(weights.view().transpose()).rounded(round);
        let mut hidden = Matrix::zeros(self.shape.tokens(), ff);
        each_row(&mut hidden.values, ff, &|token, hidden| {
            let (gate, up) = gate_up.row(token).split_at(ff);
            for (hidden, (gate, up)) in hidden.iter_mut().zip(gate.iter().zip(up)) {
                *hidden = round(gate * sigmoid(*gate) * up);
            }
        });
        let down = self.weight(Weight::Down(layer));
        let x = hidden.times(down.view()).plus(&middle);
        Layer {
            before_attention,
            qkv_input,
            qkv,
            attended,
            before_mlp,
            mlp_input,
            gate_up,
            hidden,
            x,
        }
    }

    /// Rotates pairs of queries and keys by their position, or back.
    pub fn rotate(&self, qkv: &mut Matrix, direction: f64) {
        let Shape { d, context, .. } = self.shape;
        let (head_dim, round) = (self.shape.head_dim(), self.round);
        each_row(&mut qkv.values, 3 * d, &|token, row| {
            for head in row[..2 * d].chunks_mut(head_dim) {
                for (pair, values) in head.chunks_exact_mut(2).enumerate() {
                    let power = 2.0 * pair as f64 / head_dim as f64;
                    let angle = direction * (token % context) as f64 * ROPE_BASE.powf(-power);
                    let (sin, cos) = angle.sin_cos();
                    let [a, b] = [values[0], values[1]];
                    values[0] = round(a * cos - b * sin);
                    values[1] = round(a * sin + b * cos);
                }
            }
        });
    }

    /// `[T, d]` of queries (0), keys (1) or values (2) of a sequence's head: `[context, head_dim]`.
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

    /// Probabilities of a sequence's head, `[context, context]`.
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

    fn attend(&self, qkv: &Matrix) -> Matrix {
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
        let mut attended = Matrix::zeros(self.shape.tokens(), d);
        self.scatter(&mut attended, 0, &outputs);
        attended.rounded(self.round)
    }

    /// Writes `[context, head_dim]` of each sequence's head to its place, from the first column on.
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

    /// Logits of these tokens, padded.
    pub fn logits_of(&self, tokens: &[usize]) -> Vec<f64> {
        let padding = self.shape.padded() - self.shape.vocabulary;
        let padded = |token: &usize| {
            let row = self.logits.row(*token).iter().copied();
            row.chain(std::iter::repeat_n(0.0, padding)).collect::<Vec<_>>()
        };
        tokens.iter().flat_map(padded).collect()
    }

    /// Mean loss of each sequence.
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
