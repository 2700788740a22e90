//! Whether the events of a Criterion bench enclose its routine's work, pass by pass.
//!
//! A pass lies between two events. Criterion's warm-up makes passes of 1, 2, 4, 8 … iterations, then
//! come the samples; Criterion does not say how many iterations a pass has. Four checks:
//!
//! - Some passes begin with the stream held until the pass is enqueued. The interval is then the
//!   work of the stream alone. If it is no longer than that of two events in a row, the routine
//!   enqueued nothing.
//! - A routine that waits for the stream, or for the whole context, outlasts the hold. Its first
//!   pass then shows the work that it enqueued before it waited. If that is nothing, and each of
//!   three later passes takes long nevertheless, the time is of the host or of another stream.
//! - When a pass has finished, the whole context has to be idle.
//! - CUPTI is attached for the second pass, whose first launch may wait for that, and records the
//!   third ([`super::cupti::check_pass`]). If the third outlasts its hold and works on several
//!   streams, the record is not conclusive, and the case is marked.
//!
//! Without CUPTI, a routine that waits for the whole context and works on another stream for less
//! than [`SHOWN_LATER`] is not detected. A host that is delayed for longer than that in each of the
//! three passes is refused like such work. Deliberately absent: clocks and events
//! ([`ForeignStream`]).
//!
//! [`ForeignStream`]: kernelgate_cuda::driver::stream::foreign_stream::ForeignStream

use std::time::Duration;

use super::context::AfterStream;
use super::duration::SHARE_OF_LEAST;
use super::refusal::{Refusal, Subject};
use crate::backend::Allowed;
use kernelgate_cuda::driver::stream::foreign_stream::{EmptyIntervalReadings, TimedInterval};

/// How long the first pass is held at most.
const FIRST_HOLD: Duration = Duration::from_millis(5);
/// The longest hold of a pass that is still to show whether its routine waits.
const LONGEST_HOLD: Duration = Duration::from_millis(500);
/// Length of a hold relative to the pass before, because passes grow.
const TIMES_THE_LAST: u32 = 4;
/// Passes that are held until one shows that the routine does not wait; the last of them decides.
const DECIDING: [u32; 3] = [1, RECORDED, 5];
/// Maximum hold of later passes: enough for a pass that enqueues nothing to end.
const LATER_HOLD: Duration = Duration::from_millis(1);
/// The pass in which CUPTI is attached. It is not judged.
const ATTACHED: u32 = 2;
/// The pass that CUPTI records, and how long it is held at most.
const RECORDED: u32 = 3;
pub const RECORDED_HOLD: Duration = Duration::from_millis(50);
/// Passes without a hold, each of which has to show the work of a routine that waits: a delay of
/// the host shows in only one of them.
const SHOWING: [u32; 3] = [4, 6, 7];
/// Minimum time of such a pass beyond its waits that counts as work elsewhere, nanoseconds.
pub const SHOWN_LATER: f64 = 100_000.0;
/// Time of the waits of a pass, as a multiple of one wait for each iteration.
const TIMES_THE_WAIT: f64 = 2.0;

/// The passes of one case so far.
#[derive(Debug, Clone)]
pub struct Passes {
    allowed: Allowed,
    passes: u32,
    waits: Waits,
    last: Duration,
    /// Interval of the first pass, if it outlasted its hold, nanoseconds.
    first_ns: Option<f64>,
    /// The pass in [`SHOWING`] with the least time beyond its waits.
    fastest: Option<PassTime>,
    after: AfterStream,
}

/// Whether a routine waits for the work that it enqueued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Waits {
    #[default]
    Unknown,
    No,
    Yes,
}

/// Time of a pass, nanoseconds: all of it, and beyond its waits.
#[derive(Debug, Clone, Copy)]
struct PassTime {
    elapsed_ns: f64,
    beyond_ns: f64,
}

/// One pass.
#[derive(Debug, Clone, Copy)]
pub struct Pass {
    /// Time between the events of the pass.
    pub interval: TimedInterval,
    /// Time of the host from the first event to the last.
    pub host: Duration,
    /// How long the context was busy after the last event, if that was measured.
    pub busy: Option<Duration>,
}

impl Passes {
    /// No pass yet of a routine with these permissions.
    pub fn new(allowed: Allowed) -> Self {
        Self {
            allowed,
            passes: 0,
            waits: Waits::default(),
            last: Duration::ZERO,
            first_ns: None,
            fastest: None,
            after: AfterStream::new(Subject::Routine),
        }
    }

    /// Whether to attach CUPTI before the next pass.
    pub const fn next_attaches(&self) -> bool {
        self.passes + 1 == ATTACHED
    }

    /// Whether CUPTI is to record the next pass.
    pub const fn next_is_recorded(&self) -> bool {
        self.passes + 1 == RECORDED
    }

