//! The measurement that Criterion calls around every pass of a routine.

use std::cell::{Cell, RefCell};
use std::time::Instant;

use criterion::Throughput;
use criterion::measurement::{Measurement, ValueFormatter, WallTime};

use kernelgate_cuda::BackendError;
use kernelgate_cuda::driver::stream::foreign_stream::{
    EmptyIntervalReadings, ForeignStream, StreamError,
};
use kernelgate_cuda::driver::stream::raw_stream::RawStream;

use kernelgate_cuda::observe::cupti::{ActivityRecorder, RecordingExtent};
use kernelgate_cuda::observe::telemetry::{CardReading, CardTelemetry};

use super::recording::{self, CriterionRecording, RecordAtExit};
use super::samples::{GpuEventInterval, ProcessSampleLog};
use crate::exit::ExitReason;
use crate::harness::settings::process::CriterionProcessSettings;
use crate::measure::audit::AllowedActions;
use crate::measure::audit::cupti::{self, RecordedPass};
use crate::measure::audit::routine_passes::{CriterionPasses, RECORDED_PASS_HOLD, RoutinePass};
use crate::record::BaselineStore;
use crate::record::text::printable_on_terminal;

/// A measurement of Criterion: the time of a stream, by events.
pub struct GpuTime {
    inner: RefCell<GpuTimeState>,
    formatter: GpuTimeFormatter,
}

struct GpuTimeState {
    stream: ForeignStream,
    /// Readings of an empty stream, measured before the first pass.
    readings: Option<EmptyIntervalReadings>,
    telemetry: Vec<CardReading>,
    passes: CriterionPasses,
    /// The CUPTI recorder during the recorded pass and the pass before it.
    recorder: Option<ActivityRecorder>,
    /// Beginning of the records of the pass that is judged, on CUPTI's clock.
    since: u64,
    /// Whether CUPTI's record of this case is conclusive.
    recorded: bool,
    /// Reason why CUPTI's last record is not conclusive.
    unrecorded: Option<String>,
    log: ProcessSampleLog,
    process: CriterionProcessSettings,
    store: BaselineStore,
    began: Instant,
}

impl GpuTime {
    /// Times work that is enqueued on a stream: its handle as a number, or as a pointer of the type
    /// that the bench's binding has for `CUstream`. The stream must live as long as this
    /// measurement.
    ///
    /// A null or invalid handle ends the process with an error and exit code 2, because Criterion's
    /// macros take no error. Use [`Self::new`] to get the error as a value instead.
    pub fn time_on_stream(handle: impl Into<RawStream>) -> Self {
        Self::new(handle.into()).unwrap_or_else(|error| {
            let error = error.to_string();
            eprintln!("error: failed to time a stream: {}", printable_on_terminal(&error));
            std::process::exit(ExitReason::Usage as i32)
        })
    }

    /// Times the legacy default stream of the current context. The driver names the legacy default
    /// stream by a null handle, so this stream has a constructor of its own.
    pub fn on_legacy_default_stream() -> Self {
        Self::time_on_stream(RawStream::LEGACY_DEFAULT_STREAM)
    }

    /// Times work that is enqueued on a stream.
    ///
    /// # Errors
    /// Fails if the handle is null or no stream, or the device fails.
    pub fn new(stream: RawStream) -> Result<Self, StreamError> {
        // The program `kernelgate` looks for this mark in executables, so the compiler may not
        // remove it.
        std::hint::black_box(recording::CRITERION_MAIN_MARK.as_ptr());
        let process = CriterionProcessSettings::new();
        let store = BaselineStore::discover();
        let inner = GpuTimeState {
            stream: ForeignStream::new(stream, process.timeout)?,
            readings: None,
            telemetry: Vec::new(),
            passes: CriterionPasses::new(AllowedActions::CRITERION_ROUTINE),
            recorder: None,
            since: 0,
            recorded: false,
            unrecorded: None,
            log: ProcessSampleLog::without_samples(&store.criterion),
            process,
            store,
            began: Instant::now(),
        };
        let formatter = GpuTimeFormatter { wall: WallTime, reported: Cell::new(false) };
        Ok(Self { inner: RefCell::new(inner), formatter })
    }

