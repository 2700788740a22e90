//! ResNet-18 on the GPU, inference: from a launch an operation and time step to a kernel a layer.
//!
//! What each kernel does, its thread mapping and its bound are in its file under `kernels/resnet18`.
//! A rung is a `Sequence`, the list of its launches, made once while a case is prepared, in which
//! weights are packed too. Neurons start from their first step, so there is no reset to launch, and
//! no reshaping: frames lie time-major as every kernel reads them. Deliberately absent: f32, and
//! training.

mod fused;
mod per_op;
mod sequence;
mod weights;

use std::sync::Arc;

use crate::resnet18::NetworkShape;
use crate::resnet18::definition::Inference;
use kernelgate::backend::cuda::{CudaTask, Output, inputs};
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::graph::Graph;
use kernelgate_cuda::spec::{ListedKernel, list};
use sequence::Sequence;

/// Every kernel of the family.
pub fn kernels() -> Vec<ListedKernel> {
    [list(per_op::KERNELS), list(fused::KERNELS)].concat()
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
                launched(&problem.shape, inputs, device, per_op::sequence)
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
                captured(&problem.shape, inputs, device, per_op::sequence)
            },
        },
    },
    Implementation {
        name: "cuda/fused",
        about: "a kernel a layer in one graph: implicit GEMM on spikes from bytes, bias, residual \
                and neurons of all steps behind it; the stem once an image",
        supports: |problem| bf16(&problem.shape).and_then(|()| fused::supported(&problem.shape)),
        prepare: Prepare::CudaWithin {
            device_bytes: |problem| fused::device_bytes(&problem.shape),
            prepare: |problem, inputs, device| {
                captured(&problem.shape, inputs, device, fused::sequence)
            },
        },
    },
];

fn bf16(shape: &NetworkShape) -> Result<(), String> {
    if shape.dtype == Dtype::Bf16 { Ok(()) } else { Err("computes bf16 only".to_owned()) }
}

/// Makes the list of launches for an output.
type Write = fn(&NetworkShape, &Tensors, &Arc<Device>, &Output) -> Result<Sequence, BackendError>;

/// A task that launches one by one.
fn launched(
    shape: &NetworkShape,
    tensors: &Tensors,
    device: &Arc<Device>,
    write: Write,
) -> Result<CudaTask, BackendError> {
    let output = Output::new(device, "logits", shape.logits(), Dtype::F32)?;
    let sequence = write(shape, tensors, device, &output)?;
    let images = inputs([("images", sequence.memory().buffer("images"))]);
    Ok(CudaTask::new(device, images, vec![output], move |_| sequence.enqueue()))
}

/// A task that replays a capture.
fn captured(
    shape: &NetworkShape,
    tensors: &Tensors,
    device: &Arc<Device>,
    write: Write,
) -> Result<CudaTask, BackendError> {
    let output = Output::new(device, "logits", shape.logits(), Dtype::F32)?;
    let sequence = write(shape, tensors, device, &output)?;
    // One launch first: what it loads cannot be loaded during a capture.
    sequence.enqueue()?;
    device.synchronize()?;
    let graph = Graph::capture(device, || sequence.enqueue())?;
    let images = inputs([("images", sequence.memory().buffer("images"))]);
    Ok(CudaTask::new(device, images, vec![output], move |_| {
        // The graph's launches are the sequence's, on its memory.
        let _alive = &sequence;
        graph.launch()
    }))
}

#[cfg(test)]
mod tests;
