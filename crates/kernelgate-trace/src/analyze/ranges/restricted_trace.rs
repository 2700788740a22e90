//! Copies from a trace only the operations that were launched inside named ranges.

use hashbrown::HashSet;
use regex::Regex;

use crate::analyze::launches::graph_nodes;
use crate::analyze::launches::{LaunchCallOfOperations, NO_LAUNCH_CALL};
use crate::analyze::operations::{AllGpuOperations, GpuOperationKind};
use crate::analyze::ranges::paths::{PathOfEachRange, ROOT_RANGE_PATH, RangePathTree};
use crate::analyze::ranges::range_sweep::TableRowsByThread;
use crate::model::Trace;
use crate::model::gpu::{CudaGraphNodeWithRanges, select_column_elements};
use crate::model::host::HostRangeStyle;
use crate::read::StreamedRangeRow;

/// Spans of time of one thread, or of all threads of a process: start and end, nanoseconds.
type SortedTimeSpans = Vec<(i64, i64)>;

/// Returns a trace with only the operations that were launched inside ranges whose path matches
/// `pattern`, and those ranges with everything inside them. The result is `None` if no range
/// matches.
///
/// The pattern is a path of range names, or the end of a path (`layer_0/attention`); `*` stands for
/// any text. A push/pop range encloses what its own thread did; a start/end range, which belongs to
/// no thread, encloses what any thread of its process did. A range that was open while a CUDA graph
/// was captured also encloses the graph's kernels and its launches.
///
/// `restrict_trace_to_ranges` is long because each kind of record has its own columns.
#[expect(clippy::too_many_lines)]
pub fn restrict_trace_to_ranges(trace: &Trace, pattern: &str) -> Option<Trace> {
    let expression = regex_of_range_path_pattern(pattern);
    let nodes = graph_nodes_created_in_matching_ranges(trace, &expression);
    let (selection, found) = SpansOfMatchingRanges::spans_of_ranges_that_match(trace, &expression);
    if !found && nodes.is_empty() {
        return None;
    }
    let calls = &trace.calls;
    let mut kept_call: Vec<bool> = (0..calls.call_count())
        .map(|call| {
            selection.contains_span_of_thread(
                trace,
                calls.thread_index[call],
                calls.start_ns[call],
                calls.end_ns[call],
            )
        })
        .collect();
    let [kernels, copies, sets, graphs] = rows_of_operations_to_keep(trace, &nodes, &mut kept_call);
    let mut inner = Trace {
        recorder: trace.recorder,
        names: trace.names.clone(),
        processes: trace.processes.clone(),
        threads: trace.threads.clone(),
        places: trace.places.clone(),
        devices: trace.devices.clone(),
        functions: trace.functions.clone(),
        shapes: trace.shapes.clone(),
        graph_nodes: graph_nodes::graph_nodes_created_inside_ranges(trace),
        declared_work: trace.declared_work.clone(),
        profiled_launches: trace.profiled_launches.clone(),
        special_streams: trace.special_streams.clone(),
        // All allocation records are kept, because memory that was allocated before a range is
        // still held inside the range.
        allocations: trace.allocations.clone(),
        metadata: trace.metadata.clone(),
        quality: trace.quality.clone(),
        ..Trace::default()
    };
    inner.kernels.on_gpu = trace.kernels.on_gpu.select_operations(&kernels);
    inner.kernels.function_index = trace.kernels.function_index.select_packed_rows(&kernels);
    inner.kernels.launch_shape_index =
        trace.kernels.launch_shape_index.select_packed_rows(&kernels);
    inner.kernels.graph_node = trace.kernels.graph_node.select_packed_rows(&kernels);
    inner.collectives = trace.collectives.select_and_renumber_kernels(&kernels);
    inner.copies.on_gpu = trace.copies.on_gpu.select_operations(&copies);
    inner.copies.copied_bytes = select_column_elements(&trace.copies.copied_bytes, &copies);
    inner.copies.direction_label = select_column_elements(&trace.copies.direction_label, &copies);
    inner.copies.source_memory = select_column_elements(&trace.copies.source_memory, &copies);
    inner.copies.target_memory = select_column_elements(&trace.copies.target_memory, &copies);
    inner.memsets.on_gpu = trace.memsets.on_gpu.select_operations(&sets);
    inner.memsets.set_bytes = select_column_elements(&trace.memsets.set_bytes, &sets);
    inner.graphs.on_gpu = trace.graphs.on_gpu.select_operations(&graphs);
    inner.graphs.executable_graph_id =
        select_column_elements(&trace.graphs.executable_graph_id, &graphs);
    inner.calls = calls
        .select_api_calls(&row_numbers_that_satisfy(calls.call_count(), |call| kept_call[call]));
    let ranges = &trace.ranges;
    inner.ranges = ranges.select_ranges(&row_numbers_that_satisfy(ranges.range_count(), |range| {
        selection.contains_span_of_thread(
            trace,
            ranges.thread_index[range],
            ranges.start_ns[range],
            ranges.end_ns[range],
        )
    }));
    let syncs = &trace.synchronisation_waits;
    let kept_syncs = row_numbers_that_satisfy(syncs.on_gpu.operation_count(), |sync| {
        let process = trace.process_index_of_place(syncs.on_gpu.place.at(sync));
        selection.contains_span_of_any_thread(
            process,
            syncs.on_gpu.start_ns.at(sync),
            syncs.on_gpu.operation_end_ns(sync),
        )
    });
    inner.synchronisation_waits.on_gpu = syncs.on_gpu.select_operations(&kept_syncs);
    inner.synchronisation_waits.kind = select_column_elements(&syncs.kind, &kept_syncs);
    let faults = &trace.page_faults;
    let kept_faults = row_numbers_that_satisfy(faults.start_ns.len(), |row| {
        selection.contains_span_of_any_thread(
            faults.process_index[row],
            faults.start_ns[row],
            faults.start_ns[row],
        )
    });
    inner.page_faults.start_ns = select_column_elements(&faults.start_ns, &kept_faults);
    inner.page_faults.end_ns = select_column_elements(&faults.end_ns, &kept_faults);
    inner.page_faults.process_index = select_column_elements(&faults.process_index, &kept_faults);
    inner.page_faults.device = select_column_elements(&faults.device, &kept_faults);
    inner.page_faults.fault_count = select_column_elements(&faults.fault_count, &kept_faults);
    let os = &trace.os_calls;
    let kept_os = row_numbers_that_satisfy(os.start_ns.len(), |call| {
        selection.contains_span_of_any_thread(
            trace.threads[os.thread_index[call] as usize].process_index,
            os.start_ns[call],
            os.end_ns[call],
        )
    });
    inner.os_calls.start_ns = select_column_elements(&os.start_ns, &kept_os);
    inner.os_calls.end_ns = select_column_elements(&os.end_ns, &kept_os);
    inner.os_calls.thread_index = select_column_elements(&os.thread_index, &kept_os);
    inner.os_calls.function_name = select_column_elements(&os.function_name, &kept_os);
    Some(inner)
}

