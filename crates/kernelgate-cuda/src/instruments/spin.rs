//! Kernels of known length, against which timing is checked: one that spins, one that does nothing.

use super::source;
use crate::BackendError;
use crate::{Argument, Buffer, Device, Kernel, LaunchShape};

/// A kernel that does nothing.
pub struct Empty {
    kernel: Kernel,
}

impl Empty {
    /// Compiles it.
    ///
    /// # Errors
    /// When it does not compile.
    pub fn new(device: &Device) -> Result<Self, BackendError> {
        Ok(Self { kernel: device.kernel(&source("empty").build(&[]), "measure_empty")? })
    }

    /// Enqueues it.
    ///
    /// # Errors
    /// When the launch is refused.
    pub fn launch(&self) -> Result<(), BackendError> {
        self.kernel.launch(LaunchShape { grid: (1, 1, 1), block: 32, shared_bytes: 0 }, &[])
    }
}

/// A kernel that spins for a given time, and what it reports.
pub struct Spin {
    kernel: Kernel,
    report: Buffer,
}

/// Nanoseconds by the device's timer, SM cycles.
const REPORT_BYTES: usize = 16;

impl Spin {
    /// Compiles and allocates.
    ///
    /// # Errors
    /// When the kernel does not compile or memory is short.
    pub fn new(device: &Device) -> Result<Self, BackendError> {
        Ok(Self { kernel: device.kernel(&source("spin").build(&[]), "measure_spin")?, report: device.upload(&[0; REPORT_BYTES])? })
    }

    /// Enqueues a spin of so many nanoseconds.
    ///
    /// # Errors
    /// When the launch is refused.
    pub fn launch(&self, duration_ns: u64) -> Result<(), BackendError> {
        let shape = LaunchShape { grid: (1, 1, 1), block: 1, shared_bytes: 0 };
        self.kernel.launch(shape, &[Argument::U64(duration_ns), Argument::from(&self.report)])
    }

    /// Nanoseconds that the last spin, which has finished, spent by the device's own timer.
    ///
    /// # Errors
    /// When the device fails.
    pub fn spent_ns(&self) -> Result<u64, BackendError> {
        let mut words = [0u64; 2];
        self.report.download(bytemuck::cast_slice_mut(&mut words))?;
        Ok(words[0])
    }
}
