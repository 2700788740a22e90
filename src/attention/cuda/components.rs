//! GPU implementations of the three separate attention steps (scores, softmax, values), each with
//! inputs of its own, and their launches.

use std::sync::Arc;

use super::cublaslt;
use super::launch::{
    AttentionExtents, attention_kernel_spec_with_build_per_shape, element_type_define,
    upload_named_inputs,
};
use crate::attention::components::{
    AttentionScoresProblem, AttentionSoftmaxProblem, AttentionValuesProblem,
};
use kernelgate::backend::cuda::{self, CudaTask, DeviceOutput};
use kernelgate::backend::{BackendError, Implementation, PrepareFunction};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::libraries::gemm::DEFAULT_GEMM_WORKSPACE_BYTES;
use kernelgate_cuda::observe::range::run_within_named_range;
use kernelgate_cuda::{Device, KernelArgument, KernelSpec};

/// Kernels that each compute a single step of attention.
pub const SEPARATE_ATTENTION_STEP_KERNELS: &[KernelSpec<AttentionExtents>] = &[
    NAIVE_FORWARD_SCORES_KERNEL,
    NAIVE_FORWARD_SOFTMAX_KERNEL,
    NAIVE_FORWARD_VALUES_KERNEL,
    VECTORIZED_SOFTMAX_KERNEL,
];

const THREADS_PER_ATTENTION_STEP_BLOCK: usize = 256;

/// Side of the square tile of scores that a thread block of `forward_naive` computes, one thread
/// for each score.
const NAIVE_FORWARD_SCORE_TILE_SIDE: usize = 16;

/// Kernel of `forward_naive` that computes the scores, the first of its three launches.
pub const NAIVE_FORWARD_SCORES_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    constant_macros: |_| {
        vec![("THREADS", THREADS_PER_ATTENTION_STEP_BLOCK), ("TILE", NAIVE_FORWARD_SCORE_TILE_SIDE)]
    },
    ..attention_kernel_spec_with_build_per_shape(
        "attention/forward_naive",
        "attention_forward_naive_scores",
        THREADS_PER_ATTENTION_STEP_BLOCK,
        |extents| {
            [
                extents.queries_per_head.div_ceil(NAIVE_FORWARD_SCORE_TILE_SIDE),
                extents.queries_per_head.div_ceil(NAIVE_FORWARD_SCORE_TILE_SIDE),
                extents.total_query_heads,
            ]
        },
    )
};
pub const NAIVE_FORWARD_SOFTMAX_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    kernel_symbol: "attention_forward_naive_softmax",
    blocks: |extents| [extents.total_query_heads * extents.queries_per_head, 1, 1],
    ..NAIVE_FORWARD_SCORES_KERNEL
};
pub const NAIVE_FORWARD_VALUES_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    kernel_symbol: "attention_forward_naive_values",
    blocks: |extents| {
        [
            extents.queries_per_head.div_ceil(THREADS_PER_ATTENTION_STEP_BLOCK / extents.head_dim),
            extents.total_query_heads,
            1,
        ]
    },
    ..NAIVE_FORWARD_SCORES_KERNEL
};

/// Number of adjacent fp32 scores that a thread of the vectorised softmax loads at once: 16 bytes.
const SCORES_PER_SOFTMAX_LOAD: usize = 4;

/// Maximum number of keys in a row of the vectorised softmax, whose warp holds the row in
/// registers: 32 scores for each lane.
const MAX_KEYS_OF_VECTORIZED_SOFTMAX: usize = 1024;

const VECTORIZED_SOFTMAX_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    // The vectorised softmax kernel depends on neither head dimension nor mask, so the element type
    // is its only macro.
    macro_definitions: |extents| vec![element_type_define(extents)],
    constant_macros: |_| {
        vec![
            ("THREADS", THREADS_PER_ATTENTION_STEP_BLOCK),
            ("PACKET", SCORES_PER_SOFTMAX_LOAD),
            ("MAX_KEYS", MAX_KEYS_OF_VECTORIZED_SOFTMAX),
        ]
    },
    listed_build_parameters: || {
        [Dtype::Bf16, Dtype::F16]
            .map(|dtype| AttentionExtents::single_sequence_self_attention(1, 4, dtype))
            .to_vec()
    },
    ..attention_kernel_spec_with_build_per_shape(
        "attention/softmax_vectorized",
        "attention_softmax_vectorized",
        THREADS_PER_ATTENTION_STEP_BLOCK,
        // Each warp of the vectorised softmax kernel computes one row.
        |extents| {
            [
                (extents.total_query_heads * extents.queries_per_head)
                    .div_ceil(THREADS_PER_ATTENTION_STEP_BLOCK / 32),
                1,
                1,
            ]
        },
    )
};

