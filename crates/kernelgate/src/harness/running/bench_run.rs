//! `cargo bench`: verifies, times and records every selected case.

use std::path::Path;
use std::time::Instant;

use super::case_error::CaseError;
use super::deadline::{self, TimeBudgetDeadline};
use super::estimate;
use super::execution::{CaseExecution, SampleTimer};
use super::problem::PreparedProblem;
use super::progress::BenchProgress;
use super::sampling::ProcessSampler;
use super::session::CaseSession;
use super::silence_criterion;
use super::trial;
use crate::backend::{BackendKind, BenchTarget};
use crate::display::{self, terminal};
use crate::exit::ExitReason;
use crate::harness::auditing::after_timing;
use crate::harness::error::HarnessError;
use crate::harness::phase_timer;
use crate::harness::recording::invocation::BenchInvocation;
use crate::harness::recording::kept_references::StoredReferences;
use crate::harness::recording::recorder::{RecordSaving, RecordedCaseEvent, RunRecorder};
use crate::harness::recording::save_baseline;
use crate::harness::selection::backend_choice::BenchPlace;
use crate::harness::selection::cases::{CaseSelectionResult, ProblemGroup};
use crate::harness::settings::BenchSettings;
use crate::measure::limits::{CaseWork, DeviceLimits};
use crate::record::run::process_name;
use crate::record::{
    BaselineStore, Environment, FileLock, MachineFacts, ProcessRun, Provenance, RecordFileError,
    file,
};
use crate::workload::Effort;
use kernelgate_cuda::observe::telemetry::CardTelemetry;

/// State of a process that `cargo bench` started to time cases.
struct BenchSession<'a> {
    settings: &'a BenchSettings,
    store: &'a BaselineStore,
    limits: DeviceLimits,
    references: StoredReferences,
    recorder: RunRecorder,
    deadline: Option<TimeBudgetDeadline>,
}

impl CaseSession for BenchSession<'_> {
    fn prepare_problem(
        &self,
        group: &ProblemGroup<'_>,
        target: &BenchTarget,
    ) -> Result<PreparedProblem, CaseError> {
        let mut ready =
            PreparedProblem::draw_or_read_inputs(group, self.settings.seed, None, target)?;
        ready.references = Some(self.references.clone());
        ready.compute_reference_once(group)?;
        Ok(ready)
    }

    fn trial_sampler(&self) -> ProcessSampler<'_> {
        ProcessSampler::sampling_by_criterion(self.settings, self.store)
    }

    fn record(&self, event: RecordedCaseEvent<'_>) -> Result<(), RecordFileError> {
        self.recorder.add(event)
    }

    fn limits(&self) -> Option<&DeviceLimits> {
        Some(&self.limits)
    }

    fn budget_over_reason(&self) -> Option<String> {
        self.deadline.as_ref().and_then(TimeBudgetDeadline::passed_reason)
    }
}

/// Verifies, times and records the selected cases. Returns the exit code and the run.
pub fn run_bench_cases(
    name: &str,
    settings: &BenchSettings,
    place: &BenchPlace,
    selection: &CaseSelectionResult<'_>,
    store: &BaselineStore,
) -> Result<(ExitReason, ProcessRun), HarnessError> {
    let started = Instant::now();
    let opening = phase_timer::start_activity("open");
    let target = settings.device.open(place)?;
    let progress = BenchProgress::new(settings.quiet, selection.case_count());
    let invocation = BenchInvocation::new(settings.process.session.clone());
    let mut run =
        start_run_record(name, settings, selection, store, &invocation, Environment::on(&target))?;
    announce_run(&progress, &run, place, selection, settings, store);
    let process = process_name(name, settings.shard);
    let path = store.run_record_path(&invocation.session, &process);
    let earlier = invocation.earlier_runs(path.parent().unwrap_or(&path));
    let used = deadline::time_since_first_bench(&earlier);
    let deadline = settings.budget.map(|budget| TimeBudgetDeadline::after_budget(budget, used));
    let baseline = settings
        .baselines
        .save
        .as_deref()
        .map(|baseline| save_baseline::open_pending_baseline(store, baseline, &run, selection))
        .transpose()?;
    if run.provenance.commit.is_none() {
        progress.warn_of_missing_commit();
    }
    // The folder is opened before the ceilings are measured, so that an error comes at once.
    let path = invocation.write_bench_record(store, &process, |_| run.clone())?;
    drop(opening);
    let mut timer = SampleTimer::new(&target)?;
    run.anchors = run.plan.as_ref().map(|_| timer.anchors(settings.power));
    let measured_before = ceilings_of_session(&earlier, &run.environment);
    run.limits = measure_needed_ceilings(&mut timer, selection, measured_before)?;
    progress.print_ceilings(&run.limits);
    trial::warn_of_injected_delays(&run);
    // The card is read after the ceilings were measured, when it still has its clock under load.
    let telemetry = target.telemetry();
    run.telemetry.extend(telemetry.as_ref().map(CardTelemetry::read_card));
    progress.report_gpu_state(&run.telemetry);
    progress.warn_of_other_processes(&target.others_computing());
    let limits = run.limits.clone();
    let references = StoredReferences::at(store.references.clone(), run.executable.clone());
    let recorder = RunRecorder::start_recording(
        run,
        path,
        RecordSaving::AfterEachCase,
        settings.baselines.save.clone(),
    )?;
    recorder.exit_on_interrupt()?;
    if target.kind() == BackendKind::Cpu {
        recorder.exit_on_endless_launch(settings.host_timeout);
    }
    let recorded = recorder.clone();
    let session =
        BenchSession { settings, store, limits, references, recorder: recorded, deadline };
    let execution = CaseExecution::new(&session, settings, target, timer, progress);
    let run_all = || execution.run(selection);
    let exit = match settings.process.silent_criterion {
        true => silence_criterion::silence_output(run_all)?,
        false => run_all()?,
    };
    let checks = phase_timer::activity_time(after_timing::PHASE_NAME);
    let spent_s = phase_timer::take_phase_times();
    let progress = BenchProgress::new(settings.quiet, 0);
    progress.print_time_by_activity(&spent_s, checks, started.elapsed());
    recorder.add_time_by_activity(spent_s, checks, started.elapsed());
    recorder.mark_complete(telemetry.as_ref().map(CardTelemetry::read_card))?;
    let saved = settings.baselines.save.as_deref().filter(|_| !recorder.run().cases.is_empty());
    if settings.table {
        let text = display::runs::results_text(&[recorder.run()], terminal::terminal_columns());
        terminal::print_wrapped(&text);
    }
    if let Some((path, baseline)) = baseline.zip(saved) {
        save_pending_baseline(&recorder, &path, baseline)?;
    }
    progress.print_end(&recorder.path(), &store.report_page(), saved);
    Ok((exit, recorder.run()))
}

