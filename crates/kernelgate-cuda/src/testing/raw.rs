//! Direct driver calls for tests: actions of other people's code that this crate does not wrap.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::{DriverError, sys};

use crate::driver::stream::raw_stream::RawStream;
use crate::driver::stream::thread_state;
use crate::{BackendError, Device};

fn failed_driver_call(what: &str, error: &DriverError) -> BackendError {
    BackendError::Launch(format!("failed to {what}: {:?}", error.0))
}

fn stream_handle(stream: RawStream) -> sys::CUstream {
    stream.raw_pointer()
}

/// Makes no context current on this thread.
pub fn unset_current_context() -> Result<(), BackendError> {
    // SAFETY: a null context is a valid argument, which makes no context current.
    unsafe { sys::cuCtxSetCurrent(ptr::null_mut()) }
        .result()
        .map_err(|error| failed_driver_call("set no context", &error))
}

/// Makes no context current on the thread, and later makes the previous one current again.
pub fn context_away_and_back() -> Result<(), BackendError> {
    let mut context = ptr::null_mut();
    // SAFETY: the pointer is valid, and the popped context is alive.
    unsafe {
        sys::cuCtxPopCurrent_v2(&raw mut context)
            .result()
            .and_then(|()| sys::cuCtxPushCurrent_v2(context).result())
    }
    .map_err(|error| failed_driver_call("pop and push a context", &error))
}

/// Begins a capture of that stream, by this thread.
pub fn begin_capture(stream: RawStream) -> Result<(), BackendError> {
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the handle is of a stream that lives.
    unsafe { sys::cuStreamBeginCapture_v2(stream_handle(stream), mode) }
        .result()
        .map_err(|error| failed_driver_call("begin a capture", &error))
}

/// Ends the capture of a stream, if the stream is in capture.
pub fn end_capture(stream: RawStream) {
    thread_state::abandon_capture(stream_handle(stream));
}

/// Whether the given stream is in capture.
pub fn is_capturing(stream: RawStream) -> Result<bool, BackendError> {
    thread_state::is_capturing_stream(stream_handle(stream))
}

/// Whether everything on that stream has finished.
pub fn is_stream_done(stream: RawStream) -> Result<bool, BackendError> {
    // SAFETY: the handle is of a stream that lives.
    match unsafe { sys::cuStreamQuery(stream_handle(stream)) }.result() {
        Ok(()) => Ok(true),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
        Err(error) => Err(failed_driver_call("query a stream", &error)),
    }
}

/// A CUDA event whose record and wait become graph nodes in a capture, as those of NCCL do.
pub struct ExternalEvent(sys::CUevent);

impl ExternalEvent {
    /// Creates an event in the current context; it is never destroyed.
    pub fn new() -> Result<Self, BackendError> {
        let mut event = ptr::null_mut();
        let untimed = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the call gets a pointer to a local variable, which is valid during the call.
        unsafe { sys::cuEventCreate(&raw mut event, untimed) }
            .result()
            .map_err(|error| failed_driver_call("make an event", &error))?;
        Ok(Self(event))
    }

    /// Adds a node that records the event to the capture of a stream.
    pub fn record_in_capture(&self, stream: RawStream) -> Result<(), BackendError> {
        let external = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: the event and the stream are alive.
        unsafe { sys::cuEventRecordWithFlags(self.0, stream_handle(stream), external) }
            .result()
            .map_err(|error| failed_driver_call("record an event", &error))
    }

    /// Adds a node that waits for the event to the capture of that stream.
    pub fn wait_in_capture(&self, stream: RawStream) -> Result<(), BackendError> {
        let external = sys::CUevent_wait_flags::CU_EVENT_WAIT_EXTERNAL as u32;
        // SAFETY: the event and the stream are alive.
        unsafe { sys::cuStreamWaitEvent(stream_handle(stream), self.0, external) }
            .result()
            .map_err(|error| failed_driver_call("wait for an event", &error))
    }
}

/// Allocates memory in the order of a stream, enqueues work that uses the memory, and frees the
/// memory in the same order.
///
/// # Errors
/// Fails with the error of `between`, and when the driver refuses.
pub fn allocate_in_order(
    stream: RawStream,
    bytes: usize,
    between: impl FnOnce(u64) -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    let mut address = 0;
    // SAFETY: the handle is of a stream that lives; the pointer is valid.
    unsafe { sys::cuMemAllocAsync(&raw mut address, bytes, stream_handle(stream)) }
        .result()
        .map_err(|error| failed_driver_call("allocate in order", &error))?;
    let enqueued = between(address);
    // SAFETY: the memory was allocated above; the stream runs its last use before the free.
    let freed = unsafe { sys::cuMemFreeAsync(address, stream_handle(stream)) }.result();
    enqueued?;
    freed.map_err(|error| failed_driver_call("free in order", &error))
}

