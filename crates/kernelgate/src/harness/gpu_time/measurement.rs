//! The Criterion measurement that times the GPU work of each pass of a routine.

use std::cell::{Cell, RefCell};
use std::time::Instant;

use criterion::Throughput;
use criterion::measurement::{Measurement, ValueFormatter, WallTime};

use kernelgate_cuda::BackendError;
use kernelgate_cuda::driver::stream::foreign_stream::{
    EmptyIntervalDurations, ForeignStreamError, ForeignStreamTimer,
};
use kernelgate_cuda::driver::stream::raw_stream::RawStreamHandle;

use kernelgate_cuda::observe::cupti::{CuptiActivityRecorder, CuptiRecordingExtent};
use kernelgate_cuda::observe::telemetry::{CardTelemetryByNvml, GpuCardReading};

use super::recording::{self, CriterionRunToRecord, HowCriterionBenchEnded};
use super::samples::{GpuTimeSample, LogOfMeasuredSamples};
use crate::exit::ProcessExitReason;
use crate::harness::settings::process::SettingsOfCriterionBench;
use crate::measure::audit::AllowedActionsOfTimedCode;
use crate::measure::audit::cupti::{self, CuptiRecordedRoutinePass};
use crate::measure::audit::routine_passes::{
    CUPTI_RECORDED_PASS_STREAM_HOLD, CriterionPassAudit, CriterionPassMeasurement,
    is_held_interval_empty,
};
use crate::record::RecordFoldersOfPackage;
use crate::record::text::clean_message_for_terminal;

/// A Criterion measurement of GPU time: CUDA events on the stream on which the routine enqueues its
/// work.
pub struct GpuTimeMeasurement {
    state: RefCell<GpuTimeMeasurementState>,
    formatter: FormatterThatNotesReports,
}

struct GpuTimeMeasurementState {
    stream: ForeignStreamTimer,
    /// Times of empty event intervals on the stream, measured before the first pass.
    empty_interval_durations: Option<EmptyIntervalDurations>,
    telemetry: Vec<GpuCardReading>,
    pass_audit: CriterionPassAudit,
    /// The CUPTI recorder; present during the recorded pass and the pass before it.
    recorder: Option<CuptiActivityRecorder>,
    /// Time on CUPTI's clock at which the records of the audited pass begin.
    audited_pass_start_cupti_ns: u64,
    /// Whether CUPTI's record of this case was conclusive.
    cupti_record_was_conclusive: bool,
    /// Why CUPTI's last record was inconclusive.
    reason_without_cupti_record: Option<String>,
    sample_log: LogOfMeasuredSamples,
    bench_settings: SettingsOfCriterionBench,
    store: RecordFoldersOfPackage,
    interval_start: Instant,
}

impl GpuTimeMeasurement {
    /// Times work that the bench enqueues on an existing stream, given its `CUstream` as a number
    /// or as a pointer of the bench's own binding. The stream must exist as long as this
    /// measurement.
    ///
    /// A null or invalid handle ends the process with an error and exit code 2, because Criterion's
    /// macros cannot pass on errors. [`Self::new`] returns the error instead of ending the process.
    pub fn time_on_stream(handle: impl Into<RawStreamHandle>) -> Self {
        Self::new(handle.into()).unwrap_or_else(|error| {
            let error = error.to_string();
            eprintln!("error: failed to time a stream: {}", clean_message_for_terminal(&error));
            std::process::exit(ProcessExitReason::InvalidUsageOrInput as i32)
        })
    }

    /// Times work on the legacy default stream of the current context. The handle of the legacy
    /// default stream is null, so this stream has its own constructor.
    pub fn on_legacy_default_stream() -> Self {
        Self::time_on_stream(RawStreamHandle::LEGACY_DEFAULT_STREAM)
    }

