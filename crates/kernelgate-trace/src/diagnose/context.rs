//! What all rules need of a trace, worked out once.

use hashbrown::HashMap;

use crate::analyze::graph_nodes;
use crate::analyze::idle::{self, Activity};
use crate::analyze::launches::{Launches, NONE};
use crate::analyze::operations::{AllOperations, OperationId};
use crate::analyze::paths::{PathId, Paths, ROOT};
use crate::analyze::sweep;
use crate::model::Trace;
use crate::model::names::Name;

/// A trace with what joins its parts.
pub struct Context<'a> {
    /// The trace.
    pub trace: &'a Trace,
    /// Its operations.
    pub all: AllOperations<'a>,
    /// The call of each operation.
    pub launches: Launches,
    /// What each process did on each device.
    pub activities: Vec<Activity>,
    /// The path of each range.
    pub paths: Paths,
    /// The innermost range around each call that launched or waited, or [`NONE`].
    pub range_of_call: Vec<u32>,
    /// The path of each operation: of the innermost range around its launch, then of the ranges
    /// in which the node of a graph was created that launched it.
    pub path_of_operation: Vec<PathId>,
    /// Whether each call waits for the GPU.
    pub waits: Vec<bool>,
    /// Whether each call launched something.
    pub launched: Vec<bool>,
}

impl<'a> Context<'a> {
    /// That of a trace.
    pub fn of(trace: &'a Trace) -> Self {
        let launches = Launches::of(trace);
        let mut launched = vec![false; trace.calls.len()];
        for &call in launches.call_of.iter().filter(|&&call| call != NONE) {
            launched[call as usize] = true;
        }
        let waiting = waiting_names(trace);
        let waits: Vec<bool> =
            trace.calls.name.iter().map(|name| waiting[name.0 as usize]).collect();
        let mut range_of_call = vec![NONE; trace.calls.len()];
        sweep::enclosing_calls(
            trace,
            |call| launched[call as usize] || waits[call as usize],
            |call, ranges| {
                range_of_call[call as usize] = ranges.last().copied().unwrap_or(NONE);
            },
        );
        let mut paths = Paths::of(trace);
        let path_of_operation =
            operation_paths(trace, &mut paths, &launches.call_of, &range_of_call);
        Self {
            trace,
            all: AllOperations::of(trace),
            launches,
            activities: idle::activities(trace, |_| true),
            paths,
            range_of_call,
            path_of_operation,
            waits,
            launched,
        }
    }

    /// The path of the range around a call.
    pub fn path_of_call(&self, call: u32) -> Option<String> {
        let range = *self.range_of_call.get(call as usize)?;
        let path = *self.paths.of_range.get(range as usize)?;
        Some(self.paths.text(self.trace, path))
    }

    /// The path of the range that an operation was launched in.
    pub fn path_of(&self, operation: OperationId) -> Option<String> {
        let path = self.path_of_operation[operation as usize];
        (path != ROOT).then(|| self.paths.text(self.trace, path))
    }

    /// The name of a call without its version.
    pub fn call_name(&self, call: u32) -> &'a str {
        crate::stats::without_version(self.trace.names.text(self.trace.calls.name[call as usize]))
    }

    /// Process id and device of an operation.
    pub fn place_of(&self, operation: OperationId) -> (i64, u32) {
        let place = &self.trace.places[self.all.place(operation).0 as usize];
        (self.trace.processes[place.process as usize].pid, place.device)
    }
}

fn operation_paths(
    trace: &Trace,
    paths: &mut Paths,
    call_of: &[u32],
    range_of_call: &[u32],
) -> Vec<PathId> {
    let around_call = |&call: &u32| {
        let range = range_of_call.get(call as usize).copied().unwrap_or(NONE);
        paths.of_range.get(range as usize).copied().unwrap_or(ROOT)
    };
    let mut all: Vec<PathId> = call_of.iter().map(around_call).collect();
    let nodes = graph_nodes::nodes(trace);
    let nodes: HashMap<(u32, u64), &[Name]> =
        nodes.iter().map(|node| ((node.process, node.id), &node.ranges[..])).collect();
    // Kernels are the first operations.
    let kernels = trace.kernels.graph_node.iter().zip(&trace.kernels.on_gpu.place);
    for (path, (&node, &place)) in all.iter_mut().zip(kernels) {
        let key = (trace.process_of(place), node);
        for &name in nodes.get(&key).copied().unwrap_or_default() {
            *path = paths.inside(*path, name);
        }
    }
    all
}

/// Functions whose call returns when the GPU is done.
const WAITS: &[&str] = &[
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaThreadSynchronize",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "hipDeviceSynchronize",
    "hipStreamSynchronize",
    "hipEventSynchronize",
];

/// By name, whether it waits. Names of the per-thread default stream end in `_ptsz`.
fn waiting_names(trace: &Trace) -> Vec<bool> {
    (0..trace.names.len())
        .map(|index| {
            let text = trace.names.text(Name(u32::try_from(index).unwrap_or(0)));
            let name = crate::stats::without_version(text);
            WAITS.contains(&name.trim_end_matches("_ptsz"))
        })
        .collect()
}
