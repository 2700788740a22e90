//! Detects outputs that are written before the timed stream reaches the launch.
//!
//! While a blocker holds the stream, a launch may write no output; the check reads samples from the
//! beginning to the end of each. The check is skipped if a launch is more commands than can be
//! queued.

use std::time::Duration;

use super::audit_finding::TimingRefusal;
use crate::backend::{BackendError, Executable};
use kernelgate_cuda::driver::stream::stream_hold::StreamHold;

/// How long the stream is held at most. If the host is held up for longer, the check shows nothing.
const WRITE_TEST_HOLD: Duration = Duration::from_millis(200);
/// How long work on another stream has to show itself: starting a kernel takes microseconds.
const OTHER_STREAM_WRITE_TIME: Duration = Duration::from_millis(2);
/// Holds the stream and launches: no sample of an output may change before the stream is released.
/// Outputs that the reset writes hold no poison, and are skipped.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if one changes, or if the device fails.
pub fn check_launch_writes(
    stream: &mut dyn StreamHold,
    executable: &mut dyn Executable,
) -> Result<(), BackendError> {
    executable.poison_outputs()?;
    // A launch needs its state, which may lie in its outputs.
    executable.reset()?;
    executable.synchronize()?;
    // Without state every output holds poison, or work elsewhere has overwritten it already.
    let poisoned = match executable.carries_state() {
        true => Some(executable.still_poisoned()?),
        false => None,
    };
    if poisoned.as_ref().is_some_and(|poisoned| !poisoned.contains(&true)) {
        return Ok(());
    }
    stream.hold(WRITE_TEST_HOLD)?;
    let untouched = executable.launch().and_then(|()| {
        std::thread::sleep(OTHER_STREAM_WRITE_TIME);
        executable.still_poisoned()
    });
    stream.release();
    executable.synchronize()?;
    // If the blocker timed out, the launch may have run on the timed stream.
    let is_looked_at = |output: usize| poisoned.as_ref().is_none_or(|poisoned| poisoned[output]);
    let mut outputs = untouched?.into_iter().enumerate();
    let written = outputs.any(|(output, untouched)| !untouched && is_looked_at(output));
    if written && stream.was_released() {
        return Err(TimingRefusal::WritesWhileHeld.into());
    }
    Ok(())
}
