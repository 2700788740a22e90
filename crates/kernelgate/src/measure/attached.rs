//! What launches of other code must not do while they are timed: wait for the GPU, and allocate.
//! What they leave behind on the thread is looked at when they are launched
//! ([`kernelgate_cuda::driver::conduct`]).

use std::time::{Duration, Instant};

use super::queue::MAX_QUEUED;
use super::waiting::{self, HeldUpBy};
use crate::backend::{BackendError, Executable};
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::graph::Graph;
use kernelgate_cuda::driver::memory;
use kernelgate_cuda::instruments::timing::Instruments;

/// How long the stream is held for a launch that might wait for it.
const HOLD: Duration = Duration::from_millis(200);
/// Launches of which each has to take memory away: a driver may do so once.
const LAUNCHES: usize = 3;

fn refused(why: String) -> BackendError {
    BackendError::NotTimed(why)
}

/// Looks for allocations among the commands of a launch.
///
/// # Errors
/// [`BackendError::NotTimed`] where there are some; when the driver refuses.
pub fn check_graph(graph: &Graph) -> Result<(), BackendError> {
    if graph.allocates()? {
        return Err(refused(
            "a launch allocates device memory in the order of the stream".to_owned(),
        ));
    }
    Ok(())
}

/// Launches, and looks at free memory and at the device's pool, whose peak begins anew.
///
/// # Errors
/// [`BackendError::NotTimed`] where each launch takes some away, or takes some of the pool for a
/// while; when one fails.
pub fn check_memory(device: &Device, executable: &mut dyn Executable) -> Result<(), BackendError> {
    let mut least = u64::MAX;
    for _ in 0..LAUNCHES {
        executable.settle()?;
        memory::forget_peak(device)?;
        let ((before, _), pool) = (device.memory()?, memory::taken(device)?.pool);
        executable.launch()?;
        executable.synchronize()?;
        let ((after, _), peak) = (device.memory()?, memory::taken(device)?.pool_peak);
        least = least.min(before.saturating_sub(after).max(peak.saturating_sub(pool)));
    }
    if least > 0 {
        return Err(refused(format!("each launch allocates {least} bytes of device memory")));
    }
    Ok(())
}

/// Launches while the stream is held, and looks at the clock. A launch that returns only when the
/// stream is let go waits for the GPU, or for room in the queue: then whether the launch is more
/// than can be queued. `counted` is of how many commands it is, where it could be captured.
///
/// # Errors
/// [`BackendError::NotTimed`] where it waits for the GPU; when it fails.
pub fn check_waits(
    device: &Device,
    instruments: &mut Instruments,
    executable: &mut dyn Executable,
    counted: Option<usize>,
) -> Result<bool, BackendError> {
    let mut hold = HOLD;
    let Some(took) = outlasts(hold, instruments, executable)? else { return Ok(false) };
    executable.settle()?;
    let started = Instant::now();
    executable.launch()?;
    let unheld = started.elapsed();
    executable.synchronize()?;
    if took < unheld + HOLD / 2 {
        // The host may take that long by itself.
        hold += unheld;
        if outlasts(hold, instruments, executable)?.is_none() {
            return Ok(false);
        }
    }
    let held_up_by = waiting::recorded(device, instruments, executable, hold)?;
    let may_fill = match (&held_up_by, counted) {
        (None, Some(commands)) => commands > MAX_QUEUED,
        (None, None) => returns_early(device, executable)?,
        (Some(_), _) => false,
    };
    waits(held_up_by, may_fill).map_or(Ok(true), |why| Err(refused(why)))
}

/// Launches while the stream is held for so long: how long the launch took, where it returned only
/// when the stream had let go by itself.
fn outlasts(
    hold: Duration,
    instruments: &mut Instruments,
    executable: &mut dyn Executable,
) -> Result<Option<Duration>, BackendError> {
    executable.settle()?;
    instruments.block(hold)?;
    let started = Instant::now();
    let launched = executable.launch();
    let took = started.elapsed();
    instruments.release();
    executable.synchronize()?;
    launched?;
    Ok((took >= hold.mul_f64(0.9) && !instruments.released()).then_some(took))
}

/// Why a launch that a held stream held up has no time; none where its commands filled the queue,
/// which CUPTI tells. Where it does not, that is taken for so if the launch is of more commands than
/// are queued ahead, or if it returns while the GPU still works, which is all that can be said.
fn waits(held_up_by: Option<HeldUpBy>, may_fill: bool) -> Option<String> {
    const WAITS: &str = "a launch waits for the GPU";
    const HOW: &str = "it synchronises, copies to the host, or frees memory";
    match held_up_by {
        Some(HeldUpBy::Queue) => None,
        Some(HeldUpBy::Call(call)) => Some(format!("{WAITS} in `{call}`")),
        Some(HeldUpBy::Unknown) => Some(format!("{WAITS}: {HOW}")),
        None if may_fill => None,
        None => Some(format!(
            "{WAITS}: {HOW}; or it is more commands than can be queued, which CUPTI would tell"
        )),
    }
}

/// Whether a launch on an idle GPU returns, at least once, while the GPU still works.
fn returns_early(device: &Device, executable: &mut dyn Executable) -> Result<bool, BackendError> {
    for _ in 0..LAUNCHES {
        executable.settle()?;
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
            assert_eq!(waits(Some(HeldUpBy::Queue), may_fill), None);
            let unknown = waits(Some(HeldUpBy::Unknown), may_fill).unwrap();
            assert!(
                unknown.starts_with("a launch waits for the GPU: it synchronises"),
                "{unknown}"
            );
            let call = waits(Some(HeldUpBy::Call("cuMemFree_v2".to_owned())), may_fill);
            assert_eq!(call.unwrap(), "a launch waits for the GPU in `cuMemFree_v2`");
        }
        assert_eq!(waits(None, true), None);
        let unknown = waits(None, false).unwrap();
        assert!(unknown.contains("waits for the GPU") && unknown.contains("CUPTI"), "{unknown}");
    }
}
