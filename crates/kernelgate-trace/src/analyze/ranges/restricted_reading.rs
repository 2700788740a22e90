//! Restricts a trace to named ranges while it is read, so that only the requested ranges and calls
//! of a long export are kept in memory.

use std::path::Path;

use crate::analyze::launches::passing_calls::{
    OpenRangesByThread, OperationsByLaunchKey, UnprocessedGraphNodeEvents,
};
use crate::analyze::operations::GpuOperationId;
use crate::analyze::ranges::paths::{ROOT_RANGE_PATH, RangePathId, RangePathTree};
use crate::analyze::ranges::restricted_trace::{self, SpansOfMatchingRanges};
use crate::error::TraceError;
use crate::model::Trace;
use crate::model::host::{ApiCallTable, HostRangeTable};
use crate::model::interned_names::InternedNameId;
use crate::read::{
    self, ExportWithoutStreamedRows, StreamedCallRow, StreamedRangeOrCall, StreamedRangeRow,
    WantedTraceParts,
};

/// Reads a trace and keeps the operations that were launched inside ranges whose path matches the
/// pattern, as [`restricted_trace::restrict_trace_to_ranges`] does. The result is `None` if no
/// range matches.
pub fn open_trace_inside_ranges(
    path: &Path,
    wanted: &WantedTraceParts,
    pattern: &str,
) -> Result<Option<Trace>, TraceError> {
    // Host calls and ranges are read too, because they show in which range an operation was
    // launched.
    let with_launches = WantedTraceParts {
        reads_operations: true,
        reads_api_calls: true,
        reads_ranges: true,
        ..*wanted
    };
    // A range's name may come after the range, so a first pass over the file finds the paths that
    // match the pattern.
    let mut paths = StreamedRangePaths::default();
    let ranges_alone = WantedTraceParts { reads_ranges: true, ..WantedTraceParts::default() };
    let Some(first) = read::stream_ranges_and_calls(path, &ranges_alone, |_, row| {
        paths.add_path_of_range_row(row)
    })?
    else {
        return Ok(restricted_trace::restrict_trace_to_ranges(
            &read::open_trace_file(path, &with_launches)?,
            pattern,
        ));
    };
    let (named, now) = paths
        .paths
        .with_replaced_range_names(|label| first.name_by_range_name_index[label.0 as usize]);
    let matching = restricted_trace::match_each_range_path(
        &first.trace,
        &named,
        &restricted_trace::regex_of_range_path_pattern(pattern),
    );
    let matching = now.iter().map(|&path| matching[path as usize]).collect();
    let mut pass = MatchingRangesTraceFilter {
        path_matches_pattern: matching,
        ..MatchingRangesTraceFilter::default()
    };
    drop(first);
    let second = read::stream_ranges_and_calls(path, &with_launches, |trace, row| {
        pass.process_range_or_call_row(trace, row)
    })?;
    let trace = second.map(
        |ExportWithoutStreamedRows {
             trace,
             name_by_range_name_index: names,
             trace_end_ns: last,
         }| {
            let MatchingRangesTraceFilter { mut ranges, calls, .. } = pass;
            ranges.range_name.iter_mut().for_each(|name| *name = names[name.0 as usize]);
            for (end, &start) in ranges.end_ns.iter_mut().zip(&ranges.start_ns) {
                *end = (*end).min(last.max(start));
            }
            Trace { ranges, calls, ..trace }
        },
    );
    Ok(trace.and_then(|trace| restricted_trace::restrict_trace_to_ranges(&trace, pattern)))
}

#[derive(Debug, Clone, Copy)]
struct OpenRangePath {
    path: RangePathId,
    is_range_kept: bool,
}

/// Paths of ranges while a file is read; until names are known, paths consist of label numbers.
#[derive(Debug, Default)]
struct StreamedRangePaths {
    open_ranges: OpenRangesByThread<OpenRangePath>,
    paths: RangePathTree,
}

impl StreamedRangePaths {
    fn add_path_of_range_row(&mut self, row: StreamedRangeOrCall) {
        match row {
            StreamedRangeOrCall::PassBegins => *self = Self::default(),
            StreamedRangeOrCall::Range(range) => {
                let path = self.path_of_next_range(&range);
                self.open_ranges.open_range_of_thread(
                    range,
                    OpenRangePath { path, is_range_kept: false },
                    |_| (),
                );
            }
            StreamedRangeOrCall::Call(_) => {}
        }
    }

    /// Returns the path of the next range; ranges come in order of time.
    fn path_of_next_range(&mut self, range: &StreamedRangeRow) -> RangePathId {
        let around = self
            .open_ranges
            .innermost_range_around_span(range.thread_index, (range.start_ns, range.end_ns));
        let parent = around.map_or(ROOT_RANGE_PATH, |around| around.range_state.path);
        self.paths.path_of_name_inside_parent(parent, InternedNameId(range.name_index))
    }
}

