//! The run record of a bench process, which grows while cases run. A bench saves it after every
//! case, so that a crash or Ctrl-C loses none that had finished; a trial once, because a comparison
//! uses whole trials only.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backend::host_timeout;
use crate::exit::ExitReason;
use crate::harness::error::HarnessError;
use crate::record::text::{printable_on_terminal, printable_path};
use crate::record::{CaseRecord, ProcessRun, RecordFileError, file};
use kernelgate_cuda::CaseFailure;
use kernelgate_cuda::observe::telemetry::CardReading;

/// The run record of a bench process while it is filled and written to its file.
#[derive(Clone)]
pub struct RunRecorder {
    state: Arc<Mutex<RecorderState>>,
}

struct RecorderState {
    run: ProcessRun,
    path: PathBuf,
    saving: RecordSaving,
    /// Name of the baseline that is written at the end.
    pending_baseline: Option<String>,
}

/// The time at which the record of a run is written to its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordSaving {
    /// Writes at the start and after every case, synced to the disk.
    AfterEachCase,
    /// The record is written to its file once it is complete, for a program that waits for it.
    WhenComplete,
}

/// Outcome of cases.
pub enum RecordedCaseEvent<'a> {
    /// Event: a case was verified and timed.
    Timed(&'a str, Box<CaseRecord>),
    /// Event: the timed cases of this implementation used this many bytes of device memory.
    DeviceMemory(&'a [&'a str], u64),
    /// Event: cases cannot run on this machine, or did not begin.
    Skipped(&'a [&'a str], &'a str),
    /// Wall seconds that a problem with all its cases took.
    Problem(&'a str, f64),
    /// A case is wrong or failed; its time, if it had one, is removed.
    Failed(&'a str, &'a CaseFailure),
}

impl RunRecorder {
    /// Starts a record. If each case is saved, the empty record is written now: a folder that
    /// cannot be written or a full disk is found before anything is measured.
    pub fn start_recording(
        run: ProcessRun,
        path: PathBuf,
        saving: RecordSaving,
        pending_baseline: Option<String>,
    ) -> Result<RunRecorder, RecordFileError> {
        let state = RecorderState { run, path, saving, pending_baseline };
        state.save_after_case()?;
        Ok(Self { state: Arc::new(Mutex::new(state)) })
    }

    /// Adds the outcome of one or several cases to the run record. Memory and seconds are written
    /// to the file with the next outcome, because writing a long record takes milliseconds.
    ///
    /// # Errors
    /// Fails if the file cannot be written, or a case is one that no record may hold.
    pub fn add(&self, event: RecordedCaseEvent<'_>) -> Result<(), RecordFileError> {
        let with_next =
            matches!(event, RecordedCaseEvent::DeviceMemory(..) | RecordedCaseEvent::Problem(..));
        let mut state = self.lock();
        let run = &mut state.run;
        match event {
            RecordedCaseEvent::Timed(id, case) => drop(run.cases.insert(id.to_owned(), *case)),
            RecordedCaseEvent::DeviceMemory(ids, bytes) => {
                for id in ids {
                    if let Some(case) = run.cases.get_mut(*id) {
                        case.samples.costs.measured_device_bytes = Some(bytes);
                    }
                }
            }
            RecordedCaseEvent::Skipped(ids, reason) => {
                let each = ids.iter().map(|id| ((*id).to_owned(), reason.to_owned()));
                run.skipped.extend(each);
            }
            RecordedCaseEvent::Problem(id, seconds) => {
                run.problems_s.insert(id.to_owned(), seconds);
            }
            RecordedCaseEvent::Failed(id, error) => {
                run.cases.remove(id);
                run.failed.insert(id.to_owned(), error.clone());
            }
        }
        run.environment.gpus.note_libraries();
        if with_next { Ok(()) } else { state.save_after_case() }
    }

