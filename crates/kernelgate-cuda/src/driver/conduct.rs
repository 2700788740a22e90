//! What a launch of other code did to the thread and the device besides enqueueing: it may leave no
//! capture open, change no current context, and allocate nothing.

use std::ptr;

use cudarc::driver::{DriverError, sys};

use super::device::Device;
use super::status::failed;
use crate::BackendError;

/// Launches, and looks at what was changed; what can be put back is.
///
/// # Errors
/// What `launch` returns; [`BackendError::Launch`] where it changed the current context or left a
/// capture of the stream open.
pub fn watched(
    device: &Device,
    launch: impl FnOnce() -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    bind(device)?;
    let (before, capturing) = (current()?, capturing(device.stream().cu_stream())?);
    let launched = launch();
    let after = current()?;
    // SAFETY: the context was current before.
    unsafe { sys::cuCtxSetCurrent(before) }
        .result()
        .map_err(|error| failed("put the current context back", &error))?;
    if !capturing && self::capturing(device.stream().cu_stream())? {
        abandon_capture(device.stream().cu_stream());
        let open = "it leaves a capture of the stream open".to_owned();
        return Err(BackendError::Launch(open));
    }
    launched?;
    if after != before {
        let changed = "it changes the CUDA context that is current on the thread".to_owned();
        return Err(BackendError::Launch(changed));
    }
    Ok(())
}

/// Whether memory is allocated among the commands that a launch leaves in a capture, also in graphs
/// inside it.
///
/// # Errors
/// When the driver refuses.
pub(super) fn allocates(graph: sys::CUgraph) -> Result<bool, BackendError> {
    let told = |error: DriverError| failed("tell a graph's nodes", &error);
    let mut count = 0;
    // SAFETY: the graph lives; a null array asks for the number only.
    unsafe { sys::cuGraphGetNodes(graph, ptr::null_mut(), &raw mut count) }
        .result()
        .map_err(told)?;
    let mut all = vec![ptr::null_mut(); count];
    if count > 0 {
        // SAFETY: the graph lives; the array has as many elements as are told.
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

pub(super) fn bind(device: &Device) -> Result<(), BackendError> {
    device.context().bind_to_thread().map_err(|error| failed("make the context current", &error))
}

pub(super) fn current() -> Result<sys::CUcontext, BackendError> {
    let mut context = ptr::null_mut();
    // SAFETY: the pointer is valid.
    unsafe { sys::cuCtxGetCurrent(&raw mut context) }
        .result()
        .map_err(|error| failed("tell the current context", &error))?;
    Ok(context)
}

/// Ends a capture of a stream that lives, if there is one, and throws away what was captured.
pub(crate) fn abandon_capture(stream: sys::CUstream) {
    let mut graph = ptr::null_mut();
    // SAFETY: the stream lives, and the pointer is valid; the graph is nobody's.
    unsafe {
        let _ = sys::cuStreamEndCapture(stream, &raw mut graph);
        if !graph.is_null() {
            let _ = sys::cuGraphDestroy(graph);
        }
    }
}

/// Whether a stream that lives is in capture.
pub(crate) fn capturing(stream: sys::CUstream) -> Result<bool, BackendError> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream lives and the pointer is valid.
    unsafe { sys::cuStreamIsCapturing(stream, &raw mut status) }
        .result()
        .map_err(|error| failed("ask whether the stream is in capture", &error))?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::graph::Graph;
    use crate::instruments::spin::Spin;
    use crate::testing::gpu;
    use cudarc::driver::result;

    #[test]
    fn what_a_launch_leaves_behind_is_an_error_and_put_right() {
        let Some((device, _alone)) = gpu() else { return };
        let spin = Spin::new(&device).unwrap();
        watched(&device, || spin.launch(1000)).unwrap();
        let stream = device.stream().cu_stream();
        let opened = watched(&device, || {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            // SAFETY: the stream lives.
            unsafe { sys::cuStreamBeginCapture_v2(stream, mode) }.result().unwrap();
            Ok(())
        });
        assert!(opened.unwrap_err().to_string().contains("leaves a capture of the stream open"));
        assert!(!capturing(stream).unwrap());
        let changed = watched(&device, || {
            // SAFETY: no context is a context that may be current.
            unsafe { sys::cuCtxSetCurrent(ptr::null_mut()) }.result().unwrap();
            Ok(())
        });
        assert!(changed.unwrap_err().to_string().contains("changes the CUDA context"));
        // The device is as it was.
        watched(&device, || spin.launch(1000)).unwrap();
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
