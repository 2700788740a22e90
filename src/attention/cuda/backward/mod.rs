//! Attention backward on the GPU: the implementations of the backward, and the kernels that only
//! the naive implementation launches.
//!
//! Before a backward is timed, a forward pass computes the saved output and the rows' log-sum-exp
//! ([`saved_forward`]). The time of each backward implementation includes all launches of a
//! training step: first the row sums of dout · out, then the gradients.

pub mod mma;
pub mod saved_forward;
pub mod wgmma;

use std::sync::Arc;

use super::call::{
    AttentionBackwardAddresses, AttentionGemmTechnique, AttentionScratchAddresses,
    QueryGradientSumOrder,
};
use super::forward::mma::FORWARD_FLASH_MMA_KERNEL as FORWARD;
use super::launch::{
    AttentionExtents, allocate_uninitialised_scratch, attention_kernel_spec_with_build_per_shape,
};
use super::launches::AttentionBackwardCall;
use super::layout::{AttentionBackwardLayout, AttentionForwardLayout, AttentionShape};
use crate::attention::definition::AttentionParameters;
use crate::attention::gradients::AttentionBackward;
use kernelgate::backend::cuda::{CudaTask, DeviceOutput};
use kernelgate::backend::{BackendError, Implementation, PrepareFunction};
use kernelgate::workload::Tensors;
use kernelgate_cuda::observe::range::run_within_named_range;
use kernelgate_cuda::{Device, KernelArgument, KernelSpec};
use mma::{
    BACKWARD_FLASH_MMA_KERNEL, ROUND_DQ_SUMS_KERNEL, ROW_STATISTICS_AND_ZERO_DQ_KERNEL,
    backward_row_statistics_bytes, dq_accumulator_scratch_bytes,
};
use saved_forward::{AttentionBackwardInputs, upload_inputs_and_run_forward};
use wgmma::{
    BACKWARD_FLASH_WGMMA_KERNEL, SPLIT_HEAD_GROUP_BACKWARD_KERNEL, TRANSPOSE_AND_ROUND_DQ_KERNEL,
    WIDE_STEP_BACKWARD_KERNEL, max_zeroed_scratch_bytes,
};

/// Kernels of `kernels/attention/backward_naive`, which only the implementation `cuda/naive`
/// launches.
pub const NAIVE_BACKWARD_KERNELS: &[KernelSpec<AttentionExtents>] = &[
    NAIVE_BACKWARD_DELTA_KERNEL,
    NAIVE_BACKWARD_SCORES_KERNEL,
    NAIVE_BACKWARD_DQ_KERNEL,
    NAIVE_BACKWARD_DK_DV_KERNEL,
];

const THREADS_PER_NAIVE_BACKWARD_BLOCK: usize = 256;

/// Number of threads of `backward_naive` that sum dout · out over one query row: one warp.
const THREADS_PER_DELTA_ROW: usize = 32;

/// Side of the square tile of scores that a thread block of `backward_naive` computes, one thread
/// for each score.
const NAIVE_BACKWARD_SCORE_TILE_SIDE: usize = 16;

