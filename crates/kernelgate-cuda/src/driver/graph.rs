//! Captured launches.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::{CudaGraph, CudaStream, DriverError, sys};

use super::device::Device;
use super::status::failed;
use crate::BackendError;

/// Launches captured once, replayed as one.
pub struct Graph {
    graph: CudaGraph,
    nodes: usize,
    /// Nodes between launches, which do nothing.
    separators: usize,
}

impl Graph {
    /// Captures what `enqueue` puts on the device's stream.
    ///
    /// # Errors
    /// What `enqueue` returns, or when something in it cannot be captured.
    pub fn capture(
        device: &Device,
        enqueue: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<Self, BackendError> {
        Self::capture_on(device.stream(), enqueue)
    }

    /// The same of another stream, on which the graph is then launched.
    ///
    /// # Errors
    /// As [`Self::capture`].
    pub fn capture_on(
        stream: &Arc<CudaStream>,
        enqueue: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<Self, BackendError> {
        Capture::begin(stream)?.end(enqueue())
    }

    /// Captures so many launches of the same, none of which begins before the one before it has
    /// ended.
    ///
    /// On a stream, a kernel that is launched with programmatic dependent launch (PDL) may overlap
    /// the kernel before it. Where a launch has such kernels, an empty node between one launch and
    /// the next keeps the first of them from overlapping the last of the launch before.
    ///
    /// # Errors
    /// As [`Self::capture`].
    pub fn capture_repeated(
        device: &Device,
        times: u64,
        mut launch: impl FnMut() -> Result<(), BackendError>,
    ) -> Result<Self, BackendError> {
        let overlapping = times > 1 && {
            let pair = Self::capture(device, || launch().and_then(|()| launch()))?;
            pair.programmatic_edges()? > 0
        };
        let stream = device.stream();
        let mut separators = 0;
        let graph = Self::capture(device, || {
            for iteration in 0..times {
                if iteration > 0 && overlapping {
                    full_edge(stream)?;
                    separators += 1;
                }
                launch()?;
            }
            Ok(())
        })?;
        Ok(Self { separators, ..graph })
    }

    /// Commands in it: kernels, copies, fills.
    pub const fn nodes(&self) -> usize {
        self.nodes - self.separators
    }

    /// Nodes that wait for no other node: more than one where a launch begins on several streams.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn roots(&self) -> Result<usize, BackendError> {
        let mut count = 0;
        // SAFETY: the graph is alive; a null array requests only the number.
        unsafe { sys::cuGraphGetRootNodes(self.graph.cu_graph(), ptr::null_mut(), &raw mut count) }
            .result()
            .map_err(|error| failed("count the roots of a graph", &error))?;
        Ok(count)
    }

    /// Whether memory is allocated in it, which a launch should not do.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn allocates(&self) -> Result<bool, BackendError> {
        allocates(self.graph.cu_graph())
    }

    /// Edges over which a kernel may begin before the one that it depends on has ended.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn programmatic_edges(&self) -> Result<usize, BackendError> {
        let failed = |error: DriverError| failed("tell a graph's edges", &error);
        let (graph, mut count) = (self.graph.cu_graph(), 0);
        let null = ptr::null_mut();
        if self.nodes < 2 {
            return Ok(0);
        }
        // SAFETY: the graph is alive; null arrays ask for the number only.
        unsafe { sys::cuGraphGetEdges_v2(graph, null, null, ptr::null_mut(), &raw mut count) }
            .result()
            .map_err(failed)?;
        // The driver refuses to tell none of them.
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

    /// Enqueues all of it.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn launch(&self) -> Result<(), BackendError> {
        self.graph.launch().map_err(|error| failed("launch a graph", &error))
    }
}

/// Whether a graph, or a graph inside of it, allocates memory.
///
/// # Errors
/// When the driver refuses.
fn allocates(graph: sys::CUgraph) -> Result<bool, BackendError> {
    let told = |error: DriverError| failed("tell a graph's nodes", &error);
    let mut count = 0;
    // SAFETY: the graph lives; a null array asks for the number only.
    unsafe { sys::cuGraphGetNodes(graph, ptr::null_mut(), &raw mut count) }
        .result()
        .map_err(told)?;
    let mut all = vec![ptr::null_mut(); count];
    if count > 0 {
        // SAFETY: the graph lives; the array has `count` elements.
        unsafe { sys::cuGraphGetNodes(graph, all.as_mut_ptr(), &raw mut count) }
            .result()
            .map_err(told)?;
    }
    for node in all {
        let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
        // SAFETY: a node of that graph; the pointer is valid.
        unsafe { sys::cuGraphNodeGetType(node, &raw mut kind) }
            .result()
            .map_err(|error| failed("tell the kind of a graph's node", &error))?;
        let inside = match kind {
            sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC => true,
            sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_GRAPH => {
                let mut child = ptr::null_mut();
                // SAFETY: a node of that kind, whose graph lives as long as the node.
                unsafe { sys::cuGraphChildGraphNodeGetGraph(node, &raw mut child) }
                    .result()
                    .map_err(told)?;
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
struct Capture<'a> {
    stream: &'a Arc<CudaStream>,
}

impl<'a> Capture<'a> {
    fn begin(stream: &'a Arc<CudaStream>) -> Result<Self, BackendError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).map_err(|error| failed("begin a capture", &error))?;
        Ok(Self { stream })
    }

    /// Ends it, after what was enqueued.
    fn end(self, enqueued: Result<(), BackendError>) -> Result<Graph, BackendError> {
        let captured = self.stream.end_capture(sys::CUgraphInstantiate_flags(0));
        std::mem::forget(self);
        enqueued?;
        let graph = captured.map_err(|error| failed("capture the launches", &error))?;
        let graph = graph.ok_or_else(|| {
            BackendError::Launch("failed to capture the launches: the driver made none".to_owned())
        })?;
        let mut nodes = 0;
        // SAFETY: the graph is alive; a null array asks for the number only.
        unsafe { sys::cuGraphGetNodes(graph.cu_graph(), ptr::null_mut(), &raw mut nodes) }
            .result()
            .map_err(|error| failed("count a graph's nodes", &error))?;
        graph.upload().map_err(|error| failed("upload a graph", &error))?;
        Ok(Graph { graph, nodes, separators: 0 })
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        let _ = self.stream.end_capture(sys::CUgraphInstantiate_flags(0));
    }
}

/// Lets what comes in a capturing stream begin only when all before it has ended.
fn full_edge(stream: &CudaStream) -> Result<(), BackendError> {
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
    use crate::instruments::spin::Spin;
    use crate::testing::gpu;
    use cudarc::driver::result;

    #[test]
    fn a_graph_shows_whether_it_allocates() {
        let Some((device, _alone)) = gpu() else { return };
        let spin = Spin::new(&device).unwrap();
        let stream = device.stream().cu_stream();
        let graph = Graph::capture(&device, || {
            // SAFETY: the stream lives; what is allocated in the capture is freed in it.
            unsafe {
                let address = result::malloc_async(stream, 64).unwrap();
                result::free_async(address, stream).unwrap();
            }
            spin.launch(1000)
        })
        .unwrap();
        assert!(graph.allocates().unwrap());
        assert!(!Graph::capture(&device, || spin.launch(1000)).unwrap().allocates().unwrap());
    }
}
