//! Makes the run record of a Criterion bench with GPU time, from those ids and samples in
//! Criterion's store that this process measured.

use std::path::Path;

use super::samples::{LogOfMeasuredSamples, WhoMeasuredStoredSamples};
use crate::display::{self, terminal};
use crate::exit::ProcessExitReason;
use crate::harness::recording::invocation::CargoBenchInvocation;
use crate::harness::recording::save_baseline;
use crate::harness::running::bench_run;
use crate::harness::settings::process::SettingsOfCriterionBench;
use crate::measure::CaseSampleConditions;
use crate::measure::audit::{RefusedTimedCode, duration};
use crate::measure::power::CasePowerRecord;
use crate::record::criterion_store::{self, CaseInCriterionStore, CriterionStoreResults};
use crate::record::text::{
    clean_message_for_terminal, join_lines_with_spaces, path_for_terminal,
    refuse_control_characters,
};
use crate::record::{
    BenchProcessRun, CaseRecordWithSamples, CommitAndChanges, ExclusiveFileLock,
    RecordFoldersOfPackage, RunEnvironment, SamplesOfCase, file,
};
use crate::stats;
use kernelgate_cuda::driver::device::GpuProperties;
use kernelgate_cuda::observe::telemetry::GpuCardReading;
use kernelgate_cuda::{BackendError, CaseFailureReason};

/// Bytes in the executable by which `kernelgate` recognises a Criterion bench without running it,
/// and then runs it with Criterion's flags.
pub const MARK_OF_CRITERION_BENCH_EXECUTABLE: &str = "\0kernelgate GPU time in Criterion's main\0";

/// How a Criterion bench process ended.
pub enum HowCriterionBenchEnded {
    /// All benchmark functions of the Criterion group ran.
    AllFunctionsRan,
    /// The bench panicked.
    BenchPanicked,
    /// The measurement ended the process, because a case could not be timed correctly.
    TimingRefused {
        /// Id of the case that could not be timed.
        case_id: String,
        /// Why the case has no time.
        error: CaseFailureReason,
    },
}

/// Describes the case whose samples are being measured, for an error message. Criterion reports a
/// case id only after its samples were taken, so the previous case is named instead.
pub fn description_of_case_being_measured(
    log: &LogOfMeasuredSamples,
    store: &RecordFoldersOfPackage,
) -> String {
    let stored = criterion_store::read_criterion_store(&store.criterion_folder).unwrap_or_default();
    let here = stored.cases.iter().filter(|(_, case)| {
        matches!(
            log.origin_of_stored_samples(case),
            WhoMeasuredStoredSamples::MeasuredByThisProcess { .. }
        )
    });
    let last = here.max_by_key(|(_, case)| case.samples_file_write_time);
    last.map_or("the first case".to_owned(), |(id, _)| {
        format!("the case after `{}`", join_lines_with_spaces(id))
    })
}

/// Data from which the run record of a Criterion bench process is made.
pub struct CriterionRunToRecord<'a> {
    /// Settings of the Criterion bench process.
    pub process: &'a SettingsOfCriterionBench,
    /// Folders of the package's runs and baselines.
    pub store: &'a RecordFoldersOfPackage,
    /// Log of the GPU time samples that this process measured.
    pub sample_log: &'a LogOfMeasuredSamples,
    /// GPU on which the Criterion bench ran.
    pub gpu_properties: &'a GpuProperties,
    /// Shortest measurable time of a launch on the timed stream, in nanoseconds.
    pub shortest_measurable_launch_ns: f64,
    /// Why CUPTI's record of a case was inconclusive; `None` if it was conclusive.
    pub reason_without_cupti_record: Option<&'a str>,
}

