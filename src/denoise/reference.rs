//! The denoising action expert in fp64: the reference against which every implementation is
//! verified.
//!
//! The reference uses GEMMs of the crate `faer`; all other operations are plain loops. The
//! reference converts a block of columns of a weight matrix at a time, so an fp64 copy of the whole
//! model never exists.

use std::f64::consts::{PI, TAU};

use kernelgate_numerics::gemm::{row_major_matrix_view, row_major_product_f64};

use super::model::ExpertDimensions;
use super::shape::DenoiseParameters;
use crate::parallel;
use kernelgate::workload::Tensors;
use kernelgate::workload::tensor::split_rows_into_column_blocks;

/// Number of weight columns that one parallel CPU task converts to fp64: with 4096 rows they are 2
/// MB, which stay in L2.
const WEIGHT_COLUMNS_PER_TASK: usize = 64;
/// Number of elements of an activation that one parallel CPU task of the reference computes.
const ACTIVATION_ELEMENTS_PER_TASK: usize = 1 << 12;
/// Number of query rows for which one parallel CPU task of the reference computes attention.
const ATTENTION_QUERY_ROWS_PER_TASK: usize = 64;

/// The denoising action expert in fp64, with the norm styles of given denoising times.
pub struct ReferenceActionExpert<'a> {
    shape: &'a DenoiseParameters,
    inputs: &'a Tensors,
    denoising_time_count: usize,
    /// Styles of the norm before each layer's attention, `[depth][times, 3W]`.
    attention_norm_styles: Vec<Vec<f64>>,
    /// Styles of the norm before each layer's feed-forward, `[depth][times, 3W]`.
    feed_forward_norm_styles: Vec<Vec<f64>>,
    /// Style of the final norm for each denoising time, `[times, 3W]`.
    final_norm_styles: Vec<f64>,
}

impl<'a> ReferenceActionExpert<'a> {
    /// Creates the fp64 expert and computes its norm styles for all given denoising times.
    pub fn with_styles_of_times(
        shape: &'a DenoiseParameters,
        inputs: &'a Tensors,
        times: &[f64],
    ) -> Self {
        let ExpertDimensions { model_width: width, layer_count: depth, .. } = shape.model;
        let n = times.len();
        let silu_all =
            |values: Vec<f64>| values.into_iter().map(silu_activation).collect::<Vec<_>>();
        let embedding: Vec<f64> =
            times.iter().flat_map(|&t| sinusoidal_time_embedding(t, width)).collect();
        let hidden =
            silu_all(reference_linear_layer(inputs, "time_in", "time_in_bias", 0, &embedding, n));
        let cond =
            silu_all(reference_linear_layer(inputs, "time_out", "time_out_bias", 0, &hidden, n));
        let layers = |matrix, bias| {
            (0..depth)
                .map(|layer| reference_linear_layer(inputs, matrix, bias, layer, &cond, n))
                .collect()
        };
        Self {
            shape,
            inputs,
            denoising_time_count: n,
            attention_norm_styles: layers("style1", "style1_bias"),
            feed_forward_norm_styles: layers("style2", "style2_bias"),
            final_norm_styles: reference_linear_layer(
                inputs,
                "final_style",
                "final_style_bias",
                0,
                &cond,
                n,
            ),
        }
    }

    /// Computes the fp64 velocity `[S, 32]` of actions `x [S, 32]` at denoising time number `time`.
    pub fn reference_velocity(&self, x: &[f64], time: usize) -> Vec<f64> {
        assert!(time < self.denoising_time_count, "time {time} of {}", self.denoising_time_count);
        let DenoiseParameters { model, action_tokens: s, .. } = *self.shape;
        let mut h = reference_linear_layer(self.inputs, "action_in", "action_in_bias", 0, x, s);
        for layer in 0..model.layer_count {
            let style = AdaptiveNormStyle::style_at_time(
                &self.attention_norm_styles[layer],
                time,
                model.model_width,
            );
            let attended = self.reference_layer_attention(layer, &ada_rms_norm_of_rows(&h, &style));
            add_gated_branch_to_rows(
                &mut h,
                &self.multiply_by_layer_matrix("o_proj", layer, &attended),
                style.branch_gate,
            );

            let style = AdaptiveNormStyle::style_at_time(
                &self.feed_forward_norm_styles[layer],
                time,
                model.model_width,
            );
            let y = ada_rms_norm_of_rows(&h, &style);
            let mut hidden = self.multiply_by_layer_matrix("gate_proj", layer, &y);
            let up = self.multiply_by_layer_matrix("up_proj", layer, &y);
            parallel::process_chunks_in_parallel(
                &mut hidden,
                ACTIVATION_ELEMENTS_PER_TASK,
                &|number, gates| {
                    let gates = gates.iter_mut().zip(&up[number * ACTIVATION_ELEMENTS_PER_TASK..]);
                    gates.for_each(|(gate, up)| *gate = gelu_tanh_activation(*gate) * up);
                },
            );
            add_gated_branch_to_rows(
                &mut h,
                &self.multiply_by_layer_matrix("down_proj", layer, &hidden),
                style.branch_gate,
            );
        }
        let y = ada_rms_norm_of_rows(
            &h,
            &AdaptiveNormStyle::style_at_time(&self.final_norm_styles, time, model.model_width),
        );
        reference_linear_layer(self.inputs, "action_out", "action_out_bias", 0, &y, s)
    }

