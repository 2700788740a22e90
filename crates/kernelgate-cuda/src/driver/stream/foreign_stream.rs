//! Times work that is enqueued on a stream which other code made.
//!
//! The [`StreamTimer`] of such a stream has two events and is held by a function of the host. The
//! context of the other code is current only during a call. This module does not interpret the
//! measured intervals.

use std::time::{Duration, Instant};

use cudarc::driver::{DriverError, sys};

use super::raw_stream::RawStream;
use super::stream_hold::HostStreamHold;
use super::stream_timer::StreamTimer;
use super::thread_state;
use super::timed_stream::{self, CurrentContext, TimedStream};
use crate::driver::device::{self, DeviceError, DeviceFacts};
use crate::driver::driver_error::{describe, failed};
use crate::driver::gpu_check::{CodeTarget, device_architecture};
use crate::{BackendError, CaseFailure};

/// The reason why a stream cannot be timed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StreamError {
    /// There is no driver, or no GPU.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The null handle, which looks like a handle that was never set.
    #[error(
        "the stream's handle is null; where the legacy default stream is meant, say so: it has a \
         handle of its own"
    )]
    Null,
    /// The stream is a default stream, and no context is current.
    #[error("no CUDA context is current on this thread, whose default stream would be meant")]
    NoContext,
    /// The driver does not know the handle.
    #[error("{handle:?} is no stream that lives: {error}")]
    NoStream {
        /// The handle that the caller gave.
        handle: RawStream,
        /// Text of the driver's error.
        error: String,
    },
    /// The device failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// Durations of intervals between events around little or no work, nanoseconds. Measured intervals
/// are compared with these empty intervals, which are never subtracted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmptyIntervalReadings {
    /// Upper quartile of intervals without work between the events, with the stream held.
    pub nothing_ns: f64,
    /// Duration of a held interval around the smallest command, a fill of one byte. The lower
    /// quartile.
    pub least_ns: f64,
    /// Duration of an interval around nothing but a wait of the host: the upper quartile.
    pub waited_ns: f64,
}

/// A measured interval between two CUDA events.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimedInterval {
    /// Time from the first event of the interval to the last event, nanoseconds.
    pub elapsed_ns: f64,
    /// Whether the GPU had finished all earlier work before the last event was enqueued: it then
    /// waited for the host, whose time is in the interval.
    pub drained: bool,
    /// Whether the stream was held until the last event was enqueued: `None` if the stream was not
    /// to be held, false if the hold timed out.
    pub held: Option<bool>,
}

/// Number of repetitions for each kind of empty interval.
const EMPTY_READINGS_COUNT: usize = 15;
/// How long the stream is held for an empty reading; enqueueing takes microseconds.
const READING_HOLD_TIME: Duration = Duration::from_millis(20);
/// How long the stream is held for a reading whose hold times out.
const WAITED_HOLD_TIME: Duration = Duration::from_millis(1);

/// Indices of the first and the last event of an interval.
const FIRST_EVENT: usize = 0;
const LAST_EVENT: usize = 1;

/// Timer of a stream that other code made.
pub struct ForeignStream {
    timer: StreamTimer<HostStreamHold>,
    facts: DeviceFacts,
}

impl ForeignStream {
    /// Makes the events. Work between two events that takes longer than `timeout` is treated as
    /// hung.
    ///
    /// # Errors
    /// Fails if the handle is null or not a stream, no context is current for a default stream, or
    /// the device fails.
    pub fn new(stream: RawStream, timeout: Duration) -> Result<Self, StreamError> {
        if stream.is_null() {
            return Err(StreamError::Null);
        }
        device::gpu_count()?;
        let timed = TimedStream::Theirs { stream, context: current_stream_context(stream)? };
        let cu_device = timed.device_of_stream()?;
        let facts = device_architecture(cu_device)
            .and_then(|own| device::facts_of(cu_device, CodeTarget::for_compiled_code(own)))
            .map_err(|error| failed("describe the stream's GPU", &error))?;
        let timer = StreamTimer::on(timed, 2, HostStreamHold::new(stream), timeout)?;
        Ok(Self { timer, facts })
    }

    /// The stream's GPU.
    pub const fn device_facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// Measures what events read around nothing, around the least command and around a wait.
    pub fn empty_readings(&mut self) -> Result<EmptyIntervalReadings, BackendError> {
        self.with_device_byte(Self::read_around_memset)
    }

    /// Fills a byte on the stream and waits for it: a mark by which a recorder of the context's
    /// operations recognises the stream.
    pub fn mark_stream_by_fill(&mut self) -> Result<(), BackendError> {
        self.with_device_byte(|stream, byte| {
            stream.begin_interval(None)?;
            stream.enqueue_byte_fill(byte)?;
            stream.end_interval().map(drop)
        })
    }

