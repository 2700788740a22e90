//! CPU implementation of attention over several GPUs: it computes the parts of all GPUs one after
//! the other. The steps and the merge of their results run for any number of GPUs. It is
//! deliberately not fast: every step copies its rows.

use std::ops::Range;
use std::sync::Arc;

use super::forward;
use crate::attention::definition::Attention;
use crate::attention::ring::{K, OUT, Q, RingProblem, RingStep, V};
use crate::family::check_dtype;
use kernelgate::backend::cpu::CpuTask;
use kernelgate::backend::{Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensor, TensorData, Tensors};

/// CPU implementations of attention forward over several GPUs.
pub const RING_ROWS: &[Implementation<RingProblem>] = &[Implementation {
    name: "cpu",
    about: "each GPU's steps in their order, merged by the rows' sums of exponentials",
    supports: |problem| check_dtype(problem.attention.dtype, Dtype::F32),
    prepare: Prepare::Cpu(prepare_ring_attention),
}];

fn prepare_ring_attention(problem: &RingProblem, inputs: Arc<Tensors>) -> CpuTask {
    let ring = *problem;
    let mut outputs = Tensors::new();
    for name in &OUT[..ring.gpus] {
        outputs = outputs.with_output(name, ring.shape(), Dtype::F32);
    }
    CpuTask::new(inputs, outputs, move |inputs, outputs| {
        for (rank, name) in OUT.iter().enumerate().take(ring.gpus) {
            let out = outputs.f32_mut(name);
            out.fill(0.0);
            let mut merged = MergedRingOutputs {
                ring: &ring,
                out,
                sums: vec![f32::NEG_INFINITY; query_rows_of_gpu(&ring)],
            };
            ring.ring_steps(rank).iter().for_each(|step| merged.add(rank, step, inputs));
        }
    })
}

const fn query_rows_of_gpu(ring: &RingProblem) -> usize {
    ring.attention.h * ring.gpu_positions()
}

/// Copies the range `rows` of every head of a tensor.
fn rows_of_every_head(ring: &RingProblem, tensor: &Tensor, rows: &Range<usize>) -> Tensor {
    let (d, all) = (ring.attention.d, ring.gpu_positions());
    let TensorData::F32(values) = tensor.tensor_data() else {
        unreachable!("the row declines other dtypes")
    };
    let of_a_head = |head: &[f32]| head[rows.start * d..rows.end * d].to_vec();
    let values: Vec<f32> = values.chunks(all * d).flat_map(of_a_head).collect();
    Tensor::new([1, ring.attention.h, rows.len(), d], TensorData::F32(values))
}

/// Output of one GPU, merged over the keys that its steps have processed.
struct MergedRingOutputs<'a> {
    ring: &'a RingProblem,
    out: &'a mut [f32],
    /// For each row, log2 of the sum of exponentials.
    sums: Vec<f32>,
}

impl MergedRingOutputs<'_> {
    fn add(&mut self, rank: usize, step: &RingStep, inputs: &Tensors) {
        let Attention { h, d, .. } = self.ring.attention;
        let (queries, keys) = (step.queries.len(), step.keys.len());
        let part_of = |name: &str, rows| rows_of_every_head(self.ring, inputs.tensor(name), rows);
        let mut operands = Tensors::new();
        operands.insert("q", part_of(Q[rank], &step.queries));
        operands.insert("k", part_of(K[step.keys_of], &step.keys));
        operands.insert("v", part_of(V[step.keys_of], &step.keys));
        let part = Attention { s: queries, keys, causal: step.causal, ..self.ring.attention };
        let (mut out, mut sums) = (vec![0.0; h * queries * d], vec![0.0; h * queries]);
        forward::compute_attention(&part, &operands, &mut out, &mut sums);
        for (row, (part, sum)) in out.chunks(d).zip(sums).enumerate() {
            let at = row / queries * self.ring.gpu_positions() + step.queries.start + row % queries;
            let before = self.sums[at];
            let top = before.max(sum);
            let together = top + ((before - top).exp2() + (sum - top).exp2()).log2();
            let (kept, added) = ((before - together).exp2(), (sum - together).exp2());
            for (out, part) in self.out[at * d..(at + 1) * d].iter_mut().zip(part) {
                *out = kept * *out + added * part;
            }
            self.sums[at] = together;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu_tests::check_row_against_reference;

    #[test]
    fn the_cpu_ring_agrees_with_the_reference_for_one_to_eight_gpus() {
        for (gpus, d, causal) in
            [(1, 64, true), (2, 128, false), (2, 64, true), (4, 64, false), (8, 64, true)]
        {
            check_row_against_reference(
                &RING_ROWS[0],
                &RingProblem::new(gpus, 3, 208, d, causal, Dtype::F32),
            );
        }
    }
}
