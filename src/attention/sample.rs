//! Which rows the reference computes: all of a small problem, a seeded random sample of a large
//! one.
//!
//! Under the causal mask early rows are averages of few values and large, late rows averages of
//! many and small. Sampled rows are drawn and compared in bands of positions, so that a late row is
//! held to the magnitude of its own band.

use std::ops::Range;

use crate::parallel;
use kernelgate::workload::{Expected, random};

/// Query-key pairs that a reference computes: about half a second on two cores, exponentials and
/// GEMMs together.
pub const MAX_REFERENCE_PAIRS: u64 = 1 << 25;

/// Seed of the sample. Fixed: which rows are checked belongs to the reference, not to the inputs.
const ROW_SAMPLE_SEED: u64 = 0x6174_746e;

/// Rows of `[b, h, s, ..]`: `heads` times `s`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rows {
    /// b·h.
    pub heads: usize,
    /// Positions in a head.
    pub s: usize,
    /// Keys of a head.
    pub keys: usize,
    /// Whether a row sees one key less than the next, and the last one all.
    pub causal: bool,
}

impl Rows {
    /// Positions that are drawn and compared together.
    pub fn row_bands(&self) -> Vec<Range<usize>> {
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

    /// Whether every row is checked.
    pub fn whole(&self) -> bool {
        self.pairs() <= u128::from(MAX_REFERENCE_PAIRS)
    }

    fn pairs(&self) -> u128 {
        self.heads as u128 * self.s as u128 * self.keys as u128
    }

    /// Most keys that a row before `end` sees.
    fn most_keys_seen(&self, end: usize) -> usize {
        if self.causal { end + self.keys - self.s } else { self.keys }
    }

    /// The rows of a band that are checked, ascending: all of them, or a random sample of the
    /// band's share of [`MAX_REFERENCE_PAIRS`].
    pub fn drawn_rows_of_band(&self, name: &str, band: &Range<usize>) -> Vec<usize> {
        let rows = self.heads * band.len();
        let share = if self.whole() {
            rows
        } else {
            (MAX_REFERENCE_PAIRS as usize / self.row_bands().len() / self.most_keys_seen(band.end))
                .max(1)
        };
        let drawn =
            random::indices(ROW_SAMPLE_SEED, &format!("{name} {}", band.start), rows, share);
        drawn
            .into_iter()
            .map(|row| row / band.len() * self.s + band.start + row % band.len())
            .collect()
    }

    /// The heads that are checked if a row's value needs its whole head, each of `share` heads of
    /// queries, ascending: at least one.
    pub fn drawn_head_indices(&self, name: &str, share: usize) -> Vec<usize> {
        let drawn = (2 * u128::from(MAX_REFERENCE_PAIRS)
            / (share as u128 * self.s as u128 * self.keys as u128))
            .clamp(1, self.heads as u128) as usize;
        random::indices(
            ROW_SAMPLE_SEED,
            name,
            self.heads,
            if self.whole() { self.heads } else { drawn },
        )
    }

    /// The most elements of a row that the drawn rows can have, for memory estimates.
    pub fn max_drawn_elements(&self) -> u64 {
        let rows: usize = self.row_bands().iter().map(|band| self.heads * band.len()).sum();
        if self.whole() {
            return rows as u64;
        }
        self.row_bands()
            .iter()
            .map(|band| {
                ((self.heads * band.len()) as u64)
                    .min(MAX_REFERENCE_PAIRS / self.most_keys_seen(band.end) as u64 + 1)
            })
            .sum()
    }

    /// The reference of some rows of output `name`: `f(head, positions)` gives the values of
    /// ascending positions of a head.
    pub fn expect_rows(
        &self,
        name: &str,
        shape: &[usize],
        rows: Vec<usize>,
        f: impl Fn(usize, &[usize]) -> Vec<f64> + Sync,
    ) -> Expected {
        let of_a_head: Vec<&[usize]> = rows.chunk_by(|a, b| a / self.s == b / self.s).collect();
        let values = parallel::map(of_a_head.len(), &|number| {
            let rows = of_a_head[number];
            let positions: Vec<usize> = rows.iter().map(|row| row % self.s).collect();
            f(rows[0] / self.s, &positions)
        });
        if rows.len() == self.heads * self.s {
            return Expected::all(name, shape, values.concat());
        }
        Expected::sampled(name, shape, rows, values.concat())
    }
}