    /// Times work that the bench enqueues on an existing stream.
    ///
    /// # Errors
    /// Fails if the handle is null or no stream, or if the GPU fails.
    pub fn new(stream: RawStreamHandle) -> Result<Self, ForeignStreamError> {
        // The program `kernelgate` searches executables for this mark, so the compiler must not
        // remove it.
        std::hint::black_box(recording::MARK_OF_CRITERION_BENCH_EXECUTABLE.as_ptr());
        let process = SettingsOfCriterionBench::from_flags_and_environment();
        let store = RecordFoldersOfPackage::record_folders_of_running_package();
        let inner = GpuTimeMeasurementState {
            stream: ForeignStreamTimer::stream_timer_with_timeout(stream, process.stream_timeout)?,
            empty_interval_durations: None,
            telemetry: Vec::new(),
            pass_audit: CriterionPassAudit::new(
                AllowedActionsOfTimedCode::ALLOWED_IN_CRITERION_ROUTINE,
            ),
            recorder: None,
            audited_pass_start_cupti_ns: 0,
            cupti_record_was_conclusive: false,
            reason_without_cupti_record: None,
            sample_log: LogOfMeasuredSamples::empty_log_for_store(&store.criterion_folder),
            bench_settings: process,
            store,
            interval_start: Instant::now(),
        };
        let formatter = FormatterThatNotesReports {
            wall_time_formatter: WallTime,
            has_case_been_reported: Cell::new(false),
        };
        Ok(Self { state: RefCell::new(inner), formatter })
    }

    /// Records the measured cases and ends the process, because the GPU time of the routine cannot
    /// be measured correctly.
    fn end_process_without_time_of_routine(
        &self,
        inner: &mut GpuTimeMeasurementState,
        error: &BackendError,
    ) -> ! {
        let case = recording::description_of_case_being_measured(&inner.sample_log, &inner.store);
        eprintln!("error: {case}: {}", clean_message_for_terminal(&error.to_string()));
        if let Err(why) = inner.write_run_record_at_exit(HowCriterionBenchEnded::TimingRefused {
            case_id: case,
            error: error.into(),
        }) {
            eprintln!("error: {}", clean_message_for_terminal(&why));
        }
        std::process::exit(ProcessExitReason::Regression as i32)
    }
}

impl GpuTimeMeasurementState {
    fn begin_gpu_interval(&mut self) -> Result<(), BackendError> {
        if self.empty_interval_durations.is_none() {
            self.empty_interval_durations = Some(self.stream.measure_empty_intervals()?);
            self.add_card_sensor_reading();
        }
        if self.pass_audit.must_attach_cupti_before_next_pass() {
            self.start_cupti_recording();
        }
        if let Some(recorder) =
            self.recorder.as_ref().filter(|_| self.pass_audit.must_cupti_record_next_pass())
        {
            self.audited_pass_start_cupti_ns = recorder.record_clock_now_ns();
            self.stream.mark_stream_with_byte_fill()?;
        }
        let hold = self.pass_audit.next_pass_stream_hold();
        self.stream.hold_and_enqueue_first_event(hold)?;
        self.interval_start = Instant::now();
        Ok(())
    }

    fn start_cupti_recording(&mut self) {
        match CuptiActivityRecorder::start_cupti_recording(CuptiRecordingExtent::GpuOperations) {
            Ok(Some(recorder)) => self.recorder = Some(recorder),
            Ok(None) => self.reason_without_cupti_record = Some("CUPTI is missing".to_owned()),
            Err(error) => self.reason_without_cupti_record = Some(error.to_string()),
        }
    }

