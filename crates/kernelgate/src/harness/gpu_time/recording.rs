//! Makes the run record of a bench that uses Criterion with GPU time, from the ids and samples in
//! Criterion's store that this process measured.

use std::path::Path;

use super::samples::{ProcessSampleLog, SampleOrigin};
use crate::display::{self, terminal};
use crate::exit::ExitReason;
use crate::harness::recording::invocation::BenchInvocation;
use crate::harness::recording::save_baseline;
use crate::harness::running::bench_run;
use crate::harness::settings::process::CriterionProcessSettings;
use crate::measure::SampleConditions;
use crate::measure::audit::{RefusedSubject, duration};
use crate::measure::power::PowerRecord;
use crate::record::criterion_store::{self, CriterionStoreResults, StoredCriterionCase};
use crate::record::text::{check_plain_text, on_one_line, printable_on_terminal, printable_path};
use crate::record::{
    BaselineStore, CaseRecord, CaseSamples, Environment, FileLock, ProcessRun, Provenance, file,
};
use crate::stats;
use kernelgate_cuda::driver::device::DeviceFacts;
use kernelgate_cuda::observe::telemetry::CardReading;
use kernelgate_cuda::{BackendError, CaseFailure};

/// Bytes in the executable that let `kernelgate` recognize it without running it; the program then
/// drives it by Criterion's flags.
pub const CRITERION_MAIN_MARK: &str = "\0kernelgate GPU time in Criterion's main\0";

/// End of the process.
pub enum RecordAtExit {
    /// All benchmark functions of the Criterion group ran.
    Complete,
    /// The bench panicked.
    Interrupted,
    /// The measurement of a case was refused.
    Refused {
        /// Id of the case that was measured.
        case: String,
        /// Reason why the case has no time.
        error: CaseFailure,
    },
}

/// Returns the name of the case whose samples are being measured. Criterion reports an id only
/// after its samples are taken.
pub fn case_being_measured(log: &ProcessSampleLog, store: &BaselineStore) -> String {
    let stored = criterion_store::read(&store.criterion).unwrap_or_default();
    let here = stored
        .cases
        .iter()
        .filter(|(_, case)| matches!(log.origin(case), SampleOrigin::Here { .. }));
    let last = here.max_by_key(|(_, case)| case.written);
    last.map_or("the first case".to_owned(), |(id, _)| {
        format!("the case after `{}`", on_one_line(id))
    })
}

/// A bench process whose samples are written to a run record.
pub struct CriterionRecording<'a> {
    /// The process.
    pub process: &'a CriterionProcessSettings,
    /// Folders of runs and baselines of the package.
    pub store: &'a BaselineStore,
    /// Samples of the recording.
    pub log: &'a ProcessSampleLog,
    /// GPU of the recording.
    pub facts: &'a DeviceFacts,
    /// Shortest time of a launch on the timed stream, nanoseconds.
    pub least_ns: f64,
    /// Reason why CUPTI's records of a case were not conclusive; `None` if they were.
    pub unrecorded: Option<&'a str>,
}

