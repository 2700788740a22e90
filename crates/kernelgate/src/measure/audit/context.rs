//! Refuses launches whose work outlasts the timed stream: the CUDA context is still busy after the
//! timed stream has finished.

use std::time::{Duration, Instant};

use super::audit_finding::{RefusedTimedCode, TimingRefusal};
use crate::backend::{BackendError, LaunchableProblem};
use kernelgate_cuda::Devices;

/// Time for which the context may stay busy after the timed stream: the cost of the query plus a
/// negligible share of the launch time.
const MAX_CONTEXT_QUERY_TIME: Duration = Duration::from_micros(60);
const MAX_WORK_SHARE_OFF_STREAM: f64 = 0.02;
/// Number of repetitions that must all show work outside of the timed stream, because a random
/// delay of the host affects only some.
const CONTEXT_IDLE_CHECK_REPETITIONS: u32 = 5;

/// Checks over several repetitions whether the CUDA context stays busy after the timed stream has
/// finished.
#[derive(Debug, Clone)]
pub struct ContextIdleAfterStreamCheck {
    checked_code: RefusedTimedCode,
    busy_repetitions: u32,
    shortest_busy_time: Duration,
    was_context_idle: bool,
}

impl ContextIdleAfterStreamCheck {
    /// Creates the check before its first repetition.
    pub const fn new(subject: RefusedTimedCode) -> Self {
        Self {
            checked_code: subject,
            busy_repetitions: 0,
            shortest_busy_time: Duration::MAX,
            was_context_idle: false,
        }
    }

    /// Returns whether the context was idle after some repetition, so that the check has passed and
    /// needs no further repetition.
    pub const fn passed_with_idle_context(&self) -> bool {
        self.was_context_idle
    }

    /// Adds a repetition whose launches took `elapsed` and after which the context stayed busy for
    /// `busy`.
    ///
    /// # Errors
    /// Fails if the CUDA context stayed busy after the timed stream in every repetition.
    pub fn add_repetition(
        &mut self,
        elapsed: Duration,
        busy: Duration,
    ) -> Result<(), TimingRefusal> {
        if busy <= MAX_CONTEXT_QUERY_TIME + elapsed.mul_f64(MAX_WORK_SHARE_OFF_STREAM) {
            self.was_context_idle = true;
            return Ok(());
        }
        self.shortest_busy_time = self.shortest_busy_time.min(busy);
        self.busy_repetitions += 1;
        if self.busy_repetitions < CONTEXT_IDLE_CHECK_REPETITIONS {
            return Ok(());
        }
        Err(TimingRefusal::ContextBusyAfterStream {
            subject: self.checked_code,
            context_busy_time: self.shortest_busy_time,
        })
    }
}

/// Launches, waits for the timed stream, and then fails if the CUDA context of a GPU is still busy.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if the context is busy, or if the device reports an error.
pub fn refuse_launch_with_busy_context_after_stream(
    devices: &Devices,
    executable: &mut dyn LaunchableProblem,
) -> Result<(), BackendError> {
    let finish = || devices.iter().try_for_each(|device| device.synchronize_all_streams());
    let mut after = ContextIdleAfterStreamCheck::new(RefusedTimedCode::ImplementationLaunch);
    while !after.passed_with_idle_context() {
        executable.reset_state()?;
        finish()?;
        let launched = Instant::now();
        executable.launch_once()?;
        executable.wait_for_launches()?;
        // The driver releases a graph's resources at the first stream synchronisation, so a second
        // synchronisation is timed.
        devices.iter().try_for_each(|device| device.synchronize_without_timeout())?;
        let stream_done = Instant::now();
        finish()?;
        let busy = stream_done.elapsed();
        after.add_repetition(launched.elapsed(), busy)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds a repetition of 50 µs, after which the context stays busy for `busy_us` microseconds.
    fn add_repetition_of_50_us(
        after: &mut ContextIdleAfterStreamCheck,
        busy_us: u64,
    ) -> Result<(), TimingRefusal> {
        after.add_repetition(Duration::from_micros(50), Duration::from_micros(busy_us))
    }

    #[test]
    fn a_context_that_stays_busy_after_every_repetition_is_refused() {
        let mut after = ContextIdleAfterStreamCheck::new(RefusedTimedCode::ImplementationLaunch);
        for busy_us in [400, 300, 500, 400] {
            assert_eq!(add_repetition_of_50_us(&mut after, busy_us), Ok(()));
        }
        let busy = Duration::from_micros(300);
        let refused = TimingRefusal::ContextBusyAfterStream {
            subject: RefusedTimedCode::ImplementationLaunch,
            context_busy_time: busy,
        };
        assert_eq!(add_repetition_of_50_us(&mut after, 400), Err(refused));
    }

    #[test]
    fn a_context_that_is_idle_after_one_repetition_is_accepted() {
        let mut after = ContextIdleAfterStreamCheck::new(RefusedTimedCode::CriterionRoutine);
        for busy_us in [400, 400, 400, 400, 3] {
            assert_eq!(add_repetition_of_50_us(&mut after, busy_us), Ok(()));
        }
        assert!(after.passed_with_idle_context());
    }

    #[test]
    fn a_context_busy_for_a_small_share_of_a_repetition_is_accepted() {
        let mut after = ContextIdleAfterStreamCheck::new(RefusedTimedCode::ImplementationLaunch);
        after.add_repetition(Duration::from_millis(5), Duration::from_micros(150)).unwrap();
        assert!(after.passed_with_idle_context());
    }
}