impl CriterionRunToRecord<'_> {
    /// Writes the run record of the cases that this process measured; returns the exit reason.
    ///
    /// # Errors
    /// The error is a message that ends a sentence about the run record.
    pub fn write_record_of_measured_cases(
        &self,
        telemetry: Vec<GpuCardReading>,
        ended: HowCriterionBenchEnded,
    ) -> Result<ProcessExitReason, String> {
        let Self { process, store, .. } = *self;
        let stored = criterion_store::read_criterion_store(&store.criterion_folder)
            .map_err(|error| error.to_string())?;
        let complete = matches!(ended, HowCriterionBenchEnded::AllFunctionsRan);
        let mut run = self.run_of_measured_cases(&stored);
        if let HowCriterionBenchEnded::TimingRefused { case_id: case, error } = ended {
            run.failed.insert(case, error);
        }
        if run.cases.is_empty() && run.failed.is_empty() && run.skipped.is_empty() {
            return Ok(ProcessExitReason::Success);
        }
        let invocation =
            CargoBenchInvocation::invocation_of_this_process(process.session_name.clone()?);
        let bench = bench_target_name(process.executable.as_deref().unwrap_or(Path::new("")));
        // If `kernelgate` asked for a record, all groups of the bench are merged into this one
        // record.
        let earlier = process
            .requested_record_path
            .as_ref()
            .and_then(|path| file::read_record::<BenchProcessRun>(path).ok());
        if let Some(earlier) = earlier {
            run.cases.extend(earlier.cases);
            run.skipped.extend(earlier.skipped);
            run.failed.extend(earlier.failed);
        }
        let run = BenchProcessRun {
            session_name: invocation.session_folder_name.clone(),
            package: store.package.clone(),
            cargo_invocation_id: Some(invocation.invocation_id.clone()),
            ended_normally: complete,
            provenance: CommitAndChanges::from_git_or_variable(&store.package_root),
            executable_hash: bench_run::content_hash_of_executable(process.executable.as_deref()),
            telemetry,
            ..run
        };
        // Two Criterion groups with their own measurements produce two run records.
        let stem = |path: &Path| path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let named = |path: &Path| BenchProcessRun {
            bench: stem(path).unwrap_or(bench.clone()),
            ..run.clone()
        };
        let run = if let Some(path) = &process.requested_record_path {
            let run = named(path);
            file::write_record_atomically(path, &run).map_err(|error| error.to_string())?;
            run
        } else {
            let path = invocation
                .write_run_record_of_bench(store, &bench, named)
                .map_err(|error| error.to_string())?;
            let run = named(&path);
            print_run_results(&run, &path, &store.default_report_page_path());
            run
        };
        if let Some(name) = &process.save_baseline {
            add_run_to_baseline(store, &run, name)?;
        }
        Ok(if run.failed.is_empty() {
            ProcessExitReason::Success
        } else {
            ProcessExitReason::Regression
        })
    }

    /// Makes the run of those cases in Criterion's store that this process measured. Other cases in
    /// Criterion's store belong to other benches or to earlier runs.
    fn run_of_measured_cases(&self, stored: &CriterionStoreResults) -> BenchProcessRun {
        let environment = RunEnvironment::environment_of_process_on_gpus([self.gpu_properties]);
        let mut run = BenchProcessRun::empty_run_starting_now(
            "",
            "",
            environment,
            CommitAndChanges::default(),
        );
        for (id, case) in &stored.cases {
            match self.sample_log.origin_of_stored_samples(case) {
                WhoMeasuredStoredSamples::MeasuredByAnotherProcess => {}
                WhoMeasuredStoredSamples::TimedByRoutineItself => {
                    let why = "its routine measures the time itself (iter_custom)";
                    run.skipped.insert(join_lines_with_spaces(id), why.to_owned());
                }
                WhoMeasuredStoredSamples::MeasuredByThisProcess {
                    measured_sample_count: samples,
                    gpu_waited_for_host: host_bound,
                    cupti_record_was_conclusive: recorded,
                } => {
                    let mut record = record_of_stored_criterion_case(case, samples, host_bound);
                    let why = self.reason_without_cupti_record.unwrap_or("no pass was recorded");
                    record.samples.reason_cupti_did_not_check = (!recorded).then(|| why.to_owned());
                    let launch_ns = stats::median(&record.samples.launch_times_by_sample_ns());
                    let duration = duration::refuse_time_below_shortest_command(
                        RefusedTimedCode::CriterionRoutine,
                        launch_ns,
                        self.shortest_measurable_launch_ns,
                    );
                    if let Err(why) = duration {
                        run.failed
                            .insert(join_lines_with_spaces(id), (&BackendError::from(why)).into());
                    } else if let Err(why) = refuse_control_characters(id) {
                        run.skipped.insert(join_lines_with_spaces(id), why);
                    } else {
                        run.cases.insert(id.clone(), record);
                    }
                }
            }
        }
        run
    }
}

fn record_of_stored_criterion_case(
    case: &CaseInCriterionStore,
    samples: usize,
    host_bound: bool,
) -> CaseRecordWithSamples {
    case.to_case_record(SamplesOfCase {
        launches_per_sample: case.iterations_per_sample[..samples].to_vec(),
        elapsed_per_sample_ns: case.sample_times[..samples].to_vec(),
        conditions: CaseSampleConditions {
            includes_host_launch_time: host_bound,
            ..CaseSampleConditions::default()
        },
        power: Some(CasePowerRecord::with_power_state_not_applicable(
            "Criterion plans the samples of this bench",
        )),
        ..SamplesOfCase::default()
    })
}

/// Name of the bench target: the executable's name without the hash that cargo appends.
fn bench_target_name(program: &Path) -> String {
    let stem = program.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let hash = |end: &str| end.len() == 16 && end.bytes().all(|byte| byte.is_ascii_hexdigit());
    match stem.rsplit_once('-') {
        Some((name, end)) if hash(end) && !name.is_empty() => name.to_owned(),
        _ => stem,
    }
}

fn print_run_results(run: &BenchProcessRun, path: &Path, page: &Path) {
    println!(
        "{}",
        display::runs::results_table_and_remarks_text(
            std::slice::from_ref(run),
            terminal::terminal_columns()
        )
    );
    let (path, page) = (path.display().to_string(), page.display().to_string());
    eprintln!("run recorded in {}", clean_message_for_terminal(&path));
    eprintln!("`kernelgate report` draws it in {}", clean_message_for_terminal(&page));
}

/// Adds the run to kernelgate's baseline with the name under which Criterion saves its own
/// baseline.
fn add_run_to_baseline(
    store: &RecordFoldersOfPackage,
    run: &BenchProcessRun,
    name: &str,
) -> Result<(), String> {
    if run.cases.is_empty() {
        return Ok(());
    }
    let unsaved = |error: &dyn std::fmt::Display| format!("baseline `{name}`: {error}");
    // Criterion accepts any text as a baseline name.
    let path = store
        .path_of_baseline(&run.environment.baseline_folder_of_device_and_count(), name)
        .map_err(|error| format!("baseline `{name}` is Criterion's alone: {error}"))?;
    let _lock = ExclusiveFileLock::acquire_lock_for_file(&path).map_err(|error| unsaved(&error))?;
    save_baseline::merge_run_into_baseline_file(&path, name, run)
        .map_err(|error| unsaved(&error))?;
    eprintln!("baseline `{name}` saved in {}", path_for_terminal(&path));
    Ok(())
}
