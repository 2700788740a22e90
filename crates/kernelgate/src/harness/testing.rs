//! One case at a time, for tests of the checks that a case passes; `cargo bench` does the same with
//! each of its cases.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::auditing::after_timing::Checked;
use super::recording::recorder::Event;
pub use super::running::case_error::CaseError;
pub use super::running::execution::check_limit;
use super::running::execution::{Execution, Timer, VerifiedCase};
use super::running::problem::{PreparedProblem, Verified};
use super::running::progress::BenchProgress;
use super::running::sampling::Sampler;
use super::running::session::Session;
use super::selection::cases::{Case, Group, Selection, select};
use super::selection::filter::Filter;
use super::selection::place::Place;
use super::settings::Settings;
use crate::backend::Target;
use crate::measure::Cache;
use crate::measure::power::PowerMode;
use crate::record::run::{AfterTiming, VerificationRecord};
use crate::record::{FileError, Samples, TrialSampling};
use crate::suite::Suite;
use crate::verify::{self, OutputComparison};
use crate::workload::{Effort, Tensors};
use kernelgate_cuda::CaseFailure;

/// Seed of the inputs.
const SEED: u64 = 1;

/// Few samples behind a load.
pub const SAMPLING: TrialSampling =
    TrialSampling { warm_up_s: 0.0, measurement_s: 0.02, fewest: 2, most: 5 };

/// Samples of a case, and its check after timing; or the reason why it has none.
pub type Timed = Result<(Samples, AfterTiming), CaseError>;

/// How a case is chosen and timed.
#[derive(Clone, Copy)]
pub struct Bench<'a> {
    /// Device of the test.
    pub target: &'a Target,
    /// State of the caches.
    pub cache: Cache,
    /// Overridden axes, separated by spaces.
    pub axes: &'a str,
    /// Number of samples.
    pub sampling: TrialSampling,
}

impl Bench<'_> {
    fn select<'s>(&self, suite: &'s Suite) -> Result<Selection<'s>, CaseError> {
        let gpus = match self.target {
            Target::Cpu => 0,
            Target::Cuda(devices) => devices.count(),
        };
        let place = Place { kind: self.target.kind(), otherwise: String::new(), l2_bytes: 0, gpus };
        let axes = self.axes.split_whitespace().map(|axis| axis.parse());
        let axes: Vec<_> = axes.collect::<Result<_, _>>().expect("tests name axes");
        select([suite], Effort::Default, &place, &axes, &Filter::All)
            .map_err(|error| CaseError::fail(error.to_string()))
    }

    /// Verifies and times the first row of a suite.
    ///
    /// # Errors
    /// The reason why it has no time.
    ///
    /// # Panics
    /// When no case of the suite has these axes.
    pub fn time(&self, suite: &Suite) -> Timed {
        self.time_verified(suite, None)
    }

    /// Times the first row of a suite whose bits an earlier process verified: those of the outputs
    /// that `verified` makes of the inputs.
    ///
    /// # Errors
    /// The reason why it has no time.
    ///
    /// # Panics
    /// When no case of the suite has these axes, or its first launch has other bits.
    pub fn time_verified_before(&self, suite: &Suite, verified: fn(&Tensors) -> Tensors) -> Timed {
        self.time_verified(suite, Some(verified))
    }

    fn time_verified(&self, suite: &Suite, verified: Option<fn(&Tensors) -> Tensors>) -> Timed {
        let selection = self.select(suite)?;
        let group = &selection.groups[0];
        let case = group.cases.iter().find(|case| case.cache == self.cache);
        let case = case.expect("tests name caches that cases have");
        let session = OneCase { sampling: self.sampling, verified, errors: RefCell::default() };
        let mut ready = session.prepare(group, self.target)?;
        let mut verified = session.verify(&mut ready, group, case, self.target)?;
        let (settings, timer) = (Settings::defaults(), Timer::new(self.target)?);
        let progress = BenchProgress::new(settings.quiet, 1);
        let (ready, checked) = (&mut ready, &mut Checked::default());
        let timed = VerifiedCase { group, case, ready, verified: &mut verified, checked };
        Execution::new(&session, &settings, self.target.clone(), timer, progress).time(
            timed,
            None,
            &mut session.sampler().open(group),
        )
    }

    /// Verifies and times the first problem of a suite in each cache state. Returns the error of
    /// each case by id; `None` for a case with a time.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When no case of the suite has these axes.
    pub fn errors(
        &self,
        suite: &Suite,
    ) -> Result<BTreeMap<String, Option<CaseFailure>>, CaseError> {
        let session =
            OneCase { sampling: self.sampling, verified: None, errors: RefCell::default() };
        let (settings, timer) = (Settings::defaults(), Timer::new(self.target)?);
        let progress = BenchProgress::new(settings.quiet, 1);
        let execution = Execution::new(&session, &settings, self.target.clone(), timer, progress);
        let selection = self.select(suite)?;
        execution.run(&selection).expect("nothing is written");
        Ok(session.errors.into_inner())
    }

    /// Verifies each row of a suite on inputs of its own, as `kernelgate verify` does.
    ///
    /// # Panics
    /// When no case of the suite has these axes.
    pub fn verify(&self, suite: &Suite) -> Vec<Result<OutputComparison, CaseError>> {
        let selection = match self.select(suite) {
            Ok(selection) => selection,
            Err(error) => return vec![Err(error)],
        };
        let group = &selection.groups[0];
        let each = |case| {
            let mut ready = PreparedProblem::new(group, SEED, self.target)?;
            ready.verify(group, case, self.target).map(|(_, comparison)| comparison)
        };
        group.cases.iter().map(each).collect()
    }
}

