//! Instruments for timing on each GPU: a stream with events, a kernel that blocks the stream, clock
//! probes, and a kernel that flushes the L2 cache.
//!
//! Each GPU has two sets of events, blocking kernel and clock probes, because two bursts can be
//! enqueued at the same time. Work on a single GPU uses only the instruments of the first GPU.
//! Before the first event of multi-GPU work, a barrier kernel makes all GPUs start at about the
//! same time. This module reads the times between events, but does not judge them.

use std::time::Duration;

use crate::backend::BackendError;
use crate::measure::CacheState;
use crate::measure::audit::cupti::HoldWithEndMark;
use crate::measure::launch_queue::MAX_LAUNCHES_BEHIND_BLOCKER;
use kernelgate_cuda::driver::stream::stream_hold::StreamHold;
use kernelgate_cuda::driver::stream::stream_timer::StreamTimer;
use kernelgate_cuda::instruments::barrier::MultiGpuBarrier;
use kernelgate_cuda::instruments::timing::{ClockProbeAndL2Flush, StreamBlocker};
use kernelgate_cuda::{Device, Devices};

/// Bytes that the flush kernel reads to make the L2 cache cold, as a multiple of the size of L2.
const L2_FLUSH_SIZE_MULTIPLE: u64 = 2;

/// Number of bursts of launches that can be enqueued on the GPU at the same time.
pub const MAX_ENQUEUED_BURSTS: usize = 2;

struct TimingInstrumentsOfGpu {
    /// Events and blocking kernel on the GPU's stream, one set for each burst that can be enqueued.
    streams: [StreamTimer<StreamBlocker>; MAX_ENQUEUED_BURSTS],
    instruments: ClockProbeAndL2Flush,
}

impl TimingInstrumentsOfGpu {
    fn create_for_gpu(device: &Device) -> Result<Self, BackendError> {
        let timer = || {
            let blocker = StreamBlocker::compile_and_allocate_mailbox(device)?;
            StreamTimer::timer_for_device_stream(device, 2 * MAX_LAUNCHES_BEHIND_BLOCKER, blocker)
        };
        Ok(Self {
            streams: [timer()?, timer()?],
            instruments: ClockProbeAndL2Flush::compile_kernels_and_allocate_memory(
                device,
                L2_FLUSH_SIZE_MULTIPLE * device.gpu_properties().l2_cache_bytes,
            )?,
        })
    }
}

/// The timing instruments of all GPUs of a timer, of which a case uses the first ones.
pub struct TimingInstrumentsOfGpus {
    instruments_of_gpus: Vec<TimingInstrumentsOfGpu>,
    /// Number of GPUs that the present case uses.
    gpus_in_use: usize,
    /// Index of the set of events, blocking kernel and probes that the present burst uses, 0 or 1.
    current_burst_slot: usize,
    /// Barrier kernel across GPUs; `None` for one GPU, and if the GPUs cannot access each other's
    /// memory.
    barrier: Option<MultiGpuBarrier>,
}

impl TimingInstrumentsOfGpus {
    /// Compiles kernels and allocates memory on every GPU; afterwards only the first GPU is in use.
    ///
    /// # Errors
    /// Fails if a GPU fails or memory is short.
    pub fn new(devices: &Devices) -> Result<Self, BackendError> {
        let mut all = Vec::new();
        devices.for_each_with_context_current(|_, device| {
            all.push(TimingInstrumentsOfGpu::create_for_gpu(device)?);
            Ok(())
        })?;
        Ok(Self {
            instruments_of_gpus: all,
            gpus_in_use: 1,
            current_burst_slot: 0,
            barrier: MultiGpuBarrier::new_if_peers_accessible(devices)?,
        })
    }

    /// Restricts timing to the first `count` GPUs until the next call.
    pub fn use_first_gpus(&mut self, count: usize) {
        self.gpus_in_use = count.clamp(1, self.instruments_of_gpus.len());
    }

    /// Returns the number of GPUs on which launches are timed at present.
    pub const fn number_of_gpus_in_use(&self) -> usize {
        self.gpus_in_use
    }

    /// Selects which of the two sets of events, blocking kernel and clock probes the next calls
    /// use.
    pub const fn use_burst_slot(&mut self, slot: usize) {
        self.current_burst_slot = slot;
    }

