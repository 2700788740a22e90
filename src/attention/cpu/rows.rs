//! Operations on rows of scores between the GEMMs. Each operation is a type with its work in an
//! inlined `call`. `Arch::dispatch` compiles for the widest SIMD only code that it can inline, and
//! it does not inline a large closure.
//!
//! All exponentials are powers of two: the factor log2(e) is part of the scaling that every score
//! needs anyway.

use std::array::from_fn;
use std::f32::consts::LOG2_E;

use pulp::NullaryFnOnce;

use super::blocks::KEYS_PER_TILE;
use crate::attention::definition::Attention;
use crate::math::{exp2, max_ignoring_nan};

/// Number of partial results that a reduction keeps, so that it vectorises.
const REDUCTION_LANES: usize = 16;

/// A tile of scores: some queries of a block by some keys.
pub(super) struct ScoreTile {
    /// Index of the tile's first key.
    pub key: usize,
    /// Number of keys in the tile of scores.
    pub keys: usize,
    /// Index of the tile's first query.
    pub query: usize,
    /// Number of queries in the block before the first query that sees a key of the tile.
    pub hidden: usize,
    /// Number of queries in the tile of scores.
    pub queries: usize,
    /// Factor of the scores, 1 / sqrt(d).
    pub scale: f32,
    /// Whether query i of the tile sees only the keys up to `ahead + i`.
    pub causal: bool,
    /// With a causal mask, the number of keys before the own key of query 0 of the head.
    pub ahead: usize,
}

impl ScoreTile {
    /// Returns the tile that starts at `key`, for the block of `rows` queries from `first` on.
    /// Returns `None` if no query of the block sees a key of the tile.
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
            keys: KEYS_PER_TILE.min(end - key),
            query: first + hidden,
            hidden,
            queries: rows - hidden,
            scale,
            causal,
            ahead,
        })
    }

    /// Number of keys of the tile that at least one query sees; at least 1.
    #[inline(always)]
    fn visible_keys(&self, row: usize) -> usize {
        let end = self.query + self.ahead + row + 1;
        if self.causal { self.keys.min(end - self.key) } else { self.keys }
    }
}

/// Amount by which scores may exceed a row's maximum before the row is scaled down. Powers up to
/// 2^8 lose nothing in f32, and scaling, which passes over the row's output, becomes rare.
const MAX_SCORE_EXCESS: f32 = 8.0;

/// Running softmax of `N` rows whose scores arrive tile by tile. Maxima are in units of the
/// exponent of two: multiplied by log2(e).
pub(super) struct OnlineSoftmaxRows<const N: usize> {
    /// Maximum of the scores so far, or up to [`MAX_SCORE_EXCESS`] less.
    max: [f32; N],
    /// Sum of 2^(score - max) over the scores so far.
    sum: [f32; N],
}

impl<const N: usize> OnlineSoftmaxRows<N> {
    /// State of the running softmax before the first tile.
    pub(super) fn new() -> Self {
        Self { max: [f32::NEG_INFINITY; N], sum: [0.0; N] }
    }
}

/// Replaces a tile's scores by `exp(scale · score - max)`, zero for hidden keys. If the maximum
/// grew, the contributions of earlier tiles to the row's sum and to its row of `out` are scaled
/// down.
pub(super) struct UpdateSoftmaxTile<'a, const N: usize> {
    pub online: &'a mut OnlineSoftmaxRows<N>,
    pub tile: &'a ScoreTile,
    /// Scores of the tile, `[queries, keys]`.
    pub scores: &'a mut [f32],
    /// Output rows of the tile's queries, `[queries, d]`.
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
            let seen = tile.visible_keys(row);
            scores[seen..].fill(f32::NEG_INFINITY);
            let largest = row_maximum(scores) * scale;
            if largest > *max + MAX_SCORE_EXCESS {
                // In the first tile `out` is not written yet, so nothing is scaled down.
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

/// Divides each row of `out` by its sum and returns the rows' normalisers, log2 of Σ exp(score).
pub(super) struct FinishSoftmaxRows<'a, const N: usize> {
    pub online: &'a OnlineSoftmaxRows<N>,
    /// Output rows of the block, `[rows, d]`.
    pub out: &'a mut [f32],
    /// Normalisers, one for each row.
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

/// Inner product `a · b` of each row of `d` elements, where d is a multiple of 16.
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
            let mut lanes = [0.0; REDUCTION_LANES];
            for (a, b) in
                a.as_chunks::<REDUCTION_LANES>().0.iter().zip(b.as_chunks::<REDUCTION_LANES>().0)
            {
                for lane in 0..REDUCTION_LANES {
                    lanes[lane] += a[lane] * b[lane];
                }
            }
            *out = sum_lanes_by_halves(lanes, |a, b| a + b);
        }
    }
}

