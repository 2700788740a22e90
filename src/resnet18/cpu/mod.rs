//! ResNet-18 on the CPU in f32: each layer is computed over all frames, the stem once for each
//! image. Neurons use the loops of `st_bif`.
//!
//! Packed weights are excluded on purpose: every launch reads the parameters from the inputs.

mod convolution;
mod network;
mod pooling;
#[cfg(test)]
mod tests;

use crate::resnet18::definition::{Inference, TrainStep};
use kernelgate::backend::cpu::CpuTask;
use kernelgate::backend::{Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensors};
use network::CpuNetwork;

/// CPU implementations of ResNet-18 inference.
pub const INFERENCE: &[Implementation<Inference>] = &[Implementation {
    name: "cpu",
    about: "gathered rows times filters in f32, a layer at a time, the stem once an image",
    supports: |_| Ok(()),
    prepare: Prepare::Cpu(|problem, inputs| {
        let outputs =
            Tensors::new().with_output("logits", problem.shape.logits_shape(), Dtype::F32);
        let mut network = CpuNetwork::new(&problem.shape);
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            network.compute_logits(inputs, outputs.f32_mut("logits"));
        })
    }),
}];

/// CPU implementations of a ResNet-18 training step.
pub const TRAIN_STEP: &[Implementation<TrainStep>] = &[Implementation {
    name: "cpu",
    about: "the forward of `cpu`, neurons replayed backward, gradients by GEMMs of the same rows",
    supports: TrainStep::is_comparable_with_reference,
    prepare: Prepare::Cpu(|problem, inputs| {
        let rows = inputs.tensor("parameters").shape().to_vec();
        let outputs = Tensors::new()
            .with_output("logits", problem.shape.logits_shape(), Dtype::F32)
            .with_output("loss", [1], Dtype::F32)
            .with_output("new_parameters", rows.clone(), Dtype::F32)
            .with_output("new_momentum", rows, Dtype::F32);
        let mut network = CpuNetwork::new(&problem.shape);
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            network.run_training_step(inputs, outputs)
        })
    }),
}];
