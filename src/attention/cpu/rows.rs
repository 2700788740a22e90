//! Vectorised operations of CPU attention on rows of scores, between the GEMMs. Each row operation
//! of CPU attention is a type that implements pulp's trait `NullaryFnOnce` with an inlined method
//! `call`. pulp's `Arch::dispatch` compiles for the widest SIMD only code that it can inline, and
//! it does not inline a large closure.
//!
//! CPU attention computes every exponential as a power of two: the factor log2(e) is part of the
//! scaling that every score needs anyway.

use std::array::from_fn;
use std::f32::consts::LOG2_E;

use pulp::NullaryFnOnce;

use super::blocks::KEYS_PER_CPU_SCORE_TILE;
use crate::attention::definition::AttentionParameters;
use crate::math::{max_or_second_if_first_is_nan, vectorisable_exp2};

/// Number of independent partial results of a row's sum or maximum, so that the loop vectorises.
const REDUCTION_LANES: usize = 16;

/// Tile of scores of CPU attention: those of some queries of a block and of some keys.
pub(super) struct ScoreTileExtents {
    /// Index of the tile's first key.
    pub first_key: usize,
    /// Number of keys in the tile of scores.
    pub keys: usize,
    /// Index of the tile's first query.
    pub first_query: usize,
    /// Number of queries at the start of the block that the mask hides from every key of the tile.
    pub fully_masked_queries: usize,
    /// Number of queries in the tile of scores.
    pub queries: usize,
    /// Factor of the scores, 1 / sqrt(d) for head dimension d.
    pub score_scale: f32,
    /// Whether a causal mask applies: query i of the head then sees only the keys up to index
    /// `ahead + i`.
    pub causal: bool,
    /// With a causal mask, the number of keys that the head's query 0 sees before its own key.
    pub keys_before_first_query: usize,
}

impl ScoreTileExtents {
    /// Returns the score tile whose first key is `key`, for the block of `rows` queries that starts
    /// at `first`. Returns `None` if the mask hides every key from `key` on from all queries of the
    /// block.
    pub(super) fn score_tile_with_visible_keys(
        attention: &AttentionParameters,
        first: usize,
        rows: usize,
        key: usize,
    ) -> Option<Self> {
        let AttentionParameters { keys_per_head: keys, head_dim: d, causal, .. } = *attention;
        let ahead = attention.causal_keys_before_first_query();
        let hidden = if causal { key.saturating_sub(first + ahead) } else { 0 };
        let end = if causal { first + rows + ahead } else { keys };
        let scale = 1.0 / (d as f32).sqrt();
        (key < end).then(|| Self {
            first_key: key,
            keys: KEYS_PER_CPU_SCORE_TILE.min(end - key),
            first_query: first + hidden,
            fully_masked_queries: hidden,
            queries: rows - hidden,
            score_scale: scale,
            causal,
            keys_before_first_query: ahead,
        })
    }

    /// Returns the number of keys at the start of the tile that its query `row` sees; at least 1.
    #[inline(always)]
    fn visible_keys_of_query_row(&self, row: usize) -> usize {
        let end = self.first_query + self.keys_before_first_query + row + 1;
        if self.causal { self.keys.min(end - self.first_key) } else { self.keys }
    }
}

/// Amount in powers of two by which a score may exceed its row's running maximum before the row's
/// output and sum are scaled down. Values up to 2^8 lose no precision in f32, and scaling, which
/// passes over the row's output, becomes rare.
const MAX_EXPONENT_ABOVE_RUNNING_MAX: f32 = 8.0;

/// State of the online softmax of `N` query rows, whose scores arrive one tile of keys after the
/// other. The running maxima of the online softmax are those of the scaled scores times log2(e).
pub(super) struct OnlineSoftmaxRows<const N: usize> {
    /// For each row, the maximum of the scores so far, or a value at most
    /// [`MAX_EXPONENT_ABOVE_RUNNING_MAX`] below it.
    max: [f32; N],
    /// For each row, the sum of 2^(score - max) over the scores so far.
    sum: [f32; N],
}

impl<const N: usize> OnlineSoftmaxRows<N> {
    /// Returns the state of the online softmax before the first tile of scores.
    pub(super) fn before_first_score_tile() -> Self {
        Self { max: [f32::NEG_INFINITY; N], sum: [0.0; N] }
    }
}

