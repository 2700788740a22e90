//! Attention of one head in fp64: the reference against which every implementation of attention is
//! verified.
//!
//! The attention reference stores matrices as row-major slices: queries `[rows, d]`, keys and
//! values `[keys, d]`, scores `[rows, keys]`. Under the causal mask, a query's position in the
//! sequence decides which keys it sees. This reference does not choose the heads and rows to check
//! (the module `reference_row_sample` does), and it uses no online or tiled softmax.

use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, matmul_f64_on_calling_thread};

use crate::math::softmax_in_place_f64;
use crate::parallel;

/// Attention parameters of one head, which are equal for all heads of a problem: head dimension and
/// mask.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SingleHeadParameters {
    /// Number of elements of a query, key or value vector (head dimension).
    pub head_dim: usize,
    /// Whether attention is causal, so that the query at position i sees only keys 0..=i.
    pub causal: bool,
}

/// Number of queries in each block whose probabilities and score gradients the fp64 attention
/// reference computes at a time. The number of queries in a block limits the fp64 scratch memory of
/// the attention reference.
pub const QUERY_ROWS_PER_BLOCK: usize = 64;
const QUERY_ROWS_PER_GRADIENT_ACCUMULATION: usize = 8 * QUERY_ROWS_PER_BLOCK;
const KEYS_PER_GRADIENT_BLOCK: usize = 256;

impl SingleHeadParameters {
    /// Factor 1 / sqrt(d) by which attention scores are scaled before the softmax.
    pub fn softmax_scale(&self) -> f64 {
        1.0 / (self.head_dim as f64).sqrt()
    }

    /// Number of leading keys that at least one query at these ascending positions sees; later keys
    /// have no effect on the queries.
    fn count_keys_seen_by_any_query(&self, positions: &[usize], s: usize) -> usize {
        if self.causal { positions.last().map_or(0, |last| last + 1) } else { s }
    }

    /// Computes the attention scores `q kᵀ / sqrt(d)` of one head, `[rows, keys]`, in fp64.
    pub fn scaled_attention_scores(&self, q: &[f64], k: &[f64]) -> Vec<f64> {
        self.scaled_product_with_transpose(q, k, self.softmax_scale())
    }

    /// Computes the matrix `factor · a bᵀ` for rows of d elements (the head dimension).
    fn scaled_product_with_transpose(&self, a: &[f64], b: &[f64], factor: f64) -> Vec<f64> {
        let (rows, keys) = (a.len() / self.head_dim, b.len() / self.head_dim);
        let mut out = vec![0.0; rows * keys];
        let (a, b) = (
            MatRef::from_row_major_slice(a, rows, self.head_dim),
            MatRef::from_row_major_slice(b, keys, self.head_dim),
        );
        add_scaled_matrix_product(&mut out, a, b.transpose(), factor);
        out
    }

    /// Computes the attention output `p v`, `[rows, d]`, from softmax probabilities p and values v.
    pub fn probabilities_times_values(&self, p: &[f64], v: &[f64]) -> Vec<f64> {
        let keys = v.len() / self.head_dim;
        let rows = p.len() / keys;
        let mut out = vec![0.0; rows * self.head_dim];
        let (p, v) = (
            MatRef::from_row_major_slice(p, rows, keys),
            MatRef::from_row_major_slice(v, keys, self.head_dim),
        );
        add_scaled_matrix_product(&mut out, p, v, 1.0);
        out
    }

    /// Computes the softmax of a head's scores over the keys that each query sees; the probability
    /// of hidden keys is zero.
    fn softmax_probabilities(&self, q: &[f64], positions: &[usize], k: &[f64]) -> Vec<f64> {
        let keys = k.len() / self.head_dim;
        let mut p = self.scaled_attention_scores(q, k);
        for (row, &position) in p.chunks_mut(keys).zip(positions) {
            let (seen, hidden) = row.split_at_mut(if self.causal { position + 1 } else { keys });
            softmax_in_place_f64(seen);
            hidden.fill(0.0);
        }
        p
    }

    /// Computes the fp64 attention output `softmax(q kᵀ / sqrt(d)) v` of some queries of one head.
    pub fn attention_output_of_queries(
        &self,
        q: &[f64],
        positions: &[usize],
        k: &[f64],
        v: &[f64],
    ) -> Vec<f64> {
        let seen =
            self.count_keys_seen_by_any_query(positions, k.len() / self.head_dim) * self.head_dim;
        self.probabilities_times_values(
            &self.softmax_probabilities(q, positions, &k[..seen]),
            &v[..seen],
        )
    }