/// Allocates, enqueues work that uses the memory, and frees it, which waits for the work.
///
/// # Errors
/// Fails with the error of `between`, and when the driver refuses.
pub fn allocate_and_free(
    bytes: usize,
    between: impl FnOnce(u64) -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    let mut address = 0;
    // SAFETY: the pointer is valid.
    unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) }
        .result()
        .map_err(|error| failed_driver_call("allocate", &error))?;
    let enqueued = between(address);
    // SAFETY: allocated above.
    let freed = unsafe { sys::cuMemFree_v2(address) }.result();
    enqueued?;
    freed.map_err(|error| failed_driver_call("free", &error))
}

/// Enqueues a copy from one address of the device to another.
pub fn enqueue_device_copy(
    stream: RawStream,
    to: u64,
    from: u64,
    bytes: usize,
) -> Result<(), BackendError> {
    // SAFETY: the handle is of a stream that lives; the ranges are on the device.
    unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream_handle(stream)) }
        .result()
        .map_err(|error| failed_driver_call("copy on the GPU", &error))
}

/// Pinned host memory that lives as long as the process, because queued work may use it.
#[derive(Clone, Copy)]
pub struct PinnedFloats {
    floats: *mut f32,
    count: usize,
}

// SAFETY: users on several threads access it in the order of a stream.
unsafe impl Send for PinnedFloats {}
// SAFETY: as above.
unsafe impl Sync for PinnedFloats {}

/// Argument of a host function that triples floats.
struct TripledArgument(PinnedFloats);

impl PinnedFloats {
    /// `count` floats, all zero.
    pub fn new(device: &Device, count: usize) -> Result<Self, BackendError> {
        let bound = device.context().bind_to_thread();
        bound.map_err(|error| failed_driver_call("make the context current", &error))?;
        let mut memory = ptr::null_mut();
        // SAFETY: the pointer is valid.
        unsafe { sys::cuMemHostAlloc(&raw mut memory, 4 * count, 0) }
            .result()
            .map_err(|error| failed_driver_call("pin memory", &error))?;
        let floats = memory.cast::<f32>();
        // SAFETY: `count` floats were allocated.
        unsafe { ptr::write_bytes(floats, 0, count) };
        Ok(Self { floats, count })
    }

    /// Copies all floats.
    pub fn read_floats(&self) -> Vec<f32> {
        // SAFETY: SAFETY: SAFETY: `count` floats were allocated and written before.
        unsafe { std::slice::from_raw_parts(self.floats, self.count) }.to_vec()
    }

    /// Writes the first floats of the memory.
    pub fn write_floats(&self, values: &[f32]) {
        let count = values.len().min(self.count);
        // SAFETY: `count` floats were allocated; the caller's are elsewhere.
        unsafe { ptr::copy_nonoverlapping(values.as_ptr(), self.floats, count) };
    }

    /// Enqueues a copy of all floats from the device.
    pub fn fetch_from_device(&self, stream: RawStream, from: u64) -> Result<(), BackendError> {
        let to = self.floats.cast::<c_void>();
        // SAFETY: the memory lives as long as the process.
        unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, 4 * self.count, stream_handle(stream)) }
            .result()
            .map_err(|error| failed_driver_call("copy from the GPU", &error))
    }

    /// Enqueues a copy of all floats to the device.
    pub fn enqueue_copy_to_device(&self, stream: RawStream, to: u64) -> Result<(), BackendError> {
        let from = self.floats.cast_const().cast::<c_void>();
        // SAFETY: the memory lives as long as the process.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, 4 * self.count, stream_handle(stream)) }
            .result()
            .map_err(|error| failed_driver_call("copy to the GPU", &error))
    }

    /// Argument of the host function that [`Self::triple_on_host`] enqueues. The argument is
    /// leaked, because it has to live until the host function has run.
    fn leaked_triple_argument(self) -> *mut c_void {
        Box::into_raw(Box::new(TripledArgument(self))).cast()
    }

    /// Returns a function that enqueues a host function, which triples all the pinned floats.
    pub fn triple_on_host(self) -> impl Fn(RawStream) -> Result<(), BackendError> {
        unsafe extern "C" fn triple_on_host(data: *mut c_void) {
            // SAFETY: the data came from `tripled` and is never freed.
            let TripledArgument(pinned) = unsafe { &*data.cast::<TripledArgument>() };
            for i in 0..pinned.count {
                // SAFETY: `count` floats were allocated.
                unsafe { *pinned.floats.add(i) *= 3.0 };
            }
        }
        let data = self.leaked_triple_argument() as usize;
        move |stream| {
            // SAFETY: the function has that type, and its data live until the process ends.
            unsafe {
                sys::cuLaunchHostFunc(
                    stream_handle(stream),
                    Some(triple_on_host),
                    data as *mut c_void,
                )
            }
            .result()
            .map_err(|error| failed_driver_call("enqueue a function of the host", &error))
        }
    }
}
