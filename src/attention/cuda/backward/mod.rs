//! Attention backward on the GPU: rows, and kernels that only they launch.
//!
//! The forward's output and the rows' log-sum-exp are computed beforehand ([`saved_forward`]). Each
//! row times the launches that a training step needs: first the row sums of dout · out, then the
//! gradients.

pub mod mma;
pub mod saved_forward;
pub mod wgmma;

use std::sync::Arc;

use super::call::{AttentionTechnique, BackwardAddresses, QueryGradientSumOrder, ScratchAddresses};
use super::forward::mma::FLASH_MMA_KERNEL as FORWARD;
use super::launch::{Extents, allocate_scratch, attention_kernel};
use super::launches::BackwardCall;
use super::layout::{AttentionShape, BackwardLayout, ForwardLayout};
use crate::attention::definition::Attention;
use crate::attention::gradients::AttentionBackward;
use kernelgate::backend::cuda::{CudaTask, Output};
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::Tensors;
use kernelgate_cuda::observe::range::within_range;
use kernelgate_cuda::{Device, KernelArgument, KernelSpec};
use mma::{FLASH_MMA, FLASH_MMA_FINISH, FLASH_MMA_PREPARE, dq_sum_bytes, row_statistics_bytes};
use saved_forward::{BackwardInputs, save_forward_outputs};
use wgmma::{
    FLASH_WGMMA, GROUPED_HEADS_KERNEL, TRANSPOSE_KERNEL, WIDE_STEPS_KERNEL, most_bytes_to_zero,
};

/// Kernels that only the rows of this file launch.
pub const KERNELS: &[KernelSpec<Extents>] = &[NAIVE_DELTA, NAIVE_SCORES, NAIVE_DQ, NAIVE_DKV];

const THREADS: usize = 256;

/// Number of threads that sum one row.
const THREADS_PER_ROW_SUM: usize = 32;

/// Side of the tile of scores that a block of `backward_naive` computes, with one thread for each
/// score.
const NAIVE_TILE: usize = 16;

const NAIVE_DELTA: KernelSpec<Extents> = KernelSpec {
    constants: |_| vec![("THREADS", THREADS), ("TILE", NAIVE_TILE)],
    ..attention_kernel(
        "attention/backward_naive",
        "attention_backward_naive_delta",
        THREADS,
        |extents| [(extents.heads * extents.s).div_ceil(THREADS / THREADS_PER_ROW_SUM), 1, 1],
    )
};
const NAIVE_SCORES: KernelSpec<Extents> = KernelSpec {
    symbol: "attention_backward_naive_scores",
    blocks: |extents| {
        [extents.s.div_ceil(NAIVE_TILE), extents.s.div_ceil(NAIVE_TILE), extents.heads]
    },
    ..NAIVE_DELTA
};
const NAIVE_DQ: KernelSpec<Extents> = KernelSpec {
    symbol: "attention_backward_naive_dq",
    blocks: |extents| [extents.s.div_ceil(THREADS / extents.d), extents.heads, 1],
    ..NAIVE_DELTA
};
const NAIVE_DKV: KernelSpec<Extents> =
    KernelSpec { symbol: "attention_backward_naive_dkv", ..NAIVE_DQ };

/// Backward ladder of our own kernels. Every row needs the outputs of a forward pass.
pub const BACKWARD_LADDER: &[Implementation<AttentionBackward>] = &[
    Implementation {
        name: "cuda/naive",
        about: "four launches, probabilities and gradients of the scores in device memory: the \
                starting point",
        supports: |problem| {
            let kernels = [NAIVE_DELTA, NAIVE_SCORES, NAIVE_DQ, NAIVE_DKV, FORWARD];
            Extents::from(&problem.attention).supported_with_scores(&kernels)
        },
        prepare: Prepare::CudaWithin { device_bytes: naive_bytes, prepare: prepare_naive_backward },
    },
    Implementation {
        name: "cuda/flash_mma",
        about: "probabilities recomputed on the chip, tensor cores through mma.sync; the order of \
                dq's sums is not fixed",
        supports: |problem| {
            Extents::from(&problem.attention).check_ungrouped_support(&[
                FLASH_MMA_PREPARE,
                FLASH_MMA,
                FLASH_MMA_FINISH,
                FORWARD,
            ])
        },
        prepare: Prepare::CudaWithin {
            device_bytes: flash_mma_bytes,
            prepare: |problem, inputs, device| {
                let (technique, order) = (AttentionTechnique::FlashMma, QueryGradientSumOrder::Any);
                prepare_flash(technique, order, problem, inputs, device)
            },
        },
    },
];

/// Row of the ladder's last rung, for sm_90a.
pub const WGMMA_ROW: Implementation<AttentionBackward> = Implementation {
    name: "cuda/flash_wgmma",
    about: "as flash_mma, GEMMs through wgmma, tiles by tensor copies of a warp of their own; \
            sm_90a only; the order of dq's sums is not fixed, nor of dk's and dv's over heads that \
            share keys",
    supports: |problem| {
        Extents::from(&problem.attention).check_support(&[
            FLASH_MMA_PREPARE,
            FLASH_WGMMA,
            GROUPED_HEADS_KERNEL,
            FLASH_MMA_FINISH,
            WIDE_STEPS_KERNEL,
            TRANSPOSE_KERNEL,
        ])
    },
    prepare: Prepare::CudaWithin {
        device_bytes: |problem| {
            flash_mma_bytes(problem) + most_bytes_to_zero(&Extents::from(&problem.attention))
        },
        prepare: |problem, inputs, device| {
            prepare_flash(
                AttentionTechnique::FlashWgmma,
                QueryGradientSumOrder::Any,
                problem,
                inputs,
                device,
            )
        },
    },
};

