//! Refuses launches that write outputs before the timed stream reaches them, which shows work on
//! another stream.
//!
//! While a kernel blocks the timed stream, a launch must not change its poisoned outputs; values
//! spread over each output are read back. The check for early writes is skipped if a launch has
//! more commands than can be queued behind a blocked stream.

use std::time::Duration;

use super::audit_finding::TimingRefusal;
use crate::backend::{BackendError, LaunchableProblem};
use kernelgate_cuda::driver::stream::stream_hold::StreamHold;

/// Longest time for which the timed stream is blocked during the launch. If the host needs longer
/// than this hold to launch, the check is inconclusive and passes.
const MAX_HOLD_FOR_EARLY_WRITE_CHECK: Duration = Duration::from_millis(200);
/// Wait after the launch call, while the timed stream is blocked, so that a kernel on another
/// stream can write: a kernel starts within microseconds.
const WAIT_FOR_WRITES_OF_OTHER_STREAMS: Duration = Duration::from_millis(2);
/// Blocks the timed stream and launches; fails if a poisoned output changes before the stream is
/// released. Outputs that the reset overwrites no longer contain poison, and are not checked.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if a poisoned output changes, or if the device fails.
pub fn refuse_writes_before_stream_release(
    stream: &mut dyn StreamHold,
    executable: &mut dyn LaunchableProblem,
) -> Result<(), BackendError> {
    executable.poison_outputs()?;
    // A launch that carries state needs the state that its reset writes, which may lie in outputs
    // and overwrite their poison.
    executable.reset_state()?;
    executable.wait_for_launches()?;
    // A launch that carries no state has poison in every output here, unless work on another stream
    // has already overwritten it.
    let poisoned = match executable.launches_carry_state() {
        true => Some(executable.outputs_are_still_poisoned()?),
        false => None,
    };
    if poisoned.as_ref().is_some_and(|poisoned| !poisoned.contains(&true)) {
        return Ok(());
    }
    stream.enqueue_hold(MAX_HOLD_FOR_EARLY_WRITE_CHECK)?;
    let untouched = executable.launch_once().and_then(|()| {
        std::thread::sleep(WAIT_FOR_WRITES_OF_OTHER_STREAMS);
        executable.outputs_are_still_poisoned()
    });
    stream.release_stream();
    executable.wait_for_launches()?;
    // If the blocking kernel timed out before its release, the launch may legitimately have run on
    // the timed stream.
    let is_looked_at = |output: usize| poisoned.as_ref().is_none_or(|poisoned| poisoned[output]);
    let mut outputs = untouched?.into_iter().enumerate();
    let written = outputs.any(|(output, untouched)| !untouched && is_looked_at(output));
    if written && stream.was_released_in_time() {
        return Err(TimingRefusal::WritesWhileStreamBlocked.into());
    }
    Ok(())
}
