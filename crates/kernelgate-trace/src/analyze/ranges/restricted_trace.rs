//! A trace restricted to what was launched inside named ranges.

use hashbrown::HashSet;
use regex::Regex;

use crate::analyze::launches::graph_nodes;
use crate::analyze::launches::{NO_CALL, TraceLaunches};
use crate::analyze::operations::{AllOperations, OperationKind};
use crate::analyze::ranges::paths::{PathOfEachRange, ROOT_PATH, RangePathTree};
use crate::analyze::ranges::range_sweep::RowsByThread;
use crate::model::Trace;
use crate::model::gpu::{CudaGraphNode, select_elements};
use crate::model::host::RangeStyle;
use crate::read::RangeRow;

/// Spans of one thread, or of all threads of a process.
type TimeSpans = Vec<(i64, i64)>;

/// Selects the operations that were launched inside ranges whose path matches, and these ranges
/// with everything they enclose. `None`: no range matches.
///
/// A pattern is a path, or the end of one (`layer_0/attention`); `*` stands for any text. A
/// push/pop range holds what its own thread did; a start/end range, which belongs to no thread,
/// what any thread of its process did. A range that was open while a graph was captured counts as
/// enclosing the graph's kernels and its launches.
///
/// The function is long because each kind of record is filtered by its own columns.
#[expect(clippy::too_many_lines)]
pub fn restrict_to_ranges(trace: &Trace, pattern: &str) -> Option<Trace> {
    let expression = parse_range_expression(pattern);
    let nodes = graph_nodes_that_match(trace, &expression);
    let (selection, found) = MatchingSpans::new(trace, &expression);
    if !found && nodes.is_empty() {
        return None;
    }
    let calls = &trace.calls;
    let mut kept_call: Vec<bool> = (0..calls.len())
        .map(|call| {
            selection.contains_span(trace, calls.thread[call], calls.start[call], calls.end[call])
        })
        .collect();
    let [kernels, copies, sets, graphs] = rows_of_kept_operations(trace, &nodes, &mut kept_call);
    let mut inner = Trace {
        recorder: trace.recorder,
        names: trace.names.clone(),
        processes: trace.processes.clone(),
        threads: trace.threads.clone(),
        places: trace.places.clone(),
        devices: trace.devices.clone(),
        functions: trace.functions.clone(),
        shapes: trace.shapes.clone(),
        graph_nodes: graph_nodes::all_graph_nodes(trace),
        work: trace.work.clone(),
        profiled: trace.profiled.clone(),
        streams: trace.streams.clone(),
        // All allocations are kept: memory that was allocated before a range is still held inside
        // it.
        allocations: trace.allocations.clone(),
        metadata: trace.metadata.clone(),
        quality: trace.quality.clone(),
        ..Trace::default()
    };
    inner.kernels.on_gpu = trace.kernels.on_gpu.select_rows(&kernels);
    inner.kernels.function = trace.kernels.function.select_rows(&kernels);
    inner.kernels.shape = trace.kernels.shape.select_rows(&kernels);
    inner.kernels.graph_node = trace.kernels.graph_node.select_rows(&kernels);
    inner.collectives = trace.collectives.select_kernels(&kernels);
    inner.copies.on_gpu = trace.copies.on_gpu.select_rows(&copies);
    inner.copies.bytes = select_elements(&trace.copies.bytes, &copies);
    inner.copies.kind = select_elements(&trace.copies.kind, &copies);
    inner.copies.source = select_elements(&trace.copies.source, &copies);
    inner.copies.target = select_elements(&trace.copies.target, &copies);
    inner.sets.on_gpu = trace.sets.on_gpu.select_rows(&sets);
    inner.sets.bytes = select_elements(&trace.sets.bytes, &sets);
    inner.graphs.on_gpu = trace.graphs.on_gpu.select_rows(&graphs);
    inner.graphs.executable = select_elements(&trace.graphs.executable, &graphs);
    inner.calls = calls.select_rows(&rows_to_keep(calls.len(), |call| kept_call[call]));
    let ranges = &trace.ranges;
    inner.ranges = ranges.select_rows(&rows_to_keep(ranges.len(), |range| {
        selection.contains_span(trace, ranges.thread[range], ranges.start[range], ranges.end[range])
    }));
    let syncs = &trace.syncs;
    let kept_syncs = rows_to_keep(syncs.on_gpu.len(), |sync| {
        let process = trace.process_of_place(syncs.on_gpu.place.at(sync));
        selection.lies_inside_any_thread(
            process,
            syncs.on_gpu.start.at(sync),
            syncs.on_gpu.end(sync),
        )
    });
    inner.syncs.on_gpu = syncs.on_gpu.select_rows(&kept_syncs);
    inner.syncs.kind = select_elements(&syncs.kind, &kept_syncs);
    let faults = &trace.page_faults;
    let kept_faults = rows_to_keep(faults.start.len(), |row| {
        selection.lies_inside_any_thread(faults.process[row], faults.start[row], faults.start[row])
    });
    inner.page_faults.start = select_elements(&faults.start, &kept_faults);
    inner.page_faults.end = select_elements(&faults.end, &kept_faults);
    inner.page_faults.process = select_elements(&faults.process, &kept_faults);
    inner.page_faults.device = select_elements(&faults.device, &kept_faults);
    inner.page_faults.count = select_elements(&faults.count, &kept_faults);
    let os = &trace.os_calls;
    let kept_os = rows_to_keep(os.start.len(), |call| {
        selection.lies_inside_any_thread(
            trace.threads[os.thread[call] as usize].process,
            os.start[call],
            os.end[call],
        )
    });
    inner.os_calls.start = select_elements(&os.start, &kept_os);
    inner.os_calls.end = select_elements(&os.end, &kept_os);
    inner.os_calls.thread = select_elements(&os.thread, &kept_os);
    inner.os_calls.name = select_elements(&os.name, &kept_os);
    Some(inner)
}

