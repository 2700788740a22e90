//! Remembers which named ranges were open when a CUDA graph node was created, by capture or by an
//! API call; CUPTI reports the creation. Instantiating a graph clones its nodes, maybe much later;
//! a cloned node has the ranges of its original.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex, PoisonError};

use cudarc::cupti::sys;

use super::api::{CuptiFunctions, cupti_functions};
use crate::BackendError;
use crate::observe::range::{self, OpenRangeNames};

const CUPTI_RESOURCE_CALLBACK_DOMAIN: u32 =
    sys::CUpti_CallbackDomain::CUPTI_CB_DOMAIN_RESOURCE as u32;
const GRAPH_NODE_CREATED_EVENT: u32 =
    sys::CUpti_CallbackIdResource::CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED as u32;
const GRAPH_NODE_CLONED_EVENT: u32 =
    sys::CUpti_CallbackIdResource::CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED as u32;

/// Named ranges that were open when a node was created, by node id; nodes that were created outside
/// all ranges are absent.
static OPEN_RANGES_BY_NODE: LazyLock<Mutex<HashMap<u64, OpenRangeNames>>> =
    LazyLock::new(Mutex::default);

/// Subscription to CUPTI's events of created and cloned graph nodes; dropping this value ends the
/// subscription.
pub struct GraphNodeEventSubscription(sys::CUpti_SubscriberHandle);

// SAFETY: the CUPTI handle is used only to unsubscribe, which any thread may do.
unsafe impl Send for GraphNodeEventSubscription {}

/// Begins. CUPTI allows only one subscriber in a process.
///
/// # Errors
/// Fails if this process already has a CUPTI subscriber, or CUPTI refuses.
pub fn subscribe_to_graph_node_events(
    api: &CuptiFunctions,
) -> Result<GraphNodeEventSubscription, BackendError> {
    let mut handle = std::ptr::null_mut();
    // SAFETY: the address for the handle is valid; the callback function lives as long as the
    // process.
    let status = unsafe {
        (api.subscribe)(&raw mut handle, on_cupti_graph_node_event, std::ptr::null_mut())
    };
    api.check_cupti_status(status, "begin")?;
    let subscription = GraphNodeEventSubscription(handle);
    for event in [GRAPH_NODE_CREATED_EVENT, GRAPH_NODE_CLONED_EVENT] {
        // SAFETY: the handle belongs to this subscription.
        let status =
            unsafe { (api.enable_callback)(1, handle, CUPTI_RESOURCE_CALLBACK_DOMAIN, event) };
        api.check_cupti_status(status, "subscribe to events of graphs")?;
    }
    Ok(subscription)
}

impl Drop for GraphNodeEventSubscription {
    fn drop(&mut self) {
        // SAFETY: the handle belongs to a subscription that has not ended.
        let _ = cupti_functions().map(|api| unsafe { (api.unsubscribe)(self.0) });
        with_ranges_by_graph_node(|nodes| nodes.clear());
    }
}

/// Returns the named ranges that were open when a graph node, or the original of a cloned node, was
/// created.
pub fn ranges_open_when_node_was_created(node: u64) -> Option<OpenRangeNames> {
    with_ranges_by_graph_node(|nodes| nodes.get(&node).cloned())
}

fn with_ranges_by_graph_node<T>(with: impl FnOnce(&mut HashMap<u64, OpenRangeNames>) -> T) -> T {
    with(&mut OPEN_RANGES_BY_NODE.lock().unwrap_or_else(PoisonError::into_inner))
}

extern "C" fn on_cupti_graph_node_event(
    _: *mut c_void,
    domain: u32,
    event: u32,
    data: *const c_void,
) {
    let (Some(api), CUPTI_RESOURCE_CALLBACK_DOMAIN, false) =
        (cupti_functions(), domain, data.is_null())
    else {
        return;
    };
    // SAFETY: an event of the resource domain has this data, and an event of a graph node has this
    // descriptor.
    let graph = unsafe {
        let resource = &*data.cast::<sys::CUpti_ResourceData>();
        resource.resourceDescriptor.cast::<CuptiGraphNodeEventData>().as_ref()
    };
    let Some(graph) = graph else { return };
    let id = |node: *mut c_void| {
        let mut id = 0;
        // SAFETY: the node is alive during the event, and the address for the id is valid.
        let found = unsafe { (api.get_graph_node_id)(node, &raw mut id) } == 0;
        found.then_some(id)
    };
    let Some(node) = id(graph.node) else { return };
    match event {
        GRAPH_NODE_CREATED_EVENT => {
            record_ranges_of_created_graph_node(node, range::names_of_open_ranges_on_this_thread())
        }
        GRAPH_NODE_CLONED_EVENT => {
            if let Some(original) = id(graph.original_node) {
                copy_ranges_to_cloned_graph_node(node, original);
            }
        }
        _ => {}
    }
}

fn record_ranges_of_created_graph_node(node: u64, open: OpenRangeNames) {
    if !open.is_empty() {
        with_ranges_by_graph_node(|nodes| nodes.insert(node, open));
    }
}

fn copy_ranges_to_cloned_graph_node(node: u64, original: u64) {
    with_ranges_by_graph_node(|nodes| {
        if let Some(ranges) = nodes.get(&original).cloned() {
            nodes.insert(node, ranges);
        }
    });
}

/// First fields of `CUpti_GraphData`, up to the node that was cloned.
#[repr(C)]
struct CuptiGraphNodeEventData {
    graph: *mut c_void,
    original_graph: *mut c_void,
    node: *mut c_void,
    original_node: *mut c_void,
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn cloned_graph_nodes_keep_the_ranges_of_their_original() {
        let (first, exec, again) = (u64::MAX, u64::MAX - 1, u64::MAX - 2);
        record_ranges_of_created_graph_node(first, vec!["step".into(), "layer".into()]);
        record_ranges_of_created_graph_node(u64::MAX - 3, OpenRangeNames::new());
        copy_ranges_to_cloned_graph_node(exec, first);
        copy_ranges_to_cloned_graph_node(again, exec);
        copy_ranges_to_cloned_graph_node(u64::MAX - 4, u64::MAX - 3);
        for node in [first, exec, again] {
            assert_eq!(
                ranges_open_when_node_was_created(node).unwrap(),
                ["step".into(), "layer".into()]
            );
        }
        assert_eq!(
            (
                ranges_open_when_node_was_created(u64::MAX - 3),
                ranges_open_when_node_was_created(u64::MAX - 4)
            ),
            (None, None)
        );
    }

    #[test]
    fn the_graph_node_event_data_has_the_layout_of_cuptis_header() {
        assert_eq!(
            offset_of!(CuptiGraphNodeEventData, node),
            offset_of!(sys::CUpti_GraphData, node)
        );
        let original = offset_of!(sys::CUpti_GraphData, originalNode);
        assert_eq!(offset_of!(CuptiGraphNodeEventData, original_node), original);
    }
}
