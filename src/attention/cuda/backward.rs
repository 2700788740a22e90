//! Attention backward: rows and launchers of `kernels/attention/backward_*`.
//!
//! The forward's output and the rows' log-sum-exp are there before ([`super::saved`]). What is timed
//! is what a training step would run: the row sums of dout · out first, then the gradients.

use std::sync::Arc;

use super::forward::FLASH_MMA as FORWARD;
use super::launch::{ELEMENT_BYTES, Extents, kernel, scratch};
use super::saved::{BackwardInputs, save};
use crate::attention::definition::Attention;
use crate::attention::gradients::AttentionBackward;
use kernelgate::backend::cuda::{CudaTask, Output};
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::Tensors;
use kernelgate_cuda::observe::range::within;
use kernelgate_cuda::{Argument, Device, KernelSpec, Requires};

/// The kernels.
pub const KERNELS: &[KernelSpec<Extents>] = &[
    NAIVE_DELTA,
    NAIVE_SCORES,
    NAIVE_DQ,
    NAIVE_DKV,
    FLASH_MMA_PREPARE,
    FLASH_MMA,
    FLASH_MMA_FINISH,
    ONE_STAGE_PREPARE,
    ONE_STAGE,
    ONE_STAGE_FINISH,
];

const THREADS: usize = 256;

/// Threads that sum a row.
const WARP: usize = 32;

/// Side of the tile of scores that a block of `backward_naive` computes, one a thread.
const NAIVE_TILE: usize = 16;

