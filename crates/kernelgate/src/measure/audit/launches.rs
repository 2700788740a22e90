//! Checks, before a row is sampled, that its launches do only what is allowed.

use super::{allocations, context, early_writes, gpu_waits};
use crate::backend::{BackendError, Executable};
use crate::measure::launch_queue::MAX_QUEUED_COMMANDS;
use kernelgate_cuda::Devices;
use kernelgate_cuda::driver::graph_set::GraphSet;
use kernelgate_cuda::driver::stream::stream_hold::StreamHold;

/// Checks that launches do only what the row is allowed to do. Returns whether a single launch
/// fills the device's queue. `captured` is a captured launch, if capturing is possible.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if the launches take a forbidden action, or if a launch
/// fails.
pub fn check_launches_allowed(
    devices: &Devices,
    stream: &mut dyn StreamHold,
    executable: &mut dyn Executable,
    captured: Option<&GraphSet>,
) -> Result<bool, BackendError> {
    let allowed = executable.allowed();
    if !allowed.allocations {
        captured.map_or(Ok(()), allocations::check_graph_allocations)?;
        allocations::check_memory_unchanged(devices.first_device(), executable)?;
    }
    if allowed.waits {
        return Ok(false);
    }
    // The launch is checked for waits even if it could be captured, because it may wait only
    // outside of captures.
    gpu_waits::check_launch_waits(
        devices.first_device(),
        stream,
        executable,
        captured.map(GraphSet::max_nodes),
    )
}

/// Checks that a launch of this many commands works on the timed stream only, as far as its outputs
/// and its duration show.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if the launch works elsewhere, or if a launch fails.
pub fn check_timed_stream_alone(
    devices: &Devices,
    stream: &mut dyn StreamHold,
    executable: &mut dyn Executable,
    commands: usize,
) -> Result<(), BackendError> {
    if commands <= MAX_QUEUED_COMMANDS {
        early_writes::check_launch_writes(stream, executable)?;
    }
    context::check_context_idle(devices, executable)
}
