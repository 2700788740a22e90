//! A problem prepared on a backend, ready to be launched: the trait that every backend implements.

use kernelgate_cuda::BackendError;

use super::allowed_actions::AllowedActions;
use crate::workload::{Tensor, Tensors};

/// Content of the outputs before a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputContent {
    /// The pattern of [`Executable::poison_outputs`].
    Poison,
    /// The outputs hold the results of the previous launch.
    Results,
}

/// A problem made ready on a backend: inputs placed, outputs allocated, nothing left to compile or
/// allocate.
pub trait Executable {
    /// Overwrites every output with NaN (-128 for integers).
    fn poison_outputs(&mut self) -> Result<(), BackendError>;

    /// Writes every output from a copy, of poison or of its own results. The commands are the same
    /// for both, so that a launch finds caches and memory in the same state.
    ///
    /// # Errors
    /// Fails if device memory is too small, or if the device fails.
    fn rewrite_outputs(&mut self, with: OutputContent) -> Result<(), BackendError> {
        match with {
            OutputContent::Poison => self.poison_outputs(),
            OutputContent::Results => Ok(()),
        }
    }

    /// Restores the state that one launch leaves for the next, if the computation has state: the
    /// next launch computes the reference again.
    fn reset(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    /// Returns whether one launch leaves state for the next, so that a launch does not repeat the
    /// previous one.
    fn carries_state(&self) -> bool {
        false
    }

    /// Number of GPUs whose streams a launch enqueues work on: the first ones of the set.
    fn gpus(&self) -> usize {
        1
    }

    /// Actions that launches may take in a timed region besides enqueueing work.
    fn allowed(&self) -> AllowedActions {
        AllowedActions::OWN_ROW
    }

    /// Enqueues the computation once; the call may return before the computation has finished.
    ///
    /// # Errors
    /// Fails if the computation cannot be launched.
    fn launch(&mut self) -> Result<(), BackendError>;

    /// Waits until every launch of this computation has finished.
    fn synchronize(&mut self) -> Result<(), BackendError>;

    /// Restores the state and waits: afterwards nothing runs, and the next launch computes the
    /// reference.
    fn reset_and_wait(&mut self) -> Result<(), BackendError> {
        self.reset()?;
        self.synchronize()
    }

    /// The outputs in host memory, in the workload's own form.
    fn outputs(&mut self) -> Result<&Tensors, BackendError>;

    /// Names of the inputs that every launch reads. Inputs that are not listed were read during
    /// preparation: packed, quantised or passed by value.
    fn launch_inputs(&self) -> Vec<&str>;

    /// The row's device memory by purpose, with bytes, if the row declares it.
    fn memory_uses(&self) -> &[(&'static str, u64)] {
        &[]
    }

    /// Replaces the values of an input that every launch reads by others of the same shape and
    /// dtype: the next launch computes from them.
    ///
    /// # Errors
    /// Fails if no launch reads an input of that name, or the device fails.
    fn replace_input(&mut self, name: &str, values: &Tensor) -> Result<(), BackendError>;

    /// Whether each output still holds the pattern of [`Self::poison_outputs`], read without
    /// waiting for queued work; empty if launches are never queued.
    fn still_poisoned(&mut self) -> Result<Vec<bool>, BackendError>;
}

/// The error for an input that no launch reads.
pub(super) fn unknown_input_error(name: &str) -> BackendError {
    BackendError::Launch(format!("no launch reads an input `{name}`"))
}
