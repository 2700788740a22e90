//! Checks and restores what a launch by other code must leave unchanged: the CUDA context that is
//! current on the thread, and no open capture of the stream.

use std::ptr;

use cudarc::driver::{CudaContext, DriverError, sys};

use crate::BackendError;
use crate::CaseFailureReason;
use crate::driver::device::Device;
use crate::driver::driver_error::error_for_failed_action;

/// Calls `launch`, then restores the current CUDA context and ends a stream capture that `launch`
/// left open.
///
/// # Errors
/// Fails with the error of `launch`, or with [`BackendError::NotTimed`] if `launch` changed the
/// current context or left a capture of the stream open.
pub fn launch_and_restore_thread_state(
    device: &Device,
    launch: impl FnOnce() -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    make_context_current_on_thread(device.context())?;
    let (before, capturing) =
        (context_current_on_thread()?, is_stream_capturing(device.stream().cu_stream())?);
    let launched = launch();
    let after = context_current_on_thread()?;
    // SAFETY: this context was current on this thread before the launch.
    unsafe { sys::cuCtxSetCurrent(before) }
        .result()
        .map_err(|error| error_for_failed_action("put the current context back", &error))?;
    if !capturing && is_stream_capturing(device.stream().cu_stream())? {
        end_capture_and_destroy_graph(device.stream().cu_stream());
        let open = "a launch leaves a capture of the stream open";
        return Err(BackendError::NotTimed(CaseFailureReason::failure_with_kind_and_sentence(
            "capture_left_open",
            open,
        )));
    }
    launched?;
    if after != before {
        let changed = "a launch changes the CUDA context that is current on the thread";
        return Err(BackendError::NotTimed(CaseFailureReason::failure_with_kind_and_sentence(
            "context_changed",
            changed,
        )));
    }
    Ok(())
}

/// Makes a CUDA context current on the calling thread.
pub(crate) fn make_context_current_on_thread(context: &CudaContext) -> Result<(), BackendError> {
    context
        .bind_to_thread()
        .map_err(|error| error_for_failed_action("make the context current", &error))
}

pub(crate) fn context_current_on_thread() -> Result<sys::CUcontext, BackendError> {
    let mut context = ptr::null_mut();
    // SAFETY: the call gets a pointer to a local variable, which is valid during the call.
    unsafe { sys::cuCtxGetCurrent(&raw mut context) }
        .result()
        .map_err(|error| error_for_failed_action("query the current context", &error))?;
    Ok(context)
}

/// Ends an open capture of a stream, which must be alive, and destroys the captured graph.
pub(crate) fn end_capture_and_destroy_graph(stream: sys::CUstream) {
    let mut graph = ptr::null_mut();
    // SAFETY: the stream lives, the pointer is valid, and nothing else holds the graph.
    unsafe {
        let _ = sys::cuStreamEndCapture(stream, &raw mut graph);
        if !graph.is_null() {
            let _ = sys::cuGraphDestroy(graph);
        }
    }
}

/// Whether a stream, which must be alive, is in capture mode.
pub(crate) fn is_stream_capturing(stream: sys::CUstream) -> Result<bool, BackendError> {
    query_driver_for_stream_capture(stream)
        .map_err(|error| error_for_failed_action("ask whether the stream is in capture", &error))
}

/// Whether a stream, which must be alive, is in capture mode; an error is the driver's own.
pub(crate) fn query_driver_for_stream_capture(stream: sys::CUstream) -> Result<bool, DriverError> {
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
        let spin = SpinKernel::compile_and_allocate_report(&device).unwrap();
        launch_and_restore_thread_state(&device, || spin.enqueue_spin(1000)).unwrap();
        let stream = device.stream().cu_stream();
        let opened = launch_and_restore_thread_state(&device, || {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            // SAFETY: the stream lives.
            unsafe { sys::cuStreamBeginCapture_v2(stream, mode) }.result().unwrap();
            Ok(())
        });
        let kind = |outcome: Result<(), BackendError>| {
            CaseFailureReason::from(&outcome.unwrap_err()).failure_kind
        };
        assert_eq!(kind(opened), "capture_left_open");
        assert!(!is_stream_capturing(stream).unwrap());
        let changed = launch_and_restore_thread_state(&device, || {
            // SAFETY: having no current context is a valid state of a thread.
            unsafe { sys::cuCtxSetCurrent(ptr::null_mut()) }.result().unwrap();
            Ok(())
        });
        assert_eq!(kind(changed), "context_changed");
        // After the refused launch, the device can still launch a kernel.
        launch_and_restore_thread_state(&device, || spin.enqueue_spin(1000)).unwrap();
    }
}
