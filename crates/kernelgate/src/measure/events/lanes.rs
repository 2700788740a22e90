//! Instruments of timing on each GPU of a set: a stream with events, a blocker, clock probes, a
//! flush.
//!
//! Events, blocker and probes exist twice, for two bursts that are in the queue together. Work on a
//! single GPU uses only the first lane. Before the first event of work on several GPUs, a barrier
//! ends on all of them at about the same time. This module deliberately does not interpret
//! intervals.

use std::time::Duration;

use crate::backend::BackendError;
use crate::measure::CacheState;
use crate::measure::audit::cupti::MarkedHold;
use crate::measure::launch_queue::MAX_LAUNCHES_PER_BURST;
use kernelgate_cuda::driver::stream::stream_hold::StreamHold;
use kernelgate_cuda::driver::stream::stream_timer::StreamTimer;
use kernelgate_cuda::instruments::barrier::MultiGpuBarrier;
use kernelgate_cuda::instruments::timing::{StreamBlocker, TimingInstruments};
use kernelgate_cuda::{Device, Devices};

/// Bytes that the cold state reads, in multiples of L2's size.
const FLUSH_L2_MULTIPLE: u64 = 2;

/// Number of bursts that can be in the device's queue together.
pub const BURST_SLOTS: usize = 2;

struct TimedGpu {
    /// Timers of the stream, one for each burst in the queue.
    streams: [StreamTimer<StreamBlocker>; BURST_SLOTS],
    instruments: TimingInstruments,
}

impl TimedGpu {
    fn new(device: &Device) -> Result<Self, BackendError> {
        let timer = || {
            let blocker = StreamBlocker::new(device)?;
            StreamTimer::new(device, 2 * MAX_LAUNCHES_PER_BURST, blocker)
        };
        Ok(Self {
            streams: [timer()?, timer()?],
            instruments: TimingInstruments::new(
                device,
                FLUSH_L2_MULTIPLE * device.facts().l2_bytes,
            )?,
        })
    }
}

/// The GPUs of a set.
pub struct TimedGpus {
    all: Vec<TimedGpu>,
    /// Number of GPUs that are being timed.
    used: usize,
    /// Slot of the burst that is enqueued or read now.
    slot: usize,
    /// The barrier is absent for one GPU, and if the GPUs do not access each other's memory.
    barrier: Option<MultiGpuBarrier>,
}

impl TimedGpus {
    /// Compiles and allocates on every GPU; the first one is used.
    ///
    /// # Errors
    /// Fails if a GPU fails or memory is short.
    pub fn new(devices: &Devices) -> Result<Self, BackendError> {
        let mut all = Vec::new();
        devices.for_each_device(|_, device| {
            all.push(TimedGpu::new(device)?);
            Ok(())
        })?;
        Ok(Self { all, used: 1, slot: 0, barrier: MultiGpuBarrier::new(devices)? })
    }

    /// Restricts timing to the first `count` GPUs from now on.
    pub fn use_first(&mut self, count: usize) {
        self.used = count.clamp(1, self.all.len());
    }

    /// Number of GPUs that are being timed.
    pub const fn timed_gpu_count(&self) -> usize {
        self.used
    }

    /// Uses the events, blocker and probes of a slot from now on.
    pub const fn use_slot(&mut self, slot: usize) {
        self.slot = slot;
    }

    /// Calls `each` for the lanes that are used, each with its context current.
    fn for_each_timed_gpu(
        &mut self,
        mut each: impl FnMut(usize, &mut TimedGpu) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        if self.all.len() == 1 {
            return each(0, &mut self.all[0]);
        }
        let done = self.all[..self.used].iter_mut().enumerate().try_for_each(|(rank, lane)| {
            lane.streams[0].make_context_current()?;
            each(rank, lane)
        });
        self.all[0].streams[0].make_context_current()?;
        done
    }

    /// Begins an interval on each GPU, as [`StreamTimer::begin_interval`].
    pub fn begin(&mut self, at_most: Option<Duration>) -> Result<(), BackendError> {
        let slot = self.slot;
        self.for_each_timed_gpu(|_, lane| lane.streams[slot].begin_interval(at_most))
    }

    /// Releases the held streams of all GPUs, with one store after the other.
    pub fn release(&mut self) {
        let slot = self.slot;
        self.all[..self.used].iter_mut().for_each(|lane| lane.streams[slot].release());
    }

    /// Marks the end of the interval on each GPU, as [`StreamTimer::mark_end`].
    pub fn mark_end(&mut self) -> Result<(), BackendError> {
        let slot = self.slot;
        self.for_each_timed_gpu(|_, lane| lane.streams[slot].mark_end())
    }