/// Returns the rows of kernels, copies, memsets and graph launches that a kept call launched or
/// whose graph node is in `nodes`. If a kernel is kept because of its graph node, the host call
/// that launched its graph is kept too.
fn rows_of_operations_to_keep(
    trace: &Trace,
    nodes: &HashSet<(u32, u64)>,
    kept_call: &mut [bool],
) -> [Vec<u32>; 4] {
    let launches = LaunchCallOfOperations::join_operations_with_host_calls(trace);
    let all = AllGpuOperations::number_operations_of_trace(trace);
    let mut kept: [Vec<u32>; 4] = Default::default();
    let mut of_nodes: Vec<u32> = Vec::new();
    for id in all.all_operation_ids() {
        let call = launches.call_index_of_operation[id as usize];
        let (kind, index) = all.kind_and_table_row(id);
        let node = || {
            let node = trace
                .kernels
                .graph_node
                .decoded_row(index)
                .filter(|_| kind == GpuOperationKind::Kernel)?;
            Some((trace.process_index_of_place(trace.kernels.on_gpu.place.at(index)), node))
        };
        let in_range = call != NO_LAUNCH_CALL && kept_call[call as usize];
        let in_node = !in_range && node().is_some_and(|node| nodes.contains(&node));
        if in_range || in_node {
            kept[kind as usize].push(u32::try_from(index).expect("fewer than 2^32 rows"));
        }
        if in_node && call != NO_LAUNCH_CALL {
            of_nodes.push(call);
        }
    }
    of_nodes.into_iter().for_each(|call| kept_call[call as usize] = true);
    kept
}

fn row_numbers_that_satisfy(count: usize, keep: impl Fn(usize) -> bool) -> Vec<u32> {
    let kept = (0..count).filter(|&row| keep(row));
    kept.map(|row| u32::try_from(row).expect("fewer than 2^32 rows")).collect()
}

/// Time spans of the ranges whose path matches the pattern, by thread and by process.
#[derive(Debug, Default)]
pub(in crate::analyze) struct SpansOfMatchingRanges {
    by_thread: Vec<SortedTimeSpans>,
    by_process: Vec<SortedTimeSpans>,
    /// Time spans of matching ranges of all threads, by process; an event without a thread is
    /// inside a match if one of these spans contains it.
    any: Vec<SortedTimeSpans>,
}