/// Replaces a tile's scores by their exponentials relative to the row's running maximum, and by
/// zero for keys that the mask hides. If a row's maximum grew by more than the allowed excess, the
/// row's sum and its row of `out` from earlier tiles are scaled down.
pub(super) struct UpdateOnlineSoftmaxWithTile<'a, const N: usize> {
    pub online: &'a mut OnlineSoftmaxRows<N>,
    pub tile: &'a ScoreTileExtents,
    /// Scores of the tile, `[queries, keys]`.
    pub scores: &'a mut [f32],
    /// Rows of the unnormalised attention output of the tile's queries, `[queries, d]`.
    pub out: &'a mut [f32],
}

impl<const N: usize> NullaryFnOnce for UpdateOnlineSoftmaxWithTile<'_, N> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { online, tile, scores, out } = self;
        let (scale, d) = (tile.score_scale * LOG2_E, out.len() / tile.queries);
        let state = online.max[tile.fully_masked_queries..]
            .iter_mut()
            .zip(&mut online.sum[tile.fully_masked_queries..]);
        for (row, ((scores, out), (max, sum))) in
            scores.chunks_mut(tile.keys).zip(out.chunks_mut(d)).zip(state).enumerate()
        {
            let seen = tile.visible_keys_of_query_row(row);
            scores[seen..].fill(f32::NEG_INFINITY);
            let largest = maximum_of_score_row(scores) * scale;
            if largest > *max + MAX_EXPONENT_ABOVE_RUNNING_MAX {
                // Before the first tile of keys `out` is not written yet, so nothing is scaled
                // down.
                if *max > f32::NEG_INFINITY {
                    let correction = vectorisable_exp2(*max - largest);
                    *sum *= correction;
                    for x in out {
                        *x *= correction;
                    }
                }
                *max = largest;
            }
            *sum += exponentiate_row_in_place_and_sum(scores, scale, *max);
            scores[seen..].fill(0.0);
        }
    }
}

/// Divides each row of the attention output `out` by its sum of exponentials and writes the row's
/// normaliser, log2 of Σ exp(score).
pub(super) struct NormaliseOnlineSoftmaxRows<'a, const N: usize> {
    pub online: &'a OnlineSoftmaxRows<N>,
    /// Rows of the attention output of the query block, `[rows, d]`.
    pub out: &'a mut [f32],
    /// Softmax normalisers that the operation writes, one for each query row.
    pub log2_sum_exps: &'a mut [f32],
}

impl<const N: usize> NullaryFnOnce for NormaliseOnlineSoftmaxRows<'_, N> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { online, out, log2_sum_exps: normalisers } = self;
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

/// Computes the inner products of the rows of `a` with the rows of `b`; a row has `d` elements, a
/// multiple of 16.
pub(super) struct InnerProductsOfRowPairs<'a> {
    pub a: &'a [f32],
    pub b: &'a [f32],
    pub row_length: usize,
    pub out: &'a mut [f32],
}

impl NullaryFnOnce for InnerProductsOfRowPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for ((a, b), out) in
            self.a.chunks(self.row_length).zip(self.b.chunks(self.row_length)).zip(self.out)
        {
            let mut lanes = [0.0; REDUCTION_LANES];
            for (a, b) in
                a.as_chunks::<REDUCTION_LANES>().0.iter().zip(b.as_chunks::<REDUCTION_LANES>().0)
            {
                for lane in 0..REDUCTION_LANES {
                    lanes[lane] += a[lane] * b[lane];
                }
            }
            *out = reduce_lanes_by_halves(lanes, |a, b| a + b);
        }
    }
}

/// From scores S and gradients dP of a tile, computes the probabilities P and the score gradients
/// `P ∘ (dP - mean)`. P and its score gradient are zero for keys that the mask hides.
pub(super) struct ProbabilitiesAndScoreGradients<'a> {
    pub tile: &'a ScoreTileExtents,
    /// Scores S on input and probabilities P on output, `[queries, keys]` of the tile.
    pub scores: &'a mut [f32],
    /// Gradient dP of the probabilities on input, gradient `P ∘ (dP - mean)` of the scores on
    /// output.
    pub grad: &'a mut [f32],
    /// Softmax normalisers of the forward pass, one for each query of the tile.
    pub log2_sum_exps: &'a [f32],
    /// Row sums of P ∘ dP, one for each query of the tile.
    pub row_sums_of_p_dp: &'a [f32],
}

