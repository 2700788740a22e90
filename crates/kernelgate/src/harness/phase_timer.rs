//! Wall time of a process by activity: drawing inputs, computing references, verifying, timing.
//!
//! Activities nest, and each gets only its own time: reading a reference during a verification
//! counts as reading. The timer is thread-local because the harness works on one thread.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

thread_local! {
    static PHASE_PROFILE: RefCell<PhaseProfile> = RefCell::default();
}

#[derive(Default)]
struct PhaseProfile {
    spent: BTreeMap<&'static str, Duration>,
    /// Time of each activity, including time in activities nested inside it.
    whole: BTreeMap<&'static str, Duration>,
    /// Activities that are running, the innermost last. `since` is the time up to which the
    /// activities in `open` have been charged.
    open: Vec<&'static str>,
    since: Option<Instant>,
}

impl PhaseProfile {
    /// Charges the time since the last call to the innermost activity.
    fn charge_innermost(&mut self) {
        let now = Instant::now();
        if let Some((activity, since)) = self.open.last().zip(self.since.replace(now)) {
            *self.spent.entry(activity).or_default() += now - since;
        }
    }
}

/// A running activity of the phase timer; it ends when this value is dropped.
#[must_use = "an activity ends where it is dropped"]
pub struct TimedActivity(Instant);

impl Drop for TimedActivity {
    fn drop(&mut self) {
        PHASE_PROFILE.with_borrow_mut(|profile| {
            profile.charge_innermost();
            if let Some(activity) = profile.open.pop() {
                *profile.whole.entry(activity).or_default() += self.0.elapsed();
            }
        });
    }
}

/// Begins an activity.
pub fn start_activity(activity: &'static str) -> TimedActivity {
    PHASE_PROFILE.with_borrow_mut(|profile| {
        profile.charge_innermost();
        profile.open.push(activity);
    });
    TimedActivity(Instant::now())
}

/// Time that this thread has spent in an activity so far, with the activities nested inside it.
pub fn activity_time(activity: &'static str) -> Duration {
    PHASE_PROFILE.with_borrow(|profile| profile.whole.get(activity).copied().unwrap_or_default())
}

/// Returns the seconds that this thread spent in each finished activity, and resets the timer.
pub fn take_phase_times() -> BTreeMap<&'static str, f64> {
    let spent = PHASE_PROFILE.with_borrow_mut(|profile| {
        profile.whole.clear();
        std::mem::take(&mut profile.spent)
    });
    spent.into_iter().map(|(activity, spent)| (activity, spent.as_secs_f64())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phase_time_is_charged_to_the_innermost_activity() {
        let pause = Duration::from_millis(20);
        take_phase_times();
        {
            let _outer = start_activity("outer");
            {
                let _inner = start_activity("inner");
                std::thread::sleep(pause);
            }
            let _inner = start_activity("inner");
            std::thread::sleep(pause);
        }
        std::thread::sleep(pause);
        assert!(
            activity_time("outer") >= 2 * pause && activity_time("outer") >= activity_time("inner")
        );
        let spent = take_phase_times();
        assert_eq!(spent.keys().copied().collect::<Vec<_>>(), ["inner", "outer"]);
        assert!(spent["inner"] >= 2.0 * pause.as_secs_f64(), "{spent:?}");
        assert!(spent["outer"] < spent["inner"], "{spent:?}");
        assert!(take_phase_times().is_empty() && activity_time("outer").is_zero());
    }
}
