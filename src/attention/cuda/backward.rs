//! Attention backward: rows and launchers of `kernels/attention/backward_*`.
//!
//! The forward's output and the rows' log-sum-exp are there before ([`super::saved`]). Rows time the
//! launches of a training step: the row sums of dout · out first, then the gradients.

use std::sync::Arc;

use super::forward::FLASH_MMA as FORWARD;
use super::launch::{ELEMENT_BYTES, Extents, kernel, scratch, strided, strided_variants};
use super::launches::{Backward, BackwardAddresses, Launches, Scratch, SumOrder, Technique};
use super::layout::{BackwardLayout, ForwardLayout, Shape, Strides};
use super::saved::{BackwardInputs, save};
use crate::attention::definition::Attention;
use crate::attention::gradients::AttentionBackward;
use kernelgate::backend::cuda::{CudaTask, Output};
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::Tensors;
use kernelgate_cuda::observe::range::within;
use kernelgate_cuda::{Argument, Device, KernelSpec, LoadedKernel, Parameters, Requires};

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
    defines: |extents| {
        let rows =
            extents.rows.map(|rows| strided([("Q_ROW", rows.q), ("DOUT_ROW", rows.grad_out)]));
        (NAIVE_DELTA.defines)(extents).into_iter().chain(rows.into_iter().flatten()).collect()
    },
    variants: strided_variants,
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

pub const fn stats_bytes(extents: &Extents) -> u64 {
    2 * 4 * padded_rows(extents) as u64
}

pub const fn dq_sum_bytes(extents: &Extents) -> u64 {
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
    let saved = save(&problem.attention, inputs, device)?;
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
    let shape = Shape::from(&problem.attention);
    let layout = BackwardLayout::like(ForwardLayout::bhsd(&shape));
    let backward = Backward::new(device, &shape, &layout, Technique::FlashMma, SumOrder::Any)?;
    task(&backward, problem, inputs, device)
}

/// A row of dense tensors.
pub fn task(
    backward: &Backward,
    problem: &AttentionBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let saved = save(&problem.attention, inputs, device)?;
    let bytes = backward.scratch_bytes();
    let memory = [scratch(device, bytes.any)?, scratch(device, bytes.zeroed)?];
    memory[1].fill(0)?;
    let outputs = gradients(device, &problem.attention)?;
    let [grad_q, grad_k, grad_v] = [0, 1, 2].map(|index: usize| outputs[index].address());
    let launches = backward.launches(
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
        &Scratch { any: memory[0].address(), zeroed: memory[1].address() },
    )?;
    Ok(CudaTask::new(device, saved.launch_inputs(), outputs, move |_| {
        // The launches have addresses only.
        let _alive = (&saved, &memory);
        launches.launch()
    }))
}

/// How many tiles of queries shared memory holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stages {
    One,
    Two,
}

impl Stages {
    /// Two, where the device has the shared memory or not even that for one.
    ///
    /// # Errors
    /// When the device cannot be asked.
    pub fn choose(device: &Device, extents: &Extents) -> Result<Self, BackendError> {
        let (arch, most) = (&device.facts().arch, device.shared_bytes_a_block()?);
        let fits = |row: &KernelSpec<Extents>| row.unmet_by(extents, arch, most).is_none();
        Ok(if !fits(&FLASH_MMA) && fits(&ONE_STAGE) { Self::One } else { Self::Two })
    }

    const fn kernels(self) -> [KernelSpec<Extents>; 3] {
        match self {
            Self::One => [ONE_STAGE_PREPARE, ONE_STAGE, ONE_STAGE_FINISH],
            Self::Two => [FLASH_MMA_PREPARE, FLASH_MMA, FLASH_MMA_FINISH],
        }
    }
}

/// The kernels in the order of their launches.
///
/// # Errors
/// When the device does not run one, or it does not load.
pub fn load(
    device: &Device,
    extents: &Extents,
    stages: Stages,
) -> Result<[LoadedKernel; 3], BackendError> {
    let kernels = stages.kernels();
    // The one that may be declined first.
    let [main, first, last] =
        [kernels[1], kernels[0], kernels[2]].map(|kernel| kernel.load(device, extents));
    Ok([first?, main?, last?])
}

/// Launches to be settled.
pub struct Call<'a> {
    pub device: &'a Arc<Device>,
    pub extents: &'a Extents,
    pub layout: &'a BackwardLayout,
    pub addresses: &'a BackwardAddresses,
    pub scratch: &'a Scratch,
}

impl Call<'_> {
    /// Two floats a row, padded to whole steps.
    pub const fn stats(&self) -> u64 {
        self.scratch.any
    }

    /// The fp32 accumulator of dq.
    pub const fn dq_sum(&self) -> u64 {
        self.scratch.any + stats_bytes(self.extents)
    }

    /// Parameters of the kernel before the main one.
    pub fn prepare_parameters(&self) -> Parameters {
        let BackwardAddresses { out, grad_out, lse, .. } = *self.addresses;
        let BackwardLayout { forward, grad_out: grad_out_strides, .. } = self.layout;
        let tensors = [out, grad_out, lse, self.stats(), self.dq_sum()];
        self.parameters(&tensors, &[&forward.out, grad_out_strides, &forward.lse])
    }

    /// Parameters of the kernel after the main one.
    pub fn finish_parameters(&self) -> Parameters {
        self.parameters(&[self.dq_sum(), self.addresses.grad_q], &[&self.layout.grad_q])
    }

    fn main_parameters(&self) -> Parameters {
        let BackwardAddresses { q, k, v, grad_out, grad_k, grad_v, .. } = *self.addresses;
        let tensors = [q, k, v, grad_out, self.stats(), self.dq_sum(), grad_k, grad_v];
        let BackwardLayout { forward, grad_out, grad_k, grad_v, .. } = self.layout;
        let strides = [&forward.q, &forward.k, &forward.v, grad_out, grad_k, grad_v];
        self.parameters(&tensors, &strides)
    }

    /// Addresses, `seqlen`, `batch_heads` and `heads`, strides.
    fn parameters(&self, addresses: &[u64], strides: &[&Strides]) -> Parameters {
        let extents = self.extents;
        let numbers = [extents.s, extents.heads, extents.heads_a_batch()];
        let all = addresses.iter().fold(Parameters::new(), |all, address| all.address(*address));
        let all = numbers.into_iter().fold(all, |all, number| all.value(number as i32));
        strides.iter().fold(all, |all, strides| all.value(strides.words()))
    }
}

/// The three launches of `backward_flash_mma`.
///
/// # Errors
/// When a kernel does not load.
pub fn launches(call: &Call<'_>, stages: Stages) -> Result<Launches, BackendError> {
    let [first, main, last] = load(call.device, call.extents, stages)?;
    Ok(Launches::new([
        ("prepare", first.settled(call.device, None, call.prepare_parameters())?),
        ("scores_dkv_dq", main.settled(call.device, None, call.main_parameters())?),
        ("finish", last.settled(call.device, None, call.finish_parameters())?),
    ]))
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
