//! Runs one case at a time for tests of the checks that a case passes, with the steps of `cargo
//! bench`.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::auditing::after_timing::ExecutableFindings;
use super::recording::recorder::RecordedCaseEvent;
pub use super::running::case_error::CaseError;
pub use super::running::execution::check_samples_within_limit;
use super::running::execution::{CaseExecution, CaseToTime, SampleTimer};
use super::running::problem::{PreparedProblem, VerifiedExecutable};
use super::running::progress::BenchProgress;
use super::running::sampling::ProcessSampler;
use super::running::session::CaseSession;
use super::selection::backend_choice::BenchPlace;
use super::selection::cases::{CaseSelectionResult, ProblemGroup, SelectedCase, select_cases};
use super::selection::filter::CaseFilter;
use super::settings::BenchSettings;
use crate::backend::BenchTarget;
use crate::measure::CacheState;
use crate::measure::power::PowerMode;
use crate::record::run::{AfterTiming, VerificationRecord};
use crate::record::{CaseSamples, RecordFileError, TrialSampling};
use crate::suite::Suite;
use crate::verify::{self, OutputComparison};
use crate::workload::{Effort, Tensors};
use kernelgate_cuda::CaseFailure;

const INPUT_SEED: u64 = 1;

/// A sampling plan with few samples after a load, for tests.
pub const SHORT_SAMPLING: TrialSampling =
    TrialSampling { warm_up_s: 0.0, measurement_s: 0.02, fewest: 2, most: 5 };

/// Samples of a case, and its check after timing; or the reason why it has none.
pub type TimedOutcome = Result<(CaseSamples, AfterTiming), CaseError>;

/// Settings by which a test chooses and times a case.
#[derive(Clone, Copy)]
pub struct TestBench<'a> {
    /// Device of the test.
    pub target: &'a BenchTarget,
    /// State of the caches.
    pub cache: CacheState,
    /// Overridden axis values, separated by spaces.
    pub axes: &'a str,
    /// Number of samples.
    pub sampling: TrialSampling,
}

impl TestBench<'_> {
    fn select<'s>(&self, suite: &'s Suite) -> Result<CaseSelectionResult<'s>, CaseError> {
        let gpus = match self.target {
            BenchTarget::Cpu => 0,
            BenchTarget::Cuda(devices) => devices.device_count(),
        };
        let place =
            BenchPlace { kind: self.target.kind(), otherwise: String::new(), l2_bytes: 0, gpus };
        let axes = self.axes.split_whitespace().map(|axis| axis.parse());
        let axes: Vec<_> = axes.collect::<Result<_, _>>().expect("tests name axes");
        select_cases([suite], Effort::Default, &place, &axes, &CaseFilter::All)
            .map_err(|error| CaseError::failed(error.to_string()))
    }

    /// Verifies and times the first row of a suite.
    ///
    /// # Errors
    /// The error is the reason why the row has no time.
    ///
    /// # Panics
    /// Panics if no case of the suite has these axes.
    pub fn time(&self, suite: &Suite) -> TimedOutcome {
        self.time_with_earlier_verification(suite, None)
    }

    /// Times the first row of a suite as if an earlier process had verified its bits: the closure
    /// `verified` computes the outputs for the digest.
    ///
    /// # Errors
    /// The reason why it has no time.
    ///
    /// # Panics
    /// Panics if no case of the suite has these axes, or its first launch has other bits.
    pub fn time_verified_before(
        &self,
        suite: &Suite,
        verified: fn(&Tensors) -> Tensors,
    ) -> TimedOutcome {
        self.time_with_earlier_verification(suite, Some(verified))
    }

    fn time_with_earlier_verification(
        &self,
        suite: &Suite,
        verified: Option<fn(&Tensors) -> Tensors>,
    ) -> TimedOutcome {
        let selection = self.select(suite)?;
        let group = &selection.groups[0];
        let case = group.cases.iter().find(|case| case.cache == self.cache);
        let case = case.expect("tests name caches that cases have");
        let session =
            OneCaseSession { sampling: self.sampling, verified, errors: RefCell::default() };
        let mut ready = session.prepare_problem(group, self.target)?;
        let mut verified = session.verify_case(&mut ready, group, case, self.target)?;
        let (settings, timer) = (BenchSettings::default_settings(), SampleTimer::new(self.target)?);
        let progress = BenchProgress::new(settings.quiet, 1);
        let (ready, checked) = (&mut ready, &mut ExecutableFindings::default());
        let timed = CaseToTime { group, case, ready, verified: &mut verified, checked };
        CaseExecution::new(&session, &settings, self.target.clone(), timer, progress).time_case(
            timed,
            None,
            &mut session.trial_sampler().begin_problem(group),
        )
    }

    /// Verifies and times the first problem of a suite in each cache state. Returns the error of
    /// each case by id; `None` for a case with a time.
    ///
    /// # Panics
    /// Fails if no case of the suite has these axes.
    pub fn errors_by_case(
        &self,
        suite: &Suite,
    ) -> Result<BTreeMap<String, Option<CaseFailure>>, CaseError> {
        let session =
            OneCaseSession { sampling: self.sampling, verified: None, errors: RefCell::default() };
        let (settings, timer) = (BenchSettings::default_settings(), SampleTimer::new(self.target)?);
        let progress = BenchProgress::new(settings.quiet, 1);
        let execution =
            CaseExecution::new(&session, &settings, self.target.clone(), timer, progress);
        let selection = self.select(suite)?;
        execution.run(&selection).expect("nothing is written");
        Ok(session.errors.into_inner())
    }

    /// Verifies each row of a suite on inputs drawn for it, as `kernelgate verify` does.
    ///
    /// # Panics
    /// Panics if no case of the suite has these axes.
    pub fn verify(&self, suite: &Suite) -> Vec<Result<OutputComparison, CaseError>> {
        let selection = match self.select(suite) {
            Ok(selection) => selection,
            Err(error) => return vec![Err(error)],
        };
        let group = &selection.groups[0];
        let each = |case| {
            let mut ready = PreparedProblem::new(group, INPUT_SEED, self.target)?;
            ready.prepare_and_verify(group, case, self.target).map(|(_, comparison)| comparison)
        };
        group.cases.iter().map(each).collect()
    }
}

