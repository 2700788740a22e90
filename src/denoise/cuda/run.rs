//! A denoising step or loop as GPU kernels run it, and the limits of these kernels.

use kernelgate::workload::Dtype;

use super::row::model_selection_macro;
use crate::denoise::definition::{DenoiseLoop, DenoiseParameters, DenoiseStep, LayerWeightFormat};
use crate::denoise::model::VALUES_PER_ACTION;
use crate::family::check_problem_dtype_is_computed;

/// Maximum number of denoising steps in a captured CUDA graph: with one node for each operation, a
/// step has 400 nodes.
const MAX_STEPS_IN_CAPTURED_GRAPH: usize = 100;

/// A single denoising step, or a whole loop of steps, that GPU kernels run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DenoiseStepOrLoop {
    /// Model and sizes.
    pub shape: DenoiseParameters,
    /// Number of velocities that the kernels compute, one for each denoising step.
    pub denoising_steps: usize,
    /// Whether each velocity moves the actions, as in the loop; otherwise the single velocity is
    /// the output.
    pub is_whole_loop: bool,
}

impl From<&DenoiseStep> for DenoiseStepOrLoop {
    fn from(problem: &DenoiseStep) -> Self {
        Self { shape: problem.expert, denoising_steps: 1, is_whole_loop: false }
    }
}

impl From<&DenoiseLoop> for DenoiseStepOrLoop {
    fn from(problem: &DenoiseLoop) -> Self {
        Self { shape: problem.expert, denoising_steps: problem.euler_steps, is_whole_loop: true }
    }
}

impl DenoiseStepOrLoop {
    /// Checks that the kernels of the rung `per_op` support the problem: its dtype must be bf16,
    /// its weights may be quantised.
    pub fn check_per_op_kernels_support_run(&self) -> Result<(), String> {
        self.check_dtype_is_bf16()
    }

    /// Checks that the fused kernels support the problem: dtype bf16, weights not quantised, and
    /// kernels compiled for its model.
    pub fn check_fused_kernels_support_run(&self) -> Result<(), String> {
        self.check_dtype_is_bf16()?;
        if self.shape.weights != LayerWeightFormat::SameDtypeAsActivations {
            return Err("takes bf16 weights only".to_owned());
        }
        model_selection_macro(&self.shape.model)
            .map(drop)
            .ok_or_else(|| "not compiled for this model".to_owned())
    }

    pub fn check_dtype_is_bf16(&self) -> Result<(), String> {
        check_problem_dtype_is_computed(self.shape.dtype, Dtype::Bf16)
    }

    /// Returns a copy of this run if it has few enough denoising steps to be captured as a CUDA
    /// graph, otherwise the reason.
    pub fn check_steps_fit_captured_graph(&self) -> Result<Self, String> {
        if self.denoising_steps <= MAX_STEPS_IN_CAPTURED_GRAPH {
            Ok(*self)
        } else {
            Err(format!("captures up to {MAX_STEPS_IN_CAPTURED_GRAPH} steps"))
        }
    }

    pub fn output_tensor_name_and_extents(&self) -> (&'static str, [usize; 2]) {
        (
            if self.is_whole_loop { "actions" } else { "velocity" },
            [self.shape.action_tokens, VALUES_PER_ACTION],
        )
    }
}
