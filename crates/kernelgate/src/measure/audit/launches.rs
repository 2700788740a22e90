//! Refuses, before a row is sampled, launches that allocate device memory or wait for the GPU
//! without permission.

use super::{allocations, context, early_writes, gpu_waits};
use crate::backend::{BackendError, LaunchableProblem};
use crate::measure::launch_queue::MAX_COMMANDS_BEHIND_BLOCKER;
use kernelgate_cuda::Devices;
use kernelgate_cuda::driver::graph_set::ExecutableGraphPerGpu;
use kernelgate_cuda::driver::stream::stream_hold::StreamHold;

/// Fails if launches allocate device memory or wait for the GPU, unless the row has permission for
/// it. Returns whether a single launch has more commands than the launch queue holds. The parameter
/// `captured` is the CUDA graph of one launch, if the launch could be captured.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if the launches take a forbidden action, or if a launch
/// fails.
pub fn refuse_unpermitted_allocations_and_waits(
    devices: &Devices,
    stream: &mut dyn StreamHold,
    executable: &mut dyn LaunchableProblem,
    captured: Option<&ExecutableGraphPerGpu>,
) -> Result<bool, BackendError> {
    let allowed = executable.actions_allowed_to_launches();
    if !allowed.may_allocate_device_memory {
        captured.map_or(Ok(()), allocations::refuse_graph_with_allocation_nodes)?;
        allocations::refuse_launches_that_allocate_memory(devices.first_device(), executable)?;
    }
    if allowed.may_wait_for_gpu {
        return Ok(false);
    }
    // A launch that could be captured is checked for waits too, because it may wait for the GPU
    // only when it is not captured.
    gpu_waits::refuse_launch_that_waits_for_gpu(
        devices.first_device(),
        stream,
        executable,
        captured.map(ExecutableGraphPerGpu::max_nodes_per_gpu),
    )
}

/// Fails if a launch of `commands` commands writes outputs early or outlasts the timed stream,
/// which shows work on other streams.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if the launch works on another stream, or if a launch
/// fails.
pub fn refuse_launch_with_work_on_other_streams(
    devices: &Devices,
    stream: &mut dyn StreamHold,
    executable: &mut dyn LaunchableProblem,
    commands: usize,
) -> Result<(), BackendError> {
    if commands <= MAX_COMMANDS_BEHIND_BLOCKER {
        early_writes::refuse_writes_before_stream_release(stream, executable)?;
    }
    context::refuse_launch_with_busy_context_after_stream(devices, executable)
}
