//! ResNet-18 on the GPU: from a launch an operation and time step to the network in one launch.
//!
//! What each kernel does, its thread mapping and its bound are in its file under
//! `kernels/resnet18`. A rung is a `Sequence`, the list of its launches, made once while a case is
//! prepared, in which weights are packed too. Neurons start from their first step, so there is no
//! reset to launch; frames lie time-major as every kernel reads them, so that only the stem's operand
//! is gathered. Deliberately absent: f32.

mod best;
mod fused;
mod fused_train;
mod jobs;
mod per_op;
mod sequence;
mod tiles;
mod train;
mod uses;
mod weights;

use std::sync::Arc;

use crate::resnet18::definition::{Inference, NetworkShape, TrainStep};
use kernelgate::backend::cuda::{CudaTask, Input, Output};
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::graph::Graph;
use kernelgate_cuda::spec::{ListedKernel, list};
use sequence::Sequence;

/// Every kernel of the family.
pub fn kernels() -> Vec<ListedKernel> {
    [
        list(per_op::KERNELS),
        list(fused::KERNELS),
        list(best::KERNELS),
        list(train::KERNELS),
        list(fused_train::KERNELS),
        list(fused_train::STEP_KERNELS),
    ]
    .concat()
}

/// Inference ladder.
pub const INFERENCE: &[Implementation<Inference>] = &[
    Implementation {
        name: "cuda/per_op",
        about: "a launch an operation from the host, neurons a launch a time step: bound by \
                launches, as eager frameworks are",
        supports: |problem| bf16(&problem.shape),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| per_op::device_bytes(&problem.shape),
            prepare: |problem, inputs, device| {
                let (sequence, outputs) = inference_per_op(&problem.shape, inputs, device)?;
                Ok(launched(device, sequence, &["images"], outputs))
            },
        },
    },
    Implementation {
        name: "cuda/graph",
        about: "per_op captured once and replayed",
        supports: |problem| bf16(&problem.shape),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| per_op::device_bytes(&problem.shape),
            prepare: |problem, inputs, device| {
                let (sequence, outputs) = inference_per_op(&problem.shape, inputs, device)?;
                captured(device, sequence, &["images"], outputs)
            },
        },
    },
    Implementation {
        name: "cuda/fused",
        about: "a kernel a layer in one graph: implicit GEMM on spikes in bf16, bias, residual \
                and neurons of all steps behind it; the stem once an image",
        supports: |problem| bf16(&problem.shape).and_then(|()| tiles::supported(&problem.shape)),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| fused::device_bytes(&problem.shape),
            prepare: |problem, inputs, device| {
                let output = logits(&problem.shape, device)?;
                let sequence = fused::sequence(&problem.shape, inputs, device, &output)?;
                captured(device, sequence, &["images"], vec![output])
            },
        },
    },
    Implementation {
        name: "cuda/best",
        about: "the network in one launch, in groups of eight blocks that hand packed spikes on; \
                their weights are on the way ahead of them",
        supports: |problem| bf16(&problem.shape).and_then(|()| best::supported(&problem.shape)),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| best::device_bytes(&problem.shape),
            prepare: |problem, inputs, device| {
                let output = logits(&problem.shape, device)?;
                let sequence = best::sequence(&problem.shape, inputs, device, &output, false)?;
                captured(device, sequence, &["images"], vec![output])
            },
        },
    },
];

fn logits(shape: &NetworkShape, device: &Device) -> Result<Output, BackendError> {
    Output::new(device, "logits", shape.logits(), Dtype::F32)
}