    /// Ends the process because the GPU time of the bench routine cannot be measured.
    fn refuse_routine(&self, inner: &mut GpuTimeState, error: &BackendError) -> ! {
        let case = recording::case_being_measured(&inner.log, &inner.store);
        eprintln!("error: {case}: {}", printable_on_terminal(&error.to_string()));
        if let Err(why) =
            inner.record_measured_cases_at_exit(RecordAtExit::Refused { case, error: error.into() })
        {
            eprintln!("error: {}", printable_on_terminal(&why));
        }
        std::process::exit(ExitReason::Regression as i32)
    }
}

impl GpuTimeState {
    fn begin_interval(&mut self) -> Result<(), BackendError> {
        if self.readings.is_none() {
            self.readings = Some(self.stream.empty_readings()?);
            self.add_telemetry_reading();
        }
        if self.passes.next_attaches() {
            self.attach_cupti();
        }
        if let Some(recorder) = self.recorder.as_ref().filter(|_| self.passes.is_next_recorded()) {
            self.since = recorder.clock_ns();
            self.stream.mark_stream_by_fill()?;
        }
        let hold = self.passes.next_pass_hold();
        self.stream.begin_interval(hold)?;
        self.began = Instant::now();
        Ok(())
    }

    fn attach_cupti(&mut self) {
        match ActivityRecorder::start(RecordingExtent::Operations) {
            Ok(Some(recorder)) => self.recorder = Some(recorder),
            Ok(None) => self.unrecorded = Some("CUPTI is missing".to_owned()),
            Err(error) => self.unrecorded = Some(error.to_string()),
        }
    }

    /// Checks CUPTI's record of one pass of the routine, and detaches CUPTI.
    fn check_cupti_record(
        &mut self,
        recorder: ActivityRecorder,
        pass: RecordedPass,
    ) -> Result<(), BackendError> {
        self.stream.context_busy_time()?;
        let record = recorder.take_records_since(self.since, self.since);
        let detached = recorder.detach_cupti();
        self.unrecorded = match record.and_then(|record| detached.map(|()| record)) {
            Ok(record) => cupti::check_recorded_pass(&record, pass)?,
            Err(lost @ BackendError::Lost(_)) => return Err(lost),
            Err(error) => Some(error.to_string()),
        };
        self.recorded = self.unrecorded.is_none();
        Ok(())
    }

    fn end_interval(&mut self) -> Result<GpuEventInterval, BackendError> {
        let judges = self.passes.is_next_recorded();
        let recorder = self.recorder.take_if(|_| judges).map(|recorder| {
            // Waits so that work on another stream has time to begin.
            std::thread::sleep(cupti::OTHER_STREAM_START_TIME);
            let returned = recorder.clock_ns();
            (recorder, returned)
        });
        let interval = self.stream.end_interval()?;
        let host = self.began.elapsed();
        if let Some((recorder, returned)) = recorder {
            let held = interval.held == Some(true);
            let times_out = self.since + RECORDED_PASS_HOLD.as_nanos() as u64;
            let released = if held { returned } else { times_out };
            self.check_cupti_record(recorder, RecordedPass { held, released })?;
        }
        let asks = self.passes.measures_context_after(&interval);
        let busy = asks.then(|| self.stream.context_busy_time()).transpose()?;
        if let Some(readings) = &self.readings {
            self.passes.add(RoutinePass { interval, host, busy }, readings)?;
        }
        let drained = interval.drained;
        let recorded = self.recorded;
        Ok(GpuEventInterval { ns: interval.elapsed_ns, drained, recorded, by_routine: false })
    }

