//! Whether the events enclose the routine's work: what each pass of a routine shows, pass by pass.
//!
//! A pass is what lies between two events: Criterion's warm-up makes passes of 1, 2, 4, 8 …
//! iterations, then come the samples; how many iterations a pass has is not told. Three looks:
//!
//! - Some passes begin with the stream held, until the pass is enqueued. The interval is then what
//!   the stream alone did, and one no longer than that of two events in a row is of nothing.
//! - A routine that waits for the stream, or for the whole context, outlasts the hold. Its first
//!   pass then shows what it enqueued before it waited; where that is nothing, and each of three
//!   later passes takes long all the same, the time is that of the host or of another stream.
//! - When a pass is done, the whole context has to be.
//!
//! Deliberately absent: clocks and events ([`StreamTimer`]). What waits for the whole context and
//! works on another stream for less than [`SHOWN_LATER`] is not seen; a host that is held up for
//! longer than that in each of the three passes is taken for such work.
//!
//! [`StreamTimer`]: kernelgate_cuda::driver::stream_timer::StreamTimer

use std::time::Duration;

use kernelgate_cuda::driver::stream_timer::{EmptyReadings, Interval};

/// How long the first pass is held at most.
const FIRST_HOLD: Duration = Duration::from_millis(5);
/// The longest hold of a pass that is still to show whether its routine waits.
const LONGEST_HOLD: Duration = Duration::from_millis(500);
/// A hold lasts so many times what the pass before took, because passes grow.
const TIMES_THE_LAST: u32 = 4;
/// Passes that are held until one shows that the routine does not wait; the last of them decides.
const DECIDING: [u32; 3] = [1, 2, 4];
/// How long later passes are held at most: enough for one that enqueues nothing to end.
const LATER_HOLD: Duration = Duration::from_millis(1);
/// The share of the least command's own time from which on an interval is of more than nothing.
const OF_LEAST: f64 = 0.25;
/// By how much the context may be busy for longer than the stream: what asking costs, and a share
/// of the pass, below which it does not matter.
const ASKING: Duration = Duration::from_micros(60);
const SHARE: f64 = 0.02;
/// Passes of which each has to show such work: a host that was held up shows it once.
const BUSY_PASSES: u32 = 5;
/// Passes, none of them held, that show what a routine that waits takes: each has to show work
/// elsewhere, because a host that was held up shows it in one.
const SHOWING: [u32; 3] = [3, 5, 6];
/// What such a pass takes at least, beyond the waits in it, where work elsewhere is told from the
/// host's own: nanoseconds.
pub const SHOWN_LATER: f64 = 100_000.0;
/// What the waits of a pass may take, as a multiple of one wait for each iteration.
const TIMES_THE_WAIT: f64 = 2.0;

/// A routine's passes so far. One a case.
#[derive(Debug, Clone, Default)]
pub struct Checks {
    passes: u32,
    waits: Waits,
    last: Duration,
    /// What the first pass showed, where it outlasted its hold, nanoseconds.
    first_ns: Option<f64>,
    /// Of the passes in [`SHOWING`], the one that took the least beyond its waits.
    shown: Option<Shown>,
    context_done: bool,
    busy: u32,
    shortest_busy: Option<Duration>,
}

/// Whether a routine waits for what it enqueued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Waits {
    #[default]
    Unknown,
    No,
    Yes,
}

/// What a pass took, nanoseconds: all of it, and beyond the waits in it.
#[derive(Debug, Clone, Copy)]
struct Shown {
    elapsed_ns: f64,
    beyond_ns: f64,
}

/// What a pass showed.
#[derive(Debug, Clone, Copy)]
pub struct Pass {
    /// Between its events.
    pub interval: Interval,
    /// Time of the host from the first event to the last.
    pub host: Duration,
    /// How long the context was busy when the last event had happened, where that was asked.
    pub busy: Option<Duration>,
}

impl Checks {
    /// How long the next pass is to be held at most; none where it is not to be held.
    pub fn next_hold(&self) -> Option<Duration> {
        let pass = self.passes + 1;
        match self.waits {
            Waits::Unknown => {
                let hold = FIRST_HOLD + TIMES_THE_LAST * self.last;
                DECIDING.contains(&pass).then(|| hold.min(LONGEST_HOLD))
            }
            Waits::No => pass.is_power_of_two().then_some(LATER_HOLD),
            Waits::Yes => None,
        }
    }

    /// Whether the pass that has just ended is to be followed by a look at the whole context: not
    /// one that was held, beside which other streams had the time to finish.
    pub const fn asks_for_context(&self, interval: &Interval) -> bool {
        !self.context_done && interval.held.is_none()
    }

