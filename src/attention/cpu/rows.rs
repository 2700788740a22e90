//! Operations on rows of scores between the GEMMs. Each step is a type of its own with its work in
//! an inlined `call`, because `Arch::dispatch` compiles for the widest SIMD only code that it can
//! inline, and a large closure is not inlined.
//!
//! Exponentials are powers of two, the factor log2(e) folded into the scaling that every score
//! needs anyway.

use std::array::from_fn;
use std::f32::consts::LOG2_E;

use pulp::NullaryFnOnce;

use super::blocks::KEYS;
use crate::attention::definition::Attention;
use crate::math::{exp2, max_ignoring_nan};

/// Partial results that a reduction keeps apart, so that it vectorises.
const LANES: usize = 16;

/// Part of the scores of a block of queries.
pub(super) struct Tile {
    /// First key.
    pub key: usize,
    /// How many keys.
    pub keys: usize,
    /// First query.
    pub query: usize,
    /// Queries of the block before the first one that sees a key.
    pub hidden: usize,
    /// How many queries.
    pub queries: usize,
    /// Factor of the scores: 1 / sqrt(d).
    pub scale: f32,
    /// Whether query i sees keys up to `ahead + i` only.
    pub causal: bool,
    /// Keys that query 0 of the head sees before its own, if causal.
    pub ahead: usize,
}

impl Tile {
    /// The tile that starts at a key, for the block of `rows` queries from `first`; `None` if the
    /// block sees no such key.
    pub(super) fn new(
        attention: &Attention,
        first: usize,
        rows: usize,
        key: usize,
    ) -> Option<Self> {
        let Attention { keys, d, causal, .. } = *attention;
        let ahead = attention.keys_before_first_query();
        let hidden = if causal { key.saturating_sub(first + ahead) } else { 0 };
        let end = if causal { first + rows + ahead } else { keys };
        let scale = 1.0 / (d as f32).sqrt();
        (key < end).then(|| Self {
            key,
            keys: KEYS.min(end - key),
            query: first + hidden,
            hidden,
            queries: rows - hidden,
            scale,
            causal,
            ahead,
        })
    }

    /// How many of the keys a query of the tile sees: one at least.
    #[inline(always)]
    fn seen(&self, row: usize) -> usize {
        let end = self.query + self.ahead + row + 1;
        if self.causal { self.keys.min(end - self.key) } else { self.keys }
    }
}

/// How far scores may exceed a row's maximum before the row is scaled down: powers up to 2^8 lose
/// nothing in f32, and scaling, which passes over the row's output, becomes rare.
const MAX_SCORE_EXCESS: f32 = 8.0;

/// Running softmax of `N` rows whose scores come tile by tile. Maxima are in units of the exponent:
/// times log2(e).
pub(super) struct OnlineSoftmaxRows<const N: usize> {
    /// Largest score so far, or up to [`MAX_SCORE_EXCESS`] less.
    max: [f32; N],
    /// Σ 2^(score - max) so far.
    sum: [f32; N],
}

impl<const N: usize> OnlineSoftmaxRows<N> {
    /// No tile yet.
    pub(super) fn new() -> Self {
        Self { max: [f32::NEG_INFINITY; N], sum: [0.0; N] }
    }
}

/// Replaces a tile's scores by `exp(scale · score - max)`, zero for hidden keys; if the maximum
/// grew, scales down the contributions of earlier tiles to the row's sum and to its row of `out`.
pub(super) struct UpdateSoftmaxTile<'a, const N: usize> {
    pub online: &'a mut OnlineSoftmaxRows<N>,
    pub tile: &'a Tile,
    /// `[queries, keys]` of the tile.
    pub scores: &'a mut [f32],
    /// `[queries, d]` of the tile.
    pub out: &'a mut [f32],
}

impl<const N: usize> NullaryFnOnce for UpdateSoftmaxTile<'_, N> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { online, tile, scores, out } = self;
        let (scale, d) = (tile.scale * LOG2_E, out.len() / tile.queries);
        let state = online.max[tile.hidden..].iter_mut().zip(&mut online.sum[tile.hidden..]);
        for (row, ((scores, out), (max, sum))) in
            scores.chunks_mut(tile.keys).zip(out.chunks_mut(d)).zip(state).enumerate()
        {
            let seen = tile.seen(row);
            scores[seen..].fill(f32::NEG_INFINITY);
            let largest = row_maximum(scores) * scale;
            if largest > *max + MAX_SCORE_EXCESS {
                // Nothing to scale down in the first tile, where `out` is not even written.
                if *max > f32::NEG_INFINITY {
                    let correction = exp2(*max - largest);
                    *sum *= correction;
                    for x in out {
                        *x *= correction;
                    }
                }
                *max = largest;
            }
            *sum += exponentiate_and_sum(scores, scale, *max);
            scores[seen..].fill(0.0);
        }
    }
}

/// Divides each row of `out` by its sum, and gives the rows' normalisers: log2 of Σ exp(score).
pub(super) struct FinishSoftmaxRows<'a, const N: usize> {
    pub online: &'a OnlineSoftmaxRows<N>,
    /// `[rows, d]`.
    pub out: &'a mut [f32],
    /// One a row.
    pub normalisers: &'a mut [f32],
}

impl<const N: usize> NullaryFnOnce for FinishSoftmaxRows<'_, N> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { online, out, normalisers } = self;
        let d = out.len() / normalisers.len();
        for ((out, normaliser), (max, sum)) in
            out.chunks_mut(d).zip(normalisers).zip(online.max.iter().zip(&online.sum))
        {
            let factor = 1.0 / sum;
            for x in out {
                *x *= factor;
            }
            *normaliser = max + sum.log2();
        }
    }
}

