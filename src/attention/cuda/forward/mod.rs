//! Attention forward on the GPU: its implementations, and the kernels of `forward_tiled` and
//! `forward_flash`.

pub mod decode;
pub mod mma;
mod tile_lists;
pub mod wgmma;

use std::sync::Arc;

use super::call::{AttentionForwardAddresses, AttentionGemmTechnique};
use super::components::{
    NAIVE_FORWARD_SCORES_KERNEL, NAIVE_FORWARD_SOFTMAX_KERNEL, NAIVE_FORWARD_VALUES_KERNEL,
};
use super::launch::{
    AttentionExtents, allocate_attention_output, allocate_uninitialised_scratch,
    attention_kernel_spec_with_build_per_shape, name_q_k_v_inputs, upload_named_inputs,
};
use super::launches::AttentionForwardCall;
use super::layout::{AttentionForwardLayout, AttentionShape};
use crate::attention::definition::AttentionForward;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::backend::{BackendError, Implementation, PrepareFunction};
use kernelgate::workload::Tensors;
use kernelgate_cuda::observe::range::run_within_named_range;
use kernelgate_cuda::{Device, KernelArgument, KernelSpec};
use mma::FORWARD_FLASH_MMA_KERNEL;
use wgmma::FORWARD_FLASH_WGMMA_KERNEL;

/// Kernels of `forward_tiled` and `forward_flash`, which only the implementations of this file
/// launch.
pub const TILED_AND_FLASH_FORWARD_KERNELS: &[KernelSpec<AttentionExtents>] = &[
    TILED_FORWARD_SCORES_KERNEL,
    TILED_FORWARD_SOFTMAX_KERNEL,
    TILED_FORWARD_VALUES_KERNEL,
    FORWARD_FLASH_CUDA_CORE_KERNEL,
];

const THREADS_PER_TILED_FORWARD_BLOCK: usize = 256;

/// Side of the square tile of scores of the kernels `forward_tiled` and `forward_flash`.
const SCORE_TILE_SIDE: usize = 64;

const TILED_FORWARD_SCORES_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    constant_macros: |_| {
        vec![("THREADS", THREADS_PER_TILED_FORWARD_BLOCK), ("TILE", SCORE_TILE_SIDE)]
    },
    ..attention_kernel_spec_with_build_per_shape(
        "attention/forward_tiled",
        "attention_forward_tiled_scores",
        THREADS_PER_TILED_FORWARD_BLOCK,
        |extents| {
            [
                extents.queries_per_head.div_ceil(SCORE_TILE_SIDE),
                extents.queries_per_head.div_ceil(SCORE_TILE_SIDE),
                extents.total_query_heads,
            ]
        },
    )
};
const TILED_FORWARD_SOFTMAX_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    kernel_symbol: "attention_forward_tiled_softmax",
    blocks: |extents| [extents.total_query_heads * extents.queries_per_head, 1, 1],
    ..TILED_FORWARD_SCORES_KERNEL
};
const TILED_FORWARD_VALUES_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    kernel_symbol: "attention_forward_tiled_values",
    blocks: |extents| {
        [
            extents.queries_per_head.div_ceil(SCORE_TILE_SIDE),
            extents.head_dim / SCORE_TILE_SIDE,
            extents.total_query_heads,
        ]
    },
    ..TILED_FORWARD_SCORES_KERNEL
};

const FORWARD_FLASH_CUDA_CORE_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    constant_macros: |extents| {
        vec![
            ("THREADS", THREADS_PER_TILED_FORWARD_BLOCK),
            ("TILE", SCORE_TILE_SIDE),
            ("SHARED_BYTES", forward_flash_shared_bytes(extents)),
        ]
    },
    dynamic_shared_bytes: forward_flash_shared_bytes,
    ..attention_kernel_spec_with_build_per_shape(
        "attention/forward_flash",
        "attention_forward_flash",
        THREADS_PER_TILED_FORWARD_BLOCK,
        |extents| {
            [extents.queries_per_head.div_ceil(SCORE_TILE_SIDE) * extents.total_query_heads, 1, 1]
        },
    )
};

/// Shared memory of `forward_flash`: fp32 tiles of q, of k or v, and of p, with four padding
/// columns in each row.
fn forward_flash_shared_bytes(extents: &AttentionExtents) -> usize {
    (2 * extents.head_dim + SCORE_TILE_SIDE) * (SCORE_TILE_SIDE + 4) * 4
}

