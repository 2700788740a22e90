//! Launches that wait for the GPU: the host's time would be in their samples.
//!
//! A launch is enqueued behind a blocker. If it returns only once the blocker ends, it waits for the
//! GPU, or for room in the queue. CUPTI's record of the calls decides which ([`super::calls`]).

use std::time::{Duration, Instant};

use super::calls::{self, HostStall};
use super::refusal::{Refusal, Subject};
use crate::backend::{BackendError, Executable};
use crate::measure::queue::MAX_QUEUED;
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::stream::hold::StreamHold;

/// How long the stream is held for a launch that might wait for it.
const HOLD: Duration = Duration::from_millis(200);
/// Launches that are tried: a row does not wait for the stream if one of them returns while it is
/// held.
const LAUNCHES: usize = 3;

/// Launches while the stream is held. Returns whether the launch filled the queue, so that it is
/// more than can be queued ahead. `commands` is the number of commands of a launch, if it could be
/// captured.
///
/// # Errors
/// [`BackendError::NotTimed`] if it waits for the GPU; when it fails.
pub fn check(
    device: &Device,
    stream: &mut dyn StreamHold,
    executable: &mut dyn Executable,
    commands: Option<usize>,
) -> Result<bool, BackendError> {
    let mut hold = HOLD;
    let Some(took) = outlasts(hold, stream, executable)? else { return Ok(false) };
    executable.reset_and_wait()?;
    let started = Instant::now();
    executable.launch()?;
    let unheld = started.elapsed();
    executable.synchronize()?;
    if took < unheld + HOLD / 2 {
        // The host may need that long even without a wait.
        hold += unheld;
        if outlasts(hold, stream, executable)?.is_none() {
            return Ok(false);
        }
    }
    let host_stall = calls::recorded(device, stream, executable, hold)?;
    let may_fill = match (&host_stall, commands) {
        (None, Some(commands)) => commands > MAX_QUEUED,
        (None, None) => returns_early(device, executable)?,
        (Some(_), _) => false,
    };
    judge(host_stall, may_fill)?;
    Ok(true)
}

/// Launches while the stream is held for so long. Returns how long the launch took, if it returned
/// only after the blocker had timed out.
fn outlasts(
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
fn judge(host_stall: Option<HostStall>, may_fill: bool) -> Result<(), Refusal> {
    match host_stall {
        Some(HostStall::Queue) => Ok(()),
        Some(HostStall::Call(call)) => Err(Refusal::WaitsIn { subject: Subject::Launch, call }),
        Some(HostStall::Unknown) => Err(Refusal::Waits(Subject::Launch)),
        None if may_fill => Ok(()),
        None => Err(Refusal::WaitsOrFillsQueue),
    }
}

/// Whether a launch on an idle GPU returns, at least once, while the GPU still works.
fn returns_early(device: &Device, executable: &mut dyn Executable) -> Result<bool, BackendError> {
    for _ in 0..LAUNCHES {
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
    fn only_a_launch_that_fills_the_queue_does_not_wait_for_the_gpu() {
        for may_fill in [false, true] {
            assert_eq!(judge(Some(HostStall::Queue), may_fill), Ok(()));
            let unknown = judge(Some(HostStall::Unknown), may_fill);
            assert_eq!(unknown, Err(Refusal::Waits(Subject::Launch)));
            let call = judge(Some(HostStall::Call("cuMemFree_v2".to_owned())), may_fill);
            let words = "a launch waits for the GPU in `cuMemFree_v2`";
            assert_eq!(call.unwrap_err().to_string(), words);
        }
        assert_eq!(judge(None, true), Ok(()));
        assert_eq!(judge(None, false), Err(Refusal::WaitsOrFillsQueue));
    }
}
