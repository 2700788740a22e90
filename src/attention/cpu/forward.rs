//! Attention forward on the CPU: each block of queries passes over the keys once, with a running
//! maximum and sum for each row.

use kernelgate_numerics::gemm::Accum;
use pulp::Arch;

use super::blocks::{
    KEYS_PER_TILE, QUERIES_PER_BLOCK, SCORES_PER_TILE, matrix, single_thread_gemm,
};
use super::rows::{FinishSoftmaxRows, OnlineSoftmaxRows, ScoreTile, UpdateSoftmaxTile};
use crate::attention::definition::Attention;
use crate::parallel;
use kernelgate::workload::Tensors;

/// Computes `out` `[b, h, s, d]` and `normalisers` `[b, h, s]`. The backward pass needs the
/// normalisers: log2 of each row's `Σ exp(score)`.
pub(super) fn compute_attention(
    attention: &Attention,
    inputs: &Tensors,
    out: &mut [f32],
    normalisers: &mut [f32],
) {
    let Attention { s, keys, d, .. } = *attention;
    let [q, k, v] = ["q", "k", "v"].map(|name| inputs.f32(name));
    let heads = out.chunks_mut(s * d).zip(normalisers.chunks_mut(s)).enumerate();
    let blocks = heads.flat_map(|(head, (out, normalisers))| {
        let blocks = out
            .chunks_mut(QUERIES_PER_BLOCK * d)
            .zip(normalisers.chunks_mut(QUERIES_PER_BLOCK))
            .enumerate();
        blocks.map(move |(block, (out, normalisers))| {
            (head, block * QUERIES_PER_BLOCK, out, normalisers)
        })
    });
    parallel::for_each_task(blocks.collect(), &|_, (head, first, out, normalisers)| {
        let q = &q[head * s * d..][..s * d];
        let [k, v] =
            [k, v].map(|x| &x[head / attention.heads_per_key_head() * keys * d..][..keys * d]);
        attend_queries(attention, first, [q, k, v], out, normalisers);
    });
}

/// Computes attention for the queries of a head from `first` on; `normalisers` has one entry for
/// each query.
fn attend_queries(
    attention: &Attention,
    first: usize,
    [q, k, v]: [&[f32]; 3],
    out: &mut [f32],
    normalisers: &mut [f32],
) {
    let (arch, d) = (Arch::new(), attention.d);
    let mut scores = [0.0; SCORES_PER_TILE];
    let mut online = OnlineSoftmaxRows::<QUERIES_PER_BLOCK>::new();
    for key in (0..attention.keys).step_by(KEYS_PER_TILE) {
        let Some(tile) = ScoreTile::new(attention, first, normalisers.len(), key) else { break };
        let q = matrix(&q[tile.query * d..], tile.queries, d);
        let (k, v) = (matrix(&k[key * d..], tile.keys, d), matrix(&v[key * d..], tile.keys, d));
        let (scores, out) = (&mut scores[..tile.queries * tile.keys], &mut out[tile.hidden * d..]);
        single_thread_gemm(scores, Accum::Replace, q, k.transpose(), 1.0);
        arch.dispatch(UpdateSoftmaxTile { online: &mut online, tile: &tile, scores, out });
        let accumulate = if key == 0 { Accum::Replace } else { Accum::Add };
        single_thread_gemm(out, accumulate, matrix(scores, tile.queries, tile.keys), v, 1.0);
    }
    arch.dispatch(FinishSoftmaxRows { online: &online, out, normalisers });
}
