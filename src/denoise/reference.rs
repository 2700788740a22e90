//! The action expert in fp64: the reference against which every implementation is verified.
//!
//! GEMMs are those of `faer`, all other operations are written out. Matrices are converted a block
//! of columns at a time, so that there is never an fp64 copy of the whole model.

use std::f64::consts::{PI, TAU};

use kernelgate_numerics::gemm::{product, view};

use super::model::ExpertModel;
use super::shape::ActionExpertShape;
use crate::parallel;
use kernelgate::workload::Tensors;
use kernelgate::workload::tensor::split_columns;

/// Number of columns of a matrix that one task converts: with 4096 rows they are 2 MB, which stay
/// in L2.
const COLUMNS_PER_TASK: usize = 64;
/// Number of elements of an activation that one task computes.
const ELEMENTS_PER_TASK: usize = 1 << 12;
/// Number of query rows for which one task computes attention.
const QUERY_ROWS_PER_TASK: usize = 64;

/// The action expert in fp64, with its styles for the given times.
pub struct ReferenceExpert<'a> {
    shape: &'a ActionExpertShape,
    inputs: &'a Tensors,
    times: usize,
    /// Styles before each layer's attention, `[depth][times, 3W]`.
    style1: Vec<Vec<f64>>,
    /// Styles before each layer's feed-forward, `[depth][times, 3W]`.
    style2: Vec<Vec<f64>>,
    /// Style of the final norm, `[times, 3W]`.
    final_style: Vec<f64>,
}

impl<'a> ReferenceExpert<'a> {
    /// Computes the styles of all given times.
    pub fn new(shape: &'a ActionExpertShape, inputs: &'a Tensors, times: &[f64]) -> Self {
        let ExpertModel { width, depth, .. } = shape.model;
        let n = times.len();
        let silu_all = |values: Vec<f64>| values.into_iter().map(silu).collect::<Vec<_>>();
        let embedding: Vec<f64> = times.iter().flat_map(|&t| time_embedding(t, width)).collect();
        let hidden = silu_all(linear_layer(inputs, "time_in", "time_in_bias", 0, &embedding, n));
        let cond = silu_all(linear_layer(inputs, "time_out", "time_out_bias", 0, &hidden, n));
        let layers = |matrix, bias| {
            (0..depth).map(|layer| linear_layer(inputs, matrix, bias, layer, &cond, n)).collect()
        };
        Self {
            shape,
            inputs,
            times: n,
            style1: layers("style1", "style1_bias"),
            style2: layers("style2", "style2_bias"),
            final_style: linear_layer(inputs, "final_style", "final_style_bias", 0, &cond, n),
        }
    }

    /// Computes the velocity `[S, 32]` of actions `x [S, 32]` at time number `time`.
    pub fn velocity(&self, x: &[f64], time: usize) -> Vec<f64> {
        assert!(time < self.times, "time {time} of {}", self.times);
        let ActionExpertShape { model, s, .. } = *self.shape;
        let mut h = linear_layer(self.inputs, "action_in", "action_in_bias", 0, x, s);
        for layer in 0..model.depth {
            let style = ReferenceStyleRows::at(&self.style1[layer], time, model.width);
            let attended = self.layer_attention(layer, &ada_rms(&h, &style));
            add_gated(&mut h, &self.layer_product("o_proj", layer, &attended), style.gate);

            let style = ReferenceStyleRows::at(&self.style2[layer], time, model.width);
            let y = ada_rms(&h, &style);
            let mut hidden = self.layer_product("gate_proj", layer, &y);
            let up = self.layer_product("up_proj", layer, &y);
            parallel::for_each_chunk(&mut hidden, ELEMENTS_PER_TASK, &|number, gates| {
                let gates = gates.iter_mut().zip(&up[number * ELEMENTS_PER_TASK..]);
                gates.for_each(|(gate, up)| *gate = gelu_tanh(*gate) * up);
            });
            add_gated(&mut h, &self.layer_product("down_proj", layer, &hidden), style.gate);
        }
        let y = ada_rms(&h, &ReferenceStyleRows::at(&self.final_style, time, model.width));
        linear_layer(self.inputs, "action_out", "action_out_bias", 0, &y, s)
    }

