//! Attention backward on the CPU: each task computes one head. Scores are recomputed tile by tile
//! from the normalisers that the forward pass saved.

use kernelgate_numerics::gemm::Accum;
use pulp::Arch;

use super::blocks::{
    KEYS_PER_TILE, QUERIES_PER_BLOCK, SCORES_PER_TILE, matrix, single_thread_gemm,
};
use super::forward;
use super::rows::{RowInnerProducts, ScoreGradientRows, ScoreTile};
use crate::attention::definition::Attention;
use crate::parallel;
use kernelgate::workload::{TensorData, Tensors};

/// State that the forward pass saves for the backward pass.
pub(super) struct SavedForward {
    out: Vec<f32>,
    normalisers: Vec<f32>,
}

impl SavedForward {
    /// Runs the forward pass and saves its output and normalisers.
    pub(super) fn new(attention: &Attention, inputs: &Tensors) -> Self {
        let rows = attention.b * attention.h * attention.s;
        let mut saved = Self { out: vec![0.0; rows * attention.d], normalisers: vec![0.0; rows] };
        forward::compute_attention(attention, inputs, &mut saved.out, &mut saved.normalisers);
        saved
    }
}

/// Computes `grad_q` `[b, h, s, d]`, `grad_k` and `grad_v` `[b, h_kv, s, d]` on all threads.
pub(super) fn compute_attention_gradients(
    attention: &Attention,
    inputs: &Tensors,
    saved: &SavedForward,
    outputs: &mut Tensors,
) {
    let Attention { s, d, .. } = *attention;
    let [q, k, v, grad_out] = ["q", "k", "v", "grad_out"].map(|name| inputs.f32(name));
    let share = attention.heads_per_key_head();
    let mut slices = outputs.iter_mut().map(|(name, tensor)| match tensor.tensor_data_mut() {
        // The gradient is split into one chunk for each key head.
        TensorData::F32(values) => {
            values.chunks_mut(s * d * if name == "grad_q" { share } else { 1 })
        }
        _ => unreachable!("gradients are f32"),
    });
    // The output tensors are stored in the order of their names.
    let [grad_k, grad_q, grad_v] = std::array::from_fn(|_| slices.next().expect("three outputs"));
    let heads = grad_q.zip(grad_k).zip(grad_v).collect();
    parallel::for_each_task(heads, &|key_head,
                                     ((grad_q, grad_k), grad_v): (
        (&mut [f32], &mut [f32]),
        &mut [f32],
    )| {
        grad_k.fill(0.0);
        grad_v.fill(0.0);
        for (grad_q, head) in grad_q.chunks_mut(s * d).zip(key_head * share..) {
            let [k, v] = [k, v].map(|x| &x[key_head * s * d..][..s * d]);
            let [q, grad_out, out] = [q, grad_out, &saved.out].map(|x| &x[head * s * d..][..s * d]);
            let normalisers = &saved.normalisers[head * s..][..s];
            let head = HeadInputs { attention, q, k, v, grad_out, out, normalisers };
            for (block, grad_q) in grad_q.chunks_mut(QUERIES_PER_BLOCK * d).enumerate() {
                head.add_gradients_of_queries(block * QUERIES_PER_BLOCK, grad_q, grad_k, grad_v);
            }
        }
    });
}

/// Inputs of one head, each a matrix `[s, d]`.
struct HeadInputs<'a> {
    attention: &'a Attention,
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    grad_out: &'a [f32],
    out: &'a [f32],
    normalisers: &'a [f32],
}

impl HeadInputs<'_> {
    /// Adds the gradients that the queries from `first` on contribute; `grad_q` has the rows of
    /// these queries only.
    fn add_gradients_of_queries(
        &self,
        first: usize,
        grad_q: &mut [f32],
        grad_k: &mut [f32],
        grad_v: &mut [f32],
    ) {
        let (arch, d) = (Arch::new(), self.attention.d);
        let rows = grad_q.len() / d;
        let (mut p, mut grad_scores) = ([0.0; SCORES_PER_TILE], [0.0; SCORES_PER_TILE]);
        // The row sums of P ∘ dP, each equal to the inner product of dO and O of the row.
        let mut means = [0.0; QUERIES_PER_BLOCK];
        let block = first * d..(first + rows) * d;
        arch.dispatch(RowInnerProducts {
            a: &self.grad_out[block.clone()],
            b: &self.out[block],
            d,
            out: &mut means,
        });
        for key in (0..self.attention.s).step_by(KEYS_PER_TILE) {
            let Some(tile) = ScoreTile::new(self.attention, first, rows, key) else { break };
            let [q, grad_out] =
                [self.q, self.grad_out].map(|x| matrix(&x[tile.query * d..], tile.queries, d));
            let [k, v] = [self.k, self.v].map(|x| matrix(&x[key * d..], tile.keys, d));
            let [p, grad_scores] =
                [&mut p, &mut grad_scores].map(|x| &mut x[..tile.queries * tile.keys]);
            single_thread_gemm(p, Accum::Replace, q, k.transpose(), 1.0);
            single_thread_gemm(grad_scores, Accum::Replace, grad_out, v.transpose(), 1.0);
            let (normalisers, means) = (&self.normalisers[tile.query..], &means[tile.hidden..]);
            arch.dispatch(ScoreGradientRows {
                tile: &tile,
                scores: p,
                grad: grad_scores,
                normalisers,
                means,
            });
            let [p, grad_scores] = [p, grad_scores].map(|x| matrix(x, tile.queries, tile.keys));
            let keys = key * d..(key + tile.keys) * d;
            single_thread_gemm(&mut grad_v[keys.clone()], Accum::Add, p.transpose(), grad_out, 1.0);
            single_thread_gemm(
                &mut grad_k[keys],
                Accum::Add,
                grad_scores.transpose(),
                q,
                tile.scale,
            );
            let accumulate = if key == 0 { Accum::Replace } else { Accum::Add };
            single_thread_gemm(
                &mut grad_q[tile.hidden * d..],
                accumulate,
                grad_scores,
                k,
                tile.scale,
            );
        }
    }
}
