//! Elementwise and row operations between the GEMMs of the denoising expert on the CPU, written to
//! vectorise inside a `pulp` dispatch.

use crate::math::{vectorisable_exp, vectorisable_gelu_tanh};

/// Number of independent partial results that a sum or maximum over a row keeps, so that it
/// vectorises and its additions overlap.
const PARTIAL_RESULTS_PER_REDUCTION: usize = 64;

/// Slices of the scale, shift and gate of one adaptive RMS norm (adaRMS), `[W]` each for model
/// width W.
#[derive(Clone, Copy)]
pub struct AdaptiveNormStyleSlices<'a> {
    pub norm_scale: &'a [f32],
    pub norm_shift: &'a [f32],
    pub branch_gate: &'a [f32],
}

impl<'a> AdaptiveNormStyleSlices<'a> {
    /// Splits a style row `[3W]` into its scale, shift and gate, `[W]` each.
    pub fn split_style_row(row: &'a [f32]) -> AdaptiveNormStyleSlices<'a> {
        let width = row.len() / 3;
        Self {
            norm_scale: &row[..width],
            norm_shift: &row[width..2 * width],
            branch_gate: &row[2 * width..],
        }
    }
}

/// Computes the adaptive RMS norm (adaRMS) of one row: `y = x·rsqrt(mean x² + 1e-6)·(1 + scale) +
/// shift`.
#[inline(always)]
pub fn ada_rms_norm_of_row(y: &mut [f32], x: &[f32], style: &AdaptiveNormStyleSlices) {
    let squares = reduce_values_in_lanes(x, 0.0, |sum, x| sum + x * x, |a, b| a + b);
    let factor = 1.0 / (squares / x.len() as f32 + 1e-6).sqrt();
    for (((y, x), scale), shift) in y.iter_mut().zip(x).zip(style.norm_scale).zip(style.norm_shift)
    {
        *y = x * factor * (1.0 + scale) + shift;
    }
}

/// Rotates the pairs `(i, i + E/2)` of one head's vector of E elements by the angles of its
/// position (RoPE).
#[inline(always)]
pub fn apply_rope_to_head(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = x.split_at_mut(cos.len());
    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// Replaces each attention score of a row by `e^(score - maximum)`, and returns the inverse of the
/// sum of these exponentials.
#[inline(always)]
pub fn exponentials_and_inverse_sum(scores: &mut [f32]) -> f32 {
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let largest = reduce_values_in_lanes(scores, f32::NEG_INFINITY, larger, larger);
    scores.iter_mut().for_each(|x| *x = vectorisable_exp(*x - largest));
    1.0 / reduce_values_in_lanes(scores, 0.0, |sum, x| sum + x, |a, b| a + b)
}

/// Computes `gate = gelu_tanh(gate)·up` elementwise in place.
#[inline(always)]
pub fn multiply_gelu_of_gate_by_up(gate: &mut [f32], up: &[f32]) {
    gate.iter_mut().zip(up).for_each(|(gate, up)| *gate = vectorisable_gelu_tanh(*gate) * up);
}

/// Adds a gated layer branch to the residual stream h: `h += gate·branch`.
#[inline(always)]
pub fn add_gated_branch(h: &mut [f32], gate: &[f32], branch: &[f32]) {
    h.iter_mut().zip(gate).zip(branch).for_each(|((h, gate), branch)| *h += gate * branch);
}

/// Adds a bias to y and applies SiLU, `y = silu(y + bias)`, in place.
#[inline(always)]
pub fn add_bias_and_apply_silu(y: &mut [f32], bias: &[f32]) {
    y.iter_mut().zip(bias).for_each(|(y, bias)| {
        let x = *y + bias;
        *y = x / (1.0 + vectorisable_exp(-x));
    });
}

/// Adds the bias: `y += bias`.
#[inline(always)]
pub fn add_bias_in_place(y: &mut [f32], bias: &[f32]) {
    y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
}

#[inline(always)]
fn reduce_values_in_lanes(
    values: &[f32],
    start: f32,
    step: impl Fn(f32, f32) -> f32,
    join: impl Fn(f32, f32) -> f32,
) -> f32 {
    let mut lanes = [start; PARTIAL_RESULTS_PER_REDUCTION];
    let (chunks, rest) = values.as_chunks::<PARTIAL_RESULTS_PER_REDUCTION>();
    for chunk in chunks {
        for lane in 0..PARTIAL_RESULTS_PER_REDUCTION {
            lanes[lane] = step(lanes[lane], chunk[lane]);
        }
    }
    let joined = lanes.into_iter().fold(start, join);
    rest.iter().fold(joined, |all, &x| step(all, x))
}
