//! Attention forward on the CPU: each block of queries passes over the keys once, with a running
//! maximum and running sum of exponentials for each row.

use kernelgate_numerics::gemm::Accum;
use pulp::Arch;

use super::blocks::{
    KEYS_PER_CPU_SCORE_TILE, QUERIES_PER_CPU_TASK, SCORES_PER_CPU_TILE, single_thread_gemm,
    view_first_rows_as_matrix,
};
use super::rows::{
    NormaliseOnlineSoftmaxRows, OnlineSoftmaxRows, ScoreTileExtents, UpdateOnlineSoftmaxWithTile,
};
use crate::attention::definition::AttentionParameters;
use crate::parallel;
use kernelgate::workload::Tensors;

/// Computes on all CPU threads the attention output `out` `[b, h, s, d]` and the softmax
/// `normalisers` `[b, h, s]`. The backward pass reads the normaliser of each query row: log2 of the
/// row's `Σ exp(score)`.
pub(super) fn compute_attention_forward_on_cpu(
    attention: &AttentionParameters,
    inputs: &Tensors,
    out: &mut [f32],
    normalisers: &mut [f32],
) {
    let AttentionParameters { queries_per_head: s, keys_per_head: keys, head_dim: d, .. } =
        *attention;
    let [q, k, v] = ["q", "k", "v"].map(|name| inputs.f32_elements(name));
    let heads = out.chunks_mut(s * d).zip(normalisers.chunks_mut(s)).enumerate();
    let blocks = heads.flat_map(|(head, (out, normalisers))| {
        let blocks = out
            .chunks_mut(QUERIES_PER_CPU_TASK * d)
            .zip(normalisers.chunks_mut(QUERIES_PER_CPU_TASK))
            .enumerate();
        blocks.map(move |(block, (out, normalisers))| {
            (head, block * QUERIES_PER_CPU_TASK, out, normalisers)
        })
    });
    parallel::run_tasks_in_parallel(blocks.collect(), &|_, (head, first, out, normalisers)| {
        let q = &q[head * s * d..][..s * d];
        let [k, v] = [k, v]
            .map(|x| &x[head / attention.query_heads_per_key_head() * keys * d..][..keys * d]);
        compute_attention_of_query_block(attention, first, [q, k, v], out, normalisers);
    });
}

/// Computes attention for the block of a head's queries that starts at `first`; `normalisers` has
/// one entry for each query of the block.
fn compute_attention_of_query_block(
    attention: &AttentionParameters,
    first: usize,
    [q, k, v]: [&[f32]; 3],
    out: &mut [f32],
    normalisers: &mut [f32],
) {
    let (arch, d) = (Arch::new(), attention.head_dim);
    let mut scores = [0.0; SCORES_PER_CPU_TILE];
    let mut online = OnlineSoftmaxRows::<QUERIES_PER_CPU_TASK>::before_first_score_tile();
    for key in (0..attention.keys_per_head).step_by(KEYS_PER_CPU_SCORE_TILE) {
        let Some(tile) = ScoreTileExtents::score_tile_with_visible_keys(
            attention,
            first,
            normalisers.len(),
            key,
        ) else {
            break;
        };
        let q = view_first_rows_as_matrix(&q[tile.first_query * d..], tile.queries, d);
        let (k, v) = (
            view_first_rows_as_matrix(&k[key * d..], tile.keys, d),
            view_first_rows_as_matrix(&v[key * d..], tile.keys, d),
        );
        let (scores, out) =
            (&mut scores[..tile.queries * tile.keys], &mut out[tile.fully_masked_queries * d..]);
        single_thread_gemm(scores, Accum::Replace, q, k.transpose(), 1.0);
        arch.dispatch(UpdateOnlineSoftmaxWithTile {
            online: &mut online,
            tile: &tile,
            scores,
            out,
        });
        let accumulate = if key == 0 { Accum::Replace } else { Accum::Add };
        single_thread_gemm(
            out,
            accumulate,
            view_first_rows_as_matrix(scores, tile.queries, tile.keys),
            v,
            1.0,
        );
    }
    arch.dispatch(NormaliseOnlineSoftmaxRows { online: &online, out, log2_sum_exps: normalisers });
}
