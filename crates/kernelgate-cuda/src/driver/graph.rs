//! Captured launches.

mod nodes;

use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError, sys};

use super::device::Device;
use super::driver_error::error_for_failed_action;
use crate::BackendError;
use nodes::{
    is_command_node_type, move_clears_of_range_first, nodes_from_driver_function,
    type_of_graph_node,
};

/// An executable CUDA graph with its stream: launches that are captured once and replayed together.
pub struct ExecutableCudaGraph {
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
    stream: Arc<CudaStream>,
    node_count_without_separators: usize,
    command_node_count: usize,
    /// Number of empty graph nodes that this module added between two launches, to keep them from
    /// overlapping.
    pub(super) separator_node_count: usize,
}

impl ExecutableCudaGraph {
    /// Captures the work that `enqueue` puts on the device's stream, and instantiates the work as
    /// an executable graph.
    ///
    /// # Errors
    /// Fails with the error of `enqueue`, or if some of its work cannot be captured into a graph.
    pub fn capture_from_device_stream(
        device: &Device,
        enqueue: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<ExecutableCudaGraph, BackendError> {
        Self::capture_from_stream(device.stream(), enqueue)
    }

    /// Captures the work that `enqueue` puts on `stream`, and instantiates the graph, which is
    /// later launched on the same stream.
    pub fn capture_from_stream(
        stream: &Arc<CudaStream>,
        enqueue: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<ExecutableCudaGraph, BackendError> {
        StreamInCaptureMode::begin_capture_on_stream(stream)?
            .end_capture_and_instantiate(enqueue(), 0..0)
    }

    /// Captures launches, and replaces all memory clears inside the range `cleared` by a single
    /// clear before all launches, so that no clear stands between two kernels.
    ///
    /// # Errors
    /// Fails with the error of `enqueue`, or if some of its work cannot be captured into a graph.
    pub fn capture_with_clears_moved_first(
        device: &Device,
        cleared: Range<u64>,
        enqueue: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<Self, BackendError> {
        StreamInCaptureMode::begin_capture_on_stream(device.stream())?
            .end_capture_and_instantiate(enqueue(), cleared)
    }

    /// Captures `times` launches of the same work as one executable graph. In the graph, each
    /// launch begins after the previous launch has ended.
    ///
    /// On a stream, a kernel with programmatic dependent launch may overlap the previous kernel. If
    /// a launch has kernels with programmatic dependent launch, an empty node between two launches
    /// keeps the next launch's first kernel from overlapping the last kernel.
    pub fn capture_repeated_launches(
        device: &Device,
        times: u64,
        mut launch: impl FnMut() -> Result<(), BackendError>,
    ) -> Result<ExecutableCudaGraph, BackendError> {
        let overlapping = times > 1 && {
            let pair =
                Self::capture_from_device_stream(device, || launch().and_then(|()| launch()))?;
            pair.programmatic_edge_count()? > 0
        };
        let stream = device.stream();
        let mut separators = 0;
        let mut graph = Self::capture_from_device_stream(device, || {
            for iteration in 0..times {
                if iteration > 0 && overlapping {
                    add_empty_node_after_all_work(stream)?;
                    separators += 1;
                }
                launch()?;
            }
            Ok(())
        })?;
        graph.separator_node_count = separators;
        Ok(graph)
    }

    /// Instantiates a captured graph, after replacing the memory clears inside a range by a single
    /// clear before all launches.
    pub(super) fn instantiate_with_clears_first(
        &mut self,
        cleared: &Range<u64>,
    ) -> Result<(), BackendError> {
        self.instantiate_in_driver(cleared)
            .map_err(|error| error_for_failed_action("make a graph", &error))
    }

    fn instantiate_in_driver(&mut self, cleared: &Range<u64>) -> Result<(), DriverError> {
        if !cleared.is_empty() {
            move_clears_of_range_first(self.graph, cleared, self.stream.context().cu_ctx())?;
        }
        // SAFETY: the graph is alive here and below, and the pointers are valid.
        unsafe { sys::cuGraphInstantiateWithFlags(&raw mut self.executable, self.graph, 0) }
            .result()?;
        // SAFETY: the graph is alive, and the array has room for all nodes.
        let all = nodes_from_driver_function(|nodes, count| unsafe {
            sys::cuGraphGetNodes(self.graph, nodes, count)
        })?;
        let kinds =
            all.iter().map(|node| type_of_graph_node(*node)).collect::<Result<Vec<_>, _>>()?;
        self.node_count_without_separators = all.len();
        self.command_node_count =
            kinds.into_iter().filter(|kind| is_command_node_type(*kind)).count();
        // SAFETY: the executable graph and its stream are alive.
        unsafe { sys::cuGraphUpload(self.executable, self.stream.cu_stream()) }.result()
    }

    /// Number of nodes in the graph without the empty nodes between launches: commands, and nodes
    /// that only order commands.
    pub const fn node_count_without_separators(&self) -> usize {
        self.node_count_without_separators - self.separator_node_count
    }

    /// Number of commands in the graph: kernels, copies, fills, host functions and nested graphs.
    pub const fn command_node_count(&self) -> usize {
        self.command_node_count
    }

    /// Number of nodes without a dependency; more than one if a launch begins on several streams.
    pub fn root_node_count(&self) -> Result<usize, BackendError> {
        let mut count = 0;
        // SAFETY: the graph is alive; with a null array, the call only returns the number of nodes.
        unsafe { sys::cuGraphGetRootNodes(self.graph, ptr::null_mut(), &raw mut count) }
            .result()
            .map_err(|error| error_for_failed_action("count the roots of a graph", &error))?;
        Ok(count)
    }

    /// Whether the graph has a node that allocates memory, which a timed launch must not do.
    pub fn allocates_memory(&self) -> Result<bool, BackendError> {
        graph_allocates_memory(self.graph)
    }

    /// Number of graph edges of type programmatic, over which a kernel may begin before the kernel
    /// at the other end has ended.
    pub fn programmatic_edge_count(&self) -> Result<usize, BackendError> {
        let failed = |error: DriverError| error_for_failed_action("query a graph's edges", &error);
        let (graph, mut count) = (self.graph, 0);
        let null = ptr::null_mut();
        if self.node_count_without_separators < 2 {
            return Ok(0);
        }
        // SAFETY: the graph is alive; with null arrays, the call only returns the number of edges.
        unsafe { sys::cuGraphGetEdges_v2(graph, null, null, ptr::null_mut(), &raw mut count) }
            .result()
            .map_err(failed)?;
        // If a graph has no edges, the driver returns an error for the second query.
        if count == 0 {
            return Ok(0);
        }
        let mut nodes = [vec![ptr::null_mut(); count], vec![ptr::null_mut(); count]];
        let blank = sys::CUgraphEdgeData { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] };
        let mut edges = vec![blank; count];
        let [from, to] = &mut nodes;
        // SAFETY: the graph is alive; the arrays have `count` elements each.
        unsafe {
            sys::cuGraphGetEdges_v2(
                graph,
                from.as_mut_ptr(),
                to.as_mut_ptr(),
                edges.as_mut_ptr(),
                &raw mut count,
            )
        }
        .result()
        .map_err(failed)?;
        let programmatic = sys::CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8;
        Ok(edges.iter().filter(|edge| edge.type_ == programmatic).count())
    }

    /// Enqueues the whole graph.
    pub fn launch_graph_on_stream(&self) -> Result<(), BackendError> {
        let failed = |error: DriverError| error_for_failed_action("launch a graph", &error);
        self.stream.context().bind_to_thread().map_err(failed)?;
        // SAFETY: the executable graph and the stream are alive.
        unsafe { sys::cuGraphLaunch(self.executable, self.stream.cu_stream()) }
            .result()
            .map_err(failed)
    }
}

impl Drop for ExecutableCudaGraph {
    fn drop(&mut self) {
        let _ = self.stream.context().bind_to_thread();
        // SAFETY: the graph and the executable graph are destroyed only once; a null executable
        // graph was never instantiated.
        unsafe {
            if !self.executable.is_null() {
                let _ = sys::cuGraphExecDestroy(self.executable);
            }
            let _ = sys::cuGraphDestroy(self.graph);
        }
    }
}

/// Whether a graph, or a graph nested in a node of it, has a node that allocates memory.
fn graph_allocates_memory(graph: sys::CUgraph) -> Result<bool, BackendError> {
    let failed_query =
        |error: DriverError| error_for_failed_action("query a graph's nodes", &error);
    // SAFETY: the graph is alive; the array has room for all nodes.
    let all = nodes_from_driver_function(|nodes, count| unsafe {
        sys::cuGraphGetNodes(graph, nodes, count)
    });
    for node in all.map_err(failed_query)? {
        let inside = match type_of_graph_node(node).map_err(failed_query)? {
            sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC => true,
            sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_GRAPH => {
                let mut child = ptr::null_mut();
                // SAFETY: the node has the type that the call requires, and the nested graph lives
                // as long as the node.
                unsafe { sys::cuGraphChildGraphNodeGetGraph(node, &raw mut child) }
                    .result()
                    .map_err(failed_query)?;
                graph_allocates_memory(child)?
            }
            _ => false,
        };
        if inside {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A stream in capture mode; dropping the value ends the capture, even after a panic.
pub(super) struct StreamInCaptureMode<'a> {
    stream: &'a Arc<CudaStream>,
}

impl<'a> StreamInCaptureMode<'a> {
    pub(super) fn begin_capture_on_stream(
        stream: &'a Arc<CudaStream>,
    ) -> Result<StreamInCaptureMode<'a>, BackendError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream
            .begin_capture(mode)
            .map_err(|error| error_for_failed_action("begin a capture", &error))?;
        Ok(Self { stream })
    }

    /// Ends the capture after `enqueue` has returned, and instantiates the graph with memory clears
    /// of the range moved first.
    fn end_capture_and_instantiate(
        self,
        enqueued: Result<(), BackendError>,
        cleared: Range<u64>,
    ) -> Result<ExecutableCudaGraph, BackendError> {
        let mut graph = self.end_capture_without_instantiating(enqueued)?;
        graph.instantiate_with_clears_first(&cleared)?;
        Ok(graph)
    }

    /// Ends the capture and returns the captured graph, which is not instantiated yet. The driver
    /// refuses to instantiate a graph while another stream of the thread is in capture mode.
    pub(super) fn end_capture_without_instantiating(
        self,
        enqueued: Result<(), BackendError>,
    ) -> Result<ExecutableCudaGraph, BackendError> {
        let (stream, mut graph) = (Arc::clone(self.stream), ptr::null_mut());
        // SAFETY: the stream is alive, and the pointer is valid.
        let ended = unsafe { sys::cuStreamEndCapture(stream.cu_stream(), &raw mut graph) }.result();
        std::mem::forget(self);
        let captured = enqueued.and_then(|()| {
            ended.map_err(|error| error_for_failed_action("capture the launches", &error))
        });
        if graph.is_null() {
            let none = "failed to capture the launches: the driver made none".to_owned();
            return Err(captured.err().unwrap_or(BackendError::ComputationFailed(none)));
        }
        let graph = ExecutableCudaGraph {
            graph,
            executable: ptr::null_mut(),
            stream,
            node_count_without_separators: 0,
            command_node_count: 0,
            separator_node_count: 0,
        };
        captured.map(|()| graph)
    }
}

impl Drop for StreamInCaptureMode<'_> {
    fn drop(&mut self) {
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is alive, and the pointer is valid; a graph is destroyed once.
        unsafe {
            let _ = sys::cuStreamEndCapture(self.stream.cu_stream(), &raw mut graph);
            if !graph.is_null() {
                let _ = sys::cuGraphDestroy(graph);
            }
        }
    }
}

/// Adds an empty node to a stream's capture, so that all later work of the stream begins only after
/// all its earlier work has ended.
pub(super) fn add_empty_node_after_all_work(stream: &CudaStream) -> Result<(), BackendError> {
    let failed =
        |error: DriverError| error_for_failed_action("separate the launches of a graph", &error);
    let (mut status, mut graph) = (
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
        ptr::null_mut::<sys::CUgraph_st>(),
    );
    let (mut nodes, mut edges, mut count) = (ptr::null(), ptr::null(), 0);
    // SAFETY: the stream is alive and the pointers are valid; the identifier of the capture is not
    // requested.
    unsafe {
        sys::cuStreamGetCaptureInfo_v3(
            stream.cu_stream(),
            &raw mut status,
            ptr::null_mut(),
            &raw mut graph,
            &raw mut nodes,
            &raw mut edges,
            &raw mut count,
        )
    }
    .result()
    .map_err(failed)?;
    if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE {
        return Err(BackendError::ComputationFailed(
            "a launch ended the capture that it was in".to_owned(),
        ));
    }
    let mut between = ptr::null_mut();
    // SAFETY: the graph is the one being captured, and the driver's array of `count` nodes is valid
    // until the next call on the stream.
    unsafe { sys::cuGraphAddEmptyNode(&raw mut between, graph, nodes, count) }
        .result()
        .map_err(failed)?;
    // SAFETY: the array has one node of the graph that is being captured; without edge data, the
    // edges are full dependencies.
    unsafe {
        sys::cuStreamUpdateCaptureDependencies_v2(
            stream.cu_stream(),
            &raw mut between,
            ptr::null(),
            1,
            sys::CUstreamUpdateCaptureDependencies_flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES as u32,
        )
    }
    .result()
    .map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instruments::spin_kernel::SpinKernel;
    use crate::testing::lock_first_gpu;
    use cudarc::driver::result;

    #[test]
    fn clears_inside_a_range_become_one_clear_before_all_launches() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let spin = SpinKernel::compile_and_allocate_report(&device).unwrap();
        let buffer = device.allocate(64).unwrap();
        let range = buffer.device_address()..buffer.device_address() + 16;
        let graph = ExecutableCudaGraph::capture_with_clears_moved_first(&device, range, || {
            for at in [0, 8, 32] {
                buffer.fill_byte_range(device.stream(), at..at + 4, 0)?;
                spin.enqueue_spin(1000)?;
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(
            (graph.node_count_without_separators(), graph.root_node_count().unwrap()),
            (5, 1)
        );
        buffer.fill_all_bytes(0xff).unwrap();
        graph.launch_graph_on_stream().unwrap();
        device.synchronize().unwrap();
        let mut bytes = [1; 64];
        buffer.download_first_bytes(&mut bytes).unwrap();
        let zeros: Vec<usize> = (0..64).filter(|at| bytes[*at] == 0).collect();
        assert_eq!(zeros, [0..12, 32..36].into_iter().flatten().collect::<Vec<_>>());
    }

    #[test]
    fn a_captured_graph_shows_whether_it_allocates_memory() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let spin = SpinKernel::compile_and_allocate_report(&device).unwrap();
        let stream = device.stream().cu_stream();
        let graph = ExecutableCudaGraph::capture_from_device_stream(&device, || {
            // SAFETY: the stream is alive; memory allocated in the capture is freed in the capture.
            unsafe {
                let address = result::malloc_async(stream, 64).unwrap();
                result::free_async(address, stream).unwrap();
            }
            spin.enqueue_spin(1000)
        })
        .unwrap();
        assert!(graph.allocates_memory().unwrap());
        assert!(
            !ExecutableCudaGraph::capture_from_device_stream(&device, || spin.enqueue_spin(1000))
                .unwrap()
                .allocates_memory()
                .unwrap()
        );
    }
}
