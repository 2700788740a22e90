//! Launches whose arguments and resources are checked before anything is timed.

use super::argument::Arguments;
use super::kernel::Kernel;
use super::shape::Launch;
use crate::BackendError;
use crate::driver::device::Device;

/// A checked launch, which the GPU is known to support.
pub struct PreparedLaunch {
    kernel: Kernel,
    launch: Launch,
    arguments: Arguments,
}

impl PreparedLaunch {
    /// Prepares a launch of a kernel on its stream.
    ///
    /// # Errors
    /// Fails if no launch can have the dimensions, or the arguments do not match the kernel;
    /// [`BackendError::Unsupported`] if the GPU has less shared memory per block, no clusters of
    /// that size, or room for fewer blocks than wait for each other.
    pub fn new(
        device: &Device,
        kernel: Kernel,
        launch: Launch,
        arguments: Arguments,
    ) -> Result<Self, BackendError> {
        kernel.check(&arguments)?;
        launch.check_launch(device, &kernel)?;
        Ok(Self { kernel, launch, arguments })
    }

    /// Enqueues the launch; the call may return before the kernel has run.
    ///
    /// # Errors
    /// Fails if the driver refuses; the error names the kernel.
    pub fn launch(&self) -> Result<(), BackendError> {
        self.kernel.launch(self.launch, &self.arguments)
    }
}

#[cfg(test)]
mod tests;
