//! Named ranges of the host: kernelgate's session, case, warm-up and sample, and the phases of a
//! computation.
//!
//! Ranges are reported through NVTX to an attached profiler; without a profiler, a range costs some
//! nanoseconds. During a CUPTI recording, ranges are also kept here with CUPTI's clock, because
//! CUPTI sees NVTX ranges only if loaded as NVTX's tool before the first range. Ranges that other
//! code opens through NVTX are not recorded here.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A named range that ended during a CUPTI recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EndedNamedRange {
    pub range_name: Arc<str>,
    pub start_ns: u64,
    pub end_ns: u64,
    pub os_thread_id: u32,
}

/// Names of the ranges that are open on a thread, the outermost first.
pub(super) type OpenRangeNames = Vec<Arc<str>>;

static RANGES_ARE_RECORDED: AtomicBool = AtomicBool::new(false);
static RANGE_CLOCK: Mutex<Option<fn() -> u64>> = Mutex::new(None);
static ENDED_RANGES: Mutex<Vec<EndedNamedRange>> = Mutex::new(Vec::new());

thread_local! {
    /// Ranges of this thread that were opened during a CUPTI recording: name and start, nanoseconds
    /// of CUPTI's clock.
    static OPEN_RANGES_OF_THREAD: RefCell<Vec<(Arc<str>, u64)>> = const { RefCell::new(Vec::new()) };
}

/// Keeps a named range of this thread open until the guard is dropped; ranges nest.
#[must_use = "a range ends where it is dropped"]
pub struct NamedRangeGuard {
    is_range_recorded: bool,
}

impl NamedRangeGuard {
    /// Opens a named range on this thread.
    pub fn open_named_range(name: &str) -> Self {
        nvtx::range_push!("{name}");
        let recorded = RANGES_ARE_RECORDED.load(Ordering::Relaxed);
        if recorded {
            let start = recording_clock_ns_or_zero();
            OPEN_RANGES_OF_THREAD.with_borrow_mut(|open| open.push((name.into(), start)));
        }
        Self { is_range_recorded: recorded }
    }
}

impl Drop for NamedRangeGuard {
    fn drop(&mut self) {
        nvtx::range_pop!();
        let opened = self
            .is_range_recorded
            .then(|| OPEN_RANGES_OF_THREAD.with_borrow_mut(Vec::pop))
            .flatten();
        if let Some((name, start)) = opened {
            let ended = EndedNamedRange {
                range_name: name,
                start_ns: start,
                end_ns: recording_clock_ns_or_zero(),
                os_thread_id: system_thread_id(),
            };
            ENDED_RANGES.lock().unwrap_or_else(PoisonError::into_inner).push(ended);
        }
    }
}

/// Runs a closure inside a named range of this thread.
pub fn run_within_named_range<T>(name: &str, work: impl FnOnce() -> T) -> T {
    let _range = NamedRangeGuard::open_named_range(name);
    work()
}

/// Records named ranges from now on; `clock` returns their times in nanoseconds.
pub(super) fn start_recording_ranges(clock: fn() -> u64) {
    *RANGE_CLOCK.lock().unwrap_or_else(PoisonError::into_inner) = Some(clock);
    RANGES_ARE_RECORDED.store(true, Ordering::Relaxed);
}

/// Stops recording named ranges, and forgets recorded ranges that nobody took; ranges that are open
/// now are not recorded.
pub(super) fn stop_recording_ranges() {
    RANGES_ARE_RECORDED.store(false, Ordering::Relaxed);
    take_ended_ranges();
}

/// Returns the named ranges of all threads that ended since the last call.
pub(super) fn take_ended_ranges() -> Vec<EndedNamedRange> {
    std::mem::take(&mut *ENDED_RANGES.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Returns the names of recorded ranges that are open on this thread.
pub(super) fn names_of_open_ranges_on_this_thread() -> OpenRangeNames {
    OPEN_RANGES_OF_THREAD
        .with_borrow(|open| open.iter().map(|(name, _)| Arc::clone(name)).collect())
}

fn recording_clock_ns_or_zero() -> u64 {
    let clock = *RANGE_CLOCK.lock().unwrap_or_else(PoisonError::into_inner);
    clock.map_or(0, |clock| clock())
}

/// Returns the operating-system id of this thread, as in CUPTI's records of host calls; 0 on
/// systems without such ids.
fn system_thread_id() -> u32 {
    #[cfg(target_os = "linux")]
    {
        rustix::thread::gettid().as_raw_pid().unsigned_abs()
    }
    #[cfg(not(target_os = "linux"))]
    0
}
