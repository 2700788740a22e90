//! Lets tests verify and time one case at a time, with the same steps as `cargo bench`.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::auditing::after_timing::FindingsForCasesOfImplementation;
use super::recording::recorder::CaseOutcomeToRecord;
pub use super::running::case_error::WhyCaseHasNoResult;
pub use super::running::execution::reject_gpu_samples_faster_than_limit;
use super::running::execution::{CaseTimer, SelectedCasesRunner, VerifiedCaseToTime};
use super::running::problem::{PreparedProblem, VerifiedImplementation};
use super::running::progress::BenchProgressPrinter;
use super::running::sampling::CriterionOrTrialPlan;
use super::running::session::CaseRunningProcess;
use super::selection::backend_choice::ChosenBackend;
use super::selection::cases::{
    SelectedAndSkippedCases, SelectedCase, SelectedProblem, select_cases,
};
use super::selection::filter::CaseIdFilter;
use super::settings::BenchSettings;
use crate::backend::BenchDevices;
use crate::measure::CacheState;
use crate::measure::power::TimingPowerMode;
use crate::record::run::{OutputVerificationRecord, VerificationAfterTiming};
use crate::record::{RecordFileError, SamplesOfCase, TrialSamplingPlan};
use crate::suite::WorkloadSuite;
use crate::verify::{self, ComparisonWithReference};
use crate::workload::{BenchEffort, Tensors};
use kernelgate_cuda::CaseFailureReason;

const TEST_INPUT_SEED: u64 = 1;

/// Sampling plan for tests: no warm-up, 20 ms of measurement, 2 to 5 samples.
pub const SHORT_TEST_SAMPLING: TrialSamplingPlan =
    TrialSamplingPlan { warm_up_s: 0.0, measurement_s: 0.02, fewest_samples: 2, most_samples: 5 };

/// Result of timing a case: its samples and the check of its outputs after timing, or the reason
/// why it was not timed.
pub type CaseTimingOutcome = Result<(SamplesOfCase, VerificationAfterTiming), WhyCaseHasNoResult>;

/// Target, cache state, axis values and sampling plan with which a test runs a case.
#[derive(Clone, Copy)]
pub struct CaseTestSetup<'a> {
    /// The CPU or the GPUs on which the test runs its cases.
    pub case_device: &'a BenchDevices,
    /// State of the caches when a launch begins: hot or cold.
    pub cache: CacheState,
    /// Axis values with which the test selects a case, such as `n=8 dtype=f32`, separated by
    /// spaces.
    pub axis_values_text: &'a str,
    /// Number of samples.
    pub sampling: TrialSamplingPlan,
}

impl CaseTestSetup<'_> {
    fn select_cases_by_axes<'s>(
        &self,
        suite: &'s WorkloadSuite,
    ) -> Result<SelectedAndSkippedCases<'s>, WhyCaseHasNoResult> {
        let gpus = match self.case_device {
            BenchDevices::Cpu => 0,
            BenchDevices::Cuda(devices) => devices.device_count(),
        };
        let place = ChosenBackend {
            kind: self.case_device.backend_kind(),
            reason_against_other_backend: String::new(),
            l2_bytes: 0,
            gpu_count: gpus,
        };
        let axes = self.axis_values_text.split_whitespace().map(|axis| axis.parse());
        let axes: Vec<_> = axes.collect::<Result<_, _>>().expect("tests name axes");
        select_cases([suite], BenchEffort::Default, &place, &axes, &CaseIdFilter::AllCases)
            .map_err(|error| WhyCaseHasNoResult::failed_with(error.to_string()))
    }

    /// Verifies and times the first row (implementation) of a suite that has the requested axes.
    ///
    /// # Errors
    /// The error is the reason why the row has no time.
    ///
    /// # Panics
    /// Panics if no case of the suite has these axes.
    pub fn verify_and_time_first_implementation(&self, suite: &WorkloadSuite) -> CaseTimingOutcome {
        self.time_first_implementation_maybe_verified_earlier(suite, None)
    }

    /// Times the first row of a suite as if an earlier process had verified it: the closure
    /// `verified` computes that process's outputs from the inputs.
    ///
    /// # Errors
    /// The reason why the implementation has no time.
    ///
    /// # Panics
    /// Panics if no case of the suite has these axes, or if the first launch's outputs differ in
    /// bits from those that `verified` computes.
    pub fn time_first_implementation_verified_earlier(
        &self,
        suite: &WorkloadSuite,
        verified: fn(&Tensors) -> Tensors,
    ) -> CaseTimingOutcome {
        self.time_first_implementation_maybe_verified_earlier(suite, Some(verified))
    }

    fn time_first_implementation_maybe_verified_earlier(
        &self,
        suite: &WorkloadSuite,
        verified: Option<fn(&Tensors) -> Tensors>,
    ) -> CaseTimingOutcome {
        let selection = self.select_cases_by_axes(suite)?;
        let group = &selection.problems_with_cases[0];
        let case = group.cases.iter().find(|case| case.cache == self.cache);
        let case = case.expect("tests name caches that cases have");
        let session = OneCaseTestSession {
            sampling: self.sampling,
            earlier_verified_outputs: verified,
            errors: RefCell::default(),
        };
        let mut ready = session.prepare_problem(group, self.case_device)?;
        let mut verified = session.verify_case(&mut ready, group, case, self.case_device)?;
        let (settings, timer) = (
            BenchSettings::settings_of_plain_bench_run(),
            CaseTimer::for_target(self.case_device)?,
        );
        let progress = BenchProgressPrinter::new(settings.quiet, 1);
        let (ready, checked) = (&mut ready, &mut FindingsForCasesOfImplementation::default());
        let timed = VerifiedCaseToTime {
            problem: group,
            case,
            prepared_problem: ready,
            verified: &mut verified,
            findings: checked,
        };
        SelectedCasesRunner::for_session_and_target(
            &session,
            &settings,
            self.case_device.clone(),
            timer,
            progress,
        )
        .time_and_check_verified_case(
            timed,
            None,
            &mut session.sampler_of_process().begin_sampling_of_problem(group),
        )
    }

    /// Verifies and times the rows of the first problem of a suite, once for each cache state.
    /// Returns the error of each case by case id, or `None` for a case that was timed.
    ///
    /// # Panics
    /// Fails if no case of the suite has these axes.
    pub fn verify_and_time_each_case(
        &self,
        suite: &WorkloadSuite,
    ) -> Result<BTreeMap<String, Option<CaseFailureReason>>, WhyCaseHasNoResult> {
        let session = OneCaseTestSession {
            sampling: self.sampling,
            earlier_verified_outputs: None,
            errors: RefCell::default(),
        };
        let (settings, timer) = (
            BenchSettings::settings_of_plain_bench_run(),
            CaseTimer::for_target(self.case_device)?,
        );
        let progress = BenchProgressPrinter::new(settings.quiet, 1);
        let execution = SelectedCasesRunner::for_session_and_target(
            &session,
            &settings,
            self.case_device.clone(),
            timer,
            progress,
        );
        let selection = self.select_cases_by_axes(suite)?;
        execution.run_selected_cases(&selection).expect("nothing is written");
        Ok(session.errors.into_inner())
    }

    /// Verifies the outputs of each row of a suite on random inputs, as `kernelgate verify` does.
    ///
    /// # Panics
    /// Panics if no case of the suite has these axes.
    pub fn verify_each_implementation_of_suite(
        &self,
        suite: &WorkloadSuite,
    ) -> Vec<Result<ComparisonWithReference, WhyCaseHasNoResult>> {
        let selection = match self.select_cases_by_axes(suite) {
            Ok(selection) => selection,
            Err(error) => return vec![Err(error)],
        };
        let group = &selection.problems_with_cases[0];
        let each = |case| {
            let mut ready = PreparedProblem::with_inputs_and_reference(
                group,
                TEST_INPUT_SEED,
                self.case_device,
            )?;
            ready
                .prepare_and_verify_case(group, case, self.case_device)
                .map(|(_, comparison)| comparison)
        };
        group.cases.iter().map(each).collect()
    }
}