const NAIVE_DELTA: KernelSpec<Extents> = KernelSpec {
    constants: |_| vec![("THREADS", THREADS), ("TILE", NAIVE_TILE)],
    ..kernel(
        "attention/backward_naive",
        include_str!("../../../kernels/attention/backward_naive.cu"),
        "attention_backward_naive_delta",
        THREADS,
        |extents| [(extents.heads * extents.s).div_ceil(THREADS / WARP), 1, 1],
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

/// Keys of a block of `backward_flash_mma`.
pub const KEYS: usize = 128;

/// Queries that a step of it takes.
pub const fn step(extents: &Extents) -> usize {
    if extents.d == 64 { 128 } else { 64 }
}

/// Queries of all heads, each head padded to whole steps.
const fn padded_rows(extents: &Extents) -> usize {
    extents.heads * extents.s.div_ceil(step(extents)) * step(extents)
}

const FLASH_MMA: KernelSpec<Extents> = KernelSpec {
    constants: |extents| flash_mma_constants(extents, 2),
    shared_bytes: |extents| flash_mma_shared(extents, 2),
    ..kernel(
        "attention/backward_flash_mma",
        include_str!("../../../kernels/attention/backward_flash_mma.cu"),
        "attention_backward_flash_mma",
        THREADS,
        |extents| [extents.s.div_ceil(KEYS) * extents.heads, 1, 1],
    )
};
pub const FLASH_MMA_PREPARE: KernelSpec<Extents> = KernelSpec {
    symbol: "attention_backward_flash_mma_prepare",
    // A thread sixteen bytes of a row.
    blocks: |extents| {
        [(padded_rows(extents) * (extents.d * ELEMENT_BYTES as usize / 16)).div_ceil(THREADS), 1, 1]
    },
    shared_bytes: |_| 0,
    ..FLASH_MMA
};
pub const FLASH_MMA_FINISH: KernelSpec<Extents> = KernelSpec {
    symbol: "attention_backward_flash_mma_finish",
    // Sixteen warps a step.
    blocks: |extents| [(padded_rows(extents) / step(extents) * 16).div_ceil(THREADS / WARP), 1, 1],
    shared_bytes: |_| 0,
    ..FLASH_MMA
};

/// The same with less shared memory, for cards that have less. Those from sm_90 on have enough for
/// two stages, or too little for one.
const ONE_STAGE: KernelSpec<Extents> =
    KernelSpec { shared_bytes: |extents| flash_mma_shared(extents, 1), ..one_stage(FLASH_MMA) };
const ONE_STAGE_PREPARE: KernelSpec<Extents> = one_stage(FLASH_MMA_PREPARE);
const ONE_STAGE_FINISH: KernelSpec<Extents> = one_stage(FLASH_MMA_FINISH);

const fn one_stage(row: KernelSpec<Extents>) -> KernelSpec<Extents> {
    KernelSpec {
        defines: |extents| {
            let stages = "STAGES=1".to_owned();
            (FLASH_MMA.defines)(extents).into_iter().chain([stages]).collect()
        },
        constants: |extents| flash_mma_constants(extents, 1),
        requires: Requires::Between(80, 90),
        ..row
    }
}

/// One stage is said by the build's name.
fn flash_mma_constants(extents: &Extents, stages: usize) -> Vec<(&'static str, usize)> {
    let shared = ("SHARED_BYTES", flash_mma_shared(extents, stages));
    let tiles = [("TILE_QUERIES", step(extents)), ("TILE_KEYS", KEYS)];
    let common = [("THREADS", THREADS), tiles[0], tiles[1], shared];
    common.into_iter().chain((stages == 2).then_some(("STAGES", 2))).collect()
}

/// Keys and values; the stages of queries, gradients of the output, and two floats for each of
/// their rows; the probabilities and two stages of the gradients of the scores.
fn flash_mma_shared(extents: &Extents, stages: usize) -> usize {
    let (element, queries) = (ELEMENT_BYTES as usize, step(extents));
    let keys_and_values = 2 * KEYS * extents.d * element;
    let copied = stages * (2 * queries * extents.d * element + 2 * 4 * queries);
    keys_and_values + copied + 3 * KEYS * queries * element
}

/// Backward ladder, without the library. All need the forward first.
pub const LADDER: &[Implementation<AttentionBackward>] = &[
    Implementation {
        name: "cuda/naive",
        about: "four launches, probabilities and gradients of the scores in device memory: the \
                starting point",
        supports: |problem| {
            let kernels = [NAIVE_DELTA, NAIVE_SCORES, NAIVE_DQ, NAIVE_DKV, FORWARD];
            Extents::from(&problem.attention).supported_with_scores(&kernels)
        },
        prepare: Prepare::CudaWithin { device_bytes: naive_bytes, prepare: naive },
    },
    Implementation {
        name: "cuda/flash_mma",
        about: "probabilities recomputed on the chip, tensor cores through mma.sync; the order of \
                dq's sums is not fixed",
        supports: |problem| {
            Extents::from(&problem.attention).supported_alike(&[
                FLASH_MMA_PREPARE,
                FLASH_MMA,
                FLASH_MMA_FINISH,
                FORWARD,
            ])
        },
        prepare: Prepare::CudaWithin { device_bytes: flash_mma_bytes, prepare: flash_mma },
    },
];

/// Four inputs, the saved output and log-sum-exp, three gradients.
pub fn common_bytes(extents: &Extents) -> u64 {
    4 * extents.vector_bytes() + 4 * extents.key_bytes() + 4 * extents.rows()
}

/// fp32 probabilities and gradients of the scores, and the row sums.
fn naive_bytes(problem: &AttentionBackward) -> u64 {
    let extents = Extents::from(&problem.attention);
    common_bytes(&extents) + 2 * 4 * extents.pairs() + 4 * extents.rows()
}

/// The fp32 accumulator of dq and two floats a row, padded to whole steps.
pub fn flash_mma_bytes(problem: &AttentionBackward) -> u64 {
    let extents = Extents::from(&problem.attention);
    common_bytes(&extents) + stats_bytes(&extents) + dq_sum_bytes(&extents)
}

pub fn stats_bytes(extents: &Extents) -> u64 {
    2 * 4 * padded_rows(extents) as u64
}

pub fn dq_sum_bytes(extents: &Extents) -> u64 {
    4 * (padded_rows(extents) * extents.d) as u64
}

fn naive(
    problem: &AttentionBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = Extents::from(&problem.attention);
    let kernels = [NAIVE_DELTA, NAIVE_SCORES, NAIVE_DQ, NAIVE_DKV];
    let [sum, score, query, key] = kernels.map(|kernel| kernel.load(device, &extents));
    let (sum, score, query, key) = (sum?, score?, query?, key?);
    let saved = save(&extents, inputs, device)?;
    let delta = scratch(device, 4 * extents.rows())?;
    let (p, ds) = (scratch(device, 4 * extents.pairs())?, scratch(device, 4 * extents.pairs())?);
    Ok(CudaTask::new(
        device,
        saved.launch_inputs(),
        gradients(device, &problem.attention)?,
        move |outputs| {
            let BackwardInputs { q, k, v, grad_out, out, lse } = &saved;
            let [q, k, v, grad_out, out, lse] = [q, k, v, grad_out, out, lse].map(Argument::from);
            let [delta, p, ds] = [&delta, &p, &ds].map(Argument::from);
            let [grad_q, grad_k, grad_v] = [0, 1, 2].map(|index: usize| outputs[index].argument());
            let (s, heads) = (extents.seqlen(), extents.batch_heads());
            within("delta", || sum.launch(&[out, grad_out, delta, s, heads]))?;
            let scores = [q, k, v, grad_out, lse, delta, p, ds, s];
            within("scores", || score.launch(&scores))?;
            within("dq", || query.launch(&[ds, k, grad_q, s]))?;
            within("dkv", || key.launch(&[p, ds, q, grad_out, grad_k, grad_v, s]))
        },
    ))
}

fn flash_mma(
    problem: &AttentionBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = Extents::from(&problem.attention);
    let (arch, most) = (&device.facts().arch, device.shared_bytes_a_block()?);
    let fits = |row: &KernelSpec<Extents>| row.unmet_by(&extents, arch, most).is_none();
    let kernels = if !fits(&FLASH_MMA) && fits(&ONE_STAGE) {
        [ONE_STAGE_PREPARE, ONE_STAGE, ONE_STAGE_FINISH]
    } else {
        [FLASH_MMA_PREPARE, FLASH_MMA, FLASH_MMA_FINISH]
    };
    // The one that may be declined first.
    let [main, first, last] =
        [kernels[1], kernels[0], kernels[2]].map(|kernel| kernel.load(device, &extents));
    let (first, main, last) = (first?, main?, last?);
    let saved = save(&extents, inputs, device)?;
    let (stats, dq_sum) =
        (scratch(device, stats_bytes(&extents))?, scratch(device, dq_sum_bytes(&extents))?);
    Ok(CudaTask::new(
        device,
        saved.launch_inputs(),
        gradients(device, &problem.attention)?,
        move |outputs| {
            let BackwardInputs { q, k, v, grad_out, out, lse } = &saved;
            let [q, k, v, grad_out, out, lse] = [q, k, v, grad_out, out, lse].map(Argument::from);
            let [stats, dq_sum] = [&stats, &dq_sum].map(Argument::from);
            let [grad_q, grad_k, grad_v] = [0, 1, 2].map(|index: usize| outputs[index].argument());
            let (s, heads) = (extents.seqlen(), extents.batch_heads());
            within("prepare", || first.launch(&[out, grad_out, lse, stats, dq_sum, s, heads]))?;
            let operands = [q, k, v, grad_out, stats, dq_sum, grad_k, grad_v, s, heads];
            within("scores_dkv_dq", || main.launch(&operands))?;
            within("finish", || last.launch(&[dq_sum, grad_q, s, heads]))
        },
    ))
}

/// `grad_q`, `grad_k` and `grad_v`.
pub fn gradients(device: &Device, attention: &Attention) -> Result<Vec<Output>, BackendError> {
    [("grad_q", "q"), ("grad_k", "k"), ("grad_v", "v")]
        .into_iter()
        .map(|(name, input)| {
            Output::new(device, name, attention.shape_of(input), attention.output_dtype())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::workload::Dtype;

    #[test]
    fn blocks_cover_padding() {
        let narrow = Extents { causal: true, ..Extents::of_heads(6, 200, Dtype::Bf16) };
        let wide = Extents { d: 128, ..narrow };
        // 200 rows are two steps of 128, or four of 64.
        assert_eq!((padded_rows(&narrow), padded_rows(&wide)), (6 * 256, 6 * 256));
        assert_eq!((FLASH_MMA_PREPARE.blocks)(&narrow), [6 * 256 * 8 / 256, 1, 1]);
        assert_eq!((FLASH_MMA_FINISH.blocks)(&narrow), [6 * 2 * 2, 1, 1]);
        assert_eq!((FLASH_MMA_FINISH.blocks)(&wide), [6 * 4 * 2, 1, 1]);
    }
}
