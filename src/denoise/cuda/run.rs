//! A denoising step or loop as the kernels run it, and the limits of these kernels.

use kernelgate::workload::Dtype;

use super::row::fused_model_macro;
use crate::denoise::definition::{ActionExpertShape, DenoiseLoop, DenoiseStep, WeightFormat};
use crate::denoise::model::ACTION_COLUMNS;
use crate::family::check_dtype;

/// Maximum number of steps of a captured loop: a graph with one node for each operation has 400
/// nodes a step.
const MAX_CAPTURED_STEPS: usize = 100;

/// A denoising step, or a loop of steps, that kernels run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertRun {
    /// Model and sizes.
    pub shape: ActionExpertShape,
    /// Number of velocities that are computed.
    pub steps: usize,
    /// Whether the velocities move the actions; otherwise the single velocity is the output.
    pub looped: bool,
}

impl From<&DenoiseStep> for ExpertRun {
    fn from(problem: &DenoiseStep) -> Self {
        Self { shape: problem.expert, steps: 1, looped: false }
    }
}

impl From<&DenoiseLoop> for ExpertRun {
    fn from(problem: &DenoiseLoop) -> Self {
        Self { shape: problem.expert, steps: problem.steps, looped: true }
    }
}

impl ExpertRun {
    /// Checks that the kernels of single operations support the run.
    pub fn check_per_op_supported(&self) -> Result<(), String> {
        self.check_is_bf16()
    }

    /// Checks that the fused kernels are compiled for the run's model.
    pub fn check_fused_supported(&self) -> Result<(), String> {
        self.check_is_bf16()?;
        if self.shape.weights != WeightFormat::Same {
            return Err("takes bf16 weights only".to_owned());
        }
        fused_model_macro(&self.shape.model)
            .map(drop)
            .ok_or_else(|| "not compiled for this model".to_owned())
    }

    pub fn check_is_bf16(&self) -> Result<(), String> {
        check_dtype(self.shape.dtype, Dtype::Bf16)
    }

    /// Returns this run if its loop is short enough to be captured.
    pub fn captured_loop(&self) -> Result<Self, String> {
        if self.steps <= MAX_CAPTURED_STEPS {
            Ok(*self)
        } else {
            Err(format!("captures up to {MAX_CAPTURED_STEPS} steps"))
        }
    }

    pub fn output_name_and_extents(&self) -> (&'static str, [usize; 2]) {
        (if self.looped { "actions" } else { "velocity" }, [self.shape.s, ACTION_COLUMNS])
    }
}