/// Row of the backward ladder whose gradients have equal bits in every launch.
pub const FIXED_ORDER_ROW: Implementation<AttentionBackward> = Implementation {
    name: "cuda/flash_wgmma_deterministic",
    about: "as flash_wgmma, the sums of dq in a fixed order: a block of keys waits for its turn",
    // The turn counters take a hundredth of the memory and are not counted.
    prepare: Prepare::CudaWithin {
        device_bytes: flash_mma_bytes,
        prepare: |problem, inputs, device| {
            prepare_flash(
                AttentionTechnique::FlashWgmma,
                QueryGradientSumOrder::Fixed,
                problem,
                inputs,
                device,
            )
        },
    },
    ..WGMMA_ROW
};

/// Bytes of the tensors of a backward: four inputs, the saved output and log-sum-exp, three
/// gradients.
pub fn tensor_bytes_of_backward(extents: &Extents) -> u64 {
    4 * extents.vector_bytes() + 4 * extents.key_bytes() + 4 * extents.query_rows()
}

/// Device memory of `naive`: fp32 probabilities and score gradients, and the row sums.
fn naive_bytes(problem: &AttentionBackward) -> u64 {
    let extents = Extents::from(&problem.attention);
    tensor_bytes_of_backward(&extents)
        + 2 * 4 * extents.query_key_pairs()
        + 4 * extents.query_rows()
}

/// Device memory of `cuda/flash_mma`: the fp32 accumulator of dq and two floats for each row,
/// padded to whole steps.
fn flash_mma_bytes(problem: &AttentionBackward) -> u64 {
    let extents = Extents::from(&problem.attention);
    tensor_bytes_of_backward(&extents) + row_statistics_bytes(&extents) + dq_sum_bytes(&extents)
}

fn prepare_naive_backward(
    problem: &AttentionBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = Extents::from(&problem.attention);
    let kernels = [NAIVE_DELTA, NAIVE_SCORES, NAIVE_DQ, NAIVE_DKV];
    let [sum, score, query, key] = kernels.map(|kernel| kernel.compile_and_load(device, &extents));
    let (sum, score, query, key) = (sum?, score?, query?, key?);
    let saved = save_forward_outputs(&problem.attention, inputs, device)?;
    let delta = allocate_scratch(device, 4 * extents.query_rows())?;
    let (p, ds) = (
        allocate_scratch(device, 4 * extents.query_key_pairs())?,
        allocate_scratch(device, 4 * extents.query_key_pairs())?,
    );
    Ok(CudaTask::new(
        device,
        saved.inputs_of_every_launch(),
        allocate_gradients(device, &problem.attention)?,
        move |outputs| {
            let BackwardInputs { q, k, v, grad_out, out, lse } = &saved;
            let (at, s) =
                (|buffer| KernelArgument::from(buffer), || extents.sequence_length_argument());
            let [grad_q, grad_k, grad_v] = [0, 1, 2].map(|index: usize| outputs[index].argument());
            let sums = [at(out), at(grad_out), at(&delta), s(), extents.batch_heads_argument()];
            within_range("delta", || sum.launch_with(&sums))?;
            let operands = [q, k, v, grad_out, lse, &delta, &p, &ds].map(at);
            within_range("scores", || score.launch_with(&[&operands[..], &[s()]].concat()))?;
            within_range("dq", || query.launch_with(&[at(&ds), at(k), grad_q, s()]))?;
            let keys = [at(&p), at(&ds), at(q), at(grad_out), grad_k, grad_v, s()];
            within_range("dkv", || key.launch_with(&keys))
        },
    ))
}

fn prepare_flash(
    technique: AttentionTechnique,
    order: QueryGradientSumOrder,
    problem: &AttentionBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let shape = AttentionShape::from(&problem.attention);
    let layout = BackwardLayout::gradients_like_tensors(ForwardLayout::strides_of_bhsd(&shape));
    let backward = BackwardCall::new(device, &shape, &layout, technique, order)?;
    dense_backward_task(&backward, problem, inputs, device)
}

/// Task that times one backward row over dense tensors.
pub fn dense_backward_task(
    backward: &BackwardCall,
    problem: &AttentionBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let saved = save_forward_outputs(&problem.attention, inputs, device)?;
    let bytes = backward.scratch_bytes();
    let memory = [allocate_scratch(device, bytes.any)?, allocate_scratch(device, bytes.zeroed)?];
    memory[1].fill(0)?;
    let outputs = allocate_gradients(device, &problem.attention)?;
    let [grad_q, grad_k, grad_v] = [0, 1, 2].map(|index: usize| outputs[index].address());
    let launches = backward.prepare_launches(
        &BackwardAddresses {
            q: saved.q.address(),
            k: saved.k.address(),
            v: saved.v.address(),
            out: saved.out.address(),
            lse: saved.lse.address(),
            grad_out: saved.grad_out.address(),
            grad_q,
            grad_k,
            grad_v,
        },
        &ScratchAddresses { any: memory[0].address(), zeroed: memory[1].address() },
    )?;
    Ok(CudaTask::new(device, saved.inputs_of_every_launch(), outputs, move |_| {
        // The launches hold only addresses, so the buffers must live as long.
        let _alive = (&saved, &memory);
        launches.launch()
    }))
}

/// Allocates the outputs `grad_q`, `grad_k` and `grad_v`.
pub fn allocate_gradients(
    device: &Device,
    attention: &Attention,
) -> Result<Vec<Output>, BackendError> {
    [("grad_q", "q"), ("grad_k", "k"), ("grad_v", "v")]
        .into_iter()
        .map(|(name, input)| {
            Output::new(device, name, attention.shape_of_input(input), attention.output_dtype_of())
        })
        .collect()
}
