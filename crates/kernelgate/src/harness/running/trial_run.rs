//! Runs a trial of a comparison as its request describes.

use std::path::PathBuf;
use std::time::Instant;

use super::case_error::WhyCaseHasNoResult;
use super::execution::{CaseTimer, SelectedCasesRunner};
use super::problem::{PreparedProblem, VerifiedImplementation};
use super::progress::BenchProgressPrinter;
use super::sampling::CriterionOrTrialPlan;
use super::session::CaseRunningProcess;
use super::trial::{
    OutputsExchangedBetweenBuilds, injected_delays_by_case, print_warning_of_injected_delays,
};
use crate::backend::{BackendKind, BenchTarget};
use crate::exit::ProcessExitReason;
use crate::harness::auditing::after_timing;
use crate::harness::error::HarnessError;
use crate::harness::phase_timer;
use crate::harness::recording::kept_references::StoredReferenceFolder;
use crate::harness::recording::recorder::{
    CaseOutcomeToRecord, SharedRunRecord, WhenRecordIsSaved,
};
use crate::harness::selection::backend_choice::ChosenBackend;
use crate::harness::selection::cases::{SelectedAndSkippedCases, SelectedCase, SelectedProblem};
use crate::harness::settings::BenchSettings;
use crate::record::run::OutputVerificationRecord;
use crate::record::{
    BenchProcessRun, CommitAndChanges, RecordFileError, RecordFoldersOfPackage, RunEnvironment,
    TrialRequestToBench, TrialSamplingPlan, file,
};
use kernelgate_cuda::driver::launch::used_kernels::KernelsLoadedForCase;
use kernelgate_cuda::observe::telemetry::CardTelemetryByNvml;

/// State of a trial, which is one process of a comparison.
pub struct StateInsideTrialProcess<'a> {
    /// Flags and variables.
    pub settings: &'a BenchSettings,
    /// How long to time.
    pub sampling: TrialSamplingPlan,
    /// The earlier run of the same executable whose verified digests can be reused.
    pub verified: Option<BenchProcessRun>,
    /// Folder of inputs that an earlier trial drew and stored.
    pub inputs: Option<PathBuf>,
    /// Folders for the outputs of both builds, if no reference verifies them.
    pub outputs: OutputsExchangedBetweenBuilds,
    /// Folder of stored references.
    pub references: Option<StoredReferenceFolder>,
    /// The trial's record.
    pub recorder: SharedRunRecord,
}

impl StateInsideTrialProcess<'_> {
    /// Whether the trial measures times; otherwise it only verifies.
    fn measures_times(&self) -> bool {
        self.sampling != TrialSamplingPlan::ONE_SAMPLE_FOR_VERIFICATION
    }

    /// The verification record of a case from the earlier run of the same executable.
    fn verification_by_earlier_run(&self, id: &str) -> Option<OutputVerificationRecord> {
        let run = self.verified.as_ref()?;
        let earlier = &run.cases.get(id)?.verification;
        let by = Some(earlier.by.clone().unwrap_or_else(|| run.key_in_baseline()));
        Some(OutputVerificationRecord { by, ..earlier.clone() })
    }
}

impl CaseRunningProcess for StateInsideTrialProcess<'_> {
    fn prepare_problem(
        &self,
        group: &SelectedProblem<'_>,
        target: &BenchTarget,
    ) -> Result<PreparedProblem, WhyCaseHasNoResult> {
        let mut ready = PreparedProblem::with_inputs_only(
            group,
            self.settings.seed,
            self.inputs.as_deref(),
            target,
        )?;
        ready.references.clone_from(&self.references);
        ready.exchanged_outputs.clone_from(&self.outputs);
        // If no earlier run verified the outputs, the reference is computed here, outside of any
        // case, so that no case is charged for it.
        if self.verified.is_none() {
            ready.compute_reference_once(group)?;
        }
        Ok(ready)
    }

    fn verify_case(
        &self,
        ready: &mut PreparedProblem,
        group: &SelectedProblem<'_>,
        case: &SelectedCase,
        target: &BenchTarget,
    ) -> Result<VerifiedImplementation, WhyCaseHasNoResult> {
        ready.verify_by_known_digest_or_reference(
            group,
            case,
            target,
            self.verification_by_earlier_run(&case.id),
        )
    }

    fn sampler_of_process(&self) -> CriterionOrTrialPlan<'_> {
        CriterionOrTrialPlan::Plan(self.sampling, self.settings.power)
    }

    fn record_outcome(&self, event: CaseOutcomeToRecord<'_>) -> Result<(), RecordFileError> {
        self.recorder.add_outcome(event)
    }

    fn measures_memory_and_host_launch_time(&self) -> bool {
        !self.measures_times()
    }

    /// Only the verifying trial lists kernels, because a comparison needs the list once per
    /// executable.
    fn kernels_of_last_implementation(&self, ready: &PreparedProblem) -> KernelsLoadedForCase {
        if self.measures_times() {
            KernelsLoadedForCase::new()
        } else {
            ready.kernels.read_machine_code_of_all()
        }
    }
}