/// Returns the verification record that an earlier process would have written after accepting these
/// outputs.
fn verification_record_of_earlier_process(outputs: &Tensors) -> OutputVerificationRecord {
    let total = outputs.iter().map(|(_, tensor)| tensor.len() as u64).sum();
    OutputVerificationRecord {
        output_bits_hash: Some(verify::output_bits_hash_hex(outputs)),
        reused_from_run: Some("a process before".to_owned()),
        ..ComparisonWithReference { all_elements: total, ..ComparisonWithReference::default() }
            .into()
    }
}

/// A session of a test: it verifies and samples one case, and keeps errors in memory instead of
/// writing a run record.
struct OneCaseTestSession {
    sampling: TrialSamplingPlan,
    /// Computes, from the case's inputs, the outputs whose digest an earlier process would have
    /// verified.
    earlier_verified_outputs: Option<fn(&Tensors) -> Tensors>,
    /// Error of each case by case id; `None` for a case that was timed.
    errors: RefCell<BTreeMap<String, Option<CaseFailureReason>>>,
}

impl CaseRunningProcess for OneCaseTestSession {
    fn prepare_problem(
        &self,
        group: &SelectedProblem<'_>,
        target: &BenchDevices,
    ) -> Result<PreparedProblem, WhyCaseHasNoResult> {
        PreparedProblem::with_inputs_and_reference(group, TEST_INPUT_SEED, target)
    }

    fn verify_case(
        &self,
        ready: &mut PreparedProblem,
        group: &SelectedProblem<'_>,
        case: &SelectedCase,
        target: &BenchDevices,
    ) -> Result<VerifiedImplementation, WhyCaseHasNoResult> {
        let Some(verified) = self.earlier_verified_outputs else {
            return ready.verify_by_reference(group, case, target);
        };
        let earlier = verification_record_of_earlier_process(&verified(&ready.inputs));
        // Wrong expected outputs, so that only the output digest of the earlier verification can
        // accept the case.
        ready.expected =
            verify::reference_from_outputs(&Tensors::new().with_tensor("y", [1], vec![1.0_f32]));
        let verified =
            ready.verify_by_known_digest_or_reference(group, case, target, Some(earlier))?;
        assert!(verified.record.reused_from_run.is_some(), "other bits than before");
        Ok(verified)
    }

    fn sampler_of_process(&self) -> CriterionOrTrialPlan<'_> {
        CriterionOrTrialPlan::Plan(self.sampling, TimingPowerMode::SteadyLoad)
    }

    fn record_outcome(&self, event: CaseOutcomeToRecord<'_>) -> Result<(), RecordFileError> {
        let mut errors = self.errors.borrow_mut();
        match event {
            CaseOutcomeToRecord::Timed(id, _) => drop(errors.insert(id.to_owned(), None)),
            CaseOutcomeToRecord::Failed(id, why) => {
                drop(errors.insert(id.to_owned(), Some(why.clone())))
            }
            CaseOutcomeToRecord::DeviceMemoryBytes(..)
            | CaseOutcomeToRecord::ProblemWallSeconds(..)
            | CaseOutcomeToRecord::Skipped(..) => {}
        }
        Ok(())
    }

    fn measures_memory_and_host_launch_time(&self) -> bool {
        self.sampling == TrialSamplingPlan::ONE_SAMPLE_FOR_VERIFICATION
    }
}
