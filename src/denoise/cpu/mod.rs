//! The denoising action expert on the CPU in f32: GEMMs run over blocks of weight columns, and all
//! other operations of the expert are fused into the CPU tasks of these GEMMs.
//!
//! The CPU expert reads its weights directly from the inputs; it copies only activations. Weights
//! quantised to fp8 or int4 are converted to f32 while a CPU case is prepared, because the CPU does
//! not gain from fewer bits.

mod element;
mod expert;
#[cfg(test)]
mod tests;

use crate::denoise::definition::{DenoiseLoop, DenoiseParameters, DenoiseStep, LayerWeightFormat};
use crate::denoise::fp8::convert_bf16_inputs_to_f32;
use crate::denoise::model::VALUES_PER_ACTION;
use std::sync::Arc;

use expert::CpuActionExpert;
use kernelgate::backend::cpu::CpuTask;
use kernelgate::backend::{Implementation, PrepareFunction};
use kernelgate::workload::{Dtype, Tensors};

/// CPU implementations of one denoising step (one velocity).
pub const CPU_DENOISE_STEP_ROWS: &[Implementation<DenoiseStep>] = &[Implementation {
    implementation_name: "cpu",
    description: "column blocks of weights over threads, heads packed into one attention GEMM, norm \
            and activation fused",
    supports: |problem| check_f32_or_quantised_weights(&problem.expert),
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let outputs = Tensors::new().with_output(
            "velocity",
            [problem.expert.action_tokens, VALUES_PER_ACTION],
            Dtype::F32,
        );
        let mut expert = CpuActionExpert::allocate_for_denoising_times(
            &problem.expert,
            expert_inputs_as_f32(&problem.expert, &inputs),
            1,
        );
        let task = CpuTask::new(inputs, outputs, move |inputs, outputs| {
            expert.compute_styles_of_times(&[f64::from(inputs.f32_elements("t")[0])]);
            expert.compute_velocity(0, inputs.f32_elements("x"), outputs.f32_mut("velocity"));
        });
        // Apart from `t` and `x`, the CPU expert reads the weights and caches with which it was
        // created, not the task's later inputs.
        task.reading_only_inputs(&["t", "x"])
    }),
}];

/// CPU implementations of the denoising loop (all steps from noise to actions).
pub const CPU_DENOISE_LOOP_ROWS: &[Implementation<DenoiseLoop>] = &[Implementation {
    implementation_name: "cpu",
    description: "the step of `cpu`, with the styles of all steps computed first",
    supports: |problem| check_f32_or_quantised_weights(&problem.expert),
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let outputs = Tensors::new().with_output(
            "actions",
            [problem.expert.action_tokens, VALUES_PER_ACTION],
            Dtype::F32,
        );
        let mut expert = CpuActionExpert::allocate_for_denoising_times(
            &problem.expert,
            expert_inputs_as_f32(&problem.expert, &inputs),
            problem.euler_steps,
        );
        let mut velocity = vec![0.0; problem.expert.action_tokens * VALUES_PER_ACTION];
        let dt = -1.0 / problem.euler_steps as f64;
        let mut times = vec![1.0; problem.euler_steps];
        for step in 1..problem.euler_steps {
            times[step] = times[step - 1] + dt;
        }
        let task = CpuTask::new(inputs, outputs, move |inputs, outputs| {
            let actions = outputs.f32_mut("actions");
            actions.copy_from_slice(inputs.f32_elements("x"));
            expert.compute_styles_of_times(&times);
            for step in 0..times.len() {
                expert.compute_velocity(step, actions, &mut velocity);
                actions.iter_mut().zip(&velocity).for_each(|(x, v)| *x += dt as f32 * v);
            }
        });
        task.reading_only_inputs(&["x"])
    }),
}];

fn check_f32_or_quantised_weights(shape: &DenoiseParameters) -> Result<(), String> {
    match (shape.dtype, shape.weights) {
        (Dtype::F32, _) | (_, LayerWeightFormat::Fp8 | LayerWeightFormat::Int4) => Ok(()),
        _ => Err("computes f32 only".to_owned()),
    }
}

/// Converts the inputs of the denoising expert to f32 and dequantises weights; f32 inputs are
/// shared without a copy.
fn expert_inputs_as_f32(shape: &DenoiseParameters, inputs: &Arc<Tensors>) -> Arc<Tensors> {
    match shape.weights {
        LayerWeightFormat::SameDtypeAsActivations => inputs.clone(),
        LayerWeightFormat::Fp8 | LayerWeightFormat::Int4 => {
            Arc::new(convert_bf16_inputs_to_f32(&shape.inputs_rounded_to_weight_format(inputs)))
        }
    }
}