impl SpansOfMatchingRanges {
    /// Collects the spans of the trace's ranges whose path matches, and returns whether there is
    /// any.
    fn spans_of_ranges_that_match(trace: &Trace, expression: &Regex) -> (Self, bool) {
        let PathOfEachRange { paths, path_of_range: of_range, .. } =
            PathOfEachRange::find_path_of_each_range(trace);
        let matching = match_each_range_path(trace, &paths, expression);
        let mut selection = Self {
            by_thread: vec![SortedTimeSpans::new(); trace.threads.len()],
            by_process: vec![SortedTimeSpans::new(); trace.processes.len()],
            any: vec![SortedTimeSpans::new(); trace.processes.len()],
        };
        let ranges = &trace.ranges;
        let by_thread = TableRowsByThread::group_ranges_by_thread(trace);
        let mut found = false;
        for thread in 0..trace.threads.len() {
            for &range in by_thread.rows_of_thread(thread) {
                let row = range as usize;
                if !matching[of_range[row] as usize] {
                    continue;
                }
                found = true;
                let span = (ranges.start_ns[row], ranges.end_ns[row]);
                let process = trace.threads[thread].process_index as usize;
                match ranges.style[row] {
                    HostRangeStyle::PushPop => selection.by_thread[thread].push(span),
                    HostRangeStyle::StartEnd => selection.by_process[process].push(span),
                }
                selection.any[process].push(span);
            }
        }
        let every = [&mut selection.by_thread, &mut selection.by_process, &mut selection.any];
        every.into_iter().flatten().for_each(remove_spans_inside_other_spans);
        (selection, found)
    }

    /// Adds the span of a matching range; callers add ranges in order of time, outer ranges first.
    pub(in crate::analyze) fn add_matching_range(
        &mut self,
        process: u32,
        range: &StreamedRangeRow,
    ) {
        let (all, of) = match range.style {
            HostRangeStyle::PushPop => (&mut self.by_thread, range.thread_index),
            HostRangeStyle::StartEnd => (&mut self.by_process, process),
        };
        if all.len() <= of as usize {
            all.resize(of as usize + 1, SortedTimeSpans::new());
        }
        let spans = &mut all[of as usize];
        if spans.last().is_none_or(|&(_, until)| until < range.end_ns) {
            spans.push((range.start_ns, range.end_ns));
        }
    }

    /// Returns whether a time span of a thread lies inside one matching range of the thread or its
    /// process.
    pub(in crate::analyze) fn contains_span_of_thread(
        &self,
        trace: &Trace,
        thread: u32,
        start: i64,
        end: i64,
    ) -> bool {
        let process = trace.threads[thread as usize].process_index as usize;
        let inside = |spans: &[SortedTimeSpans], of: usize| {
            spans.get(of).is_some_and(|spans| is_inside_one_of_sorted_spans(spans, start, end))
        };
        inside(&self.by_thread, thread as usize) || inside(&self.by_process, process)
    }

    /// Returns whether a time span lies inside one matching range of any thread of the process.
    fn contains_span_of_any_thread(&self, process: u32, start: i64, end: i64) -> bool {
        is_inside_one_of_sorted_spans(&self.any[process as usize], start, end)
    }
}

/// Returns for each range path whether the expression matches the path's text.
pub(in crate::analyze) fn match_each_range_path(
    trace: &Trace,
    paths: &RangePathTree,
    expression: &Regex,
) -> Vec<bool> {
    (0u32..)
        .take(paths.len())
        .map(|path| {
            path != ROOT_RANGE_PATH
                && expression.is_match(&paths.path_text_with_slashes(trace, path))
        })
        .collect()
}

/// Converts a pattern for range paths, in which `*` stands for any text, to a regular expression.
pub(in crate::analyze) fn regex_of_range_path_pattern(pattern: &str) -> Regex {
    let parts: Vec<String> = pattern.split('*').map(regex::escape).collect();
    Regex::new(&format!("(?s)(^|/){}$", parts.join(".*")))
        .expect("an escaped pattern is a valid expression")
}

/// Returns process and id of the graph nodes that were created inside a range whose path matches
/// the expression.
fn graph_nodes_created_in_matching_ranges(
    trace: &Trace,
    expression: &Regex,
) -> HashSet<(u32, u64)> {
    let inside = |node: &&CudaGraphNodeWithRanges| {
        let names: Vec<&str> = node
            .ranges_open_at_creation
            .iter()
            .map(|&name| trace.names.text_of_name(name))
            .collect();
        (1..=names.len()).any(|depth| expression.is_match(&names[..depth].join("/")))
    };
    let nodes = graph_nodes::graph_nodes_created_inside_ranges(trace);
    nodes.iter().filter(inside).map(|node| (node.process_index, node.graph_node_id)).collect()
}

/// Sorts spans by start, and removes each span that lies inside another one. Spans that overlap,
/// without one containing the other, are all kept.
fn remove_spans_inside_other_spans(spans: &mut SortedTimeSpans) {
    spans.sort_by_key(|&(start, end)| (start, std::cmp::Reverse(end)));
    let mut until = i64::MIN;
    spans.retain(|&(_, end)| {
        let keep = end > until;
        until = until.max(end);
        keep
    });
}

/// Returns whether one of the sorted spans contains the span from `start` to `end`.
fn is_inside_one_of_sorted_spans(spans: &SortedTimeSpans, start: i64, end: i64) -> bool {
    let after = spans.partition_point(|&(first, _)| first <= start);
    after.checked_sub(1).is_some_and(|last| spans[last].1 >= end)
}
