//! The language model on the CPU in f32: GEMMs on all threads, the steps between them row by row.
//!
//! The published model sizes are excluded on purpose: their launches would take seconds.

mod backward;
mod forward;
mod steps;

use super::definition::{ModelForward, TrainStep};
use super::shape::{
    ADAM_EPSILON, BETA_1, BETA_2, LEARNING_RATE, LmShape, STATE_OUTPUTS, WEIGHT_DECAY,
};
use forward::CpuModel;
use kernelgate::backend::cpu::CpuTask;
use kernelgate::backend::{Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensors};

/// Maximum number of parameters of a model that the CPU rows support.
const MAX_CPU_PARAMETERS: usize = 8 << 20;

/// CPU rows of the forward pass.
pub const FORWARD: &[Implementation<ModelForward>] = &[Implementation {
    name: "cpu",
    about: "GEMMs on all threads, the steps between them row by row",
    supports: |problem| check_cpu_supported(&problem.shape),
    prepare: Prepare::Cpu(|problem, inputs| {
        let shape = problem.shape;
        let mut model = CpuModel::new(&shape);
        let logits = [shape.batch, shape.context, shape.padded_vocabulary()];
        let outputs = Tensors::new().with_output("logits", logits, Dtype::F32).with_output(
            "loss",
            [shape.batch, 1],
            Dtype::F32,
        );
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            model.compute_logits_and_losses(inputs, outputs.f32_mut("logits"));
            model.compute_sequence_losses(inputs, outputs.f32_mut("loss"));
        })
    }),
}];

/// CPU rows of a training step.
pub const TRAIN_STEP: &[Implementation<TrainStep>] = &[Implementation {
    name: "cpu",
    about: "forward, GEMMs with transposed operands on all threads, AdamW",
    supports: |problem| check_cpu_supported(&problem.shape),
    prepare: Prepare::Cpu(|problem, inputs| {
        let shape = problem.shape;
        let mut model = CpuModel::new(&shape);
        let mut logits = vec![0.0; shape.token_count() * shape.padded_vocabulary()];
        let mut gradient = vec![0.0; shape.parameter_count()];
        let outputs = STATE_OUTPUTS.into_iter().fold(Tensors::new(), |outputs, name| {
            outputs.with_output(name, [shape.arena_rows(), shape.d], Dtype::F32)
        });
        let outputs = outputs.with_output("loss", [shape.batch, 1], Dtype::F32);
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            model.compute_logits_and_losses(inputs, &mut logits);
            model.compute_sequence_losses(inputs, outputs.f32_mut("loss"));
            model.compute_gradients(inputs, &mut logits, &mut gradient);
            update_by_adamw(inputs, &gradient, outputs);
        })
    }),
}];

fn check_cpu_supported(shape: &LmShape) -> Result<(), String> {
    match shape.dtype {
        Dtype::F32 if shape.parameter_count() <= MAX_CPU_PARAMETERS => Ok(()),
        Dtype::F32 => Err("computes models of at most 8 million parameters".to_owned()),
        _ => Err("computes f32 only".to_owned()),
    }
}

/// Updates the state by a step of AdamW.
fn update_by_adamw(inputs: &Tensors, gradient: &[f32], outputs: &mut Tensors) {
    let [beta_1, beta_2] = [BETA_1, BETA_2].map(|beta| beta as f32);
    let [rest_1, rest_2] = [BETA_1, BETA_2].map(|beta| (1.0 - beta) as f32);
    let steps = f64::from(inputs.f32("steps")[0]) + 1.0;
    let [first, second] = [BETA_1, BETA_2].map(|beta| (1.0 / (1.0 - beta.powf(steps))) as f32);
    let [rate, decay] = [LEARNING_RATE, LEARNING_RATE * WEIGHT_DECAY];
    let (rate, decay) = (rate as f32, decay as f32);
    let epsilon = ADAM_EPSILON as f32;
    let m = outputs.f32_mut("next_first_moments").iter_mut().zip(inputs.f32("first_moments"));
    m.zip(gradient).for_each(|((to, m), g)| *to = beta_1 * m + rest_1 * g);
    let v = outputs.f32_mut("next_second_moments").iter_mut().zip(inputs.f32("second_moments"));
    v.zip(gradient).for_each(|((to, v), g)| *to = beta_2 * v + rest_2 * g * g);
    let updated: Vec<f32> = inputs
        .f32("parameters")
        .iter()
        .zip(outputs.f32("next_first_moments").iter().zip(outputs.f32("next_second_moments")))
        .map(|(p, (m, v))| p - decay * p - rate * m * first / ((v * second).sqrt() + epsilon))
        .collect();
    outputs.f32_mut("next_parameters").copy_from_slice(&updated);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu_tests::check_row_against_reference;

    #[test]
    fn transformer_cpu_rows_agree_with_the_reference_at_odd_shapes() {
        let shape = LmShape {
            vocabulary: 101,
            d: 24,
            ff: 40,
            layers: 3,
            heads: 3,
            context: 19,
            batch: 2,
            dtype: Dtype::F32,
        };
        for shape in [shape, LmShape { context: 1, batch: 1, vocabulary: 3, ..shape }] {
            check_row_against_reference(&FORWARD[0], &ModelForward { shape });
            check_row_against_reference(&TRAIN_STEP[0], &TrainStep { shape });
        }
    }
}
