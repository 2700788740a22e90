//! State of the thread and the stream that a launch of other code must leave unchanged: the current
//! context, and no open capture.

use std::ptr;

use cudarc::driver::{CudaContext, DriverError, sys};

use crate::BackendError;
use crate::CaseFailure;
use crate::driver::device::Device;
use crate::driver::driver_error::failed;

/// Launches, and restores the state that the launch changed.
///
/// # Errors
/// Errors of `launch`; [`BackendError::NotTimed`] if it changed the current context or left a
/// capture of the stream open.
pub fn restore_after_launch(
    device: &Device,
    launch: impl FnOnce() -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    bind(device.context())?;
    let (before, capturing) =
        (current_context()?, is_capturing_stream(device.stream().cu_stream())?);
    let launched = launch();
    let after = current_context()?;
    // SAFETY: the context was current before on this thread.
    unsafe { sys::cuCtxSetCurrent(before) }
        .result()
        .map_err(|error| failed("put the current context back", &error))?;
    if !capturing && is_capturing_stream(device.stream().cu_stream())? {
        abandon_capture(device.stream().cu_stream());
        let open = "a launch leaves a capture of the stream open";
        return Err(BackendError::NotTimed(CaseFailure::new("capture_left_open", open)));
    }
    launched?;
    if after != before {
        let changed = "a launch changes the CUDA context that is current on the thread";
        return Err(BackendError::NotTimed(CaseFailure::new("context_changed", changed)));
    }
    Ok(())
}

/// Makes a context current on the thread.
pub(crate) fn bind(context: &CudaContext) -> Result<(), BackendError> {
    context.bind_to_thread().map_err(|error| failed("make the context current", &error))
}

pub(crate) fn current_context() -> Result<sys::CUcontext, BackendError> {
    let mut context = ptr::null_mut();
    // SAFETY: the call gets a pointer to a local variable, which is valid during the call.
    unsafe { sys::cuCtxGetCurrent(&raw mut context) }
        .result()
        .map_err(|error| failed("query the current context", &error))?;
    Ok(context)
}

/// Ends an open capture of a live stream, and drops the graph.
pub(crate) fn abandon_capture(stream: sys::CUstream) {
    let mut graph = ptr::null_mut();
    // SAFETY: the stream lives, the pointer is valid, and nothing else holds the graph.
    unsafe {
        let _ = sys::cuStreamEndCapture(stream, &raw mut graph);
        if !graph.is_null() {
            let _ = sys::cuGraphDestroy(graph);
        }
    }
}

/// Whether a live stream is in capture.
pub(crate) fn is_capturing_stream(stream: sys::CUstream) -> Result<bool, BackendError> {
    capture_status(stream).map_err(|error| failed("ask whether the stream is in capture", &error))
}

/// Returns whether a live stream is being captured, or the driver's own error.
pub(crate) fn capture_status(stream: sys::CUstream) -> Result<bool, DriverError> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream lives and the pointer is valid.
    unsafe { sys::cuStreamIsCapturing(stream, &raw mut status) }.result()?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instruments::spin_kernel::SpinKernel;
    use crate::testing::lock_first_gpu;

    #[test]
    fn an_open_capture_and_a_changed_context_are_errors_and_are_undone() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let spin = SpinKernel::new(&device).unwrap();
        restore_after_launch(&device, || spin.launch(1000)).unwrap();
        let stream = device.stream().cu_stream();
        let opened = restore_after_launch(&device, || {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            // SAFETY: the stream lives.
            unsafe { sys::cuStreamBeginCapture_v2(stream, mode) }.result().unwrap();
            Ok(())
        });
        let kind =
            |outcome: Result<(), BackendError>| CaseFailure::from(&outcome.unwrap_err()).kind;
        assert_eq!(kind(opened), "capture_left_open");
        assert!(!is_capturing_stream(stream).unwrap());
        let changed = restore_after_launch(&device, || {
            // SAFETY: no context is a context that may be current.
            unsafe { sys::cuCtxSetCurrent(ptr::null_mut()) }.result().unwrap();
            Ok(())
        });
        assert_eq!(kind(changed), "context_changed");
        // The device still launches.
        restore_after_launch(&device, || spin.launch(1000)).unwrap();
    }
}
