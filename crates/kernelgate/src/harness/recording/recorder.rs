//! The run record of a bench process, which is updated as cases finish. A bench run saves the
//! record after every case, so that a crash or Ctrl-C loses no finished case; a trial saves it once
//! at the end.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backend::host_timeout;
use crate::exit::ProcessExitReason;
use crate::harness::error::HarnessError;
use crate::record::text::{clean_message_for_terminal, path_for_terminal};
use crate::record::{BenchProcessRun, CaseRecordWithSamples, RecordFileError, file};
use kernelgate_cuda::CaseFailureReason;
use kernelgate_cuda::observe::telemetry::GpuCardReading;

/// The run record of a bench process, shared with the interrupt handler while cases run.
#[derive(Clone)]
pub struct SharedRunRecord {
    state: Arc<Mutex<RunRecordAndFile>>,
}

struct RunRecordAndFile {
    run: BenchProcessRun,
    record_path: PathBuf,
    saving: WhenRecordIsSaved,
    /// Name of the baseline that the run will be saved to at the end.
    pending_baseline_name: Option<String>,
}

/// Times at which the run record is written to its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenRecordIsSaved {
    /// The record is written at the start and after every case, and flushed to the disk.
    SavedAfterEachCase,
    /// The record is written once when it is complete, for a program that waits for it.
    SavedWhenComplete,
}

/// Outcome of cases.
pub enum CaseOutcomeToRecord<'a> {
    /// A case was verified and timed.
    Timed(&'a str, Box<CaseRecordWithSamples>),
    /// Bytes of device memory that the timed cases of one implementation used.
    DeviceMemoryBytes(&'a [&'a str], u64),
    /// Cases were skipped: they cannot run on this machine, or did not begin.
    Skipped(&'a [&'a str], &'a str),
    /// Wall seconds that a problem took with all of its cases.
    ProblemWallSeconds(&'a str, f64),
    /// A case failed or has wrong outputs; its time is removed from the record.
    Failed(&'a str, &'a CaseFailureReason),
}

impl SharedRunRecord {
    /// Starts a record. With [`WhenRecordIsSaved::SavedAfterEachCase`], the empty record is written
    /// at once, so that an unwritable folder or a full disk is found before measuring.
    pub fn begin_run_record(
        run: BenchProcessRun,
        path: PathBuf,
        saving: WhenRecordIsSaved,
        pending_baseline: Option<String>,
    ) -> Result<SharedRunRecord, RecordFileError> {
        let state = RunRecordAndFile {
            run,
            record_path: path,
            saving,
            pending_baseline_name: pending_baseline,
        };
        state.write_record_if_saved_after_each_case()?;
        Ok(Self { state: Arc::new(Mutex::new(state)) })
    }

    /// Adds the outcome of one or several cases to the run record. Device memory and wall seconds
    /// are written to the file only with the next outcome, because writing a long record takes
    /// milliseconds.
    ///
    /// # Errors
    /// Fails if the file cannot be written, or the record does not accept the case.
    pub fn add_outcome(&self, event: CaseOutcomeToRecord<'_>) -> Result<(), RecordFileError> {
        let with_next = matches!(
            event,
            CaseOutcomeToRecord::DeviceMemoryBytes(..)
                | CaseOutcomeToRecord::ProblemWallSeconds(..)
        );
        let mut state = self.lock_state();
        let run = &mut state.run;
        match event {
            CaseOutcomeToRecord::Timed(id, case) => drop(run.cases.insert(id.to_owned(), *case)),
            CaseOutcomeToRecord::DeviceMemoryBytes(ids, bytes) => {
                for id in ids {
                    if let Some(case) = run.cases.get_mut(*id) {
                        case.samples.costs.measured_device_bytes = Some(bytes);
                    }
                }
            }
            CaseOutcomeToRecord::Skipped(ids, reason) => {
                let each = ids.iter().map(|id| ((*id).to_owned(), reason.to_owned()));
                run.skipped.extend(each);
            }
            CaseOutcomeToRecord::ProblemWallSeconds(id, seconds) => {
                run.wall_s_by_problem.insert(id.to_owned(), seconds);
            }
            CaseOutcomeToRecord::Failed(id, error) => {
                run.cases.remove(id);
                run.failed.insert(id.to_owned(), error.clone());
            }
        }
        run.environment.gpus.record_opened_libraries_of_each_gpu();
        if with_next { Ok(()) } else { state.write_record_if_saved_after_each_case() }
    }