    /// Adds the seconds of each activity, of all checks after timing, and of the whole process. The
    /// seconds are written to the file with the next event.
    pub fn add_time_by_activity(
        &self,
        spent_s: BTreeMap<&'static str, f64>,
        checks: Duration,
        whole: Duration,
    ) {
        let sums = [("checks after timing", checks), ("whole", whole)];
        let all = spent_s.into_iter().chain(sums.map(|(name, sum)| (name, sum.as_secs_f64())));
        let named = all.map(|(activity, seconds)| (activity.to_owned(), seconds));
        self.lock().run.spent_s.extend(named);
    }

    /// Marks the run complete, with a last reading of the GPU.
    pub fn mark_complete(&self, telemetry: Option<CardReading>) -> Result<(), RecordFileError> {
        let mut state = self.lock();
        state.run.environment.gpus.note_libraries();
        state.run.telemetry.extend(telemetry);
        state.run.complete = true;
        match state.saving {
            RecordSaving::AfterEachCase => file::write(&state.path, &state.run),
            RecordSaving::WhenComplete => file::write_unsynced(&state.path, &state.run),
        }
    }

    /// The run so far.
    pub fn run(&self) -> ProcessRun {
        self.lock().run.clone()
    }

    /// Path of the run record's file.
    pub fn path(&self) -> PathBuf {
        self.lock().path.clone()
    }

    /// Ends the process on Ctrl-C or a termination signal, between writes: no half-written file,
    /// and no baseline is touched.
    ///
    /// # Errors
    /// Fails if the handler cannot be installed.
    pub fn exit_on_interrupt(&self) -> Result<(), HarnessError> {
        let recorder = self.clone();
        let handler = move || {
            // The lock is held until the process ends, so that no write can begin.
            let state = recorder.lock();
            let baseline = state
                .pending_baseline
                .as_ref()
                .map(|name| format!("; baseline `{name}` is as it was"))
                .unwrap_or_default();
            eprintln!("\ninterrupted{}{baseline}", state.saved_cases_text(": "));
            std::process::exit(ExitReason::INTERRUPTED_EXIT_CODE);
        };
        ctrlc::set_handler(handler).map_err(|error| HarnessError::Interrupts(error.into()))
    }

    /// Ends the process if a launch on the host takes longer than the limit, and records that case
    /// as failed: nothing else ends such a launch.
    pub fn exit_on_endless_launch(&self, limit: Duration) {
        let recorder = self.clone();
        host_timeout::start_watchdog(limit, move |case| {
            let why = format!(
                "a launch had not ended after {} s (--timeout sets this): nothing ends it but the \
                 end of the process",
                limit.as_secs()
            );
            let noted =
                recorder.add(RecordedCaseEvent::Failed(case, &CaseFailure::new("endless", &why)));
            let state = recorder.lock();
            eprintln!("\nfailed: {case}: {why}{}", state.saved_cases_text("; "));
            if let Err(error) = noted {
                eprintln!("{}", printable_on_terminal(&error.to_string()));
            }
            std::process::exit(ExitReason::Regression as i32);
        });
    }

    /// Writes the baseline from the run; an interrupt waits until it is written.
    ///
    /// # Errors
    /// Fails with the error of the closure `write`.
    pub fn save_baseline<E>(
        &self,
        write: impl FnOnce(&ProcessRun) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut state = self.lock();
        write(&state.run)?;
        state.pending_baseline = None;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, RecorderState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RecorderState {
    fn save_after_case(&self) -> Result<(), RecordFileError> {
        match self.saving {
            RecordSaving::AfterEachCase => file::write(&self.path, &self.run),
            RecordSaving::WhenComplete => Ok(()),
        }
    }

    /// The number of cases that are saved, and where; empty if none is saved before the end.
    fn saved_cases_text(&self, before: &str) -> String {
        match self.saving {
            RecordSaving::AfterEachCase => {
                let (cases, path) = (self.run.cases.len(), printable_path(&self.path));
                format!("{before}{cases} finished cases are in {path}")
            }
            RecordSaving::WhenComplete => String::new(),
        }
    }
}
