//! Kernels that kernelgate enqueues around timed launches: one that blocks the stream, one that
//! reads clocks, and one that flushes L2. This module does not decide the order of these kernels on
//! the stream (the module `measure` does).

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::driver::memory::mailbox::{PinnedHostDeviceMailbox, PinnedWordsFromDevice};
use crate::driver::stream::stream_hold::StreamHold;
use crate::{
    BackendError, Device, DeviceBuffer, KernelArgument, KernelSpec, LoadedKernelWithLaunch, Source,
};

/// The kernels around timed launches; the parameter of their specifications is the number of
/// multiprocessors, which decides the grid of the flush.
pub(super) const KERNELS_AROUND_TIMED_LAUNCHES: &[KernelSpec<usize>] =
    &[STREAM_BLOCKING_KERNEL, CLOCK_PROBE_KERNEL, FLUSH_L2_KERNEL];

const STREAM_BLOCKING_KERNEL: KernelSpec<usize> = KernelSpec {
    listed_build_parameters: || vec![1],
    ..KernelSpec::new(
        Source::new("measure/blocker", include_str!("../../kernels/measure/blocker.cu")),
        StreamBlocker::BLOCKING_KERNEL_SYMBOL,
        1,
        |_| [1, 1, 1],
    )
};

const CLOCK_PROBE_KERNEL: KernelSpec<usize> = KernelSpec {
    listed_build_parameters: || vec![1],
    ..KernelSpec::new(
        Source::new("measure/clock_probe", include_str!("../../kernels/measure/clock_probe.cu")),
        ClockProbeAndL2Flush::CLOCK_PROBE_SYMBOL,
        1,
        |_| [1, 1, 1],
    )
};

const FLUSH_L2_KERNEL: KernelSpec<usize> = KernelSpec {
    listed_build_parameters: || vec![1],
    ..KernelSpec::new(
        Source::new("measure/flush_l2", include_str!("../../kernels/measure/flush_l2.cu")),
        ClockProbeAndL2Flush::FLUSH_L2_SYMBOL,
        512,
        |multiprocessors| [8 * multiprocessors, 1, 1],
    )
};

/// Holds the stream of a GPU by a kernel that spins until the host releases it or its timeout
/// passes.
pub struct StreamBlocker {
    kernel: LoadedKernelWithLaunch,
    mailbox: PinnedHostDeviceMailbox,
    hold_number: u32,
}

/// The clock-probe kernel and the L2-flush kernel of a device, with their memory.
pub struct ClockProbeAndL2Flush {
    clock_probe_kernel: LoadedKernelWithLaunch,
    /// Clock readings in pinned host memory, which the host can read without waiting for later work
    /// on the device.
    clock_readings: PinnedWordsFromDevice,
    l2_flush_kernel: LoadedKernelWithLaunch,
    l2_flush_buffer: DeviceBuffer,
}

/// Number of 64-bit words of a clock reading: timer in nanoseconds, SM cycles, and index of the
/// multiprocessor.
const WORDS_PER_CLOCK_READING: usize = 3;
/// Number of clock probes: two for each of two bursts of launches that can be enqueued at the same
/// time.
const CLOCK_PROBE_COUNT: usize = 4;
/// Value that the blocking kernel writes if the host released it before the timeout.
const OUTCOME_RELEASED_BY_HOST: u32 = 1;

impl StreamBlocker {
    /// Symbol of the kernel that blocks a stream.
    pub const BLOCKING_KERNEL_SYMBOL: &str = "measure_blocker";

    /// Compiles the blocking kernel and allocates the pinned memory through which the host releases
    /// it.
    ///
    /// # Errors
    /// Fails if the kernel does not compile or too little memory is free.
    pub fn compile_and_allocate_mailbox(device: &Device) -> Result<Self, BackendError> {
        let multiprocessors = device.gpu_properties().multiprocessor_count as usize;
        let kernel = STREAM_BLOCKING_KERNEL.compile_and_load(device, &multiprocessors)?;
        Ok(Self { kernel, mailbox: PinnedHostDeviceMailbox::new()?, hold_number: 0 })
    }
}

impl StreamHold for StreamBlocker {
    fn enqueue_hold(&mut self, at_most: Duration) -> Result<(), BackendError> {
        self.hold_number = self.hold_number.wrapping_add(1).max(1);
        self.mailbox.word_written_by_device().store(0, Ordering::Release);
        let (flag, outcome) = self.mailbox.addresses_of_both_words();
        let timeout_ns = KernelArgument::U64(at_most.as_nanos() as u64);
        let arguments = [
            KernelArgument::DeviceAddress(flag),
            KernelArgument::U32(self.hold_number),
            timeout_ns,
            KernelArgument::DeviceAddress(outcome),
        ];
        self.kernel.launch_with(&arguments)
    }

    fn release_stream(&mut self) {
        self.mailbox.word_read_by_device().store(self.hold_number, Ordering::Release);
    }