    /// Checks CUPTI's record of one pass of the routine for work on other streams, and detaches
    /// CUPTI.
    fn check_pass_by_cupti_and_detach(
        &mut self,
        recorder: CuptiActivityRecorder,
        pass: CuptiRecordedRoutinePass,
    ) -> Result<(), BackendError> {
        self.stream.wait_for_context_and_return_duration()?;
        let record = recorder.take_new_records_since(
            self.audited_pass_start_cupti_ns,
            self.audited_pass_start_cupti_ns,
        );
        let detached = recorder.end_recording_and_detach_cupti();
        self.reason_without_cupti_record = match record.and_then(|record| detached.map(|()| record))
        {
            Ok(record) => cupti::check_routine_pass_streams_with_cupti(&record, pass)?,
            Err(lost @ BackendError::DeviceLost(_)) => return Err(lost),
            Err(error) => Some(error.to_string()),
        };
        self.cupti_record_was_conclusive = self.reason_without_cupti_record.is_none();
        Ok(())
    }

    fn end_gpu_interval_and_audit_pass(&mut self) -> Result<GpuTimeSample, BackendError> {
        let judges = self.pass_audit.must_cupti_record_next_pass();
        let recorder = self.recorder.take_if(|_| judges).map(|recorder| {
            // The host sleeps first, so that work on another stream has time to begin and be
            // noticed.
            std::thread::sleep(cupti::WAIT_FOR_OTHER_STREAM_START);
            let returned = recorder.record_clock_now_ns();
            (recorder, returned)
        });
        let interval = self.stream.end_interval_and_wait()?;
        let host = self.interval_start.elapsed();
        if let Some((recorder, returned)) = recorder {
            let held = interval.stream_stayed_held == Some(true);
            let times_out = self.audited_pass_start_cupti_ns
                + CUPTI_RECORDED_PASS_STREAM_HOLD.as_nanos() as u64;
            let released = if held { returned } else { times_out };
            self.check_pass_by_cupti_and_detach(
                recorder,
                CuptiRecordedRoutinePass { stream_stayed_held: held, release_cupti_ns: released },
            )?;
        }
        let asks = self.pass_audit.must_measure_context_busy_time_after(&interval);
        let busy = asks.then(|| self.stream.wait_for_context_and_return_duration()).transpose()?;
        // Empty intervals were measured on an idle GPU, whose clock may have been low: they are
        // measured again before a pass counts as empty.
        if self
            .empty_interval_durations
            .is_some_and(|readings| is_held_interval_empty(&interval, &readings))
        {
            self.empty_interval_durations = Some(self.stream.measure_empty_intervals()?);
        }
        if let Some(readings) = &self.empty_interval_durations {
            self.pass_audit.add_finished_pass(
                CriterionPassMeasurement {
                    interval,
                    pass_host_time: host,
                    context_busy_time: busy,
                },
                readings,
            )?;
        }
        let drained = interval.stream_drained_before_end;
        let recorded = self.cupti_record_was_conclusive;
        Ok(GpuTimeSample {
            elapsed_ns: interval.elapsed_ns,
            gpu_drained_before_end: drained,
            cupti_record_was_conclusive: recorded,
            timed_by_routine: false,
        })
    }

    fn add_card_sensor_reading(&mut self) {
        let telemetry =
            CardTelemetryByNvml::open_card_by_uuid(&self.stream.gpu_properties().gpu_uuid);
        self.telemetry.extend(telemetry.as_ref().map(CardTelemetryByNvml::read_card_sensors));
    }

    fn write_run_record_at_exit(
        &mut self,
        ended: HowCriterionBenchEnded,
    ) -> Result<ProcessExitReason, String> {
        self.add_card_sensor_reading();
        let least_ns = self.empty_interval_durations.map_or(0.0, |readings| {
            readings.interval_with_byte_fill_ns - readings.interval_without_work_ns
        });
        let telemetry = std::mem::take(&mut self.telemetry);
        let Self {
            bench_settings: process,
            store,
            sample_log,
            stream,
            reason_without_cupti_record: unrecorded,
            ..
        } = self;
        let (facts, unrecorded) = (stream.gpu_properties(), unrecorded.as_deref());
        let recording = CriterionRunToRecord {
            process,
            store,
            sample_log,
            gpu_properties: facts,
            shortest_measurable_launch_ns: least_ns,
            reason_without_cupti_record: unrecorded,
        };
        recording.write_record_of_measured_cases(telemetry, ended)
    }
}

