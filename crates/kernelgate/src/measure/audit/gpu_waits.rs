//! Launches that wait for the GPU: the host's time would be in their samples.
//!
//! Launches once behind a kernel that blocks the stream. If it returns only once the blocker ends,
//! it waits for the GPU, or for room in the queue. CUPTI's record of the calls shows whether the
//! launch waited or the queue was full ([`super::blocking_calls`]).

use std::time::{Duration, Instant};

use super::audit_finding::{RefusedSubject, TimingRefusal};
use super::blocking_calls::{self, LaunchStall};
use crate::backend::{BackendError, Executable};
use crate::measure::launch_queue::MAX_QUEUED_COMMANDS;
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::stream::stream_hold::StreamHold;

/// Longest hold of the stream during a launch that may wait for the stream.
const WAIT_TEST_HOLD: Duration = Duration::from_millis(200);
/// Number of launches that are tried: a row does not wait for the stream if one of these launches
/// returns while the stream is held.
const WAIT_TEST_LAUNCHES: usize = 3;

/// Launches once while the stream is held, and checks that the launch returns. Returns whether the
/// launch filled the queue, so that it is more than can be queued ahead. `commands` is the number
/// of commands of a launch, if it could be captured.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if it waits for the GPU, or if it fails.
pub fn check_launch_waits(
    device: &Device,
    stream: &mut dyn StreamHold,
    executable: &mut dyn Executable,
    commands: Option<usize>,
) -> Result<bool, BackendError> {
    let mut hold = WAIT_TEST_HOLD;
    let Some(took) = launch_outlasts_hold(hold, stream, executable)? else { return Ok(false) };
    executable.reset_and_wait()?;
    let started = Instant::now();
    executable.launch()?;
    let unheld = started.elapsed();
    executable.synchronize()?;
    if took < unheld + WAIT_TEST_HOLD / 2 {
        // The hold is extended by the time of a launch on a free stream, because the host may need
        // that long without any wait.
        hold += unheld;
        if launch_outlasts_hold(hold, stream, executable)?.is_none() {
            return Ok(false);
        }
    }
    let host_stall = blocking_calls::record_launch_calls(device, stream, executable, hold)?;
    let may_fill = match (&host_stall, commands) {
        (None, Some(commands)) => commands > MAX_QUEUED_COMMANDS,
        (None, None) => launch_returns_early(device, executable)?,
        (Some(_), _) => false,
    };
    judge_delayed_launch(host_stall, may_fill)?;
    Ok(true)
}

/// Launches while the stream is held for this duration; returns whether the launch takes longer
/// than the hold. Returns how long the launch took, if it returned only after the blocker had timed
/// out.
fn launch_outlasts_hold(
    hold: Duration,
    stream: &mut dyn StreamHold,
    executable: &mut dyn Executable,
) -> Result<Option<Duration>, BackendError> {
    executable.reset_and_wait()?;
    stream.hold(hold)?;
    let started = Instant::now();
    let launched = executable.launch();
    let took = started.elapsed();
    stream.release();
    executable.synchronize()?;
    launched?;
    Ok((took >= hold.mul_f64(0.9) && !stream.was_released()).then_some(took))
}

/// Judges a launch that a held stream delayed: it has a time only if its commands filled the queue.
/// Without CUPTI's answer, `may_fill` decides: the launch has more commands than are queued ahead,
/// or returns while the GPU still works.
fn judge_delayed_launch(
    host_stall: Option<LaunchStall>,
    may_fill: bool,
) -> Result<(), TimingRefusal> {
    match host_stall {
        Some(LaunchStall::Queue) => Ok(()),
        Some(LaunchStall::Call(call)) => {
            Err(TimingRefusal::WaitsIn { subject: RefusedSubject::Launch, call })
        }
        Some(LaunchStall::Unknown) => Err(TimingRefusal::Waits { subject: RefusedSubject::Launch }),
        None if may_fill => Ok(()),
        None => Err(TimingRefusal::WaitsOrFillsQueue),
    }
}

/// Returns whether a launch on an idle GPU returns before the GPU has finished, in at least one of
/// several attempts.
fn launch_returns_early(
    device: &Device,
    executable: &mut dyn Executable,
) -> Result<bool, BackendError> {
    for _ in 0..WAIT_TEST_LAUNCHES {
        executable.reset_and_wait()?;
        executable.launch()?;
        let busy = device.is_busy()?;
        executable.synchronize()?;
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
    fn only_a_launch_that_fills_the_queue_may_take_as_long_as_the_hold() {
        for may_fill in [false, true] {
            assert_eq!(judge_delayed_launch(Some(LaunchStall::Queue), may_fill), Ok(()));
            let unknown = judge_delayed_launch(Some(LaunchStall::Unknown), may_fill);
            assert_eq!(unknown, Err(TimingRefusal::Waits { subject: RefusedSubject::Launch }));
            let call =
                judge_delayed_launch(Some(LaunchStall::Call("cuMemFree_v2".to_owned())), may_fill);
            let words = "a launch waits for the GPU in `cuMemFree_v2`";
            assert_eq!(call.unwrap_err().to_string(), words);
        }
        assert_eq!(judge_delayed_launch(None, true), Ok(()));
        assert_eq!(judge_delayed_launch(None, false), Err(TimingRefusal::WaitsOrFillsQueue));
    }
}
