//! Waits of the host for the GPU, with a timeout.

use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream, DriverError, result, sys};

use crate::BackendError;
use crate::driver::driver_error::failed;

/// Waits for all work of the stream, at most for the given time.
///
/// # Errors
/// Fails if something on the stream failed, or has not finished by then: [`BackendError::Lost`].
pub fn finish_stream(
    stream: &CudaStream,
    marker: &CudaEvent,
    timeout: Duration,
) -> Result<(), BackendError> {
    marker.record(stream).map_err(|error| failed("record an event", &error))?;
    wait_until_passed(marker.cu_event(), timeout)
}

/// Waits until an event has passed, at most for the given time; the event must be alive.
///
/// # Errors
/// Fails if earlier work failed, or has not finished at the timeout: [`BackendError::Lost`].
pub fn wait_until_passed(event: sys::CUevent, timeout: Duration) -> Result<(), BackendError> {
    let start = Instant::now();
    loop {
        // SAFETY: the CUDA event is alive.
        match unsafe { result::event::query(event) } {
            Ok(()) => return Ok(()),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => {}
            Err(error) => return Err(failed("finish the launches", &error)),
        }
        let waited = start.elapsed();
        if waited > timeout {
            return Err(BackendError::Lost(format!(
                "a kernel did not finish within {} s",
                timeout.as_secs()
            )));
        }
        // The event is polled without a pause at first, for launches of microseconds, and then with
        // pauses, so that a long launch does not occupy a core.
        if waited > Duration::from_millis(2) {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}
