//! Trait of the steps in which processes of `cargo bench`, of `--test`, and trials of a comparison
//! differ.

use super::case_error::WhyCaseHasNoResult;
use super::problem::{PreparedProblem, VerifiedImplementation};
use super::sampling::CriterionOrTrialPlan;
use crate::backend::BenchDevices;
use crate::harness::recording::recorder::CaseOutcomeToRecord;
use crate::harness::selection::cases::{SelectedCase, SelectedProblem};
use crate::measure::limits::MeasuredDeviceLimits;
use crate::record::RecordFileError;
use kernelgate_cuda::driver::launch::used_kernels::KernelsLoadedForCase;

/// A process that runs cases: of `cargo bench`, of `cargo bench -- --test` or `--profile-time`, or
/// a trial of a comparison.
pub trait CaseRunningProcess {
    /// Draws or reads the inputs of a problem, and computes its reference, unless cases compute it
    /// when they need it.
    ///
    /// # Errors
    /// The reason why the problem has no results.
    fn prepare_problem(
        &self,
        group: &SelectedProblem<'_>,
        target: &BenchDevices,
    ) -> Result<PreparedProblem, WhyCaseHasNoResult>;

    /// Prepares an implementation and verifies its outputs.
    ///
    /// # Errors
    /// Fails if the implementation cannot run here, or computes wrong outputs.
    fn verify_case(
        &self,
        ready: &mut PreparedProblem,
        group: &SelectedProblem<'_>,
        case: &SelectedCase,
        target: &BenchDevices,
    ) -> Result<VerifiedImplementation, WhyCaseHasNoResult> {
        ready.verify_by_reference(group, case, target)
    }

    /// Returns how the process samples its cases: by Criterion or by a trial's plan.
    fn sampler_of_process(&self) -> CriterionOrTrialPlan<'_>;

    /// Records the outcome of a case, if the process writes a record.
    fn record_outcome(&self, event: CaseOutcomeToRecord<'_>) -> Result<(), RecordFileError>;

    /// Returns the measured ceilings of the device, if the process measured any.
    fn measured_ceilings(&self) -> Option<&MeasuredDeviceLimits> {
        None
    }

    /// Why no further case begins, once the time budget is over; `None` before.
    fn reason_if_budget_is_over(&self) -> Option<String> {
        None
    }

    /// Whether the process also measures device memory and the host time of a launch. Trials that
    /// measure times skip device memory and the host time of a launch, so that they stay short.
    fn measures_memory_and_host_launch_time(&self) -> bool {
        true
    }

    /// Kernels that the last prepared implementation loaded; a comparison compares them between
    /// base and head.
    fn kernels_of_last_implementation(&self, _ready: &PreparedProblem) -> KernelsLoadedForCase {
        KernelsLoadedForCase::new()
    }
}
