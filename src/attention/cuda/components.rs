//! The three steps of `forward_naive` apart, each on inputs of its own.

use std::sync::Arc;

use super::forward::NAIVE;
use super::launch::{Extents, upload};
use crate::attention::components::{Scores, Softmax, ValuesProduct};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::{Output, Task};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::{Argument, Device};

/// q, k and fp32 scores.
pub fn scores_bytes(problem: &Scores) -> u64 {
    let extents = Extents::from(&problem.shape);
    2 * extents.vector_bytes() + 4 * extents.pairs()
}

/// fp32 scores and 16-bit probabilities.
pub fn softmax_bytes(problem: &Softmax) -> u64 {
    (4 + 2) * Extents::from(&problem.shape).pairs()
}

/// 16-bit probabilities, v and the output.
pub fn values_bytes(problem: &ValuesProduct) -> u64 {
    let extents = Extents::from(&problem.shape);
    2 * extents.pairs() + 2 * extents.vector_bytes()
}

pub fn scores(problem: &Scores, inputs: &Tensors, device: &Arc<Device>) -> Result<Task, BackendError> {
    let extents = Extents::from(&problem.shape);
    let step = extents.step_of(device, NAIVE[0])?;
    let [q, k] = upload(device, inputs, ["q", "k"])?;
    Ok(Task::new(device, vec![Output::new(device, "scores", problem.shape.pairs(), Dtype::F32)?], move |outputs| {
        let [q, k] = [&q, &k].map(Argument::from);
        step.launch(&[q, k, outputs[0].argument(), extents.seqlen()])
    }))
}

pub fn softmax(problem: &Softmax, inputs: &Tensors, device: &Arc<Device>) -> Result<Task, BackendError> {
    let extents = Extents::from(&problem.shape);
    let step = extents.step_of(device, NAIVE[1])?;
    let [scores] = upload(device, inputs, ["scores"])?;
    let probabilities = Output::new(device, "probabilities", problem.shape.pairs(), problem.shape.dtype)?;
    Ok(Task::new(device, vec![probabilities], move |outputs| {
        let arguments = [Argument::from(&scores), outputs[0].argument(), Argument::Address(0), extents.seqlen()];
        step.launch(&arguments)
    }))
}

pub fn values(problem: &ValuesProduct, inputs: &Tensors, device: &Arc<Device>) -> Result<Task, BackendError> {
    let extents = Extents::from(&problem.shape);
    let step = extents.step_of(device, NAIVE[2])?;
    let [probabilities, v] = upload(device, inputs, ["probabilities", "v"])?;
    Ok(Task::new(device, vec![Output::new(device, "out", problem.shape.vectors(), problem.shape.dtype)?], move |outputs| {
        let [probabilities, v] = [&probabilities, &v].map(Argument::from);
        step.launch(&[probabilities, v, outputs[0].argument(), extents.seqlen()])
    }))
}