const NAIVE_BACKWARD_DELTA_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    constant_macros: |_| {
        vec![
            ("THREADS", THREADS_PER_NAIVE_BACKWARD_BLOCK),
            ("TILE", NAIVE_BACKWARD_SCORE_TILE_SIDE),
        ]
    },
    ..attention_kernel_spec_with_build_per_shape(
        "attention/backward_naive",
        "attention_backward_naive_delta",
        THREADS_PER_NAIVE_BACKWARD_BLOCK,
        |extents| {
            [
                (extents.total_query_heads * extents.queries_per_head)
                    .div_ceil(THREADS_PER_NAIVE_BACKWARD_BLOCK / THREADS_PER_DELTA_ROW),
                1,
                1,
            ]
        },
    )
};
const NAIVE_BACKWARD_SCORES_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    kernel_symbol: "attention_backward_naive_scores",
    blocks: |extents| {
        [
            extents.queries_per_head.div_ceil(NAIVE_BACKWARD_SCORE_TILE_SIDE),
            extents.queries_per_head.div_ceil(NAIVE_BACKWARD_SCORE_TILE_SIDE),
            extents.total_query_heads,
        ]
    },
    ..NAIVE_BACKWARD_DELTA_KERNEL
};
const NAIVE_BACKWARD_DQ_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    kernel_symbol: "attention_backward_naive_dq",
    blocks: |extents| {
        [
            extents.queries_per_head.div_ceil(THREADS_PER_NAIVE_BACKWARD_BLOCK / extents.head_dim),
            extents.total_query_heads,
            1,
        ]
    },
    ..NAIVE_BACKWARD_DELTA_KERNEL
};
const NAIVE_BACKWARD_DK_DV_KERNEL: KernelSpec<AttentionExtents> =
    KernelSpec { kernel_symbol: "attention_backward_naive_dkv", ..NAIVE_BACKWARD_DQ_KERNEL };

/// Kernelgate's own CUDA implementations of attention backward that run on several architectures,
/// from the slowest to the fastest. Before its launches are timed, each backward implementation
/// runs a forward pass, because the gradients need its outputs.
pub const OWN_CUDA_BACKWARD_IMPLEMENTATIONS: &[Implementation<AttentionBackward>] = &[
    Implementation {
        implementation_name: "cuda/naive",
        description: "four launches, probabilities and gradients of the scores in device memory: the \
                starting point",
        supports: |problem| {
            let kernels = [
                NAIVE_BACKWARD_DELTA_KERNEL,
                NAIVE_BACKWARD_SCORES_KERNEL,
                NAIVE_BACKWARD_DQ_KERNEL,
                NAIVE_BACKWARD_DK_DV_KERNEL,
                FORWARD,
            ];
            AttentionExtents::from(&problem.attention).check_support_with_scores_in_memory(&kernels)
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: naive_backward_device_bytes,
            prepare: prepare_naive_backward_task,
        },
    },
    Implementation {
        implementation_name: "cuda/flash_mma",
        description: "probabilities recomputed on the chip, tensor cores through mma.sync; the order of \
                dq's sums is not fixed",
        supports: |problem| {
            AttentionExtents::from(&problem.attention).check_support_without_grouped_heads(&[
                ROW_STATISTICS_AND_ZERO_DQ_KERNEL,
                BACKWARD_FLASH_MMA_KERNEL,
                ROUND_DQ_SUMS_KERNEL,
                FORWARD,
            ])
        },
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: flash_mma_backward_device_bytes,
            prepare: |problem, inputs, device| {
                let (technique, order) =
                    (AttentionGemmTechnique::FlashMma, QueryGradientSumOrder::AnyKeyBlockOrder);
                prepare_flash_backward_task(technique, order, problem, inputs, device)
            },
        },
    },
];

/// Implementation of attention backward through wgmma, the fastest one of the ladder, for sm_90a
/// only.
pub const WGMMA_BACKWARD_IMPLEMENTATION: Implementation<AttentionBackward> = Implementation {
    implementation_name: "cuda/flash_wgmma",
    description: "as flash_mma, GEMMs through wgmma, tiles by tensor copies of a warp of their own; \
            sm_90a only; the order of dq's sums is not fixed, nor of dk's and dv's over heads that \
            share keys",
    supports: |problem| {
        AttentionExtents::from(&problem.attention).check_dtype_size_and_grid_support(&[
            ROW_STATISTICS_AND_ZERO_DQ_KERNEL,
            BACKWARD_FLASH_WGMMA_KERNEL,
            SPLIT_HEAD_GROUP_BACKWARD_KERNEL,
            ROUND_DQ_SUMS_KERNEL,
            WIDE_STEP_BACKWARD_KERNEL,
            TRANSPOSE_AND_ROUND_DQ_KERNEL,
        ])
    },
    prepare: PrepareFunction::CudaWithDeclaredMemory {
        device_bytes: |problem| {
            flash_mma_backward_device_bytes(problem)
                + max_zeroed_scratch_bytes(&AttentionExtents::from(&problem.attention))
        },
        prepare: |problem, inputs, device| {
            prepare_flash_backward_task(
                AttentionGemmTechnique::FlashWgmma,
                QueryGradientSumOrder::AnyKeyBlockOrder,
                problem,
                inputs,
                device,
            )
        },
    },
};

