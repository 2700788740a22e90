//! The device's queue behind the blocker: how many launches fit, and how many commands one is.
//! Deliberately absent: the launches themselves (`events`).

use std::sync::Arc;

use super::audit::Refusal;
use crate::backend::{BackendError, Executable};
use kernelgate_cuda::driver::graph_set::GraphSet;
use kernelgate_cuda::{Device, Devices};

/// Most launches between one release of the blocker and the next.
pub const MAX_BURST: usize = 64;
/// Most commands queued behind the blocker: the queue holds about a thousand, and a host that waits
/// for room in it cannot release it.
pub const MAX_QUEUED: usize = 400;

/// Whether this many launches of this many commands, with their events, can be queued.
pub const fn fits(commands: usize, launches: usize) -> bool {
    commands.saturating_add(3).saturating_mul(launches) <= MAX_QUEUED + 3 * MAX_BURST
}

/// A launch as a graph; `None` if it cannot be captured, for example because it replays a graph of
/// its own.
///
/// # Errors
/// When the GPU is lost.
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
/// [`BackendError::NotTimed`] if there are too many; when the device fails.
pub fn check_fits(
    device: &Arc<Device>,
    launches: usize,
    executable: &mut dyn Executable,
) -> Result<(), BackendError> {
    executable.synchronize()?;
    let commands = captured(&Devices::from(device), executable)?.map_or(1, |graph| graph.nodes());
    if fits(commands, launches) {
        return Ok(());
    }
    Err(Refusal::TooManyCommands { launches, commands }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_only_batches_that_fit_the_queue() {
        assert!(fits(1, MAX_BURST - 1) && fits(MAX_QUEUED, 1));
        // A pass of eight kernels, and a denoising step of some hundred.
        assert!(fits(8, 15) && !fits(260, 15));
        assert!(!fits(usize::MAX, 2));
    }
}
