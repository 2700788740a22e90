//! Launches over several GPUs, captured once: one graph for each GPU, without edges between graphs.

use super::devices::Devices;
use super::graph::{ExecutableGraph, StreamCapture, add_full_dependency};
use crate::BackendError;

/// The captured launches of a set of GPUs, replayed together.
pub struct GraphSet {
    /// Graphs in the order of the GPUs of the set.
    graphs: Vec<ExecutableGraph>,
}

impl From<ExecutableGraph> for GraphSet {
    fn from(graph: ExecutableGraph) -> Self {
        Self { graphs: vec![graph] }
    }
}

impl GraphSet {
    /// Captures what `enqueue` puts on the streams of these GPUs.
    ///
    /// # Errors
    /// Fails with the error of `enqueue`, or if its work cannot be captured, for example a wait of
    /// one GPU for an event of another GPU.
    pub fn capture_on_devices(
        devices: &Devices,
        enqueue: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<Self, BackendError> {
        if devices.device_count() == 1 {
            return ExecutableGraph::capture_graph(devices.first_device(), enqueue).map(Self::from);
        }
        let mut captures = Vec::with_capacity(devices.device_count());
        for device in devices.iter() {
            device.make_current()?;
            captures.push((device, StreamCapture::begin(device.stream())?));
        }
        devices.first_device().make_current()?;
        let mut enqueued = enqueue();
        let mut graphs = Vec::with_capacity(captures.len());
        // Every capture is ended, even after an error.
        for (device, capture) in captures {
            let ended = device.make_current().and_then(|()| {
                let before = std::mem::replace(&mut enqueued, Ok(()));
                capture.end_capture_only(before)
            });
            match ended {
                Ok(graph) => graphs.push(graph),
                Err(error) => enqueued = Err(error),
            }
        }
        devices.first_device().make_current()?;
        enqueued?;
        devices.for_each_device(|rank, _| graphs[rank].make_executable(&(0..0)))?;
        Ok(Self { graphs })
    }

    /// Captures several launches of the same work. On each GPU a launch begins after the previous
    /// one has ended, as in [`ExecutableGraph::capture_repeated`].
    pub fn capture_repeated_launches(
        devices: &Devices,
        times: u64,
        mut launch: impl FnMut() -> Result<(), BackendError>,
    ) -> Result<Self, BackendError> {
        if devices.device_count() == 1 {
            return ExecutableGraph::capture_repeated(devices.first_device(), times, launch)
                .map(Self::from);
        }
        let overlapping = times > 1 && {
            let pair = Self::capture_on_devices(devices, || launch().and_then(|()| launch()))?;
            let edges = pair.graphs.iter().map(ExecutableGraph::programmatic_edges);
            edges.collect::<Result<Vec<_>, _>>()?.into_iter().sum::<usize>() > 0
        };
        let mut separators = 0;
        let mut set = Self::capture_on_devices(devices, || {
            for iteration in 0..times {
                if iteration > 0 && overlapping {
                    devices.for_each_device(|_, device| add_full_dependency(device.stream()))?;
                    separators += 1;
                }
                launch()?;
            }
            Ok(())
        })?;
        set.graphs.iter_mut().for_each(|graph| graph.separators = separators);
        Ok(set)
    }

    /// Largest number of nodes on a GPU of the set, as [`ExecutableGraph::node_count`].
    pub fn max_nodes(&self) -> usize {
        self.graphs.iter().map(ExecutableGraph::node_count).max().unwrap_or(0)
    }

    /// Commands of each GPU, in the order of the set.
    pub fn commands_per_gpu(&self) -> Vec<usize> {
        self.graphs.iter().map(ExecutableGraph::command_count).collect()
    }

    /// Returns whether the graph of a GPU has nodes that only order other commands, such as events.
    pub fn has_ordering_nodes(&self) -> bool {
        self.graphs.iter().any(|graph| graph.node_count() > graph.command_count())
    }

    /// The first GPU of the set that got no command.
    pub fn first_idle_gpu(&self) -> Option<usize> {
        self.graphs.iter().position(|graph| graph.command_count() == 0)
    }

    /// Most nodes of a GPU that wait for no other node.
    pub fn max_roots(&self) -> Result<usize, BackendError> {
        let roots =
            self.graphs.iter().map(ExecutableGraph::root_count).collect::<Result<Vec<_>, _>>()?;
        Ok(roots.into_iter().max().unwrap_or(0))
    }

    /// Whether a graph of the set allocates memory.
    pub fn allocates_memory(&self) -> Result<bool, BackendError> {
        let allocates =
            self.graphs.iter().map(ExecutableGraph::allocates).collect::<Result<Vec<_>, _>>()?;
        Ok(allocates.contains(&true))
    }

    /// Enqueues all of them.
    pub fn launch_all(&self) -> Result<(), BackendError> {
        self.graphs.iter().try_for_each(ExecutableGraph::launch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instruments::barrier::MultiGpuBarrier;
    use crate::instruments::spin_kernel::SpinKernel;
    use crate::testing::two_gpus_for_test;

    #[test]
    fn graphs_of_several_gpus_are_captured_and_replayed_together() {
        let Some((devices, _alone)) = two_gpus_for_test() else { return };
        let mut spins = Vec::new();
        devices
            .for_each_device(|_, device| {
                spins.push(SpinKernel::new(device)?);
                Ok(())
            })
            .unwrap();
        let launch = |ranks: usize| {
            devices.first(ranks).for_each_device(|rank, _| spins[rank].launch(1_000))
        };
        let both = GraphSet::capture_repeated_launches(&devices, 3, || launch(2)).unwrap();
        assert_eq!(
            (both.max_nodes(), both.first_idle_gpu(), both.max_roots().unwrap()),
            (3, None, 1)
        );
        assert_eq!(both.commands_per_gpu(), [3, 3]);
        both.launch_all().unwrap();
        let one = GraphSet::capture_on_devices(&devices, || launch(1)).unwrap();
        assert_eq!((one.max_nodes(), one.first_idle_gpu()), (1, Some(1)));
        one.launch_all().unwrap();
        devices.for_each_device(|_, device| device.synchronize()).unwrap();
        assert!(spins.iter().all(|spin| spin.spent_time_ns().unwrap() >= 1_000));
        // The capture on the first GPU ends although the capture on the second GPU fails.
        let failed =
            GraphSet::capture_on_devices(&devices, || Err(BackendError::Launch("no".to_owned())));
        assert!(failed.is_err());
        launch(2).unwrap();
        let Some(mut barrier) = MultiGpuBarrier::new(&devices).unwrap() else { return };
        for _ in 0..3 {
            barrier.begin_next_barrier();
            devices.for_each_device(|rank, _| barrier.enqueue_barrier_of_gpu(rank, 2)).unwrap();
        }
        devices.for_each_device(|_, device| device.synchronize()).unwrap();
    }
}