/// Computes `P = exp(scale · S - normaliser)` and `P ∘ (dP - mean)` from scores S and dP. P and its
/// gradient are zero for hidden keys.
pub(super) struct ScoreGradientRows<'a> {
    pub tile: &'a ScoreTile,
    /// Scores S on input, probabilities P on output, `[queries, keys]` of the tile.
    pub scores: &'a mut [f32],
    /// Gradient dP on input, `P ∘ (dP - mean)` on output.
    pub grad: &'a mut [f32],
    /// Normalisers, one for each query of the tile.
    pub normalisers: &'a [f32],
    /// Row sums of P ∘ dP, one for each query of the tile.
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
        // The row's normaliser and mean are copied: behind references the stores might change them,
        // and the loop would not vectorise.
        for (row, ((scores, grad), (&normaliser, &mean))) in rows.enumerate() {
            for (score, grad) in scores.iter_mut().zip(&mut *grad) {
                *score = exp2(score.mul_add(scale, -normaliser));
                *grad = *score * (*grad - mean);
            }
            let seen = tile.visible_keys(row);
            scores[seen..].fill(0.0);
            grad[seen..].fill(0.0);
        }
    }
}

/// Computes the softmax of each row of `s` elements.
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

/// Returns the maximum of a row of scores.
#[inline(always)]
fn row_maximum(row: &[f32]) -> f32 {
    let (blocks, rest) = row.as_chunks::<REDUCTION_LANES>();
    let mut lanes = padded_with_minus_infinity(rest);
    for block in blocks {
        for lane in 0..REDUCTION_LANES {
            lanes[lane] = max_ignoring_nan(block[lane], lanes[lane]);
        }
    }
    sum_lanes_by_halves(lanes, max_ignoring_nan)
}

/// Replaces each x of a row by `2^(x · scale - shift)` and returns the sum.
#[inline(always)]
fn exponentiate_and_sum(row: &mut [f32], scale: f32, shift: f32) -> f32 {
    let (blocks, rest) = row.as_chunks_mut::<REDUCTION_LANES>();
    let mut sums = [0.0; REDUCTION_LANES];
    let mut add = |block: &mut [f32; REDUCTION_LANES]| {
        for lane in 0..REDUCTION_LANES {
            block[lane] = exp2(block[lane].mul_add(scale, -shift));
            sums[lane] += block[lane];
        }
    };
    blocks.iter_mut().for_each(&mut add);
    if !rest.is_empty() {
        // The padding adds 2^-126 a lane, which is negligible against the 1 of the row's maximum.
        let mut block = padded_with_minus_infinity(rest);
        add(&mut block);
        rest.copy_from_slice(&block[..rest.len()]);
    }
    sum_lanes_by_halves(sums, |a, b| a + b)
}

/// Returns the remainder of a row as a whole block, filled up with -inf.
#[inline(always)]
fn padded_with_minus_infinity(rest: &[f32]) -> [f32; REDUCTION_LANES] {
    let mut block = [f32::NEG_INFINITY; REDUCTION_LANES];
    if !rest.is_empty() {
        block[..rest.len()].copy_from_slice(rest);
    }
    block
}

/// Reduces the partial results of all lanes by halves with `join`.
#[inline(always)]
fn sum_lanes_by_halves(lanes: [f32; REDUCTION_LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    let eight: [f32; 8] = from_fn(|lane| join(lanes[lane], lanes[lane + 8]));
    let four: [f32; 4] = from_fn(|lane| join(eight[lane], eight[lane + 4]));
    join(join(four[0], four[2]), join(four[1], four[3]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_any_length_are_summed_and_searched_for_their_maximum() {
        for len in 1..50 {
            // The row has the values 0, -1, -2, .. from its middle on.
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
