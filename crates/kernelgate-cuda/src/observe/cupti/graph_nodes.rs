//! Ranges that were open when a node of a graph was created, which CUPTI reports at that moment:
//! while a stream is captured, or a graph is built. A graph is instantiated by cloning its nodes,
//! maybe much later; a clone has the ranges of its original.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex, PoisonError};

use cudarc::cupti::sys;

use super::api::{CuptiApi, cupti_api};
use crate::BackendError;
use crate::observe::range::{self, OpenRanges};

const RESOURCE_CALLBACK_DOMAIN: u32 = sys::CUpti_CallbackDomain::CUPTI_CB_DOMAIN_RESOURCE as u32;
const GRAPH_NODE_CREATED: u32 =
    sys::CUpti_CallbackIdResource::CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED as u32;
const GRAPH_NODE_CLONED: u32 =
    sys::CUpti_CallbackIdResource::CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED as u32;

/// Ranges of nodes by node id; nodes that were created outside of all ranges are absent.
static OPEN_RANGES_BY_NODE: LazyLock<Mutex<HashMap<u64, OpenRanges>>> =
    LazyLock::new(Mutex::default);

/// Subscription to CUPTI's events of nodes, until this value is dropped.
pub struct CuptiSubscription(sys::CUpti_SubscriberHandle);

// SAFETY: the CUPTI handle is used only to unsubscribe, which any thread may do.
unsafe impl Send for CuptiSubscription {}

/// Begins. CUPTI allows one subscriber in a process.
///
/// # Errors
/// Fails if there is one already, or CUPTI refuses.
pub fn subscribe_to_cupti(api: &CuptiApi) -> Result<CuptiSubscription, BackendError> {
    let mut handle = std::ptr::null_mut();
    // SAFETY: the address is valid; the callback lives as long as the process.
    let status =
        unsafe { (api.subscribe)(&raw mut handle, on_cupti_callback, std::ptr::null_mut()) };
    api.check(status, "begin")?;
    let subscription = CuptiSubscription(handle);
    for event in [GRAPH_NODE_CREATED, GRAPH_NODE_CLONED] {
        // SAFETY: the handle belongs to this subscription.
        let status = unsafe { (api.enable_callback)(1, handle, RESOURCE_CALLBACK_DOMAIN, event) };
        api.check(status, "subscribe to events of graphs")?;
    }
    Ok(subscription)
}

impl Drop for CuptiSubscription {
    fn drop(&mut self) {
        // SAFETY: the handle belongs to a subscription that has not ended.
        let _ = cupti_api().map(|api| unsafe { (api.unsubscribe)(self.0) });
        with_open_ranges_by_node(|nodes| nodes.clear());
    }
}

/// The named ranges that were open when a graph node was created, or when the node that it was
/// cloned from was.
pub fn ranges_of(node: u64) -> Option<OpenRanges> {
    with_open_ranges_by_node(|nodes| nodes.get(&node).cloned())
}

fn with_open_ranges_by_node<T>(with: impl FnOnce(&mut HashMap<u64, OpenRanges>) -> T) -> T {
    with(&mut OPEN_RANGES_BY_NODE.lock().unwrap_or_else(PoisonError::into_inner))
}

extern "C" fn on_cupti_callback(_: *mut c_void, domain: u32, event: u32, data: *const c_void) {
    let (Some(api), RESOURCE_CALLBACK_DOMAIN, false) = (cupti_api(), domain, data.is_null()) else {
        return;
    };
    // SAFETY: an event of that domain has this data, and one of a graph's node this descriptor.
    let graph = unsafe {
        let resource = &*data.cast::<sys::CUpti_ResourceData>();
        resource.resourceDescriptor.cast::<CuptiGraphData>().as_ref()
    };
    let Some(graph) = graph else { return };
    let id = |node: *mut c_void| {
        let mut id = 0;
        // SAFETY: the node is alive during the event, and the address valid.
        let found = unsafe { (api.graph_node_id)(node, &raw mut id) } == 0;
        found.then_some(id)
    };
    let Some(node) = id(graph.node) else { return };
    match event {
        GRAPH_NODE_CREATED => record_created_node(node, range::open_ranges()),
        GRAPH_NODE_CLONED => {
            if let Some(original) = id(graph.original_node) {
                record_cloned_node(node, original);
            }
        }
        _ => {}
    }
}

fn record_created_node(node: u64, open: OpenRanges) {
    if !open.is_empty() {
        with_open_ranges_by_node(|nodes| nodes.insert(node, open));
    }
}

fn record_cloned_node(node: u64, original: u64) {
    with_open_ranges_by_node(|nodes| {
        if let Some(ranges) = nodes.get(&original).cloned() {
            nodes.insert(node, ranges);
        }
    });
}

/// `CUpti_GraphData` up to the node that was cloned.
#[repr(C)]
struct CuptiGraphData {
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
    fn clones_of_a_graph_keep_the_ranges_of_the_original() {
        let (first, exec, again) = (u64::MAX, u64::MAX - 1, u64::MAX - 2);
        record_created_node(first, vec!["step".into(), "layer".into()]);
        record_created_node(u64::MAX - 3, OpenRanges::new());
        record_cloned_node(exec, first);
        record_cloned_node(again, exec);
        record_cloned_node(u64::MAX - 4, u64::MAX - 3);
        for node in [first, exec, again] {
            assert_eq!(ranges_of(node).unwrap(), ["step".into(), "layer".into()]);
        }
        assert_eq!((ranges_of(u64::MAX - 3), ranges_of(u64::MAX - 4)), (None, None));
    }

    #[test]
    fn the_nvtx_event_descriptor_has_the_layout_of_the_header() {
        assert_eq!(offset_of!(CuptiGraphData, node), offset_of!(sys::CUpti_GraphData, node));
        let original = offset_of!(sys::CUpti_GraphData, originalNode);
        assert_eq!(offset_of!(CuptiGraphData, original_node), original);
    }
}