/// Kernelgate's own CUDA implementations of attention forward that run on several architectures,
/// from the slowest to the fastest.
pub const OWN_CUDA_FORWARD_IMPLEMENTATIONS: &[Implementation<AttentionForward>] = &[
    Implementation {
        implementation_name: "cuda/naive",
        description: "three launches, scores and probabilities in device memory, one thread an element: \
                the starting point",
        supports: |problem| {
            AttentionExtents::from(&problem.attention).check_support_with_scores_in_memory(&[
                NAIVE_FORWARD_SCORES_KERNEL,
                NAIVE_FORWARD_SOFTMAX_KERNEL,
                NAIVE_FORWARD_VALUES_KERNEL,
            ])
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            // Device memory of the naive forward besides its tensors: fp32 scores and 16-bit
            // probabilities.
            device_bytes: |problem| {
                fused_forward_device_bytes(problem)
                    + (4 + 2)
                        * AttentionExtents::from(&problem.attention).query_key_pairs_of_all_heads()
            },
            prepare: prepare_naive_forward_task,
        },
    },
    Implementation {
        implementation_name: "cuda/tiled",
        description: "the same three launches with tiles in shared memory and 4x4 results a thread",
        supports: |problem| {
            AttentionExtents::from(&problem.attention).check_support_with_scores_in_memory(&[
                TILED_FORWARD_SCORES_KERNEL,
                TILED_FORWARD_SOFTMAX_KERNEL,
                TILED_FORWARD_VALUES_KERNEL,
            ])
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            // Device memory of the tiled forward besides its tensors: fp32 scores, which the
            // probabilities overwrite.
            device_bytes: |problem| {
                fused_forward_device_bytes(problem)
                    + 4 * AttentionExtents::from(&problem.attention).query_key_pairs_of_all_heads()
            },
            prepare: prepare_tiled_forward_task,
        },
    },
    Implementation {
        implementation_name: "cuda/flash",
        description: "one launch, online softmax: scores never leave the chip; CUDA cores",
        supports: |problem| {
            AttentionExtents::from(&problem.attention)
                .check_support_without_grouped_heads(&[FORWARD_FLASH_CUDA_CORE_KERNEL])
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: fused_forward_device_bytes,
            prepare: prepare_cuda_core_flash_forward_task,
        },
    },
    Implementation {
        implementation_name: "cuda/flash_mma",
        description: "as flash, GEMMs on the tensor cores through mma.sync, asynchronous copies",
        supports: |problem| {
            AttentionExtents::from(&problem.attention)
                .check_dtype_size_and_grid_support(&[FORWARD_FLASH_MMA_KERNEL])
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: fused_forward_device_bytes,
            prepare: |problem, inputs, device| {
                prepare_forward_task_over_dense_tensors(
                    AttentionGemmTechnique::FlashMma,
                    problem,
                    inputs,
                    device,
                )
            },
        },
    },
];

/// Implementation of attention forward through wgmma, the fastest one of the ladder, for sm_90a
/// only.
pub const WGMMA_FORWARD_IMPLEMENTATION: Implementation<AttentionForward> = Implementation {
    implementation_name: "cuda/flash_wgmma",
    description: "as flash, GEMMs through wgmma, tiles by tensor copies of a warp of their own, blocks \
            that stay; sm_90a only",
    supports: |problem| {
        AttentionExtents::from(&problem.attention)
            .check_dtype_size_and_grid_support(&[FORWARD_FLASH_WGMMA_KERNEL])
    },
    // The lists of query tiles take a thousandth of the device memory and are not counted.
    prepare: PrepareFunction::CudaWithDeclaredMemory {
        device_bytes: fused_forward_device_bytes,
        prepare: |problem, inputs, device| {
            prepare_forward_task_over_dense_tensors(
                AttentionGemmTechnique::FlashWgmma,
                problem,
                inputs,
                device,
            )
        },
    },
};

const NULL_LOG_SUM_EXP_ADDRESS: KernelArgument = KernelArgument::DeviceAddress(0);

/// Device memory of a fused attention forward: q, k, v and the output.
pub fn fused_forward_device_bytes(problem: &AttentionForward) -> u64 {
    let extents = AttentionExtents::from(&problem.attention);
    2 * extents.query_tensor_bytes() + 2 * extents.key_tensor_bytes()
}

