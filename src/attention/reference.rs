//! Attention of one head in fp64: the reference against which every implementation is verified.
//!
//! Matrices are row-major slices: queries `[rows, d]`, keys and values `[keys, d]`, scores `[rows,
//! keys]`. A query's position decides which keys it sees under the causal mask. The choice of the
//! checked heads and rows (see `sample`), and any online or tiled form of the softmax, are excluded
//! on purpose.

use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, multiply_f64};

use crate::math::softmax;
use crate::parallel;

/// Parameters that all heads of a problem share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadParameters {
    /// Number of elements of a query, key or value.
    pub d: usize,
    /// Whether query i sees only the keys 0..=i.
    pub causal: bool,
}

/// Number of queries whose probabilities are in memory at a time, and of keys whose gradients one
/// task computes. This number limits the fp64 scratch memory.
pub const BLOCK_ROWS: usize = 64;
const ROWS_PER_TASK: usize = 8 * BLOCK_ROWS;
const KEYS_PER_BLOCK: usize = 256;

impl HeadParameters {
    /// Softmax scale, 1 / sqrt(d).
    pub fn scale(&self) -> f64 {
        1.0 / (self.d as f64).sqrt()
    }

    /// Number of keys that any query at these ascending positions sees; later keys have no effect.
    fn visible_keys(&self, positions: &[usize], s: usize) -> usize {
        if self.causal { positions.last().map_or(0, |last| last + 1) } else { s }
    }

    /// Computes the scores `q kᵀ / sqrt(d)`, `[rows, keys]`.
    pub fn scaled_scores(&self, q: &[f64], k: &[f64]) -> Vec<f64> {
        self.inner_products(q, k, self.scale())
    }

    /// Computes `factor · a bᵀ` over the head dimension.
    fn inner_products(&self, a: &[f64], b: &[f64], factor: f64) -> Vec<f64> {
        let (rows, keys) = (a.len() / self.d, b.len() / self.d);
        let mut out = vec![0.0; rows * keys];
        let (a, b) = (
            MatRef::from_row_major_slice(a, rows, self.d),
            MatRef::from_row_major_slice(b, keys, self.d),
        );
        add_gemm(&mut out, a, b.transpose(), factor);
        out
    }

    /// Computes the output `p v`, `[rows, d]`.
    pub fn weighted_values(&self, p: &[f64], v: &[f64]) -> Vec<f64> {
        let keys = v.len() / self.d;
        let rows = p.len() / keys;
        let mut out = vec![0.0; rows * self.d];
        let (p, v) = (
            MatRef::from_row_major_slice(p, rows, keys),
            MatRef::from_row_major_slice(v, keys, self.d),
        );
        add_gemm(&mut out, p, v, 1.0);
        out
    }

    /// Computes the softmax of the scores over the keys that each query sees; hidden keys get zero.
    fn probabilities(&self, q: &[f64], positions: &[usize], k: &[f64]) -> Vec<f64> {
        let keys = k.len() / self.d;
        let mut p = self.scaled_scores(q, k);
        for (row, &position) in p.chunks_mut(keys).zip(positions) {
            let (seen, hidden) = row.split_at_mut(if self.causal { position + 1 } else { keys });
            softmax(seen);
            hidden.fill(0.0);
        }
        p
    }

    /// Computes attention for some queries: `softmax(q kᵀ / sqrt(d)) v`.
    pub fn attention_output(
        &self,
        q: &[f64],
        positions: &[usize],
        k: &[f64],
        v: &[f64],
    ) -> Vec<f64> {
        let seen = self.visible_keys(positions, k.len() / self.d) * self.d;
        self.weighted_values(&self.probabilities(q, positions, &k[..seen]), &v[..seen])
    }