impl Measurement for GpuTimeMeasurement {
    type Intermediate = ();
    type Value = GpuTimeSample;

    fn start(&self) {
        let inner = &mut *self.state.borrow_mut();
        // Criterion formats times only for reports, so the passes after a report belong to the next
        // case.
        if self.formatter.has_case_been_reported.take() {
            inner.pass_audit =
                CriterionPassAudit::new(AllowedActionsOfTimedCode::ALLOWED_IN_CRITERION_ROUTINE);
            inner.cupti_record_was_conclusive = false;
        }
        if let Err(error) = inner.begin_gpu_interval() {
            self.end_process_without_time_of_routine(inner, &error);
        }
    }

    fn end(&self, (): ()) -> GpuTimeSample {
        let inner = &mut *self.state.borrow_mut();
        match inner.end_gpu_interval_and_audit_pass() {
            Ok(elapsed) => elapsed,
            Err(error) => self.end_process_without_time_of_routine(inner, &error),
        }
    }

    fn add(&self, a: &GpuTimeSample, b: &GpuTimeSample) -> GpuTimeSample {
        GpuTimeSample {
            elapsed_ns: a.elapsed_ns + b.elapsed_ns,
            gpu_drained_before_end: a.gpu_drained_before_end || b.gpu_drained_before_end,
            cupti_record_was_conclusive: a.cupti_record_was_conclusive
                && b.cupti_record_was_conclusive,
            timed_by_routine: a.timed_by_routine || b.timed_by_routine,
        }
    }

    fn zero(&self) -> GpuTimeSample {
        GpuTimeSample { cupti_record_was_conclusive: true, ..GpuTimeSample::default() }
    }

    /// Criterion calls this function exactly once per sample, so the sample is logged here.
    fn to_f64(&self, value: &GpuTimeSample) -> f64 {
        self.state.borrow_mut().sample_log.add_sample(*value);
        value.elapsed_ns
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        &self.formatter
    }
}

impl Drop for GpuTimeMeasurement {
    fn drop(&mut self) {
        let inner = self.state.get_mut();
        if inner.sample_log.has_no_samples() {
            return;
        }
        let panicking = std::thread::panicking();
        let ended = if panicking {
            HowCriterionBenchEnded::BenchPanicked
        } else {
            HowCriterionBenchEnded::AllFunctionsRan
        };
        let exit = inner.write_run_record_at_exit(ended).unwrap_or_else(|why| {
            eprintln!("error: {}", clean_message_for_terminal(&why));
            ProcessExitReason::InvalidUsageOrInput
        });
        if exit != ProcessExitReason::Success && !panicking {
            std::process::exit(exit as i32);
        }
    }
}

/// Formats nanoseconds like Criterion, and notes that Criterion has reported the case.
struct FormatterThatNotesReports {
    wall_time_formatter: WallTime,
    has_case_been_reported: Cell<bool>,
}

impl ValueFormatter for FormatterThatNotesReports {
    fn scale_values(&self, typical_ns: f64, values: &mut [f64]) -> &'static str {
        self.has_case_been_reported.set(true);
        self.wall_time_formatter.formatter().scale_values(typical_ns, values)
    }

    fn scale_throughputs(
        &self,
        typical_ns: f64,
        throughput: &Throughput,
        values: &mut [f64],
    ) -> &'static str {
        self.has_case_been_reported.set(true);
        self.wall_time_formatter.formatter().scale_throughputs(typical_ns, throughput, values)
    }

    fn scale_for_machines(&self, values: &mut [f64]) -> &'static str {
        self.has_case_been_reported.set(true);
        self.wall_time_formatter.formatter().scale_for_machines(values)
    }
}
