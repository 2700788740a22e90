//! Measures the process's wall time by activity, such as drawing inputs, computing references,
//! verifying and timing.
//!
//! Activities nest, and each is charged only its own time: reading a reference during verification
//! counts as reading. The timer is thread-local, because the harness works on a single thread.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

thread_local! {
    static PHASE_PROFILE: RefCell<TimeByActivity> = RefCell::default();
}

#[derive(Default)]
struct TimeByActivity {
    time_without_nested: BTreeMap<&'static str, Duration>,
    /// Time of each activity including the activities nested inside it.
    time_with_nested: BTreeMap<&'static str, Duration>,
    /// The running activities, innermost last. `charged_until` is the time until which running
    /// activities have been charged.
    running_activities: Vec<&'static str>,
    charged_until: Option<Instant>,
}

impl TimeByActivity {
    /// Charges the time since the last charge to the innermost running activity.
    fn charge_time_to_innermost_activity(&mut self) {
        let now = Instant::now();
        if let Some((activity, since)) =
            self.running_activities.last().zip(self.charged_until.replace(now))
        {
            *self.time_without_nested.entry(activity).or_default() += now - since;
        }
    }
}

/// A running activity of the phase timer; dropping this guard ends the activity.
#[must_use = "an activity ends where it is dropped"]
pub struct RunningActivityGuard(Instant);

impl Drop for RunningActivityGuard {
    fn drop(&mut self) {
        PHASE_PROFILE.with_borrow_mut(|profile| {
            profile.charge_time_to_innermost_activity();
            if let Some(activity) = profile.running_activities.pop() {
                *profile.time_with_nested.entry(activity).or_default() += self.0.elapsed();
            }
        });
    }
}

/// Begins an activity.
pub fn start_timed_activity(activity: &'static str) -> RunningActivityGuard {
    PHASE_PROFILE.with_borrow_mut(|profile| {
        profile.charge_time_to_innermost_activity();
        profile.running_activities.push(activity);
    });
    RunningActivityGuard(Instant::now())
}

/// Time that this thread has spent in an activity so far, including activities nested inside it.
pub fn time_in_activity_with_nested(activity: &'static str) -> Duration {
    PHASE_PROFILE
        .with_borrow(|profile| profile.time_with_nested.get(activity).copied().unwrap_or_default())
}

/// Returns the seconds that this thread spent in each activity, without nested activities, and
/// resets the timer.
pub fn take_seconds_by_activity() -> BTreeMap<&'static str, f64> {
    let spent = PHASE_PROFILE.with_borrow_mut(|profile| {
        profile.time_with_nested.clear();
        std::mem::take(&mut profile.time_without_nested)
    });
    spent.into_iter().map(|(activity, spent)| (activity, spent.as_secs_f64())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phase_time_is_charged_to_the_innermost_activity() {
        let pause = Duration::from_millis(20);
        take_seconds_by_activity();
        {
            let _outer = start_timed_activity("outer");
            {
                let _inner = start_timed_activity("inner");
                std::thread::sleep(pause);
            }
            let _inner = start_timed_activity("inner");
            std::thread::sleep(pause);
        }
        std::thread::sleep(pause);
        assert!(
            time_in_activity_with_nested("outer") >= 2 * pause
                && time_in_activity_with_nested("outer") >= time_in_activity_with_nested("inner")
        );
        let spent = take_seconds_by_activity();
        assert_eq!(spent.keys().copied().collect::<Vec<_>>(), ["inner", "outer"]);
        assert!(spent["inner"] >= 2.0 * pause.as_secs_f64(), "{spent:?}");
        assert!(spent["outer"] < spent["inner"], "{spent:?}");
        assert!(
            take_seconds_by_activity().is_empty()
                && time_in_activity_with_nested("outer").is_zero()
        );
    }
}
