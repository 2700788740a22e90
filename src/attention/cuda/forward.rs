//! Attention forward: launchers of `kernels/attention/forward_*`.

use std::sync::Arc;

use super::launch::{Extents, scratch, upload};
use crate::attention::definition::{Attention, Forward};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::{Output, Task};
use kernelgate::workload::Tensors;
use kernelgate_cuda::{Argument, Device};

pub const NAIVE: &[&str] = &["attention_forward_naive_scores", "attention_forward_naive_softmax", "attention_forward_naive_values"];
pub const TILED: &[&str] = &["attention_forward_tiled_scores", "attention_forward_tiled_softmax", "attention_forward_tiled_values"];
pub const FLASH: &[&str] = &["attention_forward_flash"];
pub const FLASH_MMA: &[&str] = &["attention_forward_flash_mma"];

const NULL: Argument = Argument::Address(0);

/// Inputs and output: all that the fused kernels need.
pub fn flash_bytes(problem: &Forward) -> u64 {
    4 * Extents::from(&problem.attention).vector_bytes()
}

/// fp32 scores and 16-bit probabilities beside inputs and output.
pub fn naive_bytes(problem: &Forward) -> u64 {
    flash_bytes(problem) + (4 + 2) * Extents::from(&problem.attention).pairs()
}

/// fp32 scores, which become the probabilities.
pub fn tiled_bytes(problem: &Forward) -> u64 {
    flash_bytes(problem) + 4 * Extents::from(&problem.attention).pairs()
}

pub fn naive(problem: &Forward, inputs: &Tensors, device: &Arc<Device>) -> Result<Task, BackendError> {
    let extents = Extents::from(&problem.attention);
    let [score, normalize, weigh] = [NAIVE[0], NAIVE[1], NAIVE[2]].map(|symbol| extents.step_of(device, symbol));
    let (score, normalize, weigh) = (score?, normalize?, weigh?);
    let [q, k, v] = upload(device, inputs, ["q", "k", "v"])?;
    let (scores, probabilities) = (scratch(device, 4 * extents.pairs())?, scratch(device, 2 * extents.pairs())?);
    Ok(Task::new(device, vec![output(device, "out", &problem.attention)?], move |outputs| {
        let [q, k, v, scores, probabilities] = [&q, &k, &v, &scores, &probabilities].map(Argument::from);
        let (out, s) = (outputs[0].argument(), extents.seqlen());
        score.launch(&[q, k, scores, s])?;
        normalize.launch(&[scores, probabilities, NULL, s])?;
        weigh.launch(&[probabilities, v, out, s])
    }))
}

pub fn tiled(problem: &Forward, inputs: &Tensors, device: &Arc<Device>) -> Result<Task, BackendError> {
    let extents = Extents::from(&problem.attention);
    let [score, normalize, weigh] = [TILED[0], TILED[1], TILED[2]].map(|symbol| extents.step_of(device, symbol));
    let (score, normalize, weigh) = (score?, normalize?, weigh?);
    let [q, k, v] = upload(device, inputs, ["q", "k", "v"])?;
    let scores = scratch(device, 4 * extents.pairs())?;
    Ok(Task::new(device, vec![output(device, "out", &problem.attention)?], move |outputs| {
        let [q, k, v, scores] = [&q, &k, &v, &scores].map(Argument::from);
        let (out, s) = (outputs[0].argument(), extents.seqlen());
        score.launch(&[q, k, scores, s])?;
        normalize.launch(&[scores, NULL, s])?;
        weigh.launch(&[scores, v, out, s])
    }))
}

pub fn flash(problem: &Forward, inputs: &Tensors, device: &Arc<Device>) -> Result<Task, BackendError> {
    let extents = Extents::from(&problem.attention);
    let step = extents.step_of(device, FLASH[0])?;
    let [q, k, v] = upload(device, inputs, ["q", "k", "v"])?;
    Ok(Task::new(device, vec![output(device, "out", &problem.attention)?], move |outputs| {
        let [q, k, v] = [&q, &k, &v].map(Argument::from);
        step.launch(&[q, k, v, outputs[0].argument(), NULL, extents.seqlen()])
    }))
}

pub fn flash_mma(problem: &Forward, inputs: &Tensors, device: &Arc<Device>) -> Result<Task, BackendError> {
    let extents = Extents::from(&problem.attention);
    let step = extents.step_of(device, FLASH_MMA[0])?;
    let [q, k, v] = upload(device, inputs, ["q", "k", "v"])?;
    Ok(Task::new(device, vec![output(device, "out", &problem.attention)?], move |outputs| {
        let [q, k, v] = [&q, &k, &v].map(Argument::from);
        let sizes = [extents.seqlen(), extents.batch_heads()];
        step.launch(&[q, k, v, outputs[0].argument(), NULL, sizes[0], sizes[1]])
    }))
}

/// An output of the problem's shape and dtype.
pub fn output(device: &Device, name: &'static str, attention: &Attention) -> Result<Output, BackendError> {
    Output::new(device, name, attention.shape(), attention.dtype)
}
