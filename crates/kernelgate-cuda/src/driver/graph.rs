//! Captured launches.

use cudarc::driver::{CudaGraph, sys};

use super::device::Device;
use super::status::failed;
use crate::BackendError;

/// Launches captured once, replayed as one.
pub struct Graph {
    graph: CudaGraph,
    nodes: usize,
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
        let stream = device.stream();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).map_err(|error| failed("begin a capture", &error))?;
        let enqueued = enqueue();
        let captured = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        enqueued?;
        let graph = captured.map_err(|error| failed("capture the launches", &error))?;
        let graph = graph.ok_or_else(|| {
            BackendError::Launch("failed to capture the launches: there were none".to_owned())
        })?;
        let mut nodes = 0;
        // SAFETY: the graph is alive; a null array asks for the number only.
        unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &raw mut nodes) }
            .result()
            .map_err(|error| failed("count a graph's nodes", &error))?;
        graph.upload().map_err(|error| failed("upload a graph", &error))?;
        Ok(Self { graph, nodes })
    }

    /// Commands in it: kernels, copies, fills.
    pub const fn nodes(&self) -> usize {
        self.nodes
    }

    /// Enqueues all of it.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn launch(&self) -> Result<(), BackendError> {
        self.graph.launch().map_err(|error| failed("launch a graph", &error))
    }
}
