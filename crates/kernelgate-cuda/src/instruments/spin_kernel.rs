//! Kernels of known duration that check the timing: one spins, one does nothing.

use crate::{BackendError, Device, DeviceBuffer, KernelArgument, KernelSpec, LoadedKernel, Source};

/// The spin kernel and the empty kernel, whose grids are fixed.
pub(super) const SPIN_KERNELS: &[KernelSpec<()>] = &[EMPTY_KERNEL, SPIN_KERNEL_SPEC];

const EMPTY_KERNEL: KernelSpec<()> = KernelSpec {
    variants: || vec![()],
    ..KernelSpec::new(
        Source::new("measure/empty", include_str!("../../kernels/measure/empty.cu")),
        "measure_empty",
        32,
        |()| [1, 1, 1],
    )
};

const SPIN_KERNEL_SPEC: KernelSpec<()> = KernelSpec {
    variants: || vec![()],
    ..KernelSpec::new(
        Source::new("measure/spin", include_str!("../../kernels/measure/spin.cu")),
        "measure_spin",
        1,
        |()| [1, 1, 1],
    )
};

/// A kernel that does nothing, to measure the cost of a launch.
pub struct EmptyKernel {
    kernel: LoadedKernel,
}

impl EmptyKernel {
    /// Compiles the kernel.
    pub fn new(device: &Device) -> Result<Self, BackendError> {
        Ok(Self { kernel: EMPTY_KERNEL.compile_and_load(device, &())? })
    }

    /// Enqueues the kernel.
    pub fn launch(&self) -> Result<(), BackendError> {
        self.kernel.launch_with(&[])
    }
}

/// A kernel that spins for a given time, and its reported time.
pub struct SpinKernel {
    kernel: LoadedKernel,
    report: DeviceBuffer,
}

/// Bytes of a spin kernel's report: nanoseconds by the device timer, and SM cycles.
const SPIN_REPORT_BYTES: usize = 16;

impl SpinKernel {
    /// Compiles the kernel and allocates its report.
    ///
    /// # Errors
    /// Fails if the kernel does not compile or memory is short.
    pub fn new(device: &Device) -> Result<Self, BackendError> {
        Ok(Self {
            kernel: SPIN_KERNEL_SPEC.compile_and_load(device, &())?,
            report: device.upload(&[0; SPIN_REPORT_BYTES])?,
        })
    }

    /// Enqueues a kernel that spins for `duration_ns` nanoseconds.
    pub fn launch(&self, duration_ns: u64) -> Result<(), BackendError> {
        self.kernel
            .launch_with(&[KernelArgument::U64(duration_ns), KernelArgument::from(&self.report)])
    }

    /// Nanoseconds that the last spin, which has finished, spent by the device's own timer.
    pub fn spent_time_ns(&self) -> Result<u64, BackendError> {
        let mut words = [0u64; 2];
        self.report.download(bytemuck::cast_slice_mut(&mut words))?;
        Ok(words[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::lock_first_gpu;

    #[test]
    fn a_spin_kernel_takes_the_requested_time() {
        let Some((device, _one_at_a_time)) = lock_first_gpu() else { return };
        let (empty, spin) = (EmptyKernel::new(&device).unwrap(), SpinKernel::new(&device).unwrap());
        empty.launch().unwrap();
        spin.launch(200_000).unwrap();
        device.synchronize().unwrap();
        let spent = spin.spent_time_ns().unwrap();
        assert!(spent >= 200_000, "{spent} ns");
    }
}
