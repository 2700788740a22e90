//! Direct CUDA driver calls for tests: actions of foreign code that this crate does not wrap.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::{DriverError, sys};

use crate::driver::stream::raw_stream::RawStreamHandle;
use crate::driver::stream::thread_state;
use crate::{BackendError, Device};

fn driver_call_error(what: &str, error: &DriverError) -> BackendError {
    BackendError::ComputationFailed(format!("failed to {what}: {:?}", error.0))
}

fn raw_stream_handle(stream: RawStreamHandle) -> sys::CUstream {
    stream.raw_pointer()
}

/// Sets the CUDA context that is current on this thread to none.
pub fn set_no_current_context() -> Result<(), BackendError> {
    // SAFETY: a null context is a valid argument, which makes no context current.
    unsafe { sys::cuCtxSetCurrent(ptr::null_mut()) }
        .result()
        .map_err(|error| driver_call_error("set no context", &error))
}

/// Pops the CUDA context that is current on this thread, and pushes it again.
pub fn pop_and_push_current_context() -> Result<(), BackendError> {
    let mut context = ptr::null_mut();
    // SAFETY: the pointer is valid, and the popped context is alive.
    unsafe {
        sys::cuCtxPopCurrent_v2(&raw mut context)
            .result()
            .and_then(|()| sys::cuCtxPushCurrent_v2(context).result())
    }
    .map_err(|error| driver_call_error("pop and push a context", &error))
}

/// Begins a thread-local capture of a stream into a CUDA graph.
pub fn begin_stream_capture(stream: RawStreamHandle) -> Result<(), BackendError> {
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the handle belongs to a stream that is alive.
    unsafe { sys::cuStreamBeginCapture_v2(raw_stream_handle(stream), mode) }
        .result()
        .map_err(|error| driver_call_error("begin a capture", &error))
}

/// Ends the capture of a stream, if the stream is in capture, and discards the graph.
pub fn abandon_stream_capture(stream: RawStreamHandle) {
    thread_state::end_capture_and_destroy_graph(raw_stream_handle(stream));
}

/// Returns whether the given stream is being captured into a graph.
pub fn is_stream_capturing(stream: RawStreamHandle) -> Result<bool, BackendError> {
    thread_state::is_stream_capturing(raw_stream_handle(stream))
}

/// Returns whether all work that was enqueued on a stream has finished.
pub fn has_stream_finished_all_work(stream: RawStreamHandle) -> Result<bool, BackendError> {
    // SAFETY: the handle belongs to a stream that is alive.
    match unsafe { sys::cuStreamQuery(raw_stream_handle(stream)) }.result() {
        Ok(()) => Ok(true),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
        Err(error) => Err(driver_call_error("query a stream", &error)),
    }
}

/// A CUDA event that a capture records and waits for by external event nodes of the graph, as NCCL
/// does.
pub struct ExternalCudaEvent(sys::CUevent);

impl ExternalCudaEvent {
    /// Creates a CUDA event in the current context; the event is never destroyed.
    pub fn create_external_event() -> Result<Self, BackendError> {
        let mut event = ptr::null_mut();
        let untimed = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the call gets a pointer to a local variable, which is valid during the call.
        unsafe { sys::cuEventCreate(&raw mut event, untimed) }
            .result()
            .map_err(|error| driver_call_error("make an event", &error))?;
        Ok(Self(event))
    }

    /// Adds a node that records the event to the graph that a stream captures.
    pub fn add_record_node_to_capture(&self, stream: RawStreamHandle) -> Result<(), BackendError> {
        let external = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: the event and the stream are alive.
        unsafe { sys::cuEventRecordWithFlags(self.0, raw_stream_handle(stream), external) }
            .result()
            .map_err(|error| driver_call_error("record an event", &error))
    }

    /// Adds a node that waits for the event to the graph that a stream captures.
    pub fn add_wait_node_to_capture(&self, stream: RawStreamHandle) -> Result<(), BackendError> {
        let external = sys::CUevent_wait_flags::CU_EVENT_WAIT_EXTERNAL as u32;
        // SAFETY: the event and the stream are alive.
        unsafe { sys::cuStreamWaitEvent(raw_stream_handle(stream), self.0, external) }
            .result()
            .map_err(|error| driver_call_error("wait for an event", &error))
    }
}

/// Allocates device memory in stream order, calls a function that enqueues work on the memory, and
/// frees the memory in stream order.
///
/// # Errors
/// Fails with the error of `between`, and when the driver refuses.
pub fn with_stream_ordered_allocation(
    stream: RawStreamHandle,
    bytes: usize,
    between: impl FnOnce(u64) -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    let mut address = 0;
    // SAFETY: the handle belongs to a stream that is alive; the pointer is valid.
    unsafe { sys::cuMemAllocAsync(&raw mut address, bytes, raw_stream_handle(stream)) }
        .result()
        .map_err(|error| driver_call_error("allocate in order", &error))?;
    let enqueued = between(address);
    // SAFETY: the memory was allocated above; the stream runs the last work on the memory before it
    // frees the memory.
    let freed = unsafe { sys::cuMemFreeAsync(address, raw_stream_handle(stream)) }.result();
    enqueued?;
    freed.map_err(|error| driver_call_error("free in order", &error))
}

