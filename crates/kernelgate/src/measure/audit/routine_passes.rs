//! Checks each pass of a Criterion bench: its GPU work must lie between the two CUDA events that
//! time the pass.
//!
//! A pass is one call of the Criterion routine for several iterations, timed by two CUDA events
//! around the call. Criterion's warm-up makes passes of 1, 2, 4, 8 … iterations before the samples;
//! Criterion does not say how many iterations a pass has. Four checks:
//!
//! - In some passes a kernel blocks the stream until the routine has returned. The event time of a
//!   pass with a blocked stream contains only work of that stream. If the pass takes no longer than
//!   two events in a row, the routine enqueued nothing.
//! - A routine that waits for the stream, or for the whole CUDA context, returns only after the
//!   blocking kernel has timed out. The first pass of such a routine then shows the work that the
//!   routine enqueued before it waited. If the routine enqueued nothing before its wait, and each
//!   of three later passes takes long, the time belongs to the host or to another stream.
//! - After a pass without a blocked stream, the whole CUDA context must be idle.
//! - kernelgate attaches CUPTI before the second pass, whose first launch may be slow for that
//!   reason, and CUPTI records the third pass
//!   ([`super::cupti::check_routine_pass_streams_with_cupti`]). If the third pass returns only
//!   after the blocking kernel has timed out and works on several streams, CUPTI's record is not
//!   conclusive, and the case is marked.
//!
//! Without CUPTI, a routine that waits for the whole context and works on another stream for less
//! than [`MIN_TIME_OF_WORK_ELSEWHERE_NS`] is not refused. A routine is wrongly refused for work on
//! another stream if the host is delayed for as long in each of the three passes. This module only
//! judges times; [`ForeignStreamTimer`] records the events and reads the clocks.
//!
//! [`ForeignStreamTimer`]: kernelgate_cuda::driver::stream::foreign_stream::ForeignStreamTimer

use std::time::Duration;

use super::audit_finding::{RefusedTimedCode, TimingRefusal};
use super::context::ContextIdleAfterStreamCheck;
use super::duration::MIN_SHARE_OF_SHORTEST_COMMAND_TIME;
use crate::backend::AllowedActionsOfTimedCode;
use kernelgate_cuda::driver::stream::foreign_stream::{
    EmptyIntervalDurations, ForeignStreamInterval,
};

/// Longest time for which the stream is blocked in the first pass of a Criterion routine.
const FIRST_PASS_STREAM_HOLD: Duration = Duration::from_millis(5);
/// Longest time that the stream is blocked in a pass that shall show whether the routine waits for
/// the GPU.
const LONGEST_PASS_STREAM_HOLD: Duration = Duration::from_millis(500);
/// The stream is blocked for up to this multiple of the previous pass's host time, because each
/// warm-up pass doubles its iterations.
const MAX_HOLD_TO_PREVIOUS_PASS_RATIO: u32 = 4;
/// Numbers of the passes in which the stream is blocked until one shows that the routine does not
/// wait for the GPU; the last number decides.
const PASSES_THAT_SHOW_WAITING: [u32; 3] = [1, PASS_RECORDED_BY_CUPTI, 5];
/// Longest time that the stream is blocked in later passes: long enough for a pass that enqueues
/// nothing to return.
const LATER_PASS_STREAM_HOLD: Duration = Duration::from_millis(1);
/// Number of the Criterion pass in which kernelgate attaches CUPTI, so that its cost is not in the
/// recorded pass. The audit does not judge this pass.
const PASS_THAT_ATTACHES_CUPTI: u32 = 2;
/// Number of the Criterion pass that CUPTI records; the next constant is the longest time that its
/// stream is blocked.
const PASS_RECORDED_BY_CUPTI: u32 = 3;
pub const CUPTI_RECORDED_PASS_STREAM_HOLD: Duration = Duration::from_millis(50);
/// Numbers of the passes without a blocked stream; a routine is refused for work elsewhere only if
/// all of them are slow, because a host delay affects single passes.
const PASSES_WITHOUT_STREAM_HOLD: [u32; 3] = [4, 6, 7];
/// Time of a pass beyond its waits from which it counts as work on another stream, nanoseconds.
pub const MIN_TIME_OF_WORK_ELSEWHERE_NS: f64 = 100_000.0;
/// Estimated time of a pass's waits for the GPU, as a multiple of one wait for each iteration.
const ESTIMATED_WAITS_PER_ITERATION: f64 = 2.0;