    /// Calls `each` for the instruments of each GPU in use, while the CUDA context of this GPU is
    /// current.
    fn for_each_gpu_in_use(
        &mut self,
        mut each: impl FnMut(usize, &mut TimingInstrumentsOfGpu) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        if self.instruments_of_gpus.len() == 1 {
            return each(0, &mut self.instruments_of_gpus[0]);
        }
        let done = self.instruments_of_gpus[..self.gpus_in_use]
            .iter_mut()
            .enumerate()
            .try_for_each(|(rank, lane)| {
                lane.streams[0].make_context_of_stream_current()?;
                each(rank, lane)
            });
        self.instruments_of_gpus[0].streams[0].make_context_of_stream_current()?;
        done
    }

    /// Begins a timed interval on the stream of each GPU in use, as
    /// [`StreamTimer::hold_stream_and_begin_interval`].
    pub fn begin_interval_on_each_gpu(
        &mut self,
        at_most: Option<Duration>,
    ) -> Result<(), BackendError> {
        let slot = self.current_burst_slot;
        self.for_each_gpu_in_use(|_, lane| {
            lane.streams[slot].hold_stream_and_begin_interval(at_most)
        })
    }

    /// Releases the blocked streams of all GPUs in use, one host store after the other.
    pub fn release_stream_of_each_gpu(&mut self) {
        let slot = self.current_burst_slot;
        self.instruments_of_gpus[..self.gpus_in_use]
            .iter_mut()
            .for_each(|lane| lane.streams[slot].release_held_stream());
    }

    /// Marks the end of the timed interval on each GPU in use, as
    /// [`StreamTimer::enqueue_end_event`].
    pub fn mark_interval_end_on_each_gpu(&mut self) -> Result<(), BackendError> {
        let slot = self.current_burst_slot;
        self.for_each_gpu_in_use(|_, lane| lane.streams[slot].enqueue_end_event())
    }

    /// Waits for the marked end of the interval on each GPU in use; returns false if a blocking
    /// kernel timed out.
    ///
    /// # Errors
    /// Fails if an operation on a GPU failed; with [`BackendError::DeviceLost`] and the GPU if the
    /// interval does not end in time.
    pub fn wait_for_interval_end_on_each_gpu(&mut self) -> Result<Option<bool>, BackendError> {
        let (mut all, several, slot) =
            (None::<bool>, self.gpus_in_use > 1, self.current_burst_slot);
        self.for_each_gpu_in_use(|rank, lane| {
            let held = lane.streams[slot].wait_for_end_event().map_err(|error| match error {
                BackendError::DeviceLost(why) if several => {
                    BackendError::DeviceLost(format!("rank {rank}: {why}"))
                }
                error => error,
            })?;
            all = all.zip(held).map(|(before, held)| before && held).or(held);
            Ok(())
        })?;
        Ok(all)
    }

    /// Enqueues `count` launches with their CUDA events and clock probes, and with L2 flushes if
    /// caches are to be cold.
    pub fn enqueue_launches_between_events(
        &mut self,
        count: usize,
        cache: CacheState,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let slot = self.current_burst_slot;
        let probe = first_clock_probe_of_slot(slot);
        self.for_each_gpu_in_use(|_, lane| lane.instruments.enqueue_clock_probe(probe))?;
        if cache == CacheState::HotCaches {
            self.enqueue_multi_gpu_barrier()?;
            self.for_each_gpu_in_use(|_, lane| lane.streams[slot].enqueue_event(0))?;
        }
        for i in 0..count {
            if cache == CacheState::ColdCaches {
                self.for_each_gpu_in_use(|_, lane| lane.instruments.enqueue_l2_flush())?;
                self.enqueue_multi_gpu_barrier()?;
                self.for_each_gpu_in_use(|_, lane| lane.streams[slot].enqueue_event(2 * i))?;
            }
            launch()?;
            let event = if cache == CacheState::ColdCaches { 2 * i + 1 } else { i + 1 };
            self.for_each_gpu_in_use(|_, lane| lane.streams[slot].enqueue_event(event))?;
        }
        self.for_each_gpu_in_use(|_, lane| lane.instruments.enqueue_clock_probe(probe + 1))
    }

