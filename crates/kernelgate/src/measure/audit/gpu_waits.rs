//! Refuses launches during which the host waits for the GPU, because host time would then be part
//! of their samples.
//!
//! This check launches once behind a kernel that blocks the timed stream. A launch call that
//! returns only after the blocking kernel has ended waits for the GPU, or for room in the launch
//! queue. CUPTI's record of API calls shows whether the launch waited for the GPU or the launch
//! queue was full ([`super::blocking_calls`]).

use std::time::{Duration, Instant};

use super::audit_finding::{RefusedTimedCode, TimingRefusal};
use super::blocking_calls::{self, BlockedLaunchCause};
use crate::backend::{BackendError, LaunchableProblem};
use crate::measure::launch_queue::MAX_COMMANDS_BEHIND_BLOCKER;
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::stream::stream_hold::StreamHold;

/// Longest time for which the stream is blocked while the launch call should return.
const MAX_HOLD_FOR_WAIT_CHECK: Duration = Duration::from_millis(200);
/// Number of launches on an idle GPU: if one of them returns while the GPU still works, launches do
/// not wait for the GPU.
const EARLY_RETURN_TRIAL_LAUNCHES: usize = 3;

/// Launches once while the stream is blocked, and fails if the launch call waits for the GPU.
/// Returns whether the launch filled the launch queue, which means that it cannot be queued ahead
/// completely. The parameter `commands` is the number of commands of one launch, if the launch
/// could be captured.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if the launch waits for the GPU, or if it fails.
pub fn refuse_launch_that_waits_for_gpu(
    device: &Device,
    stream: &mut dyn StreamHold,
    executable: &mut dyn LaunchableProblem,
    commands: Option<usize>,
) -> Result<bool, BackendError> {
    let mut hold = MAX_HOLD_FOR_WAIT_CHECK;
    let Some(took) = launch_time_if_longer_than_hold(hold, stream, executable)? else {
        return Ok(false);
    };
    executable.reset_state_and_wait()?;
    let started = Instant::now();
    executable.launch_once()?;
    let unheld = started.elapsed();
    executable.wait_for_launches()?;
    if took < unheld + MAX_HOLD_FOR_WAIT_CHECK / 2 {
        // If the launch call is slow on an unblocked stream too, the stream is blocked again,
        // longer by the call's time, because the host may need that time without waiting.
        hold += unheld;
        if launch_time_if_longer_than_hold(hold, stream, executable)?.is_none() {
            return Ok(false);
        }
    }
    let host_stall =
        blocking_calls::find_blocked_launch_cause_with_cupti(device, stream, executable, hold)?;
    let may_fill = match (&host_stall, commands) {
        (None, Some(commands)) => commands > MAX_COMMANDS_BEHIND_BLOCKER,
        (None, None) => launch_returns_before_gpu_finishes(device, executable)?,
        (Some(_), _) => false,
    };
    refuse_delayed_launch_unless_queue_full(host_stall, may_fill)?;
    Ok(true)
}

/// Launches while the stream is blocked for the duration `hold`. Returns the time of the launch
/// call if it returned only after the blocking kernel had timed out, otherwise `None`.
fn launch_time_if_longer_than_hold(
    hold: Duration,
    stream: &mut dyn StreamHold,
    executable: &mut dyn LaunchableProblem,
) -> Result<Option<Duration>, BackendError> {
    executable.reset_state_and_wait()?;
    stream.enqueue_hold(hold)?;
    let started = Instant::now();
    let launched = executable.launch_once();
    let took = started.elapsed();
    stream.release_stream();
    executable.wait_for_launches()?;
    launched?;
    Ok((took >= hold.mul_f64(0.9) && !stream.was_released_in_time()).then_some(took))
}

/// Accepts a launch call that did not return on a blocked stream only if its commands filled the
/// launch queue. If CUPTI gave no cause, `may_fill` decides: whether the launch has more commands
/// than can be queued, or returns while the GPU still works.
fn refuse_delayed_launch_unless_queue_full(
    host_stall: Option<BlockedLaunchCause>,
    may_fill: bool,
) -> Result<(), TimingRefusal> {
    match host_stall {
        Some(BlockedLaunchCause::LaunchQueueFull) => Ok(()),
        Some(BlockedLaunchCause::WaitingCudaCall(call)) => Err(TimingRefusal::WaitsInCudaCall {
            subject: RefusedTimedCode::ImplementationLaunch,
            cuda_function: call,
        }),
        Some(BlockedLaunchCause::UnknownCause) => {
            Err(TimingRefusal::WaitsForGpu { subject: RefusedTimedCode::ImplementationLaunch })
        }
        None if may_fill => Ok(()),
        None => Err(TimingRefusal::WaitsOrFillsQueue),
    }
}

/// Returns whether, in at least one of several trials, a launch on an idle GPU returns before the
/// GPU has finished its work.
fn launch_returns_before_gpu_finishes(
    device: &Device,
    executable: &mut dyn LaunchableProblem,
) -> Result<bool, BackendError> {
    for _ in 0..EARLY_RETURN_TRIAL_LAUNCHES {
        executable.reset_state_and_wait()?;
        executable.launch_once()?;
        let busy = device.is_stream_busy()?;
        executable.wait_for_launches()?;
        if busy {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_full_launch_queue_excuses_a_delayed_launch() {
        for may_fill in [false, true] {
            assert_eq!(
                refuse_delayed_launch_unless_queue_full(
                    Some(BlockedLaunchCause::LaunchQueueFull),
                    may_fill
                ),
                Ok(())
            );
            let unknown = refuse_delayed_launch_unless_queue_full(
                Some(BlockedLaunchCause::UnknownCause),
                may_fill,
            );
            assert_eq!(
                unknown,
                Err(TimingRefusal::WaitsForGpu { subject: RefusedTimedCode::ImplementationLaunch })
            );
            let call = refuse_delayed_launch_unless_queue_full(
                Some(BlockedLaunchCause::WaitingCudaCall("cuMemFree_v2".to_owned())),
                may_fill,
            );
            let words = "a launch waits for the GPU in `cuMemFree_v2`";
            assert_eq!(call.unwrap_err().to_string(), words);
        }
        assert_eq!(refuse_delayed_launch_unless_queue_full(None, true), Ok(()));
        assert_eq!(
            refuse_delayed_launch_unless_queue_full(None, false),
            Err(TimingRefusal::WaitsOrFillsQueue)
        );
    }
}