/// Implementation of attention backward whose gradients are bitwise equal in every launch.
pub const DETERMINISTIC_BACKWARD_IMPLEMENTATION: Implementation<AttentionBackward> =
    Implementation {
        implementation_name: "cuda/flash_wgmma_deterministic",
        description: "as flash_wgmma, the sums of dq in a fixed order: a block of keys waits for its turn",
        // The turn counters take about a hundredth of the device memory of this implementation and
        // are not counted.
        prepare: PrepareFunction::CudaWithDeclaredMemory {
            device_bytes: flash_mma_backward_device_bytes,
            prepare: |problem, inputs, device| {
                prepare_flash_backward_task(
                    AttentionGemmTechnique::FlashWgmma,
                    QueryGradientSumOrder::FixedKeyBlockOrder,
                    problem,
                    inputs,
                    device,
                )
            },
        },
        ..WGMMA_BACKWARD_IMPLEMENTATION
    };

/// Bytes of all tensors that an attention backward reads or writes: four inputs, the saved output
/// and log-sum-exp, three gradients.
pub fn device_bytes_of_backward_tensors(extents: &AttentionExtents) -> u64 {
    4 * extents.query_tensor_bytes()
        + 4 * extents.key_tensor_bytes()
        + 4 * extents.queries_of_all_heads()
}

/// Device memory of the naive backward: its tensors, fp32 probabilities and fp32 score gradients,
/// and the row sums.
fn naive_backward_device_bytes(problem: &AttentionBackward) -> u64 {
    let extents = AttentionExtents::from(&problem.attention);
    device_bytes_of_backward_tensors(&extents)
        + 2 * 4 * extents.query_key_pairs_of_all_heads()
        + 4 * extents.queries_of_all_heads()
}

/// Device memory of the backward `cuda/flash_mma`: its tensors, the fp32 accumulator of dq and two
/// floats for each row, padded to whole steps.
fn flash_mma_backward_device_bytes(problem: &AttentionBackward) -> u64 {
    let extents = AttentionExtents::from(&problem.attention);
    device_bytes_of_backward_tensors(&extents)
        + backward_row_statistics_bytes(&extents)
        + dq_accumulator_scratch_bytes(&extents)
}

fn prepare_naive_backward_task(
    problem: &AttentionBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = AttentionExtents::from(&problem.attention);
    let kernels = [
        NAIVE_BACKWARD_DELTA_KERNEL,
        NAIVE_BACKWARD_SCORES_KERNEL,
        NAIVE_BACKWARD_DQ_KERNEL,
        NAIVE_BACKWARD_DK_DV_KERNEL,
    ];
    let [sum, score, query, key] = kernels.map(|kernel| kernel.compile_and_load(device, &extents));
    let (sum, score, query, key) = (sum?, score?, query?, key?);
    let saved = upload_inputs_and_run_forward(&problem.attention, inputs, device)?;
    let delta = allocate_uninitialised_scratch(device, 4 * extents.queries_of_all_heads())?;
    let (p, ds) = (
        allocate_uninitialised_scratch(device, 4 * extents.query_key_pairs_of_all_heads())?,
        allocate_uninitialised_scratch(device, 4 * extents.query_key_pairs_of_all_heads())?,
    );
    Ok(CudaTask::new(
        device,
        saved.output_gradient_as_replaceable_input(),
        allocate_gradients_of_q_k_v(device, &problem.attention)?,
        move |outputs| {
            let AttentionBackwardInputs { q, k, v, grad_out, out, lse } = &saved;
            let (at, s) =
                (|buffer| KernelArgument::from(buffer), || extents.sequence_length_argument());
            let [grad_q, grad_k, grad_v] = [0, 1, 2].map(|index: usize| outputs[index].argument());
            let sums =
                [at(out), at(grad_out), at(&delta), s(), extents.total_query_heads_argument()];
            run_within_named_range("delta", || sum.launch_with(&sums))?;
            let operands = [q, k, v, grad_out, lse, &delta, &p, &ds].map(at);
            run_within_named_range("scores", || {
                score.launch_with(&[&operands[..], &[s()]].concat())
            })?;
            run_within_named_range("dq", || query.launch_with(&[at(&ds), at(k), grad_q, s()]))?;
            let keys = [at(&p), at(&ds), at(q), at(grad_out), grad_k, grad_v, s()];
            run_within_named_range("dkv", || key.launch_with(&keys))
        },
    ))
}

