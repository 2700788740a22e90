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
use crate::backend::{BackendKind, BenchDevices};
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
    /// Sampling plan that determines how long the trial times each case.
    pub sampling: TrialSamplingPlan,
    /// The earlier run of the same executable whose verified digests can be reused.
    pub earlier_verified_run: Option<BenchProcessRun>,
    /// Folder of inputs that an earlier trial drew and stored.
    pub stored_inputs_folder: Option<PathBuf>,
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
        let run = self.earlier_verified_run.as_ref()?;
        let earlier = &run.cases.get(id)?.verification;
        let by = Some(earlier.reused_from_run.clone().unwrap_or_else(|| run.key_in_baseline()));
        Some(OutputVerificationRecord { reused_from_run: by, ..earlier.clone() })
    }
}

impl CaseRunningProcess for StateInsideTrialProcess<'_> {
    fn prepare_problem(
        &self,
        group: &SelectedProblem<'_>,
        target: &BenchDevices,
    ) -> Result<PreparedProblem, WhyCaseHasNoResult> {
        let mut ready = PreparedProblem::with_inputs_only(
            group,
            self.settings.input_seed,
            self.stored_inputs_folder.as_deref(),
            target,
        )?;
        ready.references.clone_from(&self.references);
        ready.exchanged_outputs.clone_from(&self.outputs);
        // If no earlier run verified the outputs, the reference is computed here, outside of any
        // case, so that no case is charged for it.
        if self.earlier_verified_run.is_none() {
            ready.compute_reference_once(group)?;
        }
        Ok(ready)
    }

    fn verify_case(
        &self,
        ready: &mut PreparedProblem,
        group: &SelectedProblem<'_>,
        case: &SelectedCase,
        target: &BenchDevices,
    ) -> Result<VerifiedImplementation, WhyCaseHasNoResult> {
        ready.verify_by_known_digest_or_reference(
            group,
            case,
            target,
            self.verification_by_earlier_run(&case.case_id),
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
    let target = settings.requested_backend_and_gpus.open_target(place)?;
    let environment = RunEnvironment::environment_of_target(&target);
    drop(opening);
    let mut run = BenchProcessRun {
        effort: settings.effort.effort_name().to_owned(),
        shard: selection.division_among_shards.as_ref().and(settings.shard),
        plan: selection.division_among_shards.clone(),
        seed: settings.input_seed,
        injected_delays_ns: injected_delays_by_case(settings, selection),
        executable_hash: executable,
        skipped: selection.skipped_ids_and_reasons.iter().cloned().collect(),
        unsupported_case_ids: selection.unsupported_case_ids.clone(),
        ..BenchProcessRun::empty_run_starting_now(
            bench,
            &request.session_name,
            environment,
            CommitAndChanges::from_git_or_variable(&store.package_root),
        )
    };
    let earlier: Option<BenchProcessRun> =
        request.verified_run_record.as_deref().map(file::read_record).transpose()?;
    // Digests from another executable or another device are not reused.
    let verified = earlier.filter(|earlier| {
        earlier.executable_hash.is_some()
            && earlier.executable_hash == run.executable_hash
            && earlier.seed == run.seed
            && earlier.environment.can_reuse_verification_of(&run.environment)
    });
    let mut timer = {
        let _activity = phase_timer::start_timed_activity("timer");
        CaseTimer::for_target(&target)?
    };
    run.anchors = request.measure_anchor_rates.then(|| timer.measure_anchor_rates(settings.power));
    let telemetry = {
        let _activity = phase_timer::start_timed_activity("telemetry");
        let telemetry = target.open_card_telemetry();
        run.telemetry.extend(telemetry.as_ref().map(CardTelemetryByNvml::read_card_sensors));
        telemetry
    };
    print_warning_of_injected_delays(&run);
    let hash = run.executable_hash.clone();
    let references = StoredReferenceFolder::new(store.references_folder.clone(), hash);
    let recorder = SharedRunRecord::begin_run_record(
        run,
        request.run_record_path,
        WhenRecordIsSaved::SavedWhenComplete,
        None,
    )?;
    recorder.exit_between_writes_on_interrupt()?;
    if target.backend_kind() == BackendKind::Cpu {
        recorder.exit_on_host_launch_timeout(settings.host_launch_timeout);
    }
    let session = StateInsideTrialProcess {
        settings,
        sampling: request.sampling,
        earlier_verified_run: verified,
        stored_inputs_folder: request.inputs_folder,
        outputs: OutputsExchangedBetweenBuilds {
            folder_to_save: request.kept_outputs_folder,
            folder_of_base_outputs: request.base_outputs_folder,
            saves_verified_outputs: request.keep_verified_outputs,
        },
        references: Some(references),
        recorder: recorder.clone(),
    };
    let progress = BenchProgressPrinter::new(settings.quiet, selection.runnable_case_count());
    let exit =
        SelectedCasesRunner::for_session_and_target(&session, settings, target, timer, progress)
            .run_selected_cases(selection)?;
    let checks = phase_timer::time_in_activity_with_nested(after_timing::CHECK_AFTER_TIMING_PHASE);
    let seconds = phase_timer::take_seconds_by_activity();
    recorder.add_seconds_by_activity(seconds, checks, started.elapsed());
    let sensors = telemetry.as_ref().map(CardTelemetryByNvml::read_card_sensors);
    recorder.mark_complete_and_write(sensors)?;
    Ok(exit)
}
