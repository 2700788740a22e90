//! Attention backward on the CPU: each parallel task computes the gradients of one key head and of
//! the query heads that share it. The CPU backward recomputes the attention scores tile by tile,
//! and their probabilities from the normalisers that the forward pass saved.

use kernelgate_numerics::gemm::Accum;
use pulp::Arch;

use super::blocks::{
    KEYS_PER_CPU_SCORE_TILE, QUERIES_PER_CPU_TASK, SCORES_PER_CPU_TILE, single_thread_gemm,
    view_first_rows_as_matrix,
};
use super::forward;
use super::rows::{InnerProductsOfRowPairs, ProbabilitiesAndScoreGradients, ScoreTileExtents};
use crate::attention::definition::AttentionParameters;
use crate::parallel;
use kernelgate::workload::{TensorData, Tensors};

/// Output and softmax normalisers that the CPU attention forward saves for the backward.
pub(super) struct SavedForwardOutputs {
    out: Vec<f32>,
    log2_sum_exps: Vec<f32>,
}

impl SavedForwardOutputs {
    /// Runs the CPU attention forward and saves its output and softmax normalisers.
    pub(super) fn run_forward_and_save_outputs(
        attention: &AttentionParameters,
        inputs: &Tensors,
    ) -> Self {
        let rows = attention.batch_size * attention.query_heads * attention.queries_per_head;
        let mut saved =
            Self { out: vec![0.0; rows * attention.head_dim], log2_sum_exps: vec![0.0; rows] };
        forward::compute_attention_forward_on_cpu(
            attention,
            inputs,
            &mut saved.out,
            &mut saved.log2_sum_exps,
        );
        saved
    }
}

/// Computes the gradients `grad_q` `[b, h, s, d]`, `grad_k` and `grad_v` `[b, h_kv, s, d]` on all
/// CPU threads.
pub(super) fn compute_attention_gradients_on_cpu(
    attention: &AttentionParameters,
    inputs: &Tensors,
    saved: &SavedForwardOutputs,
    outputs: &mut Tensors,
) {
    let AttentionParameters { queries_per_head: s, head_dim: d, .. } = *attention;
    let [q, k, v, grad_out] = ["q", "k", "v", "grad_out"].map(|name| inputs.f32_elements(name));
    let share = attention.query_heads_per_key_head();
    let mut slices = outputs.iter_mut().map(|(name, tensor)| match tensor.tensor_data_mut() {
        // Each gradient tensor is split into one slice for each key head, which one task computes.
        TensorData::F32(values) => {
            values.chunks_mut(s * d * if name == "grad_q" { share } else { 1 })
        }
        _ => unreachable!("gradients are f32"),
    });
    // The output tensors iterate in alphabetical order of their names: grad_k, grad_q, grad_v.
    let [grad_k, grad_q, grad_v] = std::array::from_fn(|_| slices.next().expect("three outputs"));
    let heads = grad_q.zip(grad_k).zip(grad_v).collect();
    parallel::run_tasks_in_parallel(heads, &|key_head,
                                             ((grad_q, grad_k), grad_v): (
        (&mut [f32], &mut [f32]),
        &mut [f32],
    )| {
        grad_k.fill(0.0);
        grad_v.fill(0.0);
        for (grad_q, head) in grad_q.chunks_mut(s * d).zip(key_head * share..) {
            let [k, v] = [k, v].map(|x| &x[key_head * s * d..][..s * d]);
            let [q, grad_out, out] = [q, grad_out, &saved.out].map(|x| &x[head * s * d..][..s * d]);
            let normalisers = &saved.log2_sum_exps[head * s..][..s];
            let head = QueryHeadBackwardInputs {
                attention,
                q,
                k,
                v,
                grad_out,
                out,
                log2_sum_exps: normalisers,
            };
            for (block, grad_q) in grad_q.chunks_mut(QUERIES_PER_CPU_TASK * d).enumerate() {
                head.add_gradients_of_query_block(
                    block * QUERIES_PER_CPU_TASK,
                    grad_q,
                    grad_k,
                    grad_v,
                );
            }
        }
    });
}

/// Inputs of the backward pass of one query head: q, k, v, grad_out and out as matrices `[s, d]`,
/// and the row normalisers.
struct QueryHeadBackwardInputs<'a> {
    attention: &'a AttentionParameters,
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    grad_out: &'a [f32],
    out: &'a [f32],
    log2_sum_exps: &'a [f32],
}

impl QueryHeadBackwardInputs<'_> {
    /// Adds the gradients that the block of queries from index `first` on contributes; `grad_q`
    /// holds only the rows of this block.
    fn add_gradients_of_query_block(
        &self,
        first: usize,
        grad_q: &mut [f32],
        grad_k: &mut [f32],
        grad_v: &mut [f32],
    ) {
        let (arch, d) = (Arch::new(), self.attention.head_dim);
        let rows = grad_q.len() / d;
        let (mut p, mut grad_scores) = ([0.0; SCORES_PER_CPU_TILE], [0.0; SCORES_PER_CPU_TILE]);
        // Row sums of P ∘ dP; each equals the inner product of the output row O and its gradient
        // row dO.
        let mut means = [0.0; QUERIES_PER_CPU_TASK];
        let block = first * d..(first + rows) * d;
        arch.dispatch(InnerProductsOfRowPairs {
            a: &self.grad_out[block.clone()],
            b: &self.out[block],
            row_length: d,
            out: &mut means,
        });
        for key in (0..self.attention.queries_per_head).step_by(KEYS_PER_CPU_SCORE_TILE) {
            let Some(tile) =
                ScoreTileExtents::score_tile_with_visible_keys(self.attention, first, rows, key)
            else {
                break;
            };
            let [q, grad_out] = [self.q, self.grad_out]
                .map(|x| view_first_rows_as_matrix(&x[tile.first_query * d..], tile.queries, d));
            let [k, v] =
                [self.k, self.v].map(|x| view_first_rows_as_matrix(&x[key * d..], tile.keys, d));
            let [p, grad_scores] =
                [&mut p, &mut grad_scores].map(|x| &mut x[..tile.queries * tile.keys]);
            single_thread_gemm(p, Accum::Replace, q, k.transpose(), 1.0);
            single_thread_gemm(grad_scores, Accum::Replace, grad_out, v.transpose(), 1.0);
            let (normalisers, means) =
                (&self.log2_sum_exps[tile.first_query..], &means[tile.fully_masked_queries..]);
            arch.dispatch(ProbabilitiesAndScoreGradients {
                tile: &tile,
                scores: p,
                grad: grad_scores,
                log2_sum_exps: normalisers,
                row_sums_of_p_dp: means,
            });
            let [p, grad_scores] =
                [p, grad_scores].map(|x| view_first_rows_as_matrix(x, tile.queries, tile.keys));
            let keys = key * d..(key + tile.keys) * d;
            single_thread_gemm(&mut grad_v[keys.clone()], Accum::Add, p.transpose(), grad_out, 1.0);
            single_thread_gemm(
                &mut grad_k[keys],
                Accum::Add,
                grad_scores.transpose(),
                q,
                tile.score_scale,
            );
            let accumulate = if key == 0 { Accum::Replace } else { Accum::Add };
            single_thread_gemm(
                &mut grad_q[tile.fully_masked_queries * d..],
                accumulate,
                grad_scores,
                k,
                tile.score_scale,
            );
        }
    }
}
