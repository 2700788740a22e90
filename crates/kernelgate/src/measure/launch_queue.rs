//! Computes how many launches fit the launch queue behind a blocking kernel, from the number of
//! commands of one launch. The code that enqueues the launches is in the module `events`.

use std::sync::Arc;

use super::audit::TimingRefusal;
use crate::backend::{BackendError, LaunchableProblem};
use kernelgate_cuda::driver::graph_set::ExecutableGraphPerGpu;
use kernelgate_cuda::{Device, Devices};

/// Largest number of launches that are queued behind one blocking kernel.
pub const MAX_LAUNCHES_BEHIND_BLOCKER: usize = 64;
/// Largest number of commands behind a blocking kernel: the launch queue holds about a thousand,
/// and a host that waits for room in the queue cannot release the kernel.
pub const MAX_COMMANDS_BEHIND_BLOCKER: usize = 400;

/// Returns whether `launches` launches of `commands` commands each fit the launch queue together
/// with their CUDA events.
pub const fn launches_fit_queue(commands: usize, launches: usize) -> bool {
    commands.saturating_add(3).saturating_mul(launches)
        <= MAX_COMMANDS_BEHIND_BLOCKER + 3 * MAX_LAUNCHES_BEHIND_BLOCKER
}

/// Properties of a graph that contains nodes which only order other nodes. Nodes that only order
/// other nodes take launch-queue entries, in a number that CUDA does not document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GraphWithOrderingNodes {
    /// Number of GPUs on which the graph is replayed.
    pub gpu_count: usize,
    /// Whether the L2 cache is flushed before each replay of the graph.
    pub flushes_l2_before_replay: bool,
    /// Number of nodes in the graph.
    pub node_count: usize,
}

/// Largest numbers of replays that fit the launch queue, found by trials, for graphs with ordering
/// nodes. A trial with too many replays takes half a second, the timeout of the blocking kernel, so
/// results are kept.
#[derive(Debug, Default)]
pub struct MaxReplaysOfTriedGraphs(Vec<(GraphWithOrderingNodes, usize)>);

impl MaxReplaysOfTriedGraphs {
    /// Finds the largest number of replays of a graph with ordering nodes that fits the launch
    /// queue: `longest` is halved until the closure `fits`, which enqueues that many replays,
    /// returns true. A graph gets no more replays than were found for a graph with fewer nodes.
    ///
    /// # Errors
    /// Fails with the error of the closure `fits`.
    pub fn find_max_replays_in_queue<E>(
        &mut self,
        graphs: GraphWithOrderingNodes,
        longest: usize,
        mut fits: impl FnMut(usize) -> Result<bool, E>,
    ) -> Result<usize, E> {
        let alike = |found: &GraphWithOrderingNodes| {
            (found.gpu_count, found.flushes_l2_before_replay)
                == (graphs.gpu_count, graphs.flushes_l2_before_replay)
        };
        let found = || self.0.iter().filter(|(found, _)| alike(found));
        let with_fewer = found().filter(|(found, _)| found.node_count <= graphs.node_count);
        let with_more = found().filter(|(found, _)| found.node_count >= graphs.node_count);
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

/// Captures one launch as a CUDA graph; returns `None` if it cannot be captured, for example
/// because it replays a graph of its own.
///
/// # Errors
/// Fails if the GPU stopped responding.
pub fn capture_launch_as_graph(
    devices: &Devices,
    executable: &mut dyn LaunchableProblem,
) -> Result<Option<ExecutableGraphPerGpu>, BackendError> {
    match ExecutableGraphPerGpu::capture_on_all_gpus(devices, || executable.launch_once()) {
        Ok(graph) => Ok(Some(graph)),
        Err(lost @ BackendError::DeviceLost(_)) => Err(lost),
        Err(_) => Ok(None),
    }
}

/// Fails if the launches do not all fit the launch queue, because a sample would then include the
/// host's launch time. A launch that cannot be captured counts as one command, because such a
/// launch is assumed to replay a graph of its own.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if the launches have too many commands for the queue, or
/// if the device fails.
pub fn refuse_launches_beyond_queue(
    device: &Arc<Device>,
    launches: usize,
    executable: &mut dyn LaunchableProblem,
) -> Result<(), BackendError> {
    executable.wait_for_launches()?;
    let commands = capture_launch_as_graph(&Devices::from(device), executable)?
        .map_or(1, |graph| graph.max_nodes_per_gpu());
    if launches_fit_queue(commands, launches) {
        return Ok(());
    }
    Err(TimingRefusal::TooManyCommandsToQueue { launches, commands_per_launch: commands }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_launches_that_fit_the_launch_queue_are_accepted() {
        assert!(
            launches_fit_queue(1, MAX_LAUNCHES_BEHIND_BLOCKER - 1)
                && launches_fit_queue(MAX_COMMANDS_BEHIND_BLOCKER, 1)
        );
        // Examples: a forward pass of eight kernels, and a denoising step of some hundred kernels.
        assert!(launches_fit_queue(8, 15) && !launches_fit_queue(260, 15));
        assert!(!launches_fit_queue(usize::MAX, 2));
    }

    #[test]
    fn max_replays_of_a_graph_are_searched_once() {
        let graphs = |flushed, nodes| GraphWithOrderingNodes {
            gpu_count: 2,
            flushes_l2_before_replay: flushed,
            node_count: nodes,
        };
        let mut bursts = MaxReplaysOfTriedGraphs::default();
        // 200 nodes fit.
        let mut find = |graphs: GraphWithOrderingNodes| {
            let mut failed = 0;
            let fits = |burst| {
                let fits = burst * graphs.node_count <= 200;
                failed += usize::from(!fits);
                Ok::<_, ()>(fits)
            };
            (bursts.find_max_replays_in_queue(graphs, 63, fits).unwrap(), failed)
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
    fn a_failed_search_stores_no_max_replays() {
        let graphs =
            GraphWithOrderingNodes { gpu_count: 1, flushes_l2_before_replay: false, node_count: 9 };
        let mut bursts = MaxReplaysOfTriedGraphs::default();
        assert_eq!(bursts.find_max_replays_in_queue(graphs, 63, |_| Err("lost")), Err("lost"));
        assert_eq!(bursts.find_max_replays_in_queue(graphs, 63, |_| Ok::<_, ()>(true)), Ok(63));
    }
}
