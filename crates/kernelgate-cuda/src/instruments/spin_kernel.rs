//! A kernel that spins for a known time and an empty kernel, with which timing by events is
//! checked.

use crate::{
    BackendError, Device, DeviceBuffer, KernelArgument, KernelSpec, LoadedKernelWithLaunch, Source,
};

/// The empty kernel and the spin kernel; their specifications need no parameter.
pub(super) const SPIN_AND_EMPTY_KERNELS: &[KernelSpec<()>] = &[EMPTY_KERNEL, SPIN_KERNEL];

const EMPTY_KERNEL: KernelSpec<()> = KernelSpec {
    listed_build_parameters: || vec![()],
    ..KernelSpec::new(
        Source::new("measure/empty", include_str!("../../kernels/measure/empty.cu")),
        "measure_empty",
        32,
        |()| [1, 1, 1],
    )
};

const SPIN_KERNEL: KernelSpec<()> = KernelSpec {
    listed_build_parameters: || vec![()],
    ..KernelSpec::new(
        Source::new("measure/spin", include_str!("../../kernels/measure/spin.cu")),
        "measure_spin",
        1,
        |()| [1, 1, 1],
    )
};

/// An empty kernel, with which the cost of a launch is measured.
pub struct EmptyKernel {
    kernel: LoadedKernelWithLaunch,
}

impl EmptyKernel {
    /// Compiles the kernel.
    pub fn compile_and_load(device: &Device) -> Result<Self, BackendError> {
        Ok(Self { kernel: EMPTY_KERNEL.compile_and_load(device, &())? })
    }

    /// Enqueues the kernel.
    pub fn enqueue_empty_kernel(&self) -> Result<(), BackendError> {
        self.kernel.launch_with(&[])
    }
}

/// A kernel that spins for a given time, and the time that it reports.
pub struct SpinKernel {
    kernel: LoadedKernelWithLaunch,
    spin_time_report: DeviceBuffer,
}

/// Bytes of the report that a spin kernel writes: 8 for nanoseconds by the device-wide timer, and 8
/// for SM cycles.
const SPIN_KERNEL_REPORT_BYTES: usize = 16;

impl SpinKernel {
    /// Compiles the spin kernel and allocates the memory of its report.
    ///
    /// # Errors
    /// Fails if the kernel does not compile or too little device memory is free.
    pub fn compile_and_allocate_report(device: &Device) -> Result<Self, BackendError> {
        Ok(Self {
            kernel: SPIN_KERNEL.compile_and_load(device, &())?,
            spin_time_report: device.upload(&[0; SPIN_KERNEL_REPORT_BYTES])?,
        })
    }

    /// Enqueues the kernel, which spins for `duration_ns` nanoseconds.
    pub fn enqueue_spin(&self, duration_ns: u64) -> Result<(), BackendError> {
        self.kernel.launch_with(&[
            KernelArgument::U64(duration_ns),
            KernelArgument::from(&self.spin_time_report),
        ])
    }

    /// Nanoseconds that the last spin took by the device-wide timer; the spin must have finished.
    pub fn reported_ns_of_last_spin(&self) -> Result<u64, BackendError> {
        let mut words = [0u64; 2];
        self.spin_time_report.download_first_bytes(bytemuck::cast_slice_mut(&mut words))?;
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
        let (empty, spin) = (
            EmptyKernel::compile_and_load(&device).unwrap(),
            SpinKernel::compile_and_allocate_report(&device).unwrap(),
        );
        empty.enqueue_empty_kernel().unwrap();
        spin.enqueue_spin(200_000).unwrap();
        device.synchronize().unwrap();
        let spent = spin.reported_ns_of_last_spin().unwrap();
        assert!(spent >= 200_000, "{spent} ns");
    }
}