/// Creates the run record before the first case.
fn start_run_record(
    name: &str,
    settings: &BenchSettings,
    selection: &CaseSelectionResult<'_>,
    store: &BaselineStore,
    invocation: &BenchInvocation,
    environment: Environment,
) -> Result<ProcessRun, HarnessError> {
    let (provenance, stated_commit) = Provenance::detect_for_process(&store.root)?;
    Ok(ProcessRun {
        effort: settings.effort.name().to_owned(),
        seed: settings.seed,
        shard: settings.shard,
        plan: selection.plan.clone(),
        machine: Some(MachineFacts::from_this_machine().digest()),
        delays: trial::injected_delays(settings, selection),
        skipped: selection.skipped.iter().cloned().collect(),
        unsupported: selection.unsupported.clone(),
        executable: executable_hash(settings.process.executable.as_deref()),
        package: store.package.clone(),
        invocation: Some(invocation.id.clone()),
        stated_commit,
        ..ProcessRun::start_now(name, &invocation.session, environment, provenance)
    })
}

/// Prints the device, the work of the process and its least duration.
fn announce_run(
    progress: &BenchProgress,
    run: &ProcessRun,
    place: &BenchPlace,
    selection: &CaseSelectionResult<'_>,
    settings: &BenchSettings,
    store: &BaselineStore,
) {
    let not_elsewhere = (place.kind == BackendKind::Cpu).then_some(place.otherwise.as_str());
    let part = settings.shard.map_or(String::new(), |shard| format!(", shard {shard}"));
    let (bench, cases) = (format!("{}{part}", run.bench), selection.case_count());
    progress.print_start(&bench, &run.environment, settings.effort, cases, not_elsewhere);
    if settings.effort == Effort::Thorough {
        let last_times = estimate::case_times_of_last_session(store, &run.environment);
        progress.print_time_estimate(&estimate::estimate_text(
            selection,
            settings.effort,
            settings,
            &last_times,
        ));
    }
}

/// Measured ceilings from earlier benches of this invocation on this machine.
fn ceilings_of_session(earlier: &[ProcessRun], here: &Environment) -> DeviceLimits {
    let measured = earlier.iter().filter(|run| run.environment.can_reuse_results_of(here));
    measured.fold(DeviceLimits::default(), |known, run| known.filled_from(&run.limits))
}

/// Measures the memory and compute ceilings of the device that the selected cases are compared
/// with. Known ceilings of a GPU are kept; ceilings of the host depend on its load and are measured
/// anew.
fn measure_needed_ceilings(
    timer: &mut SampleTimer,
    selection: &CaseSelectionResult<'_>,
    known: DeviceLimits,
) -> Result<DeviceLimits, HarnessError> {
    let _activity = phase_timer::start_activity("ceilings");
    let works: Vec<CaseWork> =
        selection.groups.iter().flat_map(ProblemGroup::declared_works).collect();
    Ok(match timer {
        SampleTimer::Wall(_) => DeviceLimits::measure_cpu(&works),
        SampleTimer::Events(events) => {
            DeviceLimits::measure_gpu(events, &works, known.bounding_works(&works))?
        }
    })
}

/// Merges the finished run into a baseline file.
fn save_pending_baseline(
    recorder: &RunRecorder,
    path: &Path,
    baseline: &str,
) -> Result<(), HarnessError> {
    let unsaved = |cause| HarnessError::Unsaved {
        cause: Box::new(cause),
        name: baseline.to_owned(),
        session: recorder.path().parent().unwrap_or(path).display().to_string(),
    };
    // Waited for outside of the recorder: an interrupt need not wait.
    let _lock = FileLock::acquire_for_file(path).map_err(unsaved)?;
    recorder
        .save_baseline(|run| save_baseline::save_to_baseline(path, baseline, run))
        .map_err(unsaved)
}

/// Returns the hash of an executable file's content.
pub fn executable_hash(program: Option<&Path>) -> Option<String> {
    file::content_hash_of_file(program?).ok()
}
