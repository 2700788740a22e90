//! The device's queue behind the blocker: how many launches fit, and how many commands one is. The
//! launches themselves are in the module `events`.

use std::sync::Arc;

use super::audit::TimingRefusal;
use crate::backend::{BackendError, Executable};
use kernelgate_cuda::driver::graph_set::GraphSet;
use kernelgate_cuda::{Device, Devices};

/// Maximum number of launches between one release of the blocking kernel and the next.
pub const MAX_LAUNCHES_PER_BURST: usize = 64;
/// Maximum number of commands that are queued behind the blocking kernel: the queue holds about a
/// thousand, and a host that waits for room in the queue cannot release the kernel.
pub const MAX_QUEUED_COMMANDS: usize = 400;

/// Returns whether `launches` launches of `commands` commands each fit into the device's queue,
/// with their events.
pub const fn fits_queue(commands: usize, launches: usize) -> bool {
    commands.saturating_add(3).saturating_mul(launches)
        <= MAX_QUEUED_COMMANDS + 3 * MAX_LAUNCHES_PER_BURST
}

/// Describes graphs with nodes that only order other commands. Such nodes take entries of the queue
/// in a number that CUDA does not state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrderedGraphs {
    /// Number of GPUs on which a graph is replayed.
    pub gpus: usize,
    /// Whether L2 is flushed before each replay.
    pub flushed: bool,
    /// Nodes of a graph.
    pub nodes: usize,
}

/// Numbers of graph replays that fit the device's queue, as trials have shown, by the graph's
/// commands. A trial with too many replays takes half a second.
#[derive(Debug, Default)]
pub struct FoundBursts(Vec<(OrderedGraphs, usize)>);

impl FoundBursts {
    /// Finds the longest burst of such graphs that fits the queue: `longest`, halved until `fits`,
    /// which tries a burst, agrees. A graph with more nodes gets no longer burst.
    ///
    /// # Errors
    /// Those of a trial.
    pub fn find_longest_burst<E>(
        &mut self,
        graphs: OrderedGraphs,
        longest: usize,
        mut fits: impl FnMut(usize) -> Result<bool, E>,
    ) -> Result<usize, E> {
        let alike =
            |found: &OrderedGraphs| (found.gpus, found.flushed) == (graphs.gpus, graphs.flushed);
        let found = || self.0.iter().filter(|(found, _)| alike(found));
        let with_fewer = found().filter(|(found, _)| found.nodes <= graphs.nodes);
        let with_more = found().filter(|(found, _)| found.nodes >= graphs.nodes);
        let mut burst = with_fewer.map(|(_, burst)| *burst).fold(longest, usize::min);
        let certain = with_more.map(|(_, burst)| *burst).fold(1, usize::max);
        while burst > certain && !fits(burst)? {
            burst /= 2;
        }
        let burst = burst.max(1);
        self.0.push((graphs, burst));
        Ok(burst)
    }
}

/// A launch as a graph; `None` if it cannot be captured, for example because it replays a graph of
/// its own.
///
/// # Errors
/// Fails if the GPU stopped responding.
pub fn capture_launch(
    devices: &Devices,
    executable: &mut dyn Executable,
) -> Result<Option<GraphSet>, BackendError> {
    match GraphSet::capture_on_devices(devices, || executable.launch()) {
        Ok(graph) => Ok(Some(graph)),
        Err(lost @ BackendError::Lost(_)) => Err(lost),
        Err(_) => Ok(None),
    }
}

/// Checks that all launches fit the queue, so that no sample contains the host's time. A launch
/// that cannot be captured counts as one command: it replays a graph of its own.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if there are too many, or if the device fails.
pub fn check_launches_fit_queue(
    device: &Arc<Device>,
    launches: usize,
    executable: &mut dyn Executable,
) -> Result<(), BackendError> {
    executable.synchronize()?;
    let commands =
        capture_launch(&Devices::from(device), executable)?.map_or(1, |graph| graph.max_nodes());
    if fits_queue(commands, launches) {
        return Ok(());
    }
    Err(TimingRefusal::TooManyCommands { launches, commands }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_only_batches_that_fit_the_queue() {
        assert!(fits_queue(1, MAX_LAUNCHES_PER_BURST - 1) && fits_queue(MAX_QUEUED_COMMANDS, 1));
        // A pass of eight kernels, and a denoising step of some hundred.
        assert!(fits_queue(8, 15) && !fits_queue(260, 15));
        assert!(!fits_queue(usize::MAX, 2));
    }

    #[test]
    fn the_longest_burst_of_a_graph_is_searched_once() {
        let graphs = |flushed, nodes| OrderedGraphs { gpus: 2, flushed, nodes };
        let mut bursts = FoundBursts::default();
        // 200 nodes fit.
        let mut find = |graphs: OrderedGraphs| {
            let mut failed = 0;
            let fits = |burst| {
                let fits = burst * graphs.nodes <= 200;
                failed += usize::from(!fits);
                Ok::<_, ()>(fits)
            };
            (bursts.find_longest_burst(graphs, 63, fits).unwrap(), failed)
        };
        assert_eq!(find(graphs(false, 20)), (7, 3));
        assert_eq!(find(graphs(false, 20)), (7, 0));
        assert_eq!(find(graphs(false, 22)), (7, 0));
        assert_eq!(find(graphs(false, 50)), (3, 1));
        assert_eq!(find(graphs(false, 40)), (3, 1));
        assert_eq!(find(graphs(false, 3)), (63, 0));
        assert_eq!(find(graphs(false, 1000)), (1, 1));
        assert_eq!(find(graphs(true, 20)), (7, 3));
    }

    #[test]
    fn a_failed_search_stores_no_burst() {
        let graphs = OrderedGraphs { gpus: 1, flushed: false, nodes: 9 };
        let mut bursts = FoundBursts::default();
        assert_eq!(bursts.find_longest_burst(graphs, 63, |_| Err("lost")), Err("lost"));
        assert_eq!(bursts.find_longest_burst(graphs, 63, |_| Ok::<_, ()>(true)), Ok(63));
    }
}
