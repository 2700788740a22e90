//! Which ranges were open when the nodes of CUDA graphs were created: while a stream was captured,
//! or a graph built. A graph is instantiated by cloning its nodes; a clone has the ranges of what it
//! was cloned from.

use hashbrown::HashMap;

use super::sweep;
use crate::model::Trace;
use crate::model::gpu::GraphNode;
use crate::model::names::Name;

/// The nodes of a trace that were created inside ranges: those that the recorder resolved, and those
/// whose creation was recorded.
pub fn nodes(trace: &Trace) -> Vec<GraphNode> {
    let events = &trace.node_events;
    let time = |event: u32| events.time[event as usize];
    let mut around: Vec<Vec<Name>> = vec![Vec::new(); events.time.len()];
    let created = |event: u32| events.original[event as usize] == 0;
    sweep::enclosing(
        trace,
        (&events.thread, created),
        |event| (time(event), time(event)),
        |event, ranges| {
            let names = ranges.iter().map(|&range| trace.ranges.name[range as usize]);
            around[event as usize] = names.collect();
        },
    );
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
            nodes.push(GraphNode { process, id, ranges });
        }
    }
    nodes
}
