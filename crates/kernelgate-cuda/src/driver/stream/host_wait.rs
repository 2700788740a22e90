//! Waits of the host for work on the GPU, with a timeout.

use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream, DriverError, result, sys};

use crate::BackendError;
use crate::driver::driver_error::error_for_failed_action;

/// Waits until all work on the stream has finished, at most for the duration `timeout`.
///
/// # Errors
/// Fails with [`BackendError::DeviceLost`] if the work has not finished at the timeout, or if work
/// on the stream failed.
pub fn wait_for_stream_with_timeout(
    stream: &CudaStream,
    marker: &CudaEvent,
    timeout: Duration,
) -> Result<(), BackendError> {
    marker.record(stream).map_err(|error| error_for_failed_action("record an event", &error))?;
    wait_for_event_with_timeout(marker.cu_event(), timeout)
}

/// Waits until an event has passed, at most for the duration `timeout`; the event must be alive.
///
/// # Errors
/// Fails with [`BackendError::DeviceLost`] if the event has not passed at the timeout, or if
/// earlier work failed.
pub fn wait_for_event_with_timeout(
    event: sys::CUevent,
    timeout: Duration,
) -> Result<(), BackendError> {
    let start = Instant::now();
    loop {
        // SAFETY: the CUDA event is alive.
        match unsafe { result::event::query(event) } {
            Ok(()) => return Ok(()),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => {}
            Err(error) => return Err(error_for_failed_action("finish the launches", &error)),
        }
        let waited = start.elapsed();
        if waited > timeout {
            return Err(BackendError::DeviceLost(format!(
                "a kernel did not finish within {} s",
                timeout.as_secs()
            )));
        }
        // The host polls the event first without pauses, for launches of microseconds, and after 2
        // ms with pauses, so that a long launch does not occupy a core.
        if waited > Duration::from_millis(2) {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}
