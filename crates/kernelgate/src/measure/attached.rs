//! What launches of other code must not do while they are timed: wait for the GPU, and allocate.
//! What they leave behind on the thread is looked at when they are launched
//! ([`kernelgate_cuda::driver::conduct`]).

use std::time::{Duration, Instant};

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
        executable.reset()?;
        executable.synchronize()?;
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
/// than can be queued.
///
/// # Errors
/// [`BackendError::NotTimed`] where it waits for the GPU; when it fails.
pub fn check_waits(
    device: &Device,
    instruments: &mut Instruments,
    executable: &mut dyn Executable,
) -> Result<bool, BackendError> {
    executable.reset()?;
    executable.synchronize()?;
    instruments.block(HOLD)?;
    let started = Instant::now();
    let launched = executable.launch();
    let took = started.elapsed();
    instruments.release();
    executable.synchronize()?;
    launched?;
    // Only then had it to wait until the stream let go by itself.
    if took < HOLD.mul_f64(0.9) || instruments.released() {
        return Ok(false);
    }
    // Unless the host takes as long where nothing holds it up.
    executable.reset()?;
    executable.synchronize()?;
    let started = Instant::now();
    executable.launch()?;
    let unheld = started.elapsed();
    executable.synchronize()?;
    if took < unheld + HOLD / 2 {
        return Ok(false);
    }
    let held_up_by = waiting::recorded(device, instruments, executable, HOLD)?;
    let returns_early = held_up_by.is_none() && returns_early(device, executable)?;
    waits(held_up_by, returns_early).map_or(Ok(true), |why| Err(refused(why)))
}

/// Why a launch that a held stream held up has no time; none where its commands filled the queue,
/// which CUPTI tells. Else a launch that returns while the GPU still works has not waited for the
/// end of it, which is all that can be said.
fn waits(held_up_by: Option<HeldUpBy>, returns_early: bool) -> Option<String> {
    const WAITS: &str = "a launch waits for the GPU";
    const HOW: &str = "it synchronises, copies to the host, or frees memory";
    match held_up_by {
        Some(HeldUpBy::Queue) => None,
        Some(HeldUpBy::Call(call)) => Some(format!("{WAITS} in `{call}`")),
        Some(HeldUpBy::Unknown) => Some(format!("{WAITS}: {HOW}")),
        None if returns_early => None,
        None => Some(format!(
            "{WAITS}: {HOW}; or it is more commands than can be queued, which CUPTI would tell"
        )),
    }
}

/// Whether a launch on an idle GPU returns, at least once, while the GPU still works.
fn returns_early(device: &Device, executable: &mut dyn Executable) -> Result<bool, BackendError> {
    for _ in 0..LAUNCHES {
        executable.reset()?;
        executable.synchronize()?;
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
        for returns_early in [false, true] {
            assert_eq!(waits(Some(HeldUpBy::Queue), returns_early), None);
            let unknown = waits(Some(HeldUpBy::Unknown), returns_early).unwrap();
            assert!(
                unknown.starts_with("a launch waits for the GPU: it synchronises"),
                "{unknown}"
            );
            let call = waits(Some(HeldUpBy::Call("cuMemFree_v2".to_owned())), returns_early);
            assert_eq!(call.unwrap(), "a launch waits for the GPU in `cuMemFree_v2`");
        }
        assert_eq!(waits(None, true), None);
        let unknown = waits(None, false).unwrap();
        assert!(unknown.contains("waits for the GPU") && unknown.contains("CUPTI"), "{unknown}");
    }
}
