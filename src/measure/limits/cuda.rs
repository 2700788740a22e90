//! The GPU's ceilings: bandwidths by our own passes, matrix products by cuBLASLt, and what launching costs.

use std::time::Instant;

use super::{Bandwidth, Limits, Overhead};
use crate::backend::BackendError;
use crate::backend::cuda::bandwidth::Passes;
use crate::backend::cuda::event::Graph;
use crate::measure::Cache;
use crate::measure::events::EventTimer;
use crate::stats::median;
use crate::workload::{Work, random};

/// Working sets measured: far inside L2, about L2, and far beyond it.
const WORKING_SETS: [u64; 6] = [2 << 20, 8 << 20, 32 << 20, 128 << 20, 512 << 20, 2 << 30];
/// Empty kernels between a pair of events.
const EMPTY: usize = 60;

impl Limits {
    /// Measures those ceilings of the GPU that bound any of the works. Takes about a second.
    ///
    /// # Errors
    /// When the device fails; a unit whose library is missing is left out.
    pub fn measure_cuda(events: &mut EventTimer, works: &[Work]) -> Result<Self, BackendError> {
        let mut limits = Self::default();
        let pattern = random::normal(0, "bandwidth", 1 << 20);
        let (free, _) = events.device().memory()?;
        let sets: Vec<u64> = WORKING_SETS.into_iter().filter(|&bytes| 2 * bytes < free).collect();
        let largest = sets.last().copied().unwrap_or(WORKING_SETS[0]);
        let passes = Passes::new(events.device(), largest as usize, bytemuck::cast_slice(&pattern))?;
        if works.iter().any(|work| work.total_bytes() > 0) {
            limits.bandwidth = sets.into_iter().map(|bytes| bandwidth(events, &passes, bytes)).collect::<Result<_, _>>()?;
        }
        limits.overhead = Some(overhead(events, &passes)?);
        Ok(limits)
    }
}

fn bandwidth(events: &mut EventTimer, passes: &Passes, bytes: u64) -> Result<Bandwidth, BackendError> {
    let mut rate = |pass: &dyn Fn() -> Result<(), BackendError>| -> Result<f64, BackendError> {
        Ok(bytes as f64 / events.typical_ns(&mut || pass())? * 1e9)
    };
    Ok(Bandwidth {
        working_set_bytes: bytes,
        read: rate(&|| passes.read(bytes))?,
        copy: rate(&|| passes.copy(bytes))?,
        write: rate(&|| passes.write(bytes))?,
    })
}

fn overhead(events: &mut EventTimer, passes: &Passes) -> Result<Overhead, BackendError> {
    let device = events.device().clone();
    let mut each = |launch: &mut dyn FnMut() -> Result<(), BackendError>, commands| -> Result<f64, BackendError> {
        let intervals_ns = events.burst(5, Cache::Hot, commands, launch)?.intervals_ns;
        Ok((median(&intervals_ns) - events.overhead_ns()) / EMPTY as f64)
    };
    let many = || (0..EMPTY).try_for_each(|_| passes.nothing());
    let graph = Graph::capture(&device, many)?;
    let graph_node_ns = each(&mut || graph.launch(), 1)?;
    let launch_ns = each(&mut || many(), EMPTY)?;
    device.synchronize()?;
    let start = Instant::now();
    many()?;
    let host_launch_ns = start.elapsed().as_nanos() as f64 / EMPTY as f64;
    device.synchronize()?;
    Ok(Overhead { event_pair_ns: events.overhead_ns(), launch_ns, graph_node_ns, host_launch_ns })
}