/// GPU implementations of the first attention step alone, the scores `q kᵀ / sqrt(d)`.
pub const CUDA_SCORES_STEP_ROWS: &[Implementation<AttentionScoresProblem>] = &[
    Implementation {
        implementation_name: "cuda/naive",
        description: "the first launch of forward's cuda/naive",
        supports: |problem| {
            AttentionExtents::from(&problem.shape)
                .check_support_with_scores_in_memory(&[NAIVE_FORWARD_SCORES_KERNEL])
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: scores_step_device_bytes,
            prepare: prepare_naive_scores_task,
        },
    },
    Implementation {
        implementation_name: "cuda/cublaslt",
        description: "one GEMM of a batch of heads, by the fastest algorithm that the library proposes",
        supports: |problem| {
            cublaslt::check_cublaslt_supports_separate_gemms(&AttentionExtents::from(
                &problem.shape,
            ))
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: |problem| {
                scores_step_device_bytes(problem) + DEFAULT_GEMM_WORKSPACE_BYTES as u64
            },
            prepare: cublaslt::prepare_cublaslt_scores_task,
        },
    },
];

/// GPU implementations of the second attention step alone, the softmax over the keys.
pub const CUDA_SOFTMAX_STEP_ROWS: &[Implementation<AttentionSoftmaxProblem>] = &[
    Implementation {
        implementation_name: "cuda/naive",
        description: "the second launch of forward's cuda/naive: a block a row, three passes over it",
        supports: |problem| {
            AttentionExtents::from(&problem.shape)
                .check_support_with_scores_in_memory(&[NAIVE_FORWARD_SOFTMAX_KERNEL])
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: softmax_step_device_bytes,
            prepare: prepare_naive_softmax_task,
        },
    },
    Implementation {
        implementation_name: "cuda/vectorized",
        description: "a warp a row, loaded once by 16-byte accesses and kept in registers",
        supports: |problem| {
            let extents = AttentionExtents::from(&problem.shape);
            extents.check_support_with_scores_in_memory(&[VECTORIZED_SOFTMAX_KERNEL])?;
            match extents.queries_per_head {
                s if s > MAX_KEYS_OF_VECTORIZED_SOFTMAX => {
                    Err(format!("holds rows of up to {MAX_KEYS_OF_VECTORIZED_SOFTMAX} keys"))
                }
                s if s % SCORES_PER_SOFTMAX_LOAD != 0 => Err(format!(
                    "loads {SCORES_PER_SOFTMAX_LOAD} keys at once, which {s} is no multiple of"
                )),
                _ => Ok(()),
            }
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: softmax_step_device_bytes,
            prepare: prepare_vectorized_softmax_task,
        },
    },
];

/// GPU implementations of the third attention step alone, the output `p v`.
pub const CUDA_VALUES_STEP_ROWS: &[Implementation<AttentionValuesProblem>] = &[
    Implementation {
        implementation_name: "cuda/naive",
        description: "the third launch of forward's cuda/naive",
        supports: |problem| {
            AttentionExtents::from(&problem.shape)
                .check_support_with_scores_in_memory(&[NAIVE_FORWARD_VALUES_KERNEL])
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: device_bytes_of_probability_value_product,
            prepare: prepare_naive_probability_value_product,
        },
    },
    Implementation {
        implementation_name: "cuda/cublaslt",
        description: "one GEMM of a batch of heads, by the fastest algorithm that the library proposes",
        supports: |problem| {
            cublaslt::check_cublaslt_supports_separate_gemms(&AttentionExtents::from(
                &problem.shape,
            ))
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: |problem| {
                device_bytes_of_probability_value_product(problem)
                    + DEFAULT_GEMM_WORKSPACE_BYTES as u64
            },
            prepare: cublaslt::prepare_cublaslt_values_task,
        },
    },
];

/// Bytes of the tensors of the scores step: q, k and fp32 scores.
fn scores_step_device_bytes(problem: &AttentionScoresProblem) -> u64 {
    let extents = AttentionExtents::from(&problem.shape);
    2 * extents.query_tensor_bytes() + 4 * extents.query_key_pairs_of_all_heads()
}

/// Bytes of the tensors of the softmax step: fp32 scores and 16-bit probabilities.
fn softmax_step_device_bytes(problem: &AttentionSoftmaxProblem) -> u64 {
    (4 + 2) * AttentionExtents::from(&problem.shape).query_key_pairs_of_all_heads()
}

/// Bytes of the tensors of the values step: 16-bit probabilities, v and the output.
fn device_bytes_of_probability_value_product(problem: &AttentionValuesProblem) -> u64 {
    let extents = AttentionExtents::from(&problem.shape);
    2 * extents.query_key_pairs_of_all_heads() + 2 * extents.query_tensor_bytes()
}

