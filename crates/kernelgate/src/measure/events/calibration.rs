//! Cost of launching and timing on this device, which is subtracted from every sample.

use std::time::Instant;

use super::EventTimer;
use crate::backend::BackendError;
use crate::measure::CacheState;
use crate::measure::launch_queue::MAX_QUEUED_COMMANDS;
use crate::measure::limits::LaunchOverhead;
use crate::stats;
use kernelgate_cuda::driver::graph::ExecutableGraph;
use kernelgate_cuda::instruments::spin_kernel::{EmptyKernel, SpinKernel};

/// Intervals whose median is a figure of the calibration.
const CALIBRATIONS: usize = 31;
/// Number of bursts of spins, whose last readings of the device's timer are averaged.
const CALIBRATION_BURSTS: usize = 16;
/// Empty kernels in a row, of a short and a long series: the difference gives the cost of one more.
const SHORT_REPETITIONS: usize = 20;
const MANY_EMPTY_KERNELS: usize = 60;
/// Length of the spin that the calibration stands on: longer than what hides an event's own work.
const CALIBRATION_SPIN_NS: u64 = 20_000;

impl EventTimer {
    /// Measures the cost of launching and timing.
    ///
    /// The events around a launch add the difference between their interval and the time that a
    /// spinning kernel spent by the device's own timer, less the time to begin and end a kernel.
    /// The cost of an empty kernel is the growth of a graph's time by one more empty kernel.
    pub(super) fn calibrate(&mut self) -> Result<LaunchOverhead, BackendError> {
        let empty = EmptyKernel::new(self.devices.first_device())?;
        let spin = SpinKernel::new(self.devices.first_device())?;
        let nothing = self.median_ns(0, &mut || Ok(()))?;
        let mut row = |count: usize| {
            self.median_ns(count, &mut || (0..count).try_for_each(|_| empty.launch()))
        };
        let launch_ns = (row(MANY_EMPTY_KERNELS)? - row(SHORT_REPETITIONS)?)
            / (MANY_EMPTY_KERNELS - SHORT_REPETITIONS) as f64;
        let mut graph = |count: usize| {
            let graph = ExecutableGraph::capture_graph(self.devices.first_device(), || {
                (0..count).try_for_each(|_| empty.launch())
            })?;
            self.median_ns(1, &mut || graph.launch())
        };
        let graph_node_ns = (graph(MANY_EMPTY_KERNELS)? - graph(SHORT_REPETITIONS)?)
            / (MANY_EMPTY_KERNELS - SHORT_REPETITIONS) as f64;
        let spinning = ExecutableGraph::capture_graph(self.devices.first_device(), || {
            spin.launch(CALIBRATION_SPIN_NS)
        })?;
        let around_launch_ns =
            self.beyond_spin_ns(&spin, &mut || spin.launch(CALIBRATION_SPIN_NS))? - graph_node_ns;
        let around_graph_ns =
            self.beyond_spin_ns(&spin, &mut || spinning.launch())? - graph_node_ns;
        let start = Instant::now();
        (0..MANY_EMPTY_KERNELS).try_for_each(|_| empty.launch())?;
        let host_launch_ns = start.elapsed().as_nanos() as f64 / MANY_EMPTY_KERNELS as f64;
        self.devices.first_device().synchronize()?;
        Ok(LaunchOverhead {
            event_pair_ns: nothing,
            launch_ns,
            graph_node_ns,
            host_launch_ns,
            around_launch_ns: around_launch_ns.max(0.0),
            around_graph_ns: around_graph_ns.max(0.0),
        })
    }

    /// Excess of the events over the device's own timer for a spin, nanoseconds: the median
    /// interval in bursts, as samples are taken, less the mean of the times that the last spins of
    /// the bursts report. On some cards the timer steps by a microsecond; the mean of readings that
    /// begin at random places in a step is exact to a small part of the step.
    fn beyond_spin_ns(
        &mut self,
        spin: &SpinKernel,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<f64, BackendError> {
        let (mut intervals_ns, mut spent_ns) = (Vec::new(), 0.0);
        for _ in 0..CALIBRATION_BURSTS {
            let burst = self
                .burst_with_retries(CALIBRATIONS, CacheState::Hot, 1, launch)?
                .without_host()?;
            intervals_ns.extend(burst.intervals_ns);
            spent_ns += spin.spent_time_ns()? as f64;
        }
        Ok(stats::median(&intervals_ns) - spent_ns / CALIBRATION_BURSTS as f64)
    }

    /// Median interval around `commands` empty commands, over enough repetitions, nanoseconds.
    fn median_ns(
        &mut self,
        commands: usize,
        launch: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<f64, BackendError> {
        let mut intervals_ns = Vec::new();
        // The queue behind the blocker is short: long rows a few at a time.
        let at_once = (MAX_QUEUED_COMMANDS / commands.max(1)).min(CALIBRATIONS);
        while intervals_ns.len() < CALIBRATIONS {
            let burst = self
                .burst_with_retries(at_once, CacheState::Hot, commands, launch)?
                .without_host()?;
            intervals_ns.extend(burst.intervals_ns);
        }
        Ok(stats::median(&intervals_ns))
    }
}
