//! CPU implementation of ring attention, which stands for several GPUs: one process computes the
//! part of each GPU after the other. The CPU ring attention computes and merges the steps of any
//! number of GPUs. The CPU ring attention is deliberately not fast: every step copies the rows of
//! q, k and v that it reads.

use std::ops::Range;
use std::sync::Arc;

use super::forward;
use crate::attention::definition::AttentionParameters;
use crate::attention::ring::{
    KEY_NAMES_BY_RANK, OUTPUT_NAMES_BY_RANK, QUERY_NAMES_BY_RANK, RingAttentionProblem,
    RingAttentionStep, VALUE_NAMES_BY_RANK,
};
use crate::family::check_problem_dtype_is_computed;
use kernelgate::backend::cpu::CpuTask;
use kernelgate::backend::{Implementation, PrepareFunction};
use kernelgate::workload::{Dtype, Tensor, TensorData, Tensors};

/// CPU implementations of ring attention forward, the attention over several GPUs.
pub const CPU_RING_ATTENTION_ROWS: &[Implementation<RingAttentionProblem>] = &[Implementation {
    implementation_name: "cpu",
    description: "each GPU's steps in their order, merged by the rows' sums of exponentials",
    supports: |problem| check_problem_dtype_is_computed(problem.attention.dtype, Dtype::F32),
    prepare: PrepareFunction::Cpu(prepare_cpu_ring_attention_task),
}];

fn prepare_cpu_ring_attention_task(
    problem: &RingAttentionProblem,
    inputs: Arc<Tensors>,
) -> CpuTask {
    let ring = *problem;
    let mut outputs = Tensors::new();
    for name in &OUTPUT_NAMES_BY_RANK[..ring.gpus] {
        outputs = outputs.with_output(name, ring.tensor_shape_per_gpu(), Dtype::F32);
    }
    CpuTask::new(inputs, outputs, move |inputs, outputs| {
        for (rank, name) in OUTPUT_NAMES_BY_RANK.iter().enumerate().take(ring.gpus) {
            let out = outputs.f32_mut(name);
            out.fill(0.0);
            let mut merged = MergedOutputOfOneGpu {
                ring: &ring,
                out,
                log2_sum_exps: vec![f32::NEG_INFINITY; query_rows_of_gpu(&ring)],
            };
            ring.ring_steps_of_gpu(rank)
                .iter()
                .for_each(|step| merged.add_ring_step(rank, step, inputs));
        }
    })
}

const fn query_rows_of_gpu(ring: &RingAttentionProblem) -> usize {
    ring.attention.query_heads * ring.positions_per_gpu()
}

/// Copies the rows in the range `rows` from every head of one GPU's tensor.
fn copy_rows_of_every_head(
    ring: &RingAttentionProblem,
    tensor: &Tensor,
    rows: &Range<usize>,
) -> Tensor {
    let (d, all) = (ring.attention.head_dim, ring.positions_per_gpu());
    let TensorData::F32(values) = tensor.tensor_data() else {
        unreachable!("the row declines other dtypes")
    };
    let of_a_head = |head: &[f32]| head[rows.start * d..rows.end * d].to_vec();
    let values: Vec<f32> = values.chunks(all * d).flat_map(of_a_head).collect();
    Tensor::new([1, ring.attention.query_heads, rows.len(), d], TensorData::F32(values))
}

/// Attention output of one simulated GPU, merged over the ring steps processed so far.
struct MergedOutputOfOneGpu<'a> {
    ring: &'a RingAttentionProblem,
    out: &'a mut [f32],
    /// For each query row of the GPU, log2 of the sum of exponentials of its scores so far.
    log2_sum_exps: Vec<f32>,
}

impl MergedOutputOfOneGpu<'_> {
    fn add_ring_step(&mut self, rank: usize, step: &RingAttentionStep, inputs: &Tensors) {
        let AttentionParameters { query_heads: h, head_dim: d, .. } = self.ring.attention;
        let (queries, keys) = (step.query_range.len(), step.key_range.len());
        let part_of =
            |name: &str, rows| copy_rows_of_every_head(self.ring, inputs.tensor(name), rows);
        let mut operands = Tensors::new();
        operands.insert("q", part_of(QUERY_NAMES_BY_RANK[rank], &step.query_range));
        operands.insert("k", part_of(KEY_NAMES_BY_RANK[step.rank_of_keys], &step.key_range));
        operands.insert("v", part_of(VALUE_NAMES_BY_RANK[step.rank_of_keys], &step.key_range));
        let part = AttentionParameters {
            queries_per_head: queries,
            keys_per_head: keys,
            causal: step.causal,
            ..self.ring.attention
        };
        let (mut out, mut sums) = (vec![0.0; h * queries * d], vec![0.0; h * queries]);
        forward::compute_attention_forward_on_cpu(&part, &operands, &mut out, &mut sums);
        for (row, (part, sum)) in out.chunks(d).zip(sums).enumerate() {
            let at = row / queries * self.ring.positions_per_gpu()
                + step.query_range.start
                + row % queries;
            let before = self.log2_sum_exps[at];
            let top = before.max(sum);
            let together = top + ((before - top).exp2() + (sum - top).exp2()).log2();
            let (kept, added) = ((before - together).exp2(), (sum - together).exp2());
            for (out, part) in self.out[at * d..(at + 1) * d].iter_mut().zip(part) {
                *out = kept * *out + added * part;
            }
            self.log2_sum_exps[at] = together;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu_tests::assert_cpu_row_agrees_with_reference;

    #[test]
    fn the_cpu_ring_agrees_with_the_reference_for_one_to_eight_gpus() {
        for (gpus, d, causal) in
            [(1, 64, true), (2, 128, false), (2, 64, true), (4, 64, false), (8, 64, true)]
        {
            assert_cpu_row_agrees_with_reference(
                &CPU_RING_ATTENTION_ROWS[0],
                &RingAttentionProblem::ring_problem_of_one_sequence(
                    gpus,
                    3,
                    208,
                    d,
                    causal,
                    Dtype::F32,
                ),
            );
        }
    }
}
