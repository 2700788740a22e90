//! CUDA events on a stream, for timing and for waits between streams.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, result, sys};

use super::timed_stream::OwnOrForeignStream;
use crate::BackendError;
use crate::driver::device::Device;
use crate::driver::driver_error::error_for_failed_action;

/// A fixed number of CUDA timing events on one stream, created in advance.
pub struct TimingEventPool {
    events: Vec<sys::CUevent>,
    stream: OwnOrForeignStream,
}

impl TimingEventPool {
    /// Creates a pool of `count` CUDA events that record time on the device's stream.
    pub fn event_pool_on_device_stream(
        device: &Device,
        count: usize,
    ) -> Result<Self, BackendError> {
        Self::create_event_pool_for_stream(
            OwnOrForeignStream::StreamOfOwnDevice(Arc::clone(device.stream())),
            count,
        )
    }

    /// Creates a pool of `count` CUDA events that record time on a stream.
    pub(crate) fn create_event_pool_for_stream(
        stream: OwnOrForeignStream,
        count: usize,
    ) -> Result<TimingEventPool, BackendError> {
        let _entered = stream.enter_stream_context()?;
        let mut pool = Self { events: Vec::with_capacity(count), stream };
        for _ in 0..count {
            let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
                .map_err(|error| error_for_failed_action("make an event", &error))?;
            pool.events.push(event);
        }
        Ok(pool)
    }

    /// Number of events.
    pub fn event_count(&self) -> usize {
        self.events.len()
    }

    /// Whether the pool has no events.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Enqueues event `index` of the pool, which records the time at which all work before it on
    /// the stream has ended.
    pub fn enqueue_event(&self, index: usize) -> Result<(), BackendError> {
        let _entered = self.stream.enter_stream_context()?;
        // SAFETY: the event and the stream are alive and belong to one context.
        unsafe { result::event::record(self.events[index], self.stream.driver_handle()) }
            .map_err(|error| error_for_failed_action("record an event", &error))
    }

    /// Nanoseconds from event `from` to event `to` of the pool; both must have happened.
    pub fn ns_between_events(&self, from: usize, to: usize) -> Result<f64, BackendError> {
        let _entered = self.stream.enter_stream_context()?;
        // SAFETY: both events live.
        let elapsed_ms = unsafe { result::event::elapsed(self.events[from], self.events[to]) }
            .map_err(|error| error_for_failed_action("read an event", &error))?;
        Ok(f64::from(elapsed_ms) * 1e6)
    }

    pub(crate) fn raw_event(&self, index: usize) -> sys::CUevent {
        self.events[index]
    }
}

impl Drop for TimingEventPool {
    fn drop(&mut self) {
        let Ok(_entered) = self.stream.enter_stream_context() else { return };
        for &event in &self.events {
            // SAFETY: the event was created by this pool; the driver keeps it until the work before
            // it has run.
            let _ = unsafe { result::event::destroy(event) };
        }
    }
}

/// An event without time that marks a point in one stream for which another stream waits; in a
/// capture, a dependency.
pub struct StreamOrderingEvent(CudaEvent);

impl StreamOrderingEvent {
    /// Creates an event.
    pub fn create_event_without_timing(device: &Device) -> Result<Self, BackendError> {
        let untimed = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        device
            .context()
            .new_event(Some(untimed))
            .map(Self)
            .map_err(|error| error_for_failed_action("make an event", &error))
    }

    /// Records the event after all work that is enqueued on the stream so far.
    pub fn record_after_work_on_stream(&self, stream: &CudaStream) -> Result<(), BackendError> {
        self.0.record(stream).map_err(|error| error_for_failed_action("record an event", &error))
    }

    /// Makes later work on the stream wait for the work before the recorded event.
    pub fn make_stream_wait_for_recorded_work(
        &self,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        stream.wait(&self.0).map_err(|error| error_for_failed_action("wait for an event", &error))
    }
}