/// State of the audit of one Criterion case after the passes seen so far.
#[derive(Debug, Clone)]
pub struct CriterionPassAudit {
    allowed_actions: AllowedActionsOfTimedCode,
    pass_count: u32,
    routine_waits_for_gpu: WhetherRoutineWaitsForGpu,
    last_pass_duration: Duration,
    /// Event time of the first pass, if the routine returned only after the stream was no longer
    /// blocked, nanoseconds.
    first_pass_event_ns: Option<f64>,
    /// Among the passes without stream hold, the one with the least time beyond the routine's waits
    /// for the GPU.
    fastest_pass: Option<PassTimeAndExcessOverWaits>,
    context_idle_check: ContextIdleAfterStreamCheck,
}

/// Whether a Criterion routine waits for the GPU work that it enqueued, as far as the audit knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum WhetherRoutineWaitsForGpu {
    #[default]
    UnknownIfRoutineWaits,
    RoutineDoesNotWait,
    RoutineWaits,
}

/// Event time of a pass, and the part of it beyond the routine's estimated waits for the GPU,
/// nanoseconds.
#[derive(Debug, Clone, Copy)]
struct PassTimeAndExcessOverWaits {
    pass_event_ns: f64,
    excess_over_waits_ns: f64,
}

/// One pass.
#[derive(Debug, Clone, Copy)]
pub struct CriterionPassMeasurement {
    /// Event interval of the pass: its time, and whether its stream stayed blocked.
    pub interval: ForeignStreamInterval,
    /// Host time from the first CUDA event of the pass to the second one.
    pub pass_host_time: Duration,
    /// How long the CUDA context stayed busy after the pass's last event, if that was measured.
    pub context_busy_time: Option<Duration>,
}

impl CriterionPassAudit {
    /// Starts the audit of a Criterion routine with these permissions, before its first pass.
    pub fn new(allowed: AllowedActionsOfTimedCode) -> Self {
        Self {
            allowed_actions: allowed,
            pass_count: 0,
            routine_waits_for_gpu: WhetherRoutineWaitsForGpu::default(),
            last_pass_duration: Duration::ZERO,
            first_pass_event_ns: None,
            fastest_pass: None,
            context_idle_check: ContextIdleAfterStreamCheck::new(
                RefusedTimedCode::CriterionRoutine,
            ),
        }
    }

    /// Returns whether CUPTI must be attached before the next pass.
    pub const fn must_attach_cupti_before_next_pass(&self) -> bool {
        self.pass_count + 1 == PASS_THAT_ATTACHES_CUPTI
    }

    /// Returns whether CUPTI must record the next pass.
    pub const fn must_cupti_record_next_pass(&self) -> bool {
        self.pass_count + 1 == PASS_RECORDED_BY_CUPTI
    }

    /// Returns the longest time for which the stream shall be blocked in the next pass; `None`: the
    /// stream is not blocked.
    pub fn next_pass_stream_hold(&self) -> Option<Duration> {
        let pass = self.pass_count + 1;
        match self.routine_waits_for_gpu {
            _ if pass == PASS_THAT_ATTACHES_CUPTI => None,
            _ if pass == PASS_RECORDED_BY_CUPTI => Some(CUPTI_RECORDED_PASS_STREAM_HOLD),
            WhetherRoutineWaitsForGpu::UnknownIfRoutineWaits => {
                let hold = FIRST_PASS_STREAM_HOLD
                    + MAX_HOLD_TO_PREVIOUS_PASS_RATIO * self.last_pass_duration;
                PASSES_THAT_SHOW_WAITING.contains(&pass).then(|| hold.min(LONGEST_PASS_STREAM_HOLD))
            }
            WhetherRoutineWaitsForGpu::RoutineDoesNotWait => {
                pass.is_power_of_two().then_some(LATER_PASS_STREAM_HOLD)
            }
            WhetherRoutineWaitsForGpu::RoutineWaits => None,
        }
    }