    /// How long to hold the stream for the next pass at most; `None`: no hold.
    pub fn next_hold(&self) -> Option<Duration> {
        let pass = self.passes + 1;
        match self.waits {
            _ if pass == ATTACHED => None,
            _ if pass == RECORDED => Some(RECORDED_HOLD),
            Waits::Unknown => {
                let hold = FIRST_HOLD + TIMES_THE_LAST * self.last;
                DECIDING.contains(&pass).then(|| hold.min(LONGEST_HOLD))
            }
            Waits::No => pass.is_power_of_two().then_some(LATER_HOLD),
            Waits::Yes => None,
        }
    }

    /// Whether to measure how long the context is busy after this pass: not after a hold, during
    /// which other streams had time to finish, and not while CUPTI slows it.
    pub const fn asks_for_context(&self, interval: &TimedInterval) -> bool {
        !self.after.was_idle() && interval.held.is_none() && !self.next_attaches()
    }

    /// Adds a pass.
    ///
    /// # Errors
    /// The reason why the routine has no time.
    pub fn add(&mut self, pass: Pass, readings: &EmptyIntervalReadings) -> Result<(), Refusal> {
        self.passes += 1;
        self.last = pass.host;
        let elapsed_ns = pass.interval.elapsed_ns;
        match pass.interval.held {
            Some(true) => {
                self.waits = Waits::No;
                let own_ns = (readings.least_ns - readings.nothing_ns).max(0.0);
                if elapsed_ns <= readings.nothing_ns + SHARE_OF_LEAST * own_ns {
                    return Err(Refusal::NothingEnqueued(Subject::Routine));
                }
            }
            Some(false) if self.waits == Waits::Unknown => {
                if self.passes == DECIDING[0] {
                    self.first_ns = Some(elapsed_ns);
                }
                if self.passes >= DECIDING[DECIDING.len() - 1] {
                    self.waits = Waits::Yes;
                    if !self.allowed.waits {
                        return Err(Refusal::Waits(Subject::Routine));
                    }
                }
            }
            _ => {}
        }
        if SHOWING.contains(&self.passes) {
            let iterations = f64::from(1_u32 << (self.passes - 1));
            let beyond_ns = elapsed_ns - TIMES_THE_WAIT * iterations * readings.waited_ns;
            if self.fastest.is_none_or(|least| beyond_ns < least.beyond_ns) {
                self.fastest = Some(PassTime { elapsed_ns, beyond_ns });
            }
            if self.waits == Waits::Yes && self.passes == SHOWING[SHOWING.len() - 1] {
                self.check_waiting(readings)?;
            }
        }
        let elapsed = Duration::from_nanos(elapsed_ns as u64);
        pass.busy.map_or(Ok(()), |busy| self.after.add(elapsed, busy))
    }

