//! Events on a stream that other code made, around whatever that code enqueues.
//!
//! Everything is made here and in advance: two events in the stream's own context, and a callback
//! that can hold the stream. Nothing of the other code's context is changed: its context is made
//! current for a call and the one before put back. Deliberately absent: what an interval means.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::{DriverError, result, sys};

use super::check::{Code, own_arch};
use super::device::{self, DeviceError, DeviceFacts};
use super::raw_stream::RawStream;
use super::status::{describe, failed};
use crate::BackendError;

/// Why a stream cannot be timed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// No driver, or no GPU.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The null handle, which nobody may mean.
    #[error(
        "the stream's handle is null; where the legacy default stream is meant, say so: it has a \
         handle of its own"
    )]
    Null,
    /// A default stream, and no context to have it.
    #[error("no CUDA context is current on this thread, whose default stream would be meant")]
    NoContext,
    /// The driver does not know the handle.
    #[error("{handle:?} is no stream that lives: {error}")]
    NoStream {
        /// The handle.
        handle: RawStream,
        /// What the driver said.
        error: String,
    },
    /// The device failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// What events read where little or nothing is between them, nanoseconds: what intervals are held
/// against, never subtracted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmptyReadings {
    /// An interval with nothing between the events, the stream held meanwhile: the upper quartile.
    pub nothing_ns: f64,
    /// One with the least command between them, a fill of one byte; held too. The lower quartile.
    pub least_ns: f64,
    /// One with nothing but a wait of the host between them: the upper quartile.
    pub waited_ns: f64,
}

/// An interval between two events.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// From the first event to the last, nanoseconds.
    pub elapsed_ns: f64,
    /// Whether the GPU had done everything before the last event was enqueued: it then waited for
    /// the host, whose time is in the interval.
    pub drained: bool,
    /// Whether the stream was held until the last event was enqueued; none where it was not to be
    /// held. What was held for too long let go by itself.
    pub held: Option<bool>,
}

/// Two events on a stream that other code made.
pub struct StreamTimer {
    stream: RawStream,
    context: sys::CUcontext,
    events: [sys::CUevent; 2],
    facts: DeviceFacts,
    timeout: Duration,
    hold: Option<Arc<Hold>>,
}

/// Repetitions of each empty reading.
const READINGS: usize = 15;
/// How long the stream is held for an empty reading; enqueueing takes microseconds.
const READING_HOLD: Duration = Duration::from_millis(20);
/// The same where it is to let go by itself.
const WAITED_HOLD: Duration = Duration::from_millis(1);

/// Shared with the driver's thread that holds the stream.
struct Hold {
    at_most: Duration,
    released: AtomicBool,
    expired: AtomicBool,
}

/// What the driver calls when the stream gets to it: what comes after on the stream waits for it.
///
/// # Safety
/// `data` is an `Arc<Hold>` made by `Arc::into_raw` for this call.
unsafe extern "C" fn hold_stream(data: *mut c_void) {
    // SAFETY: the caller's contract.
    let hold = unsafe { Arc::from_raw(data.cast::<Hold>().cast_const()) };
    let started = Instant::now();
    while !hold.released.load(Ordering::Acquire) {
        if started.elapsed() > hold.at_most {
            hold.expired.store(true, Ordering::Release);
            return;
        }
        std::thread::yield_now();
    }
}

/// A context that is current until this is dropped.
struct Current;

impl Current {
    fn push(context: sys::CUcontext) -> Result<Self, BackendError> {
        // SAFETY: the context of a stream that lives.
        unsafe { sys::cuCtxPushCurrent_v2(context) }
            .result()
            .map_err(|error| failed("make the stream's context current", &error))?;
        Ok(Self)
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: the pointer is valid.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
    }
}

