//! The denoise expert on the CPU in f32: GEMMs over blocks of weight columns, with all other
//! operations fused into them.
//!
//! Weights are read directly from the inputs; only activations are copied. Quantised weights are
//! converted to f32 while a case is prepared, because the CPU does not gain from fewer bits.

mod element;
mod expert;
#[cfg(test)]
mod tests;

use crate::denoise::definition::{ActionExpertShape, DenoiseLoop, DenoiseStep, WeightFormat};
use crate::denoise::fp8::widen_to_f32;
use crate::denoise::model::ACTION_COLUMNS;
use std::sync::Arc;

use expert::CpuExpert;
use kernelgate::backend::cpu::CpuTask;
use kernelgate::backend::{Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensors};

/// CPU implementations of one denoising step.
pub const STEP: &[Implementation<DenoiseStep>] = &[Implementation {
    name: "cpu",
    about: "column blocks of weights over threads, heads packed into one attention GEMM, norm \
            and activation fused",
    supports: |problem| check_dtype_support(&problem.expert),
    prepare: Prepare::Cpu(|problem, inputs| {
        let outputs =
            Tensors::new().with_output("velocity", [problem.expert.s, ACTION_COLUMNS], Dtype::F32);
        let mut expert =
            CpuExpert::new(&problem.expert, inputs_in_f32(&problem.expert, &inputs), 1);
        let task = CpuTask::new(inputs, outputs, move |inputs, outputs| {
            expert.set_loop_times(&[f64::from(inputs.f32("t")[0])]);
            expert.velocity(0, inputs.f32("x"), outputs.f32_mut("velocity"));
        });
        // The expert keeps the weights and caches with which it was created.
        task.reading(&["t", "x"])
    }),
}];

/// CPU implementations of the denoising loop.
pub const LOOP: &[Implementation<DenoiseLoop>] = &[Implementation {
    name: "cpu",
    about: "the step of `cpu`, with the styles of all steps computed first",
    supports: |problem| check_dtype_support(&problem.expert),
    prepare: Prepare::Cpu(|problem, inputs| {
        let outputs =
            Tensors::new().with_output("actions", [problem.expert.s, ACTION_COLUMNS], Dtype::F32);
        let mut expert =
            CpuExpert::new(&problem.expert, inputs_in_f32(&problem.expert, &inputs), problem.steps);
        let mut velocity = vec![0.0; problem.expert.s * ACTION_COLUMNS];
        let dt = -1.0 / problem.steps as f64;
        let mut times = vec![1.0; problem.steps];
        for step in 1..problem.steps {
            times[step] = times[step - 1] + dt;
        }
        let task = CpuTask::new(inputs, outputs, move |inputs, outputs| {
            let actions = outputs.f32_mut("actions");
            actions.copy_from_slice(inputs.f32("x"));
            expert.set_loop_times(&times);
            for step in 0..times.len() {
                expert.velocity(step, actions, &mut velocity);
                actions.iter_mut().zip(&velocity).for_each(|(x, v)| *x += dt as f32 * v);
            }
        });
        task.reading(&["x"])
    }),
}];

fn check_dtype_support(shape: &ActionExpertShape) -> Result<(), String> {
    match (shape.dtype, shape.weights) {
        (Dtype::F32, _) | (_, WeightFormat::Fp8 | WeightFormat::Int4) => Ok(()),
        _ => Err("computes f32 only".to_owned()),
    }
}

/// Converts the inputs of the expert to f32; f32 inputs are shared without a copy.
fn inputs_in_f32(shape: &ActionExpertShape, inputs: &Arc<Tensors>) -> Arc<Tensors> {
    match shape.weights {
        WeightFormat::Same => inputs.clone(),
        WeightFormat::Fp8 | WeightFormat::Int4 => {
            Arc::new(widen_to_f32(&shape.dequantised_inputs(inputs)))
        }
    }
}
