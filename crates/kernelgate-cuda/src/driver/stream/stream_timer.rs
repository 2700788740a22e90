//! Times work on a CUDA stream by events, with a way to hold the stream.
//!
//! All events are created in advance, so that no object is created between two events of an
//! interval. An interval is measured in this order: hold the stream, enqueue events and work,
//! release the stream, wait for the end. This module neither judges an interval nor decides the
//! order of events, work, clock probes and L2 flushes in it.

use std::time::Duration;

use super::event::TimingEventPool;
use super::host_wait;
use super::stream_hold::StreamHold;
use super::timed_stream::OwnOrForeignStream;
use crate::BackendError;
use crate::driver::device::Device;

/// Times work on a stream by events; a hold of type `H` can hold the stream meanwhile.
pub struct StreamTimer<H> {
    /// The hold is dropped first, so that no work waits for the timer for ever.
    hold: H,
    holds_stream: bool,
    stream: OwnOrForeignStream,
    /// The CUDA events of the timer; the last one marks the end of an interval.
    events: TimingEventPool,
    timeout: Duration,
}

impl<H: StreamHold> StreamTimer<H> {
    /// Makes a timer of the device's stream with `events` events for the caller's use.
    pub fn timer_for_device_stream(
        device: &Device,
        events: usize,
        hold: H,
    ) -> Result<Self, BackendError> {
        let stream = OwnOrForeignStream::StreamOfOwnDevice(device.stream().clone());
        Self::create_timer_for_stream(stream, events, hold, device.timeout_of_kernels())
    }

    /// Makes a timer of a stream with `events` events for the caller's use. Work that has not
    /// finished after `timeout` is treated as hung.
    pub(crate) fn create_timer_for_stream(
        stream: OwnOrForeignStream,
        events: usize,
        hold: H,
        timeout: Duration,
    ) -> Result<StreamTimer<H>, BackendError> {
        let events = TimingEventPool::create_event_pool_for_stream(stream.clone(), events + 1)?;
        Ok(Self { hold, holds_stream: false, stream, events, timeout })
    }

    /// Begins an interval: holds the stream until [`Self::release_held_stream`], but at most for
    /// the duration `at_most`; `None` does not hold the stream.
    pub fn hold_stream_and_begin_interval(
        &mut self,
        at_most: Option<Duration>,
    ) -> Result<(), BackendError> {
        self.holds_stream = false;
        let Some(at_most) = at_most else { return Ok(()) };
        let _entered = self.stream.enter_stream_context()?;
        self.hold.enqueue_hold(at_most)?;
        self.holds_stream = true;
        Ok(())
    }

    /// Enqueues one of the interval's events, which records the time at which all work before it on
    /// the stream has ended.
    pub fn enqueue_event(&self, event: usize) -> Result<(), BackendError> {
        self.events.enqueue_event(event)
    }

    /// Releases the stream so that its work runs; does nothing if the stream is not held.
    pub fn release_held_stream(&mut self) {
        if self.holds_stream {
            self.hold.release_stream();
        }
    }

    /// Enqueues the last event of the pool, which marks the end of the interval.
    pub fn enqueue_end_event(&self) -> Result<(), BackendError> {
        self.events.enqueue_event(self.events.event_count() - 1)
    }

    /// Waits until the end of the interval has passed; work enqueued behind the end goes on.
    /// Returns whether the stream was held until the host released it; `None` if no hold was
    /// requested, false if the hold timed out before the release.
    ///
    /// # Errors
    /// Fails with [`BackendError::DeviceLost`] if the end has not passed at the timeout, or if work
    /// on the stream failed.
    pub fn wait_for_end_event(&self) -> Result<Option<bool>, BackendError> {
        let end = self.events.event_count() - 1;
        host_wait::wait_for_event_with_timeout(self.events.raw_event(end), self.timeout)?;
        Ok(self.holds_stream.then(|| self.hold.was_released_in_time()))
    }

    /// Enqueues the end event and waits for it, as [`Self::wait_for_end_event`].
    pub fn enqueue_and_wait_for_end_event(&self) -> Result<Option<bool>, BackendError> {
        self.enqueue_end_event()?;
        self.wait_for_end_event()
    }

    /// Nanoseconds from one event of the timer to another; both must have happened.
    pub fn ns_between_events(&self, from: usize, to: usize) -> Result<f64, BackendError> {
        self.events.ns_between_events(from, to)
    }

    /// The hold of the timer, with which launches that are not timed can also be held back.
    pub const fn stream_hold_mut(&mut self) -> &mut H {
        &mut self.hold
    }

    /// Whether the host released the last hold before it timed out; the hold must have ended.
    pub fn was_last_hold_released_in_time(&self) -> bool {
        self.hold.was_released_in_time()
    }

    /// Makes the CUDA context of the timed stream current on the calling thread.
    pub fn make_context_of_stream_current(&self) -> Result<(), BackendError> {
        self.stream.enter_stream_context().map(drop)
    }

    pub(crate) const fn timed_stream(&self) -> &OwnOrForeignStream {
        &self.stream
    }
}
