//! Forward pass on the CPU, which stores the values that the backward pass reads.

use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, multiply, multiply_f32, view};

use super::steps::{add, each_row, rms_norm, rotary_cosines_and_sines, rotate, sigmoid, softmax};
use crate::parallel;
use crate::transformer::shape::{ArenaRows, LmShape, Weight};
use kernelgate::workload::Tensors;

pub struct LayerActivations {
    /// The residual stream before the layer.
    pub x: Vec<f32>,
    pub qkv_input: Vec<f32>,
    pub qkv: Vec<f32>,
    pub attended: Vec<f32>,
    /// The residual stream between attention and SwiGLU.
    pub middle: Vec<f32>,
    pub mlp_input: Vec<f32>,
    pub gate_up: Vec<f32>,
    pub hidden: Vec<f32>,
}

/// Activations of a model in host memory.
pub struct CpuModel {
    pub shape: LmShape,
    pub table: Vec<[f32; 2]>,
    pub layers: Vec<LayerActivations>,
    /// The residual stream before the head.
    pub x: Vec<f32>,
    pub head_input: Vec<f32>,
    token_losses: Vec<f32>,
}

/// Views a tensor of the parameter arena as a matrix.
pub fn weight_matrix<'a>(shape: &LmShape, inputs: &'a Tensors, weight: Weight) -> MatRef<'a, f32> {
    let ArenaRows { first, rows, .. } = shape.arena_rows_of_weight(weight);
    view(&inputs.f32("parameters")[first * shape.d..][..rows * shape.d], rows, shape.d)
}

/// Returns the gain vector of norm number `norm`.
pub fn gain<'a>(shape: &LmShape, inputs: &'a Tensors, norm: usize) -> &'a [f32] {
    let first = shape.arena_rows_of_weight(Weight::Gains).first + norm;
    &inputs.f32("parameters")[first * shape.d..][..shape.d]
}

/// Views the queries (0), keys (1) or values (2) of a sequence's head in a tensor `[T,
/// operands·d]`.
pub fn head_matrix<'a>(
    shape: &LmShape,
    rows: &'a [f32],
    operands: usize,
    operand: usize,
    number: usize,
) -> MatRef<'a, f32> {
    let (sequence, head) = (number / shape.heads, number % shape.heads);
    let (stride, head_dim) = (operands * shape.d, shape.head_dim());
    let rows = view(rows, shape.token_count(), stride);
    let first = sequence * shape.context;
    rows.submatrix(first, operand * shape.d + head * head_dim, shape.context, head_dim)
}

/// Computes the causal probabilities of a head, `[context, context]`.
pub fn probabilities(shape: &LmShape, query: MatRef<'_, f32>, key: MatRef<'_, f32>) -> Vec<f32> {
    let context = shape.context;
    let scale = 1.0 / (shape.head_dim() as f32).sqrt();
    let mut scores = vec![0.0; context * context];
    let to = MatMut::from_row_major_slice_mut(&mut scores, context, context);
    multiply_f32(to, Accum::Replace, query, key.transpose(), scale);
    for (row, scores) in scores.chunks_mut(context).enumerate() {
        let (seen, hidden) = scores.split_at_mut(row + 1);
        softmax(seen);
        hidden.fill(0.0);
    }
    scores
}

/// Copies `[context, head_dim]` of each sequence's head into a tensor `[T, operands·d]`.
pub fn scatter(
    shape: &LmShape,
    to: &mut [f32],
    operands: usize,
    operand: usize,
    heads: &[Vec<f32>],
) {
    let (d, head_dim, context) = (shape.d, shape.head_dim(), shape.context);
    each_row(to, operands * d, &|token, row| {
        let (sequence, position) = (token / context, token % context);
        for (head, to) in row[operand * d..][..d].chunks_mut(head_dim).enumerate() {
            let values = &heads[sequence * shape.heads + head];
            to.copy_from_slice(&values[position * head_dim..][..head_dim]);
        }
    });
}

impl CpuModel {
    pub fn new(shape: &LmShape) -> Self {
        let tokens = |columns: usize| vec![0.0; shape.token_count() * columns];
        let LmShape { d, ff, layers, .. } = *shape;
        let layer = |_| LayerActivations {
            x: tokens(d),
            qkv_input: tokens(d),
            qkv: tokens(3 * d),
            attended: tokens(d),
            middle: tokens(d),
            mlp_input: tokens(d),
            gate_up: tokens(2 * ff),
            hidden: tokens(ff),
        };
        Self {
            shape: *shape,
            table: rotary_cosines_and_sines(shape),
            layers: (0..layers).map(layer).collect(),
            x: tokens(d),
            head_input: tokens(d),
            token_losses: tokens(1),
        }
    }

