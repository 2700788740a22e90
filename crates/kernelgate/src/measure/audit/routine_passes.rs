//! Checks for each pass whether the events of a Criterion bench enclose its routine's work.
//!
//! Each pass of the routine is timed by two events around it. Criterion's warm-up makes passes of
//! 1, 2, 4, 8 … iterations, then come the samples; Criterion does not say how many iterations a
//! pass has. Four checks:
//!
//! - Some passes begin with a held stream, which is released once the pass is enqueued. The
//!   interval is then the work of the stream alone. If the pass takes no longer than two events in
//!   a row, the routine enqueued nothing.
//! - A routine that waits for the stream, or for the whole context, outlasts the hold. The first
//!   pass of such a routine then shows the work that it enqueued before it waited. If that is
//!   nothing, and each of three later passes takes long nevertheless, the time is of the host or of
//!   another stream.
//! - When a pass has finished, the whole context has to be idle.
//! - CUPTI is attached for the second pass, whose first launch may wait for that, and records the
//!   third ([`super::cupti::check_recorded_pass`]). If the third outlasts its hold and works on
//!   several streams, the record is not conclusive, and the case is marked.
//!
//! Without CUPTI, a routine that waits for the whole context and works on another stream for less
//! than [`MIN_WORK_ELSEWHERE_NS`] is not detected. A host that is delayed for as long in each of
//! the three passes is refused as if work ran elsewhere. This module deliberately uses neither
//! clocks nor events ([`ForeignStream`] does).
//!
//! [`ForeignStream`]: kernelgate_cuda::driver::stream::foreign_stream::ForeignStream

use std::time::Duration;

use super::audit_finding::{RefusedSubject, TimingRefusal};
use super::context::ContextAfterStream;
use super::duration::MIN_SHARE_OF_LEAST_COMMAND;
use crate::backend::AllowedActions;
use kernelgate_cuda::driver::stream::foreign_stream::{EmptyIntervalReadings, TimedInterval};

/// Longest time for which the stream is held in the first pass.
const FIRST_PASS_HOLD: Duration = Duration::from_millis(5);
/// The longest hold of a pass that is still to show whether its routine waits.
const LONGEST_PASS_HOLD: Duration = Duration::from_millis(500);
/// Length of a hold relative to the pass before, because passes grow.
const HOLD_PER_LAST_PASS: u32 = 4;
/// Numbers of the passes with a held stream, until a pass shows that the routine does not wait; the
/// last pass decides.
const DECIDING_PASSES: [u32; 3] = [1, RECORDED_PASS, 5];
/// Maximum hold of later passes: long enough for a pass that enqueues nothing to end.
const LATER_PASS_HOLD: Duration = Duration::from_millis(1);
/// The pass in which CUPTI is attached. It is not judged.
const CUPTI_ATTACHED_PASS: u32 = 2;
/// The pass that CUPTI records, and how long it is held at most.
const RECORDED_PASS: u32 = 3;
pub const RECORDED_PASS_HOLD: Duration = Duration::from_millis(50);
/// Numbers of the passes without a held stream, which must all show the work of a waiting routine:
/// a delay of the host shows in only one pass.
const PASSES_WITHOUT_HOLD: [u32; 3] = [4, 6, 7];
/// Time of a waiting pass beyond its waits that counts as work on another stream, nanoseconds;
/// shorter times do not count.
pub const MIN_WORK_ELSEWHERE_NS: f64 = 100_000.0;
/// Time of the waits of a pass, as a multiple of one wait for each iteration.
const WAITS_PER_ITERATION: f64 = 2.0;

/// State of the audit over the passes of one Criterion case so far.
#[derive(Debug, Clone)]
pub struct CriterionPasses {
    allowed: AllowedActions,
    passes: u32,
    waits: RoutineWaits,
    last: Duration,
    /// Interval of the first pass, if it outlasted its hold, nanoseconds.
    first_ns: Option<f64>,
    /// The pass of [`PASSES_WITHOUT_HOLD`] that took the least time beyond its waits.
    fastest: Option<PassTimeAndExcess>,
    after: ContextAfterStream,
}

/// Whether a routine waits for the work that it enqueued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum RoutineWaits {
    #[default]
    Unknown,
    No,
    Yes,
}