    /// Enqueues the barrier kernel before work on several GPUs, so that all GPUs start at about the
    /// same time.
    fn enqueue_multi_gpu_barrier(&mut self) -> Result<(), BackendError> {
        let count = self.gpus_in_use;
        let Some(mut barrier) = self.barrier.take_if(|_| count > 1) else { return Ok(()) };
        barrier.advance_barrier_epoch();
        let enqueued =
            self.for_each_gpu_in_use(|rank, _| barrier.enqueue_kernel_of_gpu(rank, count));
        self.barrier = Some(barrier);
        enqueued
    }

    /// Returns the slowest GPU's nanoseconds between each pair of events, and the difference
    /// between the slowest and the fastest GPU's sums; no difference for one GPU.
    ///
    /// # Errors
    /// Fails if the driver cannot read an event.
    pub fn event_intervals_of_slowest_gpu(
        &self,
        pairs: impl Iterator<Item = (usize, usize)>,
    ) -> Result<(Vec<f64>, Option<f64>), BackendError> {
        let lanes = &self.instruments_of_gpus[..self.gpus_in_use];
        let mut sums_ns = vec![0.0; lanes.len()];
        let mut intervals_ns = Vec::new();
        for (from, to) in pairs {
            let mut slowest_ns = f64::NEG_INFINITY;
            for (lane, sum_ns) in lanes.iter().zip(&mut sums_ns) {
                let elapsed_ns =
                    lane.streams[self.current_burst_slot].ns_between_events(from, to)?;
                *sum_ns += elapsed_ns;
                slowest_ns = elapsed_ns.max(slowest_ns);
            }
            intervals_ns.push(slowest_ns);
        }
        Ok((intervals_ns, slowest_minus_fastest_gpu_ns(&sums_ns)))
    }

    /// Returns the lowest SM clock of the GPUs in use between their clock probes, MHz; `None` if
    /// the probes of a GPU cannot be compared.
    pub fn lowest_sm_clock_mhz(&self) -> Option<f64> {
        let probe = first_clock_probe_of_slot(self.current_burst_slot);
        let clocks = self.instruments_of_gpus[..self.gpus_in_use]
            .iter()
            .map(|lane| lane.instruments.sm_clock_mhz_between_probes(probe));
        clocks.reduce(|lowest, clock| lowest.zip(clock).map(|(a, b)| a.min(b))).flatten()
    }
}

/// Returns the index of the clock probe before a slot's burst; the next index is the probe after
/// its launches.
const fn first_clock_probe_of_slot(slot: usize) -> usize {
    2 * slot
}

fn slowest_minus_fastest_gpu_ns(sums_ns: &[f64]) -> Option<f64> {
    let most = sums_ns.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let least = sums_ns.iter().copied().fold(f64::INFINITY, f64::min);
    (sums_ns.len() > 1).then_some(most - least)
}

/// Blocks the streams of all GPUs in use, with the blocking kernels of the first slot.
impl StreamHold for TimingInstrumentsOfGpus {
    fn enqueue_hold(&mut self, at_most: Duration) -> Result<(), BackendError> {
        self.for_each_gpu_in_use(|_, lane| lane.streams[0].stream_hold_mut().enqueue_hold(at_most))
    }

    fn release_stream(&mut self) {
        self.instruments_of_gpus[..self.gpus_in_use]
            .iter_mut()
            .for_each(|lane| lane.streams[0].stream_hold_mut().release_stream());
    }

    fn was_released_in_time(&self) -> bool {
        self.instruments_of_gpus[..self.gpus_in_use]
            .iter()
            .all(|lane| lane.streams[0].was_last_hold_released_in_time())
    }
}

impl HoldWithEndMark for TimingInstrumentsOfGpus {
    fn enqueue_clock_probe_on_each_stream(&mut self) -> Result<(), BackendError> {
        self.for_each_gpu_in_use(|_, lane| lane.instruments.enqueue_clock_probe(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_skew_is_the_slowest_minus_the_fastest_sum() {
        assert_eq!(slowest_minus_fastest_gpu_ns(&[300.0]), None);
        assert_eq!(slowest_minus_fastest_gpu_ns(&[300.0, 250.0, 310.0]), Some(60.0));
    }
}