/// `a · b` of each row of `d` elements; d is a multiple of 16.
pub(super) struct RowInnerProducts<'a> {
    pub a: &'a [f32],
    pub b: &'a [f32],
    pub d: usize,
    pub out: &'a mut [f32],
}

impl NullaryFnOnce for RowInnerProducts<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for ((a, b), out) in self.a.chunks(self.d).zip(self.b.chunks(self.d)).zip(self.out) {
            let mut lanes = [0.0; LANES];
            for (a, b) in a.as_chunks::<LANES>().0.iter().zip(b.as_chunks::<LANES>().0) {
                for lane in 0..LANES {
                    lanes[lane] += a[lane] * b[lane];
                }
            }
            *out = sum_lanes_by_halves(lanes, |a, b| a + b);
        }
    }
}

/// Computes `P = exp(scale · S - normaliser)` and `P ∘ (dP - mean)` from scores S and dP, both zero
/// for hidden keys.
pub(super) struct ScoreGradientRows<'a> {
    pub tile: &'a Tile,
    /// S to P, `[queries, keys]` of the tile.
    pub scores: &'a mut [f32],
    /// dP to `P ∘ (dP - mean)`.
    pub grad: &'a mut [f32],
    /// One a query of the tile.
    pub normalisers: &'a [f32],
    /// One a query of the tile.
    pub means: &'a [f32],
}

impl NullaryFnOnce for ScoreGradientRows<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { tile, scores, grad, normalisers, means } = self;
        let scale = tile.scale * LOG2_E;
        let rows = scores
            .chunks_mut(tile.keys)
            .zip(grad.chunks_mut(tile.keys))
            .zip(normalisers.iter().zip(means));
        // Copies of the row's normaliser and mean: behind references the stores might change them,
        // and nothing vectorises.
        for (row, ((scores, grad), (&normaliser, &mean))) in rows.enumerate() {
            for (score, grad) in scores.iter_mut().zip(&mut *grad) {
                *score = exp2(score.mul_add(scale, -normaliser));
                *grad = *score * (*grad - mean);
            }
            let seen = tile.seen(row);
            scores[seen..].fill(0.0);
            grad[seen..].fill(0.0);
        }
    }
}

/// Softmax of each row of `s` elements.
pub(super) struct RowSoftmax<'a> {
    pub scores: &'a [f32],
    pub probabilities: &'a mut [f32],
    pub s: usize,
}

impl NullaryFnOnce for RowSoftmax<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (scores, row) in self.scores.chunks(self.s).zip(self.probabilities.chunks_mut(self.s)) {
            row.copy_from_slice(scores);
            let factor = 1.0 / exponentiate_and_sum(row, LOG2_E, row_maximum(scores) * LOG2_E);
            for x in row {
                *x *= factor;
            }
        }
    }
}

/// Largest of a row.
#[inline(always)]
fn row_maximum(row: &[f32]) -> f32 {
    let (blocks, rest) = row.as_chunks::<LANES>();
    let mut lanes = padded(rest);
    for block in blocks {
        for lane in 0..LANES {
            lanes[lane] = max_ignoring_nan(block[lane], lanes[lane]);
        }
    }
    sum_lanes_by_halves(lanes, max_ignoring_nan)
}

/// Replaces x by `2^(x · scale - shift)` and returns the sum.
#[inline(always)]
fn exponentiate_and_sum(row: &mut [f32], scale: f32, shift: f32) -> f32 {
    let (blocks, rest) = row.as_chunks_mut::<LANES>();
    let mut sums = [0.0; LANES];
    let mut add = |block: &mut [f32; LANES]| {
        for lane in 0..LANES {
            block[lane] = exp2(block[lane].mul_add(scale, -shift));
            sums[lane] += block[lane];
        }
    };
    blocks.iter_mut().for_each(&mut add);
    if !rest.is_empty() {
        // The padding adds 2^-126 a lane, negligible against the 1 of the row's maximum.
        let mut block = padded(rest);
        add(&mut block);
        rest.copy_from_slice(&block[..rest.len()]);
    }
    sum_lanes_by_halves(sums, |a, b| a + b)
}

/// The end of a row as a whole block, -inf behind it.
#[inline(always)]
fn padded(rest: &[f32]) -> [f32; LANES] {
    let mut block = [f32::NEG_INFINITY; LANES];
    if !rest.is_empty() {
        block[..rest.len()].copy_from_slice(rest);
    }
    block
}

/// Joins the lanes by halves.
#[inline(always)]
fn sum_lanes_by_halves(lanes: [f32; LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    let eight: [f32; 8] = from_fn(|lane| join(lanes[lane], lanes[lane + 8]));
    let four: [f32; 4] = from_fn(|lane| join(eight[lane], eight[lane + 4]));
    join(join(four[0], four[2]), join(four[1], four[3]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_any_length_are_summed_and_searched() {
        for len in 1..50 {
            // 0, -1, -2, .. from the middle on.
            let row: Vec<f32> = (0..len).map(|i| -(((i + len / 2) % len) as f32)).collect();
            assert_eq!(row_maximum(&row), 0.0);
            let mut powers = row.clone();
            let sum = exponentiate_and_sum(&mut powers, 2.0, 3.0);
            let exact: f32 = row.iter().map(|x| (2.0 * x - 3.0).exp2()).sum();
            assert!((sum / exact - 1.0).abs() < 1e-6, "{len}: {sum} is not {exact}");
            assert!(
                row.iter()
                    .zip(&powers)
                    .all(|(x, power)| (power / (2.0 * x - 3.0).exp2() - 1.0).abs() < 4e-7)
            );
        }
    }
}
