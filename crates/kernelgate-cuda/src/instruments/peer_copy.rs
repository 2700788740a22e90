//! Copies from GPU to GPU, all at once: the ceiling of their links.

use crate::driver::peers::PeerLink;
use crate::{
    BackendError, DeviceBuffer, Devices, KernelArgument, KernelSpec, LoadedKernel, Source,
};

/// Kernels of the peer copies; their parameter is the number of blocks.
pub(super) const PEER_COPY_KERNELS: &[KernelSpec<usize>] = &[PEER_COPY_KERNEL];

/// Threads of a block, as in the source.
const PEER_COPY_THREADS: usize = 512;
const PEER_PACKET_BYTES: usize = 16;
/// Packets that a thread copies at a time.
const PACKETS_PER_COPY: usize = 4;

const PEER_COPY_KERNEL: KernelSpec<usize> = KernelSpec {
    variants: || vec![1],
    ..KernelSpec::new(
        Source::new("measure/peer_copy", include_str!("../../kernels/measure/peer_copy.cu")),
        "measure_peer_copy",
        PEER_COPY_THREADS,
        |blocks| [*blocks, 1, 1],
    )
};

/// How bytes are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerCopyKind {
    /// A copy engine of the GPU copies the data.
    Engine,
    /// A kernel on the multiprocessors of one GPU copies the data.
    Kernel,
}

/// A GPU that copies data to another GPU.
struct GpuPairCopy {
    from: DeviceBuffer,
    to: DeviceBuffer,
    kernel: Option<LoadedKernel>,
}

/// Copies between the GPUs of a set.
pub struct PeerCopies {
    devices: Devices,
    copies: Vec<GpuPairCopy>,
    bytes: usize,
    kinds: Vec<PeerCopyKind>,
}

impl PeerCopies {
    /// Allocates memory and compiles kernels for copies of `bytes` bytes, at least one: from every
    /// GPU to the next in a circle, or only from the first GPU to the second.
    ///
    /// # Errors
    /// Fails if memory is short or a kernel does not compile.
    pub fn new(devices: &Devices, bytes: usize, both_ways: bool) -> Result<Self, BackendError> {
        let accessible = devices.peer_link().is_some_and(|link| link != PeerLink::Host);
        let by_kernel = accessible && bytes.is_multiple_of(PEER_PACKET_BYTES);
        let mut buffers = Vec::new();
        devices.for_each_device(|_, device| {
            buffers.push((device.allocate(bytes)?, device.allocate(bytes)?));
            Ok(())
        })?;
        let count = devices.device_count();
        let senders = if both_ways { count } else { 1 };
        let mut copies = Vec::new();
        devices.for_each_device(|rank, device| {
            if rank < senders {
                let blocks =
                    bytes.div_ceil(PEER_PACKET_BYTES * PACKETS_PER_COPY * PEER_COPY_THREADS);
                let blocks = blocks.clamp(1, 2 * device.facts().multiprocessors as usize);
                let kernel = by_kernel
                    .then(|| PEER_COPY_KERNEL.compile_and_load(device, &blocks))
                    .transpose()?;
                let (from, to) = (buffers[rank].0.clone(), buffers[(rank + 1) % count].1.clone());
                copies.push(GpuPairCopy { from, to, kernel });
            }
            Ok(())
        })?;
        let kinds = match by_kernel {
            true => vec![PeerCopyKind::Engine, PeerCopyKind::Kernel],
            false => vec![PeerCopyKind::Engine],
        };
        Ok(Self { devices: devices.clone(), copies, bytes, kinds })
    }

    /// The kinds of peer copies that these GPUs can do.
    pub fn possible_kinds(&self) -> Vec<PeerCopyKind> {
        self.kinds.clone()
    }

    /// Enqueues all copies of the kind, each on the stream of the GPU that has the bytes.
    pub fn enqueue_copies(&self, kind: PeerCopyKind) -> Result<(), BackendError> {
        self.devices.for_each_device(|rank, device| {
            let Some(copy) = self.copies.get(rank) else { return Ok(()) };
            match (&copy.kernel, kind) {
                (Some(kernel), PeerCopyKind::Kernel) => {
                    let packets = KernelArgument::I64((self.bytes / PEER_PACKET_BYTES) as i64);
                    kernel.launch_with(&[(&copy.from).into(), (&copy.to).into(), packets])
                }
                _ => copy.to.copy_from(device.stream(), &copy.from, self.bytes),
            }
        })
    }
}
