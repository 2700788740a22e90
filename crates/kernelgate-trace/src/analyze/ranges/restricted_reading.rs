//! Restricts a trace to named ranges while it is read, so that only the requested ranges and calls
//! of a long export are held in memory.

use std::path::Path;

use crate::analyze::launches::passing_calls::{LaunchedOperations, NodeEvents, OpenRangesByThread};
use crate::analyze::operations::OperationId;
use crate::analyze::ranges::paths::{ROOT_PATH, RangePathId, RangePathTree};
use crate::analyze::ranges::restricted_trace::{self, MatchingSpans};
use crate::error::TraceError;
use crate::model::Trace;
use crate::model::host::{ApiCallTable, HostRangeTable};
use crate::model::interned_names::NameId;
use crate::read::{self, CallRow, RangeOrCall, RangeRow, StreamedRows, WantedTraceParts};

/// Reads the operations that were launched inside ranges whose path matches
/// [`restricted_trace::restrict_to_ranges`]. `None`: no range matches.
pub fn open_inside_ranges(
    path: &Path,
    wanted: &WantedTraceParts,
    pattern: &str,
) -> Result<Option<Trace>, TraceError> {
    // Calls and ranges are read too, because they show where operations were launched.
    let with_launches = WantedTraceParts { operations: true, calls: true, ranges: true, ..*wanted };
    // Names are known when all ranges were read: which paths match is found first.
    let mut paths = RangePaths::default();
    let ranges_alone = WantedTraceParts { ranges: true, ..WantedTraceParts::default() };
    let Some(first) = read::stream_trace_rows(path, &ranges_alone, |_, row| paths.add(row))? else {
        return Ok(restricted_trace::restrict_to_ranges(
            &read::open_trace_file(path, &with_launches)?,
            pattern,
        ));
    };
    let (named, now) = paths.paths.renamed(|label| first.names[label.0 as usize]);
    let matching = restricted_trace::paths_that_match(
        &first.trace,
        &named,
        &restricted_trace::parse_range_expression(pattern),
    );
    let matching = now.iter().map(|&path| matching[path as usize]).collect();
    let mut pass = InsidePass { matching, ..InsidePass::default() };
    drop(first);
    let second = read::stream_trace_rows(path, &with_launches, |trace, row| pass.add(trace, row))?;
    let trace = second.map(|StreamedRows { trace, names, last }| {
        let InsidePass { mut ranges, calls, .. } = pass;
        ranges.name.iter_mut().for_each(|name| *name = names[name.0 as usize]);
        for (end, &start) in ranges.end.iter_mut().zip(&ranges.start) {
            *end = (*end).min(last.max(start));
        }
        Trace { ranges, calls, ..trace }
    });
    Ok(trace.and_then(|trace| restricted_trace::restrict_to_ranges(&trace, pattern)))
}

#[derive(Debug, Clone, Copy)]
struct OpenRange {
    path: RangePathId,
    kept: bool,
}

/// Paths of ranges; their names are labels.
#[derive(Debug, Default)]
struct RangePaths {
    open: OpenRangesByThread<OpenRange>,
    paths: RangePathTree,
}

impl RangePaths {
    fn add(&mut self, row: RangeOrCall) {
        match row {
            RangeOrCall::Begin => *self = Self::default(),
            RangeOrCall::Range(range) => {
                let path = self.path_of_next_range(&range);
                self.open.add(range, OpenRange { path, kept: false }, |_| ());
            }
            RangeOrCall::Call(_) => {}
        }
    }

    /// Returns the path of the next range in the order of time.
    fn path_of_next_range(&mut self, range: &RangeRow) -> RangePathId {
        let around = self.open.innermost_around(range.thread, (range.start, range.end));
        let parent = around.map_or(ROOT_PATH, |around| around.state.path);
        self.paths.path_inside(parent, NameId(range.label))
    }
}

/// Keeps the operations inside, and the ranges that show it: those around them, and around nodes of
/// graphs when they were created, and the calls that launched such nodes.
#[derive(Debug, Default)]
struct InsidePass {
    /// Whether each range path matches the expression.
    matching: Vec<bool>,
    standing: RangePaths,
    selection: MatchingSpans,
    launched: LaunchedOperations,
    nodes: NodeEvents,
    ranges: HostRangeTable,
    calls: ApiCallTable,
}

impl InsidePass {
    fn add(&mut self, trace: &Trace, row: RangeOrCall) {
        match row {
            RangeOrCall::Begin => {
                let nodes = NodeEvents::new(trace, |_| true);
                let matching = std::mem::take(&mut self.matching);
                let launched = match trace.kernels.graph_node.is_empty() {
                    true => LaunchedOperations::default(),
                    false => LaunchedOperations::new(trace),
                };
                *self = Self { matching, nodes, launched, ..Self::default() };
            }
            RangeOrCall::Range(range) => self.add_range(trace, range),
            RangeOrCall::Call(call) => self.call(trace, &call),
        }
    }

    fn add_range(&mut self, trace: &Trace, range: RangeRow) {
        self.keep_ranges_of_nodes_before(trace, range.start);
        let path = self.standing.path_of_next_range(&range);
        if self.matching.get(path as usize).copied().unwrap_or(false) {
            let process = trace.threads[range.thread as usize].process;
            self.selection.add(process, &range);
            self.keep_enclosing_ranges(range.thread, (range.start, range.end));
        }
        let kept = self.selection.contains_span(trace, range.thread, range.start, range.end);
        if kept {
            push_range(&mut self.ranges, &range);
        }
        self.standing.open.add(range, OpenRange { path, kept }, |_| ());
    }

    fn call(&mut self, trace: &Trace, call: &CallRow) {
        self.keep_ranges_of_nodes_before(trace, call.start);
        let of_graph = |&id: &OperationId| {
            trace.kernels.graph_node.get(id as usize).is_some_and(|node| node != 0)
        };
        let of_graph = self.launched.by(trace, call).iter().any(of_graph);
        if of_graph || self.selection.contains_span(trace, call.thread, call.start, call.end) {
            let CallRow { start, end, thread, name, correlation, .. } = *call;
            self.calls.push(start, end, thread, name, correlation);
        }
    }

    /// Keeps the ranges around nodes that were created before a time.
    fn keep_ranges_of_nodes_before(&mut self, trace: &Trace, time: i64) {
        let events = &trace.node_events;
        while let Some(event) = self.nodes.next_if_before(trace, time) {
            let at = events.time[event];
            self.keep_enclosing_ranges(events.thread[event], (at, at));
        }
    }

    /// Keeps the open ranges of a thread that enclose a span.
    fn keep_enclosing_ranges(&mut self, thread: u32, (start, end): (i64, i64)) {
        for open in self.standing.open.at(thread, start, |_| ()) {
            if open.row.end >= end && !std::mem::replace(&mut open.state.kept, true) {
                push_range(&mut self.ranges, &open.row);
            }
        }
    }
}

fn push_range(ranges: &mut HostRangeTable, row: &RangeRow) {
    ranges.push(row.start, row.end, row.thread, NameId(row.label), row.style);
}