    fn add_telemetry_reading(&mut self) {
        let telemetry = CardTelemetry::open_card(&self.stream.device_facts().uuid);
        self.telemetry.extend(telemetry.as_ref().map(CardTelemetry::read_card));
    }

    fn record_measured_cases_at_exit(&mut self, ended: RecordAtExit) -> Result<ExitReason, String> {
        self.add_telemetry_reading();
        let least_ns =
            self.readings.map_or(0.0, |readings| readings.least_ns - readings.nothing_ns);
        let telemetry = std::mem::take(&mut self.telemetry);
        let Self { process, store, log, stream, unrecorded, .. } = self;
        let (facts, unrecorded) = (stream.device_facts(), unrecorded.as_deref());
        let recording = CriterionRecording { process, store, log, facts, least_ns, unrecorded };
        recording.record_cases(telemetry, ended)
    }
}

impl Measurement for GpuTime {
    type Intermediate = ();
    type Value = GpuEventInterval;

    fn start(&self) {
        let inner = &mut *self.inner.borrow_mut();
        // Criterion formats times only to report them, so the passes after a report belong to
        // another case.
        if self.formatter.reported.take() {
            inner.passes = CriterionPasses::new(AllowedActions::CRITERION_ROUTINE);
            inner.recorded = false;
        }
        if let Err(error) = inner.begin_interval() {
            self.refuse_routine(inner, &error);
        }
    }

    fn end(&self, (): ()) -> GpuEventInterval {
        let inner = &mut *self.inner.borrow_mut();
        match inner.end_interval() {
            Ok(elapsed) => elapsed,
            Err(error) => self.refuse_routine(inner, &error),
        }
    }

    fn add(&self, a: &GpuEventInterval, b: &GpuEventInterval) -> GpuEventInterval {
        GpuEventInterval {
            ns: a.ns + b.ns,
            drained: a.drained || b.drained,
            recorded: a.recorded && b.recorded,
            by_routine: a.by_routine || b.by_routine,
        }
    }

    fn zero(&self) -> GpuEventInterval {
        GpuEventInterval { recorded: true, ..GpuEventInterval::default() }
    }

    /// Criterion calls this function once for each sample, so the function records the sample.
    fn to_f64(&self, value: &GpuEventInterval) -> f64 {
        self.inner.borrow_mut().log.add(*value);
        value.ns
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        &self.formatter
    }
}

impl Drop for GpuTime {
    fn drop(&mut self) {
        let inner = self.inner.get_mut();
        if inner.log.is_empty() {
            return;
        }
        let panicking = std::thread::panicking();
        let ended = if panicking { RecordAtExit::Interrupted } else { RecordAtExit::Complete };
        let exit = inner.record_measured_cases_at_exit(ended).unwrap_or_else(|why| {
            eprintln!("error: {}", printable_on_terminal(&why));
            ExitReason::Usage
        });
        if exit != ExitReason::Fine && !panicking {
            std::process::exit(exit as i32);
        }
    }
}

/// Formats nanoseconds as Criterion does; the formatted case has ended.
struct GpuTimeFormatter {
    wall: WallTime,
    reported: Cell<bool>,
}

impl ValueFormatter for GpuTimeFormatter {
    fn scale_values(&self, typical_ns: f64, values: &mut [f64]) -> &'static str {
        self.reported.set(true);
        self.wall.formatter().scale_values(typical_ns, values)
    }

    fn scale_throughputs(
        &self,
        typical_ns: f64,
        throughput: &Throughput,
        values: &mut [f64],
    ) -> &'static str {
        self.reported.set(true);
        self.wall.formatter().scale_throughputs(typical_ns, throughput, values)
    }

    fn scale_for_machines(&self, values: &mut [f64]) -> &'static str {
        self.reported.set(true);
        self.wall.formatter().scale_for_machines(values)
    }
}
