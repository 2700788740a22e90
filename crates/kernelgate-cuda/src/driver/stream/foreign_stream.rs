//! Times work on a CUDA stream that was created by other code (a foreign stream).
//!
//! The [`StreamTimer`] of a foreign stream has two events, and a host function holds the stream.
//! The CUDA context of the foreign stream is current only during a call of this module. This module
//! does not judge the measured intervals.

use std::time::{Duration, Instant};

use cudarc::driver::{DriverError, sys};

use super::raw_stream::RawStreamHandle;
use super::stream_hold::StreamHoldByHostFunction;
use super::stream_timer::StreamTimer;
use super::thread_state;
use super::timed_stream::{self, CurrentCudaContextGuard, OwnOrForeignStream};
use crate::driver::device::{self, GpuProperties, GpuUnusableError};
use crate::driver::driver_error::{driver_error_text, error_for_failed_action};
use crate::driver::gpu_check::{CompilationTarget, architecture_of_gpu};
use crate::{BackendError, CaseFailureReason};

/// The reason why a foreign stream cannot be timed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ForeignStreamError {
    /// The CUDA driver is missing or has no GPU.
    #[error(transparent)]
    Device(#[from] GpuUnusableError),
    /// The stream handle is null, which looks like a handle that was never set.
    #[error(
        "the stream's handle is null; where the legacy default stream is meant, say so: it has a \
         handle of its own"
    )]
    NullHandle,
    /// The handle means a default stream, but no CUDA context is current on the calling thread.
    #[error("no CUDA context is current on this thread, whose default stream would be meant")]
    NoCurrentContext,
    /// The driver does not know the stream handle.
    #[error("{handle:?} is no stream that lives: {driver_error_text}")]
    UnknownStreamHandle {
        /// The stream handle that the caller gave.
        handle: RawStreamHandle,
        /// The driver's error text for the unknown stream handle.
        driver_error_text: String,
    },
    /// The device failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// Durations that events measure around little or no work, in nanoseconds (empty intervals).
/// Measured intervals are compared with the empty intervals, which are never subtracted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmptyIntervalDurations {
    /// Upper quartile of the intervals without work between the two events, with the stream held.
    pub interval_without_work_ns: f64,
    /// Lower quartile of the intervals around a fill of one byte, the smallest command, with the
    /// stream held. The lower quartile.
    pub interval_with_byte_fill_ns: f64,
    /// Upper quartile of the intervals around a wait of the host for the stream, without other
    /// work.
    pub interval_with_host_wait_ns: f64,
}

/// A measured interval between two CUDA events on a foreign stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ForeignStreamInterval {
    /// Time from the first event of the interval to the last event, nanoseconds.
    pub elapsed_ns: f64,
    /// Whether the GPU had finished all earlier work before the last event was enqueued, so that
    /// the interval includes time of the host.
    pub stream_drained_before_end: bool,
    /// Whether the stream was held until the last event was enqueued; `None` if no hold was
    /// requested, false if the hold timed out.
    pub stream_stayed_held: Option<bool>,
}

/// Number of repetitions of each kind of empty interval.
const EMPTY_INTERVAL_REPETITIONS: usize = 15;
/// Longest hold of the stream for an empty interval; enqueueing its commands takes microseconds.
const EMPTY_INTERVAL_HOLD_LIMIT: Duration = Duration::from_millis(20);
/// Longest hold of the stream for an interval that contains only a wait of the host for the stream;
/// the hold ends by this time limit.
const HOST_WAIT_HOLD_LIMIT: Duration = Duration::from_millis(1);

/// Index of the first and of the last event of an interval in the pool.
const FIRST_EVENT_INDEX: usize = 0;
const LAST_EVENT_INDEX: usize = 1;

/// Times work on a CUDA stream that was created by other code.
pub struct ForeignStreamTimer {
    timer: StreamTimer<StreamHoldByHostFunction>,
    gpu_properties: GpuProperties,
}