/// The rows of kernels, copies, sets and graphs that a kept call launched or that lie in `nodes`.
/// If a node is kept, the launch of its graph is kept too.
fn rows_of_kept_operations(
    trace: &Trace,
    nodes: &HashSet<(u32, u64)>,
    kept_call: &mut [bool],
) -> [Vec<u32>; 4] {
    let launches = TraceLaunches::join_operations_with_calls(trace);
    let all = AllOperations::new(trace);
    let mut kept: [Vec<u32>; 4] = Default::default();
    let mut of_nodes: Vec<u32> = Vec::new();
    for id in all.ids() {
        let call = launches.call_of[id as usize];
        let (kind, index) = all.kind_and_row(id);
        let node = || {
            let node =
                trace.kernels.graph_node.get(index).filter(|_| kind == OperationKind::Kernel)?;
            Some((trace.process_of_place(trace.kernels.on_gpu.place.at(index)), node))
        };
        let in_range = call != NO_CALL && kept_call[call as usize];
        let in_node = !in_range && node().is_some_and(|node| nodes.contains(&node));
        if in_range || in_node {
            kept[kind as usize].push(u32::try_from(index).expect("fewer than 2^32 rows"));
        }
        if in_node && call != NO_CALL {
            of_nodes.push(call);
        }
    }
    of_nodes.into_iter().for_each(|call| kept_call[call as usize] = true);
    kept
}

fn rows_to_keep(count: usize, keep: impl Fn(usize) -> bool) -> Vec<u32> {
    let kept = (0..count).filter(|&row| keep(row));
    kept.map(|row| u32::try_from(row).expect("fewer than 2^32 rows")).collect()
}

/// Time spans of the ranges whose path matches.
#[derive(Debug, Default)]
pub(in crate::analyze) struct MatchingSpans {
    by_thread: Vec<TimeSpans>,
    by_process: Vec<TimeSpans>,
    /// Time spans of matching ranges of all threads: an event without a thread is inside if one of
    /// the spans contains it.
    any: Vec<TimeSpans>,
}

