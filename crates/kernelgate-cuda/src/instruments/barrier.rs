//! A barrier over the GPUs of a set: a kernel on each GPU's stream that waits for the kernels on
//! the other GPUs.

use std::time::Duration;

use crate::driver::peers::PeerLink;
use crate::{
    BackendError, DeviceBuffer, Devices, KernelArgument, KernelSpec, LoadedKernelWithLaunch, Source,
};

/// The barrier kernel; the parameter of its specification is the number of GPUs.
pub(super) const GPU_BARRIER_KERNELS: &[KernelSpec<usize>] = &[GPU_BARRIER_KERNEL];

const GPU_BARRIER_KERNEL: KernelSpec<usize> = KernelSpec {
    listed_build_parameters: || vec![2],
    ..KernelSpec::new(
        Source::new("measure/barrier", include_str!("../../kernels/measure/barrier.cu")),
        "measure_barrier",
        32,
        |_| [1, 1, 1],
    )
};

/// Largest number of GPUs in a barrier.
pub const MAX_GPUS_IN_BARRIER: usize = 16;
/// Time after which a barrier kernel stops waiting for a GPU that never arrives.
const GPU_BARRIER_TIMEOUT: Duration = Duration::from_secs(2);

/// The loaded barrier kernel and the buffers of one GPU.
struct BarrierOfOneGpu {
    kernel: LoadedKernelWithLaunch,
    /// Device addresses of the flag arrays of all GPUs.
    flag_address_table: DeviceBuffer,
    /// Flag array in this GPU's memory, which all GPUs write and this GPU reads.
    _barrier_flags: DeviceBuffer,
}

/// A barrier over the first GPUs of a set, which all continue at about the same time.
pub struct MultiGpuBarrier {
    barriers_of_gpus: Vec<BarrierOfOneGpu>,
    barrier_epoch: u32,
}

impl MultiGpuBarrier {
    /// Compiles the barrier kernel and allocates its flags; `None` for a single GPU, or if the GPUs
    /// cannot access each other's memory.
    ///
    /// # Errors
    /// Fails if the kernel does not compile, too little device memory is free, or the set has too
    /// many GPUs.
    pub fn new_if_peers_accessible(devices: &Devices) -> Result<Option<Self>, BackendError> {
        match devices.weakest_peer_link() {
            None | Some(PeerLink::ThroughHostMemory) => return Ok(None),
            Some(PeerLink::PeerWithoutAtomics | PeerLink::PeerWithAtomics) => {}
        }
        let count = devices.device_count();
        if count > MAX_GPUS_IN_BARRIER {
            return Err(BackendError::Unsupported(format!(
                "{count} GPUs, at most {MAX_GPUS_IN_BARRIER}"
            )));
        }
        let mut flags = Vec::new();
        devices.for_each_with_context_current(|_, device| {
            flags.push(device.upload(&[0; 4 * MAX_GPUS_IN_BARRIER])?);
            Ok(())
        })?;
        let addresses: Vec<u64> = flags.iter().map(DeviceBuffer::device_address).collect();
        let mut ranks = Vec::new();
        let mut flags = flags.into_iter();
        devices.for_each_with_context_current(|_, device| {
            let table = device.upload(bytemuck::cast_slice(&addresses))?;
            let kernel = GPU_BARRIER_KERNEL.compile_and_load(device, &count)?;
            ranks.extend(flags.next().map(|flags| BarrierOfOneGpu {
                kernel,
                flag_address_table: table,
                _barrier_flags: flags,
            }));
            Ok(())
        })?;
        Ok(Some(Self { barriers_of_gpus: ranks, barrier_epoch: 0 }))
    }

    /// Begins the next barrier by advancing its epoch number; afterwards each GPU enqueues its
    /// kernel once.
    pub const fn advance_barrier_epoch(&mut self) {
        self.barrier_epoch = self.barrier_epoch.wrapping_add(1);
    }

    /// Enqueues the barrier kernel of GPU `rank`, for a barrier over the first `count` GPUs; the
    /// GPU's context must be current.
    pub fn enqueue_kernel_of_gpu(&self, rank: usize, count: usize) -> Result<(), BackendError> {
        let BarrierOfOneGpu { kernel, flag_address_table: table, .. } =
            &self.barriers_of_gpus[rank];
        let timeout_ns = KernelArgument::U64(GPU_BARRIER_TIMEOUT.as_nanos() as u64);
        let [rank, gpus] = [rank, count].map(|number| KernelArgument::U32(number as u32));
        kernel.launch_with(&[
            table.into(),
            rank,
            gpus,
            KernelArgument::U32(self.barrier_epoch),
            timeout_ns,
        ])
    }
}