    /// Returns whether to measure how long the CUDA context stays busy after this pass: only
    /// without a blocked stream and while CUPTI is not being attached.
    pub const fn must_measure_context_busy_time_after(
        &self,
        interval: &ForeignStreamInterval,
    ) -> bool {
        !self.context_idle_check.passed_with_idle_context()
            && interval.stream_stayed_held.is_none()
            && !self.must_attach_cupti_before_next_pass()
    }

    /// Adds the measurement of a finished pass to the audit, and fails if the routine must be
    /// refused.
    ///
    /// # Errors
    /// The reason why the routine has no time.
    pub fn add_finished_pass(
        &mut self,
        pass: CriterionPassMeasurement,
        readings: &EmptyIntervalDurations,
    ) -> Result<(), TimingRefusal> {
        self.pass_count += 1;
        self.last_pass_duration = pass.pass_host_time;
        let elapsed_ns = pass.interval.elapsed_ns;
        match pass.interval.stream_stayed_held {
            Some(true) => {
                self.routine_waits_for_gpu = WhetherRoutineWaitsForGpu::RoutineDoesNotWait;
                if is_held_interval_empty(&pass.interval, readings) {
                    return Err(TimingRefusal::NothingEnqueued {
                        subject: RefusedTimedCode::CriterionRoutine,
                    });
                }
            }
            Some(false)
                if self.routine_waits_for_gpu
                    == WhetherRoutineWaitsForGpu::UnknownIfRoutineWaits =>
            {
                if self.pass_count == PASSES_THAT_SHOW_WAITING[0] {
                    self.first_pass_event_ns = Some(elapsed_ns);
                }
                if self.pass_count >= PASSES_THAT_SHOW_WAITING[PASSES_THAT_SHOW_WAITING.len() - 1] {
                    self.routine_waits_for_gpu = WhetherRoutineWaitsForGpu::RoutineWaits;
                    if !self.allowed_actions.may_wait_for_gpu {
                        return Err(TimingRefusal::WaitsForGpu {
                            subject: RefusedTimedCode::CriterionRoutine,
                        });
                    }
                }
            }
            _ => {}
        }
        if PASSES_WITHOUT_STREAM_HOLD.contains(&self.pass_count) {
            let iterations = f64::from(1_u32 << (self.pass_count - 1));
            let beyond_ns = elapsed_ns
                - ESTIMATED_WAITS_PER_ITERATION * iterations * readings.interval_with_host_wait_ns;
            if self.fastest_pass.is_none_or(|least| beyond_ns < least.excess_over_waits_ns) {
                self.fastest_pass = Some(PassTimeAndExcessOverWaits {
                    pass_event_ns: elapsed_ns,
                    excess_over_waits_ns: beyond_ns,
                });
            }
            if self.routine_waits_for_gpu == WhetherRoutineWaitsForGpu::RoutineWaits
                && self.pass_count
                    == PASSES_WITHOUT_STREAM_HOLD[PASSES_WITHOUT_STREAM_HOLD.len() - 1]
            {
                self.refuse_wait_for_work_on_other_streams(readings)?;
            }
        }
        let elapsed = Duration::from_nanos(elapsed_ns as u64);
        pass.context_busy_time
            .map_or(Ok(()), |busy| self.context_idle_check.add_repetition(elapsed, busy))
    }

