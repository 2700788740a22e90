//! Refuses a row whose launches allocate device memory, by stream-ordered or by synchronous calls.

use super::audit_finding::TimingRefusal;
use crate::backend::{BackendError, LaunchableProblem};
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::graph_set::ExecutableGraphPerGpu;
use kernelgate_cuda::driver::memory;

/// Number of trial launches; a row is refused only if each allocates, because a driver may allocate
/// once on its own.
const ALLOCATION_TRIAL_LAUNCHES: usize = 3;

/// Fails if the CUDA graph captured from a launch contains a node that allocates memory.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if the graph has allocation nodes, or if the driver
/// refuses.
pub fn refuse_graph_with_allocation_nodes(
    graph: &ExecutableGraphPerGpu,
) -> Result<(), BackendError> {
    if graph.any_graph_allocates_memory()? {
        return Err(TimingRefusal::AllocatesInGraph.into());
    }
    Ok(())
}

/// Launches the row several times and compares free device memory and the device pool's peak usage
/// before and after each launch.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if every launch allocates memory; a failed launch
/// returns its own error.
pub fn refuse_launches_that_allocate_memory(
    device: &Device,
    executable: &mut dyn LaunchableProblem,
) -> Result<(), BackendError> {
    let mut least = u64::MAX;
    for _ in 0..ALLOCATION_TRIAL_LAUNCHES {
        executable.reset_state_and_wait()?;
        memory::restart_peak_of_pool(device)?;
        let ((before, _), pool) = (
            device.free_and_total_bytes()?,
            memory::read_device_memory_usage(device)?.allocated_pool_bytes,
        );
        executable.launch_once()?;
        executable.wait_for_launches()?;
        let ((after, _), peak) = (
            device.free_and_total_bytes()?,
            memory::read_device_memory_usage(device)?.peak_pool_bytes,
        );
        least = least.min(before.saturating_sub(after).max(peak.saturating_sub(pool)));
    }
    match least {
        0 => Ok(()),
        bytes => Err(TimingRefusal::AllocatesDeviceMemory { allocated_bytes: bytes }.into()),
    }
}
