//! Kernel launches whose arguments and resources were checked before any timing.

use super::argument::KernelArgumentList;
use super::kernel::Kernel;
use super::shape::Launch;
use crate::BackendError;
use crate::driver::device::Device;

/// A kernel launch that was checked: the GPU can run it, and its arguments match the kernel's
/// parameters.
pub struct PreparedLaunch {
    kernel: Kernel,
    launch: Launch,
    arguments: KernelArgumentList,
}

impl PreparedLaunch {
    /// Checks a launch of a kernel against the GPU and the kernel's parameters, and stores it for
    /// later.
    ///
    /// # Errors
    /// Fails if no GPU allows the dimensions, or the arguments do not match the kernel; with
    /// [`BackendError::Unsupported`] if this GPU lacks shared memory, clusters of this size, or
    /// room for all blocks of a cooperative launch.
    pub fn check_and_prepare(
        device: &Device,
        kernel: Kernel,
        launch: Launch,
        arguments: KernelArgumentList,
    ) -> Result<Self, BackendError> {
        kernel.check_arguments(&arguments)?;
        launch.check_on_device_and_allow_resources(device, &kernel)?;
        Ok(Self { kernel, launch, arguments })
    }

    /// Enqueues the prepared launch on the kernel's stream; the call may return before the kernel
    /// has run.
    ///
    /// # Errors
    /// Fails if the driver refuses the launch; the error names the kernel.
    pub fn enqueue(&self) -> Result<(), BackendError> {
        self.kernel.launch(self.launch, &self.arguments)
    }
}

#[cfg(test)]
mod tests;
