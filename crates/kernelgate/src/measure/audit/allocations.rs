//! Finds launches that allocate device memory, in stream order or outside of the stream.

use super::audit_finding::TimingRefusal;
use crate::backend::{BackendError, Executable};
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::graph_set::GraphSet;
use kernelgate_cuda::driver::memory;

/// Number of launches that must all allocate to count: a driver may allocate once.
const ALLOCATION_TEST_LAUNCHES: usize = 3;

/// Looks for allocations among the commands of a captured launch.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if there are any, or if the driver refuses.
pub fn check_graph_allocations(graph: &GraphSet) -> Result<(), BackendError> {
    if graph.allocates_memory()? {
        return Err(TimingRefusal::AllocatesInOrder.into());
    }
    Ok(())
}

/// Launches the row, and compares free memory and the peak of the device's pool before and after.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if each launch allocates, or if one fails.
pub fn check_memory_unchanged(
    device: &Device,
    executable: &mut dyn Executable,
) -> Result<(), BackendError> {
    let mut least = u64::MAX;
    for _ in 0..ALLOCATION_TEST_LAUNCHES {
        executable.reset_and_wait()?;
        memory::reset_peak_usage(device)?;
        let ((before, _), pool) =
            (device.free_and_total()?, memory::device_memory_usage(device)?.pool);
        executable.launch()?;
        executable.synchronize()?;
        let ((after, _), peak) =
            (device.free_and_total()?, memory::device_memory_usage(device)?.pool_peak);
        least = least.min(before.saturating_sub(after).max(peak.saturating_sub(pool)));
    }
    match least {
        0 => Ok(()),
        bytes => Err(TimingRefusal::Allocates { bytes }.into()),
    }
}
