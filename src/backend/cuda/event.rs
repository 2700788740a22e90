//! Events on the device's stream, host memory that the device sees, and captured graphs: what timing is made of.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaGraph, CudaStream, DriverError, result, sys};

use super::device::{Device, failed};
use crate::backend::BackendError;

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
        let events = (0..count).map(|_| make()).collect::<Result<_, _>>().map_err(|error| failed("make an event", &error))?;
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
        let elapsed_ms = self.events[from].elapsed_ms(&self.events[to]).map_err(|error| failed("read an event", &error))?;
        Ok(f64::from(elapsed_ms) * 1e6)
    }
}

/// Waits for everything on the stream, at most so long.
///
/// # Errors
/// When something on the stream failed, or has not finished by then: [`BackendError::Lost`].
pub(super) fn wait(stream: &CudaStream, marker: &CudaEvent, patience: Duration) -> Result<(), BackendError> {
    marker.record(stream).map_err(|error| failed("record an event", &error))?;
    let start = Instant::now();
    loop {
        // SAFETY: the event is alive.
        match unsafe { result::event::query(marker.cu_event()) } {
            Ok(()) => return Ok(()),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => {}
            Err(error) => return Err(failed("finish the launches", &error)),
        }
        let waited = start.elapsed();
        if waited > patience {
            return Err(BackendError::Lost(format!("a kernel did not finish within {} s", patience.as_secs())));
        }
        // A launch of microseconds is met at once; a long one does not burn a core.
        if waited > Duration::from_millis(2) {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// Two words of pinned host memory that the device reads and writes, on cache lines of their own.
pub struct Mailbox {
    words: NonNull<AtomicU32>,
}

/// Words between the two.
const APART: usize = 64;

impl Mailbox {
    /// Allocates it.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn new() -> Result<Self, BackendError> {
        let bytes = 2 * APART * size_of::<AtomicU32>();
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: a context is current on this thread: the device that the mailbox is for was opened here.
        let memory = unsafe { result::malloc_host(bytes, flags) }.map_err(|error| failed("pin host memory", &error))?;
        let words = NonNull::new(memory.cast::<AtomicU32>())
            .ok_or_else(|| BackendError::Launch("failed to pin host memory: no address".to_owned()))?;
        let mailbox = Self { words };
        mailbox.to_device().store(0, Ordering::Release);
        mailbox.from_device().store(0, Ordering::Release);
        Ok(mailbox)
    }

    /// The word that the device reads.
    pub fn to_device(&self) -> &AtomicU32 {
        // SAFETY: the allocation holds 2 * APART words, lives as long as `self`, and is only ever accessed atomically.
        unsafe { self.words.as_ref() }
    }

    /// The word that the device writes.
    pub fn from_device(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { self.words.add(APART).as_ref() }
    }

    /// Their addresses, which are the same on the device: to it, from it.
    pub fn addresses(&self) -> (u64, u64) {
        let base = self.words.as_ptr() as u64;
        (base, base + (APART * size_of::<AtomicU32>()) as u64)
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        // SAFETY: allocated by `malloc_host` and not used again. A broken context cannot free it, and the process then ends anyway.
        let _ = unsafe { result::free_host(self.words.as_ptr().cast()) };
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
        device.context().new_event(Some(untimed)).map(Self).map_err(|error| failed("make an event", &error))
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

/// Launches captured once, replayed as one.
pub struct Graph {
    graph: CudaGraph,
    nodes: usize,
}

impl Graph {
    /// Captures what `enqueue` puts on the device's stream.
    ///
    /// # Errors
    /// What `enqueue` returns, or when something in it cannot be captured.
    pub fn capture(device: &Device, enqueue: impl FnOnce() -> Result<(), BackendError>) -> Result<Self, BackendError> {
        let stream = device.stream();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).map_err(|error| failed("begin a capture", &error))?;
        let enqueued = enqueue();
        let captured = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        enqueued?;
        let graph = captured.map_err(|error| failed("capture the launches", &error))?;
        let graph = graph.ok_or_else(|| BackendError::Launch("failed to capture the launches: there were none".to_owned()))?;
        let mut nodes = 0;
        // SAFETY: the graph is alive; a null array asks for the number only.
        unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &raw mut nodes) }
            .result()
            .map_err(|error| failed("count a graph's nodes", &error))?;
        graph.upload().map_err(|error| failed("upload a graph", &error))?;
        Ok(Self { graph, nodes })
    }

    /// Commands in it: kernels, copies, fills.
    pub const fn nodes(&self) -> usize {
        self.nodes
    }

    /// Enqueues all of it.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn launch(&self) -> Result<(), BackendError> {
        self.graph.launch().map_err(|error| failed("launch a graph", &error))
    }
}
