//! The device's queue behind the blocker: how many launches fit, and how many commands one is. The
//! launches themselves are deliberately in another module (`events`).

use std::sync::Arc;

use super::audit::TimingRefusal;
use crate::backend::{BackendError, Executable};
use kernelgate_cuda::driver::graph_set::GraphSet;
use kernelgate_cuda::{Device, Devices};

/// Maximum number of launches between one release of the blocking kernel and the next.
pub const MAX_LAUNCHES_PER_BURST: usize = 64;
/// Maximum number of commands that are queued behind the blocking kernel: the queue holds about a
/// thousand, and a host that waits for room in the queue cannot release the kernel.
pub const MAX_QUEUED_COMMANDS: usize = 400;

/// Whether `launches` launches of `commands` commands each, with their events, fit into the
/// device's queue.
pub const fn fits_queue(commands: usize, launches: usize) -> bool {
    commands.saturating_add(3).saturating_mul(launches)
        <= MAX_QUEUED_COMMANDS + 3 * MAX_LAUNCHES_PER_BURST
}

/// A launch as a graph; `None` if it cannot be captured, for example because it replays a graph of
/// its own.
///
/// # Errors
/// Fails if the GPU is lost.
pub fn captured(
    devices: &Devices,
    executable: &mut dyn Executable,
) -> Result<Option<GraphSet>, BackendError> {
    match GraphSet::capture_on_devices(devices, || executable.launch()) {
        Ok(graph) => Ok(Some(graph)),
        Err(lost @ BackendError::Lost(_)) => Err(lost),
        Err(_) => Ok(None),
    }
}

/// Checks that all launches fit the queue, so that no sample contains the host's time. A launch
/// that cannot be captured counts as one command: it replays a graph of its own.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if there are too many, or if the device fails.
pub fn check_launches_fit_queue(
    device: &Arc<Device>,
    launches: usize,
    executable: &mut dyn Executable,
) -> Result<(), BackendError> {
    executable.synchronize()?;
    let commands = captured(&Devices::from(device), executable)?.map_or(1, |graph| graph.nodes());
    if fits_queue(commands, launches) {
        return Ok(());
    }
    Err(TimingRefusal::TooManyCommands { launches, commands }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_only_batches_that_fit_the_queue() {
        assert!(fits_queue(1, MAX_LAUNCHES_PER_BURST - 1) && fits_queue(MAX_QUEUED_COMMANDS, 1));
        // A pass of eight kernels, and a denoising step of some hundred.
        assert!(fits_queue(8, 15) && !fits_queue(260, 15));
        assert!(!fits_queue(usize::MAX, 2));
    }
}
