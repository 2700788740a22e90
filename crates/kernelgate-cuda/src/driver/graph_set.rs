//! Launches on several GPUs that are captured once: one CUDA graph for each GPU, without
//! dependencies between graphs.

use super::devices::Devices;
use super::graph::{ExecutableCudaGraph, StreamInCaptureMode, add_empty_node_after_all_work};
use crate::BackendError;

/// One executable CUDA graph for each GPU of a set, replayed together.
pub struct ExecutableGraphPerGpu {
    /// The graph of each GPU, in the order of the GPUs of the set.
    graphs: Vec<ExecutableCudaGraph>,
}

impl From<ExecutableCudaGraph> for ExecutableGraphPerGpu {
    fn from(graph: ExecutableCudaGraph) -> Self {
        Self { graphs: vec![graph] }
    }
}

impl ExecutableGraphPerGpu {
    /// Captures the work that `enqueue` puts on the streams of these GPUs, as one graph for each
    /// GPU.
    ///
    /// # Errors
    /// Fails with the error of `enqueue`, or if some of its work cannot be captured, for example a
    /// wait of one GPU for an event of another.
    pub fn capture_on_all_gpus(
        devices: &Devices,
        enqueue: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<Self, BackendError> {
        if devices.device_count() == 1 {
            return ExecutableCudaGraph::capture_from_device_stream(
                devices.first_device(),
                enqueue,
            )
            .map(Self::from);
        }
        let mut captures = Vec::with_capacity(devices.device_count());
        for device in devices.iter() {
            device.make_context_current()?;
            captures.push((device, StreamInCaptureMode::begin_capture_on_stream(device.stream())?));
        }
        devices.first_device().make_context_current()?;
        let mut enqueued = enqueue();
        let mut graphs = Vec::with_capacity(captures.len());
        // The capture on every GPU is ended, even after an error.
        for (device, capture) in captures {
            let ended = device.make_context_current().and_then(|()| {
                let before = std::mem::replace(&mut enqueued, Ok(()));
                capture.end_capture_without_instantiating(before)
            });
            match ended {
                Ok(graph) => graphs.push(graph),
                Err(error) => enqueued = Err(error),
            }
        }
        devices.first_device().make_context_current()?;
        enqueued?;
        devices.for_each_with_context_current(|rank, _| {
            graphs[rank].instantiate_with_clears_first(&(0..0))
        })?;
        Ok(Self { graphs })
    }

    /// Captures `times` launches of the same work, as one graph for each GPU. On each GPU, a launch
    /// begins after the previous launch has ended, as in
    /// [`ExecutableCudaGraph::capture_repeated_launches`].
    pub fn capture_repeated_on_all_gpus(
        devices: &Devices,
        times: u64,
        mut launch: impl FnMut() -> Result<(), BackendError>,
    ) -> Result<Self, BackendError> {
        if devices.device_count() == 1 {
            return ExecutableCudaGraph::capture_repeated_launches(
                devices.first_device(),
                times,
                launch,
            )
            .map(Self::from);
        }
        let overlapping = times > 1 && {
            let pair = Self::capture_on_all_gpus(devices, || launch().and_then(|()| launch()))?;
            let edges = pair.graphs.iter().map(ExecutableCudaGraph::programmatic_edge_count);
            edges.collect::<Result<Vec<_>, _>>()?.into_iter().sum::<usize>() > 0
        };
        let mut separators = 0;
        let mut set = Self::capture_on_all_gpus(devices, || {
            for iteration in 0..times {
                if iteration > 0 && overlapping {
                    devices.for_each_with_context_current(|_, device| {
                        add_empty_node_after_all_work(device.stream())
                    })?;
                    separators += 1;
                }
                launch()?;
            }
            Ok(())
        })?;
        set.graphs.iter_mut().for_each(|graph| graph.separator_node_count = separators);
        Ok(set)
    }

    /// Largest number of graph nodes on any GPU of the set, counted as in
    /// [`ExecutableCudaGraph::node_count_without_separators`].
    pub fn max_nodes_per_gpu(&self) -> usize {
        self.graphs
            .iter()
            .map(ExecutableCudaGraph::node_count_without_separators)
            .max()
            .unwrap_or(0)
    }

    /// Number of commands in the graph of each GPU, in the order of the set.
    pub fn command_count_of_each_gpu(&self) -> Vec<usize> {
        self.graphs.iter().map(ExecutableCudaGraph::command_node_count).collect()
    }

    /// Whether the graph of any GPU has nodes that are not commands, such as event nodes.
    pub fn has_noncommand_nodes(&self) -> bool {
        self.graphs
            .iter()
            .any(|graph| graph.node_count_without_separators() > graph.command_node_count())
    }

    /// Rank of the first GPU of the set whose graph has no command.
    pub fn first_gpu_without_commands(&self) -> Option<usize> {
        self.graphs.iter().position(|graph| graph.command_node_count() == 0)
    }

    /// Largest number of graph nodes without a dependency on any GPU of the set.
    pub fn max_root_nodes_per_gpu(&self) -> Result<usize, BackendError> {
        let roots = self
            .graphs
            .iter()
            .map(ExecutableCudaGraph::root_node_count)
            .collect::<Result<Vec<_>, _>>()?;
        Ok(roots.into_iter().max().unwrap_or(0))
    }

    /// Whether the graph of any GPU has a node that allocates memory.
    pub fn any_graph_allocates_memory(&self) -> Result<bool, BackendError> {
        let allocates = self
            .graphs
            .iter()
            .map(ExecutableCudaGraph::allocates_memory)
            .collect::<Result<Vec<_>, _>>()?;
        Ok(allocates.contains(&true))
    }

    /// Enqueues the graphs of all GPUs.
    pub fn launch_graphs_on_all_gpus(&self) -> Result<(), BackendError> {
        self.graphs.iter().try_for_each(ExecutableCudaGraph::launch_graph_on_stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instruments::barrier::MultiGpuBarrier;
    use crate::instruments::spin_kernel::SpinKernel;
    use crate::testing::lock_two_gpus;

    #[test]
    fn graphs_of_several_gpus_are_captured_and_replayed_together() {
        let Some((devices, _alone)) = lock_two_gpus() else { return };
        let mut spins = Vec::new();
        devices
            .for_each_with_context_current(|_, device| {
                spins.push(SpinKernel::compile_and_allocate_report(device)?);
                Ok(())
            })
            .unwrap();
        let launch = |ranks: usize| {
            devices
                .first_devices(ranks)
                .for_each_with_context_current(|rank, _| spins[rank].enqueue_spin(1_000))
        };
        let both =
            ExecutableGraphPerGpu::capture_repeated_on_all_gpus(&devices, 3, || launch(2)).unwrap();
        assert_eq!(
            (
                both.max_nodes_per_gpu(),
                both.first_gpu_without_commands(),
                both.max_root_nodes_per_gpu().unwrap()
            ),
            (3, None, 1)
        );
        assert_eq!(both.command_count_of_each_gpu(), [3, 3]);
        both.launch_graphs_on_all_gpus().unwrap();
        let one = ExecutableGraphPerGpu::capture_on_all_gpus(&devices, || launch(1)).unwrap();
        assert_eq!((one.max_nodes_per_gpu(), one.first_gpu_without_commands()), (1, Some(1)));
        one.launch_graphs_on_all_gpus().unwrap();
        devices.for_each_with_context_current(|_, device| device.synchronize()).unwrap();
        assert!(spins.iter().all(|spin| spin.reported_ns_of_last_spin().unwrap() >= 1_000));
        // The capture on the first GPU is ended although the capture on the second GPU fails.
        let failed = ExecutableGraphPerGpu::capture_on_all_gpus(&devices, || {
            Err(BackendError::ComputationFailed("no".to_owned()))
        });
        assert!(failed.is_err());
        launch(2).unwrap();
        let Some(mut barrier) = MultiGpuBarrier::new_if_peers_accessible(&devices).unwrap() else {
            return;
        };
        for _ in 0..3 {
            barrier.advance_barrier_epoch();
            devices
                .for_each_with_context_current(|rank, _| barrier.enqueue_kernel_of_gpu(rank, 2))
                .unwrap();
        }
        devices.for_each_with_context_current(|_, device| device.synchronize()).unwrap();
    }
}
