//! Measures the cost of launching and timing on this GPU, which is subtracted from every sample.

use std::time::Instant;

use super::CudaEventTimer;
use crate::backend::BackendError;
use crate::measure::CacheState;
use crate::measure::launch_queue::MAX_COMMANDS_BEHIND_BLOCKER;
use crate::measure::limits::LaunchAndTimingOverhead;
use crate::stats;
use kernelgate_cuda::driver::graph::ExecutableCudaGraph;
use kernelgate_cuda::instruments::spin_kernel::{EmptyKernel, SpinKernel};

/// Number of event intervals; their median is one figure of the timing overhead.
const INTERVALS_PER_OVERHEAD_FIGURE: usize = 31;
/// Number of bursts of spin kernels; the durations that their last spins read from the GPU's timer
/// are averaged.
const SPIN_BURSTS_FOR_EVENT_OVERHEAD: usize = 16;
/// Numbers of empty kernels in a short and a long series; their time difference gives the cost of
/// one further kernel.
const EMPTY_KERNELS_IN_SHORT_SERIES: usize = 20;
const EMPTY_KERNELS_IN_LONG_SERIES: usize = 60;
/// Length of the spin kernel that measures the overhead of events, nanoseconds: long enough to hide
/// the work of recording an event.
const OVERHEAD_SPIN_NS: u64 = 20_000;

impl CudaEventTimer {
    /// Measures the overhead of launching and of timing by CUDA events on the first GPU.
    ///
    /// The overhead of two events is their interval around a spin kernel, minus the spin's time by
    /// the GPU's own timer, minus the time to begin and end a kernel. The cost of an empty kernel
    /// is the time by which one further empty kernel lengthens a graph.
    pub(super) fn measure_launch_overhead(
        &mut self,
    ) -> Result<LaunchAndTimingOverhead, BackendError> {
        let empty = EmptyKernel::compile_and_load(self.devices.first_device())?;
        let spin = SpinKernel::compile_and_allocate_report(self.devices.first_device())?;
        let nothing = self.median_event_interval_ns(0, &mut || Ok(()))?;
        let mut row = |count: usize| {
            self.median_event_interval_ns(count, &mut || {
                (0..count).try_for_each(|_| empty.enqueue_empty_kernel())
            })
        };
        let launch_ns = (row(EMPTY_KERNELS_IN_LONG_SERIES)? - row(EMPTY_KERNELS_IN_SHORT_SERIES)?)
            / (EMPTY_KERNELS_IN_LONG_SERIES - EMPTY_KERNELS_IN_SHORT_SERIES) as f64;
        let mut graph = |count: usize| {
            let graph = ExecutableCudaGraph::capture_from_device_stream(
                self.devices.first_device(),
                || (0..count).try_for_each(|_| empty.enqueue_empty_kernel()),
            )?;
            self.median_event_interval_ns(1, &mut || graph.launch_graph_on_stream())
        };
        let graph_node_ns = (graph(EMPTY_KERNELS_IN_LONG_SERIES)?
            - graph(EMPTY_KERNELS_IN_SHORT_SERIES)?)
            / (EMPTY_KERNELS_IN_LONG_SERIES - EMPTY_KERNELS_IN_SHORT_SERIES) as f64;
        let spinning =
            ExecutableCudaGraph::capture_from_device_stream(self.devices.first_device(), || {
                spin.enqueue_spin(OVERHEAD_SPIN_NS)
            })?;
        let around_launch_ns = self
            .event_time_beyond_spin_ns(&spin, &mut || spin.enqueue_spin(OVERHEAD_SPIN_NS))?
            - graph_node_ns;
        let around_graph_ns = self
            .event_time_beyond_spin_ns(&spin, &mut || spinning.launch_graph_on_stream())?
            - graph_node_ns;
        let start = Instant::now();
        (0..EMPTY_KERNELS_IN_LONG_SERIES).try_for_each(|_| empty.enqueue_empty_kernel())?;
        let host_launch_ns =
            start.elapsed().as_nanos() as f64 / EMPTY_KERNELS_IN_LONG_SERIES as f64;
        self.devices.first_device().synchronize()?;
        Ok(LaunchAndTimingOverhead {
            empty_event_pair_ns: nothing,
            ns_per_further_stream_kernel: launch_ns,
            ns_per_further_graph_node: graph_node_ns,
            host_launch_call_ns: host_launch_ns,
            events_around_launch_ns: around_launch_ns.max(0.0),
            events_around_graph_ns: around_graph_ns.max(0.0),
        })
    }

    /// Returns the median event interval around a spin kernel minus the mean time by the GPU's own
    /// timer that the last spin of each burst reports, nanoseconds. On some GPUs the timer steps by
    /// a microsecond; the mean of readings that begin at random moments of a step is far more
    /// exact.
    fn event_time_beyond_spin_ns(
        &mut self,
        spin: &SpinKernel,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<f64, BackendError> {
        let (mut intervals_ns, mut spent_ns) = (Vec::new(), 0.0);
        for _ in 0..SPIN_BURSTS_FOR_EVENT_OVERHEAD {
            let burst = self
                .run_burst_until_released_in_time(
                    INTERVALS_PER_OVERHEAD_FIGURE,
                    CacheState::HotCaches,
                    1,
                    launch,
                )?
                .refuse_if_host_time_is_included()?;
            intervals_ns.extend(burst.event_intervals_ns);
            spent_ns += spin.reported_ns_of_last_spin()? as f64;
        }
        Ok(stats::median(&intervals_ns) - spent_ns / SPIN_BURSTS_FOR_EVENT_OVERHEAD as f64)
    }

    /// Returns the median event interval around `commands` empty commands, nanoseconds.
    fn median_event_interval_ns(
        &mut self,
        commands: usize,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<f64, BackendError> {
        let mut intervals_ns = Vec::new();
        // The launch queue behind the blocking kernel is short, so that few long series are
        // enqueued at once.
        let at_once =
            (MAX_COMMANDS_BEHIND_BLOCKER / commands.max(1)).min(INTERVALS_PER_OVERHEAD_FIGURE);
        while intervals_ns.len() < INTERVALS_PER_OVERHEAD_FIGURE {
            let burst = self
                .run_burst_until_released_in_time(at_once, CacheState::HotCaches, commands, launch)?
                .refuse_if_host_time_is_included()?;
            intervals_ns.extend(burst.event_intervals_ns);
        }
        Ok(stats::median(&intervals_ns))
    }
}
