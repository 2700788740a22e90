//! Actions that a row's launches may take in a timed region, besides enqueuing work on the timed
//! stream and joined streams. The audit (`measure`) reports every other action as an error.

/// Permissions of timed code: device allocations, waits for the GPU, and changes of the current
/// context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllowedActionsOfTimedCode {
    /// Permission to allocate device memory.
    pub may_allocate_device_memory: bool,
    /// Permission to wait for the GPU; the samples then include host time, and the record says so.
    pub may_wait_for_gpu: bool,
    /// Permission to leave another CUDA context current on the host thread after a launch.
    pub may_change_current_context: bool,
}

impl AllowedActionsOfTimedCode {
    /// Permissions of a row that was written for kernelgate's harness. Waits and allocations in
    /// such a row are its author's choice and count as part of the row's time.
    pub const ALLOWED_IN_OWN_ROW: AllowedActionsOfTimedCode = Self {
        may_allocate_device_memory: true,
        may_wait_for_gpu: true,
        may_change_current_context: true,
    };
    /// Permissions of a row that launches unknown code of another project: none.
    pub const ALLOWED_IN_ATTACHED_ROW: Self = Self {
        may_allocate_device_memory: false,
        may_wait_for_gpu: false,
        may_change_current_context: false,
    };
    /// Permissions of the routine of a Criterion bench, which measures host work as well.
    pub const ALLOWED_IN_CRITERION_ROUTINE: Self = Self {
        may_allocate_device_memory: true,
        may_wait_for_gpu: true,
        may_change_current_context: true,
    };
}
