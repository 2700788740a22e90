//! Ways to hold a stream: work that is enqueued behind the hold begins only when the stream is
//! released, so that the host's launch time is not in what events read.
//!
//! A blocker kernel ([`StreamBlocker`](crate::instruments::timing::StreamBlocker)) holds the stream
//! of a device that the harness opened. On a stream that other code made, the harness cannot run
//! kernels: the driver calls a host function there ([`HostStreamHold`]).

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::raw_stream::RawStream;
use crate::BackendError;
use crate::driver::driver_error::failed;

/// A way to hold a stream, so that enqueued work waits. A stream can have one hold at a time.
pub trait StreamHold {
    /// Enqueues the hold, which ends after `at_most` in any case. The caller has made the context
    /// of the stream current.
    fn hold(&mut self, at_most: Duration) -> Result<(), BackendError>;

    /// Releases the stream, so that its queued work runs; does nothing if the stream is not held.
    fn release(&mut self);

    /// Returns whether the last hold was released before it timed out. Otherwise it timed out.
    fn was_released(&self) -> bool;
}

/// Holds a stream by a host function that the driver calls when the stream reaches it.
pub struct HostStreamHold {
    stream: RawStream,
    last: Arc<HoldState>,
}

/// State shared with the driver's thread that holds the stream.
struct HoldState {
    at_most: Duration,
    released: AtomicBool,
    expired: AtomicBool,
}

impl HoldState {
    fn new(at_most: Duration) -> Arc<Self> {
        let (released, expired) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { at_most, released, expired })
    }
}

impl HostStreamHold {
    /// Makes a blocking kernel for a stream without launching it.
    pub(crate) fn new(stream: RawStream) -> Self {
        Self { stream, last: HoldState::new(Duration::ZERO) }
    }
}

/// Blocks the driver's thread, and with it the stream, until the hold ends.
///
/// # Safety
/// `data` is an `Arc<HoldState>` made by `Arc::into_raw` for this call.
unsafe extern "C" fn block_stream_on_host(data: *mut c_void) {
    // SAFETY: the caller's contract.
    let hold = unsafe { Arc::from_raw(data.cast::<HoldState>().cast_const()) };
    let started = Instant::now();
    while !hold.released.load(Ordering::Acquire) {
        if started.elapsed() > hold.at_most {
            hold.expired.store(true, Ordering::Release);
            return;
        }
        std::thread::yield_now();
    }
}

impl StreamHold for HostStreamHold {
    fn hold(&mut self, at_most: Duration) -> Result<(), BackendError> {
        self.last = HoldState::new(at_most);
        let data = Arc::into_raw(Arc::clone(&self.last)).cast_mut().cast::<c_void>();
        // SAFETY: the stream lives, and the function gets the data that its contract asks for.
        let held =
            unsafe { sys::cuLaunchHostFunc(self.stream.cu(), Some(block_stream_on_host), data) };
        held.result().map_err(|error| {
            // SAFETY: made above, and not taken by the function, which was refused.
            drop(unsafe { Arc::from_raw(data.cast::<HoldState>().cast_const()) });
            failed("hold the stream", &error)
        })
    }

    fn release(&mut self) {
        self.last.released.store(true, Ordering::Release);
    }

    fn was_released(&self) -> bool {
        !self.last.expired.load(Ordering::Acquire)
    }
}

impl Drop for HostStreamHold {
    fn drop(&mut self) {
        // The stream is released, so that nothing waits for ever.
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits in the driver's callback until the hold is released or times out. Runs the holding
    /// host function; returns whether the hold timed out.
    fn hold_stream(hold: &Arc<HoldState>) -> bool {
        let data = Arc::into_raw(Arc::clone(hold)).cast_mut().cast::<c_void>();
        // SAFETY: the data is an `Arc<HoldState>` that came from `Arc::into_raw`.
        unsafe { block_stream_on_host(data) };
        assert_eq!(Arc::strong_count(hold), 1, "the call gives its count back");
        hold.expired.load(Ordering::Acquire)
    }

    #[test]
    fn a_host_hold_that_is_released_does_not_time_out() {
        let hold = HoldState::new(Duration::from_secs(60));
        hold.released.store(true, Ordering::Release);
        assert!(!hold_stream(&hold));
    }

    #[test]
    fn a_host_hold_that_is_never_released_times_out() {
        assert!(hold_stream(&HoldState::new(Duration::from_millis(1))));
    }
}
