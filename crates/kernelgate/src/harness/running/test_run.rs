//! Runs cases for Criterion's `--test` and `--profile-time`: verifies every selected case and
//! launches it without writing a record.

use std::time::Duration;

use super::case_error::WhyCaseHasNoResult;
use super::deadline::TimeBudgetDeadline;
use super::execution::{CaseTimer, SelectedCasesRunner};
use super::problem::PreparedProblem;
use super::progress::BenchProgressPrinter;
use super::sampling::CriterionOrTrialPlan;
use super::session::CaseRunningProcess;
use crate::backend::BenchDevices;
use crate::exit::ProcessExitReason;
use crate::harness::error::HarnessError;
use crate::harness::recording::recorder::CaseOutcomeToRecord;
use crate::harness::selection::backend_choice::ChosenBackend;
use crate::harness::selection::cases::{SelectedAndSkippedCases, SelectedProblem};
use crate::harness::settings::BenchSettings;
use crate::record::{RecordFileError, RecordFoldersOfPackage};

struct TestOrProfileProcess<'a> {
    settings: &'a BenchSettings,
    store: &'a RecordFoldersOfPackage,
    deadline: Option<TimeBudgetDeadline>,
}

impl CaseRunningProcess for TestOrProfileProcess<'_> {
    fn prepare_problem(
        &self,
        group: &SelectedProblem<'_>,
        target: &BenchDevices,
    ) -> Result<PreparedProblem, WhyCaseHasNoResult> {
        PreparedProblem::with_inputs_and_reference(group, self.settings.input_seed, target)
    }

    fn sampler_of_process(&self) -> CriterionOrTrialPlan<'_> {
        CriterionOrTrialPlan::sample_by_criterion(self.settings, self.store)
    }

    fn record_outcome(&self, _: CaseOutcomeToRecord<'_>) -> Result<(), RecordFileError> {
        Ok(())
    }

    fn reason_if_budget_is_over(&self) -> Option<String> {
        self.deadline.as_ref().and_then(TimeBudgetDeadline::reason_if_over)
    }
}

/// Verifies the selected cases and runs them through Criterion's test or profile mode, without a
/// record.
pub fn run_test_or_profile_mode(
    settings: &BenchSettings,
    place: &ChosenBackend,
    selection: &SelectedAndSkippedCases<'_>,
    store: &RecordFoldersOfPackage,
) -> Result<ProcessExitReason, HarnessError> {
    let target = settings.requested_backend_and_gpus.open_target(place)?;
    let timer = CaseTimer::for_target(&target)?;
    let deadline = settings
        .time_budget
        .map(|budget| TimeBudgetDeadline::from_budget_and_used_time(budget, Duration::ZERO));
    let session = TestOrProfileProcess { settings, store, deadline };
    let progress = BenchProgressPrinter::new(settings.quiet, selection.runnable_case_count());
    SelectedCasesRunner::for_session_and_target(&session, settings, target, timer, progress)
        .run_selected_cases(selection)
}