impl CriterionRecording<'_> {
    /// Records the process' cases; returns the exit code of the process.
    ///
    /// # Errors
    /// The failure, as the end of a sentence.
    pub fn record_cases(
        &self,
        telemetry: Vec<CardReading>,
        ended: RecordAtExit,
    ) -> Result<ExitReason, String> {
        let Self { process, store, .. } = *self;
        let stored = criterion_store::read(&store.criterion).map_err(|error| error.to_string())?;
        let complete = matches!(ended, RecordAtExit::Complete);
        let mut run = self.measured_run(&stored);
        if let RecordAtExit::Refused { case, error } = ended {
            run.failed.insert(case, error);
        }
        if run.cases.is_empty() && run.failed.is_empty() && run.skipped.is_empty() {
            return Ok(ExitReason::Fine);
        }
        let invocation = BenchInvocation::new(process.session.clone()?);
        let bench = bench_target_name(process.executable.as_deref().unwrap_or(Path::new("")));
        // If the program asked for a record, it gets one record of all groups.
        let earlier = process.record.as_ref().and_then(|path| file::read::<ProcessRun>(path).ok());
        if let Some(earlier) = earlier {
            run.cases.extend(earlier.cases);
            run.skipped.extend(earlier.skipped);
            run.failed.extend(earlier.failed);
        }
        let run = ProcessRun {
            session: invocation.session.clone(),
            package: store.package.clone(),
            invocation: Some(invocation.id.clone()),
            complete,
            provenance: Provenance::detect_from_git(&store.root),
            executable: bench_run::executable_hash(process.executable.as_deref()),
            telemetry,
            ..run
        };
        // Two groups of a bench, each with a measurement of its own, are two runs.
        let stem = |path: &Path| path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let named =
            |path: &Path| ProcessRun { bench: stem(path).unwrap_or(bench.clone()), ..run.clone() };
        let run = if let Some(path) = &process.record {
            let run = named(path);
            file::write(path, &run).map_err(|error| error.to_string())?;
            run
        } else {
            let path = invocation
                .write_bench_record(store, &bench, named)
                .map_err(|error| error.to_string())?;
            let run = named(&path);
            print_run_results(&run, &path, &store.report_page());
            run
        };
        if let Some(name) = &process.save_baseline {
            save_run_baseline(store, &run, name)?;
        }
        Ok(if run.failed.is_empty() { ExitReason::Fine } else { ExitReason::Regression })
    }

    /// Builds the run record of the cases that this process measured. Other cases of the store are
    /// of other benches, or of earlier runs.
    fn measured_run(&self, stored: &CriterionStoreResults) -> ProcessRun {
        let environment = Environment::on_gpus([self.facts]);
        let mut run = ProcessRun::start_now("", "", environment, Provenance::default());
        for (id, case) in &stored.cases {
            match self.log.origin(case) {
                SampleOrigin::Elsewhere => {}
                SampleOrigin::ByRoutine => {
                    let why = "its routine measures the time itself (iter_custom)";
                    run.skipped.insert(on_one_line(id), why.to_owned());
                }
                SampleOrigin::Here { samples, host_bound, recorded } => {
                    let mut record = case_record_from_samples(case, samples, host_bound);
                    let why = self.unrecorded.unwrap_or("no pass was recorded");
                    record.samples.unrecorded = (!recorded).then(|| why.to_owned());
                    let launch_ns = stats::median(&record.samples.per_launch_ns());
                    let duration = duration::check_shortest_time(
                        RefusedSubject::Routine,
                        launch_ns,
                        self.least_ns,
                    );
                    if let Err(why) = duration {
                        run.failed.insert(on_one_line(id), (&BackendError::from(why)).into());
                    } else if let Err(why) = check_plain_text(id) {
                        run.skipped.insert(on_one_line(id), why);
                    } else {
                        run.cases.insert(id.clone(), record);
                    }
                }
            }
        }
        run
    }
}

fn case_record_from_samples(
    case: &StoredCriterionCase,
    samples: usize,
    host_bound: bool,
) -> CaseRecord {
    case.record(CaseSamples {
        launches: case.iterations[..samples].to_vec(),
        elapsed_ns: case.times[..samples].to_vec(),
        conditions: SampleConditions { host_bound, ..SampleConditions::default() },
        power: Some(PowerRecord::not_applicable("Criterion plans the samples of this bench")),
        ..CaseSamples::default()
    })
}

/// Name of the bench target, without the hash that cargo appends.
fn bench_target_name(program: &Path) -> String {
    let stem = program.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let hash = |end: &str| end.len() == 16 && end.bytes().all(|byte| byte.is_ascii_hexdigit());
    match stem.rsplit_once('-') {
        Some((name, end)) if hash(end) && !name.is_empty() => name.to_owned(),
        _ => stem,
    }
}

fn print_run_results(run: &ProcessRun, path: &Path, page: &Path) {
    println!(
        "{}",
        display::runs::results_text(std::slice::from_ref(run), terminal::terminal_columns())
    );
    let (path, page) = (path.display().to_string(), page.display().to_string());
    eprintln!("run recorded in {}", printable_on_terminal(&path));
    eprintln!("`kernelgate report` draws it in {}", printable_on_terminal(&page));
}

/// Adds the run to our baseline of the name under which Criterion saves its own.
fn save_run_baseline(store: &BaselineStore, run: &ProcessRun, name: &str) -> Result<(), String> {
    if run.cases.is_empty() {
        return Ok(());
    }
    let unsaved = |error: &dyn std::fmt::Display| format!("baseline `{name}`: {error}");
    // Criterion takes any name.
    let path = store
        .baseline_path(&run.environment.baseline_folder_name(), name)
        .map_err(|error| format!("baseline `{name}` is Criterion's alone: {error}"))?;
    let _lock = FileLock::acquire_for_file(&path).map_err(|error| unsaved(&error))?;
    save_baseline::save_to_baseline(&path, name, run).map_err(|error| unsaved(&error))?;
    eprintln!("baseline `{name}` saved in {}", printable_path(&path));
    Ok(())
}
