//! The kernels whose speed is the memory's: read and copy a buffer.

use crate::{BackendError, Device, DeviceBuffer, KernelArgument, KernelSpec, LoadedKernel, Source};

/// The bandwidth kernels; their parameter is the number of packets.
pub(super) const BANDWIDTH_KERNELS: &[KernelSpec<usize>] = &[READ_KERNEL, COPY_BANDWIDTH_KERNEL];

const READ_KERNEL_THREADS: usize = 1024;
const READ_KERNEL_PACKETS: usize = 8;
const READ_KERNEL: KernelSpec<usize> = KernelSpec {
    constants: |_| vec![("PACKETS", READ_KERNEL_PACKETS)],
    variants: || vec![1],
    ..KernelSpec::new(
        Source::new(
            "measure/read_bandwidth",
            include_str!("../../kernels/measure/read_bandwidth.cu"),
        ),
        "measure_read_bandwidth",
        READ_KERNEL_THREADS,
        |packets| [packets.div_ceil(READ_KERNEL_THREADS * READ_KERNEL_PACKETS), 1, 1],
    )
};

const COPY_KERNEL_THREADS: usize = 128;
const COPY_KERNEL_PACKETS: usize = 1;
const COPY_BANDWIDTH_KERNEL: KernelSpec<usize> = KernelSpec {
    constants: |_| vec![("PACKETS", COPY_KERNEL_PACKETS)],
    variants: || vec![1],
    ..KernelSpec::new(
        Source::new(
            "measure/copy_bandwidth",
            include_str!("../../kernels/measure/copy_bandwidth.cu"),
        ),
        "measure_copy_bandwidth",
        COPY_KERNEL_THREADS,
        |packets| [packets.div_ceil(COPY_KERNEL_THREADS * COPY_KERNEL_PACKETS), 1, 1],
    )
};

/// A buffer and the kernels that pass over its first bytes.
pub struct BandwidthPasses {
    read: LoadedKernel,
    copy: LoadedKernel,
    buffer: DeviceBuffer,
    guard: DeviceBuffer,
}

/// Bytes that a thread moves at once.
const BANDWIDTH_PACKET_BYTES: u64 = 16;

impl BandwidthPasses {
    /// Compiles the bandwidth kernels and fills a buffer of the given size with repetitions of
    /// `pattern` (random numbers, because zeros are copied faster).
    ///
    /// # Errors
    /// Fails if a kernel does not compile or memory is short.
    pub fn new(device: &Device, bytes: usize, pattern: &[u8]) -> Result<Self, BackendError> {
        Ok(Self {
            read: READ_KERNEL.compile_and_load(device, &1)?,
            copy: COPY_BANDWIDTH_KERNEL.compile_and_load(device, &1)?,
            buffer: device.allocate_repeated(pattern, bytes)?,
            guard: device.upload(&[0; 4])?,
        })
    }

    /// Enqueues a pass that reads `bytes` bytes.
    ///
    /// # Errors
    /// Fails if the launch is refused, or the buffer is smaller.
    pub fn enqueue_read(&self, bytes: u64) -> Result<(), BackendError> {
        let packets = self.packets_of_pass(bytes)?;
        let arguments = [
            KernelArgument::from(&self.buffer),
            KernelArgument::I64(packets as i64),
            // The kernel writes its sum only if it equals this number, so that the compiler keeps
            // the loads.
            KernelArgument::U32(0xdead_beef),
            KernelArgument::from(&self.guard),
        ];
        self.read.loaded_kernel().launch(READ_KERNEL.launch_for(&packets)?, &arguments)
    }

    /// Enqueues a copy of the first half of `bytes` bytes to the second half.
    pub fn enqueue_copy(&self, bytes: u64) -> Result<(), BackendError> {
        let packets = self.packets_of_pass(bytes)? / 2;
        let target = KernelArgument::Address(
            self.buffer.address() + packets as u64 * BANDWIDTH_PACKET_BYTES,
        );
        let arguments =
            [target, KernelArgument::from(&self.buffer), KernelArgument::I64(packets as i64)];
        self.copy.loaded_kernel().launch(COPY_BANDWIDTH_KERNEL.launch_for(&packets)?, &arguments)
    }

    fn packets_of_pass(&self, bytes: u64) -> Result<usize, BackendError> {
        if bytes > self.buffer.bytes() as u64 {
            return Err(BackendError::Launch(format!(
                "a pass over {bytes} bytes of a buffer of {}",
                self.buffer.bytes()
            )));
        }
        Ok((bytes / BANDWIDTH_PACKET_BYTES) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::lock_first_gpu;

    /// Number of packets that does not fill whole blocks.
    const PASS_TEST_PACKETS: usize = 2 * 1021;

    #[test]
    fn bandwidth_passes_move_exactly_the_declared_bytes() {
        let Some((device, _one_at_a_time)) = lock_first_gpu() else { return };
        let bytes = (PASS_TEST_PACKETS + 1) * BANDWIDTH_PACKET_BYTES as usize;
        let pattern: Vec<u8> = (0..bytes).map(|i| (i ^ (i >> 8)) as u8).collect();
        let passes = BandwidthPasses::new(&device, bytes, &pattern).unwrap();
        let moved = PASS_TEST_PACKETS as u64 * BANDWIDTH_PACKET_BYTES;
        let after = |pass: &dyn Fn()| {
            pass();
            device.synchronize().unwrap();
            let mut now = vec![0; bytes];
            passes.buffer.download(&mut now).unwrap();
            now
        };
        assert!(after(&|| passes.enqueue_read(moved).unwrap()) == pattern);
        let half = moved as usize / 2;
        let copied = after(&|| passes.enqueue_copy(moved).unwrap());
        assert!(copied[..half] == pattern[..half] && copied[half..2 * half] == pattern[..half]);
        assert!(copied[2 * half..] == pattern[2 * half..]);
        assert!(passes.enqueue_read(bytes as u64 + BANDWIDTH_PACKET_BYTES).is_err());
    }
}
