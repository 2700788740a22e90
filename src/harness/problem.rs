//! A problem made ready: memory checked, inputs drawn, reference computed, implementations verified. Panics become errors.

use std::sync::Arc;

use super::cases::{Case, Group};
use super::guard;
use crate::backend::{BackendError, Executable, Target};
use crate::record::environment::available_memory;
use crate::report;
use crate::verify::{Comparison, VerifyError, verify};
use crate::workload::{Expected, Tensors, Tolerance};

/// Inputs and reference of a problem.
pub struct Ready {
    /// What implementations compute from.
    pub inputs: Arc<Tensors>,
    /// What they must produce.
    pub expected: Vec<Expected>,
    /// How closely.
    pub tolerance: Tolerance,
}

/// Why a problem or case has no result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Setback {
    /// It cannot run here.
    Skip(String),
    /// It is wrong or broke.
    Fail(String),
    /// It broke the device: nothing after it can run.
    Lost(String),
}

impl Ready {
    /// Draws the inputs and computes the reference, if they fit in memory.
    ///
    /// # Errors
    /// A skip where memory is short, a failure where the workload panics.
    pub fn new(group: &Group<'_>, seed: u64) -> Result<Self, Setback> {
        let problem = group.bound.problem();
        let needed = guard::catch(|| problem.host_bytes()).map_err(Setback::Fail)?;
        let available = available_memory();
        if needed > available {
            return Err(Setback::Skip(format!("needs {} of memory, {} are free", report::bytes(needed), report::bytes(available))));
        }
        let made = guard::catch(|| {
            let inputs = Arc::new(problem.inputs(seed));
            let expected = problem.reference(&inputs);
            Self { inputs, expected, tolerance: problem.tolerance() }
        });
        made.map_err(|panic| Setback::Fail(format!("inputs or reference: {panic}")))
    }

    /// Prepares an implementation and verifies it.
    ///
    /// # Errors
    /// When it panics, cannot launch, or is wrong.
    pub fn verify(&self, group: &Group<'_>, case: &Case, target: &Target) -> Result<(Box<dyn Executable>, Comparison), Setback> {
        let verified = guard::catch(|| {
            let mut executable = group.bound.prepare(case.index, Arc::clone(&self.inputs), target)?;
            match verify(executable.as_mut(), &self.expected, self.tolerance) {
                Ok(comparison) => Ok((executable, comparison)),
                Err(error) => {
                    if matches!(error, VerifyError::Backend(BackendError::Lost(_))) {
                        // To free what a hung kernel uses is to wait for it.
                        std::mem::forget(executable);
                    }
                    Err(error)
                }
            }
        });
        verified.map_err(Setback::Fail)?.map_err(|error| match error {
            VerifyError::Backend(reason @ (BackendError::OutOfMemory { .. } | BackendError::Unsupported(_))) => {
                Setback::Skip(reason.to_string())
            }
            VerifyError::Backend(lost @ BackendError::Lost(_)) => Setback::Lost(lost.to_string()),
            wrong => Setback::Fail(wrong.to_string()),
        })
    }
}