impl NullaryFnOnce for ProbabilitiesAndScoreGradients<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { tile, scores, grad, log2_sum_exps: normalisers, row_sums_of_p_dp: means } = self;
        let scale = tile.score_scale * LOG2_E;
        let rows = scores
            .chunks_mut(tile.keys)
            .zip(grad.chunks_mut(tile.keys))
            .zip(normalisers.iter().zip(means));
        // The row's normaliser and mean are copied to locals: behind references the compiler must
        // assume that stores change them, and the loop would not vectorise.
        for (row, ((scores, grad), (&normaliser, &mean))) in rows.enumerate() {
            for (score, grad) in scores.iter_mut().zip(&mut *grad) {
                *score = vectorisable_exp2(score.mul_add(scale, -normaliser));
                *grad = *score * (*grad - mean);
            }
            let seen = tile.visible_keys_of_query_row(row);
            scores[seen..].fill(0.0);
            grad[seen..].fill(0.0);
        }
    }
}

/// Computes the softmax of each row of `row_length` scores.
pub(super) struct SoftmaxOfEachRow<'a> {
    pub scores: &'a [f32],
    pub probabilities: &'a mut [f32],
    pub row_length: usize,
}

impl NullaryFnOnce for SoftmaxOfEachRow<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (scores, row) in
            self.scores.chunks(self.row_length).zip(self.probabilities.chunks_mut(self.row_length))
        {
            row.copy_from_slice(scores);
            let factor = 1.0
                / exponentiate_row_in_place_and_sum(
                    row,
                    LOG2_E,
                    maximum_of_score_row(scores) * LOG2_E,
                );
            for x in row {
                *x *= factor;
            }
        }
    }
}

/// Returns the maximum of a row of scores.
#[inline(always)]
fn maximum_of_score_row(row: &[f32]) -> f32 {
    let (blocks, rest) = row.as_chunks::<REDUCTION_LANES>();
    let mut lanes = pad_row_remainder_with_minus_infinity(rest);
    for block in blocks {
        for lane in 0..REDUCTION_LANES {
            lanes[lane] = max_or_second_if_first_is_nan(block[lane], lanes[lane]);
        }
    }
    reduce_lanes_by_halves(lanes, max_or_second_if_first_is_nan)
}

/// Replaces each element x of a row by `2^(x · scale - shift)` and returns the sum of the new
/// elements.
#[inline(always)]
fn exponentiate_row_in_place_and_sum(row: &mut [f32], scale: f32, shift: f32) -> f32 {
    let (blocks, rest) = row.as_chunks_mut::<REDUCTION_LANES>();
    let mut sums = [0.0; REDUCTION_LANES];
    let mut add = |block: &mut [f32; REDUCTION_LANES]| {
        for lane in 0..REDUCTION_LANES {
            block[lane] = vectorisable_exp2(block[lane].mul_add(scale, -shift));
            sums[lane] += block[lane];
        }
    };
    blocks.iter_mut().for_each(&mut add);
    if !rest.is_empty() {
        // An element of padding adds 2^-126 to a partial sum, negligible against the 1 that the
        // row's maximum adds.
        let mut block = pad_row_remainder_with_minus_infinity(rest);
        add(&mut block);
        rest.copy_from_slice(&block[..rest.len()]);
    }
    reduce_lanes_by_halves(sums, |a, b| a + b)
}

/// Copies the last elements of a row, fewer than [`REDUCTION_LANES`], to a whole block and fills
/// the rest with -inf.
#[inline(always)]
fn pad_row_remainder_with_minus_infinity(rest: &[f32]) -> [f32; REDUCTION_LANES] {
    let mut block = [f32::NEG_INFINITY; REDUCTION_LANES];
    if !rest.is_empty() {
        block[..rest.len()].copy_from_slice(rest);
    }
    block
}

/// Reduces the partial results of all lanes to one value: `join` combines the two halves until one
/// lane is left.
#[inline(always)]
fn reduce_lanes_by_halves(lanes: [f32; REDUCTION_LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    let eight: [f32; 8] = from_fn(|lane| join(lanes[lane], lanes[lane + 8]));
    let four: [f32; 4] = from_fn(|lane| join(eight[lane], eight[lane + 4]));
    join(join(four[0], four[2]), join(four[1], four[3]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_sum_and_maximum_are_correct_for_any_row_length() {
        for len in 1..50 {
            // In this test the row has the values 0, -1, -2, .. from its middle on.
            let row: Vec<f32> = (0..len).map(|i| -(((i + len / 2) % len) as f32)).collect();
            assert_eq!(maximum_of_score_row(&row), 0.0);
            let mut powers = row.clone();
            let sum = exponentiate_row_in_place_and_sum(&mut powers, 2.0, 3.0);
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