    /// Computes the probabilities and the gradient of the scores for some queries: `dS = P ∘ (dP -
    /// rowsum(P ∘ dP)) / sqrt(d)` with `dP = dO vᵀ`. dS is the gradient of `q kᵀ` before its
    /// scaling. `k` and `v` hold only the visible keys.
    fn score_gradients(
        &self,
        q: &[f64],
        grad_out: &[f64],
        positions: &[usize],
        k: &[f64],
        v: &[f64],
    ) -> (Vec<f64>, Vec<f64>) {
        let keys = k.len() / self.d;
        let p = self.probabilities(q, positions, k);
        let mut grad = self.inner_products(grad_out, v, 1.0);
        for (grad, p) in grad.chunks_mut(keys).zip(p.chunks(keys)) {
            let mean: f64 = grad.iter().zip(p).map(|(grad, p)| grad * p).sum();
            grad.iter_mut().zip(p).for_each(|(grad, p)| *grad = p * (*grad - mean) * self.scale());
        }
        (p, grad)
    }

    /// Computes the gradient of some queries.
    pub fn query_gradients(
        &self,
        q: &[f64],
        grad_out: &[f64],
        positions: &[usize],
        k: &[f64],
        v: &[f64],
    ) -> Vec<f64> {
        let seen = self.visible_keys(positions, k.len() / self.d) * self.d;
        let (_, grad_scores) = self.score_gradients(q, grad_out, positions, &k[..seen], &v[..seen]);
        self.weighted_values(&grad_scores, &k[..seen])
    }

    /// Computes the gradients of all keys and values of a head, `dK = dSᵀ q` and `dV = Pᵀ dO`, over
    /// all its queries.
    pub fn key_value_gradients(
        &self,
        q: &[f64],
        grad_out: &[f64],
        k: &[f64],
        v: &[f64],
    ) -> (Vec<f64>, Vec<f64>) {
        let (d, s) = (self.d, q.len() / self.d);
        let (mut grad_k, mut grad_v) = (vec![0.0; s * d], vec![0.0; s * d]);
        for group in (0..s).step_by(ROWS_PER_TASK) {
            let group = group..s.min(group + ROWS_PER_TASK);
            let seen = if self.causal { group.end } else { s };
            let pieces = parallel::parallel_map(group.len().div_ceil(BLOCK_ROWS), &|number| {
                let from = group.start + number * BLOCK_ROWS;
                let positions: Vec<usize> = (from..group.end.min(from + BLOCK_ROWS)).collect();
                let piece = from * d..(from + positions.len()) * d;
                let (p, grad_scores) = self.score_gradients(
                    &q[piece.clone()],
                    &grad_out[piece.clone()],
                    &positions,
                    &k[..seen * d],
                    &v[..seen * d],
                );
                (piece, p, grad_scores)
            });
            let blocks = grad_k[..seen * d]
                .chunks_mut(KEYS_PER_BLOCK * d)
                .zip(grad_v[..seen * d].chunks_mut(KEYS_PER_BLOCK * d));
            parallel::for_each_task(blocks.collect(), &|block, (grad_k, grad_v)| {
                let keys = grad_k.len() / d;
                for (piece, p, grad_scores) in &pieces {
                    let rows = piece.len() / d;
                    for (out, weights, x) in
                        [(&mut *grad_k, grad_scores, q), (&mut *grad_v, p, grad_out)]
                    {
                        let weights = MatRef::from_row_major_slice(weights, rows, seen)
                            .subcols(block * KEYS_PER_BLOCK, keys);
                        let x = MatRef::from_row_major_slice(&x[piece.clone()], rows, d);
                        add_gemm(out, weights.transpose(), x, 1.0);
                    }
                }
            });
        }
        (grad_k, grad_v)
    }
}

/// Adds `factor · a b` to `out` on the calling thread.
fn add_gemm(out: &mut [f64], a: MatRef<'_, f64>, b: MatRef<'_, f64>, factor: f64) {
    let out = MatMut::from_row_major_slice_mut(out, a.nrows(), b.ncols());
    multiply_f64(out, Accum::Add, a, b, factor);
}