fn prepare_flash_backward_task(
    technique: AttentionGemmTechnique,
    order: QueryGradientSumOrder,
    problem: &AttentionBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let shape = AttentionShape::from(&problem.attention);
    let layout = AttentionBackwardLayout::gradients_like_tensors(
        AttentionForwardLayout::forward_layout_dense_bhsd(&shape),
    );
    let backward = AttentionBackwardCall::compile_and_load_attention_backward(
        device, &shape, &layout, technique, order,
    )?;
    prepare_backward_task_over_dense_tensors(&backward, problem, inputs, device)
}

/// Prepares the timed task of a loaded attention backward over dense tensors: uploads, an untimed
/// forward pass and the launches.
pub fn prepare_backward_task_over_dense_tensors(
    backward: &AttentionBackwardCall,
    problem: &AttentionBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let saved = upload_inputs_and_run_forward(&problem.attention, inputs, device)?;
    let bytes = backward.backward_scratch_bytes();
    let memory = [
        allocate_uninitialised_scratch(device, bytes.uninitialised_scratch_bytes)?,
        allocate_uninitialised_scratch(device, bytes.zeroed_scratch_bytes)?,
    ];
    memory[1].fill_all_bytes(0)?;
    let outputs = allocate_gradients_of_q_k_v(device, &problem.attention)?;
    let [grad_q, grad_k, grad_v] = [0, 1, 2].map(|index: usize| outputs[index].address());
    let launches = backward.prepare_backward_launches_at_addresses(
        &AttentionBackwardAddresses {
            q_address: saved.q.device_address(),
            k_address: saved.k.device_address(),
            v_address: saved.v.device_address(),
            out_address: saved.out.device_address(),
            lse_address: saved.lse.device_address(),
            grad_out_address: saved.grad_out.device_address(),
            grad_q_address: grad_q,
            grad_k_address: grad_k,
            grad_v_address: grad_v,
        },
        &AttentionScratchAddresses {
            uninitialised_scratch_address: memory[0].device_address(),
            zeroed_scratch_address: memory[1].device_address(),
        },
    )?;
    Ok(CudaTask::new(device, saved.output_gradient_as_replaceable_input(), outputs, move |_| {
        // The launches hold only device addresses, so the closure must own the buffers.
        let _alive = (&saved, &memory);
        launches.enqueue_all_launches()
    }))
}

/// Allocates device buffers for the outputs `grad_q`, `grad_k` and `grad_v`.
pub fn allocate_gradients_of_q_k_v(
    device: &Device,
    attention: &AttentionParameters,
) -> Result<Vec<DeviceOutput>, BackendError> {
    [("grad_q", "q"), ("grad_k", "k"), ("grad_v", "v")]
        .into_iter()
        .map(|(name, input)| {
            DeviceOutput::new(
                device,
                name,
                attention.shape_of_named_input(input),
                attention.attention_output_dtype(),
            )
        })
        .collect()
}