    /// Takes note of a pass.
    ///
    /// # Errors
    /// A fragment that says why no time of the routine would be true.
    pub fn judge(&mut self, pass: Pass, readings: &EmptyReadings) -> Result<(), String> {
        self.passes += 1;
        self.last = pass.host;
        let elapsed_ns = pass.interval.elapsed_ns;
        match pass.interval.held {
            Some(true) => {
                self.waits = Waits::No;
                let own_ns = (readings.least_ns - readings.nothing_ns).max(0.0);
                if elapsed_ns <= readings.nothing_ns + OF_LEAST * own_ns {
                    return Err("the routine enqueues nothing on the stream that is timed; what \
                                runs on another stream, or on the host, has no time here"
                        .to_owned());
                }
            }
            Some(false) if self.waits == Waits::Unknown => {
                if self.passes == DECIDING[0] {
                    self.first_ns = Some(elapsed_ns);
                }
                if self.passes >= DECIDING[DECIDING.len() - 1] {
                    self.waits = Waits::Yes;
                }
            }
            _ => {}
        }
        if SHOWING.contains(&self.passes) {
            let iterations = f64::from(1_u32 << (self.passes - 1));
            let beyond_ns = elapsed_ns - TIMES_THE_WAIT * iterations * readings.waited_ns;
            if self.shown.is_none_or(|least| beyond_ns < least.beyond_ns) {
                self.shown = Some(Shown { elapsed_ns, beyond_ns });
            }
            if self.waits == Waits::Yes && self.passes == SHOWING[SHOWING.len() - 1] {
                self.check_waiting(readings)?;
            }
        }
        pass.busy.map_or(Ok(()), |busy| self.check_context(busy, elapsed_ns))
    }

    /// Of a routine that waits: whether the stream did anything before the first wait.
    fn check_waiting(&self, readings: &EmptyReadings) -> Result<(), String> {
        let first_ns = self.first_ns.filter(|&first_ns| first_ns <= readings.waited_ns);
        let shown = self.shown.filter(|shown| shown.beyond_ns > SHOWN_LATER);
        let (Some(first_ns), Some(shown)) = (first_ns, shown) else { return Ok(()) };
        Err(format!(
            "the routine takes {:.0} µs between the events, and the stream did nothing in it while \
             the host waited ({:.0} µs): it works on another stream, or on the host",
            shown.elapsed_ns / 1e3,
            first_ns / 1e3
        ))
    }

