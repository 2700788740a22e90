//! Choice of the rows that the reference computes: all rows of a small problem, a seeded random
//! sample of a large one.
//!
//! Under the causal mask, early rows are averages of few values and large; late rows are averages
//! of many values and small. Rows are therefore drawn and compared in bands of positions, so that
//! the error of a late row is relative to the magnitude of its own band.

use std::ops::Range;

use crate::parallel;
use kernelgate::workload::{Expected, random};

/// Maximum number of query-key pairs that a reference computes: about half a second on two cores,
/// exponentials and GEMMs together.
pub const MAX_REFERENCE_PAIRS: u64 = 1 << 25;

/// Seed of the sample of rows. The seed is fixed, because the choice of rows belongs to the
/// reference and not to the inputs.
const ROW_SAMPLE_SEED: u64 = 0x6174_746e;

/// Rows of a tensor `[b, h, s, ..]`: `heads` times `s`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadRows {
    /// Number of heads of all sequences, b·h.
    pub heads: usize,
    /// Number of positions in a head.
    pub s: usize,
    /// Number of keys of a head.
    pub keys: usize,
    /// Whether the last row sees all keys and each earlier row one key less than the next.
    pub causal: bool,
}

impl HeadRows {
    /// Bands of positions whose rows are drawn and compared together.
    pub fn position_bands(&self) -> Vec<Range<usize>> {
        if !self.causal {
            return std::iter::once(0..self.s).collect();
        }
        let ends = std::iter::successors(Some(16), |end: &usize| end.checked_mul(8));
        let mut bands = Vec::new();
        let mut from = 0;
        for end in ends {
            bands.push(from..end.min(self.s));
            if end >= self.s {
                break;
            }
            from = end;
        }
        bands
    }

    /// Whether the reference computes every row.
    pub fn computes_every_row(&self) -> bool {
        self.query_key_pairs() <= u128::from(MAX_REFERENCE_PAIRS)
    }

    fn query_key_pairs(&self) -> u128 {
        self.heads as u128 * self.s as u128 * self.keys as u128
    }

    /// Maximum number of keys that a row before `end` sees.
    fn most_keys_seen(&self, end: usize) -> usize {
        if self.causal { end + self.keys - self.s } else { self.keys }
    }

    /// Ascending rows of a band that are checked: all of them, or a random sample that uses the
    /// band's share of [`MAX_REFERENCE_PAIRS`].
    pub fn drawn_rows_of_band(&self, name: &str, band: &Range<usize>) -> Vec<usize> {
        let rows = self.heads * band.len();
        let share = if self.computes_every_row() {
            rows
        } else {
            (MAX_REFERENCE_PAIRS as usize
                / self.position_bands().len()
                / self.most_keys_seen(band.end))
            .max(1)
        };
        let drawn =
            random::random_indices(ROW_SAMPLE_SEED, &format!("{name} {}", band.start), rows, share);
        drawn
            .into_iter()
            .map(|row| row / band.len() * self.s + band.start + row % band.len())
            .collect()
    }

    /// Ascending heads that are checked if a row's value needs its whole head. Each checked head
    /// has `share` query heads; there is at least one.
    pub fn drawn_head_indices(&self, name: &str, share: usize) -> Vec<usize> {
        let drawn = (2 * u128::from(MAX_REFERENCE_PAIRS)
            / (share as u128 * self.s as u128 * self.keys as u128))
            .clamp(1, self.heads as u128) as usize;
        random::random_indices(
            ROW_SAMPLE_SEED,
            name,
            self.heads,
            if self.computes_every_row() { self.heads } else { drawn },
        )
    }

    /// Maximum number of elements that the drawn rows can have, for memory estimates.
    pub fn max_drawn_elements(&self) -> u64 {
        let rows: usize = self.position_bands().iter().map(|band| self.heads * band.len()).sum();
        if self.computes_every_row() {
            return rows as u64;
        }
        self.position_bands()
            .iter()
            .map(|band| {
                ((self.heads * band.len()) as u64)
                    .min(MAX_REFERENCE_PAIRS / self.most_keys_seen(band.end) as u64 + 1)
            })
            .sum()
    }

    /// Computes the expected rows of output `name`; `f(head, positions)` returns the values of
    /// ascending positions of a head.
    pub fn expected_output_rows(
        &self,
        name: &str,
        shape: &[usize],
        rows: Vec<usize>,
        f: impl Fn(usize, &[usize]) -> Vec<f64> + Sync,
    ) -> Expected {
        let of_a_head: Vec<&[usize]> = rows.chunk_by(|a, b| a / self.s == b / self.s).collect();
        let values = parallel::parallel_map(of_a_head.len(), &|number| {
            let rows = of_a_head[number];
            let positions: Vec<usize> = rows.iter().map(|row| row % self.s).collect();
            f(rows[0] / self.s, &positions)
        });
        if rows.len() == self.heads * self.s {
            return Expected::all(name, shape, values.concat());
        }
        Expected::sampled_rows(name, shape, rows, values.concat())
    }
}