/// Time of a pass, nanoseconds: the whole time, and the time beyond the routine's waits.
#[derive(Debug, Clone, Copy)]
struct PassTimeAndExcess {
    elapsed_ns: f64,
    beyond_ns: f64,
}

/// One pass.
#[derive(Debug, Clone, Copy)]
pub struct RoutinePass {
    /// Time between the events of the pass.
    pub interval: TimedInterval,
    /// Host time from the first event of the pass to the last event.
    pub host: Duration,
    /// How long the context was busy after the last event, if that was measured.
    pub busy: Option<Duration>,
}

impl CriterionPasses {
    /// Starts the audit of a routine with these permissions, before its first pass.
    pub fn new(allowed: AllowedActions) -> Self {
        Self {
            allowed,
            passes: 0,
            waits: RoutineWaits::default(),
            last: Duration::ZERO,
            first_ns: None,
            fastest: None,
            after: ContextAfterStream::new(RefusedSubject::Routine),
        }
    }

    /// Whether to attach CUPTI before the next pass.
    pub const fn next_attaches(&self) -> bool {
        self.passes + 1 == CUPTI_ATTACHED_PASS
    }

    /// Whether CUPTI is to record the next pass.
    pub const fn is_next_recorded(&self) -> bool {
        self.passes + 1 == RECORDED_PASS
    }

    /// How long to hold the stream for the next pass at most; `None`: no hold.
    pub fn next_pass_hold(&self) -> Option<Duration> {
        let pass = self.passes + 1;
        match self.waits {
            _ if pass == CUPTI_ATTACHED_PASS => None,
            _ if pass == RECORDED_PASS => Some(RECORDED_PASS_HOLD),
            RoutineWaits::Unknown => {
                let hold = FIRST_PASS_HOLD + HOLD_PER_LAST_PASS * self.last;
                DECIDING_PASSES.contains(&pass).then(|| hold.min(LONGEST_PASS_HOLD))
            }
            RoutineWaits::No => pass.is_power_of_two().then_some(LATER_PASS_HOLD),
            RoutineWaits::Yes => None,
        }
    }

    /// Returns whether to measure how long the context stays busy after this pass: only for passes
    /// without a held stream and without CUPTI.
    pub const fn measures_context_after(&self, interval: &TimedInterval) -> bool {
        !self.after.was_context_idle() && interval.held.is_none() && !self.next_attaches()
    }

    /// Adds a pass.
    ///
    /// # Errors
    /// The reason why the routine has no time.
    pub fn add(
        &mut self,
        pass: RoutinePass,
        readings: &EmptyIntervalReadings,
    ) -> Result<(), TimingRefusal> {
        self.passes += 1;
        self.last = pass.host;
        let elapsed_ns = pass.interval.elapsed_ns;
        match pass.interval.held {
            Some(true) => {
                self.waits = RoutineWaits::No;
                let own_ns = (readings.least_ns - readings.nothing_ns).max(0.0);
                if elapsed_ns <= readings.nothing_ns + MIN_SHARE_OF_LEAST_COMMAND * own_ns {
                    return Err(TimingRefusal::NothingEnqueued {
                        subject: RefusedSubject::Routine,
                    });
                }
            }
            Some(false) if self.waits == RoutineWaits::Unknown => {
                if self.passes == DECIDING_PASSES[0] {
                    self.first_ns = Some(elapsed_ns);
                }
                if self.passes >= DECIDING_PASSES[DECIDING_PASSES.len() - 1] {
                    self.waits = RoutineWaits::Yes;
                    if !self.allowed.waits {
                        return Err(TimingRefusal::Waits { subject: RefusedSubject::Routine });
                    }
                }
            }
            _ => {}
        }
        if PASSES_WITHOUT_HOLD.contains(&self.passes) {
            let iterations = f64::from(1_u32 << (self.passes - 1));
            let beyond_ns = elapsed_ns - WAITS_PER_ITERATION * iterations * readings.waited_ns;
            if self.fastest.is_none_or(|least| beyond_ns < least.beyond_ns) {
                self.fastest = Some(PassTimeAndExcess { elapsed_ns, beyond_ns });
            }
            if self.waits == RoutineWaits::Yes
                && self.passes == PASSES_WITHOUT_HOLD[PASSES_WITHOUT_HOLD.len() - 1]
            {
                self.check_routine_that_waits(readings)?;
            }
        }
        let elapsed = Duration::from_nanos(elapsed_ns as u64);
        pass.busy.map_or(Ok(()), |busy| self.after.add(elapsed, busy))
    }