    fn check_context(&mut self, busy: Duration, elapsed_ns: f64) -> Result<(), String> {
        let allowed = ASKING + Duration::from_nanos((SHARE * elapsed_ns) as u64);
        if busy <= allowed {
            self.context_done = true;
            return Ok(());
        }
        let shortest = self.shortest_busy.map_or(busy, |shortest| shortest.min(busy));
        self.shortest_busy = Some(shortest);
        self.busy += 1;
        if self.busy < BUSY_PASSES {
            return Ok(());
        }
        Err(format!(
            "the routine keeps the GPU busy for {} µs after the stream that is timed has \
             finished: it works on another stream",
            shortest.as_micros()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READINGS: EmptyReadings =
        EmptyReadings { nothing_ns: 1300.0, least_ns: 3000.0, waited_ns: 20_000.0 };

    /// A routine by what its stream does in a pass when it is held and not, nanoseconds, whether it
    /// outlasts every hold, and for how long the context is busy afterwards, microseconds.
    struct Routine {
        held_ns: f64,
        free_ns: fn(u32) -> f64,
        waits: bool,
        busy_us: u64,
    }

    /// Runs passes until one is refused, 64 at most; which were held, and the refusal.
    fn run(routine: &Routine) -> (Vec<u32>, Option<String>) {
        let (mut checks, mut held) = (Checks::default(), Vec::new());
        for pass in 1..=64 {
            let hold = checks.next_hold();
            held.extend(hold.map(|_| pass));
            let free_ns = (routine.free_ns)(pass);
            let elapsed_ns = if hold.is_some() { routine.held_ns } else { free_ns };
            let interval =
                Interval { elapsed_ns, drained: false, held: hold.map(|_| !routine.waits) };
            let asked = checks.asks_for_context(&interval);
            let busy = asked.then(|| Duration::from_micros(routine.busy_us));
            let host = Duration::from_nanos(free_ns as u64);
            if let Err(why) = checks.judge(Pass { interval, host, busy }, &READINGS) {
                return (held, Some(why));
            }
        }
        (held, None)
    }

    #[test]
    fn honest_routines_are_timed() {
        let enqueues = Routine { held_ns: 2500.0, free_ns: |_| 4e3, waits: false, busy_us: 5 };
        assert_eq!(run(&enqueues), (vec![1, 2, 4, 8, 16, 32, 64], None));
        // A kernel of 3 µs with a wait in each iteration: the host's time is most of it.
        let grows = |pass: u32| 35e3 * f64::from(1_u32 << (pass - 1).min(20));
        let waits = Routine { held_ns: 18e3, free_ns: grows, waits: true, busy_us: 5 };
        assert_eq!(run(&waits), (vec![1, 2, 4], None));
        let long = Routine { held_ns: 5e6, free_ns: |_| 5e6, waits: true, busy_us: 90 };
        assert_eq!(run(&long).1, None, "a share of the pass");
    }

    #[test]
    fn a_routine_that_leaves_nothing_on_the_stream_is_refused() {
        let nothing = Routine { held_ns: 1300.0, free_ns: |_| 1e6, waits: false, busy_us: 0 };
        let (held, why) = run(&nothing);
        assert!(held == [1] && why.unwrap().contains("enqueues nothing"));
        // One that stops enqueueing later.
        let (mut checks, mut refused) = (Checks::default(), None);
        for pass in 1..=64 {
            let elapsed_ns = if pass < 20 { 9e3 } else { 1250.0 };
            let held = checks.next_hold().map(|_| true);
            let interval = Interval { elapsed_ns, drained: false, held };
            let pass_ns = Pass { interval, host: Duration::ZERO, busy: None };
            if checks.judge(pass_ns, &READINGS).is_err() {
                refused = Some(pass);
                break;
            }
        }
        assert_eq!(refused, Some(32));
    }

    #[test]
    fn a_routine_that_waits_for_work_elsewhere_is_refused() {
        // 225 µs an iteration.
        let grows = |pass: u32| 225e3 * f64::from(1_u32 << (pass - 1));
        let elsewhere = Routine { held_ns: 15e3, free_ns: grows, waits: true, busy_us: 0 };
        let (held, why) = run(&elsewhere);
        let why = why.unwrap();
        assert!(held == [1, 2, 4] && why.contains("900 µs") && why.contains("another stream"));
        // A pass of one iteration each, as where the warm-up ends after the first.
        let slow = Routine { free_ns: |_| 70e6, ..elsewhere };
        assert!(run(&slow).1.unwrap().contains("70000 µs"));
    }

    #[test]
    fn a_host_held_up_in_one_pass_or_two_is_no_work_elsewhere() {
        let held_up = |pass: u32| {
            let iterations = f64::from(1_u32 << (pass - 1).min(20));
            35e3 * iterations + if [3, 5].contains(&pass) { 5e6 } else { 0.0 }
        };
        let waits = Routine { held_ns: 18e3, free_ns: held_up, waits: true, busy_us: 5 };
        assert_eq!(run(&waits), (vec![1, 2, 4], None));
    }

    #[test]
    fn a_context_that_is_busy_afterwards_is_refused_where_every_pass_shows_it() {
        let beside = Routine { held_ns: 5e4, free_ns: |_| 5e4, waits: false, busy_us: 400 };
        assert!(run(&beside).1.unwrap().contains("busy for 400 µs after"));
        let mut checks = Checks::default();
        for busy_us in [400, 400, 400, 400, 3, 400, 400] {
            let interval = Interval { elapsed_ns: 5e4, drained: false, held: None };
            let busy = checks.asks_for_context(&interval).then(|| Duration::from_micros(busy_us));
            let pass = Pass { interval, host: Duration::ZERO, busy };
            assert_eq!(checks.judge(pass, &READINGS), Ok(()));
        }
    }

    #[test]
    fn holds_grow_with_what_passes_take() {
        let mut checks = Checks::default();
        assert_eq!(checks.next_hold(), Some(FIRST_HOLD));
        let interval = Interval { elapsed_ns: 1e7, drained: false, held: Some(false) };
        let pass = Pass { interval, host: Duration::from_millis(10), busy: None };
        checks.judge(pass, &READINGS).unwrap();
        assert_eq!(checks.next_hold(), Some(Duration::from_millis(45)));
        checks.judge(Pass { host: Duration::from_secs(9), ..pass }, &READINGS).unwrap();
        assert_eq!(checks.next_hold(), None);
        checks.judge(Pass { host: Duration::from_secs(9), ..pass }, &READINGS).unwrap();
        assert_eq!(checks.next_hold(), Some(LONGEST_HOLD));
    }
}
