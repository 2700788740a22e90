//! Ends the whole process if a launch on the host exceeds its timeout, because a thread cannot be
//! stopped from outside. The module `harness` writes the record before the process ends.

use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

static LAUNCH_WATCHDOG: OnceLock<HostLaunchWatchdog> = OnceLock::new();

/// Starts the watchdog thread: if launches exceed the limit (see
/// [`start_timeout_of_host_launches`]), the thread calls `ended` with the case name, and `ended`
/// must end the process. Only the first call in a process takes effect; without a call, launches
/// have no timeout.
pub fn start_host_launch_watchdog(limit: Duration, ended: impl FnOnce(&str) + Send + 'static) {
    if LAUNCH_WATCHDOG.set(HostLaunchWatchdog::with_time_limit(limit)).is_ok()
        && let Some(watch) = LAUNCH_WATCHDOG.get()
    {
        std::thread::spawn(move || watch.block_until_timeout(ended));
    }
}

/// Sets the case name that the watchdog passes on if the following launches exceed the timeout.
pub fn set_case_name_for_watchdog(case: &str) {
    if let Some(watch) = LAUNCH_WATCHDOG.get() {
        case.clone_into(&mut watch.lock_state().case_name);
    }
}

/// Starts the timeout of host launches; the timeout is cancelled when the returned guard drops.
/// Create and drop the guard outside the measured time.
pub fn start_timeout_of_host_launches() -> HostLaunchTimeoutGuard {
    let begun = LAUNCH_WATCHDOG.get().filter(|watch| watch.start_timeout_if_not_running());
    HostLaunchTimeoutGuard { watchdog_to_cancel: begun }
}

/// Launches that are watched.
#[must_use]
pub struct HostLaunchTimeoutGuard {
    /// `None` if the watchdog was not started, or if an enclosing guard already runs the timeout.
    watchdog_to_cancel: Option<&'static HostLaunchWatchdog>,
}

impl Drop for HostLaunchTimeoutGuard {
    fn drop(&mut self) {
        if let Some(watch) = self.watchdog_to_cancel {
            watch.lock_state().deadline = None;
        }
    }
}

struct HostLaunchWatchdog {
    launch_time_limit: Duration,
    state: Mutex<WatchedCaseAndDeadline>,
    state_changed: Condvar,
}

#[derive(Default)]
struct WatchedCaseAndDeadline {
    case_name: String,
    /// Time at which the watchdog ends the process; `None` while no launch is watched.
    deadline: Option<Instant>,
}

impl HostLaunchWatchdog {
    fn with_time_limit(limit: Duration) -> Self {
        Self { launch_time_limit: limit, state: Mutex::default(), state_changed: Condvar::new() }
    }

    fn lock_state(&self) -> MutexGuard<'_, WatchedCaseAndDeadline> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the timeout unless it is running; returns whether this call started it.
    fn start_timeout_if_not_running(&self) -> bool {
        let mut state = self.lock_state();
        let begins = state.deadline.is_none();
        if begins {
            // A limit beyond the range of the clock means no timeout.
            state.deadline = Instant::now().checked_add(self.launch_time_limit);
            self.state_changed.notify_one();
        }
        begins
    }

    /// Blocks until watched launches exceed the timeout, then calls `ended` with the case name
    /// while holding the lock.
    fn block_until_timeout(&self, ended: impl FnOnce(&str)) {
        let mut state = self.lock_state();
        loop {
            let left = state.deadline.map(|at| at.saturating_duration_since(Instant::now()));
            state = match left {
                None => self.state_changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return ended(&state.case_name),
                Some(left) => {
                    let woken = self.state_changed.wait_timeout(state, left);
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
    fn watchdog_names_the_case_that_exceeds_the_timeout() {
        let limit = Duration::from_millis(200);
        let watch: &'static HostLaunchWatchdog =
            Box::leak(Box::new(HostLaunchWatchdog::with_time_limit(limit)));
        let (ended, named) = mpsc::channel();
        std::thread::spawn(move || {
            watch
                .block_until_timeout(|case| ended.send((case.to_owned(), Instant::now())).unwrap());
        });
        for _ in 0..3 {
            assert!(watch.start_timeout_if_not_running());
            assert!(!watch.start_timeout_if_not_running(), "one inside the other");
            watch.lock_state().deadline = None;
            // Launches of half the limit never exceed the timeout, because every start sets a new
            // deadline.
            std::thread::sleep(limit / 2);
        }
        "family/operation/n1/cpu/hot".clone_into(&mut watch.lock_state().case_name);
        let begun = Instant::now();
        assert!(watch.start_timeout_if_not_running() && named.try_recv().is_err());
        let (case, at) = named.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(case, "family/operation/n1/cpu/hot");
        assert!(at - begun >= limit, "{:?}", at - begun);
    }
}
