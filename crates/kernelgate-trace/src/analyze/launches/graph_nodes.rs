//! Finds the NVTX ranges that were open when nodes of CUDA graphs were created, by stream capture
//! or by an API call. Instantiating a graph clones its nodes; a cloned node has the ranges of the
//! node from which it was cloned.

use hashbrown::HashMap;

use crate::analyze::ranges::paths::{RangePathId, RangePathTree};
use crate::analyze::ranges::range_sweep;
use crate::model::Trace;
use crate::model::gpu::CudaGraphNodeWithRanges;
use crate::model::interned_names::InternedNameId;
use crate::model::packed_columns::BitPackedColumn;

/// Returns the CUDA graph nodes of a trace that were created inside NVTX ranges, whether the
/// recorder or the trace's creation events say so.
pub fn graph_nodes_created_inside_ranges(trace: &Trace) -> Vec<CudaGraphNodeWithRanges> {
    let events = &trace.node_events;
    let time = |event: u32| events.time_ns[event as usize];
    let mut around: Vec<Vec<InternedNameId>> = vec![Vec::new(); events.time_ns.len()];
    let created = |event: u32| events.cloned_from_node_id[event as usize] == 0;
    range_sweep::visit_rows_with_enclosing_ranges(
        trace,
        (&events.thread_index, created),
        |event| (time(event), time(event)),
        |event, ranges| {
            let names = ranges.iter().map(|&range| trace.ranges.range_name[range as usize]);
            around[event as usize] = names.collect();
        },
    );
    graph_nodes_by_ranges_around_creation(trace, around)
}

/// Returns the graph nodes inside ranges from the names of the ranges around each creation event,
/// the outermost first.
pub(crate) fn graph_nodes_by_ranges_around_creation(
    trace: &Trace,
    mut around: Vec<Vec<InternedNameId>>,
) -> Vec<CudaGraphNodeWithRanges> {
    let events = &trace.node_events;
    let time = |event: u32| events.time_ns[event as usize];
    let mut order: Vec<u32> = (0u32..).take(around.len()).collect();
    order.sort_by_key(|&event| time(event));
    let mut nodes = trace.graph_nodes.clone();
    let mut known: HashMap<(u32, u64), usize> = (0..)
        .zip(&nodes)
        .map(|(index, node)| ((node.process_index, node.graph_node_id), index))
        .collect();
    for event in order {
        let row = event as usize;
        let process = trace.threads[events.thread_index[row] as usize].process_index;
        let ranges = match known.get(&(process, events.cloned_from_node_id[row])) {
            Some(&original) => nodes[original].ranges_open_at_creation.clone(),
            None => std::mem::take(&mut around[row]),
        };
        if !ranges.is_empty() {
            let id = events.node_id[row];
            known.insert((process, id), nodes.len());
            nodes.push(CudaGraphNodeWithRanges {
                process_index: process,
                graph_node_id: id,
                ranges_open_at_creation: ranges,
            });
        }
    }
    nodes
}

/// Returns the range path of each kernel: the path of its launch, followed by the ranges in which
/// its graph node was created. The result is empty if no kernel has a graph node that was created
/// in a range.
pub(crate) fn launch_paths_extended_by_graph_node_ranges(
    trace: &Trace,
    nodes: &[CudaGraphNodeWithRanges],
    launched_in: &BitPackedColumn<RangePathId>,
    paths: &mut RangePathTree,
) -> BitPackedColumn<RangePathId> {
    if nodes.is_empty() || trace.kernels.graph_node.has_no_row() {
        return BitPackedColumn::default();
    }
    let ranges: HashMap<(u32, u64), &[InternedNameId]> = nodes
        .iter()
        .map(|node| ((node.process_index, node.graph_node_id), &node.ranges_open_at_creation[..]))
        .collect();
    let kernels = trace
        .kernels
        .graph_node
        .iter_decoded_rows()
        .zip(trace.kernels.on_gpu.place.iter_decoded_rows());
    // Kernels have the smallest operation ids, so row and operation id of a kernel are equal.
    let inside =
        kernels.zip(launched_in.iter_decoded_rows()).map(|((node, place), launched_in)| {
            let ranges = ranges
                .get(&(trace.process_index_of_place(place), node))
                .copied()
                .unwrap_or_default();
            ranges
                .iter()
                .fold(launched_in, |path, &name| paths.path_of_name_inside_parent(path, name))
        });
    inside.collect()
}
