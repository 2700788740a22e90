//! Reads and changes the nodes of a captured CUDA graph before the graph is instantiated.

use std::ops::Range;
use std::ptr;

use cudarc::driver::{DriverError, sys};

/// Calls a driver function twice, first for the number of nodes and then for the nodes, and returns
/// the nodes.
pub fn nodes_from_driver_function(
    list: impl Fn(*mut sys::CUgraphNode, *mut usize) -> sys::CUresult,
) -> Result<Vec<sys::CUgraphNode>, DriverError> {
    let mut count = 0;
    list(ptr::null_mut(), &raw mut count).result()?;
    let mut nodes = vec![ptr::null_mut(); count];
    if count > 0 {
        list(nodes.as_mut_ptr(), &raw mut count).result()?;
    }
    Ok(nodes)
}

pub fn type_of_graph_node(node: sys::CUgraphNode) -> Result<sys::CUgraphNodeType, DriverError> {
    let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
    // SAFETY: the node belongs to a graph that is alive, and the pointer is valid.
    unsafe { sys::cuGraphNodeGetType(node, &raw mut kind) }.result()?;
    Ok(kind)
}

/// Whether a graph node of this type is a command; other nodes only order commands. Empty nodes and
/// nodes that record or wait for an event are not commands.
pub const fn is_command_node_type(kind: sys::CUgraphNodeType) -> bool {
    use sys::CUgraphNodeType as Type;
    !matches!(
        kind,
        Type::CU_GRAPH_NODE_TYPE_EMPTY
            | Type::CU_GRAPH_NODE_TYPE_EVENT_RECORD
            | Type::CU_GRAPH_NODE_TYPE_WAIT_EVENT
    )
}

/// The range of addresses that a graph node sets to 0; `None` unless the node clears one contiguous
/// range.
fn range_cleared_by_node(node: sys::CUgraphNode) -> Result<Option<Range<u64>>, DriverError> {
    if type_of_graph_node(node)? != sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET {
        return Ok(None);
    }
    let mut set = EMPTY_MEMSET_PARAMETERS;
    // SAFETY: the node is a memset node, and the pointer is valid.
    unsafe { sys::cuGraphMemsetNodeGetParams(node, &raw mut set) }.result()?;
    let bytes = (set.width * set.elementSize as usize) as u64;
    Ok((set.value == 0 && set.height == 1).then(|| set.dst..set.dst + bytes))
}

const EMPTY_MEMSET_PARAMETERS: sys::CUDA_MEMSET_NODE_PARAMS = sys::CUDA_MEMSET_NODE_PARAMS {
    dst: 0,
    pitch: 0,
    value: 0,
    elementSize: 1,
    width: 0,
    height: 1,
};

/// Removes all nodes of a graph that clear memory inside a range, and adds one node that clears
/// this memory before all other nodes.
pub fn move_clears_of_range_first(
    graph: sys::CUgraph,
    range: &Range<u64>,
    context: sys::CUcontext,
) -> Result<(), DriverError> {
    // SAFETY: the graph is alive here and below; arrays have room for all listed nodes.
    let all = nodes_from_driver_function(|nodes, count| unsafe {
        sys::cuGraphGetNodes(graph, nodes, count)
    })?;
    let mut cleared = range.end..range.start;
    for node in all {
        let Some(bytes) = range_cleared_by_node(node)? else { continue };
        if bytes.start < range.start || bytes.end > range.end {
            continue;
        }
        // SAFETY: the node belongs to the graph.
        let before = nodes_from_driver_function(|nodes, count| unsafe {
            sys::cuGraphNodeGetDependencies(node, nodes, count)
        })?;
        // SAFETY: as above.
        let after = nodes_from_driver_function(|nodes, count| unsafe {
            sys::cuGraphNodeGetDependentNodes(node, nodes, count)
        })?;
        // SAFETY: the graph node is not used after its destruction.
        unsafe { sys::cuGraphDestroyNode(node) }.result()?;
        for (from, to) in before.iter().flat_map(|from| after.iter().map(move |to| (from, to))) {
            // SAFETY: both nodes belong to the graph.
            unsafe { sys::cuGraphAddDependencies(graph, from, to, 1) }.result()?;
        }
        cleared = cleared.start.min(bytes.start)..cleared.end.max(bytes.end);
    }
    if cleared.is_empty() {
        return Ok(());
    }
    // SAFETY: as above.
    let roots = nodes_from_driver_function(|nodes, count| unsafe {
        sys::cuGraphGetRootNodes(graph, nodes, count)
    })?;
    let width = (cleared.end - cleared.start) as usize;
    let set = sys::CUDA_MEMSET_NODE_PARAMS { dst: cleared.start, width, ..EMPTY_MEMSET_PARAMETERS };
    let mut first = ptr::null_mut();
    // SAFETY: the pointers are valid, the context is alive, and the cleared bytes lie between
    // ranges that the graph clears anyway.
    unsafe {
        sys::cuGraphAddMemsetNode(&raw mut first, graph, ptr::null(), 0, &raw const set, context)
    }
    .result()?;
    roots.iter().try_for_each(|root| {
        // SAFETY: both are nodes of the graph.
        unsafe { sys::cuGraphAddDependencies(graph, &raw const first, root, 1) }.result()
    })
}