/// Inference, a launch an operation, and what it writes.
fn inference_per_op(
    shape: &NetworkShape,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<(Sequence, Vec<Output>), BackendError> {
    let output = logits(shape, device)?;
    Ok((per_op::sequence(shape, inputs, device, &output)?, vec![output]))
}

fn bf16(shape: &NetworkShape) -> Result<(), String> {
    if shape.dtype == Dtype::Bf16 { Ok(()) } else { Err("computes bf16 only".to_owned()) }
}

fn trains(
    problem: &TrainStep,
    supported: fn(&NetworkShape) -> Result<(), String>,
) -> Result<(), String> {
    problem.comparable()?;
    bf16(&problem.shape)?;
    supported(&problem.shape)
}

/// Training ladder.
pub const TRAIN_STEP: &[Implementation<TrainStep>] = &[
    Implementation {
        name: "cuda/per_op",
        about: "a launch an operation from the host, neurons forward a launch a time step, \
                backward by replay",
        supports: |problem| trains(problem, train::supported),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| train::device_bytes(&problem.shape),
            prepare: |problem, inputs, device| {
                let (sequence, outputs) =
                    training(&problem.shape, inputs, device, train::sequence)?;
                Ok(launched(device, sequence, &TRAINING_INPUTS, outputs))
            },
        },
    },
    Implementation {
        name: "cuda/graph",
        about: "per_op captured once and replayed",
        supports: |problem| trains(problem, train::supported),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| train::device_bytes(&problem.shape),
            prepare: |problem, inputs, device| {
                let (sequence, outputs) =
                    training(&problem.shape, inputs, device, train::sequence)?;
                captured(device, sequence, &TRAINING_INPUTS, outputs)
            },
        },
    },
    Implementation {
        name: "cuda/fused",
        about: "a kernel a layer forward and backward, neurons behind each GEMM; gradients of all \
                weights in one launch, SGD in another; in one graph",
        supports: |problem| trains(problem, tiles::supported),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| fused_train::device_bytes(&problem.shape, false),
            prepare: |problem, inputs, device| {
                let (sequence, outputs) =
                    training(&problem.shape, inputs, device, fused_train::sequence)?;
                captured(device, sequence, &TRAINING_INPUTS, outputs)
            },
        },
    },
    Implementation {
        name: "cuda/best",
        about: "fused with all layers of the forward pass behind the pooling in one launch",
        supports: |problem| trains(problem, best::supported),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| fused_train::device_bytes(&problem.shape, true),
            prepare: |problem, inputs, device| {
                let (sequence, outputs) =
                    training(&problem.shape, inputs, device, fused_train::sequence_together)?;
                captured(device, sequence, &TRAINING_INPUTS, outputs)
            },
        },
    },
];

/// What every training step reads anew.
const TRAINING_INPUTS: [&str; 4] = ["images", "labels", "parameters", "momentum"];

/// Writes the launches of a training step.
type WriteTraining =
    fn(&NetworkShape, &Tensors, &Arc<Device>, &[Output]) -> Result<Sequence, BackendError>;

/// A training step as it is written, and its outputs.
fn training(
    shape: &NetworkShape,
    inputs: &Tensors,
    device: &Arc<Device>,
    write: WriteTraining,
) -> Result<(Sequence, Vec<Output>), BackendError> {
    let rows = shape.rows(&shape.sizes.network());
    let outputs = vec![
        logits(shape, device)?,
        Output::new(device, "loss", [1], Dtype::F32)?,
        Output::new(device, "new_parameters", rows, Dtype::F32)?,
        Output::new(device, "new_momentum", rows, Dtype::F32)?,
    ];
    Ok((write(shape, inputs, device, &outputs)?, outputs))
}

/// A task that launches one by one.
fn launched(
    device: &Arc<Device>,
    sequence: Sequence,
    names: &[&str],
    outputs: Vec<Output>,
) -> CudaTask {
    let inputs = launch_inputs(&sequence, names);
    let uses = uses::of(&sequence, &outputs);
    CudaTask::new(device, inputs, outputs, move |_| sequence.enqueue()).with_memory_uses(uses)
}

/// A task that replays a capture.
fn captured(
    device: &Arc<Device>,
    sequence: Sequence,
    names: &[&str],
    outputs: Vec<Output>,
) -> Result<CudaTask, BackendError> {
    // One launch first: what it loads cannot be loaded during a capture.
    sequence.enqueue()?;
    device.synchronize()?;
    let graph = Graph::capture(device, || sequence.enqueue())?;
    let inputs = launch_inputs(&sequence, names);
    let uses = uses::of(&sequence, &outputs);
    let task = CudaTask::new(device, inputs, outputs, move |_| {
        // The graph's launches are the sequence's, on its memory.
        let _alive = &sequence;
        graph.launch()
    });
    Ok(task.with_memory_uses(uses))
}

fn launch_inputs(sequence: &Sequence, names: &[&str]) -> Vec<Input> {
    names.iter().map(|name| Input::new(*name, sequence.memory().buffer(name))).collect()
}

#[cfg(test)]
mod tests;
