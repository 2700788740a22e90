//! Work that lasts longer than the timed stream: the context is busy after the stream has finished.

use std::time::{Duration, Instant};

use super::audit_finding::{RefusedSubject, TimingRefusal};
use crate::backend::{BackendError, Executable};
use kernelgate_cuda::Devices;

/// How much longer the context may be busy than the stream: the cost of asking, and a share of the
/// launch or pass that does not matter.
const CONTEXT_QUERY_COST: Duration = Duration::from_micros(60);
const MAX_OTHER_SHARE: f64 = 0.02;
/// Number of repetitions that must all show work outside of the timed stream: a random delay of the
/// host shows in one of them only.
const CONTEXT_CHECK_REPETITIONS: u32 = 5;

/// Whether the CUDA context is still busy after launches or passes on the timed stream.
#[derive(Debug, Clone)]
pub struct ContextAfterStream {
    subject: RefusedSubject,
    busy: u32,
    shortest: Duration,
    idle: bool,
}

impl ContextAfterStream {
    /// State of the check before the context's busy time is measured.
    pub const fn new(subject: RefusedSubject) -> Self {
        Self { subject, busy: 0, shortest: Duration::MAX, idle: false }
    }

    /// Returns whether the context was idle after some repetition, so that no further repetition is
    /// needed.
    pub const fn was_context_idle(&self) -> bool {
        self.idle
    }

    /// Adds a repetition that took `elapsed`, with the time for which the context was busy
    /// afterwards.
    ///
    /// # Errors
    /// Fails if every repetition has shown work.
    pub fn add(&mut self, elapsed: Duration, busy: Duration) -> Result<(), TimingRefusal> {
        if busy <= CONTEXT_QUERY_COST + elapsed.mul_f64(MAX_OTHER_SHARE) {
            self.idle = true;
            return Ok(());
        }
        self.shortest = self.shortest.min(busy);
        self.busy += 1;
        if self.busy < CONTEXT_CHECK_REPETITIONS {
            return Ok(());
        }
        Err(TimingRefusal::BusyAfterStream { subject: self.subject, busy: self.shortest })
    }
}

/// Launches and waits for the stream: then the context has to be idle, on each GPU.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if the context is busy, or if the device reports an error.
pub fn check_context_idle(
    devices: &Devices,
    executable: &mut dyn Executable,
) -> Result<(), BackendError> {
    let finish = || devices.iter().try_for_each(|device| device.synchronize_context());
    let mut after = ContextAfterStream::new(RefusedSubject::Launch);
    while !after.was_context_idle() {
        executable.reset()?;
        finish()?;
        let launched = Instant::now();
        executable.launch()?;
        executable.synchronize()?;
        // The driver cleans up after a graph when the stream is first synchronised.
        devices.iter().try_for_each(|device| device.synchronize_stream())?;
        let stream_done = Instant::now();
        finish()?;
        let busy = stream_done.elapsed();
        after.add(launched.elapsed(), busy)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds a repetition that takes 50 µs, after which the context is busy for `busy_us`
    /// microseconds.
    fn add(after: &mut ContextAfterStream, busy_us: u64) -> Result<(), TimingRefusal> {
        after.add(Duration::from_micros(50), Duration::from_micros(busy_us))
    }

    #[test]
    fn a_context_that_stays_busy_after_every_repetition_is_refused() {
        let mut after = ContextAfterStream::new(RefusedSubject::Launch);
        for busy_us in [400, 300, 500, 400] {
            assert_eq!(add(&mut after, busy_us), Ok(()));
        }
        let busy = Duration::from_micros(300);
        let refused = TimingRefusal::BusyAfterStream { subject: RefusedSubject::Launch, busy };
        assert_eq!(add(&mut after, 400), Err(refused));
    }

    #[test]
    fn a_context_that_is_idle_after_one_repetition_is_accepted() {
        let mut after = ContextAfterStream::new(RefusedSubject::Routine);
        for busy_us in [400, 400, 400, 400, 3] {
            assert_eq!(add(&mut after, busy_us), Ok(()));
        }
        assert!(after.was_context_idle());
    }

    #[test]
    fn a_context_busy_for_a_small_share_of_a_repetition_is_accepted() {
        let mut after = ContextAfterStream::new(RefusedSubject::Launch);
        after.add(Duration::from_millis(5), Duration::from_micros(150)).unwrap();
        assert!(after.was_context_idle());
    }
}