fn prepare_naive_scores_task(
    problem: &AttentionScoresProblem,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = AttentionExtents::from(&problem.shape);
    let kernel = NAIVE_FORWARD_SCORES_KERNEL.compile_and_load(device, &extents)?;
    let [q, k] = upload_named_inputs(device, inputs, ["q", "k"])?;
    Ok(CudaTask::new(
        device,
        cuda::named_inputs([("q", &q), ("k", &k)]),
        vec![DeviceOutput::new(device, "scores", problem.shape.score_matrix_shape(), Dtype::F32)?],
        move |outputs| {
            let [q, k] = [&q, &k].map(KernelArgument::from);
            let arguments = [q, k, outputs[0].argument(), extents.sequence_length_argument()];
            run_within_named_range("scores", || kernel.launch_with(&arguments))
        },
    ))
}

fn prepare_naive_softmax_task(
    problem: &AttentionSoftmaxProblem,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let no_logsumexp = |_: &AttentionExtents| KernelArgument::DeviceAddress(0);
    prepare_softmax_task_with_third_argument(
        problem,
        inputs,
        device,
        &NAIVE_FORWARD_SOFTMAX_KERNEL,
        no_logsumexp,
    )
}

fn prepare_vectorized_softmax_task(
    problem: &AttentionSoftmaxProblem,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let rows =
        |extents: &AttentionExtents| KernelArgument::I64(extents.queries_of_all_heads() as i64);
    prepare_softmax_task_with_third_argument(
        problem,
        inputs,
        device,
        &VECTORIZED_SOFTMAX_KERNEL,
        rows,
    )
}

/// Prepares the timed task of a softmax kernel; `third` makes its third argument, the only one in
/// which the two kernels differ.
fn prepare_softmax_task_with_third_argument(
    problem: &AttentionSoftmaxProblem,
    inputs: &Tensors,
    device: &Arc<Device>,
    kernel: &KernelSpec<AttentionExtents>,
    third: fn(&AttentionExtents) -> KernelArgument,
) -> Result<CudaTask, BackendError> {
    let extents = AttentionExtents::from(&problem.shape);
    let kernel = kernel.compile_and_load(device, &extents)?;
    let [scores] = upload_named_inputs(device, inputs, ["scores"])?;
    let probabilities = DeviceOutput::new(
        device,
        "probabilities",
        problem.shape.score_matrix_shape(),
        problem.shape.dtype,
    )?;
    Ok(CudaTask::new(
        device,
        cuda::named_inputs([("scores", &scores)]),
        vec![probabilities],
        move |outputs| {
            let arguments = [
                KernelArgument::from(&scores),
                outputs[0].argument(),
                third(&extents),
                extents.sequence_length_argument(),
            ];
            run_within_named_range("softmax", || kernel.launch_with(&arguments))
        },
    ))
}

fn prepare_naive_probability_value_product(
    problem: &AttentionValuesProblem,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = AttentionExtents::from(&problem.shape);
    let kernel = NAIVE_FORWARD_VALUES_KERNEL.compile_and_load(device, &extents)?;
    let [probabilities, v] = upload_named_inputs(device, inputs, ["probabilities", "v"])?;
    Ok(CudaTask::new(
        device,
        cuda::named_inputs([("probabilities", &probabilities), ("v", &v)]),
        vec![DeviceOutput::new(
            device,
            "out",
            problem.shape.query_key_value_shape(),
            problem.shape.dtype,
        )?],
        move |outputs| {
            let [probabilities, v] = [&probabilities, &v].map(KernelArgument::from);
            let arguments =
                [probabilities, v, outputs[0].argument(), extents.sequence_length_argument()];
            run_within_named_range("values", || kernel.launch_with(&arguments))
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::components::AttentionComponentShape;

    #[test]
    fn vectorised_softmax_supports_rows_of_whole_packets_up_to_1024_keys() {
        let supported = |s| {
            (CUDA_SOFTMAX_STEP_ROWS[1].supports)(&AttentionSoftmaxProblem {
                shape: AttentionComponentShape {
                    batch: 2,
                    heads: 3,
                    seq_len: s,
                    head_dim: 1,
                    dtype: Dtype::F16,
                },
            })
        };
        assert_eq!([4, 200, 1024].map(supported), [Ok(()), Ok(()), Ok(())]);
        assert_eq!(
            supported(65),
            Err("loads 4 keys at once, which 65 is no multiple of".to_owned())
        );
        assert_eq!(supported(2048), Err("holds rows of up to 1024 keys".to_owned()));
        let extents = AttentionExtents::single_sequence_self_attention(6, 201, Dtype::F16);
        assert_eq!((VECTORIZED_SOFTMAX_KERNEL.blocks)(&extents), [151, 1, 1]);
        assert_eq!(
            VECTORIZED_SOFTMAX_KERNEL.build_for_parameters(&extents).kernel_build_name(),
            "attention/softmax_vectorized DTYPE=F16"
        );
    }
}