    /// Adds the seconds of each activity, of all checks after timing, and of the whole process to
    /// the record. The seconds are written to the file when the record is saved next.
    pub fn add_seconds_by_activity(
        &self,
        spent_s: BTreeMap<&'static str, f64>,
        checks: Duration,
        whole: Duration,
    ) {
        let sums = [("checks after timing", checks), ("whole", whole)];
        let all = spent_s.into_iter().chain(sums.map(|(name, sum)| (name, sum.as_secs_f64())));
        let named = all.map(|(activity, seconds)| (activity.to_owned(), seconds));
        self.lock_state().run.wall_s_by_activity.extend(named);
    }

    /// Marks the run record as complete, adds a last GPU reading, and writes the file.
    pub fn mark_complete_and_write(
        &self,
        telemetry: Option<GpuCardReading>,
    ) -> Result<(), RecordFileError> {
        let mut state = self.lock_state();
        state.run.environment.gpus.record_opened_libraries_of_each_gpu();
        state.run.telemetry.extend(telemetry);
        state.run.ended_normally = true;
        match state.saving {
            WhenRecordIsSaved::SavedAfterEachCase => {
                file::write_record_atomically(&state.record_path, &state.run)
            }
            WhenRecordIsSaved::SavedWhenComplete => {
                file::write_record_without_sync(&state.record_path, &state.run)
            }
        }
    }

    /// Returns a copy of the run record with the outcomes so far.
    pub fn copy_of_run(&self) -> BenchProcessRun {
        self.lock_state().run.clone()
    }

    /// Path of the run record's file.
    pub fn record_path(&self) -> PathBuf {
        self.lock_state().record_path.clone()
    }

    /// Installs a handler that ends the process on Ctrl-C or a termination signal between writes,
    /// so that no file is half-written and no baseline changes.
    ///
    /// # Errors
    /// Fails if the handler cannot be installed.
    pub fn exit_between_writes_on_interrupt(&self) -> Result<(), HarnessError> {
        let recorder = self.clone();
        let handler = move || {
            // The handler holds the lock until the process ends, so that no write can begin.
            let state = recorder.lock_state();
            let baseline = state
                .pending_baseline_name
                .as_ref()
                .map(|name| format!("; baseline `{name}` is as it was"))
                .unwrap_or_default();
            eprintln!("\ninterrupted{}{baseline}", state.saved_case_count_and_path_text(": "));
            std::process::exit(ProcessExitReason::INTERRUPTED_EXIT_CODE);
        };
        ctrlc::set_handler(handler)
            .map_err(|error| HarnessError::InterruptHandlerNotInstalled(error.into()))
    }

    /// Starts a watchdog that records a case as failed and ends the process if a launch on the host
    /// exceeds the limit; nothing else can end such a launch.
    pub fn exit_on_host_launch_timeout(&self, limit: Duration) {
        let recorder = self.clone();
        host_timeout::start_host_launch_watchdog(limit, move |case| {
            let why = format!(
                "a launch had not ended after {} s (--timeout sets this): nothing ends it but the \
                 end of the process",
                limit.as_secs()
            );
            let noted = recorder.add_outcome(CaseOutcomeToRecord::Failed(
                case,
                &CaseFailureReason::failure_with_kind_and_sentence("endless", &why),
            ));
            let state = recorder.lock_state();
            eprintln!("\nfailed: {case}: {why}{}", state.saved_case_count_and_path_text("; "));
            if let Err(error) = noted {
                eprintln!("{}", clean_message_for_terminal(&error.to_string()));
            }
            std::process::exit(ProcessExitReason::Regression as i32);
        });
    }

    /// Saves the run to a baseline with the closure `write`; an interrupt waits until the baseline
    /// is written.
    ///
    /// # Errors
    /// Fails with the error of `write`.
    pub fn save_baseline_without_interruption<E>(
        &self,
        write: impl FnOnce(&BenchProcessRun) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut state = self.lock_state();
        write(&state.run)?;
        state.pending_baseline_name = None;
        Ok(())
    }

    fn lock_state(&self) -> MutexGuard<'_, RunRecordAndFile> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RunRecordAndFile {
    fn write_record_if_saved_after_each_case(&self) -> Result<(), RecordFileError> {
        match self.saving {
            WhenRecordIsSaved::SavedAfterEachCase => {
                file::write_record_atomically(&self.record_path, &self.run)
            }
            WhenRecordIsSaved::SavedWhenComplete => Ok(()),
        }
    }

    /// Text with the number of saved cases and the path of the record; empty if the record is saved
    /// only at the end.
    fn saved_case_count_and_path_text(&self, before: &str) -> String {
        match self.saving {
            WhenRecordIsSaved::SavedAfterEachCase => {
                let (cases, path) = (self.run.cases.len(), path_for_terminal(&self.record_path));
                format!("{before}{cases} finished cases are in {path}")
            }
            WhenRecordIsSaved::SavedWhenComplete => String::new(),
        }
    }
}