    /// Checks a routine that waits: the stream must have worked before the first wait.
    fn check_waiting(&self, readings: &EmptyIntervalReadings) -> Result<(), Refusal> {
        let first_ns = self.first_ns.filter(|&first_ns| first_ns <= readings.waited_ns);
        let fastest = self.fastest.filter(|fastest| fastest.beyond_ns > SHOWN_LATER);
        let (Some(held_ns), Some(fastest)) = (first_ns, fastest) else { return Ok(()) };
        Err(Refusal::WaitsForWorkElsewhere { elapsed_ns: fastest.elapsed_ns, held_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READINGS: EmptyIntervalReadings =
        EmptyIntervalReadings { nothing_ns: 1300.0, least_ns: 3000.0, waited_ns: 20_000.0 };

    fn routine_passes() -> Passes {
        Passes::new(Allowed::CRITERION_ROUTINE)
    }

    /// A routine by what its stream does in a pass when it is held and not, nanoseconds, whether it
    /// outlasts every hold, and for how long the context is busy afterwards, microseconds.
    struct Routine {
        held_ns: f64,
        free_ns: fn(u32) -> f64,
        waits: bool,
        busy_us: u64,
    }

    /// Runs passes until one is refused, 64 at most; which were held, and the refusal.
    fn run(routine: &Routine) -> (Vec<u32>, Option<Refusal>) {
        run_with(Allowed::CRITERION_ROUTINE, routine)
    }

    fn run_with(allowed: Allowed, routine: &Routine) -> (Vec<u32>, Option<Refusal>) {
        let (mut passes, mut held) = (Passes::new(allowed), Vec::new());
        for pass in 1..=64 {
            let hold = passes.next_hold();
            held.extend(hold.map(|_| pass));
            let free_ns = (routine.free_ns)(pass);
            let elapsed_ns = if hold.is_some() { routine.held_ns } else { free_ns };
            let interval =
                TimedInterval { elapsed_ns, drained: false, held: hold.map(|_| !routine.waits) };
            let is_needed = passes.asks_for_context(&interval);
            let busy = is_needed.then(|| Duration::from_micros(routine.busy_us));
            let host = Duration::from_nanos(free_ns as u64);
            if let Err(why) = passes.add(Pass { interval, host, busy }, &READINGS) {
                return (held, Some(why));
            }
        }
        (held, None)
    }

    #[test]
    fn honest_routines_are_timed() {
        let enqueues = Routine { held_ns: 2500.0, free_ns: |_| 4e3, waits: false, busy_us: 5 };
        assert_eq!(run(&enqueues), (vec![1, 3, 4, 8, 16, 32, 64], None));
        // A kernel of 3 µs with a wait in each iteration: the host's time is most of it.
        let grows = |pass: u32| 35e3 * f64::from(1_u32 << (pass - 1).min(20));
        let waits = Routine { held_ns: 18e3, free_ns: grows, waits: true, busy_us: 5 };
        assert_eq!(run(&waits), (vec![1, 3, 5], None));
        let long = Routine { held_ns: 5e6, free_ns: |_| 5e6, waits: true, busy_us: 90 };
        assert_eq!(run(&long).1, None, "a share of the pass");
    }

    #[test]
    fn a_routine_that_leaves_nothing_on_the_stream_is_refused() {
        let nothing = Routine { held_ns: 1300.0, free_ns: |_| 1e6, waits: false, busy_us: 0 };
        let (held, why) = run(&nothing);
        assert_eq!((held, why), (vec![1], Some(Refusal::NothingEnqueued(Subject::Routine))));
        // One that stops enqueueing later.
        let (mut passes, mut refused) = (routine_passes(), None);
        for pass in 1..=64 {
            let elapsed_ns = if pass < 20 { 9e3 } else { 1250.0 };
            let held = passes.next_hold().map(|_| true);
            let interval = TimedInterval { elapsed_ns, drained: false, held };
            let pass_ns = Pass { interval, host: Duration::ZERO, busy: None };
            if passes.add(pass_ns, &READINGS).is_err() {
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
        let waits = |elapsed_ns| Refusal::WaitsForWorkElsewhere { elapsed_ns, held_ns: 15e3 };
        assert_eq!((held, why), (vec![1, 3, 5], Some(waits(1800e3))));
        // Passes of one iteration each: the warm-up ends after the first pass.
        let slow = Routine { free_ns: |_| 70e6, ..elsewhere };
        assert_eq!(run(&slow).1, Some(waits(70e6)));
    }

    #[test]
    fn a_routine_that_may_not_wait_is_refused_for_a_wait() {
        let grows = |pass: u32| 35e3 * f64::from(1_u32 << (pass - 1).min(20));
        let waits = Routine { held_ns: 18e3, free_ns: grows, waits: true, busy_us: 5 };
        let refused = Some(Refusal::Waits(Subject::Routine));
        assert_eq!(run_with(Allowed::ATTACHED_ROW, &waits), (vec![1, 3, 5], refused));
    }

    #[test]
    fn a_host_held_up_in_one_pass_or_two_is_no_work_elsewhere() {
        let held_up = |pass: u32| {
            let iterations = f64::from(1_u32 << (pass - 1).min(20));
            35e3 * iterations + if [4, 6].contains(&pass) { 5e6 } else { 0.0 }
        };
        let waits = Routine { held_ns: 18e3, free_ns: held_up, waits: true, busy_us: 5 };
        assert_eq!(run(&waits), (vec![1, 3, 5], None));
    }

    #[test]
    fn a_context_that_is_busy_afterwards_is_refused_where_every_pass_shows_it() {
        let beside = Routine { held_ns: 5e4, free_ns: |_| 5e4, waits: false, busy_us: 400 };
        let busy = Duration::from_micros(400);
        let refused = Refusal::BusyAfterStream { subject: Subject::Routine, busy };
        assert_eq!(run(&beside).1, Some(refused));
        let mut passes = routine_passes();
        for busy_us in [400, 400, 400, 400, 3, 400, 400] {
            let interval = TimedInterval { elapsed_ns: 5e4, drained: false, held: None };
            let busy = passes.asks_for_context(&interval).then(|| Duration::from_micros(busy_us));
            let pass = Pass { interval, host: Duration::ZERO, busy };
            assert_eq!(passes.add(pass, &READINGS), Ok(()));
        }
    }

    #[test]
    fn holds_grow_with_what_passes_take() {
        let mut passes = routine_passes();
        assert_eq!(passes.next_hold(), Some(FIRST_HOLD));
        let interval = TimedInterval { elapsed_ns: 1e7, drained: false, held: Some(false) };
        let pass = Pass { interval, host: Duration::from_millis(10), busy: None };
        for hold in [None, Some(RECORDED_HOLD), None, Some(LONGEST_HOLD)] {
            passes.add(Pass { host: Duration::from_secs(9), ..pass }, &READINGS).unwrap();
            assert_eq!(passes.next_hold(), hold);
        }
    }
}
