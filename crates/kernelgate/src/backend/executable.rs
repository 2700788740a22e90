//! The trait of a problem that is prepared on a backend and ready to be launched.

use kernelgate_cuda::BackendError;

use super::allowed_actions::AllowedActionsOfTimedCode;
use crate::workload::{Tensor, Tensors};

/// Content that the outputs get before a launch: poison or the previous results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputContentBeforeLaunch {
    /// Every output is filled with the poison pattern of [`LaunchableProblem::poison_outputs`].
    Poison,
    /// The outputs contain the results of the previous launch.
    PreviousResults,
}

/// A problem that is prepared on a backend: inputs copied, outputs allocated, kernels compiled.
pub trait LaunchableProblem {
    /// Overwrites every output with poison: NaN, or -128 for integers.
    fn poison_outputs(&mut self) -> Result<(), BackendError>;

    /// Overwrites every output, either with poison or with a copy of its own results. Both contents
    /// are written by equal commands, so that a launch finds caches and memory in equal state.
    ///
    /// # Errors
    /// Fails if device memory is too small, or if the device fails.
    fn overwrite_outputs_before_launch(
        &mut self,
        with: OutputContentBeforeLaunch,
    ) -> Result<(), BackendError> {
        match with {
            OutputContentBeforeLaunch::Poison => self.poison_outputs(),
            OutputContentBeforeLaunch::PreviousResults => Ok(()),
        }
    }

    /// Restores the state that a launch changes, if any, so that the next launch computes the
    /// reference outputs.
    fn reset_state(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    /// Whether a launch changes state that the next launch reads, so that launches are not
    /// repetitions.
    fn launches_carry_state(&self) -> bool {
        false
    }

    /// Number of GPUs on which a launch enqueues work: the first GPUs of the set.
    fn gpus_used_by_launch(&self) -> usize {
        1
    }

    /// Actions besides enqueuing work that a launch may take in a timed region.
    fn actions_allowed_to_launches(&self) -> AllowedActionsOfTimedCode {
        AllowedActionsOfTimedCode::ALLOWED_IN_OWN_ROW
    }

    /// Enqueues or runs the computation once; on a GPU the call returns before the computation
    /// finishes.
    ///
    /// # Errors
    /// Fails if the computation cannot be launched.
    fn launch_once(&mut self) -> Result<(), BackendError>;

    /// Waits until all launches of this problem have finished.
    fn wait_for_launches(&mut self) -> Result<(), BackendError>;

    /// Restores the state and waits, so that no work is running and the next launch computes the
    /// reference outputs.
    fn reset_state_and_wait(&mut self) -> Result<(), BackendError> {
        self.reset_state()?;
        self.wait_for_launches()
    }

    /// Copies the outputs to host memory and returns them in the problem's layout.
    fn outputs_on_host(&mut self) -> Result<&Tensors, BackendError>;

    /// Names of the inputs that every launch reads. Other inputs were read only during preparation:
    /// packed, quantised or passed by value.
    fn names_of_inputs_read_by_launches(&self) -> Vec<&str>;

    /// Bytes of device memory by purpose, such as `weights`; empty if the implementation declares
    /// none.
    fn device_memory_by_purpose(&self) -> &[(&'static str, u64)] {
        &[]
    }

    /// Overwrites an input that every launch reads with values of the same shape and dtype, so that
    /// the next launch computes from them.
    ///
    /// # Errors
    /// Fails if no launch reads an input of this name, or the device fails.
    fn replace_input(&mut self, name: &str, values: &Tensor) -> Result<(), BackendError>;

    /// For each output, whether it still contains only poison, read without waiting for queued
    /// work; empty if the backend never queues launches.
    fn outputs_are_still_poisoned(&mut self) -> Result<Vec<bool>, BackendError>;
}

/// The error for replacing an input that no launch reads.
pub(super) fn input_not_read_by_launches_error(name: &str) -> BackendError {
    BackendError::ComputationFailed(format!("no launch reads an input `{name}`"))
}