impl StreamTimer {
    /// Makes the events. What is enqueued between two of them and takes longer than `timeout` is
    /// treated as hung.
    ///
    /// # Errors
    /// When the handle is null or no stream, no context is current for a default stream, or the
    /// device fails.
    pub fn new(stream: RawStream, timeout: Duration) -> Result<Self, StreamError> {
        if stream.is_null() {
            return Err(StreamError::Null);
        }
        device::count()?;
        let context = context_of(stream)?;
        let current = Current::push(context)?;
        let mut cu_device = 0;
        // SAFETY: a context is current and the pointer is valid.
        unsafe { sys::cuCtxGetDevice(&raw mut cu_device) }
            .result()
            .map_err(|error| failed("tell the stream's GPU", &error))?;
        let facts = own_arch(cu_device)
            .and_then(|own| device::facts_of(cu_device, Code::theirs(own)))
            .map_err(|error| failed("describe the stream's GPU", &error))?;
        let mut timer =
            Self { stream, context, events: [ptr::null_mut(); 2], facts, timeout, hold: None };
        for event in &mut timer.events {
            // SAFETY: the stream's context is current and the pointer is valid.
            unsafe { sys::cuEventCreate(event, 0) }
                .result()
                .map_err(|error| failed("make an event", &error))?;
        }
        drop(current);
        Ok(timer)
    }

    /// The stream's GPU.
    pub const fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// Measures what events read around nothing, around the least command and around a wait.
    ///
    /// # Errors
    /// When the device fails.
    pub fn empty_readings(&mut self) -> Result<EmptyReadings, BackendError> {
        let mut byte = 0;
        {
            let _current = Current::push(self.context)?;
            // SAFETY: the stream's context is current and the pointer is valid.
            unsafe { sys::cuMemAlloc_v2(&raw mut byte, 1) }
                .result()
                .map_err(|error| failed("allocate a byte", &error))?;
        }
        let readings = self.read_around(byte);
        let _current = Current::push(self.context)?;
        // SAFETY: allocated above, and every fill of it has finished or the device is lost.
        unsafe { sys::cuMemFree_v2(byte) }
            .result()
            .map_err(|error| failed("free a byte", &error))?;
        readings
    }

    fn read_around(&mut self, byte: sys::CUdeviceptr) -> Result<EmptyReadings, BackendError> {
        let stream = self.stream.cu();
        let nothing = self.readings(READING_HOLD, || Ok(()))?;
        let least = self.readings(READING_HOLD, || {
            // SAFETY: one byte, allocated by the caller.
            unsafe { sys::cuMemsetD8Async(byte, 0, 1, stream) }.result()
        })?;
        let waited = self.readings(WAITED_HOLD, || {
            // SAFETY: the stream lives.
            unsafe { sys::cuStreamSynchronize(stream) }.result()
        })?;
        Ok(EmptyReadings {
            nothing_ns: nothing[READINGS * 3 / 4],
            least_ns: least[READINGS / 4],
            waited_ns: waited[READINGS * 3 / 4],
        })
    }

    /// Intervals around the same, ascending.
    fn readings(
        &mut self,
        hold: Duration,
        enqueue: impl Fn() -> Result<(), DriverError>,
    ) -> Result<Vec<f64>, BackendError> {
        let once = |timer: &mut Self| -> Result<f64, BackendError> {
            timer.begin(Some(hold))?;
            {
                let _current = Current::push(timer.context)?;
                enqueue().map_err(|error| failed("enqueue a fill or a wait", &error))?;
            }
            Ok(timer.end()?.elapsed_ns)
        };
        // The first one of a kind may load what it needs.
        once(self)?;
        let mut readings = (0..READINGS).map(|_| once(self)).collect::<Result<Vec<_>, _>>()?;
        readings.sort_by(f64::total_cmp);
        Ok(readings)
    }

