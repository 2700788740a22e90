//! The steps in which bench, test and trial processes differ while they run cases.

use super::case_error::CaseError;
use super::problem::{PreparedProblem, VerifiedExecutable};
use super::sampling::ProcessSampler;
use crate::backend::BenchTarget;
use crate::harness::recording::recorder::RecordedCaseEvent;
use crate::harness::selection::cases::{ProblemGroup, SelectedCase};
use crate::measure::limits::DeviceLimits;
use crate::record::RecordFileError;
use kernelgate_cuda::driver::launch::used_kernels::UsedKernels;

/// A process that goes through cases: of `cargo bench`, of its `--test` and `--profile-time`, or a
/// trial of a comparison.
pub trait CaseSession {
    /// Draws or reads the inputs of a problem, and computes its reference unless each case computes
    /// it itself.
    ///
    /// # Errors
    /// The reason why the problem has no results.
    fn prepare_problem(
        &self,
        group: &ProblemGroup<'_>,
        target: &BenchTarget,
    ) -> Result<PreparedProblem, CaseError>;

    /// Prepares an implementation and verifies its outputs.
    ///
    /// # Errors
    /// Fails if the implementation cannot run here, or computes wrong outputs.
    fn verify_case(
        &self,
        ready: &mut PreparedProblem,
        group: &ProblemGroup<'_>,
        case: &SelectedCase,
        target: &BenchTarget,
    ) -> Result<VerifiedExecutable, CaseError> {
        ready.verify_case_once(group, case, target)
    }

    /// Returns the sampler that measures all cases of the process.
    fn trial_sampler(&self) -> ProcessSampler<'_>;

    /// Records the outcome of a case, if this session has a record.
    fn record(&self, event: RecordedCaseEvent<'_>) -> Result<(), RecordFileError>;

    /// Returns the measured ceilings of this machine, if there are any.
    fn limits(&self) -> Option<&DeviceLimits> {
        None
    }

    /// Reason why no further case begins, once the time is over.
    fn budget_over_reason(&self) -> Option<String> {
        None
    }

    /// Returns whether the costs beside the time are measured: device memory and the host time of a
    /// launch. A comparison's process that measures times skips these costs, so that it stays
    /// short.
    fn measures_costs(&self) -> bool {
        true
    }

    /// Kernels of the implementation that was prepared last, by which builds are compared.
    fn kernels(&self, _ready: &PreparedProblem) -> UsedKernels {
        UsedKernels::new()
    }
}
