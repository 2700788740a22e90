//! Choice of the output rows that the attention reference computes: all rows of a small problem, a
//! seeded random sample of the rows of a large one.
//!
//! Under the causal mask, early output rows average few values and have large elements; late output
//! rows average many values and have small elements. Output rows are drawn and compared in bands of
//! positions, so that under a causal mask a late row's error is relative to the magnitudes of its
//! band.

use std::ops::Range;

use crate::parallel;
use kernelgate::workload::{Expected, random};

/// Maximum number of query-key pairs that an attention reference computes, about half a second of
/// exponentials and GEMMs on two CPU cores.
pub const MAX_REFERENCE_QUERY_KEY_PAIRS: u64 = 1 << 25;

/// Seed of the random choice of the output rows that the attention reference computes. The seed of
/// the drawn rows is fixed, because the choice of rows must not depend on the inputs.
const REFERENCE_ROW_SAMPLE_SEED: u64 = 0x6174_746e;

/// Number and length of the heads of a tensor `[b, h, s, ..]`, from whose rows the reference draws
/// those to compute: `total_heads` times `rows_per_head`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadRowsToSample {
    /// Number of heads over all sequences of the batch, b·h.
    pub total_heads: usize,
    /// Number of positions (rows) in a head.
    pub rows_per_head: usize,
    /// Number of keys of a head.
    pub keys_per_head: usize,
    /// Whether the mask is causal: the last row sees all keys, and each earlier row sees one key
    /// less than the next row.
    pub causal: bool,
}

impl HeadRowsToSample {
    /// Ranges of positions within a head; the reference draws rows from each range, and compares
    /// the drawn rows of a range together.
    pub fn position_ranges_sampled_together(&self) -> Vec<Range<usize>> {
        if !self.causal {
            return std::iter::once(0..self.rows_per_head).collect();
        }
        let ends = std::iter::successors(Some(16), |end: &usize| end.checked_mul(8));
        let mut bands = Vec::new();
        let mut from = 0;
        for end in ends {
            bands.push(from..end.min(self.rows_per_head));
            if end >= self.rows_per_head {
                break;
            }
            from = end;
        }
        bands
    }

    /// Whether the reference computes every output row, because the problem has at most
    /// [`MAX_REFERENCE_QUERY_KEY_PAIRS`] query-key pairs.
    pub fn reference_computes_every_row(&self) -> bool {
        self.query_key_pairs_ignoring_mask() <= u128::from(MAX_REFERENCE_QUERY_KEY_PAIRS)
    }

    fn query_key_pairs_ignoring_mask(&self) -> u128 {
        self.total_heads as u128 * self.rows_per_head as u128 * self.keys_per_head as u128
    }

    /// Maximum number of keys that any row at a position below `end` sees.
    fn max_keys_seen_before_position(&self, end: usize) -> usize {
        if self.causal { end + self.keys_per_head - self.rows_per_head } else { self.keys_per_head }
    }

    /// Draws the rows of a position band that are checked, ascending: all rows of a small problem,
    /// else a random sample within the band's share of [`MAX_REFERENCE_QUERY_KEY_PAIRS`].
    pub fn draw_rows_of_position_band(&self, name: &str, band: &Range<usize>) -> Vec<usize> {
        let rows = self.total_heads * band.len();
        let query_heads_per_key_head = if self.reference_computes_every_row() {
            rows
        } else {
            (MAX_REFERENCE_QUERY_KEY_PAIRS as usize
                / self.position_ranges_sampled_together().len()
                / self.max_keys_seen_before_position(band.end))
            .max(1)
        };
        let drawn = random::distinct_random_indices(
            REFERENCE_ROW_SAMPLE_SEED,
            &format!("{name} {}", band.start),
            rows,
            query_heads_per_key_head,
        );
        drawn
            .into_iter()
            .map(|row| row / band.len() * self.rows_per_head + band.start + row % band.len())
            .collect()
    }

    /// Draws the heads that are checked if each row's value depends on its whole head; the indices
    /// are ascending. Each drawn key head has `query_heads_per_key_head` query heads; at least one
    /// key head is drawn.
    pub fn draw_whole_heads(&self, name: &str, share: usize) -> Vec<usize> {
        let drawn = (2 * u128::from(MAX_REFERENCE_QUERY_KEY_PAIRS)
            / (share as u128 * self.rows_per_head as u128 * self.keys_per_head as u128))
            .clamp(1, self.total_heads as u128) as usize;
        random::distinct_random_indices(
            REFERENCE_ROW_SAMPLE_SEED,
            name,
            self.total_heads,
            if self.reference_computes_every_row() { self.total_heads } else { drawn },
        )
    }

    /// Maximum number of rows that the reference can draw, for estimates of host memory.
    pub fn max_drawn_rows(&self) -> u64 {
        let rows: usize = self
            .position_ranges_sampled_together()
            .iter()
            .map(|band| self.total_heads * band.len())
            .sum();
        if self.reference_computes_every_row() {
            return rows as u64;
        }
        self.position_ranges_sampled_together()
            .iter()
            .map(|band| {
                ((self.total_heads * band.len()) as u64).min(
                    MAX_REFERENCE_QUERY_KEY_PAIRS
                        / self.max_keys_seen_before_position(band.end) as u64
                        + 1,
                )
            })
            .sum()
    }

    /// Computes the expected values of the drawn rows of output `name`; `f(head, positions)`
    /// returns the rows at ascending positions of one head.
    pub fn expected_values_of_drawn_rows(
        &self,
        name: &str,
        shape: &[usize],
        rows: Vec<usize>,
        f: impl Fn(usize, &[usize]) -> Vec<f64> + Sync,
    ) -> Expected {
        let of_a_head: Vec<&[usize]> =
            rows.chunk_by(|a, b| a / self.rows_per_head == b / self.rows_per_head).collect();
        let values = parallel::map_numbers_in_parallel(of_a_head.len(), &|number| {
            let rows = of_a_head[number];
            let positions: Vec<usize> = rows.iter().map(|row| row % self.rows_per_head).collect();
            f(rows[0] / self.rows_per_head, &positions)
        });
        if rows.len() == self.total_heads * self.rows_per_head {
            return Expected::all(name, shape, values.concat());
        }
        Expected::sampled_rows(name, shape, rows, values.concat())
    }
}
