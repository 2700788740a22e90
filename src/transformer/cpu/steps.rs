//! Elementwise and row operations between the GEMMs of the language model on the CPU, on all
//! threads.

use crate::math::vectorisable_exp;
use crate::parallel;
use crate::transformer::shape::{LanguageModelShape, RMS_NORM_EPSILON, ROPE_WAVELENGTH_BASE};

/// Number of elements that one parallel CPU task of the language model computes.
const ELEMENTS_PER_CPU_TASK: usize = 1 << 12;

/// Calls `f(row, values)` in parallel for each row of a row-major slice with `columns` columns.
pub fn process_rows_in_parallel(
    values: &mut [f32],
    columns: usize,
    f: &(dyn Fn(usize, &mut [f32]) + Sync),
) {
    let rows = ELEMENTS_PER_CPU_TASK.div_ceil(columns);
    parallel::process_chunks_in_parallel(values, rows * columns, &|number, chunk| {
        for (row, values) in chunk.chunks_mut(columns).enumerate() {
            f(number * rows + row, values);
        }
    });
}

pub fn add_elementwise(to: &mut [f32], values: &[f32]) {
    to.iter_mut().zip(values).for_each(|(to, value)| *to += value);
}

pub fn sigmoid_of_f32(x: f32) -> f32 {
    1.0 / (1.0 + vectorisable_exp(-x))
}

/// Returns the inverse root mean square of a row, 1 / sqrt(mean x² + epsilon).
pub fn inverse_root_mean_square(row: &[f32]) -> f32 {
    let sum: f32 = row.iter().map(|x| x * x).sum();
    1.0 / (sum / row.len() as f32 + RMS_NORM_EPSILON as f32).sqrt()
}

/// Computes RMSNorm of each row, `x · inverse_rms(x) · gain`.
pub fn rms_norm_of_rows(x: &[f32], gain: &[f32], out: &mut [f32]) {
    let d = gain.len();
    process_rows_in_parallel(out, d, &|row, out| {
        let x = &x[row * d..][..d];
        let root = inverse_root_mean_square(x);
        out.iter_mut().zip(x.iter().zip(gain)).for_each(|(out, (x, gain))| *out = x * root * gain);
    });
}

/// Adds the gradients of an RMSNorm's input rows to `grad_x`, and adds the gain's gradient to
/// `grad_gain`, which must be 0 before.
pub fn add_rms_norm_gradients(
    x: &[f32],
    gain: &[f32],
    grad: &[f32],
    grad_x: &mut [f32],
    grad_gain: &mut [f32],
) {
    let d = gain.len();
    process_rows_in_parallel(grad_x, d, &|row, to| {
        let (x, grad) = (&x[row * d..][..d], &grad[row * d..][..d]);
        let root = inverse_root_mean_square(x);
        let products = || grad.iter().zip(gain).zip(x);
        let sum: f32 = products().map(|((grad, gain), x)| grad * gain * x).sum();
        let mean = sum * root * root / d as f32;
        for (to, ((grad, gain), x)) in to.iter_mut().zip(products()) {
            *to += root * (grad * gain - x * mean);
        }
    });
    for (x, grad) in x.chunks(d).zip(grad.chunks(d)) {
        let root = inverse_root_mean_square(x);
        for (to, (x, grad)) in grad_gain.iter_mut().zip(x.iter().zip(grad)) {
            *to += grad * x * root;
        }
    }
}

/// Computes the RoPE cosine and sine of every position and pair of head elements.
pub fn rope_cosines_and_sines(shape: &LanguageModelShape) -> Vec<[f32; 2]> {
    let head_dim = shape.elements_per_head();
    let angle = |position: usize, pair: usize| {
        let (sin, cos) = (position as f64
            * ROPE_WAVELENGTH_BASE.powf(-2.0 * pair as f64 / head_dim as f64))
        .sin_cos();
        [cos as f32, sin as f32]
    };
    let pairs = head_dim / 2;
    (0..shape.context_tokens * pairs).map(|index| angle(index / pairs, index % pairs)).collect()
}

/// Applies RoPE to the queries and keys in `[T, 3·d]`; with `direction` -1 it applies the inverse
/// rotation.
pub fn apply_rope_to_queries_and_keys(
    shape: &LanguageModelShape,
    table: &[[f32; 2]],
    qkv: &mut [f32],
    direction: f32,
) {
    let (d, pairs) = (shape.model_width, shape.elements_per_head() / 2);
    process_rows_in_parallel(qkv, 3 * d, &|token, row| {
        let table = &table[token % shape.context_tokens * pairs..][..pairs];
        for head in row[..2 * d].chunks_mut(2 * pairs) {
            for (values, [cos, sin]) in head.chunks_exact_mut(2).zip(table) {
                let ([a, b], sin) = ([values[0], values[1]], sin * direction);
                values.copy_from_slice(&[a * cos - b * sin, a * sin + b * cos]);
            }
        }
    });
}

pub fn softmax_in_place_f32(row: &mut [f32]) {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter_mut().for_each(|x| *x = vectorisable_exp(*x - largest));
    let sum: f32 = row.iter().sum();
    row.iter_mut().for_each(|x| *x /= sum);
}
