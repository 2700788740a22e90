//! Attention backward: launchers of `kernels/attention/backward_*`.
//!
//! The forward's output and the rows' log-sum-exp come from `forward_flash_mma`, run once while the case is prepared. What is
//! timed is what a training step would run: the row sums of dout · out first, then the gradients.

use std::sync::Arc;

use super::forward::{FLASH_MMA as FORWARD, output};
use super::launch::{Extents, scratch, upload};
use crate::attention::definition::{Attention, Backward};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::{Output, Task};
use kernelgate::workload::Tensors;
use kernelgate_cuda::{Argument, Buffer, Device};

/// With the forward that they need first.
pub const NAIVE: &[&str] = &[
    "attention_backward_naive_delta",
    "attention_backward_naive_scores",
    "attention_backward_naive_dq",
    "attention_backward_naive_dkv",
    "attention_forward_flash_mma",
];
pub const FLASH_MMA: &[&str] = &[
    "attention_backward_flash_mma_prepare",
    "attention_backward_flash_mma",
    "attention_backward_flash_mma_finish",
    "attention_forward_flash_mma",
];

/// Four inputs, the saved output and log-sum-exp, three gradients.
pub fn common_bytes(extents: &Extents) -> u64 {
    8 * extents.vector_bytes() + 4 * extents.rows()
}

/// fp32 probabilities and gradients of the scores, and the row sums.
pub fn naive_bytes(problem: &Backward) -> u64 {
    let extents = Extents::from(&problem.attention);
    common_bytes(&extents) + 2 * 4 * extents.pairs() + 4 * extents.rows()
}

/// The fp32 accumulator of dq and two floats a row, padded to whole steps.
pub fn flash_mma_bytes(problem: &Backward) -> u64 {
    let extents = Extents::from(&problem.attention);
    common_bytes(&extents) + stats_bytes(&extents) + dq_sum_bytes(&extents)
}

fn stats_bytes(extents: &Extents) -> u64 {
    2 * 4 * extents.padded_rows() as u64
}

fn dq_sum_bytes(extents: &Extents) -> u64 {
    4 * (extents.padded_rows() * extents.d) as u64
}

/// What a backward starts from.
pub struct Saved {
    pub q: Buffer,
    pub k: Buffer,
    pub v: Buffer,
    pub grad_out: Buffer,
    pub out: Buffer,
    /// fp32, natural logarithm, one a row.
    pub lse: Buffer,
}

/// Uploads the inputs and runs the forward, which is not part of the problem.
pub fn save(extents: &Extents, inputs: &Tensors, device: &Arc<Device>) -> Result<Saved, BackendError> {
    let [q, k, v, grad_out] = upload(device, inputs, ["q", "k", "v", "grad_out"])?;
    let (out, lse) = (scratch(device, extents.vector_bytes())?, scratch(device, 4 * extents.rows())?);
    let forward = extents.step_of(device, FORWARD[0])?;
    let [from_q, from_k, from_v, to_out, to_lse] = [&q, &k, &v, &out, &lse].map(Argument::from);
    forward.launch(&[from_q, from_k, from_v, to_out, to_lse, extents.seqlen(), extents.batch_heads()])?;
    device.synchronize()?;
    Ok(Saved { q, k, v, grad_out, out, lse })
}

pub fn naive(problem: &Backward, inputs: &Tensors, device: &Arc<Device>) -> Result<Task, BackendError> {
    let extents = Extents::from(&problem.attention);
    let [sum, score, query, key] = [NAIVE[0], NAIVE[1], NAIVE[2], NAIVE[3]].map(|symbol| extents.step_of(device, symbol));
    let (sum, score, query, key) = (sum?, score?, query?, key?);
    let saved = save(&extents, inputs, device)?;
    let delta = scratch(device, 4 * extents.rows())?;
    let (p, ds) = (scratch(device, 4 * extents.pairs())?, scratch(device, 4 * extents.pairs())?);
    Ok(Task::new(device, gradients(device, &problem.attention)?, move |outputs| {
        let Saved { q, k, v, grad_out, out, lse } = &saved;
        let [q, k, v, grad_out, out, lse] = [q, k, v, grad_out, out, lse].map(Argument::from);
        let [delta, p, ds] = [&delta, &p, &ds].map(Argument::from);
        let [grad_q, grad_k, grad_v] = [0, 1, 2].map(|index: usize| outputs[index].argument());
        let (s, heads) = (extents.seqlen(), extents.batch_heads());
        sum.launch(&[out, grad_out, delta, s, heads])?;
        score.launch(&[q, k, v, grad_out, lse, delta, p, ds, s])?;
        query.launch(&[ds, k, grad_q, s])?;
        key.launch(&[p, ds, q, grad_out, grad_k, grad_v, s])
    }))
}

pub fn flash_mma(problem: &Backward, inputs: &Tensors, device: &Arc<Device>) -> Result<Task, BackendError> {
    let extents = Extents::from(&problem.attention);
    let [first, main, last] = [FLASH_MMA[0], FLASH_MMA[1], FLASH_MMA[2]].map(|symbol| extents.step_of(device, symbol));
    let (first, main, last) = (first?, main?, last?);
    let saved = save(&extents, inputs, device)?;
    let (stats, dq_sum) = (scratch(device, stats_bytes(&extents))?, scratch(device, dq_sum_bytes(&extents))?);
    Ok(Task::new(device, gradients(device, &problem.attention)?, move |outputs| {
        let Saved { q, k, v, grad_out, out, lse } = &saved;
        let [q, k, v, grad_out, out, lse] = [q, k, v, grad_out, out, lse].map(Argument::from);
        let [stats, dq_sum] = [&stats, &dq_sum].map(Argument::from);
        let [grad_q, grad_k, grad_v] = [0, 1, 2].map(|index: usize| outputs[index].argument());
        let (s, heads) = (extents.seqlen(), extents.batch_heads());
        first.launch(&[out, grad_out, lse, stats, dq_sum, s, heads])?;
        main.launch(&[q, k, v, grad_out, stats, dq_sum, grad_k, grad_v, s, heads])?;
        last.launch(&[dq_sum, grad_q, s, heads])
    }))
}

/// `grad_q`, `grad_k` and `grad_v`.
pub fn gradients(device: &Device, attention: &Attention) -> Result<Vec<Output>, BackendError> {
    ["grad_q", "grad_k", "grad_v"].into_iter().map(|name| output(device, name, attention)).collect()
}