/// Verifies and times the cases of a trial request, and writes the run record to the requested
/// path.
pub fn run_trial_and_write_record(
    bench: &str,
    settings: &BenchSettings,
    request: TrialRequestToBench,
    place: &ChosenBackend,
    selection: &SelectedAndSkippedCases<'_>,
    store: &RecordFoldersOfPackage,
) -> Result<ProcessExitReason, HarnessError> {
    let started = Instant::now();
    let opening = phase_timer::start_timed_activity("open");
    let executable =
        settings.process.executable.as_deref().map(file::file_content_hash_hex).transpose()?;
    let target = settings.device.open_target(place)?;
    let environment = RunEnvironment::environment_of_target(&target);
    drop(opening);
    let mut run = BenchProcessRun {
        effort: settings.effort.effort_name().to_owned(),
        shard: selection.division_among_shards.as_ref().and(settings.shard),
        plan: selection.division_among_shards.clone(),
        seed: settings.seed,
        delays: injected_delays_by_case(settings, selection),
        executable,
        skipped: selection.skipped.iter().cloned().collect(),
        unsupported_case_ids: selection.unsupported.clone(),
        ..BenchProcessRun::empty_run_starting_now(
            bench,
            &request.session,
            environment,
            CommitAndChanges::from_git_or_variable(&store.root),
        )
    };
    let earlier: Option<BenchProcessRun> =
        request.verified.as_deref().map(file::read_record).transpose()?;
    // Digests from another executable or another device are not reused.
    let verified = earlier.filter(|earlier| {
        earlier.executable.is_some()
            && earlier.executable == run.executable
            && earlier.seed == run.seed
            && earlier.environment.can_reuse_verification_of(&run.environment)
    });
    let mut timer = {
        let _activity = phase_timer::start_timed_activity("timer");
        CaseTimer::for_target(&target)?
    };
    run.anchors = request.anchors.then(|| timer.measure_anchor_rates(settings.power));
    let telemetry = {
        let _activity = phase_timer::start_timed_activity("telemetry");
        let telemetry = target.open_card_telemetry();
        run.telemetry.extend(telemetry.as_ref().map(CardTelemetryByNvml::read_card_sensors));
        telemetry
    };
    print_warning_of_injected_delays(&run);
    let references = StoredReferenceFolder::new(store.references.clone(), run.executable.clone());
    let recorder = SharedRunRecord::start_recording(
        run,
        request.record,
        WhenRecordIsSaved::WhenComplete,
        None,
    )?;
    recorder.exit_between_writes_on_interrupt()?;
    if target.backend_kind() == BackendKind::Cpu {
        recorder.exit_on_host_launch_timeout(settings.host_timeout);
    }
    let session = StateInsideTrialProcess {
        settings,
        sampling: request.sampling,
        verified,
        inputs: request.inputs,
        outputs: OutputsExchangedBetweenBuilds {
            folder_to_save: request.keep_outputs,
            folder_of_base_outputs: request.base_outputs,
            saves_verified_outputs: request.keep_verified,
        },
        references: Some(references),
        recorder: recorder.clone(),
    };
    let progress = BenchProgressPrinter::new(settings.quiet, selection.runnable_case_count());
    let exit =
        SelectedCasesRunner::for_session_and_target(&session, settings, target, timer, progress)
            .run_selected_cases(selection)?;
    let checks = phase_timer::time_in_activity_with_nested(after_timing::CHECK_AFTER_TIMING_PHASE);
    recorder.add_seconds_by_activity(
        phase_timer::take_seconds_by_activity(),
        checks,
        started.elapsed(),
    );
    recorder
        .mark_complete_and_write(telemetry.as_ref().map(CardTelemetryByNvml::read_card_sensors))?;
    Ok(exit)
}
