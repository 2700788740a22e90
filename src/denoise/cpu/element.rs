//! Operations between the GEMMs of the action expert, row by row, written to vectorise inside a
//! `pulp` dispatch.

use crate::math::{exp, gelu_tanh};

/// Number of partial results that a reduction keeps, so that it vectorises and its additions
/// overlap.
const REDUCTION_LANES: usize = 64;

/// Scale, shift and gate of one adaRMS norm, `[W]` each.
#[derive(Clone, Copy)]
pub struct CpuStyle<'a> {
    pub scale: &'a [f32],
    pub shift: &'a [f32],
    pub gate: &'a [f32],
}

impl<'a> CpuStyle<'a> {
    /// Splits a style row `[3W]` into scale, shift and gate.
    pub fn from_row(row: &'a [f32]) -> CpuStyle<'a> {
        let width = row.len() / 3;
        Self { scale: &row[..width], shift: &row[width..2 * width], gate: &row[2 * width..] }
    }
}

/// Computes adaRMS of one row: `y = x·rsqrt(mean x² + 1e-6)·(1 + scale) + shift`.
#[inline(always)]
pub fn ada_rms(y: &mut [f32], x: &[f32], style: &CpuStyle) {
    let squares = reduce_values(x, 0.0, |sum, x| sum + x * x, |a, b| a + b);
    let factor = 1.0 / (squares / x.len() as f32 + 1e-6).sqrt();
    for (((y, x), scale), shift) in y.iter_mut().zip(x).zip(style.scale).zip(style.shift) {
        *y = x * factor * (1.0 + scale) + shift;
    }
}

/// Rotates the pairs `(i, i + E/2)` of one head by the angles of its position (RoPE).
#[inline(always)]
pub fn apply_rope_to_head(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = x.split_at_mut(cos.len());
    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// Replaces scores by `e^(score - maximum)` and returns the inverse of their sum.
#[inline(always)]
pub fn softmax_unscaled(scores: &mut [f32]) -> f32 {
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let largest = reduce_values(scores, f32::NEG_INFINITY, larger, larger);
    scores.iter_mut().for_each(|x| *x = exp(*x - largest));
    1.0 / reduce_values(scores, 0.0, |sum, x| sum + x, |a, b| a + b)
}

/// Computes `gate = gelu_tanh(gate)·up` in place.
#[inline(always)]
pub fn gelu_times(gate: &mut [f32], up: &[f32]) {
    gate.iter_mut().zip(up).for_each(|(gate, up)| *gate = gelu_tanh(*gate) * up);
}

/// Adds a gated branch to the residual stream: `h += gate·branch`.
#[inline(always)]
pub fn add_gated(h: &mut [f32], gate: &[f32], branch: &[f32]) {
    h.iter_mut().zip(gate).zip(branch).for_each(|((h, gate), branch)| *h += gate * branch);
}

/// Computes `y = silu(y + bias)` in place.
#[inline(always)]
pub fn silu_biased(y: &mut [f32], bias: &[f32]) {
    y.iter_mut().zip(bias).for_each(|(y, bias)| {
        let x = *y + bias;
        *y = x / (1.0 + exp(-x));
    });
}

/// Adds the bias: `y += bias`.
#[inline(always)]
pub fn add(y: &mut [f32], bias: &[f32]) {
    y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
}

#[inline(always)]
fn reduce_values(
    values: &[f32],
    start: f32,
    step: impl Fn(f32, f32) -> f32,
    join: impl Fn(f32, f32) -> f32,
) -> f32 {
    let mut lanes = [start; REDUCTION_LANES];
    let (chunks, rest) = values.as_chunks::<REDUCTION_LANES>();
    for chunk in chunks {
        for lane in 0..REDUCTION_LANES {
            lanes[lane] = step(lanes[lane], chunk[lane]);
        }
    }
    let joined = lanes.into_iter().fold(start, join);
    rest.iter().fold(joined, |all, &x| step(all, x))
}
