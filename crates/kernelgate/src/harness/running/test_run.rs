//! Criterion's `--test` and `--profile-time`: every selected case verified, then launched for no
//! record.

use std::time::Duration;

use super::case_error::CaseError;
use super::deadline::TimeBudgetDeadline;
use super::execution::{CaseExecution, SampleTimer};
use super::problem::PreparedProblem;
use super::progress::BenchProgress;
use super::sampling::ProcessSampler;
use super::session::CaseSession;
use crate::backend::BenchTarget;
use crate::exit::ExitReason;
use crate::harness::error::HarnessError;
use crate::harness::recording::recorder::RecordedCaseEvent;
use crate::harness::selection::backend_choice::BenchPlace;
use crate::harness::selection::cases::{CaseSelectionResult, ProblemGroup};
use crate::harness::settings::BenchSettings;
use crate::record::{BaselineStore, RecordFileError};

struct TestSession<'a> {
    settings: &'a BenchSettings,
    store: &'a BaselineStore,
    deadline: Option<TimeBudgetDeadline>,
}

impl CaseSession for TestSession<'_> {
    fn prepare_problem(
        &self,
        group: &ProblemGroup<'_>,
        target: &BenchTarget,
    ) -> Result<PreparedProblem, CaseError> {
        PreparedProblem::new(group, self.settings.seed, target)
    }

    fn trial_sampler(&self) -> ProcessSampler<'_> {
        ProcessSampler::sampling_by_criterion(self.settings, self.store)
    }

    fn record(&self, _: RecordedCaseEvent<'_>) -> Result<(), RecordFileError> {
        Ok(())
    }

    fn budget_over_reason(&self) -> Option<String> {
        self.deadline.as_ref().and_then(TimeBudgetDeadline::passed_reason)
    }
}

/// Verifies the selected cases and launches each once, without timing.
pub fn run_test_mode(
    settings: &BenchSettings,
    place: &BenchPlace,
    selection: &CaseSelectionResult<'_>,
    store: &BaselineStore,
) -> Result<ExitReason, HarnessError> {
    let target = settings.device.open(place)?;
    let timer = SampleTimer::new(&target)?;
    let deadline =
        settings.budget.map(|budget| TimeBudgetDeadline::after_budget(budget, Duration::ZERO));
    let session = TestSession { settings, store, deadline };
    let progress = BenchProgress::new(settings.quiet, selection.case_count());
    CaseExecution::new(&session, settings, target, timer, progress).run(selection)
}