impl MatchingSpans {
    /// The ranges of a trace that match an expression, and whether any matches.
    fn new(trace: &Trace, expression: &Regex) -> (Self, bool) {
        let PathOfEachRange { paths, of_range, .. } = PathOfEachRange::new(trace);
        let matching = paths_that_match(trace, &paths, expression);
        let mut selection = Self {
            by_thread: vec![TimeSpans::new(); trace.threads.len()],
            by_process: vec![TimeSpans::new(); trace.processes.len()],
            any: vec![TimeSpans::new(); trace.processes.len()],
        };
        let ranges = &trace.ranges;
        let by_thread = RowsByThread::group_ranges_by_thread(trace);
        let mut found = false;
        for thread in 0..trace.threads.len() {
            for &range in by_thread.rows_of_thread(thread) {
                let row = range as usize;
                if !matching[of_range[row] as usize] {
                    continue;
                }
                found = true;
                let span = (ranges.start[row], ranges.end[row]);
                let process = trace.threads[thread].process as usize;
                match ranges.style[row] {
                    RangeStyle::PushPop => selection.by_thread[thread].push(span),
                    RangeStyle::StartEnd => selection.by_process[process].push(span),
                }
                selection.any[process].push(span);
            }
        }
        let every = [&mut selection.by_thread, &mut selection.by_process, &mut selection.any];
        every.into_iter().flatten().for_each(keep_outermost_spans);
        (selection, found)
    }

    /// Adds a range that matches; ranges come in order of time, outer ones first.
    pub(in crate::analyze) fn add(&mut self, process: u32, range: &RangeRow) {
        let (all, of) = match range.style {
            RangeStyle::PushPop => (&mut self.by_thread, range.thread),
            RangeStyle::StartEnd => (&mut self.by_process, process),
        };
        if all.len() <= of as usize {
            all.resize(of as usize + 1, TimeSpans::new());
        }
        let spans = &mut all[of as usize];
        if spans.last().is_none_or(|&(_, until)| until < range.end) {
            spans.push((range.start, range.end));
        }
    }

    /// Returns whether a time span of a thread lies inside a matching range.
    pub(in crate::analyze) fn contains_span(
        &self,
        trace: &Trace,
        thread: u32,
        start: i64,
        end: i64,
    ) -> bool {
        let process = trace.threads[thread as usize].process as usize;
        let inside = |spans: &[TimeSpans], of: usize| {
            spans.get(of).is_some_and(|spans| is_span_in_one_of(spans, start, end))
        };
        inside(&self.by_thread, thread as usize) || inside(&self.by_process, process)
    }

    /// Returns whether a time span lies inside a matching range of any thread of the process.
    fn lies_inside_any_thread(&self, process: u32, start: i64, end: i64) -> bool {
        is_span_in_one_of(&self.any[process as usize], start, end)
    }
}

/// For each range path, whether the expression matches it.
pub(in crate::analyze) fn paths_that_match(
    trace: &Trace,
    paths: &RangePathTree,
    expression: &Regex,
) -> Vec<bool> {
    (0u32..)
        .take(paths.len())
        .map(|path| path != ROOT_PATH && expression.is_match(&paths.text(trace, path)))
        .collect()
}

/// Compiles a pattern for range paths.
pub(in crate::analyze) fn parse_range_expression(pattern: &str) -> Regex {
    let parts: Vec<String> = pattern.split('*').map(regex::escape).collect();
    Regex::new(&format!("(?s)(^|/){}$", parts.join(".*")))
        .expect("an escaped pattern is a valid expression")
}

/// The nodes of graphs that were created in a range whose path in the capture matches.
fn graph_nodes_that_match(trace: &Trace, expression: &Regex) -> HashSet<(u32, u64)> {
    let inside = |node: &&CudaGraphNode| {
        let names: Vec<&str> = node.ranges.iter().map(|&name| trace.names.text(name)).collect();
        (1..=names.len()).any(|depth| expression.is_match(&names[..depth].join("/")))
    };
    let nodes = graph_nodes::all_graph_nodes(trace);
    nodes.iter().filter(inside).map(|node| (node.process, node.id)).collect()
}

/// Sorts spans and removes those inside another span. Spans that only overlap are not merged.
fn keep_outermost_spans(spans: &mut TimeSpans) {
    spans.sort_by_key(|&(start, end)| (start, std::cmp::Reverse(end)));
    let mut until = i64::MIN;
    spans.retain(|&(_, end)| {
        let keep = end > until;
        until = until.max(end);
        keep
    });
}

/// Returns whether one of the spans, which are sorted by start and by end, contains another span.
fn is_span_in_one_of(spans: &TimeSpans, start: i64, end: i64) -> bool {
    let after = spans.partition_point(|&(first, _)| first <= start);
    after.checked_sub(1).is_some_and(|last| spans[last].1 >= end)
}