    /// Refuses a waiting routine that had done nothing on the timed stream before its first wait
    /// although its passes take long.
    fn refuse_wait_for_work_on_other_streams(
        &self,
        readings: &EmptyIntervalDurations,
    ) -> Result<(), TimingRefusal> {
        let first_ns = self
            .first_pass_event_ns
            .filter(|&first_ns| first_ns <= readings.interval_with_host_wait_ns);
        let fastest = self
            .fastest_pass
            .filter(|fastest| fastest.excess_over_waits_ns > MIN_TIME_OF_WORK_ELSEWHERE_NS);
        let (Some(held_ns), Some(fastest)) = (first_ns, fastest) else { return Ok(()) };
        Err(TimingRefusal::WaitsForWorkOnOtherStream {
            unblocked_pass_ns: fastest.pass_event_ns,
            blocked_stream_work_ns: held_ns,
        })
    }
}

/// Returns whether an interval on a held stream lasted about as long as one without work.
pub fn is_held_interval_empty(
    interval: &ForeignStreamInterval,
    readings: &EmptyIntervalDurations,
) -> bool {
    let own_ns = (readings.interval_with_byte_fill_ns - readings.interval_without_work_ns).max(0.0);
    let most_ns = readings.interval_without_work_ns + MIN_SHARE_OF_SHORTEST_COMMAND_TIME * own_ns;
    interval.stream_stayed_held == Some(true) && interval.elapsed_ns <= most_ns
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY_INTERVAL_READINGS: EmptyIntervalDurations = EmptyIntervalDurations {
        interval_without_work_ns: 1300.0,
        interval_with_byte_fill_ns: 3000.0,
        interval_with_host_wait_ns: 20_000.0,
    };

    fn new_audit_of_waiting_routine() -> CriterionPassAudit {
        CriterionPassAudit::new(AllowedActionsOfTimedCode::ALLOWED_IN_CRITERION_ROUTINE)
    }

    /// A simulated routine: its event time in a pass with and without blocked stream (ns), whether
    /// it outlasts every hold, and the context's busy time afterwards (µs).
    struct SimulatedCriterionRoutine {
        held_pass_ns: f64,
        unheld_pass_ns: fn(u32) -> f64,
        outlasts_every_hold: bool,
        context_busy_us: u64,
    }

    /// Runs up to 64 passes until one is refused; returns the numbers of the passes with a blocked
    /// stream, and the refusal.
    fn run_routine_with_wait_permission(
        routine: &SimulatedCriterionRoutine,
    ) -> (Vec<u32>, Option<TimingRefusal>) {
        run_simulated_passes_until_refusal(
            AllowedActionsOfTimedCode::ALLOWED_IN_CRITERION_ROUTINE,
            routine,
        )
    }

    fn run_simulated_passes_until_refusal(
        allowed: AllowedActionsOfTimedCode,
        routine: &SimulatedCriterionRoutine,
    ) -> (Vec<u32>, Option<TimingRefusal>) {
        let (mut passes, mut held) = (CriterionPassAudit::new(allowed), Vec::new());
        for pass in 1..=64 {
            let hold = passes.next_pass_stream_hold();
            held.extend(hold.map(|_| pass));
            let free_ns = (routine.unheld_pass_ns)(pass);
            let elapsed_ns = if hold.is_some() { routine.held_pass_ns } else { free_ns };
            let interval = ForeignStreamInterval {
                elapsed_ns,
                stream_drained_before_end: false,
                stream_stayed_held: hold.map(|_| !routine.outlasts_every_hold),
            };
            let is_needed = passes.must_measure_context_busy_time_after(&interval);
            let busy = is_needed.then(|| Duration::from_micros(routine.context_busy_us));
            let host = Duration::from_nanos(free_ns as u64);
            if let Err(why) = passes.add_finished_pass(
                CriterionPassMeasurement {
                    interval,
                    pass_host_time: host,
                    context_busy_time: busy,
                },
                &EMPTY_INTERVAL_READINGS,
            ) {
                return (held, Some(why));
            }
        }
        (held, None)
    }

    #[test]
    fn routines_that_only_use_the_timed_stream_pass() {
        let enqueues = SimulatedCriterionRoutine {
            held_pass_ns: 2500.0,
            unheld_pass_ns: |_| 4e3,
            outlasts_every_hold: false,
            context_busy_us: 5,
        };
        assert_eq!(
            run_routine_with_wait_permission(&enqueues),
            (vec![1, 3, 4, 8, 16, 32, 64], None)
        );
        // In this simulation a routine launches a kernel of 3 µs and waits for it in each
        // iteration, so most of its time is host time.
        let grows = |pass: u32| 35e3 * f64::from(1_u32 << (pass - 1).min(20));
        let waits = SimulatedCriterionRoutine {
            held_pass_ns: 18e3,
            unheld_pass_ns: grows,
            outlasts_every_hold: true,
            context_busy_us: 5,
        };
        assert_eq!(run_routine_with_wait_permission(&waits), (vec![1, 3, 5], None));
        let long = SimulatedCriterionRoutine {
            held_pass_ns: 5e6,
            unheld_pass_ns: |_| 5e6,
            outlasts_every_hold: true,
            context_busy_us: 90,
        };
        assert_eq!(run_routine_with_wait_permission(&long).1, None, "a share of the pass");
    }

    #[test]
    fn a_short_interval_is_empty_only_by_readings_of_its_own_clock() {
        let interval = |elapsed_ns, held| ForeignStreamInterval {
            elapsed_ns,
            stream_drained_before_end: false,
            stream_stayed_held: Some(held),
        };
        let of_idle_clock = EmptyIntervalDurations {
            interval_without_work_ns: 5200.0,
            interval_with_byte_fill_ns: 12_000.0,
            interval_with_host_wait_ns: 40_000.0,
        };
        assert!(is_held_interval_empty(&interval(2500.0, true), &of_idle_clock));
        assert!(!is_held_interval_empty(&interval(2500.0, true), &EMPTY_INTERVAL_READINGS));
        assert!(is_held_interval_empty(&interval(1300.0, true), &EMPTY_INTERVAL_READINGS));
        assert!(!is_held_interval_empty(&interval(1300.0, false), &EMPTY_INTERVAL_READINGS));
    }

    #[test]
    fn a_routine_that_enqueues_nothing_on_the_timed_stream_is_refused() {
        let nothing = SimulatedCriterionRoutine {
            held_pass_ns: 1300.0,
            unheld_pass_ns: |_| 1e6,
            outlasts_every_hold: false,
            context_busy_us: 0,
        };
        let (held, why) = run_routine_with_wait_permission(&nothing);
        assert_eq!(
            (held, why),
            (
                vec![1],
                Some(TimingRefusal::NothingEnqueued {
                    subject: RefusedTimedCode::CriterionRoutine
                })
            )
        );
        // This simulated routine stops enqueueing work after some passes.
        let (mut passes, mut refused) = (new_audit_of_waiting_routine(), None);
        for pass in 1..=64 {
            let elapsed_ns = if pass < 20 { 9e3 } else { 1250.0 };
            let held = passes.next_pass_stream_hold().map(|_| true);
            let interval = ForeignStreamInterval {
                elapsed_ns,
                stream_drained_before_end: false,
                stream_stayed_held: held,
            };
            let pass_ns = CriterionPassMeasurement {
                interval,
                pass_host_time: Duration::ZERO,
                context_busy_time: None,
            };
            if passes.add_finished_pass(pass_ns, &EMPTY_INTERVAL_READINGS).is_err() {
                refused = Some(pass);
                break;
            }
        }
        assert_eq!(refused, Some(32));
    }

    #[test]
    fn a_routine_that_waits_for_work_on_another_stream_is_refused() {
        // Each iteration of the simulated routine takes 225 µs.
        let grows = |pass: u32| 225e3 * f64::from(1_u32 << (pass - 1));
        let elsewhere = SimulatedCriterionRoutine {
            held_pass_ns: 15e3,
            unheld_pass_ns: grows,
            outlasts_every_hold: true,
            context_busy_us: 0,
        };
        let (held, why) = run_routine_with_wait_permission(&elsewhere);
        let waits = |elapsed_ns| TimingRefusal::WaitsForWorkOnOtherStream {
            unblocked_pass_ns: elapsed_ns,
            blocked_stream_work_ns: 15e3,
        };
        assert_eq!((held, why), (vec![1, 3, 5], Some(waits(1800e3))));
        // In this simulation each pass has one iteration, so the warm-up of Criterion ends after
        // the first pass.
        let slow = SimulatedCriterionRoutine { unheld_pass_ns: |_| 70e6, ..elsewhere };
        assert_eq!(run_routine_with_wait_permission(&slow).1, Some(waits(70e6)));
    }

    #[test]
    fn a_waiting_routine_without_permission_is_refused() {
        let grows = |pass: u32| 35e3 * f64::from(1_u32 << (pass - 1).min(20));
        let waits = SimulatedCriterionRoutine {
            held_pass_ns: 18e3,
            unheld_pass_ns: grows,
            outlasts_every_hold: true,
            context_busy_us: 5,
        };
        let refused =
            Some(TimingRefusal::WaitsForGpu { subject: RefusedTimedCode::CriterionRoutine });
        assert_eq!(
            run_simulated_passes_until_refusal(
                AllowedActionsOfTimedCode::ALLOWED_IN_ATTACHED_ROW,
                &waits
            ),
            (vec![1, 3, 5], refused)
        );
    }

    #[test]
    fn a_host_delay_in_one_or_two_passes_is_not_refused() {
        let held_up = |pass: u32| {
            let iterations = f64::from(1_u32 << (pass - 1).min(20));
            35e3 * iterations + if [4, 6].contains(&pass) { 5e6 } else { 0.0 }
        };
        let waits = SimulatedCriterionRoutine {
            held_pass_ns: 18e3,
            unheld_pass_ns: held_up,
            outlasts_every_hold: true,
            context_busy_us: 5,
        };
        assert_eq!(run_routine_with_wait_permission(&waits), (vec![1, 3, 5], None));
    }

    #[test]
    fn a_context_that_stays_busy_after_every_pass_is_refused() {
        let beside = SimulatedCriterionRoutine {
            held_pass_ns: 5e4,
            unheld_pass_ns: |_| 5e4,
            outlasts_every_hold: false,
            context_busy_us: 400,
        };
        let busy = Duration::from_micros(400);
        let refused = TimingRefusal::ContextBusyAfterStream {
            subject: RefusedTimedCode::CriterionRoutine,
            context_busy_time: busy,
        };
        assert_eq!(run_routine_with_wait_permission(&beside).1, Some(refused));
        let mut passes = new_audit_of_waiting_routine();
        for busy_us in [400, 400, 400, 400, 3, 400, 400] {
            let interval = ForeignStreamInterval {
                elapsed_ns: 5e4,
                stream_drained_before_end: false,
                stream_stayed_held: None,
            };
            let busy = passes
                .must_measure_context_busy_time_after(&interval)
                .then(|| Duration::from_micros(busy_us));
            let pass = CriterionPassMeasurement {
                interval,
                pass_host_time: Duration::ZERO,
                context_busy_time: busy,
            };
            assert_eq!(passes.add_finished_pass(pass, &EMPTY_INTERVAL_READINGS), Ok(()));
        }
    }

    #[test]
    fn the_stream_hold_grows_with_the_previous_pass() {
        let mut passes = new_audit_of_waiting_routine();
        assert_eq!(passes.next_pass_stream_hold(), Some(FIRST_PASS_STREAM_HOLD));
        let interval = ForeignStreamInterval {
            elapsed_ns: 1e7,
            stream_drained_before_end: false,
            stream_stayed_held: Some(false),
        };
        let pass = CriterionPassMeasurement {
            interval,
            pass_host_time: Duration::from_millis(10),
            context_busy_time: None,
        };
        for hold in
            [None, Some(CUPTI_RECORDED_PASS_STREAM_HOLD), None, Some(LONGEST_PASS_STREAM_HOLD)]
        {
            passes
                .add_finished_pass(
                    CriterionPassMeasurement { pass_host_time: Duration::from_secs(9), ..pass },
                    &EMPTY_INTERVAL_READINGS,
                )
                .unwrap();
            assert_eq!(passes.next_pass_stream_hold(), hold);
        }
    }
}