    /// Computes the padded logits `[T, padded]`, and the losses of the tokens.
    pub fn compute_logits_and_losses(&mut self, inputs: &Tensors, logits: &mut [f32]) {
        let shape = self.shape;
        let LmShape { d, layers, vocabulary, .. } = shape;
        let embedding = weight_matrix(&shape, inputs, Weight::Embedding);
        let tokens = inputs.f32("tokens");
        each_row(&mut self.x, d, &|token, row| {
            let from = embedding.row(tokens[token] as usize);
            row.iter_mut().zip(from.iter()).for_each(|(to, from)| *to = *from);
        });
        for layer in 0..layers {
            self.layers[layer].x.copy_from_slice(&self.x);
            self.compute_attention(layer, inputs);
            self.compute_mlp(layer, inputs);
        }
        rms_norm(&self.x, gain(&shape, inputs, 2 * layers), &mut self.head_input);
        let head = weight_matrix(&shape, inputs, Weight::Head);
        let mut unpadded = vec![0.0; shape.token_count() * vocabulary];
        multiply(&mut unpadded, view(&self.head_input, shape.token_count(), d), head.transpose());
        each_row(logits, shape.padded_vocabulary(), &|token, row| {
            row[..vocabulary].copy_from_slice(&unpadded[token * vocabulary..][..vocabulary]);
            row[vocabulary..].fill(0.0);
        });
        let targets = inputs.f32("targets");
        each_row(&mut self.token_losses, 1, &|token, loss| {
            let mut row = unpadded[token * vocabulary..][..vocabulary].to_vec();
            softmax(&mut row);
            loss[0] = -row[targets[token] as usize].ln();
        });
    }

    /// Computes the mean loss of each sequence.
    pub fn compute_sequence_losses(&self, inputs: &Tensors, losses: &mut [f32]) {
        let context = inputs.tensor("tokens").shape()[1];
        for (loss, tokens) in losses.iter_mut().zip(self.token_losses.chunks(context)) {
            *loss = tokens.iter().sum::<f32>() / context as f32;
        }
    }

    fn compute_attention(&mut self, number: usize, inputs: &Tensors) {
        let (shape, layer) = (self.shape, &mut self.layers[number]);
        let LmShape { d, heads, batch, context, .. } = shape;
        rms_norm(&layer.x, gain(&shape, inputs, 2 * number), &mut layer.qkv_input);
        let weights = weight_matrix(&shape, inputs, Weight::Qkv(number));
        let input = view(&layer.qkv_input, shape.token_count(), d);
        multiply(&mut layer.qkv, input, weights.transpose());
        rotate(&shape, &self.table, &mut layer.qkv, 1.0);
        let qkv = &layer.qkv;
        let outputs = parallel::parallel_map(batch * heads, &|number| {
            let [query, key, value] =
                [0, 1, 2].map(|operand| head_matrix(&shape, qkv, 3, operand, number));
            let p = probabilities(&shape, query, key);
            let mut out = vec![0.0; context * shape.head_dim()];
            let to = MatMut::from_row_major_slice_mut(&mut out, context, shape.head_dim());
            multiply_f32(to, Accum::Replace, view(&p, context, context), value, 1.0);
            out
        });
        scatter(&shape, &mut layer.attended, 1, 0, &outputs);
        let out = weight_matrix(&shape, inputs, Weight::Out(number));
        let attended = view(&layer.attended, shape.token_count(), d);
        multiply(&mut layer.middle, attended, out.transpose());
        add(&mut layer.middle, &layer.x);
    }

    fn compute_mlp(&mut self, number: usize, inputs: &Tensors) {
        let (shape, layer) = (self.shape, &mut self.layers[number]);
        let LmShape { d, ff, .. } = shape;
        rms_norm(&layer.middle, gain(&shape, inputs, 2 * number + 1), &mut layer.mlp_input);
        let weights = weight_matrix(&shape, inputs, Weight::GateUp(number));
        let input = view(&layer.mlp_input, shape.token_count(), d);
        multiply(&mut layer.gate_up, input, weights.transpose());
        let gate_up = &layer.gate_up;
        each_row(&mut layer.hidden, ff, &|token, hidden| {
            let (gate, up) = gate_up[token * 2 * ff..][..2 * ff].split_at(ff);
            for (hidden, (gate, up)) in hidden.iter_mut().zip(gate.iter().zip(up)) {
                *hidden = gate * sigmoid(*gate) * up;
            }
        });
        let down = weight_matrix(&shape, inputs, Weight::Down(number));
        multiply(&mut self.x, view(&layer.hidden, shape.token_count(), ff), down);
        add(&mut self.x, &layer.middle);
    }
}
