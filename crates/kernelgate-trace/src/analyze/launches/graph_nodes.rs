//! Which ranges were open when the nodes of CUDA graphs were created: while a stream was captured,
//! or a graph built. A graph is instantiated by cloning its nodes; a clone has the ranges of what
//! it was cloned from.

use hashbrown::HashMap;

use crate::analyze::ranges::paths::{RangePathId, RangePathTree};
use crate::analyze::ranges::range_sweep;
use crate::model::Trace;
use crate::model::gpu::CudaGraphNode;
use crate::model::interned_names::NameId;
use crate::model::packed_columns::PackedColumn;

/// CUDA graph nodes of a trace in memory that were created inside ranges: nodes that the recorder
/// resolved, and nodes whose creation was recorded.
pub fn all_graph_nodes(trace: &Trace) -> Vec<CudaGraphNode> {
    let events = &trace.node_events;
    let time = |event: u32| events.time[event as usize];
    let mut around: Vec<Vec<NameId>> = vec![Vec::new(); events.time.len()];
    let created = |event: u32| events.original[event as usize] == 0;
    range_sweep::visit_enclosing_ranges(
        trace,
        (&events.thread, created),
        |event| (time(event), time(event)),
        |event, ranges| {
            let names = ranges.iter().map(|&range| trace.ranges.name[range as usize]);
            around[event as usize] = names.collect();
        },
    );
    graph_nodes_in_ranges(trace, around)
}

/// Nodes by the given names of the ranges around each creation, the outermost first.
pub(crate) fn graph_nodes_in_ranges(
    trace: &Trace,
    mut around: Vec<Vec<NameId>>,
) -> Vec<CudaGraphNode> {
    let events = &trace.node_events;
    let time = |event: u32| events.time[event as usize];
    let mut order: Vec<u32> = (0u32..).take(around.len()).collect();
    order.sort_by_key(|&event| time(event));
    let mut nodes = trace.graph_nodes.clone();
    let mut known: HashMap<(u32, u64), usize> =
        (0..).zip(&nodes).map(|(index, node)| ((node.process, node.id), index)).collect();
    for event in order {
        let row = event as usize;
        let process = trace.threads[events.thread[row] as usize].process;
        let ranges = match known.get(&(process, events.original[row])) {
            Some(&original) => nodes[original].ranges.clone(),
            None => std::mem::take(&mut around[row]),
        };
        if !ranges.is_empty() {
            let id = events.node[row];
            known.insert((process, id), nodes.len());
            nodes.push(CudaGraphNode { process, id, ranges });
        }
    }
    nodes
}

/// The range path of each kernel: the path of its launch, followed by the ranges in which its graph
/// node was created. Empty where no kernel has a node that was created in a range.
pub(crate) fn kernel_paths_inside(
    trace: &Trace,
    nodes: &[CudaGraphNode],
    launched_in: &PackedColumn<RangePathId>,
    paths: &mut RangePathTree,
) -> PackedColumn<RangePathId> {
    if nodes.is_empty() || trace.kernels.graph_node.is_empty() {
        return PackedColumn::default();
    }
    let ranges: HashMap<(u32, u64), &[NameId]> =
        nodes.iter().map(|node| ((node.process, node.id), &node.ranges[..])).collect();
    let kernels = trace.kernels.graph_node.iter().zip(trace.kernels.on_gpu.place.iter());
    // Kernels have the smallest operation numbers.
    let inside = kernels.zip(launched_in.iter()).map(|((node, place), launched_in)| {
        let ranges =
            ranges.get(&(trace.process_of_place(place), node)).copied().unwrap_or_default();
        ranges.iter().fold(launched_in, |path, &name| paths.path_inside(path, name))
    });
    inside.collect()
}
