//! A barrier over the GPUs of a set, in the order of their streams.

use std::time::Duration;

use crate::driver::peers::PeerLink;
use crate::{
    BackendError, DeviceBuffer, Devices, KernelArgument, KernelSpec, LoadedKernel, Source,
};

/// Kernels of the barrier; their parameter is the number of GPUs.
pub(super) const BARRIER_KERNELS: &[KernelSpec<usize>] = &[BARRIER_KERNEL_SPEC];

const BARRIER_KERNEL_SPEC: KernelSpec<usize> = KernelSpec {
    variants: || vec![2],
    ..KernelSpec::new(
        Source::new("measure/barrier", include_str!("../../kernels/measure/barrier.cu")),
        "measure_barrier",
        32,
        |_| [1, 1, 1],
    )
};

/// Largest number of GPUs of a set.
pub const MAX_BARRIER_GPUS: usize = 16;
/// How long a GPU waits for another one that never arrives.
const BARRIER_TIMEOUT: Duration = Duration::from_secs(2);

/// The loaded kernel and the buffers of one GPU.
struct BarrierRank {
    kernel: LoadedKernel,
    /// Addresses of the flags of every GPU.
    table: DeviceBuffer,
    /// Flags that every GPU writes and this GPU reads.
    _flags: DeviceBuffer,
}

/// A barrier over the first GPUs of a set.
pub struct MultiGpuBarrier {
    ranks: Vec<BarrierRank>,
    epoch: u32,
}

impl MultiGpuBarrier {
    /// Compiles the barrier kernel and allocates its memory; `None` for one GPU, or if the GPUs
    /// cannot access each other's memory.
    ///
    /// # Errors
    /// Fails if the kernel does not compile, memory is short or there are too many GPUs.
    pub fn new(devices: &Devices) -> Result<Option<Self>, BackendError> {
        match devices.peer_link() {
            None | Some(PeerLink::Host) => return Ok(None),
            Some(PeerLink::Peer | PeerLink::PeerAtomic) => {}
        }
        let count = devices.device_count();
        if count > MAX_BARRIER_GPUS {
            return Err(BackendError::Unsupported(format!(
                "{count} GPUs, at most {MAX_BARRIER_GPUS}"
            )));
        }
        let mut flags = Vec::new();
        devices.for_each_device(|_, device| {
            flags.push(device.upload(&[0; 4 * MAX_BARRIER_GPUS])?);
            Ok(())
        })?;
        let addresses: Vec<u64> = flags.iter().map(DeviceBuffer::address).collect();
        let mut ranks = Vec::new();
        let mut flags = flags.into_iter();
        devices.for_each_device(|_, device| {
            let table = device.upload(bytemuck::cast_slice(&addresses))?;
            let kernel = BARRIER_KERNEL_SPEC.compile_and_load(device, &count)?;
            ranks.extend(flags.next().map(|flags| BarrierRank { kernel, table, _flags: flags }));
            Ok(())
        })?;
        Ok(Some(Self { ranks, epoch: 0 }))
    }

    /// Begins the next barrier, which every GPU then takes part in.
    pub const fn begin_next_barrier(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
    }

    /// Enqueues the part of one GPU of the first `count`, whose context is current.
    pub fn enqueue_barrier_of_gpu(&self, rank: usize, count: usize) -> Result<(), BackendError> {
        let BarrierRank { kernel, table, .. } = &self.ranks[rank];
        let timeout_ns = KernelArgument::U64(BARRIER_TIMEOUT.as_nanos() as u64);
        let [rank, gpus] = [rank, count].map(|number| KernelArgument::U32(number as u32));
        kernel.launch_with(&[table.into(), rank, gpus, KernelArgument::U32(self.epoch), timeout_ns])
    }
}
