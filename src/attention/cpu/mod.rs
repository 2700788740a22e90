//! Attention on the CPU: tiles of scores that stay in cache, GEMMs by `faer`, softmax by vectorised
//! loops.
//!
//! A CPU attention task is a block of queries in the forward and a key head in the backward. Each
//! CPU attention task runs on one thread with its tiles on the stack; only launches of `ring`
//! allocate memory. The CPU implementations do not support bf16 and f16.

mod backward;
mod blocks;
mod forward;
mod ring;
mod rows;

use crate::family::check_problem_dtype_is_computed;
use kernelgate_numerics::gemm::Accum;
use pulp::Arch;

use crate::attention::components::{self, AttentionScoresProblem, AttentionValuesProblem};
use crate::attention::definition::AttentionForward;
use crate::attention::gradients::AttentionBackward;
use blocks::{for_row_blocks_of_heads_in_parallel, single_thread_gemm, view_first_rows_as_matrix};
use kernelgate::backend::cpu::CpuTask;
use kernelgate::backend::{Implementation, PrepareFunction};
use kernelgate::workload::{Dtype, Tensors};
pub use ring::CPU_RING_ATTENTION_ROWS as RING;
use rows::SoftmaxOfEachRow;

/// CPU implementations of attention forward (one entry, f32 only).
pub const CPU_ATTENTION_FORWARD_ROWS: &[Implementation<AttentionForward>] = &[Implementation {
    implementation_name: "cpu",
    description: "online softmax over tiles of 256 queries by 64 keys; tiles that the mask hides are \
            skipped",
    supports: |problem| check_problem_dtype_is_computed(problem.attention.dtype, Dtype::F32),
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let attention = problem.attention;
        let outputs =
            Tensors::new().with_output("out", attention.query_and_output_shape(), Dtype::F32);
        let mut normalisers =
            vec![0.0; attention.batch_size * attention.query_heads * attention.queries_per_head];
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            forward::compute_attention_forward_on_cpu(
                &attention,
                inputs,
                outputs.f32_mut("out"),
                &mut normalisers,
            )
        })
    }),
}];

/// CPU implementations of attention backward (one entry, f32 only).
pub const CPU_ATTENTION_BACKWARD_ROWS: &[Implementation<AttentionBackward>] = &[Implementation {
    implementation_name: "cpu",
    description: "scores recomputed in tiles of 256 queries by 64 keys from the rows' normalisers; a \
            head of keys a task",
    supports: |problem| check_problem_dtype_is_computed(problem.attention.dtype, Dtype::F32),
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let attention = problem.attention;
        let mut outputs = Tensors::new();
        for input in ["q", "k", "v"] {
            let name = format!("grad_{input}");
            outputs = outputs.with_output(&name, attention.shape_of_named_input(input), Dtype::F32);
        }
        let saved =
            backward::SavedForwardOutputs::run_forward_and_save_outputs(&attention, &inputs);
        let task = CpuTask::new(inputs, outputs, move |inputs, outputs| {
            backward::compute_attention_gradients_on_cpu(&attention, inputs, &saved, outputs)
        });
        // Attention's saved forward outputs depend on q, k and v; between launches the harness may
        // therefore replace only grad_out.
        task.reading_only_inputs(&["grad_out"])
    }),
}];

/// CPU implementations of the first attention step, the scores `q kᵀ / sqrt(d)`.
pub const CPU_SCORES_STEP_ROWS: &[Implementation<AttentionScoresProblem>] = &[Implementation {
    implementation_name: "cpu",
    description: "one GEMM a block of queries",
    supports: |problem| check_problem_dtype_is_computed(problem.shape.dtype, Dtype::F32),
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let shape = problem.shape;
        let scale = 1.0 / (shape.head_dim as f32).sqrt();
        CpuTask::new(
            inputs,
            Tensors::new().with_output("scores", shape.score_matrix_shape(), Dtype::F32),
            move |inputs, outputs| {
                let (q, k, d, s) = (
                    inputs.f32_elements("q"),
                    inputs.f32_elements("k"),
                    shape.head_dim,
                    shape.seq_len,
                );
                for_row_blocks_of_heads_in_parallel(
                    outputs.f32_mut("scores"),
                    s,
                    s,
                    &|head, row, scores| {
                        let (rows, k) =
                            (scores.len() / s, view_first_rows_as_matrix(&k[head * s * d..], s, d));
                        single_thread_gemm(
                            scores,
                            Accum::Replace,
                            view_first_rows_as_matrix(&q[row * d..], rows, d),
                            k.transpose(),
                            scale,
                        );
                    },
                );
            },
        )
    }),
}];

/// CPU implementations of the second attention step, the softmax over the keys.
pub const CPU_SOFTMAX_STEP_ROWS: &[Implementation<components::AttentionSoftmaxProblem>] =
    &[Implementation {
        implementation_name: "cpu",
        description: "three passes over a row in L1, SIMD over keys",
        supports: |problem| check_problem_dtype_is_computed(problem.shape.dtype, Dtype::F32),
        prepare: PrepareFunction::Cpu(|problem, inputs| {
            let shape = problem.shape;
            CpuTask::new(
                inputs,
                Tensors::new().with_output("probabilities", shape.score_matrix_shape(), Dtype::F32),
                move |inputs, outputs| {
                    let (scores, s) = (inputs.f32_elements("scores"), shape.seq_len);
                    for_row_blocks_of_heads_in_parallel(
                        outputs.f32_mut("probabilities"),
                        s,
                        s,
                        &|_, row, probabilities| {
                            Arch::new().dispatch(SoftmaxOfEachRow {
                                scores: &scores[row * s..][..probabilities.len()],
                                probabilities,
                                row_length: s,
                            });
                        },
                    );
                },
            )
        }),
    }];

/// CPU implementations of the third attention step, the output `p v`.
pub const CPU_VALUES_STEP_ROWS: &[Implementation<AttentionValuesProblem>] = &[Implementation {
    implementation_name: "cpu",
    description: "one GEMM a block of queries",
    supports: |problem| check_problem_dtype_is_computed(problem.shape.dtype, Dtype::F32),
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let shape = problem.shape;
        CpuTask::new(
            inputs,
            Tensors::new().with_output("out", shape.query_key_value_shape(), Dtype::F32),
            move |inputs, outputs| {
                let (p, v, d, s) = (
                    inputs.f32_elements("probabilities"),
                    inputs.f32_elements("v"),
                    shape.head_dim,
                    shape.seq_len,
                );
                for_row_blocks_of_heads_in_parallel(
                    outputs.f32_mut("out"),
                    s,
                    d,
                    &|head, row, out| {
                        let (rows, v) =
                            (out.len() / d, view_first_rows_as_matrix(&v[head * s * d..], s, d));
                        single_thread_gemm(
                            out,
                            Accum::Replace,
                            view_first_rows_as_matrix(&p[row * s..], rows, s),
                            v,
                            1.0,
                        );
                    },
                );
            },
        )
    }),
}];

#[cfg(test)]
mod tests;