    /// Enqueues the first event; behind a hold of the stream, where one is asked for, which lasts
    /// until [`Self::end`] and at most so long.
    ///
    /// # Errors
    /// When the driver refuses; [`BackendError::NotTimed`] where the stream is in capture.
    pub fn begin(&mut self, hold: Option<Duration>) -> Result<(), BackendError> {
        let _current = Current::push(self.context)?;
        self.check_no_capture()?;
        self.hold = hold.map(|at_most| {
            Arc::new(Hold {
                at_most,
                released: AtomicBool::new(false),
                expired: AtomicBool::new(false),
            })
        });
        if let Some(hold) = &self.hold {
            let data = Arc::into_raw(Arc::clone(hold));
            let held = {
                let data = data.cast_mut().cast::<c_void>();
                // SAFETY: the stream lives, and the function gets what it wants.
                unsafe { sys::cuLaunchHostFunc(self.stream.cu(), Some(hold_stream), data) }
            };
            if let Err(error) = held.result() {
                // SAFETY: made above, and not taken by the function, which was refused.
                drop(unsafe { Arc::from_raw(data) });
                self.hold = None;
                return Err(failed("hold the stream", &error));
            }
        }
        self.record(0)
    }

    /// Enqueues the last event, lets the stream go, and waits for it.
    ///
    /// # Errors
    /// When something on the stream failed; [`BackendError::Lost`] where it does not end in time;
    /// [`BackendError::NotTimed`] where a capture was left open.
    pub fn end(&mut self) -> Result<Interval, BackendError> {
        let _current = Current::push(self.context)?;
        let ended = self.end_in_context();
        // Also where it failed: nothing may wait for it for ever.
        self.release();
        ended
    }

    fn end_in_context(&mut self) -> Result<Interval, BackendError> {
        self.check_no_capture()?;
        // SAFETY: the stream lives.
        let drained = match unsafe { sys::cuStreamQuery(self.stream.cu()) }.result() {
            Ok(()) => true,
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => false,
            Err(error) => return Err(failed("finish what is on the stream", &error)),
        };
        self.record(1)?;
        let hold = self.release();
        self.wait()?;
        let [first, last] = self.events;
        // SAFETY: both events live and have happened.
        let elapsed_ms = unsafe { result::event::elapsed(first, last) }
            .map_err(|error| failed("read an event", &error))?;
        let held = hold.map(|hold| !hold.expired.load(Ordering::Acquire));
        Ok(Interval { elapsed_ns: f64::from(elapsed_ms) * 1e6, drained, held })
    }

    /// How long the context is busy from now on, on whatever stream.
    ///
    /// # Errors
    /// When something in it failed.
    pub fn context_busy(&self) -> Result<Duration, BackendError> {
        let _current = Current::push(self.context)?;
        let started = Instant::now();
        // SAFETY: a context is current.
        unsafe { sys::cuCtxSynchronize() }
            .result()
            .map_err(|error| failed("finish what is in the context", &error))?;
        Ok(started.elapsed())
    }

    fn release(&mut self) -> Option<Arc<Hold>> {
        let hold = self.hold.take()?;
        hold.released.store(true, Ordering::Release);
        Some(hold)
    }

    fn record(&self, which: usize) -> Result<(), BackendError> {
        // SAFETY: event and stream live and are of one context.
        unsafe { sys::cuEventRecord(self.events[which], self.stream.cu()) }
            .result()
            .map_err(|error| failed("record an event", &error))
    }

