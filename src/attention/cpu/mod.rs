//! Attention on the CPU: tiles of scores that stay in cache, GEMMs by `faer`, softmax by vectorised
//! loops.
//!
//! Tasks are blocks of queries (forward) or heads (backward). Each task runs on one thread with its
//! tiles on the stack, so that only launches of `ring` allocate memory. The CPU implementations do
//! not support bf16 and f16.

mod backward;
mod blocks;
mod forward;
mod ring;
mod rows;

use crate::family::check_dtype;
use kernelgate_numerics::gemm::Accum;
use pulp::Arch;

use crate::attention::components::{self, ScoresProblem, ValuesProblem};
use crate::attention::definition::AttentionForward;
use crate::attention::gradients::AttentionBackward;
use blocks::{for_row_blocks, matrix, single_thread_gemm};
use kernelgate::backend::cpu::CpuTask;
use kernelgate::backend::{Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensors};
pub use ring::RING_ROWS as RING;
use rows::RowSoftmax;

/// CPU implementations of attention forward.
pub const FORWARD: &[Implementation<AttentionForward>] = &[Implementation {
    name: "cpu",
    about: "online softmax over tiles of 256 queries by 64 keys; tiles that the mask hides are \
            skipped",
    supports: |problem| check_dtype(problem.attention.dtype, Dtype::F32),
    prepare: Prepare::Cpu(|problem, inputs| {
        let attention = problem.attention;
        let outputs = Tensors::new().with_output("out", attention.shape(), Dtype::F32);
        let mut normalisers = vec![0.0; attention.b * attention.h * attention.s];
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            forward::compute_attention(&attention, inputs, outputs.f32_mut("out"), &mut normalisers)
        })
    }),
}];

/// CPU implementations of attention backward.
pub const BACKWARD: &[Implementation<AttentionBackward>] = &[Implementation {
    name: "cpu",
    about: "scores recomputed in tiles of 256 queries by 64 keys from the rows' normalisers; a \
            head of keys a task",
    supports: |problem| check_dtype(problem.attention.dtype, Dtype::F32),
    prepare: Prepare::Cpu(|problem, inputs| {
        let attention = problem.attention;
        let mut outputs = Tensors::new();
        for input in ["q", "k", "v"] {
            let name = format!("grad_{input}");
            outputs = outputs.with_output(&name, attention.shape_of_input(input), Dtype::F32);
        }
        let saved = backward::SavedForward::new(&attention, &inputs);
        let task = CpuTask::new(inputs, outputs, move |inputs, outputs| {
            backward::compute_attention_gradients(&attention, inputs, &saved, outputs)
        });
        // The saved outputs of the forward pass are functions of the other inputs, so they are not
        // replaced separately.
        task.reading(&["grad_out"])
    }),
}];

/// CPU implementations of the scores `q kᵀ / sqrt(d)`.
pub const SCORES: &[Implementation<ScoresProblem>] = &[Implementation {
    name: "cpu",
    about: "one GEMM a block of queries",
    supports: |problem| check_dtype(problem.shape.dtype, Dtype::F32),
    prepare: Prepare::Cpu(|problem, inputs| {
        let shape = problem.shape;
        let scale = 1.0 / (shape.d as f32).sqrt();
        CpuTask::new(
            inputs,
            Tensors::new().with_output("scores", shape.score_shape(), Dtype::F32),
            move |inputs, outputs| {
                let (q, k, d, s) = (inputs.f32("q"), inputs.f32("k"), shape.d, shape.s);
                for_row_blocks(outputs.f32_mut("scores"), s, s, &|head, row, scores| {
                    let (rows, k) = (scores.len() / s, matrix(&k[head * s * d..], s, d));
                    single_thread_gemm(
                        scores,
                        Accum::Replace,
                        matrix(&q[row * d..], rows, d),
                        k.transpose(),
                        scale,
                    );
                });
            },
        )
    }),
}];

/// CPU implementations of the softmax step alone.
pub const SOFTMAX: &[Implementation<components::SoftmaxProblem>] = &[Implementation {
    name: "cpu",
    about: "three passes over a row in L1, SIMD over keys",
    supports: |problem| check_dtype(problem.shape.dtype, Dtype::F32),
    prepare: Prepare::Cpu(|problem, inputs| {
        let shape = problem.shape;
        CpuTask::new(
            inputs,
            Tensors::new().with_output("probabilities", shape.score_shape(), Dtype::F32),
            move |inputs, outputs| {
                let (scores, s) = (inputs.f32("scores"), shape.s);
                for_row_blocks(outputs.f32_mut("probabilities"), s, s, &|_, row, probabilities| {
                    Arch::new().dispatch(RowSoftmax {
                        scores: &scores[row * s..][..probabilities.len()],
                        probabilities,
                        s,
                    });
                });
            },
        )
    }),
}];

/// CPU implementations of the output `p v`.
pub const VALUES: &[Implementation<ValuesProblem>] = &[Implementation {
    name: "cpu",
    about: "one GEMM a block of queries",
    supports: |problem| check_dtype(problem.shape.dtype, Dtype::F32),
    prepare: Prepare::Cpu(|problem, inputs| {
        let shape = problem.shape;
        CpuTask::new(
            inputs,
            Tensors::new().with_output("out", shape.vector_shape(), Dtype::F32),
            move |inputs, outputs| {
                let (p, v, d, s) = (inputs.f32("probabilities"), inputs.f32("v"), shape.d, shape.s);
                for_row_blocks(outputs.f32_mut("out"), s, d, &|head, row, out| {
                    let (rows, v) = (out.len() / d, matrix(&v[head * s * d..], s, d));
                    single_thread_gemm(out, Accum::Replace, matrix(&p[row * s..], rows, s), v, 1.0);
                });
            },
        )
    }),
}];

#[cfg(test)]
mod tests;
