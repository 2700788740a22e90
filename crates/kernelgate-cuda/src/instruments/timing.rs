//! The kernels that timing needs on the stream: a blocker, clock probes, an L2 flush. This module
//! does not decide the order of timing commands (`measure` does).

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::driver::memory::mailbox::{HostDeviceMailbox, PinnedWords};
use crate::driver::stream::stream_hold::StreamHold;
use crate::{BackendError, Device, DeviceBuffer, KernelArgument, KernelSpec, LoadedKernel, Source};

/// Kernels of the timing; their parameter is the number of multiprocessors, which sizes the flush's
/// grid.
pub(super) const TIMING_KERNELS: &[KernelSpec<usize>] =
    &[BLOCKING_KERNEL, CLOCK_PROBE_SYMBOL, FLUSH_KERNEL];

const BLOCKING_KERNEL: KernelSpec<usize> = KernelSpec {
    variants: || vec![1],
    ..KernelSpec::new(
        Source::new("measure/blocker", include_str!("../../kernels/measure/blocker.cu")),
        StreamBlocker::BLOCKING_KERNEL_SYMBOL,
        1,
        |_| [1, 1, 1],
    )
};

const CLOCK_PROBE_SYMBOL: KernelSpec<usize> = KernelSpec {
    variants: || vec![1],
    ..KernelSpec::new(
        Source::new("measure/clock_probe", include_str!("../../kernels/measure/clock_probe.cu")),
        TimingInstruments::CLOCK_PROBE_SYMBOL,
        1,
        |_| [1, 1, 1],
    )
};

const FLUSH_KERNEL: KernelSpec<usize> = KernelSpec {
    variants: || vec![1],
    ..KernelSpec::new(
        Source::new("measure/flush_l2", include_str!("../../kernels/measure/flush_l2.cu")),
        TimingInstruments::FLUSH_L2_SYMBOL,
        512,
        |multiprocessors| [8 * multiprocessors, 1, 1],
    )
};

/// Holds the stream of a GPU by a kernel that spins until the host releases it.
pub struct StreamBlocker {
    kernel: LoadedKernel,
    mailbox: HostDeviceMailbox,
    ticket: u32,
}

/// The kernels that timing launches, and their memory, made once for a device.
pub struct TimingInstruments {
    probe: LoadedKernel,
    /// Readings of the clock probes in pinned host memory: reading them does not wait for later
    /// work.
    readings: PinnedWords,
    flush: LoadedKernel,
    flushed: DeviceBuffer,
}

/// 64-bit words of a clock reading: nanoseconds, cycles and multiprocessor.
const CLOCK_READING_WORDS: usize = 3;
/// Clock probes: two for each of two bursts that are in the queue together.
const CLOCK_PROBES: usize = 4;
/// Value that the blocking kernel writes after the host released it.
const RELEASED_WORD: u32 = 1;

impl StreamBlocker {
    /// Symbol of the kernel that blocks a stream.
    pub const BLOCKING_KERNEL_SYMBOL: &str = "measure_blocker";

    /// Compiles the blocking kernel and allocates the memory through which the host releases it.
    ///
    /// # Errors
    /// Fails if the kernel does not compile or memory is short.
    pub fn new(device: &Device) -> Result<Self, BackendError> {
        let multiprocessors = device.facts().multiprocessors as usize;
        let kernel = BLOCKING_KERNEL.compile_and_load(device, &multiprocessors)?;
        Ok(Self { kernel, mailbox: HostDeviceMailbox::new()?, ticket: 0 })
    }
}

impl StreamHold for StreamBlocker {
    fn hold(&mut self, at_most: Duration) -> Result<(), BackendError> {
        self.ticket = self.ticket.wrapping_add(1).max(1);
        self.mailbox.word_from_device().store(0, Ordering::Release);
        let (flag, outcome) = self.mailbox.word_addresses();
        let timeout_ns = KernelArgument::U64(at_most.as_nanos() as u64);
        let arguments = [
            KernelArgument::Address(flag),
            KernelArgument::U32(self.ticket),
            timeout_ns,
            KernelArgument::Address(outcome),
        ];
        self.kernel.launch_with(&arguments)
    }