    fn was_released_in_time(&self) -> bool {
        self.mailbox.word_written_by_device().load(Ordering::Acquire) == OUTCOME_RELEASED_BY_HOST
    }
}

impl ClockProbeAndL2Flush {
    /// Symbol of the kernel that reads the device timer and the SM's cycle counter.
    pub const CLOCK_PROBE_SYMBOL: &str = "measure_clock_probe";
    /// Symbol of the kernel that replaces the contents of the L2 cache.
    pub const FLUSH_L2_SYMBOL: &str = "measure_flush_l2";

    /// Compiles and allocates. A flush reads `flush_bytes` bytes, rounded down to whole packets of
    /// 16 bytes.
    ///
    /// # Errors
    /// Fails if a kernel does not compile or too little memory is free.
    pub fn compile_kernels_and_allocate_memory(
        device: &Device,
        flush_bytes: u64,
    ) -> Result<Self, BackendError> {
        let multiprocessors = device.gpu_properties().multiprocessor_count as usize;
        let instruments = Self {
            clock_probe_kernel: CLOCK_PROBE_KERNEL.compile_and_load(device, &multiprocessors)?,
            clock_readings: PinnedWordsFromDevice::with_zeroed_words(
                CLOCK_PROBE_COUNT * WORDS_PER_CLOCK_READING,
            )?,
            l2_flush_kernel: FLUSH_L2_KERNEL.compile_and_load(device, &multiprocessors)?,
            l2_flush_buffer: device.allocate(flush_bytes as usize & !15)?,
        };
        instruments.l2_flush_buffer.fill_all_bytes(0x5a)?;
        Ok(instruments)
    }

    /// Enqueues a kernel that reads the device timer and the SM's cycle counter into probe `which`
    /// (0 to 3).
    pub fn enqueue_clock_probe(&self, which: usize) -> Result<(), BackendError> {
        let address = self.clock_readings.address_of_word(which * WORDS_PER_CLOCK_READING);
        self.clock_probe_kernel.launch_with(&[KernelArgument::DeviceAddress(address)])
    }

    /// Enqueues a kernel that replaces the contents of the L2 cache.
    pub fn enqueue_l2_flush(&self) -> Result<(), BackendError> {
        let packets = KernelArgument::I64(self.l2_flush_buffer.size_in_bytes() as i64 / 16);
        self.l2_flush_kernel.launch_with(&[KernelArgument::from(&self.l2_flush_buffer), packets])
    }

    /// Average SM clock in MHz between clock probe `first` and the next probe, both of which must
    /// have run. Returns `None` if the two probes ran on different multiprocessors, whose cycle
    /// counts cannot be compared.
    pub fn sm_clock_mhz_between_probes(&self, first: usize) -> Option<f64> {
        let [before, after] =
            [self.words_of_clock_reading(first), self.words_of_clock_reading(first + 1)];
        let (elapsed_ns, cycles) =
            (after[0].saturating_sub(before[0]), after[1].saturating_sub(before[1]));
        (before[2] == after[2] && elapsed_ns > 0).then(|| cycles as f64 / elapsed_ns as f64 * 1e3)
    }

    fn words_of_clock_reading(&self, which: usize) -> [u64; WORDS_PER_CLOCK_READING] {
        std::array::from_fn(|i| {
            self.clock_readings.word_at(which * WORDS_PER_CLOCK_READING + i).load(Ordering::Acquire)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::lock_first_gpu;

    #[test]
    fn a_blocked_stream_continues_after_release_or_timeout() {
        let Some((device, _one_at_a_time)) = lock_first_gpu() else { return };
        // The flushed buffer's size is not a whole number of 16-byte packets.
        let mut blocker = StreamBlocker::compile_and_allocate_mailbox(&device).unwrap();
        let instruments =
            ClockProbeAndL2Flush::compile_kernels_and_allocate_memory(&device, 16 * 1021 + 7)
                .unwrap();
        blocker.enqueue_hold(Duration::from_secs(60)).unwrap();
        instruments.enqueue_clock_probe(0).unwrap();
        instruments.enqueue_l2_flush().unwrap();
        instruments.enqueue_clock_probe(1).unwrap();
        blocker.release_stream();
        device.synchronize().unwrap();
        assert!(blocker.was_released_in_time());
        let mut flushed = vec![0; instruments.l2_flush_buffer.size_in_bytes()];
        instruments.l2_flush_buffer.download_first_bytes(&mut flushed).unwrap();
        assert!(flushed.iter().all(|byte| *byte == 0x5a), "a flush changes nothing");
        if let Some(mhz) = instruments.sm_clock_mhz_between_probes(0) {
            assert!((100.0..10_000.0).contains(&mhz), "{mhz} MHz");
        }
        blocker.enqueue_hold(Duration::from_millis(1)).unwrap();
        device.synchronize().unwrap();
        assert!(!blocker.was_released_in_time());
    }
}