/// Second pass over a file: keeps the ranges and calls that are needed to find the operations
/// launched inside matching ranges, also through graph nodes.
#[derive(Debug, Default)]
struct MatchingRangesTraceFilter {
    /// Whether each range path matches the pattern.
    path_matches_pattern: Vec<bool>,
    open_range_paths: StreamedRangePaths,
    matching_spans: SpansOfMatchingRanges,
    operations_by_launch_key: OperationsByLaunchKey,
    graph_node_events: UnprocessedGraphNodeEvents,
    ranges: HostRangeTable,
    calls: ApiCallTable,
}

impl MatchingRangesTraceFilter {
    fn process_range_or_call_row(&mut self, trace: &Trace, row: StreamedRangeOrCall) {
        match row {
            StreamedRangeOrCall::PassBegins => {
                let nodes = UnprocessedGraphNodeEvents::collect_graph_node_events(trace, |_| true);
                let matching = std::mem::take(&mut self.path_matches_pattern);
                let launched = match trace.kernels.graph_node.has_no_row() {
                    true => OperationsByLaunchKey::default(),
                    false => OperationsByLaunchKey::operations_without_read_calls(trace),
                };
                *self = Self {
                    path_matches_pattern: matching,
                    graph_node_events: nodes,
                    operations_by_launch_key: launched,
                    ..Self::default()
                };
            }
            StreamedRangeOrCall::Range(range) => {
                self.keep_range_inside_matching_range(trace, range)
            }
            StreamedRangeOrCall::Call(call) => {
                self.keep_call_inside_matching_range_or_graph(trace, &call)
            }
        }
    }

    fn keep_range_inside_matching_range(&mut self, trace: &Trace, range: StreamedRangeRow) {
        self.keep_ranges_around_node_events_before(trace, range.start_ns);
        let path = self.open_range_paths.path_of_next_range(&range);
        if self.path_matches_pattern.get(path as usize).copied().unwrap_or(false) {
            let process = trace.threads[range.thread_index as usize].process_index;
            self.matching_spans.add_matching_range(process, &range);
            self.keep_open_ranges_enclosing(range.thread_index, (range.start_ns, range.end_ns));
        }
        let kept = self.matching_spans.contains_span_of_thread(
            trace,
            range.thread_index,
            range.start_ns,
            range.end_ns,
        );
        if kept {
            append_range_row(&mut self.ranges, &range);
        }
        self.open_range_paths.open_ranges.open_range_of_thread(
            range,
            OpenRangePath { path, is_range_kept: kept },
            |_| (),
        );
    }

    fn keep_call_inside_matching_range_or_graph(&mut self, trace: &Trace, call: &StreamedCallRow) {
        self.keep_ranges_around_node_events_before(trace, call.start_ns);
        let of_graph = |&id: &GpuOperationId| {
            trace.kernels.graph_node.decoded_row(id as usize).is_some_and(|node| node != 0)
        };
        let of_graph = self
            .operations_by_launch_key
            .operations_launched_by_host_call(trace, call)
            .iter()
            .any(of_graph);
        if of_graph
            || self.matching_spans.contains_span_of_thread(
                trace,
                call.thread_index,
                call.start_ns,
                call.end_ns,
            )
        {
            let StreamedCallRow {
                start_ns: start,
                end_ns: end,
                thread_index: thread,
                function_name: name,
                correlation,
                ..
            } = *call;
            self.calls.push_api_call(start, end, thread, name, correlation);
        }
    }

    /// Keeps the ranges that were open when graph nodes were created, for node events before
    /// `time`.
    fn keep_ranges_around_node_events_before(&mut self, trace: &Trace, time: i64) {
        let events = &trace.node_events;
        while let Some(event) = self.graph_node_events.take_earliest_event_before(trace, time) {
            let at = events.time_ns[event];
            self.keep_open_ranges_enclosing(events.thread_index[event], (at, at));
        }
    }

    /// Keeps those open ranges of a thread that enclose a span of time.
    fn keep_open_ranges_enclosing(&mut self, thread: u32, (start, end): (i64, i64)) {
        for open in
            self.open_range_paths.open_ranges.ranges_of_thread_open_at(thread, start, |_| ())
        {
            if open.row.end_ns >= end
                && !std::mem::replace(&mut open.range_state.is_range_kept, true)
            {
                append_range_row(&mut self.ranges, &open.row);
            }
        }
    }
}

fn append_range_row(ranges: &mut HostRangeTable, row: &StreamedRangeRow) {
    ranges.push_host_range(
        row.start_ns,
        row.end_ns,
        row.thread_index,
        InternedNameId(row.name_index),
        row.style,
    );
}