    /// Checks a routine that waits: the stream must have worked before the first wait.
    fn check_routine_that_waits(
        &self,
        readings: &EmptyIntervalReadings,
    ) -> Result<(), TimingRefusal> {
        let first_ns = self.first_ns.filter(|&first_ns| first_ns <= readings.waited_ns);
        let fastest = self.fastest.filter(|fastest| fastest.beyond_ns > MIN_WORK_ELSEWHERE_NS);
        let (Some(held_ns), Some(fastest)) = (first_ns, fastest) else { return Ok(()) };
        Err(TimingRefusal::WaitsForWorkElsewhere { elapsed_ns: fastest.elapsed_ns, held_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY_READINGS: EmptyIntervalReadings =
        EmptyIntervalReadings { nothing_ns: 1300.0, least_ns: 3000.0, waited_ns: 20_000.0 };

    fn routine_passes() -> CriterionPasses {
        CriterionPasses::new(AllowedActions::CRITERION_ROUTINE)
    }

    /// A routine by what its stream does in a pass when it is held and not, nanoseconds, whether it
    /// outlasts every hold, and for how long the context is busy afterwards, microseconds.
    struct SimulatedRoutine {
        held_ns: f64,
        free_ns: fn(u32) -> f64,
        waits: bool,
        busy_us: u64,
    }

    /// Runs passes until one is refused, 64 at most; which were held, and the refusal.
    fn run(routine: &SimulatedRoutine) -> (Vec<u32>, Option<TimingRefusal>) {
        run_simulated_routine(AllowedActions::CRITERION_ROUTINE, routine)
    }

    fn run_simulated_routine(
        allowed: AllowedActions,
        routine: &SimulatedRoutine,
    ) -> (Vec<u32>, Option<TimingRefusal>) {
        let (mut passes, mut held) = (CriterionPasses::new(allowed), Vec::new());
        for pass in 1..=64 {
            let hold = passes.next_pass_hold();
            held.extend(hold.map(|_| pass));
            let free_ns = (routine.free_ns)(pass);
            let elapsed_ns = if hold.is_some() { routine.held_ns } else { free_ns };
            let interval =
                TimedInterval { elapsed_ns, drained: false, held: hold.map(|_| !routine.waits) };
            let is_needed = passes.measures_context_after(&interval);
            let busy = is_needed.then(|| Duration::from_micros(routine.busy_us));
            let host = Duration::from_nanos(free_ns as u64);
            if let Err(why) = passes.add(RoutinePass { interval, host, busy }, &EMPTY_READINGS) {
                return (held, Some(why));
            }
        }
        (held, None)
    }

    #[test]
    fn routines_that_only_use_the_timed_stream_are_accepted() {
        let enqueues =
            SimulatedRoutine { held_ns: 2500.0, free_ns: |_| 4e3, waits: false, busy_us: 5 };
        assert_eq!(run(&enqueues), (vec![1, 3, 4, 8, 16, 32, 64], None));
        // This routine launches a kernel of 3 µs and waits in each iteration: most of its time is
        // host time.
        let grows = |pass: u32| 35e3 * f64::from(1_u32 << (pass - 1).min(20));
        let waits = SimulatedRoutine { held_ns: 18e3, free_ns: grows, waits: true, busy_us: 5 };
        assert_eq!(run(&waits), (vec![1, 3, 5], None));
        let long = SimulatedRoutine { held_ns: 5e6, free_ns: |_| 5e6, waits: true, busy_us: 90 };
        assert_eq!(run(&long).1, None, "a share of the pass");
    }

    #[test]
    fn a_routine_that_enqueues_nothing_on_the_timed_stream_is_refused() {
        let nothing =
            SimulatedRoutine { held_ns: 1300.0, free_ns: |_| 1e6, waits: false, busy_us: 0 };
        let (held, why) = run(&nothing);
        assert_eq!(
            (held, why),
            (vec![1], Some(TimingRefusal::NothingEnqueued { subject: RefusedSubject::Routine }))
        );
        // This routine stops enqueueing work after some passes.
        let (mut passes, mut refused) = (routine_passes(), None);
        for pass in 1..=64 {
            let elapsed_ns = if pass < 20 { 9e3 } else { 1250.0 };
            let held = passes.next_pass_hold().map(|_| true);
            let interval = TimedInterval { elapsed_ns, drained: false, held };
            let pass_ns = RoutinePass { interval, host: Duration::ZERO, busy: None };
            if passes.add(pass_ns, &EMPTY_READINGS).is_err() {
                refused = Some(pass);
                break;
            }
        }
        assert_eq!(refused, Some(32));
    }

    #[test]
    fn a_routine_that_waits_for_work_on_another_stream_is_refused() {
        // 225 µs an iteration.
        let grows = |pass: u32| 225e3 * f64::from(1_u32 << (pass - 1));
        let elsewhere = SimulatedRoutine { held_ns: 15e3, free_ns: grows, waits: true, busy_us: 0 };
        let (held, why) = run(&elsewhere);
        let waits = |elapsed_ns| TimingRefusal::WaitsForWorkElsewhere { elapsed_ns, held_ns: 15e3 };
        assert_eq!((held, why), (vec![1, 3, 5], Some(waits(1800e3))));
        // Passes of one iteration each: the warm-up ends after the first pass.
        let slow = SimulatedRoutine { free_ns: |_| 70e6, ..elsewhere };
        assert_eq!(run(&slow).1, Some(waits(70e6)));
    }

    #[test]
    fn a_routine_without_permission_to_wait_is_refused_for_a_wait() {
        let grows = |pass: u32| 35e3 * f64::from(1_u32 << (pass - 1).min(20));
        let waits = SimulatedRoutine { held_ns: 18e3, free_ns: grows, waits: true, busy_us: 5 };
        let refused = Some(TimingRefusal::Waits { subject: RefusedSubject::Routine });
        assert_eq!(
            run_simulated_routine(AllowedActions::ATTACHED_ROW, &waits),
            (vec![1, 3, 5], refused)
        );
    }

    #[test]
    fn a_host_delay_in_one_or_two_passes_is_no_sign_of_work_elsewhere() {
        let held_up = |pass: u32| {
            let iterations = f64::from(1_u32 << (pass - 1).min(20));
            35e3 * iterations + if [4, 6].contains(&pass) { 5e6 } else { 0.0 }
        };
        let waits = SimulatedRoutine { held_ns: 18e3, free_ns: held_up, waits: true, busy_us: 5 };
        assert_eq!(run(&waits), (vec![1, 3, 5], None));
    }

    #[test]
    fn a_context_that_stays_busy_after_every_pass_is_refused() {
        let beside =
            SimulatedRoutine { held_ns: 5e4, free_ns: |_| 5e4, waits: false, busy_us: 400 };
        let busy = Duration::from_micros(400);
        let refused = TimingRefusal::BusyAfterStream { subject: RefusedSubject::Routine, busy };
        assert_eq!(run(&beside).1, Some(refused));
        let mut passes = routine_passes();
        for busy_us in [400, 400, 400, 400, 3, 400, 400] {
            let interval = TimedInterval { elapsed_ns: 5e4, drained: false, held: None };
            let busy =
                passes.measures_context_after(&interval).then(|| Duration::from_micros(busy_us));
            let pass = RoutinePass { interval, host: Duration::ZERO, busy };
            assert_eq!(passes.add(pass, &EMPTY_READINGS), Ok(()));
        }
    }

    #[test]
    fn the_stream_is_held_longer_for_longer_passes() {
        let mut passes = routine_passes();
        assert_eq!(passes.next_pass_hold(), Some(FIRST_PASS_HOLD));
        let interval = TimedInterval { elapsed_ns: 1e7, drained: false, held: Some(false) };
        let pass = RoutinePass { interval, host: Duration::from_millis(10), busy: None };
        for hold in [None, Some(RECORDED_PASS_HOLD), None, Some(LONGEST_PASS_HOLD)] {
            passes
                .add(RoutinePass { host: Duration::from_secs(9), ..pass }, &EMPTY_READINGS)
                .unwrap();
            assert_eq!(passes.next_pass_hold(), hold);
        }
    }
}