    /// Computes the softmax probabilities P and the gradient dS of the scores for some queries of
    /// one head: `dS = P ∘ (dP - rowsum(P ∘ dP)) / sqrt(d)` with `dP = dO vᵀ`. dS is the gradient
    /// of `q kᵀ` before its scaling. The slices `k` and `v` hold only the keys and values that the
    /// queries see.
    fn probabilities_and_score_gradients(
        &self,
        q: &[f64],
        grad_out: &[f64],
        positions: &[usize],
        k: &[f64],
        v: &[f64],
    ) -> (Vec<f64>, Vec<f64>) {
        let keys = k.len() / self.head_dim;
        let p = self.softmax_probabilities(q, positions, k);
        let mut grad = self.scaled_product_with_transpose(grad_out, v, 1.0);
        for (grad, p) in grad.chunks_mut(keys).zip(p.chunks(keys)) {
            let mean: f64 = grad.iter().zip(p).map(|(grad, p)| grad * p).sum();
            grad.iter_mut()
                .zip(p)
                .for_each(|(grad, p)| *grad = p * (*grad - mean) * self.softmax_scale());
        }
        (p, grad)
    }

    /// Computes the gradient dQ of some queries of one head in fp64.
    pub fn gradients_of_queries(
        &self,
        q: &[f64],
        grad_out: &[f64],
        positions: &[usize],
        k: &[f64],
        v: &[f64],
    ) -> Vec<f64> {
        let seen =
            self.count_keys_seen_by_any_query(positions, k.len() / self.head_dim) * self.head_dim;
        let (_, grad_scores) =
            self.probabilities_and_score_gradients(q, grad_out, positions, &k[..seen], &v[..seen]);
        self.probabilities_times_values(&grad_scores, &k[..seen])
    }

    /// Computes the gradients of all keys and values of one head, `dK = dSᵀ q` and `dV = Pᵀ dO`,
    /// summed over all queries of the head.
    pub fn gradients_of_keys_and_values(
        &self,
        q: &[f64],
        grad_out: &[f64],
        k: &[f64],
        v: &[f64],
    ) -> (Vec<f64>, Vec<f64>) {
        let (d, s) = (self.head_dim, q.len() / self.head_dim);
        let (mut grad_k, mut grad_v) = (vec![0.0; s * d], vec![0.0; s * d]);
        for group in (0..s).step_by(QUERY_ROWS_PER_GRADIENT_ACCUMULATION) {
            let group = group..s.min(group + QUERY_ROWS_PER_GRADIENT_ACCUMULATION);
            let seen = if self.causal { group.end } else { s };
            let pieces = parallel::map_numbers_in_parallel(
                group.len().div_ceil(QUERY_ROWS_PER_BLOCK),
                &|number| {
                    let from = group.start + number * QUERY_ROWS_PER_BLOCK;
                    let positions: Vec<usize> =
                        (from..group.end.min(from + QUERY_ROWS_PER_BLOCK)).collect();
                    let piece = from * d..(from + positions.len()) * d;
                    let (p, grad_scores) = self.probabilities_and_score_gradients(
                        &q[piece.clone()],
                        &grad_out[piece.clone()],
                        &positions,
                        &k[..seen * d],
                        &v[..seen * d],
                    );
                    (piece, p, grad_scores)
                },
            );
            let blocks = grad_k[..seen * d]
                .chunks_mut(KEYS_PER_GRADIENT_BLOCK * d)
                .zip(grad_v[..seen * d].chunks_mut(KEYS_PER_GRADIENT_BLOCK * d));
            parallel::run_tasks_in_parallel(blocks.collect(), &|block, (grad_k, grad_v)| {
                let keys = grad_k.len() / d;
                for (piece, p, grad_scores) in &pieces {
                    let rows = piece.len() / d;
                    for (out, weights, x) in
                        [(&mut *grad_k, grad_scores, q), (&mut *grad_v, p, grad_out)]
                    {
                        let weights = MatRef::from_row_major_slice(weights, rows, seen)
                            .subcols(block * KEYS_PER_GRADIENT_BLOCK, keys);
                        let x = MatRef::from_row_major_slice(&x[piece.clone()], rows, d);
                        add_scaled_matrix_product(out, weights.transpose(), x, 1.0);
                    }
                }
            });
        }
        (grad_k, grad_v)
    }
}

/// Adds the matrix product `factor · a b` to the row-major matrix `out`, single-threaded.
fn add_scaled_matrix_product(out: &mut [f64], a: MatRef<'_, f64>, b: MatRef<'_, f64>, factor: f64) {
    let out = MatMut::from_row_major_slice_mut(out, a.nrows(), b.ncols());
    matmul_f64_on_calling_thread(out, Accum::Add, a, b, factor);
}
