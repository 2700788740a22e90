//! Runs `cargo bench`: verifies, times and records every selected case.

use std::path::Path;
use std::slice;
use std::time::Instant;

use super::case_error::WhyCaseHasNoResult;
use super::deadline::{self, TimeBudgetDeadline};
use super::estimate;
use super::execution::{CaseTimer, SelectedCasesRunner};
use super::problem::PreparedProblem;
use super::progress::BenchProgressPrinter;
use super::sampling::CriterionOrTrialPlan;
use super::session::CaseRunningProcess;
use super::silence_criterion;
use super::trial;
use crate::backend::{BackendKind, BenchDevices};
use crate::display::{self, terminal};
use crate::exit::ProcessExitReason;
use crate::harness::auditing::after_timing;
use crate::harness::error::HarnessError;
use crate::harness::phase_timer;
use crate::harness::recording::invocation::CargoBenchInvocation;
use crate::harness::recording::kept_references::StoredReferenceFolder;
use crate::harness::recording::recorder::{
    CaseOutcomeToRecord, SharedRunRecord, WhenRecordIsSaved,
};
use crate::harness::recording::save_baseline;
use crate::harness::selection::backend_choice::ChosenBackend;
use crate::harness::selection::cases::{SelectedAndSkippedCases, SelectedProblem};
use crate::harness::settings::BenchSettings;
use crate::measure::limits::{DeclaredWorkAndCacheState, MeasuredDeviceLimits};
use crate::record::run::bench_process_name_with_shard;
use crate::record::{
    BenchProcessRun, CommitAndChanges, ExclusiveFileLock, MachineHardware, RecordFileError,
    RecordFoldersOfPackage, RunEnvironment, file,
};
use crate::workload::BenchEffort;
use kernelgate_cuda::observe::telemetry::CardTelemetryByNvml;

/// State of a bench process that times cases for `cargo bench`.
struct CargoBenchSession<'a> {
    settings: &'a BenchSettings,
    store: &'a RecordFoldersOfPackage,
    limits: MeasuredDeviceLimits,
    references: StoredReferenceFolder,
    recorder: SharedRunRecord,
    deadline: Option<TimeBudgetDeadline>,
}

impl CaseRunningProcess for CargoBenchSession<'_> {
    fn prepare_problem(
        &self,
        group: &SelectedProblem<'_>,
        target: &BenchDevices,
    ) -> Result<PreparedProblem, WhyCaseHasNoResult> {
        let mut ready =
            PreparedProblem::with_inputs_only(group, self.settings.input_seed, None, target)?;
        ready.references = Some(self.references.clone());
        ready.compute_reference_once(group)?;
        Ok(ready)
    }

    fn sampler_of_process(&self) -> CriterionOrTrialPlan<'_> {
        CriterionOrTrialPlan::sample_by_criterion(self.settings, self.store)
    }

    fn record_outcome(&self, event: CaseOutcomeToRecord<'_>) -> Result<(), RecordFileError> {
        self.recorder.add_outcome(event)
    }

    fn measured_ceilings(&self) -> Option<&MeasuredDeviceLimits> {
        Some(&self.limits)
    }

    fn reason_if_budget_is_over(&self) -> Option<String> {
        self.deadline.as_ref().and_then(TimeBudgetDeadline::reason_if_over)
    }
}

/// Prints the results table of one process run, and the remarks under it, at the terminal's width.
fn print_results_table_and_remarks(run: &BenchProcessRun) {
    let columns = terminal::terminal_columns();
    let text = display::runs::results_table_and_remarks_text(slice::from_ref(run), columns);
    terminal::print_broken_to_terminal_width(&text);
}