    /// Computes one layer's `softmax(q·kᵀ/√E)·v` over the prefix and the suffix, from the
    /// normalised `y [S, W]` to `[S, H·E]`. All query heads of the expert share one key-value head.
    fn reference_layer_attention(&self, layer: usize, y: &[f64]) -> Vec<f64> {
        let DenoiseParameters {
            model: ExpertDimensions { query_heads: heads, head_dim, .. },
            prefix_tokens: p,
            ..
        } = *self.shape;
        let cached =
            |name| self.inputs.tensor(name).elements_to_f64(layer * p * head_dim, p * head_dim);
        // Rows of q are (position, head) pairs: the heads of a position are contiguous, so the
        // attention GEMM needs no copy of q.
        let mut q = self.multiply_by_layer_matrix("q_proj", layer, y);
        apply_rope_to_rows(&mut q, head_dim, |row| p + row / heads);
        let mut suffix = self.multiply_by_layer_matrix("k_proj", layer, y);
        apply_rope_to_rows(&mut suffix, head_dim, |row| p + row);
        let k = [cached("k_cache"), suffix].concat();
        let v = [cached("v_cache"), self.multiply_by_layer_matrix("v_proj", layer, y)].concat();

        let context = p + self.shape.action_tokens;
        let keys = row_major_matrix_view(&k, context, head_dim).transpose();
        let values = row_major_matrix_view(&v, context, head_dim);
        let scale = 1.0 / (head_dim as f64).sqrt();
        let block = |q: &[f64]| {
            let rows = q.len() / head_dim;
            let mut scores = row_major_product_f64(row_major_matrix_view(q, rows, head_dim), keys);
            scores.chunks_mut(context).for_each(|row| softmax_of_scaled_row_in_place(row, scale));
            row_major_product_f64(row_major_matrix_view(&scores, rows, context), values)
        };
        let pieces: Vec<&[f64]> = q.chunks(ATTENTION_QUERY_ROWS_PER_TASK * head_dim).collect();
        parallel::map_numbers_in_parallel(pieces.len(), &|number| block(pieces[number])).concat()
    }

    fn multiply_by_layer_matrix(&self, name: &str, layer: usize, x: &[f64]) -> Vec<f64> {
        multiply_rows_by_layer_matrix(self.inputs, name, layer, x, self.shape.action_tokens)
    }
}

/// Times of a denoising loop's steps: 1 first, then each lower by `1/steps`.
pub fn times_of_denoising_steps_in_f64(steps: usize) -> Vec<f64> {
    let dt = -1.0 / steps as f64;
    std::iter::successors(Some(1.0), |t| Some(t + dt)).take(steps).collect()
}

/// Runs the denoising loop: repeats `x += dt·velocity(x, step)` for `steps` steps, with `dt =
/// -1/steps`.
pub fn integrate_by_euler_steps(
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

/// Computes the sinusoidal embedding of a denoising time, `[sin(2πt/period), cos(2πt/period)]`,
/// with `width / 2` geometrically spaced periods from 4e-3 to 4.
pub fn sinusoidal_time_embedding(t: f64, width: usize) -> Vec<f64> {
    let (shortest, longest) = (4e-3f64, 4.0f64);
    let count = width / 2;
    let angle = |i: usize| {
        let fraction = if count > 1 { i as f64 / (count - 1) as f64 } else { 0.0 };
        TAU * t / (shortest * (longest / shortest).powf(fraction))
    };
    (0..count).map(|i| angle(i).sin()).chain((0..count).map(|i| angle(i).cos())).collect()
}

/// Style of one adaptive RMS norm (adaRMS) at one denoising time: scale, shift and gate, `[W]`
/// each.
#[derive(Debug, Clone, Copy)]
pub struct AdaptiveNormStyle<'a> {
    /// Scale of the adaptive RMS norm; the normalised row is multiplied by 1 + scale.
    pub norm_scale: &'a [f64],
    /// Shift of the adaptive RMS norm, added after the scaling.
    pub norm_shift: &'a [f64],
    /// Gate by which the layer branch after this norm is multiplied.
    pub branch_gate: &'a [f64],
}