    fn release(&mut self) {
        self.mailbox.word_to_device().store(self.ticket, Ordering::Release);
    }

    fn was_released(&self) -> bool {
        self.mailbox.word_from_device().load(Ordering::Acquire) == RELEASED_WORD
    }
}

impl TimingInstruments {
    /// The symbol of the kernel that reads the clocks.
    pub const CLOCK_PROBE_SYMBOL: &str = "measure_clock_probe";
    /// The symbol of the kernel that replaces the contents of L2.
    pub const FLUSH_L2_SYMBOL: &str = "measure_flush_l2";

    /// Compiles and allocates. A flush reads `flush_bytes`, rounded down to whole packets of 16.
    ///
    /// # Errors
    /// Fails if a kernel does not compile or memory is short.
    pub fn new(device: &Device, flush_bytes: u64) -> Result<Self, BackendError> {
        let multiprocessors = device.facts().multiprocessors as usize;
        let instruments = Self {
            probe: CLOCK_PROBE_SYMBOL.compile_and_load(device, &multiprocessors)?,
            readings: PinnedWords::new(CLOCK_PROBES * CLOCK_READING_WORDS)?,
            flush: FLUSH_KERNEL.compile_and_load(device, &multiprocessors)?,
            flushed: device.allocate(flush_bytes as usize & !15)?,
        };
        instruments.flushed.fill(0x5a)?;
        Ok(instruments)
    }

    /// Enqueues reading of both clocks into one of four probes.
    pub fn enqueue_clock_probe(&self, which: usize) -> Result<(), BackendError> {
        let address = self.readings.address(which * CLOCK_READING_WORDS);
        self.probe.launch_with(&[KernelArgument::Address(address)])
    }

    /// Enqueues a kernel that replaces the contents of L2.
    pub fn flush_l2(&self) -> Result<(), BackendError> {
        let packets = KernelArgument::I64(self.flushed.bytes() as i64 / 16);
        self.flush.launch_with(&[KernelArgument::from(&self.flushed), packets])
    }

    /// SM clock between probe `first` and the next one, both of which have run, MHz. Returns the SM
    /// clock between two probes, MHz; `None` if they ran on different multiprocessors, whose cycles
    /// do not compare.
    pub fn clock_mhz(&self, first: usize) -> Option<f64> {
        let [before, after] = [self.reading(first), self.reading(first + 1)];
        let (elapsed_ns, cycles) =
            (after[0].saturating_sub(before[0]), after[1].saturating_sub(before[1]));
        (before[2] == after[2] && elapsed_ns > 0).then(|| cycles as f64 / elapsed_ns as f64 * 1e3)
    }

    fn reading(&self, which: usize) -> [u64; CLOCK_READING_WORDS] {
        std::array::from_fn(|i| {
            self.readings.word(which * CLOCK_READING_WORDS + i).load(Ordering::Acquire)
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
        // A buffer whose size is not a whole number of packets.
        let mut blocker = StreamBlocker::new(&device).unwrap();
        let instruments = TimingInstruments::new(&device, 16 * 1021 + 7).unwrap();
        blocker.hold(Duration::from_secs(60)).unwrap();
        instruments.enqueue_clock_probe(0).unwrap();
        instruments.flush_l2().unwrap();
        instruments.enqueue_clock_probe(1).unwrap();
        blocker.release();
        device.synchronize().unwrap();
        assert!(blocker.was_released());
        let mut flushed = vec![0; instruments.flushed.bytes()];
        instruments.flushed.download(&mut flushed).unwrap();
        assert!(flushed.iter().all(|byte| *byte == 0x5a), "a flush changes nothing");
        if let Some(mhz) = instruments.clock_mhz(0) {
            assert!((100.0..10_000.0).contains(&mhz), "{mhz} MHz");
        }
        blocker.hold(Duration::from_millis(1)).unwrap();
        device.synchronize().unwrap();
        assert!(!blocker.was_released());
    }
}
