//! The language model on the CPU in f32: GEMMs run on all threads, and the steps between GEMMs
//! process rows in parallel.
//!
//! The CPU implementation refuses the published model sizes, because a launch would take seconds.

mod backward;
mod forward;
mod steps;

use super::definition::{LanguageModelForward, LanguageModelTrainingStep};
use super::shape::{
    ADAMW_BETA_1, ADAMW_BETA_2, ADAMW_EPSILON, ADAMW_LEARNING_RATE, ADAMW_WEIGHT_DECAY,
    LanguageModelShape, TRAINING_STATE_OUTPUTS,
};
use forward::CpuLanguageModel;
use kernelgate::backend::cpu::CpuTask;
use kernelgate::backend::{Implementation, PrepareFunction};
use kernelgate::workload::{Dtype, Tensors};

/// Maximum number of parameters of a language model that the CPU implementations support.
const MAX_PARAMETERS_ON_CPU: usize = 8 << 20;

/// CPU implementations of the language model's forward pass.
pub const CPU_LM_FORWARD_ROWS: &[Implementation<LanguageModelForward>] = &[Implementation {
    implementation_name: "cpu",
    description: "GEMMs on all threads, the steps between them row by row",
    supports: |problem| check_f32_and_parameter_count(&problem.shape),
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let shape = problem.shape;
        let mut model = CpuLanguageModel::allocate_for_model_shape(&shape);
        let logits = [shape.batch, shape.context_tokens, shape.padded_logit_columns()];
        let outputs = Tensors::new().with_output("logits", logits, Dtype::F32).with_output(
            "loss",
            [shape.batch, 1],
            Dtype::F32,
        );
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            model.run_forward_pass_with_token_losses(inputs, outputs.f32_mut("logits"));
            model.average_losses_of_sequences(inputs, outputs.f32_mut("loss"));
        })
    }),
}];

/// CPU implementations of a training step of the language model.
pub const CPU_LM_TRAINING_STEP_ROWS: &[Implementation<LanguageModelTrainingStep>] =
    &[Implementation {
        implementation_name: "cpu",
        description: "forward, GEMMs with transposed operands on all threads, AdamW",
        supports: |problem| check_f32_and_parameter_count(&problem.shape),
        prepare: PrepareFunction::Cpu(|problem, inputs| {
            let shape = problem.shape;
            let mut model = CpuLanguageModel::allocate_for_model_shape(&shape);
            let mut logits = vec![0.0; shape.tokens_in_batch() * shape.padded_logit_columns()];
            let mut gradient = vec![0.0; shape.number_of_parameters()];
            let outputs =
                TRAINING_STATE_OUTPUTS.into_iter().fold(Tensors::new(), |outputs, name| {
                    outputs.with_output(
                        name,
                        [shape.rows_in_parameter_arena(), shape.model_width],
                        Dtype::F32,
                    )
                });
            let outputs = outputs.with_output("loss", [shape.batch, 1], Dtype::F32);
            CpuTask::new(inputs, outputs, move |inputs, outputs| {
                model.run_forward_pass_with_token_losses(inputs, &mut logits);
                model.average_losses_of_sequences(inputs, outputs.f32_mut("loss"));
                model.compute_all_parameter_gradients(inputs, &mut logits, &mut gradient);
                write_adamw_update(inputs, &gradient, outputs);
            })
        }),
    }];

fn check_f32_and_parameter_count(shape: &LanguageModelShape) -> Result<(), String> {
    match shape.dtype {
        Dtype::F32 if shape.number_of_parameters() <= MAX_PARAMETERS_ON_CPU => Ok(()),
        Dtype::F32 => Err("computes models of at most 8 million parameters".to_owned()),
        _ => Err("computes f32 only".to_owned()),
    }
}

/// Computes one AdamW step: writes new parameters and new moments to the outputs.
fn write_adamw_update(inputs: &Tensors, gradient: &[f32], outputs: &mut Tensors) {
    let [beta_1, beta_2] = [ADAMW_BETA_1, ADAMW_BETA_2].map(|beta| beta as f32);
    let [rest_1, rest_2] = [ADAMW_BETA_1, ADAMW_BETA_2].map(|beta| (1.0 - beta) as f32);
    let steps = f64::from(inputs.f32_elements("steps")[0]) + 1.0;
    let [first, second] =
        [ADAMW_BETA_1, ADAMW_BETA_2].map(|beta| (1.0 / (1.0 - beta.powf(steps))) as f32);
    let [rate, decay] = [ADAMW_LEARNING_RATE, ADAMW_LEARNING_RATE * ADAMW_WEIGHT_DECAY];
    let (rate, decay) = (rate as f32, decay as f32);
    let epsilon = ADAMW_EPSILON as f32;
    let m =
        outputs.f32_mut("next_first_moments").iter_mut().zip(inputs.f32_elements("first_moments"));
    m.zip(gradient).for_each(|((to, m), g)| *to = beta_1 * m + rest_1 * g);
    let v = outputs
        .f32_mut("next_second_moments")
        .iter_mut()
        .zip(inputs.f32_elements("second_moments"));
    v.zip(gradient).for_each(|((to, v), g)| *to = beta_2 * v + rest_2 * g * g);
    let updated: Vec<f32> = inputs
        .f32_elements("parameters")
        .iter()
        .zip(
            outputs
                .f32_elements("next_first_moments")
                .iter()
                .zip(outputs.f32_elements("next_second_moments")),
        )
        .map(|(p, (m, v))| p - decay * p - rate * m * first / ((v * second).sqrt() + epsilon))
        .collect();
    outputs.f32_mut("next_parameters").copy_from_slice(&updated);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu_tests::assert_cpu_row_agrees_with_reference;

    #[test]
    fn language_model_cpu_rows_agree_with_the_reference_at_odd_sizes() {
        let shape = LanguageModelShape {
            vocabulary_size: 101,
            model_width: 24,
            swiglu_hidden_width: 40,
            layers: 3,
            heads: 3,
            context_tokens: 19,
            batch: 2,
            dtype: Dtype::F32,
        };
        for shape in
            [shape, LanguageModelShape { context_tokens: 1, batch: 1, vocabulary_size: 3, ..shape }]
        {
            assert_cpu_row_agrees_with_reference(
                &CPU_LM_FORWARD_ROWS[0],
                &LanguageModelForward { shape },
            );
            assert_cpu_row_agrees_with_reference(
                &CPU_LM_TRAINING_STEP_ROWS[0],
                &LanguageModelTrainingStep { shape },
            );
        }
    }
}