    /// Passes a byte of device memory to `call`, which must wait for its own fills of the byte.
    fn with_device_byte<T>(
        &mut self,
        call: impl FnOnce(&mut Self, sys::CUdeviceptr) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let mut byte = 0;
        {
            let _entered = self.enter_context()?;
            // SAFETY: the stream's context is current and the pointer is valid.
            unsafe { sys::cuMemAlloc_v2(&raw mut byte, 1) }
                .result()
                .map_err(|error| failed("allocate a byte", &error))?;
        }
        let outcome = call(self, byte);
        let _entered = self.enter_context()?;
        // SAFETY: allocated above, and every fill of it has finished or the device is lost.
        unsafe { sys::cuMemFree_v2(byte) }
            .result()
            .map_err(|error| failed("free a byte", &error))?;
        outcome
    }

    /// Enqueues the smallest command: a fill of one byte.
    fn enqueue_byte_fill(&self, byte: sys::CUdeviceptr) -> Result<(), BackendError> {
        let _entered = self.enter_context()?;
        // SAFETY: the stream's context is current, and the byte is allocated.
        unsafe { sys::cuMemsetD8Async(byte, 0, 1, self.timer.stream().cu()) }
            .result()
            .map_err(|error| failed("enqueue a fill", &error))
    }

    fn read_around_memset(
        &mut self,
        byte: sys::CUdeviceptr,
    ) -> Result<EmptyIntervalReadings, BackendError> {
        let stream = self.timer.stream().cu();
        let nothing = self.interval_readings(READING_HOLD_TIME, |_| Ok(()))?;
        let least =
            self.interval_readings(READING_HOLD_TIME, |timer| timer.enqueue_byte_fill(byte))?;
        let waited = self.interval_readings(WAITED_HOLD_TIME, |timer| {
            let _entered = timer.enter_context()?;
            // SAFETY: the stream lives.
            unsafe { sys::cuStreamSynchronize(stream) }
                .result()
                .map_err(|error| failed("wait for the stream", &error))
        })?;
        Ok(EmptyIntervalReadings {
            nothing_ns: nothing[EMPTY_READINGS_COUNT * 3 / 4],
            least_ns: least[EMPTY_READINGS_COUNT / 4],
            waited_ns: waited[EMPTY_READINGS_COUNT * 3 / 4],
        })
    }

    /// Durations of repeated intervals around equal work, in ascending order.
    fn interval_readings(
        &mut self,
        hold: Duration,
        enqueue: impl Fn(&Self) -> Result<(), BackendError>,
    ) -> Result<Vec<f64>, BackendError> {
        let once = |stream: &mut Self| -> Result<f64, BackendError> {
            stream.begin_interval(Some(hold))?;
            enqueue(stream)?;
            Ok(stream.end_interval()?.elapsed_ns)
        };
        // The first operation of a kind may load code, so it is not timed.
        once(self)?;
        let mut readings =
            (0..EMPTY_READINGS_COUNT).map(|_| once(self)).collect::<Result<Vec<_>, _>>()?;
        readings.sort_by(f64::total_cmp);
        Ok(readings)
    }

    /// Enqueues the first event, behind a hold of the stream if `hold` is a time. The stream is
    /// held until [`Self::end_interval`], and at most for the given time.
    ///
    /// # Errors
    /// Fails if the driver refuses; [`BackendError::NotTimed`] if the stream is in capture.
    pub fn begin_interval(&mut self, hold: Option<Duration>) -> Result<(), BackendError> {
        self.check_no_capture()?;
        self.timer.begin_interval(hold)?;
        self.timer.record_event(FIRST_EVENT)
    }

    /// Enqueues the last event of the interval, releases the stream, and waits for the event.
    ///
    /// # Errors
    /// Fails if something on the stream failed; [`BackendError::Lost`] if it does not end in time;
    /// [`BackendError::NotTimed`] if a capture was left open.
    pub fn end_interval(&mut self) -> Result<TimedInterval, BackendError> {
        let drained = self.enqueue_last_event();
        // The stream is released on failure too, so that nothing waits for ever.
        self.timer.release();
        let drained = drained?;
        let held = self.timer.mark_end_and_wait()?;
        Ok(TimedInterval {
            elapsed_ns: self.timer.elapsed_ns(FIRST_EVENT, LAST_EVENT)?,
            drained,
            held,
        })
    }

