//! ResNet-18 with ST-BIF neurons on the CPU in f32: each layer is computed over all frames, the
//! stem's convolution once for each image. The neurons of ResNet-18 on the CPU use the loops of the
//! workload family `st_bif`.
//!
//! The CPU implementation keeps no packed weights: every launch reads the parameters from its
//! inputs.

mod convolution;
mod network;
mod pooling;
#[cfg(test)]
mod tests;

use crate::resnet18::definition::{ResNetInference, ResNetTrainingStep};
use kernelgate::backend::cpu::CpuTask;
use kernelgate::backend::{Implementation, PrepareFunction};
use kernelgate::workload::{Dtype, Tensors};
use network::CpuResNetState;

/// CPU implementations of ResNet-18 inference.
pub const CPU_INFERENCE_ROWS: &[Implementation<ResNetInference>] = &[Implementation {
    implementation_name: "cpu",
    description: "gathered rows times filters in f32, a layer at a time, the stem once an image",
    supports: |_| Ok(()),
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let outputs =
            Tensors::new().with_output("logits", problem.shape.shape_of_logits(), Dtype::F32);
        let mut network = CpuResNetState::allocate_for_network_shape(&problem.shape);
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            network.run_forward_pass(inputs, outputs.f32_mut("logits"));
        })
    }),
}];

/// CPU implementations of a ResNet-18 training step.
pub const CPU_TRAINING_STEP_ROWS: &[Implementation<ResNetTrainingStep>] = &[Implementation {
    implementation_name: "cpu",
    description: "the forward of `cpu`, neurons replayed backward, gradients by GEMMs of the same rows",
    supports: ResNetTrainingStep::check_comparable_with_reference,
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let rows = inputs.tensor("parameters").shape().to_vec();
        let outputs = Tensors::new()
            .with_output("logits", problem.shape.shape_of_logits(), Dtype::F32)
            .with_output("loss", [1], Dtype::F32)
            .with_output("new_parameters", rows.clone(), Dtype::F32)
            .with_output("new_momentum", rows, Dtype::F32);
        let mut network = CpuResNetState::allocate_for_network_shape(&problem.shape);
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            network.run_sgd_training_step(inputs, outputs)
        })
    }),
}];
