//! Criterion's `--test` and `--profile-time`: every selected case verified, then launched for no
//! record.

use std::time::Duration;

use super::case_error::CaseError;
use super::deadline::Deadline;
use super::execution::{Execution, Timer};
use super::problem::PreparedProblem;
use super::progress::BenchProgress;
use super::sampling::Sampler;
use super::session::Session;
use crate::backend::Target;
use crate::exit::Exit;
use crate::harness::error::HarnessError;
use crate::harness::recording::recorder::Event;
use crate::harness::selection::cases::{Group, Selection};
use crate::harness::selection::place::Place;
use crate::harness::settings::Settings;
use crate::record::{FileError, Store};

struct TestSession<'a> {
    settings: &'a Settings,
    store: &'a Store,
    deadline: Option<Deadline>,
}

impl Session for TestSession<'_> {
    fn prepare(&self, group: &Group<'_>, target: &Target) -> Result<PreparedProblem, CaseError> {
        PreparedProblem::new(group, self.settings.seed, target)
    }

    fn sampler(&self) -> Sampler<'_> {
        Sampler::under_criterion(self.settings, self.store)
    }

    fn record(&self, _: Event<'_>) -> Result<(), FileError> {
        Ok(())
    }

    fn out_of_time(&self) -> Option<String> {
        self.deadline.as_ref().and_then(Deadline::passed)
    }
}

/// Verifies and launches the selected cases.
///
/// # Errors
/// When the device fails before any case.
pub fn test(
    settings: &Settings,
    place: &Place,
    selection: &Selection<'_>,
    store: &Store,
) -> Result<Exit, HarnessError> {
    let target = settings.device.open(place)?;
    let timer = Timer::new(&target)?;
    let deadline = settings.budget.map(|budget| Deadline::after(budget, Duration::ZERO));
    let session = TestSession { settings, store, deadline };
    let progress = BenchProgress::new(settings.quiet, selection.count());
    Execution::new(&session, settings, target, timer, progress).run(selection)
}
