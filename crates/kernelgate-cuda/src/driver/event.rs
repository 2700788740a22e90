//! Events on the device's stream: what timing and waiting between streams are made of.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, sys};

use super::device::Device;
use super::status::failed;
use crate::BackendError;

/// A fixed number of events, made once.
pub struct EventPool {
    events: Vec<CudaEvent>,
    stream: Arc<CudaStream>,
}

impl EventPool {
    /// Makes `count` events that keep time.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn new(device: &Device, count: usize) -> Result<Self, BackendError> {
        // Without the flag cudarc makes events that keep no time.
        let make = || device.context().new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
        let events = (0..count)
            .map(|_| make())
            .collect::<Result<_, _>>()
            .map_err(|error| failed("make an event", &error))?;
        Ok(Self { events, stream: Arc::clone(device.stream()) })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Enqueues event `index`: its time is that of the work before it.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn record(&self, index: usize) -> Result<(), BackendError> {
        self.events[index].record(&self.stream).map_err(|error| failed("record an event", &error))
    }

    /// Nanoseconds from event `from` to event `to`, both of which have happened.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn elapsed_ns(&self, from: usize, to: usize) -> Result<f64, BackendError> {
        let elapsed_ms = self.events[from]
            .elapsed_ms(&self.events[to])
            .map_err(|error| failed("read an event", &error))?;
        Ok(f64::from(elapsed_ms) * 1e6)
    }
}

/// A point in one stream that another waits for; in a capture, a dependency.
pub struct Crossing(CudaEvent);

impl Crossing {
    /// Makes one.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn new(device: &Device) -> Result<Self, BackendError> {
        let untimed = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        device
            .context()
            .new_event(Some(untimed))
            .map(Self)
            .map_err(|error| failed("make an event", &error))
    }

    /// Marks what is in the stream so far.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn mark(&self, stream: &CudaStream) -> Result<(), BackendError> {
        self.0.record(stream).map_err(|error| failed("record an event", &error))
    }

    /// Lets what comes in the stream wait for what was marked.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn hold(&self, stream: &CudaStream) -> Result<(), BackendError> {
        stream.wait(&self.0).map_err(|error| failed("wait for an event", &error))
    }
}
