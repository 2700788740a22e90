//! What launches of other code must not do while they are timed: wait for the GPU, and allocate.
//! What they leave behind on the thread is looked at when they are launched
//! ([`kernelgate_cuda::driver::conduct`]).

use std::time::{Duration, Instant};

use crate::backend::{BackendError, Executable};
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::graph::Graph;
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

/// Launches, and looks at free memory.
///
/// # Errors
/// [`BackendError::NotTimed`] where each launch takes some away; when one fails.
pub fn check_memory(device: &Device, executable: &mut dyn Executable) -> Result<(), BackendError> {
    let mut least = u64::MAX;
    for _ in 0..LAUNCHES {
        let (before, _) = device.memory()?;
        executable.launch()?;
        executable.synchronize()?;
        let (after, _) = device.memory()?;
        least = least.min(before.saturating_sub(after));
    }
    if least > 0 {
        return Err(refused(format!("each launch allocates {least} bytes of device memory")));
    }
    Ok(())
}

/// Launches while the stream is held, and looks at the clock. A launch that was captured waits for
/// nothing: it could not be captured. One of very many commands would wait for room in the queue.
///
/// # Errors
/// [`BackendError::NotTimed`] where it returns only when the stream is let go; when it fails.
pub fn check_waits(
    instruments: &mut Instruments,
    executable: &mut dyn Executable,
) -> Result<(), BackendError> {
    instruments.block(HOLD)?;
    let started = Instant::now();
    let launched = executable.launch();
    let took = started.elapsed();
    instruments.release();
    executable.synchronize()?;
    launched?;
    // Only then had it to wait until the stream let go by itself.
    if took >= HOLD.mul_f64(0.9) && !instruments.released() {
        return Err(refused(
            "a launch waits for the GPU: it synchronises, copies to the host, or frees memory"
                .to_owned(),
        ));
    }
    Ok(())
}