/// Verifies, times and records every selected case for `cargo bench`. Returns the exit reason and
/// the recorded run.
pub fn verify_time_and_record_selected_cases(
    name: &str,
    settings: &BenchSettings,
    place: &ChosenBackend,
    selection: &SelectedAndSkippedCases<'_>,
    store: &RecordFoldersOfPackage,
) -> Result<(ProcessExitReason, BenchProcessRun), HarnessError> {
    let started = Instant::now();
    let opening = phase_timer::start_timed_activity("open");
    let target = settings.requested_backend_and_gpus.open_target(place)?;
    let progress = BenchProgressPrinter::new(settings.quiet, selection.runnable_case_count());
    let invocation =
        CargoBenchInvocation::invocation_of_this_process(settings.process.session_name.clone());
    let environment = RunEnvironment::environment_of_target(&target);
    let mut run = start_run_record(name, settings, selection, store, &invocation, environment)?;
    print_device_cases_and_least_duration(&progress, &run, place, selection, settings, store);
    let process = bench_process_name_with_shard(name, settings.shard);
    let path = store.path_of_run_record(&invocation.session_folder_name, &process);
    let earlier = invocation.runs_of_earlier_benches(path.parent().unwrap_or(&path));
    let used = deadline::time_since_first_run_began(&earlier);
    let deadline = settings
        .time_budget
        .map(|budget| TimeBudgetDeadline::from_budget_and_used_time(budget, used));
    let baseline = settings
        .baselines
        .saved_baseline
        .as_deref()
        .map(|baseline| {
            save_baseline::check_baseline_before_measuring(store, baseline, &run, selection)
        })
        .transpose()?;
    if run.provenance.commit.is_none() {
        progress.warn_of_missing_commit();
    }
    // The record is written before the ceilings are measured, so that an unwritable folder is
    // reported at once.
    let path = invocation.write_run_record_of_bench(store, &process, |_| run.clone())?;
    drop(opening);
    let mut timer = CaseTimer::for_target(&target)?;
    run.anchors = run.plan.as_ref().map(|_| timer.measure_anchor_rates(settings.power));
    let measured_before = ceilings_from_earlier_benches(&earlier, &run.environment);
    run.limits = measure_ceilings_for_selected_cases(&mut timer, selection, measured_before)?;
    progress.print_ceilings(&run.limits);
    trial::print_warning_of_injected_delays(&run);
    // The GPU is read after the ceilings were measured, while its clock is still that under load.
    let telemetry = target.open_card_telemetry();
    run.telemetry.extend(telemetry.as_ref().map(CardTelemetryByNvml::read_card_sensors));
    progress.print_gpu_state(&run.telemetry);
    progress.print_warning_of_busy_gpus(&target.gpus_with_other_computing_processes());
    let limits = run.limits.clone();
    let references =
        StoredReferenceFolder::new(store.references_folder.clone(), run.executable_hash.clone());
    let recorder = SharedRunRecord::begin_run_record(
        run,
        path,
        WhenRecordIsSaved::SavedAfterEachCase,
        settings.baselines.saved_baseline.clone(),
    )?;
    recorder.exit_between_writes_on_interrupt()?;
    if target.backend_kind() == BackendKind::Cpu {
        recorder.exit_on_host_launch_timeout(settings.host_launch_timeout);
    }
    let recorded = recorder.clone();
    let session =
        CargoBenchSession { settings, store, limits, references, recorder: recorded, deadline };
    let execution =
        SelectedCasesRunner::for_session_and_target(&session, settings, target, timer, progress);
    let run_all = || execution.run_selected_cases(selection);
    let exit = match settings.process.silent_criterion {
        true => silence_criterion::run_with_silent_stdout(run_all)?,
        false => run_all()?,
    };
    let checks = phase_timer::time_in_activity_with_nested(after_timing::CHECK_AFTER_TIMING_PHASE);
    let spent_s = phase_timer::take_seconds_by_activity();
    let progress = BenchProgressPrinter::new(settings.quiet, 0);
    progress.print_time_by_activity(&spent_s, checks, started.elapsed());
    recorder.add_seconds_by_activity(spent_s, checks, started.elapsed());
    let sensors = telemetry.as_ref().map(CardTelemetryByNvml::read_card_sensors);
    recorder.mark_complete_and_write(sensors)?;
    let measured = recorder.copy_of_run();
    let saved = settings.baselines.saved_baseline.as_deref().filter(|_| !measured.cases.is_empty());
    if settings.prints_results_table {
        print_results_table_and_remarks(&measured);
    }
    if let Some((path, baseline)) = baseline.zip(saved) {
        save_run_to_baseline_under_lock(&recorder, &path, baseline)?;
    }
    let page = store.default_report_page_path();
    progress.print_record_and_report_paths(&recorder.record_path(), &page, saved);
    Ok((exit, recorder.copy_of_run()))
}

