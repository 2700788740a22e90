//! Runs a trial: one process of a comparison, as its request states.

use std::path::PathBuf;
use std::time::Instant;

use super::case_error::CaseError;
use super::execution::{CaseExecution, SampleTimer};
use super::problem::{PreparedProblem, VerifiedExecutable};
use super::progress::BenchProgress;
use super::sampling::ProcessSampler;
use super::session::CaseSession;
use super::trial::{BuildOutputs, injected_delays, warn_of_injected_delays};
use crate::backend::{BackendKind, BenchTarget};
use crate::exit::ExitReason;
use crate::harness::auditing::after_timing;
use crate::harness::error::HarnessError;
use crate::harness::phase_timer;
use crate::harness::recording::kept_references::StoredReferences;
use crate::harness::recording::recorder::{RecordSaving, RecordedCaseEvent, RunRecorder};
use crate::harness::selection::backend_choice::BenchPlace;
use crate::harness::selection::cases::{CaseSelectionResult, ProblemGroup, SelectedCase};
use crate::harness::settings::BenchSettings;
use crate::record::run::VerificationRecord;
use crate::record::{
    BaselineStore, Environment, ProcessRun, Provenance, RecordFileError, TrialRequest,
    TrialSampling, file,
};
use kernelgate_cuda::driver::launch::used_kernels::UsedKernels;
use kernelgate_cuda::observe::telemetry::CardTelemetry;

/// State of a trial, which is one process of a comparison.
pub struct TrialSession<'a> {
    /// Flags and variables.
    pub settings: &'a BenchSettings,
    /// How long to time.
    pub sampling: TrialSampling,
    /// The earlier run that verified this executable.
    pub verified: Option<ProcessRun>,
    /// Folder with inputs that an earlier trial drew and stored.
    pub inputs: Option<PathBuf>,
    /// Folders of this build's and the other build's outputs, if no reference verifies them.
    pub outputs: BuildOutputs,
    /// Folder of stored references.
    pub references: Option<StoredReferences>,
    /// The trial's record.
    pub recorder: RunRecorder,
}

impl TrialSession<'_> {
    /// Whether the process takes times; otherwise it only verifies.
    fn takes_times(&self) -> bool {
        self.sampling != TrialSampling::VERIFICATION_SAMPLING
    }

    /// The comparison of a case with the reference in an earlier process.
    fn earlier_verification(&self, id: &str) -> Option<VerificationRecord> {
        let run = self.verified.as_ref()?;
        let earlier = &run.cases.get(id)?.verification;
        let by = Some(earlier.by.clone().unwrap_or_else(|| run.baseline_key()));
        Some(VerificationRecord { by, ..earlier.clone() })
    }
}

impl CaseSession for TrialSession<'_> {
    fn prepare_problem(
        &self,
        group: &ProblemGroup<'_>,
        target: &BenchTarget,
    ) -> Result<PreparedProblem, CaseError> {
        let mut ready = PreparedProblem::draw_or_read_inputs(
            group,
            self.settings.seed,
            self.inputs.as_deref(),
            target,
        )?;
        ready.references.clone_from(&self.references);
        ready.outputs.clone_from(&self.outputs);
        // The peak of device memory is read outside of a case, so that no case counts it.
        if self.verified.is_none() {
            ready.compute_reference_once(group)?;
        }
        Ok(ready)
    }

    fn verify_case(
        &self,
        ready: &mut PreparedProblem,
        group: &ProblemGroup<'_>,
        case: &SelectedCase,
        target: &BenchTarget,
    ) -> Result<VerifiedExecutable, CaseError> {
        ready.verify_by_output_bits(group, case, target, self.earlier_verification(&case.id))
    }

    fn trial_sampler(&self) -> ProcessSampler<'_> {
        ProcessSampler::Plan(self.sampling, self.settings.power)
    }

    fn record(&self, event: RecordedCaseEvent<'_>) -> Result<(), RecordFileError> {
        self.recorder.add(event)
    }

    fn measures_costs(&self) -> bool {
        !self.takes_times()
    }

    /// A comparison needs the list of an executable's kernels only once.
    fn kernels(&self, ready: &PreparedProblem) -> UsedKernels {
        if self.takes_times() { UsedKernels::new() } else { ready.kernels.describe_used_kernels() }
    }
}

/// Verifies and times the cases of a trial request, and records the run at the requested path.
pub fn carry_out_trial(
    bench: &str,
    settings: &BenchSettings,
    request: TrialRequest,
    place: &BenchPlace,
    selection: &CaseSelectionResult<'_>,
    store: &BaselineStore,
) -> Result<ExitReason, HarnessError> {
    let started = Instant::now();
    let opening = phase_timer::start_activity("open");
    let executable =
        settings.process.executable.as_deref().map(file::content_hash_of_file).transpose()?;
    let target = settings.device.open(place)?;
    let environment = Environment::on(&target);
    drop(opening);
    let mut run = ProcessRun {
        effort: settings.effort.name().to_owned(),
        shard: selection.plan.as_ref().and(settings.shard),
        plan: selection.plan.clone(),
        seed: settings.seed,
        delays: injected_delays(settings, selection),
        executable,
        skipped: selection.skipped.iter().cloned().collect(),
        unsupported: selection.unsupported.clone(),
        ..ProcessRun::start_now(
            bench,
            &request.session,
            environment,
            Provenance::detect_from_git(&store.root),
        )
    };
    let earlier: Option<ProcessRun> = request.verified.as_deref().map(file::read).transpose()?;
    // Digests from another executable or another device are not used in this trial.
    let verified = earlier.filter(|earlier| {
        earlier.executable.is_some()
            && earlier.executable == run.executable
            && earlier.seed == run.seed
            && earlier.environment.can_reuse_results_of(&run.environment)
    });
    let mut timer = {
        let _activity = phase_timer::start_activity("timer");
        SampleTimer::new(&target)?
    };
    run.anchors = request.anchors.then(|| timer.anchors(settings.power));
    let telemetry = {
        let _activity = phase_timer::start_activity("telemetry");
        let telemetry = target.telemetry();
        run.telemetry.extend(telemetry.as_ref().map(CardTelemetry::read_card));
        telemetry
    };
    warn_of_injected_delays(&run);
    let references = StoredReferences::at(store.references.clone(), run.executable.clone());
    let recorder =
        RunRecorder::start_recording(run, request.record, RecordSaving::WhenComplete, None)?;
    recorder.exit_on_interrupt()?;
    if target.kind() == BackendKind::Cpu {
        recorder.exit_on_endless_launch(settings.host_timeout);
    }
    let session = TrialSession {
        settings,
        sampling: request.sampling,
        verified,
        inputs: request.inputs,
        outputs: BuildOutputs {
            keep: request.keep_outputs,
            base: request.base_outputs,
            keep_verified: request.keep_verified,
        },
        references: Some(references),
        recorder: recorder.clone(),
    };
    let progress = BenchProgress::new(settings.quiet, selection.case_count());
    let exit = CaseExecution::new(&session, settings, target, timer, progress).run(selection)?;
    let checks = phase_timer::activity_time(after_timing::PHASE_NAME);
    recorder.add_time_by_activity(phase_timer::take_phase_times(), checks, started.elapsed());
    recorder.mark_complete(telemetry.as_ref().map(CardTelemetry::read_card))?;
    Ok(exit)
}
