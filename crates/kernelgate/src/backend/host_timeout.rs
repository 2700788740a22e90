//! Timeout of launches on the host: a thread cannot be ended from outside, so the whole process is
//! ended. Deliberately absent: the record that is written before (`harness`).

use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

static LAUNCH_WATCHDOG: OnceLock<LaunchWatchdog> = OnceLock::new();

/// Starts the watch: once launches that are [`watch_host_launches`] take longer than the limit,
/// another thread calls `ended` with the name of the case, which has to end the process. Only the
/// first call in a process counts; without a call nothing is watched.
pub fn start_watchdog(limit: Duration, ended: impl FnOnce(&str) + Send + 'static) {
    if LAUNCH_WATCHDOG.set(LaunchWatchdog::new(limit)).is_ok()
        && let Some(watch) = LAUNCH_WATCHDOG.get()
    {
        std::thread::spawn(move || watch.wait_for_timeout(ended));
    }
}

/// Sets the name of the case whose launches follow, for the timeout's message.
pub fn set_case_name(case: &str) {
    if let Some(watch) = LAUNCH_WATCHDOG.get() {
        case.clone_into(&mut watch.lock().case);
    }
}

/// Watches launches until the result is dropped. The watch must be created and dropped outside of
/// the measured time.
pub fn watch_host_launches() -> WatchedLaunchGuard {
    let begun = LAUNCH_WATCHDOG.get().filter(|watch| watch.begin_if_unwatched());
    WatchedLaunchGuard { watch: begun }
}

/// Launches that are watched.
#[must_use]
pub struct WatchedLaunchGuard {
    /// `None` if nothing is watched, or if the surrounding code is watched already.
    watch: Option<&'static LaunchWatchdog>,
}

impl Drop for WatchedLaunchGuard {
    fn drop(&mut self) {
        if let Some(watch) = self.watch {
            watch.lock().ends_at = None;
        }
    }
}

struct LaunchWatchdog {
    limit: Duration,
    state: Mutex<WatchdogState>,
    changed: Condvar,
}

#[derive(Default)]
struct WatchdogState {
    case: String,
    /// Time by which running launches must have ended; `None` if no launch runs.
    ends_at: Option<Instant>,
}

impl LaunchWatchdog {
    fn new(limit: Duration) -> Self {
        Self { limit, state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, WatchdogState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this call began to watch the launches.
    fn begin_if_unwatched(&self) -> bool {
        let mut state = self.lock();
        let begins = state.ends_at.is_none();
        if begins {
            // A limit beyond the range of the clock means that there is no limit.
            state.ends_at = Instant::now().checked_add(self.limit);
            self.changed.notify_one();
        }
        begins
    }

    /// Blocks until launches exceed the timeout, then calls `ended` while it holds the lock.
    fn wait_for_timeout(&self, ended: impl FnOnce(&str)) {
        let mut state = self.lock();
        loop {
            let left = state.ends_at.map(|at| at.saturating_duration_since(Instant::now()));
            state = match left {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return ended(&state.case),
                Some(left) => {
                    let woken = self.changed.wait_timeout(state, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn reports_the_launch_that_exceeds_the_timeout() {
        let limit = Duration::from_millis(200);
        let watch: &'static LaunchWatchdog = Box::leak(Box::new(LaunchWatchdog::new(limit)));
        let (ended, named) = mpsc::channel();
        std::thread::spawn(move || {
            watch.wait_for_timeout(|case| ended.send((case.to_owned(), Instant::now())).unwrap());
        });
        for _ in 0..3 {
            assert!(watch.begin_if_unwatched());
            assert!(!watch.begin_if_unwatched(), "one inside the other");
            watch.lock().ends_at = None;
            // None of these threads runs on after the timeout.
            std::thread::sleep(limit / 2);
        }
        "family/operation/n1/cpu/hot".clone_into(&mut watch.lock().case);
        let begun = Instant::now();
        assert!(watch.begin_if_unwatched() && named.try_recv().is_err());
        let (case, at) = named.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(case, "family/operation/n1/cpu/hot");
        assert!(at - begun >= limit, "{:?}", at - begun);
    }
}