/// Creates the run record in memory, before the first case.
fn start_run_record(
    name: &str,
    settings: &BenchSettings,
    selection: &SelectedAndSkippedCases<'_>,
    store: &RecordFoldersOfPackage,
    invocation: &CargoBenchInvocation,
    environment: RunEnvironment,
) -> Result<BenchProcessRun, HarnessError> {
    let (provenance, stated_commit) =
        CommitAndChanges::commit_and_changes_of_started_process(&store.package_root)?;
    Ok(BenchProcessRun {
        effort: settings.effort.effort_name().to_owned(),
        seed: settings.input_seed,
        shard: settings.shard,
        plan: selection.division_among_shards.clone(),
        hardware_facts_hash: Some(
            MachineHardware::hardware_of_this_machine().hash_of_hardware_facts(),
        ),
        injected_delays_ns: trial::injected_delays_by_case(settings, selection),
        skipped: selection.skipped_ids_and_reasons.iter().cloned().collect(),
        unsupported_case_ids: selection.unsupported_case_ids.clone(),
        executable_hash: content_hash_of_executable(settings.process.executable.as_deref()),
        package: store.package.clone(),
        cargo_invocation_id: Some(invocation.invocation_id.clone()),
        commit_is_from_variable: stated_commit,
        ..BenchProcessRun::empty_run_starting_now(
            name,
            &invocation.session_folder_name,
            environment,
            provenance,
        )
    })
}

/// Prints the device, the number of cases, and the minimum duration of the run.
fn print_device_cases_and_least_duration(
    progress: &BenchProgressPrinter,
    run: &BenchProcessRun,
    place: &ChosenBackend,
    selection: &SelectedAndSkippedCases<'_>,
    settings: &BenchSettings,
    store: &RecordFoldersOfPackage,
) {
    let not_elsewhere =
        (place.kind == BackendKind::Cpu).then_some(place.reason_against_other_backend.as_str());
    let part = settings.shard.map_or(String::new(), |shard| format!(", shard {shard}"));
    let (bench, cases) = (format!("{}{part}", run.bench), selection.runnable_case_count());
    progress.print_bench_and_device(
        &bench,
        &run.environment,
        settings.effort,
        cases,
        not_elsewhere,
    );
    if settings.effort == BenchEffort::Thorough {
        let last_times = estimate::median_launch_ns_of_last_session(store, &run.environment);
        progress.print_time_estimate(&estimate::minimum_timing_duration_text(
            selection,
            settings.effort,
            settings,
            &last_times,
        ));
    }
}

/// Merges the ceilings that earlier benches of this `cargo bench` invocation measured on this
/// machine.
fn ceilings_from_earlier_benches(
    earlier: &[BenchProcessRun],
    here: &RunEnvironment,
) -> MeasuredDeviceLimits {
    let measured = earlier.iter().filter(|run| run.environment.can_reuse_verification_of(here));
    measured.fold(MeasuredDeviceLimits::default(), |known, run| {
        known.completed_by_limits_of(&run.limits)
    })
}

/// Measures the ceilings (device rates) that the limits of the selected cases need. Known ceilings
/// of a GPU are reused; ceilings of the host depend on its load and are always measured.
fn measure_ceilings_for_selected_cases(
    timer: &mut CaseTimer,
    selection: &SelectedAndSkippedCases<'_>,
    known: MeasuredDeviceLimits,
) -> Result<MeasuredDeviceLimits, HarnessError> {
    let _activity = phase_timer::start_timed_activity("ceilings");
    let works: Vec<DeclaredWorkAndCacheState> = selection
        .problems_with_cases
        .iter()
        .flat_map(SelectedProblem::work_and_cache_state_of_cases)
        .collect();
    Ok(match timer {
        CaseTimer::WallClock(_) => MeasuredDeviceLimits::measure_host_limits(&works),
        CaseTimer::CudaEvents(events) => MeasuredDeviceLimits::measure_missing_gpu_limits(
            events,
            &works,
            known.keep_limits_that_bound_works(&works),
        )?,
    })
}

/// Merges the finished run into the baseline's file.
fn save_run_to_baseline_under_lock(
    recorder: &SharedRunRecord,
    path: &Path,
    baseline: &str,
) -> Result<(), HarnessError> {
    let unsaved = |cause| HarnessError::BaselineNotSaved {
        cause: Box::new(cause),
        baseline_name: baseline.to_owned(),
        session_folder_name: recorder.record_path().parent().unwrap_or(path).display().to_string(),
    };
    // The lock is acquired before the recorder is locked, so that an interrupt need not wait for
    // another process.
    let _lock = ExclusiveFileLock::acquire_lock_for_file(path).map_err(unsaved)?;
    recorder
        .save_baseline_without_interruption(|run| {
            save_baseline::merge_run_into_baseline_file(path, baseline, run)
        })
        .map_err(unsaved)
}

/// Returns the content hash of the executable's file; `None` if the file cannot be read.
pub fn content_hash_of_executable(program: Option<&Path>) -> Option<String> {
    file::file_content_hash_hex(program?).ok()
}