/// Makes the record of an earlier process that verified these outputs.
fn record_of_earlier_verification(outputs: &Tensors) -> VerificationRecord {
    let total = outputs.iter().map(|(_, tensor)| tensor.len() as u64).sum();
    VerificationRecord {
        digest: Some(verify::digest_of_outputs(outputs)),
        by: Some("a process before".to_owned()),
        ..OutputComparison { total, ..OutputComparison::default() }.into()
    }
}

/// A test session with one case and without a run record.
struct OneCaseSession {
    sampling: TrialSampling,
    /// Makes from the case's outputs those that an earlier process verified.
    verified: Option<fn(&Tensors) -> Tensors>,
    /// Error of each case; `None` for a case with a time.
    errors: RefCell<BTreeMap<String, Option<CaseFailure>>>,
}

impl CaseSession for OneCaseSession {
    fn prepare_problem(
        &self,
        group: &ProblemGroup<'_>,
        target: &BenchTarget,
    ) -> Result<PreparedProblem, CaseError> {
        PreparedProblem::new(group, INPUT_SEED, target)
    }

    fn verify_case(
        &self,
        ready: &mut PreparedProblem,
        group: &ProblemGroup<'_>,
        case: &SelectedCase,
        target: &BenchTarget,
    ) -> Result<VerifiedExecutable, CaseError> {
        let Some(verified) = self.verified else {
            return ready.verify_case_once(group, case, target);
        };
        let earlier = record_of_earlier_verification(&verified(&ready.inputs));
        // Another row of the problem has set these expected outputs.
        ready.expected =
            verify::outputs_as_reference(&Tensors::new().with("y", [1], vec![1.0_f32]));
        let verified = ready.verify_by_output_bits(group, case, target, Some(earlier))?;
        assert!(verified.record.by.is_some(), "other bits than before");
        Ok(verified)
    }

    fn trial_sampler(&self) -> ProcessSampler<'_> {
        ProcessSampler::Plan(self.sampling, PowerMode::Steady)
    }

    fn record(&self, event: RecordedCaseEvent<'_>) -> Result<(), RecordFileError> {
        let mut errors = self.errors.borrow_mut();
        match event {
            RecordedCaseEvent::Timed(id, _) => drop(errors.insert(id.to_owned(), None)),
            RecordedCaseEvent::Failed(id, why) => {
                drop(errors.insert(id.to_owned(), Some(why.clone())))
            }
            RecordedCaseEvent::DeviceMemory(..)
            | RecordedCaseEvent::Problem(..)
            | RecordedCaseEvent::Skipped(..) => {}
        }
        Ok(())
    }

    fn measures_costs(&self) -> bool {
        self.sampling == TrialSampling::VERIFICATION_SAMPLING
    }
}
