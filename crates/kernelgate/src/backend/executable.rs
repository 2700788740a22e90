//! What every backend makes of a problem.

use kernelgate_cuda::BackendError;

use crate::workload::Tensors;

/// A problem made ready on a backend: inputs placed, outputs allocated, nothing left to compile or
/// allocate.
pub trait Executable {
    /// Overwrites every output with NaN (0x7f for integers).
    ///
    /// # Errors
    /// When the device fails.
    fn poison_outputs(&mut self) -> Result<(), BackendError>;

    /// Starts the computation once; may return before it has finished.
    ///
    /// # Errors
    /// When the launch fails.
    fn launch(&mut self) -> Result<(), BackendError>;

    /// Waits until every launch has finished.
    ///
    /// # Errors
    /// When a launch failed on the device.
    fn synchronize(&mut self) -> Result<(), BackendError>;

    /// The outputs in host memory, in the workload's own form.
    ///
    /// # Errors
    /// When the device fails.
    fn outputs(&mut self) -> Result<&Tensors, BackendError>;
}
