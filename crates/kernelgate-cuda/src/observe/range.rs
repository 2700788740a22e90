//! Named ranges: session, case, warm-up, sample; the phases of a computation.
//!
//! An attached profiler receives the ranges through NVTX; without a profiler, a range costs some
//! nanoseconds. While [`super::cupti`] records they are also kept here, with CUPTI's clock, because
//! CUPTI reports NVTX ranges only if it was loaded as NVTX's tool before the first range, which an
//! environment variable decides at the start of a process. Deliberately absent: ranges that other
//! code opens through NVTX. opens through NVTX.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A range that ended while ranges were recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EndedRange {
    pub name: Arc<str>,
    pub start: u64,
    pub end: u64,
    pub thread: u32,
}

/// Names of the ranges that are open, the outermost first.
pub(super) type OpenRanges = Vec<Arc<str>>;

static RANGES_ARE_RECORDED: AtomicBool = AtomicBool::new(false);
static RANGE_CLOCK: Mutex<Option<fn() -> u64>> = Mutex::new(None);
static ENDED_RANGES: Mutex<Vec<EndedRange>> = Mutex::new(Vec::new());

thread_local! {
    /// Ranges of this thread that were opened while ranges were recorded: name and start.
    static OPEN_RANGES_OF_THREAD: RefCell<Vec<(Arc<str>, u64)>> = const { RefCell::new(Vec::new()) };
}

/// A named range that lasts until the guard is dropped; ranges nest.
#[must_use = "a range ends where it is dropped"]
pub struct RangeGuard {
    recorded: bool,
}

impl RangeGuard {
    /// Opens a named range on this thread.
    pub fn new(name: &str) -> Self {
        nvtx::range_push!("{name}");
        let recorded = RANGES_ARE_RECORDED.load(Ordering::Relaxed);
        if recorded {
            let start = range_clock_ns();
            OPEN_RANGES_OF_THREAD.with_borrow_mut(|open| open.push((name.into(), start)));
        }
        Self { recorded }
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        nvtx::range_pop!();
        let opened =
            self.recorded.then(|| OPEN_RANGES_OF_THREAD.with_borrow_mut(Vec::pop)).flatten();
        if let Some((name, start)) = opened {
            let ended = EndedRange { name, start, end: range_clock_ns(), thread: thread_id() };
            ENDED_RANGES.lock().unwrap_or_else(PoisonError::into_inner).push(ended);
        }
    }
}

/// Runs a closure inside a named range.
pub fn within_range<T>(name: &str, work: impl FnOnce() -> T) -> T {
    let _range = RangeGuard::new(name);
    work()
}

/// Records ranges from now on, with this clock.
pub(super) fn record_ranges(clock: fn() -> u64) {
    *RANGE_CLOCK.lock().unwrap_or_else(PoisonError::into_inner) = Some(clock);
    RANGES_ARE_RECORDED.store(true, Ordering::Relaxed);
}

/// Stops recording ranges; open ranges end unrecorded.
pub(super) fn stop_ranges() {
    RANGES_ARE_RECORDED.store(false, Ordering::Relaxed);
    take_ranges();
}

/// The ranges that ended since the last call.
pub(super) fn take_ranges() -> Vec<EndedRange> {
    std::mem::take(&mut *ENDED_RANGES.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The recorded ranges that are open on this thread.
pub(super) fn open_ranges() -> OpenRanges {
    OPEN_RANGES_OF_THREAD
        .with_borrow(|open| open.iter().map(|(name, _)| Arc::clone(name)).collect())
}

fn range_clock_ns() -> u64 {
    let clock = *RANGE_CLOCK.lock().unwrap_or_else(PoisonError::into_inner);
    clock.map_or(0, |clock| clock())
}

/// The system's id of this thread, as in CUPTI's records of calls; 0 if there is no id.
fn thread_id() -> u32 {
    #[cfg(target_os = "linux")]
    {
        rustix::thread::gettid().as_raw_pid().unsigned_abs()
    }
    #[cfg(not(target_os = "linux"))]
    0
}