    /// Computes `softmax(q·kᵀ/√E)·v` over the prefix and the suffix, from `y [S, W]` to `[S, H·E]`.
    /// All query heads use one key-value head.
    fn layer_attention(&self, layer: usize, y: &[f64]) -> Vec<f64> {
        let ActionExpertShape { model: ExpertModel { heads, head_dim, .. }, p, .. } = *self.shape;
        let cached = |name| self.inputs.tensor(name).to_f64(layer * p * head_dim, p * head_dim);
        // Rows of q are (position, head) pairs: the heads of a position are contiguous, so no copy
        // is needed.
        let mut q = self.layer_product("q_proj", layer, y);
        apply_rope_to_rows(&mut q, head_dim, |row| p + row / heads);
        let mut suffix = self.layer_product("k_proj", layer, y);
        apply_rope_to_rows(&mut suffix, head_dim, |row| p + row);
        let k = [cached("k_cache"), suffix].concat();
        let v = [cached("v_cache"), self.layer_product("v_proj", layer, y)].concat();

        let context = p + self.shape.s;
        let keys = view(&k, context, head_dim).transpose();
        let values = view(&v, context, head_dim);
        let scale = 1.0 / (head_dim as f64).sqrt();
        let block = |q: &[f64]| {
            let rows = q.len() / head_dim;
            let mut scores = product(view(q, rows, head_dim), keys);
            scores.chunks_mut(context).for_each(|row| scaled_softmax_in_place(row, scale));
            product(view(&scores, rows, context), values)
        };
        let pieces: Vec<&[f64]> = q.chunks(QUERY_ROWS_PER_TASK * head_dim).collect();
        parallel::parallel_map(pieces.len(), &|number| block(pieces[number])).concat()
    }

    fn layer_product(&self, name: &str, layer: usize, x: &[f64]) -> Vec<f64> {
        matmul(self.inputs, name, layer, x, self.shape.s)
    }
}

/// Times of a loop: 1 first, then each lower by `1/steps`.
pub fn denoising_times(steps: usize) -> Vec<f64> {
    let dt = -1.0 / steps as f64;
    std::iter::successors(Some(1.0), |t| Some(t + dt)).take(steps).collect()
}

/// Repeats `x += dt·velocity(x, step)` for `steps` steps, with `dt = -1/steps`.
pub fn euler_steps(
    steps: usize,
    mut x: Vec<f64>,
    mut velocity: impl FnMut(&[f64], usize) -> Vec<f64>,
) -> Vec<f64> {
    let dt = -1.0 / steps as f64;
    for step in 0..steps {
        let v = velocity(&x, step);
        x.iter_mut().zip(v).for_each(|(x, v)| *x += dt * v);
    }
    x
}

/// Computes the time embedding `[sin(2πt/period), cos(2πt/period)]` with `width / 2` periods from
/// 4e-3 to 4, in geometric steps.
pub fn time_embedding(t: f64, width: usize) -> Vec<f64> {
    let (shortest, longest) = (4e-3f64, 4.0f64);
    let count = width / 2;
    let angle = |i: usize| {
        let fraction = if count > 1 { i as f64 / (count - 1) as f64 } else { 0.0 };
        TAU * t / (shortest * (longest / shortest).powf(fraction))
    };
    (0..count).map(|i| angle(i).sin()).chain((0..count).map(|i| angle(i).cos())).collect()
}

/// Style of one adaRMS norm: scale, shift and gate, `[W]` each.
#[derive(Debug, Clone, Copy)]
pub struct ReferenceStyleRows<'a> {
    /// Scale: the normalised row is multiplied by 1 plus this.
    pub scale: &'a [f64],
    /// Shift of adaRMS, added after the scaling.
    pub shift: &'a [f64],
    /// Gate: factor of the branch that begins with the norm.
    pub gate: &'a [f64],
}

