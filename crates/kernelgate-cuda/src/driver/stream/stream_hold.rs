//! Ways to hold a CUDA stream: work enqueued behind a hold starts only when the host releases the
//! stream, so that events do not include the host's launch time.
//!
//! On the stream of a device that kernelgate opened, a spinning kernel
//! ([`StreamBlocker`](crate::instruments::timing::StreamBlocker)) holds the stream. On a foreign
//! stream, kernelgate launches no kernels: the driver calls a host function there that waits
//! ([`StreamHoldByHostFunction`]).

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::raw_stream::RawStreamHandle;
use crate::BackendError;
use crate::driver::driver_error::error_for_failed_action;

/// A way to hold a CUDA stream, so that enqueued work waits until the host releases the stream. A
/// stream can have only one hold at a time.
pub trait StreamHold {
    /// Enqueues the hold, which ends at the latest after the duration `at_most`. The caller must
    /// have made the CUDA context of the stream current.
    fn enqueue_hold(&mut self, at_most: Duration) -> Result<(), BackendError>;

    /// Releases the stream, so that its queued work runs; does nothing if the stream is not held.
    fn release_stream(&mut self);

    /// Returns whether the host released the last hold before the hold timed out.
    fn was_released_in_time(&self) -> bool;
}

/// Holds a CUDA stream by a host function that the driver calls when the stream reaches it, and
/// that waits.
pub struct StreamHoldByHostFunction {
    stream: RawStreamHandle,
    last_hold: Arc<HostHoldState>,
}

/// State of a hold, shared between the host and the driver's thread that waits.
struct HostHoldState {
    time_limit: Duration,
    released: AtomicBool,
    hold_timed_out: AtomicBool,
}

impl HostHoldState {
    fn with_time_limit(at_most: Duration) -> Arc<Self> {
        let (released, expired) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { time_limit: at_most, released, hold_timed_out: expired })
    }
}

impl StreamHoldByHostFunction {
    /// Makes a hold for a stream without enqueueing it.
    pub(crate) fn hold_for_stream(stream: RawStreamHandle) -> Self {
        Self { stream, last_hold: HostHoldState::with_time_limit(Duration::ZERO) }
    }
}

/// Blocks the driver's thread, and with it the stream, until the hold is released or times out.
///
/// # Safety
/// The pointer `data` must come from `Arc::into_raw` of an `Arc<HostHoldState>` for this one call.
unsafe extern "C" fn wait_on_driver_thread(data: *mut c_void) {
    // SAFETY: the caller guarantees that `data` comes from `Arc::into_raw`, for this call alone.
    let hold = unsafe { Arc::from_raw(data.cast::<HostHoldState>().cast_const()) };
    let started = Instant::now();
    while !hold.released.load(Ordering::Acquire) {
        if started.elapsed() > hold.time_limit {
            hold.hold_timed_out.store(true, Ordering::Release);
            return;
        }
        std::thread::yield_now();
    }
}

impl StreamHold for StreamHoldByHostFunction {
    fn enqueue_hold(&mut self, at_most: Duration) -> Result<(), BackendError> {
        self.last_hold = HostHoldState::with_time_limit(at_most);
        let data = Arc::into_raw(Arc::clone(&self.last_hold)).cast_mut().cast::<c_void>();
        // SAFETY: the stream is alive, and the host function gets a pointer from `Arc::into_raw` as
        // its contract demands.
        let held = unsafe {
            sys::cuLaunchHostFunc(self.stream.driver_handle(), Some(wait_on_driver_thread), data)
        };
        held.result().map_err(|error| {
            // SAFETY: the pointer was made above, and the host function never gets it, because the
            // driver refused the call.
            drop(unsafe { Arc::from_raw(data.cast::<HostHoldState>().cast_const()) });
            error_for_failed_action("hold the stream", &error)
        })
    }

    fn release_stream(&mut self) {
        self.last_hold.released.store(true, Ordering::Release);
    }

    fn was_released_in_time(&self) -> bool {
        !self.last_hold.hold_timed_out.load(Ordering::Acquire)
    }
}

impl Drop for StreamHoldByHostFunction {
    fn drop(&mut self) {
        // Dropping the hold releases the stream, so that its work does not wait for ever.
        self.release_stream();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls the host function that waits until the hold is released or times out. Returns whether
    /// the hold timed out.
    fn call_host_function_and_check_timeout(hold: &Arc<HostHoldState>) -> bool {
        let data = Arc::into_raw(Arc::clone(hold)).cast_mut().cast::<c_void>();
        // SAFETY: the data is an `Arc<HostHoldState>` that came from `Arc::into_raw`.
        unsafe { wait_on_driver_thread(data) };
        assert_eq!(Arc::strong_count(hold), 1, "the call gives its count back");
        hold.hold_timed_out.load(Ordering::Acquire)
    }

    #[test]
    fn a_host_hold_that_is_released_does_not_time_out() {
        let hold = HostHoldState::with_time_limit(Duration::from_secs(60));
        hold.released.store(true, Ordering::Release);
        assert!(!call_host_function_and_check_timeout(&hold));
    }

    #[test]
    fn a_host_hold_that_is_never_released_times_out() {
        assert!(call_host_function_and_check_timeout(&HostHoldState::with_time_limit(
            Duration::from_millis(1)
        )));
    }
}