fn prepare_naive_forward_task(
    problem: &AttentionForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = AttentionExtents::from(&problem.attention);
    let [score, normalize, weigh] =
        [NAIVE_FORWARD_SCORES_KERNEL, NAIVE_FORWARD_SOFTMAX_KERNEL, NAIVE_FORWARD_VALUES_KERNEL]
            .map(|kernel| kernel.compile_and_load(device, &extents));
    let (score, normalize, weigh) = (score?, normalize?, weigh?);
    let [q, k, v] = upload_named_inputs(device, inputs, ["q", "k", "v"])?;
    let (scores, probabilities) = (
        allocate_uninitialised_scratch(device, 4 * extents.query_key_pairs_of_all_heads())?,
        allocate_uninitialised_scratch(device, 2 * extents.query_key_pairs_of_all_heads())?,
    );
    Ok(CudaTask::new(
        device,
        name_q_k_v_inputs([&q, &k, &v]),
        vec![allocate_attention_output(device, "out", &problem.attention)?],
        move |outputs| {
            let (at, s) =
                (|buffer| KernelArgument::from(buffer), || extents.sequence_length_argument());
            run_within_named_range("scores", || {
                score.launch_with(&[at(&q), at(&k), at(&scores), s()])
            })?;
            let rows = [at(&scores), at(&probabilities), NULL_LOG_SUM_EXP_ADDRESS, s()];
            run_within_named_range("softmax", || normalize.launch_with(&rows))?;
            let out = outputs[0].argument();
            run_within_named_range("values", || {
                weigh.launch_with(&[at(&probabilities), at(&v), out, s()])
            })
        },
    ))
}

fn prepare_tiled_forward_task(
    problem: &AttentionForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = AttentionExtents::from(&problem.attention);
    let [score, normalize, weigh] =
        [TILED_FORWARD_SCORES_KERNEL, TILED_FORWARD_SOFTMAX_KERNEL, TILED_FORWARD_VALUES_KERNEL]
            .map(|kernel| kernel.compile_and_load(device, &extents));
    let (score, normalize, weigh) = (score?, normalize?, weigh?);
    let [q, k, v] = upload_named_inputs(device, inputs, ["q", "k", "v"])?;
    let scores =
        allocate_uninitialised_scratch(device, 4 * extents.query_key_pairs_of_all_heads())?;
    Ok(CudaTask::new(
        device,
        name_q_k_v_inputs([&q, &k, &v]),
        vec![allocate_attention_output(device, "out", &problem.attention)?],
        move |outputs| {
            let (at, s) =
                (|buffer| KernelArgument::from(buffer), || extents.sequence_length_argument());
            run_within_named_range("scores", || {
                score.launch_with(&[at(&q), at(&k), at(&scores), s()])
            })?;
            run_within_named_range("softmax", || {
                normalize.launch_with(&[at(&scores), NULL_LOG_SUM_EXP_ADDRESS, s()])
            })?;
            let out = outputs[0].argument();
            run_within_named_range("values", || weigh.launch_with(&[at(&scores), at(&v), out, s()]))
        },
    ))
}

fn prepare_cuda_core_flash_forward_task(
    problem: &AttentionForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = AttentionExtents::from(&problem.attention);
    let step = FORWARD_FLASH_CUDA_CORE_KERNEL.compile_and_load(device, &extents)?;
    let [q, k, v] = upload_named_inputs(device, inputs, ["q", "k", "v"])?;
    Ok(CudaTask::new(
        device,
        name_q_k_v_inputs([&q, &k, &v]),
        vec![allocate_attention_output(device, "out", &problem.attention)?],
        move |outputs| {
            let [q, k, v] = [&q, &k, &v].map(KernelArgument::from);
            let arguments = [
                q,
                k,
                v,
                outputs[0].argument(),
                NULL_LOG_SUM_EXP_ADDRESS,
                extents.sequence_length_argument(),
            ];
            run_within_named_range("forward", || step.launch_with(&arguments))
        },
    ))
}

