//! The kernels that measure the read bandwidth and the copy bandwidth of device memory.

use crate::{
    BackendError, Device, DeviceBuffer, KernelArgument, KernelSpec, LoadedKernelWithLaunch, Source,
};

/// The read kernel and the copy kernel; the parameter of their specification is the number of
/// 16-byte packets.
pub(super) const READ_AND_COPY_KERNELS: &[KernelSpec<usize>] =
    &[READ_BANDWIDTH_KERNEL, COPY_BANDWIDTH_KERNEL];

const READ_KERNEL_THREADS_PER_BLOCK: usize = 1024;
const READ_KERNEL_PACKETS_PER_THREAD: usize = 8;
const READ_BANDWIDTH_KERNEL: KernelSpec<usize> = KernelSpec {
    constant_macros: |_| vec![("PACKETS", READ_KERNEL_PACKETS_PER_THREAD)],
    listed_build_parameters: || vec![1],
    ..KernelSpec::new(
        Source::new(
            "measure/read_bandwidth",
            include_str!("../../kernels/measure/read_bandwidth.cu"),
        ),
        "measure_read_bandwidth",
        READ_KERNEL_THREADS_PER_BLOCK,
        |packets| {
            [packets.div_ceil(READ_KERNEL_THREADS_PER_BLOCK * READ_KERNEL_PACKETS_PER_THREAD), 1, 1]
        },
    )
};

const COPY_KERNEL_THREADS_PER_BLOCK: usize = 128;
const COPY_KERNEL_PACKETS_PER_THREAD: usize = 1;
const COPY_BANDWIDTH_KERNEL: KernelSpec<usize> = KernelSpec {
    constant_macros: |_| vec![("PACKETS", COPY_KERNEL_PACKETS_PER_THREAD)],
    listed_build_parameters: || vec![1],
    ..KernelSpec::new(
        Source::new(
            "measure/copy_bandwidth",
            include_str!("../../kernels/measure/copy_bandwidth.cu"),
        ),
        "measure_copy_bandwidth",
        COPY_KERNEL_THREADS_PER_BLOCK,
        |packets| {
            [packets.div_ceil(COPY_KERNEL_THREADS_PER_BLOCK * COPY_KERNEL_PACKETS_PER_THREAD), 1, 1]
        },
    )
};

/// A buffer in device memory, with the kernels that read or copy its first bytes to measure the
/// bandwidth.
pub struct BandwidthKernelsAndBuffer {
    read_kernel: LoadedKernelWithLaunch,
    copy_kernel: LoadedKernelWithLaunch,
    buffer: DeviceBuffer,
    never_written_output: DeviceBuffer,
}

/// Bytes that one load or store instruction of a thread moves.
const BYTES_PER_PACKET: u64 = 16;

impl BandwidthKernelsAndBuffer {
    /// Compiles the two kernels and fills a buffer of this size with repetitions of `pattern`;
    /// random numbers are needed, because zeros are copied faster.
    ///
    /// # Errors
    /// Fails if a kernel does not compile or too little device memory is free.
    pub fn bandwidth_kernels_with_filled_buffer(
        device: &Device,
        bytes: usize,
        pattern: &[u8],
    ) -> Result<Self, BackendError> {
        Ok(Self {
            read_kernel: READ_BANDWIDTH_KERNEL.compile_and_load(device, &1)?,
            copy_kernel: COPY_BANDWIDTH_KERNEL.compile_and_load(device, &1)?,
            buffer: device.allocate_with_repeated_pattern(pattern, bytes)?,
            never_written_output: device.upload(&[0; 4])?,
        })
    }

    /// Enqueues a kernel that reads the first `bytes` bytes of the buffer.
    ///
    /// # Errors
    /// Fails if the driver refuses the launch, or the buffer has fewer than `bytes` bytes.
    pub fn enqueue_read_kernel(&self, bytes: u64) -> Result<(), BackendError> {
        let packets = self.packets_in_buffer_prefix(bytes)?;
        let arguments = [
            KernelArgument::from(&self.buffer),
            KernelArgument::I64(packets as i64),
            // The read kernel writes the xor of what it read only if it equals this number, so that
            // the compiler keeps the loads.
            KernelArgument::U32(0xdead_beef),
            KernelArgument::from(&self.never_written_output),
        ];
        self.read_kernel
            .loaded_kernel()
            .launch(READ_BANDWIDTH_KERNEL.launch_shape_for(&packets)?, &arguments)
    }

    /// Enqueues a kernel that copies the first half of the first `bytes` bytes to the second half.
    pub fn enqueue_copy_kernel(&self, bytes: u64) -> Result<(), BackendError> {
        let packets = self.packets_in_buffer_prefix(bytes)? / 2;
        let target = KernelArgument::DeviceAddress(
            self.buffer.device_address() + packets as u64 * BYTES_PER_PACKET,
        );
        let arguments =
            [target, KernelArgument::from(&self.buffer), KernelArgument::I64(packets as i64)];
        self.copy_kernel
            .loaded_kernel()
            .launch(COPY_BANDWIDTH_KERNEL.launch_shape_for(&packets)?, &arguments)
    }

    fn packets_in_buffer_prefix(&self, bytes: u64) -> Result<usize, BackendError> {
        if bytes > self.buffer.size_in_bytes() as u64 {
            return Err(BackendError::ComputationFailed(format!(
                "a pass over {bytes} bytes of a buffer of {}",
                self.buffer.size_in_bytes()
            )));
        }
        Ok((bytes / BYTES_PER_PACKET) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::lock_first_gpu;

    /// A number of packets that does not fill whole thread blocks.
    const TEST_PACKETS: usize = 2 * 1021;

    #[test]
    fn bandwidth_kernels_move_exactly_the_declared_bytes() {
        let Some((device, _one_at_a_time)) = lock_first_gpu() else { return };
        let bytes = (TEST_PACKETS + 1) * BYTES_PER_PACKET as usize;
        let pattern: Vec<u8> = (0..bytes).map(|i| (i ^ (i >> 8)) as u8).collect();
        let passes = BandwidthKernelsAndBuffer::bandwidth_kernels_with_filled_buffer(
            &device, bytes, &pattern,
        )
        .unwrap();
        let moved = TEST_PACKETS as u64 * BYTES_PER_PACKET;
        let after = |pass: &dyn Fn()| {
            pass();
            device.synchronize().unwrap();
            let mut now = vec![0; bytes];
            passes.buffer.download_first_bytes(&mut now).unwrap();
            now
        };
        assert!(after(&|| passes.enqueue_read_kernel(moved).unwrap()) == pattern);
        let half = moved as usize / 2;
        let copied = after(&|| passes.enqueue_copy_kernel(moved).unwrap());
        assert!(copied[..half] == pattern[..half] && copied[half..2 * half] == pattern[..half]);
        assert!(copied[2 * half..] == pattern[2 * half..]);
        assert!(passes.enqueue_read_kernel(bytes as u64 + BYTES_PER_PACKET).is_err());
    }
}