    /// Enqueues the last event. Returns whether the stream had finished all earlier work.
    fn enqueue_last_event(&self) -> Result<bool, BackendError> {
        self.check_no_capture()?;
        let entered = self.enter_context()?;
        // SAFETY: the stream lives.
        let drained = match unsafe { sys::cuStreamQuery(self.timer.stream().cu()) }.result() {
            Ok(()) => true,
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => false,
            Err(error) => return Err(failed("finish what is on the stream", &error)),
        };
        drop(entered);
        self.timer.record_event(LAST_EVENT)?;
        Ok(drained)
    }

    /// Measures how long the context is busy from now on, on all streams.
    ///
    /// # Errors
    /// Fails if enqueued work of the context failed.
    pub fn context_busy_time(&self) -> Result<Duration, BackendError> {
        let _entered = self.enter_context()?;
        let started = Instant::now();
        // SAFETY: a CUDA context is current on this thread.
        unsafe { sys::cuCtxSynchronize() }
            .result()
            .map_err(|error| failed("finish what is in the context", &error))?;
        Ok(started.elapsed())
    }

    fn enter_context(&self) -> Result<CurrentContext, BackendError> {
        self.timer.stream().enter_context()
    }

    fn check_no_capture(&self) -> Result<(), BackendError> {
        let _entered = self.enter_context()?;
        match thread_state::capture_status(self.timer.stream().cu()) {
            Ok(false) => Ok(()),
            // The driver's answer for the legacy stream while another stream captures.
            Ok(true) | Err(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)) => {
                let open = "a capture is open on the stream that is timed";
                Err(BackendError::NotTimed(CaseFailure::new("capture_open", open)))
            }
            Err(error) => Err(failed("ask whether the stream is in capture", &error)),
        }
    }
}

/// The context of a stream; for a default stream, the current context.
fn current_stream_context(stream: RawStream) -> Result<sys::CUcontext, StreamError> {
    if stream.depends_on_current_context() {
        let context = thread_state::current_context().ok().filter(|context| !context.is_null());
        return context.ok_or(StreamError::NoContext);
    }
    let unknown =
        |error: DriverError| StreamError::NoStream { handle: stream, error: describe(&error) };
    timed_stream::context_of_stream(stream).map_err(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instruments::spin_kernel::SpinKernel;
    use crate::testing::lock_first_gpu;

    const STREAM_TIMEOUT: Duration = Duration::from_secs(60);

    #[test]
    fn a_null_stream_handle_is_refused_even_without_a_driver() {
        let refused = ForeignStream::new(RawStream::from(0), STREAM_TIMEOUT).err();
        assert_eq!(refused, Some(StreamError::Null));
    }

    #[test]
    fn events_on_a_foreign_stream_measure_the_length_of_a_spin_kernel() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let stream = RawStream::from(device.stream().cu_stream());
        let mut timer = ForeignStream::new(stream, STREAM_TIMEOUT).unwrap();
        assert_eq!(timer.device_facts().uuid, device.facts().uuid);
        let readings = timer.empty_readings().unwrap();
        eprintln!("{readings:?}");
        assert!(readings.nothing_ns < readings.least_ns, "{readings:?}");
        let spin = SpinKernel::new(&device).unwrap();
        for hold in [None, Some(Duration::from_millis(50))] {
            timer.begin_interval(hold).unwrap();
            spin.launch(200_000).unwrap();
            let interval = timer.end_interval().unwrap();
            eprintln!("{interval:?}");
            assert_eq!(interval.held, hold.map(|_| true));
            assert!(interval.elapsed_ns > 200_000.0 && interval.elapsed_ns < 2e6, "{interval:?}");
        }
        // The host waits for the stream, so the hold of one millisecond times out.
        timer.begin_interval(Some(Duration::from_millis(1))).unwrap();
        device.synchronize_stream().unwrap();
        assert_eq!(timer.end_interval().unwrap().held, Some(false));
        assert!(timer.context_busy_time().unwrap() < Duration::from_millis(50));
    }

    #[test]
    fn a_default_stream_belongs_to_the_current_context() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        device.context().bind_to_thread().unwrap();
        for stream in [RawStream::LEGACY_DEFAULT_STREAM, RawStream::PER_THREAD_DEFAULT] {
            let mut timer = ForeignStream::new(stream, STREAM_TIMEOUT).unwrap();
            timer.begin_interval(None).unwrap();
            assert!(timer.end_interval().unwrap().elapsed_ns >= 0.0);
        }
        let elsewhere = std::thread::spawn(|| {
            ForeignStream::new(RawStream::LEGACY_DEFAULT_STREAM, STREAM_TIMEOUT).err()
        });
        assert_eq!(elsewhere.join().unwrap(), Some(StreamError::NoContext));
    }
}
