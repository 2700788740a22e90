//! Where the wall time of a process goes, by activity: drawing inputs, computing references,
//! verifying, timing.
//!
//! Activities nest, and each is given the time that it spent itself: reading a reference inside of
//! a verification counts as reading. Kept a thread, as the harness works on one.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

thread_local! {
    static PROFILE: RefCell<Profile> = RefCell::default();
}

#[derive(Default)]
struct Profile {
    spent: BTreeMap<&'static str, Duration>,
    /// With the activities inside of them.
    whole: BTreeMap<&'static str, Duration>,
    /// Activities that have begun, the innermost last, and when it was last taken up.
    open: Vec<&'static str>,
    since: Option<Instant>,
}

impl Profile {
    /// Gives the innermost activity what has passed.
    fn charge(&mut self) {
        let now = Instant::now();
        if let Some((activity, since)) = self.open.last().zip(self.since.replace(now)) {
            *self.spent.entry(activity).or_default() += now - since;
        }
    }
}

/// An activity from its making to its drop.
#[must_use = "an activity ends where it is dropped"]
pub struct Activity(Instant);

impl Drop for Activity {
    fn drop(&mut self) {
        PROFILE.with_borrow_mut(|profile| {
            profile.charge();
            if let Some(activity) = profile.open.pop() {
                *profile.whole.entry(activity).or_default() += self.0.elapsed();
            }
        });
    }
}

/// Begins an activity.
pub fn start(activity: &'static str) -> Activity {
    PROFILE.with_borrow_mut(|profile| {
        profile.charge();
        profile.open.push(activity);
    });
    Activity(Instant::now())
}

/// What an activity took so far on this thread, the activities inside of it included.
pub fn whole(activity: &'static str) -> Duration {
    PROFILE.with_borrow(|profile| profile.whole.get(activity).copied().unwrap_or_default())
}

/// Seconds by activity, of those that have ended on this thread; counting begins anew.
pub fn take() -> BTreeMap<&'static str, f64> {
    let spent = PROFILE.with_borrow_mut(|profile| {
        profile.whole.clear();
        std::mem::take(&mut profile.spent)
    });
    spent.into_iter().map(|(activity, spent)| (activity, spent.as_secs_f64())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_given_to_the_innermost_activity() {
        let pause = Duration::from_millis(20);
        take();
        {
            let _outer = start("outer");
            {
                let _inner = start("inner");
                std::thread::sleep(pause);
            }
            let _inner = start("inner");
            std::thread::sleep(pause);
        }
        std::thread::sleep(pause);
        assert!(whole("outer") >= 2 * pause && whole("outer") >= whole("inner"));
        let spent = take();
        assert_eq!(spent.keys().copied().collect::<Vec<_>>(), ["inner", "outer"]);
        assert!(spent["inner"] >= 2.0 * pause.as_secs_f64(), "{spent:?}");
        assert!(spent["outer"] < spent["inner"], "{spent:?}");
        assert!(take().is_empty() && whole("outer").is_zero());
    }
}