    /// Waits for the marked end on each GPU, as [`StreamTimer::wait_for_end`]: false if the hold of
    /// one timed out.
    ///
    /// # Errors
    /// Fails if something failed; [`BackendError::Lost`] with the GPU if it does not end in time.
    pub fn wait_for_end(&mut self) -> Result<Option<bool>, BackendError> {
        let (mut all, several, slot) = (None::<bool>, self.used > 1, self.slot);
        self.for_each_timed_gpu(|rank, lane| {
            let held = lane.streams[slot].wait_for_end().map_err(|error| match error {
                BackendError::Lost(why) if several => {
                    BackendError::Lost(format!("rank {rank}: {why}"))
                }
                error => error,
            })?;
            all = all.zip(held).map(|(before, held)| before && held).or(held);
            Ok(())
        })?;
        Ok(all)
    }

    /// Enqueues the launches with their events, probes and flushes.
    pub fn enqueue_launches(
        &mut self,
        count: usize,
        cache: CacheState,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let slot = self.slot;
        let probe = first_probe(slot);
        self.for_each_timed_gpu(|_, lane| lane.instruments.enqueue_clock_probe(probe))?;
        if cache == CacheState::Hot {
            self.enqueue_barrier()?;
            self.for_each_timed_gpu(|_, lane| lane.streams[slot].record_event(0))?;
        }
        for i in 0..count {
            if cache == CacheState::Cold {
                self.for_each_timed_gpu(|_, lane| lane.instruments.flush_l2())?;
                self.enqueue_barrier()?;
                self.for_each_timed_gpu(|_, lane| lane.streams[slot].record_event(2 * i))?;
            }
            launch()?;
            let event = if cache == CacheState::Cold { 2 * i + 1 } else { i + 1 };
            self.for_each_timed_gpu(|_, lane| lane.streams[slot].record_event(event))?;
        }
        self.for_each_timed_gpu(|_, lane| lane.instruments.enqueue_clock_probe(probe + 1))
    }

    /// Enqueues the barrier before work on several GPUs.
    fn enqueue_barrier(&mut self) -> Result<(), BackendError> {
        let count = self.used;
        let Some(mut barrier) = self.barrier.take_if(|_| count > 1) else { return Ok(()) };
        barrier.begin_next_barrier();
        let enqueued =
            self.for_each_timed_gpu(|rank, _| barrier.enqueue_barrier_of_gpu(rank, count));
        self.barrier = Some(barrier);
        enqueued
    }

    /// The slowest GPU's nanoseconds between these pairs of events, and the difference between the
    /// sums of the slowest and of the fastest GPU; no difference for one GPU.
    ///
    /// # Errors
    /// Fails if the driver cannot read an event.
    pub fn slowest_intervals(
        &self,
        pairs: impl Iterator<Item = (usize, usize)>,
    ) -> Result<(Vec<f64>, Option<f64>), BackendError> {
        let lanes = &self.all[..self.used];
        let mut sums_ns = vec![0.0; lanes.len()];
        let mut intervals_ns = Vec::new();
        for (from, to) in pairs {
            let mut slowest_ns = f64::NEG_INFINITY;
            for (lane, sum_ns) in lanes.iter().zip(&mut sums_ns) {
                let elapsed_ns = lane.streams[self.slot].elapsed_ns(from, to)?;
                *sum_ns += elapsed_ns;
                slowest_ns = elapsed_ns.max(slowest_ns);
            }
            intervals_ns.push(slowest_ns);
        }
        Ok((intervals_ns, start_skew_ns(&sums_ns)))
    }

    /// SM clock between the probes, MHz: the lowest of all GPUs, if the probes of each compare.
    pub fn clock_mhz(&self) -> Option<f64> {
        let probe = first_probe(self.slot);
        let clocks = self.all[..self.used].iter().map(|lane| lane.instruments.clock_mhz(probe));
        clocks.reduce(|lowest, clock| lowest.zip(clock).map(|(a, b)| a.min(b))).flatten()
    }
}

/// The first clock probe of a slot's burst; the next one is behind the launches.
const fn first_probe(slot: usize) -> usize {
    2 * slot
}

fn start_skew_ns(sums_ns: &[f64]) -> Option<f64> {
    let most = sums_ns.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let least = sums_ns.iter().copied().fold(f64::INFINITY, f64::min);
    (sums_ns.len() > 1).then_some(most - least)
}

/// Holds the streams of all GPUs that are used, with the blockers of the first slot.
impl StreamHold for TimedGpus {
    fn hold(&mut self, at_most: Duration) -> Result<(), BackendError> {
        self.for_each_timed_gpu(|_, lane| lane.streams[0].stream_holder().hold(at_most))
    }

    fn release(&mut self) {
        self.all[..self.used].iter_mut().for_each(|lane| lane.streams[0].stream_holder().release());
    }

    fn was_released(&self) -> bool {
        self.all[..self.used].iter().all(|lane| lane.streams[0].hold_was_released())
    }
}

impl MarkedHold for TimedGpus {
    fn mark_streams(&mut self) -> Result<(), BackendError> {
        self.for_each_timed_gpu(|_, lane| lane.instruments.enqueue_clock_probe(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_skew_is_the_gap_between_the_slowest_and_the_fastest_gpu() {
        assert_eq!(start_skew_ns(&[300.0]), None);
        assert_eq!(start_skew_ns(&[300.0, 250.0, 310.0]), Some(60.0));
    }
}
