//! Copies between the GPUs of a set, all at the same time, to measure the highest bandwidth of
//! their links.

use crate::driver::peers::PeerLink;
use crate::{
    BackendError, DeviceBuffer, Devices, KernelArgument, KernelSpec, LoadedKernelWithLaunch, Source,
};

/// The peer-copy kernel; the parameter of its specification is the number of thread blocks.
pub(super) const PEER_COPY_KERNELS: &[KernelSpec<usize>] = &[PEER_COPY_KERNEL];

/// Threads per block, which must equal kThreads in the kernel's source.
const PEER_COPY_THREADS_PER_BLOCK: usize = 512;
const PEER_COPY_PACKET_BYTES: usize = 16;
/// Packets that a thread copies per loop iteration, which must equal kPacketsAtOnce in the kernel's
/// source.
const PEER_COPY_PACKETS_PER_ITERATION: usize = 4;

const PEER_COPY_KERNEL: KernelSpec<usize> = KernelSpec {
    listed_build_parameters: || vec![1],
    ..KernelSpec::new(
        Source::new("measure/peer_copy", include_str!("../../kernels/measure/peer_copy.cu")),
        "measure_peer_copy",
        PEER_COPY_THREADS_PER_BLOCK,
        |blocks| [*blocks, 1, 1],
    )
};

/// How bytes are copied from one GPU to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerCopyKind {
    /// A copy engine (DMA) of the GPU copies the data.
    CopyEngine,
    /// A kernel on the multiprocessors of the sending GPU copies the data.
    CopyKernel,
}

/// One GPU's buffer, the buffer of the receiving GPU, and the loaded copy kernel.
struct CopyBetweenTwoGpus {
    source_buffer: DeviceBuffer,
    destination_buffer: DeviceBuffer,
    copy_kernel: Option<LoadedKernelWithLaunch>,
}

/// Copies between the GPUs of a set that run at the same time.
pub struct PeerCopiesOfGpuSet {
    devices: Devices,
    copies: Vec<CopyBetweenTwoGpus>,
    bytes_per_copy: usize,
    kinds: Vec<PeerCopyKind>,
}

impl PeerCopiesOfGpuSet {
    /// Allocates buffers and compiles kernels for copies of `bytes` bytes: from every GPU to the
    /// next one in a circle, or only from the first to the second.
    ///
    /// # Errors
    /// Fails if too little device memory is free or a kernel does not compile.
    pub fn allocate_buffers_and_compile_copies(
        devices: &Devices,
        bytes: usize,
        both_ways: bool,
    ) -> Result<Self, BackendError> {
        let accessible =
            devices.weakest_peer_link().is_some_and(|link| link != PeerLink::ThroughHostMemory);
        let by_kernel = accessible && bytes.is_multiple_of(PEER_COPY_PACKET_BYTES);
        let mut buffers = Vec::new();
        devices.for_each_with_context_current(|_, device| {
            buffers.push((device.allocate(bytes)?, device.allocate(bytes)?));
            Ok(())
        })?;
        let count = devices.device_count();
        let senders = if both_ways { count } else { 1 };
        let mut copies = Vec::new();
        devices.for_each_with_context_current(|rank, device| {
            if rank < senders {
                let blocks = bytes.div_ceil(
                    PEER_COPY_PACKET_BYTES
                        * PEER_COPY_PACKETS_PER_ITERATION
                        * PEER_COPY_THREADS_PER_BLOCK,
                );
                let blocks =
                    blocks.clamp(1, 2 * device.gpu_properties().multiprocessor_count as usize);
                let kernel = by_kernel
                    .then(|| PEER_COPY_KERNEL.compile_and_load(device, &blocks))
                    .transpose()?;
                let (from, to) = (buffers[rank].0.clone(), buffers[(rank + 1) % count].1.clone());
                copies.push(CopyBetweenTwoGpus {
                    source_buffer: from,
                    destination_buffer: to,
                    copy_kernel: kernel,
                });
            }
            Ok(())
        })?;
        let kinds = match by_kernel {
            true => vec![PeerCopyKind::CopyEngine, PeerCopyKind::CopyKernel],
            false => vec![PeerCopyKind::CopyEngine],
        };
        Ok(Self { devices: devices.clone(), copies, bytes_per_copy: bytes, kinds })
    }

    /// The kinds of peer copies that these GPUs support: by copy engine, and by kernel if they can
    /// access each other's memory.
    pub fn supported_kinds(&self) -> Vec<PeerCopyKind> {
        self.kinds.clone()
    }

    /// Enqueues all copies by copy engine or by kernel, each on the stream of the sending GPU.
    pub fn enqueue_all_copies(&self, kind: PeerCopyKind) -> Result<(), BackendError> {
        self.devices.for_each_with_context_current(|rank, device| {
            let Some(copy) = self.copies.get(rank) else { return Ok(()) };
            match (&copy.copy_kernel, kind) {
                (Some(kernel), PeerCopyKind::CopyKernel) => {
                    let packets =
                        KernelArgument::I64((self.bytes_per_copy / PEER_COPY_PACKET_BYTES) as i64);
                    kernel.launch_with(&[
                        (&copy.source_buffer).into(),
                        (&copy.destination_buffer).into(),
                        packets,
                    ])
                }
                _ => copy.destination_buffer.copy_first_bytes_from(
                    device.stream(),
                    &copy.source_buffer,
                    self.bytes_per_copy,
                ),
            }
        })
    }
}