impl<'a> AdaptiveNormStyle<'a> {
    /// Reads the style of denoising time number `time` from styles `[times, 3W]`.
    fn style_at_time(styles: &'a [f64], time: usize, width: usize) -> Self {
        let mut parts = styles[time * 3 * width..].chunks(width);
        let mut part = || parts.next().expect("a style has three parts");
        Self { norm_scale: part(), norm_shift: part(), branch_gate: part() }
    }
}

/// Computes the adaptive RMS norm `x·rsqrt(mean x² + 1e-6)·(1 + scale) + shift` of every row in
/// fp64.
pub fn ada_rms_norm_of_rows(x: &[f64], style: &AdaptiveNormStyle) -> Vec<f64> {
    let width = style.norm_scale.len();
    let mut y = x.to_vec();
    for row in y.chunks_mut(width) {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / width as f64;
        let factor = 1.0 / (mean + 1e-6).sqrt();
        for (i, x) in row.iter_mut().enumerate() {
            *x = *x * factor * (1.0 + style.norm_scale[i]) + style.norm_shift[i];
        }
    }
    y
}

/// Applies RoPE to every row of `[rows, E]`: rotates the pairs `(i, i + E/2)` by the angle
/// `position / 1e4^(2i/E)`.
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

/// SiLU activation function, `x / (1 + e^-x)`, in fp64.
pub fn silu_activation(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// GELU activation function in its tanh form, `x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`, in fp64.
pub fn gelu_tanh_activation(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

/// Computes `softmax(scale·row)` in place.
pub fn softmax_of_scaled_row_in_place(row: &mut [f64], scale: f64) {
    let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    row.iter_mut().for_each(|x| *x = (scale * (*x - largest)).exp());
    let sum: f64 = row.iter().sum();
    row.iter_mut().for_each(|x| *x /= sum);
}

/// Adds a gated layer branch to the residual stream in fp64, `h += gate·branch`, row by row.
fn add_gated_branch_to_rows(h: &mut [f64], branch: &[f64], gate: &[f64]) {
    for (h, branch) in h.chunks_mut(gate.len()).zip(branch.chunks(gate.len())) {
        for ((h, branch), gate) in h.iter_mut().zip(branch).zip(gate) {
            *h += gate * branch;
        }
    }
}

/// Computes `x·W + b` in fp64, with the matrix and bias of layer number `layer`.
fn reference_linear_layer(
    inputs: &Tensors,
    matrix: &str,
    bias: &str,
    layer: usize,
    x: &[f64],
    rows: usize,
) -> Vec<f64> {
    let mut y = multiply_rows_by_layer_matrix(inputs, matrix, layer, x, rows);
    let columns = y.len() / rows;
    let bias = inputs.tensor(bias).elements_to_f64(layer * columns, columns);
    y.chunks_mut(columns).for_each(|row| row.iter_mut().zip(&bias).for_each(|(y, b)| *y += b));
    y
}

/// Computes `x·W` in fp64 for `rows` rows of x, with the matrix of layer number `layer` from a
/// stack. Each parallel CPU task converts a block of weight columns to fp64 and multiplies by it.
pub(super) fn multiply_rows_by_layer_matrix(
    inputs: &Tensors,
    name: &str,
    layer: usize,
    x: &[f64],
    rows: usize,
) -> Vec<f64> {
    let tensor = inputs.tensor(name);
    let [.., inner, columns] = *tensor.shape() else { panic!("`{name}` is a matrix") };
    let x = row_major_matrix_view(x, rows, inner);
    let mut y = vec![0.0; rows * columns];
    parallel::run_tasks_in_parallel(
        split_rows_into_column_blocks(&mut y, columns, WEIGHT_COLUMNS_PER_TASK),
        &|block, mut y| {
            let width = y[0].len();
            let mut w = Vec::with_capacity(inner * width);
            for row in 0..inner {
                w.extend(tensor.elements_to_f64(
                    (layer * inner + row) * columns + block * WEIGHT_COLUMNS_PER_TASK,
                    width,
                ));
            }
            let product = row_major_product_f64(x, row_major_matrix_view(&w, inner, width));
            y.iter_mut().zip(product.chunks(width)).for_each(|(y, row)| y.copy_from_slice(row));
        },
    );
    y
}