impl<'a> ReferenceStyleRows<'a> {
    /// Row `time` of the styles `[times, 3W]`.
    fn at(styles: &'a [f64], time: usize, width: usize) -> Self {
        let mut parts = styles[time * 3 * width..].chunks(width);
        let mut part = || parts.next().expect("a style has three parts");
        Self { scale: part(), shift: part(), gate: part() }
    }
}

/// Computes `x·rsqrt(mean x² + 1e-6)·(1 + scale) + shift`, row by row.
pub fn ada_rms(x: &[f64], style: &ReferenceStyleRows) -> Vec<f64> {
    let width = style.scale.len();
    let mut y = x.to_vec();
    for row in y.chunks_mut(width) {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / width as f64;
        let factor = 1.0 / (mean + 1e-6).sqrt();
        for (i, x) in row.iter_mut().enumerate() {
            *x = *x * factor * (1.0 + style.scale[i]) + style.shift[i];
        }
    }
    y
}

/// Rotates the pairs `(i, i + E/2)` of every row of `[rows, E]` by `position / 1e4^(2i/E)` (RoPE).
pub fn apply_rope_to_rows(x: &mut [f64], head_dim: usize, position: impl Fn(usize) -> usize) {
    let half = head_dim / 2;
    for (row, x) in x.chunks_mut(head_dim).enumerate() {
        let (first, second) = x.split_at_mut(half);
        for (i, (a, b)) in first.iter_mut().zip(second).enumerate() {
            let angle = position(row) as f64 / 1e4f64.powf(i as f64 / half as f64);
            let (sin, cos) = angle.sin_cos();
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

/// Activation SiLU, `x / (1 + e^-x)`.
pub fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Activation GELU by tanh, `x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`.
pub fn gelu_tanh(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

/// Computes `softmax(scale·row)` in place.
pub fn scaled_softmax_in_place(row: &mut [f64], scale: f64) {
    let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    row.iter_mut().for_each(|x| *x = (scale * (*x - largest)).exp());
    let sum: f64 = row.iter().sum();
    row.iter_mut().for_each(|x| *x /= sum);
}

/// Adds a gated branch, `h += gate·branch`, row by row.
fn add_gated(h: &mut [f64], branch: &[f64], gate: &[f64]) {
    for (h, branch) in h.chunks_mut(gate.len()).zip(branch.chunks(gate.len())) {
        for ((h, branch), gate) in h.iter_mut().zip(branch).zip(gate) {
            *h += gate * branch;
        }
    }
}

/// Computes `x·W + b`, with the matrix and bias number `layer` of their stacks.
fn linear_layer(
    inputs: &Tensors,
    matrix: &str,
    bias: &str,
    layer: usize,
    x: &[f64],
    rows: usize,
) -> Vec<f64> {
    let mut y = matmul(inputs, matrix, layer, x, rows);
    let columns = y.len() / rows;
    let bias = inputs.tensor(bias).to_f64(layer * columns, columns);
    y.chunks_mut(columns).for_each(|row| row.iter_mut().zip(&bias).for_each(|(y, b)| *y += b));
    y
}

/// Computes `x·W`, with matrix number `layer` of a stack and `rows` rows of `x`. Each task converts
/// and multiplies a block of weight columns.
pub(super) fn matmul(
    inputs: &Tensors,
    name: &str,
    layer: usize,
    x: &[f64],
    rows: usize,
) -> Vec<f64> {
    let tensor = inputs.tensor(name);
    let [.., inner, columns] = *tensor.shape() else { panic!("`{name}` is a matrix") };
    let x = view(x, rows, inner);
    let mut y = vec![0.0; rows * columns];
    parallel::for_each_task(split_columns(&mut y, columns, COLUMNS_PER_TASK), &|block, mut y| {
        let width = y[0].len();
        let mut w = Vec::with_capacity(inner * width);
        for row in 0..inner {
            w.extend(
                tensor.to_f64((layer * inner + row) * columns + block * COLUMNS_PER_TASK, width),
            );
        }
        let product = product(x, view(&w, inner, width));
        y.iter_mut().zip(product.chunks(width)).for_each(|(y, row)| y.copy_from_slice(row));
    });
    y
}