    fn check_no_capture(&self) -> Result<(), BackendError> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream lives and the pointer is valid.
        let told = unsafe { sys::cuStreamIsCapturing(self.stream.cu(), &raw mut status) }.result();
        match told {
            Ok(()) if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(()),
            // What the driver says of the legacy stream while another one captures.
            Ok(()) | Err(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)) => {
                let open = "a capture is open on the stream that is timed";
                Err(BackendError::NotTimed(open.to_owned()))
            }
            Err(error) => Err(failed("ask whether the stream is in capture", &error)),
        }
    }

    /// Waits for the last event, polling as for launches of microseconds first.
    fn wait(&self) -> Result<(), BackendError> {
        let started = Instant::now();
        loop {
            // SAFETY: the event lives.
            match unsafe { sys::cuEventQuery(self.events[1]) }.result() {
                Ok(()) => return Ok(()),
                Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => {}
                Err(error) => return Err(failed("finish what is on the stream", &error)),
            }
            let waited = started.elapsed();
            if waited > self.timeout {
                return Err(BackendError::Lost(format!(
                    "what was enqueued did not finish within {} s",
                    self.timeout.as_secs()
                )));
            }
            if waited > Duration::from_millis(2) {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }
}

impl Drop for StreamTimer {
    fn drop(&mut self) {
        self.release();
        let Ok(_current) = Current::push(self.context) else { return };
        for event in self.events.into_iter().filter(|event| !event.is_null()) {
            // SAFETY: made here; the driver keeps what is still enqueued until it has happened.
            let _ = unsafe { sys::cuEventDestroy_v2(event) };
        }
    }
}

/// The context of a stream.
fn context_of(stream: RawStream) -> Result<sys::CUcontext, StreamError> {
    let mut context = ptr::null_mut();
    if stream.follows_context() {
        // SAFETY: the pointer is valid.
        let told = unsafe { sys::cuCtxGetCurrent(&raw mut context) }.result();
        if told.is_err() || context.is_null() {
            return Err(StreamError::NoContext);
        }
        return Ok(context);
    }
    // SAFETY: the pointer is valid; the handle is trusted as far as the driver does not know it.
    unsafe { sys::cuStreamGetCtx(stream.cu(), &raw mut context) }
        .result()
        .map_err(|error| StreamError::NoStream { handle: stream, error: describe(&error) })?;
    Ok(context)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instruments::spin::Spin;
    use crate::testing::gpu;

    const TIMEOUT: Duration = Duration::from_secs(60);

    #[test]
    fn the_null_handle_is_refused_without_a_driver_too() {
        let refused = StreamTimer::new(RawStream::from(0), TIMEOUT).err();
        assert_eq!(refused, Some(StreamError::Null));
    }

    #[test]
    fn events_read_what_a_spin_takes_on_a_stream_that_other_code_made() {
        let Some((device, _alone)) = gpu() else { return };
        let stream = RawStream::from(device.stream().cu_stream());
        let mut timer = StreamTimer::new(stream, TIMEOUT).unwrap();
        assert_eq!(timer.facts().uuid, device.facts().uuid);
        let readings = timer.empty_readings().unwrap();
        eprintln!("{readings:?}");
        assert!(readings.nothing_ns < readings.least_ns, "{readings:?}");
        let spin = Spin::new(&device).unwrap();
        for hold in [None, Some(Duration::from_millis(50))] {
            timer.begin(hold).unwrap();
            spin.launch(200_000).unwrap();
            let interval = timer.end().unwrap();
            eprintln!("{interval:?}");
            assert_eq!(interval.held, hold.map(|_| true));
            assert!(interval.elapsed_ns > 200_000.0 && interval.elapsed_ns < 2e6, "{interval:?}");
        }
        // A wait of the host outlasts the hold.
        timer.begin(Some(Duration::from_millis(1))).unwrap();
        device.synchronize_stream().unwrap();
        assert_eq!(timer.end().unwrap().held, Some(false));
        assert!(timer.context_busy().unwrap() < Duration::from_millis(50));
    }

    #[test]
    fn a_default_stream_is_that_of_the_current_context() {
        let Some((device, _alone)) = gpu() else { return };
        device.context().bind_to_thread().unwrap();
        for stream in [RawStream::LEGACY_DEFAULT, RawStream::PER_THREAD_DEFAULT] {
            let mut timer = StreamTimer::new(stream, TIMEOUT).unwrap();
            timer.begin(None).unwrap();
            assert!(timer.end().unwrap().elapsed_ns >= 0.0);
        }
        let elsewhere = std::thread::spawn(|| {
            StreamTimer::new(RawStream::LEGACY_DEFAULT, TIMEOUT).err().map(|it| it.to_string())
        });
        assert!(elsewhere.join().unwrap().unwrap().contains("no CUDA context is current"));
    }
}