/// Prepares the timed task of an attention forward by `technique`: uploads the dense inputs,
/// allocates the output and prepares the launches.
pub fn prepare_forward_task_over_dense_tensors(
    technique: AttentionGemmTechnique,
    problem: &AttentionForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let shape = AttentionShape::from(&problem.attention);
    let forward = AttentionForwardCall::compile_and_load_attention_forward(
        device,
        &shape,
        &AttentionForwardLayout::forward_layout_dense_bhsd(&shape),
        technique,
    )?;
    let [q, k, v] = upload_named_inputs(device, inputs, ["q", "k", "v"])?;
    let out = allocate_attention_output(device, "out", &problem.attention)?;
    let launches = forward.prepare_forward_launch_at_addresses(&AttentionForwardAddresses {
        q_address: q.device_address(),
        k_address: k.device_address(),
        v_address: v.device_address(),
        out_address: out.address(),
        lse_address: None,
    })?;
    let inputs = name_q_k_v_inputs([&q, &k, &v]);
    let alive = [q, k, v];
    Ok(CudaTask::new(device, inputs, vec![out], move |_| {
        let _alive = &alive;
        launches.enqueue_all_launches()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::workload::Dtype;

    const SIX_CAUSAL_HEADS_OF_200_QUERIES: AttentionExtents = AttentionExtents {
        causal: true,
        ..AttentionExtents::single_sequence_self_attention(6, 200, Dtype::Bf16)
    };

    #[test]
    fn attention_forward_grids_cover_all_query_rows_and_tiles() {
        let wide = AttentionExtents { head_dim: 128, ..SIX_CAUSAL_HEADS_OF_200_QUERIES };
        assert_eq!(
            (NAIVE_FORWARD_SCORES_KERNEL.blocks)(&SIX_CAUSAL_HEADS_OF_200_QUERIES),
            [13, 13, 6]
        );
        assert_eq!(
            (NAIVE_FORWARD_SOFTMAX_KERNEL.blocks)(&SIX_CAUSAL_HEADS_OF_200_QUERIES),
            [1200, 1, 1]
        );
        assert_eq!(
            (NAIVE_FORWARD_VALUES_KERNEL.blocks)(&SIX_CAUSAL_HEADS_OF_200_QUERIES),
            [50, 6, 1]
        );
        assert_eq!((NAIVE_FORWARD_VALUES_KERNEL.blocks)(&wide), [100, 6, 1]);
        assert_eq!((TILED_FORWARD_VALUES_KERNEL.blocks)(&wide), [4, 2, 6]);
        assert_eq!(
            (FORWARD_FLASH_CUDA_CORE_KERNEL.blocks)(&SIX_CAUSAL_HEADS_OF_200_QUERIES),
            [24, 1, 1]
        );
        assert_eq!((FORWARD_FLASH_MMA_KERNEL.blocks)(&SIX_CAUSAL_HEADS_OF_200_QUERIES), [12, 1, 1]);
    }

    #[test]
    fn attention_kernels_decline_unsupported_shapes_with_a_reason() {
        assert_eq!(
            SIX_CAUSAL_HEADS_OF_200_QUERIES
                .check_dtype_size_and_grid_support(&[FORWARD_FLASH_MMA_KERNEL]),
            Ok(())
        );
        let f32 = AttentionExtents { dtype: Dtype::F32, ..SIX_CAUSAL_HEADS_OF_200_QUERIES };
        assert_eq!(
            f32.check_dtype_size_and_grid_support(&[FORWARD_FLASH_MMA_KERNEL]),
            Err("computes bf16 and f16 only".to_owned())
        );
        let many =
            AttentionExtents { total_query_heads: 70_000, ..SIX_CAUSAL_HEADS_OF_200_QUERIES };
        assert_eq!(many.check_dtype_size_and_grid_support(&[FORWARD_FLASH_MMA_KERNEL]), Ok(()));
        assert_eq!(
            many.check_dtype_size_and_grid_support(&[NAIVE_FORWARD_VALUES_KERNEL]),
            Err("needs more blocks than a grid holds".to_owned())
        );
        let long = AttentionExtents {
            head_dim: 128,
            ..AttentionExtents::single_sequence_self_attention(16, 16_384, Dtype::Bf16)
        };
        let reason =
            long.check_support_with_scores_in_memory(&[NAIVE_FORWARD_VALUES_KERNEL]).unwrap_err();
        assert_eq!(reason, "keeps 17.2 GB of scores in memory, 2.1 GB at most");
        assert_eq!(
            AttentionExtents::single_sequence_self_attention(512, 1024, Dtype::Bf16)
                .check_support_with_scores_in_memory(&[FORWARD_FLASH_MMA_KERNEL]),
            Ok(())
        );
        let alike = Err("takes as many keys as queries, and as many heads of them".to_owned());
        for unlike in [
            AttentionExtents { query_heads_per_key_head: 2, ..SIX_CAUSAL_HEADS_OF_200_QUERIES },
            AttentionExtents { keys_per_head: 201, ..SIX_CAUSAL_HEADS_OF_200_QUERIES },
        ] {
            assert_eq!(
                unlike.check_dtype_size_and_grid_support(&[FORWARD_FLASH_MMA_KERNEL]),
                Ok(())
            );
            assert_eq!(
                unlike.check_support_without_grouped_heads(&[FORWARD_FLASH_CUDA_CORE_KERNEL]),
                alike
            );
        }
    }
}
