//! The event timer of a stream: its CUDA events, and a way to hold the stream.
//!
//! All events are created in advance, so that no object is created between two events. An interval
//! is measured in this order: hold the stream, enqueue events and work, release the stream, wait
//! for it. This module does not interpret an interval, and does not order the events, work, probes
//! and flushes inside of it.

use std::time::Duration;

use super::event::EventPool;
use super::host_wait;
use super::stream_hold::StreamHold;
use super::timed_stream::TimedStream;
use crate::BackendError;
use crate::driver::device::Device;

/// Timer of a stream, which a hold of type `H` can hold.
pub struct StreamTimer<H> {
    /// Dropped first: nothing may wait for the timer for ever.
    hold: H,
    holds: bool,
    stream: TimedStream,
    /// Pool of CUDA events, whose last event marks the end of an interval.
    events: EventPool,
    timeout: Duration,
}

impl<H: StreamHold> StreamTimer<H> {
    /// Makes a timer of a device's stream with `events` events.
    pub fn new(device: &Device, events: usize, hold: H) -> Result<Self, BackendError> {
        let stream = TimedStream::Ours(device.stream().clone());
        Self::on(stream, events, hold, device.kernel_timeout())
    }

    /// Creates a timer that measures work on a stream. Work that takes longer than `timeout` is
    /// treated as hung.
    pub(crate) fn on(
        stream: TimedStream,
        events: usize,
        hold: H,
        timeout: Duration,
    ) -> Result<StreamTimer<H>, BackendError> {
        let events = EventPool::on(stream.clone(), events + 1)?;
        Ok(Self { hold, holds: false, stream, events, timeout })
    }

    /// Begins a measured interval: holds the stream until [`Self::release`], at most for the given
    /// time; without a time the stream is not held.
    pub fn begin_interval(&mut self, at_most: Option<Duration>) -> Result<(), BackendError> {
        self.holds = false;
        let Some(at_most) = at_most else { return Ok(()) };
        let _entered = self.stream.enter_context()?;
        self.hold.hold(at_most)?;
        self.holds = true;
        Ok(())
    }

    /// Enqueues an event of the interval, which gets the time when the preceding work ends.
    pub fn record_event(&self, event: usize) -> Result<(), BackendError> {
        self.events.record_event(event)
    }

    /// Lets the work of the stream run, whether the stream is held or not.
    pub fn release(&mut self) {
        if self.holds {
            self.hold.release();
        }
    }

    /// Marks the end of the interval behind the work enqueued so far.
    pub fn mark_end(&self) -> Result<(), BackendError> {
        self.events.record_event(self.events.len() - 1)
    }

    /// Waits for the marked end; work behind it goes on. Returns whether the stream was held until
    /// the host released it: `None` if it was not to be held, false if the hold timed out, and the
    /// work did not wait for the host.
    ///
    /// # Errors
    /// Fails if something on the stream failed; [`BackendError::Lost`] if it does not end in time.
    pub fn wait_for_end(&self) -> Result<Option<bool>, BackendError> {
        let end = self.events.len() - 1;
        host_wait::wait_until_passed(self.events.cu(end), self.timeout)?;
        Ok(self.holds.then(|| self.hold.was_released()))
    }

    /// Marks the end of the interval and waits for it, as [`Self::wait_for_end`].
    pub fn mark_end_and_wait(&self) -> Result<Option<bool>, BackendError> {
        self.mark_end()?;
        self.wait_for_end()
    }

    /// Nanoseconds from one event to another, both of which have happened.
    pub fn elapsed_ns(&self, from: usize, to: usize) -> Result<f64, BackendError> {
        self.events.elapsed_ns(from, to)
    }

    /// The way to hold the stream, for launches that are not timed.
    pub const fn stream_holder(&mut self) -> &mut H {
        &mut self.hold
    }

    /// Whether the last hold, which has ended, was released.
    pub fn hold_was_released(&self) -> bool {
        self.hold.was_released()
    }

    /// Makes the context current to which the harness's own stream belongs.
    pub fn make_context_current(&self) -> Result<(), BackendError> {
        self.stream.enter_context().map(drop)
    }

    pub(crate) const fn stream(&self) -> &TimedStream {
        &self.stream
    }
}
