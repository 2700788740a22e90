//! Events on the device's stream: what timing and waiting between streams are made of.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, result, sys};

use super::timed_stream::TimedStream;
use crate::BackendError;
use crate::driver::device::Device;
use crate::driver::driver_error::failed;

/// A fixed number of events on a stream, made once.
pub struct EventPool {
    events: Vec<sys::CUevent>,
    stream: TimedStream,
}

impl EventPool {
    /// Creates a pool of `count` CUDA events that record time.
    pub fn new(device: &Device, count: usize) -> Result<Self, BackendError> {
        Self::on(TimedStream::Ours(Arc::clone(device.stream())), count)
    }

    /// Makes timing events for a stream.
    pub(crate) fn on(stream: TimedStream, count: usize) -> Result<EventPool, BackendError> {
        let _entered = stream.enter_context()?;
        let mut pool = Self { events: Vec::with_capacity(count), stream };
        for _ in 0..count {
            let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
                .map_err(|error| failed("make an event", &error))?;
            pool.events.push(event);
        }
        Ok(pool)
    }

    /// Number of events.
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Whether the event pool is empty.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Enqueues event `index` of the pool, which gets the time when the preceding work ends.
    pub fn record_event(&self, index: usize) -> Result<(), BackendError> {
        let _entered = self.stream.enter_context()?;
        // SAFETY: event and stream live and are of one context.
        unsafe { result::event::record(self.events[index], self.stream.cu()) }
            .map_err(|error| failed("record an event", &error))
    }

    /// Nanoseconds from event `from` to event `to`, both of which have happened.
    pub fn elapsed_ns(&self, from: usize, to: usize) -> Result<f64, BackendError> {
        let _entered = self.stream.enter_context()?;
        // SAFETY: both events live.
        let elapsed_ms = unsafe { result::event::elapsed(self.events[from], self.events[to]) }
            .map_err(|error| failed("read an event", &error))?;
        Ok(f64::from(elapsed_ms) * 1e6)
    }

    pub(crate) fn cu(&self, index: usize) -> sys::CUevent {
        self.events[index]
    }
}

impl Drop for EventPool {
    fn drop(&mut self) {
        let Ok(_entered) = self.stream.enter_context() else { return };
        for &event in &self.events {
            // SAFETY: the event was created here; the driver keeps it until the enqueued work has
            // run.
            let _ = unsafe { result::event::destroy(event) };
        }
    }
}

/// A point in one stream that another waits for; in a capture, a dependency.
pub struct CrossingEvent(CudaEvent);

impl CrossingEvent {
    /// Creates an event.
    pub fn new(device: &Device) -> Result<Self, BackendError> {
        let untimed = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        device
            .context()
            .new_event(Some(untimed))
            .map(Self)
            .map_err(|error| failed("make an event", &error))
    }

    /// Records an event after the work that is enqueued in the stream so far.
    pub fn record_on_stream(&self, stream: &CudaStream) -> Result<(), BackendError> {
        self.0.record(stream).map_err(|error| failed("record an event", &error))
    }

    /// Makes later work in the stream wait for the marked work.
    pub fn make_stream_wait(&self, stream: &CudaStream) -> Result<(), BackendError> {
        stream.wait(&self.0).map_err(|error| failed("wait for an event", &error))
    }
}