impl ForeignStreamTimer {
    /// Makes the events. Work between two events that takes longer than `timeout` is treated as
    /// hung.
    ///
    /// # Errors
    /// Fails if the handle is null or not a stream, no context is current for a default stream, or
    /// the driver returns an error.
    pub fn stream_timer_with_timeout(
        stream: RawStreamHandle,
        timeout: Duration,
    ) -> Result<Self, ForeignStreamError> {
        if stream.is_null() {
            return Err(ForeignStreamError::NullHandle);
        }
        device::count_gpus()?;
        let timed = OwnOrForeignStream::ForeignStream {
            stream,
            context: context_of_stream_or_current(stream)?,
        };
        let cu_device = timed.gpu_of_stream()?;
        let facts = architecture_of_gpu(cu_device)
            .and_then(|own| {
                device::read_gpu_properties(cu_device, CompilationTarget::for_precompiled_code(own))
            })
            .map_err(|error| error_for_failed_action("describe the stream's GPU", &error))?;
        let timer = StreamTimer::create_timer_for_stream(
            timed,
            2,
            StreamHoldByHostFunction::hold_for_stream(stream),
            timeout,
        )?;
        Ok(Self { timer, gpu_properties: facts })
    }

    /// The stream's GPU.
    pub const fn gpu_properties(&self) -> &GpuProperties {
        &self.gpu_properties
    }

    /// Measures the empty intervals: around nothing, around a fill of one byte, and around a wait
    /// of the host.
    pub fn measure_empty_intervals(&mut self) -> Result<EmptyIntervalDurations, BackendError> {
        self.with_allocated_byte(Self::measure_empty_intervals_with_byte)
    }

    /// Fills a byte on the stream and waits for it, so that a recorder of the context's operations
    /// (CUPTI) can recognise the stream.
    pub fn mark_stream_with_byte_fill(&mut self) -> Result<(), BackendError> {
        self.with_allocated_byte(|stream, byte| {
            stream.hold_and_enqueue_first_event(None)?;
            stream.enqueue_fill_of_one_byte(byte)?;
            stream.end_interval_and_wait().map(drop)
        })
    }

    /// Allocates a byte of device memory and passes it to `call`, which must wait for its own fills
    /// of the byte.
    fn with_allocated_byte<T>(
        &mut self,
        call: impl FnOnce(&mut Self, sys::CUdeviceptr) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let mut byte = 0;
        {
            let _entered = self.enter_context_of_stream()?;
            // SAFETY: the stream's context is current and the pointer is valid.
            unsafe { sys::cuMemAlloc_v2(&raw mut byte, 1) }
                .result()
                .map_err(|error| error_for_failed_action("allocate a byte", &error))?;
        }
        let outcome = call(self, byte);
        let _entered = self.enter_context_of_stream()?;
        // SAFETY: the byte was allocated above, and every fill of it has finished or the device is
        // lost.
        unsafe { sys::cuMemFree_v2(byte) }
            .result()
            .map_err(|error| error_for_failed_action("free a byte", &error))?;
        outcome
    }

    /// Enqueues the smallest command on the foreign stream: a fill of one byte.
    fn enqueue_fill_of_one_byte(&self, byte: sys::CUdeviceptr) -> Result<(), BackendError> {
        let _entered = self.enter_context_of_stream()?;
        // SAFETY: the stream's context is current, and the byte is allocated.
        unsafe { sys::cuMemsetD8Async(byte, 0, 1, self.timer.timed_stream().driver_handle()) }
            .result()
            .map_err(|error| error_for_failed_action("enqueue a fill", &error))
    }

    fn measure_empty_intervals_with_byte(
        &mut self,
        byte: sys::CUdeviceptr,
    ) -> Result<EmptyIntervalDurations, BackendError> {
        let stream = self.timer.timed_stream().driver_handle();
        let nothing = self.sorted_interval_durations(EMPTY_INTERVAL_HOLD_LIMIT, |_| Ok(()))?;
        let least = self.sorted_interval_durations(EMPTY_INTERVAL_HOLD_LIMIT, |timer| {
            timer.enqueue_fill_of_one_byte(byte)
        })?;
        let waited = self.sorted_interval_durations(HOST_WAIT_HOLD_LIMIT, |timer| {
            let _entered = timer.enter_context_of_stream()?;
            // SAFETY: the CUDA stream is alive.
            unsafe { sys::cuStreamSynchronize(stream) }
                .result()
                .map_err(|error| error_for_failed_action("wait for the stream", &error))
        })?;
        Ok(EmptyIntervalDurations {
            interval_without_work_ns: nothing[EMPTY_INTERVAL_REPETITIONS * 3 / 4],
            interval_with_byte_fill_ns: least[EMPTY_INTERVAL_REPETITIONS / 4],
            interval_with_host_wait_ns: waited[EMPTY_INTERVAL_REPETITIONS * 3 / 4],
        })
    }