/// Allocates device memory, calls a function that enqueues work on the memory, and frees it by
/// `cuMemFree`, which waits for the work.
///
/// # Errors
/// Fails with the error of `between`, and when the driver refuses.
pub fn with_synchronously_freed_allocation(
    bytes: usize,
    between: impl FnOnce(u64) -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    let mut address = 0;
    // SAFETY: the pointer for the address is valid.
    unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) }
        .result()
        .map_err(|error| driver_call_error("allocate", &error))?;
    let enqueued = between(address);
    // SAFETY: allocated above.
    let freed = unsafe { sys::cuMemFree_v2(address) }.result();
    enqueued?;
    freed.map_err(|error| driver_call_error("free", &error))
}

/// Enqueues a copy from one address of the device's memory to another.
pub fn enqueue_copy_within_device(
    stream: RawStreamHandle,
    to: u64,
    from: u64,
    bytes: usize,
) -> Result<(), BackendError> {
    // SAFETY: the handle belongs to a stream that is alive; both ranges are device memory.
    unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, raw_stream_handle(stream)) }
        .result()
        .map_err(|error| driver_call_error("copy on the GPU", &error))
}

/// Pinned host memory for f32 values that is never freed, because queued work may still use it.
#[derive(Clone, Copy)]
pub struct LeakedPinnedFloats {
    pinned_floats: *mut f32,
    float_count: usize,
}

// SAFETY: threads access the memory one after another, in the order of a stream.
unsafe impl Send for LeakedPinnedFloats {}
// SAFETY: as above.
unsafe impl Sync for LeakedPinnedFloats {}

/// Argument of a host function that triples pinned floats.
struct TripleOnHostArgument(LeakedPinnedFloats);

impl LeakedPinnedFloats {
    /// Allocates `count` pinned floats, all zero.
    pub fn allocate_zeroed_pinned_floats(
        device: &Device,
        count: usize,
    ) -> Result<Self, BackendError> {
        let bound = device.context().bind_to_thread();
        bound.map_err(|error| driver_call_error("make the context current", &error))?;
        let mut memory = ptr::null_mut();
        // SAFETY: the pointer for the address is valid.
        unsafe { sys::cuMemHostAlloc(&raw mut memory, 4 * count, 0) }
            .result()
            .map_err(|error| driver_call_error("pin memory", &error))?;
        let floats = memory.cast::<f32>();
        // SAFETY: `count` floats were allocated.
        unsafe { ptr::write_bytes(floats, 0, count) };
        Ok(Self { pinned_floats: floats, float_count: count })
    }

    /// Copies all floats.
    pub fn copy_all_floats(&self) -> Vec<f32> {
        // SAFETY: `count` floats were allocated and initialised.
        unsafe { std::slice::from_raw_parts(self.pinned_floats, self.float_count) }.to_vec()
    }

    /// Writes `values` to the first floats of the pinned memory.
    pub fn write_first_floats(&self, values: &[f32]) {
        let count = values.len().min(self.float_count);
        // SAFETY: `count` floats were allocated, and the caller's values lie in other memory.
        unsafe { ptr::copy_nonoverlapping(values.as_ptr(), self.pinned_floats, count) };
    }

    /// Enqueues a copy of all floats from a device address to the pinned memory.
    pub fn enqueue_floats_copy_from_device(
        &self,
        stream: RawStreamHandle,
        from: u64,
    ) -> Result<(), BackendError> {
        let to = self.pinned_floats.cast::<c_void>();
        // SAFETY: the pinned memory is never freed.
        unsafe {
            sys::cuMemcpyDtoHAsync_v2(to, from, 4 * self.float_count, raw_stream_handle(stream))
        }
        .result()
        .map_err(|error| driver_call_error("copy from the GPU", &error))
    }

    /// Enqueues a copy of all floats from the pinned memory to a device address.
    pub fn enqueue_floats_copy_to_device(
        &self,
        stream: RawStreamHandle,
        to: u64,
    ) -> Result<(), BackendError> {
        let from = self.pinned_floats.cast_const().cast::<c_void>();
        // SAFETY: the pinned memory is never freed.
        unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from, 4 * self.float_count, raw_stream_handle(stream))
        }
        .result()
        .map_err(|error| driver_call_error("copy to the GPU", &error))
    }

    /// Allocates the argument of the host function that [`Self::tripling_host_function_enqueuer`]
    /// enqueues. The argument is never freed, because it has to live until the host function has
    /// run.
    fn leak_argument_of_host_function(self) -> *mut c_void {
        Box::into_raw(Box::new(TripleOnHostArgument(self))).cast()
    }

    /// Returns a closure that enqueues a host function on a stream; the host function triples all
    /// the pinned floats.
    pub fn tripling_host_function_enqueuer(
        self,
    ) -> impl Fn(RawStreamHandle) -> Result<(), BackendError> {
        unsafe extern "C" fn triple_pinned_floats_host_function(data: *mut c_void) {
            // SAFETY: `data` is the address of a leaked argument, which is never freed.
            let TripleOnHostArgument(pinned) = unsafe { &*data.cast::<TripleOnHostArgument>() };
            for i in 0..pinned.float_count {
                // SAFETY: `count` floats were allocated.
                unsafe { *pinned.pinned_floats.add(i) *= 3.0 };
            }
        }
        let data = self.leak_argument_of_host_function() as usize;
        move |stream| {
            // SAFETY: the host function has this type, and its argument is never freed.
            unsafe {
                sys::cuLaunchHostFunc(
                    raw_stream_handle(stream),
                    Some(triple_pinned_floats_host_function),
                    data as *mut c_void,
                )
            }
            .result()
            .map_err(|error| driver_call_error("enqueue a function of the host", &error))
        }
    }
}