/// The record of a process that found these outputs right.
fn verified_before(outputs: &Tensors) -> VerificationRecord {
    let total = outputs.iter().map(|(_, tensor)| tensor.len() as u64).sum();
    VerificationRecord {
        digest: Some(verify::digest(outputs)),
        by: Some("a process before".to_owned()),
        ..OutputComparison { total, ..OutputComparison::default() }.into()
    }
}

/// A session of one case and no record.
struct OneCase {
    sampling: TrialSampling,
    /// Outputs that an earlier process found right.
    verified: Option<fn(&Tensors) -> Tensors>,
    /// Error of each case; `None` for a case with a time.
    errors: RefCell<BTreeMap<String, Option<CaseFailure>>>,
}

impl Session for OneCase {
    fn prepare(&self, group: &Group<'_>, target: &Target) -> Result<PreparedProblem, CaseError> {
        PreparedProblem::new(group, SEED, target)
    }

    fn verify(
        &self,
        ready: &mut PreparedProblem,
        group: &Group<'_>,
        case: &Case,
        target: &Target,
    ) -> Result<Verified, CaseError> {
        let Some(verified) = self.verified else { return ready.verify_once(group, case, target) };
        let earlier = verified_before(&verified(&ready.inputs));
        // Another row of the group set these expected outputs.
        ready.expected = verify::as_expected(&Tensors::new().with("y", [1], vec![1.0_f32]));
        let verified = ready.verify_bits(group, case, target, Some(earlier))?;
        assert!(verified.record.by.is_some(), "other bits than before");
        Ok(verified)
    }

    fn sampler(&self) -> Sampler<'_> {
        Sampler::Plan(self.sampling, PowerMode::Steady)
    }

    fn record(&self, event: Event<'_>) -> Result<(), FileError> {
        let mut errors = self.errors.borrow_mut();
        match event {
            Event::Timed(id, _) => drop(errors.insert(id.to_owned(), None)),
            Event::Failed(id, why) => drop(errors.insert(id.to_owned(), Some(why.clone()))),
            Event::DeviceMemory(..) | Event::Problem(..) | Event::Skipped(..) => {}
        }
        Ok(())
    }

    fn measures_costs(&self) -> bool {
        self.sampling == TrialSampling::VERIFICATION_PASS
    }
}