    /// Durations of repeated intervals around the work that `enqueue` enqueues, in ascending order.
    fn sorted_interval_durations(
        &mut self,
        hold: Duration,
        enqueue: impl Fn(&Self) -> Result<(), BackendError>,
    ) -> Result<Vec<f64>, BackendError> {
        let once = |stream: &mut Self| -> Result<f64, BackendError> {
            stream.hold_and_enqueue_first_event(Some(hold))?;
            enqueue(stream)?;
            Ok(stream.end_interval_and_wait()?.elapsed_ns)
        };
        // The first repetition is not timed, because the first operation of a kind may load code.
        once(self)?;
        let mut readings =
            (0..EMPTY_INTERVAL_REPETITIONS).map(|_| once(self)).collect::<Result<Vec<_>, _>>()?;
        readings.sort_by(f64::total_cmp);
        Ok(readings)
    }

    /// Enqueues the first event of the interval, behind a hold of the stream if `hold` is a
    /// duration. The stream is held until [`Self::end_interval_and_wait`], but at most for the
    /// duration `hold`.
    ///
    /// # Errors
    /// Fails with [`BackendError::NotTimed`] if the stream is in capture mode, or with an error of
    /// the driver.
    pub fn hold_and_enqueue_first_event(
        &mut self,
        hold: Option<Duration>,
    ) -> Result<(), BackendError> {
        self.require_no_open_capture()?;
        self.timer.hold_stream_and_begin_interval(hold)?;
        self.timer.enqueue_event(FIRST_EVENT_INDEX)
    }

    /// Enqueues the last event of the interval, releases the stream, and waits for the event.
    ///
    /// # Errors
    /// Fails with [`BackendError::DeviceLost`] if the work does not end before the timeout, with
    /// [`BackendError::NotTimed`] if a capture was left open, or if work on the stream failed.
    pub fn end_interval_and_wait(&mut self) -> Result<ForeignStreamInterval, BackendError> {
        let drained = self.enqueue_last_event_and_check_drained();
        // The stream is released even after an error, so that its work does not wait for ever.
        self.timer.release_held_stream();
        let drained = drained?;
        let held = self.timer.enqueue_and_wait_for_end_event()?;
        Ok(ForeignStreamInterval {
            elapsed_ns: self.timer.ns_between_events(FIRST_EVENT_INDEX, LAST_EVENT_INDEX)?,
            stream_drained_before_end: drained,
            stream_stayed_held: held,
        })
    }

    /// Enqueues the last event of the interval, and returns whether the stream had finished all
    /// earlier work before.
    fn enqueue_last_event_and_check_drained(&self) -> Result<bool, BackendError> {
        self.require_no_open_capture()?;
        let entered = self.enter_context_of_stream()?;
        // SAFETY: the CUDA stream is alive.
        let drained = match unsafe { sys::cuStreamQuery(self.timer.timed_stream().driver_handle()) }
            .result()
        {
            Ok(()) => true,
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => false,
            Err(error) => {
                return Err(error_for_failed_action("finish what is on the stream", &error));
            }
        };
        drop(entered);
        self.timer.enqueue_event(LAST_EVENT_INDEX)?;
        Ok(drained)
    }

    /// Waits until all streams of the context are idle, and returns how long that took.
    ///
    /// # Errors
    /// Fails if any work that was enqueued in the context failed.
    pub fn wait_for_context_and_return_duration(&self) -> Result<Duration, BackendError> {
        let _entered = self.enter_context_of_stream()?;
        let started = Instant::now();
        // SAFETY: a CUDA context is current on this thread.
        unsafe { sys::cuCtxSynchronize() }
            .result()
            .map_err(|error| error_for_failed_action("finish what is in the context", &error))?;
        Ok(started.elapsed())
    }

    fn enter_context_of_stream(&self) -> Result<CurrentCudaContextGuard, BackendError> {
        self.timer.timed_stream().enter_stream_context()
    }

