//! Captured launches.

mod nodes;

use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError, sys};

use super::device::Device;
use super::driver_error::failed;
use crate::BackendError;
use nodes::{add_clearing_node, graph_node_type, is_work_node, list_graph_nodes};

/// A CUDA graph: launches that are captured once and replayed together.
pub struct ExecutableGraph {
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
    stream: Arc<CudaStream>,
    nodes: usize,
    commands: usize,
    /// Number of empty graph nodes between launches.
    pub(super) separators: usize,
}

impl ExecutableGraph {
    /// Captures the work that `enqueue` puts on the device's stream as a graph.
    ///
    /// # Errors
    /// Fails with the error of `enqueue`, or when something in it cannot be captured.
    pub fn capture_graph(
        device: &Device,
        enqueue: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<ExecutableGraph, BackendError> {
        Self::capture_on(device.stream(), enqueue)
    }

    /// Captures work on `stream`, on which the graph is launched later.
    pub fn capture_on(
        stream: &Arc<CudaStream>,
        enqueue: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<ExecutableGraph, BackendError> {
        StreamCapture::begin(stream)?.end(enqueue(), 0..0)
    }

    /// Captures launches that clear parts of a range of device memory, each part for one launch
    /// alone: one clear before all launches takes the place of these clears, which would each stand
    /// between two kernels.
    ///
    /// # Errors
    /// Fails with the error of `enqueue`, or when something in it cannot be captured.
    pub fn capture_clearing_first(
        device: &Device,
        cleared: Range<u64>,
        enqueue: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<Self, BackendError> {
        StreamCapture::begin(device.stream())?.end(enqueue(), cleared)
    }

    /// Captures several launches of one piece of work as a graph. Each launch begins after the
    /// previous launch has ended.
    ///
    /// On a stream, a kernel launched with programmatic dependent launch (PDL) may overlap the
    /// preceding kernel. If a launch has kernels with programmatic dependent launch, an empty node
    /// between two launches keeps the next launch's first kernel from overlapping the previous
    /// launch's last kernel.
    pub fn capture_repeated(
        device: &Device,
        times: u64,
        mut launch: impl FnMut() -> Result<(), BackendError>,
    ) -> Result<ExecutableGraph, BackendError> {
        let overlapping = times > 1 && {
            let pair = Self::capture_graph(device, || launch().and_then(|()| launch()))?;
            pair.programmatic_edges()? > 0
        };
        let stream = device.stream();
        let mut separators = 0;
        let mut graph = Self::capture_graph(device, || {
            for iteration in 0..times {
                if iteration > 0 && overlapping {
                    add_full_dependency(stream)?;
                    separators += 1;
                }
                launch()?;
            }
            Ok(())
        })?;
        graph.separators = separators;
        Ok(graph)
    }

    /// Makes a captured graph executable, with a clear of a range first.
    pub(super) fn make_executable(&mut self, cleared: &Range<u64>) -> Result<(), BackendError> {
        self.instantiate(cleared).map_err(|error| failed("make a graph", &error))
    }

    fn instantiate(&mut self, cleared: &Range<u64>) -> Result<(), DriverError> {
        if !cleared.is_empty() {
            add_clearing_node(self.graph, cleared, self.stream.context().cu_ctx())?;
        }
        // SAFETY: the graph is alive here and below, and the pointers are valid.
        unsafe { sys::cuGraphInstantiateWithFlags(&raw mut self.executable, self.graph, 0) }
            .result()?;
        // SAFETY: as above; the array has room for all nodes.
        let all = list_graph_nodes(|nodes, count| unsafe {
            sys::cuGraphGetNodes(self.graph, nodes, count)
        })?;
        let kinds = all.iter().map(|node| graph_node_type(*node)).collect::<Result<Vec<_>, _>>()?;
        self.nodes = all.len();
        self.commands = kinds.into_iter().filter(|kind| is_work_node(*kind)).count();
        // SAFETY: the executable graph and the stream are alive.
        unsafe { sys::cuGraphUpload(self.executable, self.stream.cu_stream()) }.result()
    }

    /// Number of graph nodes that the launches created: their commands, and nodes that only order
    /// commands.
    pub const fn node_count(&self) -> usize {
        self.nodes - self.separators
    }

    /// Commands in the graph: kernels, copies, fills, functions of the host, graphs.
    pub const fn command_count(&self) -> usize {
        self.commands
    }

    /// Number of nodes that wait for no other node: more than one if a launch begins on several
    /// streams.
    pub fn root_count(&self) -> Result<usize, BackendError> {
        let mut count = 0;
        // SAFETY: the graph is alive; a null array requests only the number.
        unsafe { sys::cuGraphGetRootNodes(self.graph, ptr::null_mut(), &raw mut count) }
            .result()
            .map_err(|error| failed("count the roots of a graph", &error))?;
        Ok(count)
    }

    /// Returns whether the graph allocates memory, which a timed launch must not do.
    pub fn allocates(&self) -> Result<bool, BackendError> {
        allocates(self.graph)
    }

    /// Number of graph edges over which a kernel may begin before the preceding kernel has ended.
    pub fn programmatic_edges(&self) -> Result<usize, BackendError> {
        let failed = |error: DriverError| failed("query a graph's edges", &error);
        let (graph, mut count) = (self.graph, 0);
        let null = ptr::null_mut();
        if self.nodes < 2 {
            return Ok(0);
        }
        // SAFETY: the graph is alive; null arrays ask for the number only.
        unsafe { sys::cuGraphGetEdges_v2(graph, null, null, ptr::null_mut(), &raw mut count) }
            .result()
            .map_err(failed)?;
        // For a graph without edges the driver refuses the second query.
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
    pub fn launch(&self) -> Result<(), BackendError> {
        let failed = |error: DriverError| failed("launch a graph", &error);
        self.stream.context().bind_to_thread().map_err(failed)?;
        // SAFETY: the executable graph and the stream are alive.
        unsafe { sys::cuGraphLaunch(self.executable, self.stream.cu_stream()) }
            .result()
            .map_err(failed)
    }
}

impl Drop for ExecutableGraph {
    fn drop(&mut self) {
        let _ = self.stream.context().bind_to_thread();
        // SAFETY: each is destroyed once; a null executable was never made.
        unsafe {
            if !self.executable.is_null() {
                let _ = sys::cuGraphExecDestroy(self.executable);
            }
            let _ = sys::cuGraphDestroy(self.graph);
        }
    }
}

/// Returns whether a graph, or a graph nested in it, allocates memory.
fn allocates(graph: sys::CUgraph) -> Result<bool, BackendError> {
    let failed_query = |error: DriverError| failed("query a graph's nodes", &error);
    // SAFETY: the graph is alive; the array has room for all nodes.
    let all = list_graph_nodes(|nodes, count| unsafe { sys::cuGraphGetNodes(graph, nodes, count) });
    for node in all.map_err(failed_query)? {
        let inside = match graph_node_type(node).map_err(failed_query)? {
            sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC => true,
            sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_GRAPH => {
                let mut child = ptr::null_mut();
                // SAFETY: a node of that kind, whose graph lives as long as the node.
                unsafe { sys::cuGraphChildGraphNodeGetGraph(node, &raw mut child) }
                    .result()
                    .map_err(failed_query)?;
                allocates(child)?
            }
            _ => false,
        };
        if inside {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A stream in capture; dropped, by a panic for example, it is in capture no longer.
pub(super) struct StreamCapture<'a> {
    stream: &'a Arc<CudaStream>,
}

impl<'a> StreamCapture<'a> {
    pub(super) fn begin(stream: &'a Arc<CudaStream>) -> Result<StreamCapture<'a>, BackendError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).map_err(|error| failed("begin a capture", &error))?;
        Ok(Self { stream })
    }

    /// Ends the capture, after the enqueued work, and clears a range first.
    fn end(
        self,
        enqueued: Result<(), BackendError>,
        cleared: Range<u64>,
    ) -> Result<ExecutableGraph, BackendError> {
        let mut graph = self.end_capture_only(enqueued)?;
        graph.make_executable(&cleared)?;
        Ok(graph)
    }

    /// Ends the capture without using what was captured. The graph is not executable yet: making it
    /// so is refused while another stream of the thread is in capture.
    pub(super) fn end_capture_only(
        self,
        enqueued: Result<(), BackendError>,
    ) -> Result<ExecutableGraph, BackendError> {
        let (stream, mut graph) = (Arc::clone(self.stream), ptr::null_mut());
        // SAFETY: the stream is alive, and the pointer is valid.
        let ended = unsafe { sys::cuStreamEndCapture(stream.cu_stream(), &raw mut graph) }.result();
        std::mem::forget(self);
        let captured =
            enqueued.and_then(|()| ended.map_err(|error| failed("capture the launches", &error)));
        if graph.is_null() {
            let none = "failed to capture the launches: the driver made none".to_owned();
            return Err(captured.err().unwrap_or(BackendError::Launch(none)));
        }
        let graph = ExecutableGraph {
            graph,
            executable: ptr::null_mut(),
            stream,
            nodes: 0,
            commands: 0,
            separators: 0,
        };
        captured.map(|()| graph)
    }
}

impl Drop for StreamCapture<'_> {
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

/// Makes later work in a capturing stream begin only when all earlier work has ended.
pub(super) fn add_full_dependency(stream: &CudaStream) -> Result<(), BackendError> {
    let failed = |error: DriverError| failed("separate the launches of a graph", &error);
    let (mut status, mut graph) = (
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
        ptr::null_mut::<sys::CUgraph_st>(),
    );
    let (mut nodes, mut edges, mut count) = (ptr::null(), ptr::null(), 0);
    // SAFETY: the stream is alive and the pointers are valid; no identifier is asked for.
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
        return Err(BackendError::Launch("a launch ended the capture that it was in".to_owned()));
    }
    let mut between = ptr::null_mut();
    // SAFETY: the graph is the one being captured, and the driver's array of `count` nodes is valid
    // until the next call on the stream.
    unsafe { sys::cuGraphAddEmptyNode(&raw mut between, graph, nodes, count) }
        .result()
        .map_err(failed)?;
    // SAFETY: one node of the graph being captured; no edge data means full edges.
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
    fn fills_of_one_range_become_one_fill_before_all_launches() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let spin = SpinKernel::new(&device).unwrap();
        let buffer = device.allocate(64).unwrap();
        let range = buffer.address()..buffer.address() + 16;
        let graph = ExecutableGraph::capture_clearing_first(&device, range, || {
            for at in [0, 8, 32] {
                buffer.fill_range(device.stream(), at..at + 4, 0)?;
                spin.launch(1000)?;
            }
            Ok(())
        })
        .unwrap();
        assert_eq!((graph.node_count(), graph.root_count().unwrap()), (5, 1));
        buffer.fill(0xff).unwrap();
        graph.launch().unwrap();
        device.synchronize().unwrap();
        let mut bytes = [1; 64];
        buffer.download(&mut bytes).unwrap();
        let zeros: Vec<usize> = (0..64).filter(|at| bytes[*at] == 0).collect();
        assert_eq!(zeros, [0..12, 32..36].into_iter().flatten().collect::<Vec<_>>());
    }

    #[test]
    fn a_captured_graph_shows_whether_it_allocates_memory() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let spin = SpinKernel::new(&device).unwrap();
        let stream = device.stream().cu_stream();
        let graph = ExecutableGraph::capture_graph(&device, || {
            // SAFETY: the stream is alive; memory allocated in the capture is freed in the capture.
            unsafe {
                let address = result::malloc_async(stream, 64).unwrap();
                result::free_async(address, stream).unwrap();
            }
            spin.launch(1000)
        })
        .unwrap();
        assert!(graph.allocates().unwrap());
        assert!(
            !ExecutableGraph::capture_graph(&device, || spin.launch(1000))
                .unwrap()
                .allocates()
                .unwrap()
        );
    }
}