    fn require_no_open_capture(&self) -> Result<(), BackendError> {
        let _entered = self.enter_context_of_stream()?;
        match thread_state::query_driver_for_stream_capture(
            self.timer.timed_stream().driver_handle(),
        ) {
            Ok(false) => Ok(()),
            // The driver returns this error for the legacy stream while another stream is in
            // capture mode.
            Ok(true) | Err(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)) => {
                let open = "a capture is open on the stream that is timed";
                Err(BackendError::NotTimed(CaseFailureReason::failure_with_kind_and_sentence(
                    "capture_open",
                    open,
                )))
            }
            Err(error) => {
                Err(error_for_failed_action("ask whether the stream is in capture", &error))
            }
        }
    }
}

/// The CUDA context of a stream; for a default stream, the context that is current on the calling
/// thread.
fn context_of_stream_or_current(
    stream: RawStreamHandle,
) -> Result<sys::CUcontext, ForeignStreamError> {
    if stream.is_default_stream() {
        let context =
            thread_state::context_current_on_thread().ok().filter(|context| !context.is_null());
        return context.ok_or(ForeignStreamError::NoCurrentContext);
    }
    let unknown = |error: DriverError| ForeignStreamError::UnknownStreamHandle {
        handle: stream,
        driver_error_text: driver_error_text(&error),
    };
    timed_stream::context_of_stream(stream).map_err(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instruments::spin_kernel::SpinKernel;
    use crate::testing::lock_first_gpu;

    const TEST_TIMEOUT: Duration = Duration::from_secs(60);

    #[test]
    fn a_null_stream_handle_is_refused_even_without_a_driver() {
        let refused =
            ForeignStreamTimer::stream_timer_with_timeout(RawStreamHandle::from(0), TEST_TIMEOUT)
                .err();
        assert_eq!(refused, Some(ForeignStreamError::NullHandle));
    }

    #[test]
    fn events_on_a_foreign_stream_measure_the_length_of_a_spin_kernel() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let stream = RawStreamHandle::from(device.stream().cu_stream());
        let mut timer =
            ForeignStreamTimer::stream_timer_with_timeout(stream, TEST_TIMEOUT).unwrap();
        assert_eq!(timer.gpu_properties().gpu_uuid, device.gpu_properties().gpu_uuid);
        let readings = timer.measure_empty_intervals().unwrap();
        eprintln!("{readings:?}");
        assert!(
            readings.interval_without_work_ns < readings.interval_with_byte_fill_ns,
            "{readings:?}"
        );
        let spin = SpinKernel::compile_and_allocate_report(&device).unwrap();
        for hold in [None, Some(Duration::from_millis(50))] {
            timer.hold_and_enqueue_first_event(hold).unwrap();
            spin.enqueue_spin(200_000).unwrap();
            let interval = timer.end_interval_and_wait().unwrap();
            eprintln!("{interval:?}");
            assert_eq!(interval.stream_stayed_held, hold.map(|_| true));
            assert!(interval.elapsed_ns > 200_000.0 && interval.elapsed_ns < 2e6, "{interval:?}");
        }
        // The host waits for the stream while it is held, so the hold of one millisecond times out.
        timer.hold_and_enqueue_first_event(Some(Duration::from_millis(1))).unwrap();
        device.synchronize_without_timeout().unwrap();
        assert_eq!(timer.end_interval_and_wait().unwrap().stream_stayed_held, Some(false));
        assert!(timer.wait_for_context_and_return_duration().unwrap() < Duration::from_millis(50));
    }

    #[test]
    fn a_default_stream_belongs_to_the_current_context() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        device.context().bind_to_thread().unwrap();
        for stream in
            [RawStreamHandle::LEGACY_DEFAULT_STREAM, RawStreamHandle::PER_THREAD_DEFAULT_STREAM]
        {
            let mut timer =
                ForeignStreamTimer::stream_timer_with_timeout(stream, TEST_TIMEOUT).unwrap();
            timer.hold_and_enqueue_first_event(None).unwrap();
            assert!(timer.end_interval_and_wait().unwrap().elapsed_ns >= 0.0);
        }
        let elsewhere = std::thread::spawn(|| {
            ForeignStreamTimer::stream_timer_with_timeout(
                RawStreamHandle::LEGACY_DEFAULT_STREAM,
                TEST_TIMEOUT,
            )
            .err()
        });
        assert_eq!(elsewhere.join().unwrap(), Some(ForeignStreamError::NoCurrentContext));
    }
}
