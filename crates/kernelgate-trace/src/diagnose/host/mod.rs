//! Summarises the host's launches, waits and ranges of a trace in one pass over its ranges and
//! calls in order of time. Ranges and calls are not kept, so that memory grows only with the number
//! of GPU operations. Absent: judgement.

pub mod gap_cause;
pub mod gpu_gaps;
pub mod host_waits;
mod repeated_ranges;

use hashbrown::HashMap;

use crate::analyze::classes::OperationClassesOfTrace;
use crate::analyze::launches::NO_LAUNCH_CALL;
use crate::analyze::launches::calls::{LaunchCallTable, OperationLaunchCall};
use crate::analyze::launches::graph_nodes;
use crate::analyze::launches::passing_calls::{
    OpenRangesByThread, OperationsByLaunchKey, UnprocessedGraphNodeEvents,
};
use crate::analyze::operations::{AllGpuOperations, GpuOperationId, GpuOperationKind};
use crate::analyze::ranges::paths::{ROOT_RANGE_PATH, RangePathId, RangePathTree};
use crate::analyze::replay::HostCallThatWaitsForGpu;
use crate::analyze::time_order::OperationsInOrder;
use crate::analyze::timeline::idle_time::{self, GpuIdleGap, GpuIdleGaps, ProcessActivityOnGpu};
use crate::diagnose::host::gap_cause::{
    GapAndItsEndingLaunch, IdleGapPartsByCause, MAX_HOST_GPU_CLOCK_DIFFERENCE_NS,
    PastCallsAndRangesByThread,
};
use crate::diagnose::host::host_waits::{HostWaitsOfTrace, which_names_wait_for_gpu};
use crate::diagnose::host::repeated_ranges::{HostIterationsOfProcess, LongestRangesSoFar};
use crate::model::Trace;
use crate::model::interned_names::InternedNameId;
use crate::model::packed_columns::BitPackedColumn;
use crate::read::{StreamedCallRow, StreamedRangeOrCall, StreamedRangeRow};
use crate::stats::{SortedValuesByGroup, ValuesByGroup};

#[derive(Debug, Clone, Copy, Default)]
pub struct RangeCountAndHostTime {
    /// Number of ranges.
    pub range_count: usize,
    /// Total time that the ranges lasted on the host, nanoseconds.
    pub total_host_ns: i64,
}

/// Host calls of one function inside one range path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FunctionCallSum {
    /// Number of calls of this function.
    pub calls: usize,
    /// Total duration of the host calls, nanoseconds.
    pub total_call_ns: i64,
    /// Whether these calls wait for the GPU.
    pub waits_for_gpu: bool,
}

impl FunctionCallSum {
    /// Adds another sum of calls to this sum.
    pub fn add_other_calls(&mut self, other: Self) {
        self.calls += other.calls;
        self.total_call_ns += other.total_call_ns;
        self.waits_for_gpu |= other.waits_for_gpu;
    }
}

#[derive(Debug, Clone, Copy)]
pub struct OutermostNamedRange {
    /// Index into [`Trace::processes`].
    pub process_index: u32,
    /// Time at which the host opened the range, nanoseconds.
    pub start_ns: i64,
    /// Time at which the host closed the range, nanoseconds.
    pub end_ns: i64,
    pub range_name: InternedNameId,
}

/// One NVTX range of the trace, which is kept only if an analysis needs single ranges.
#[derive(Debug, Clone, Copy)]
pub struct KeptNamedRange {
    pub path: RangePathId,
    /// Number of the innermost enclosing range, or [`NO_LAUNCH_CALL`] if no range encloses it.
    pub enclosing_range_number: u32,
    /// Host time, nanoseconds.
    pub host_duration_ns: i64,
    /// Recorded inputs of the framework operator that the range stands for, as in
    /// [`crate::model::host::HostRangeTable::operator_inputs_number`].
    pub operator_inputs_number: u32,
}

/// Single ranges of the trace by number, for analyses that need them.
#[derive(Debug, Default)]
pub struct KeptNamedRanges {
    /// All ranges of the trace in the order in which they were opened.
    pub ranges: Vec<KeptNamedRange>,
    /// For each GPU operation, the number of the innermost range around its launch, or
    /// [`NO_LAUNCH_CALL`], and the number of its launch call.
    pub range_and_call_of_operation: Vec<(u32, u32)>,
}

/// The host's work.
#[derive(Debug, Default)]
pub struct HostSummaryOfTrace {
    /// Number of host calls in the trace.
    pub calls: usize,
    /// Number of NVTX ranges in the trace.
    pub ranges: usize,
    pub paths: RangePathTree,
    /// For each range path, the number of its ranges and their total time on the host.
    pub count_and_time_of_path: Vec<RangeCountAndHostTime>,
    /// Times that ranges lasted on the host, by path, for paths with at most one enclosing range.
    pub range_host_ns_by_path: SortedValuesByGroup,
    /// Ranges that no other range encloses, in order of their start; stored only if the trace
    /// records allocations.
    pub outermost: Vec<OutermostNamedRange>,
    /// For each GPU operation, the path of the innermost range around its launch.
    pub range_path_of_launch: BitPackedColumn<RangePathId>,
    /// For each kernel, its launch path followed by the ranges in which its graph node was created;
    /// empty if no kernel has such ranges.
    pub range_path_with_graph_ranges: BitPackedColumn<RangePathId>,
    /// For each copy, memset and graph launch, the name of the host function that launched it.
    launch_function_of_non_kernels: Vec<Option<InternedNameId>>,
    /// For each GPU operation, times and thread of its launch call.
    pub launches: LaunchCallTable,
    pub wait_calls: Vec<HostCallThatWaitsForGpu>,
    /// For each process, its iterations on the host as found by ranges or marks.
    pub iterations: Vec<Option<HostIterationsOfProcess>>,
    /// Number of operations whose launch call is not in the trace, without page migrations.
    pub operations_without_launch_call: usize,
    /// Durations of the host calls that launched kernels, by activity (process on a GPU).
    pub launch_call_ns_by_activity: SortedValuesByGroup,
    /// For each activity, the number of kernels whose launch call is in the trace.
    pub launched_kernel_count_by_activity: Vec<usize>,
    /// Waits of the host for the GPU, grouped by range path and by launch count.
    pub host_waits: HostWaitsOfTrace,
    /// Host calls by function name; calls that launch or wait are also separated by the path of the
    /// innermost range around them.
    pub call_sums_by_function: HashMap<(InternedNameId, Option<RangePathId>), FunctionCallSum>,
    /// Single named ranges with their calls and operations; empty unless a caller asks for them.
    pub kept_ranges: KeptNamedRanges,
    /// For each idle gap of a GPU, the causes of the gap.
    pub causes_of_gaps: IdleGapPartsByCause,
    /// Number of operations that start before their launch call, and the largest such difference,
    /// nanoseconds.
    pub count_and_largest_ns_before_launch: (usize, i64),
}

impl HostSummaryOfTrace {
    /// Counts an operation that starts `early_ns` before its launch call, if the difference exceeds
    /// the assumed error between the host's and the GPU's clock.
    fn count_operation_before_its_launch(&mut self, early_ns: i64) {
        if early_ns > MAX_HOST_GPU_CLOCK_DIFFERENCE_NS {
            let (count, most) = &mut self.count_and_largest_ns_before_launch;
            *count += 1;
            *most = early_ns.max(*most);
        }
    }

    /// Returns the start times of the launch calls of a process's operations, in ascending order.
    pub(in crate::diagnose) fn launch_times_of_process(
        &self,
        trace: &Trace,
        process: u32,
    ) -> BitPackedColumn<i64> {
        let all = AllGpuOperations::number_operations_of_trace(trace);
        let launch = |id: GpuOperationId| self.launches.launch_call_of_operation(&all, id);
        let own = |id: &GpuOperationId| {
            let thread =
                launch(*id).and_then(|launch| trace.threads.get(launch.thread_index as usize));
            thread.is_some_and(|thread| thread.process_index == process)
        };
        let time = |id| launch(id).map_or(i64::MIN, |launch| launch.call_start_ns);
        OperationsInOrder::sort_operations_by_key(all.all_operation_ids().filter(own), time)
            .iter()
            .map(time)
            .collect()
    }

    /// Returns the name of the host function that launched a copy, a memset or a graph.
    pub fn function_that_launched_operation(
        &self,
        trace: &Trace,
        operation: GpuOperationId,
    ) -> Option<InternedNameId> {
        let kernels = trace.kernels.on_gpu.operation_count();
        self.launch_function_of_non_kernels[(operation as usize).checked_sub(kernels)?]
    }
}

/// Path, number and nesting depth of an open range.
#[derive(Debug, Clone, Copy)]
struct PathAndNumberOfOpenRange {
    path: RangePathId,
    /// Number of ranges of the trace that were opened before this one.
    range_number: u32,
    depth: u32,
}

/// State of the pass over the ranges and calls of a trace in order of time. Range names are label
/// numbers until the pass ends, when labels are replaced by names.
#[derive(Debug, Default)]
pub struct HostSummaryPass {
    /// Whether the pass keeps every single range for later analyses.
    keep_ranges: bool,
    summary: HostSummaryOfTrace,
    activities: Vec<ProcessActivityOnGpu>,
    /// For each place (process, GPU and stream), the index of its activity.
    activity_index_by_stream: Vec<usize>,
    /// For each activity, the index of the gap after the gap that was found last.
    next_idle_gap_by_activity: Vec<usize>,
    /// For each activity, the number of operations whose launch call has been read.
    launched_operations_by_activity: Vec<usize>,
    operations: OperationsByLaunchKey,
    open_ranges: OpenRangesByThread<PathAndNumberOfOpenRange>,
    past_events: PastCallsAndRangesByThread,
    /// For each name of the trace, whether a function of this name waits for the GPU.
    is_waiting_function_by_name: Vec<bool>,
    range_host_ns_by_path: ValuesByGroup,
    launch_call_ns_by_activity: ValuesByGroup,
    /// Path, start and nesting depth of ranges that were never closed.
    path_start_depth_of_unclosed_ranges: Vec<(RangePathId, i64, u32)>,
    graph_node_events: UnprocessedGraphNodeEvents,
    /// For each event of a created graph node, the labels of the ranges that were open.
    open_ranges_by_graph_node: Vec<Vec<InternedNameId>>,
    longest_ranges: LongestRangesSoFar,
}

impl HostSummaryPass {
    /// Prepares a pass, which keeps every single range for later analyses if `keep_ranges`.
    pub fn prepare_host_summary_pass(keep_ranges: bool) -> Self {
        Self { keep_ranges, ..Self::default() }
    }

    /// Processes the next range or call; `trace` contains everything except ranges and calls.
    pub fn process_next_row(&mut self, trace: &Trace, row: StreamedRangeOrCall) {
        match row {
            StreamedRangeOrCall::PassBegins => {
                *self = Self::begin_pass_over_trace(trace, self.keep_ranges)
            }
            StreamedRangeOrCall::Range(range) => self.process_range_row(trace, range),
            StreamedRangeOrCall::Call(call) => self.process_host_call_row(trace, &call),
        }
    }

    fn begin_pass_over_trace(trace: &Trace, keep_ranges: bool) -> HostSummaryPass {
        let all = AllGpuOperations::number_operations_of_trace(trace);
        let kept = if keep_ranges { all.len() } else { 0 };
        let activities = idle_time::activities_by_process_and_gpu(trace, |_| true);
        let activity_of = |place: &crate::model::gpu::ProcessDeviceContextAndStream| {
            let own = |of: &ProcessActivityOnGpu| {
                (of.process_index, of.gpu_ordinal) == (place.process_index, place.device)
            };
            activities.iter().position(own).unwrap_or(0)
        };
        let host = HostSummaryOfTrace {
            range_path_of_launch: BitPackedColumn::column_filled_with(all.len(), ROOT_RANGE_PATH),
            launch_function_of_non_kernels: vec![
                None;
                all.len() - trace.kernels.on_gpu.operation_count()
            ],
            launches: LaunchCallTable::table_without_launch_calls(all.len()),
            launched_kernel_count_by_activity: vec![0; activities.len()],
            // Page migrations are not counted as operations without a call, because no call
            // launches them.
            operations_without_launch_call: all.len()
                - OperationClassesOfTrace::classify_operations_by_name(trace)
                    .page_migration_count(),
            causes_of_gaps: IdleGapPartsByCause::without_gaps_of_operations(all.len()),
            count_and_time_of_path: vec![RangeCountAndHostTime::default()],
            kept_ranges: KeptNamedRanges {
                ranges: Vec::new(),
                range_and_call_of_operation: vec![(NO_LAUNCH_CALL, NO_LAUNCH_CALL); kept],
            },
            ..HostSummaryOfTrace::default()
        };
        let events = &trace.node_events;
        Self {
            keep_ranges,
            summary: host,
            activity_index_by_stream: trace.places.iter().map(activity_of).collect(),
            next_idle_gap_by_activity: vec![0; activities.len()],
            launched_operations_by_activity: vec![0; activities.len()],
            operations: OperationsByLaunchKey::operations_without_read_calls(trace),
            past_events: PastCallsAndRangesByThread::state_before_first_call(trace, &activities),
            is_waiting_function_by_name: which_names_wait_for_gpu(trace),
            graph_node_events: UnprocessedGraphNodeEvents::collect_graph_node_events(
                trace,
                |event| events.cloned_from_node_id[event] == 0,
            ),
            open_ranges_by_graph_node: vec![Vec::new(); events.time_ns.len()],
            activities,
            ..Self::default()
        }
    }

    fn process_range_row(&mut self, trace: &Trace, row: StreamedRangeRow) {
        self.store_ranges_of_nodes_created_before(trace, row.start_ns);
        self.past_events.add_past_range(trace, &self.activities, &row);
        let around = self
            .open_ranges
            .innermost_range_around_span(row.thread_index, (row.start_ns, row.end_ns))
            .map(|open| open.range_state);
        let (parent, depth) =
            around.map_or((ROOT_RANGE_PATH, 0), |around| (around.path, around.depth + 1));
        let path =
            self.summary.paths.path_of_name_inside_parent(parent, InternedNameId(row.name_index));
        self.summary
            .count_and_time_of_path
            .resize(self.summary.paths.len(), RangeCountAndHostTime::default());
        self.summary.count_and_time_of_path[path as usize].range_count += 1;
        if row.end_ns == StreamedRangeRow::UNCLOSED_RANGE_END {
            self.path_start_depth_of_unclosed_ranges.push((path, row.start_ns, depth));
        } else {
            self.add_host_time_of_range(path, depth, row.end_ns - row.start_ns);
            self.longest_ranges.add_range_if_long(path, row, depth);
        }
        if around.is_none() && !trace.allocations.time_ns.is_empty() {
            let process = trace.threads[row.thread_index as usize].process_index;
            let StreamedRangeRow { start_ns: start, end_ns: end, name_index: label, .. } = row;
            self.summary.outermost.push(OutermostNamedRange {
                process_index: process,
                start_ns: start,
                end_ns: end,
                range_name: InternedNameId(label),
            });
        }
        if self.keep_ranges {
            let around = around.map_or(NO_LAUNCH_CALL, |around| around.range_number);
            let host_ns = row.end_ns - row.start_ns;
            let range = KeptNamedRange {
                path,
                enclosing_range_number: around,
                host_duration_ns: host_ns,
                operator_inputs_number: row.operator_inputs_number,
            };
            self.summary.kept_ranges.ranges.push(range);
        }
        let number = row_number_in_32_bits(self.summary.ranges);
        self.open_ranges.open_range_of_thread(
            row,
            PathAndNumberOfOpenRange { path, range_number: number, depth },
            |_| (),
        );
        self.summary.ranges += 1;
    }

    fn add_host_time_of_range(&mut self, path: RangePathId, depth: u32, ns: i64) {
        self.summary.count_and_time_of_path[path as usize].total_host_ns += ns;
        if depth < 2 {
            self.range_host_ns_by_path.push_value_of_group(path, ns);
        }
    }

    fn process_host_call_row(&mut self, trace: &Trace, call: &StreamedCallRow) {
        self.store_ranges_of_nodes_created_before(trace, call.start_ns);
        let waits = self.is_waiting_function_by_name[call.function_name.0 as usize];
        let launched = self.operations.operations_launched_by_host_call(trace, call);
        let around = match waits || !launched.is_empty() {
            true => self
                .open_ranges
                .innermost_range_around_span(call.thread_index, (call.start_ns, call.end_ns))
                .map(|open| open.range_state),
            false => None,
        };
        let path = around.map(|around| around.path);
        let host = &mut self.summary;
        host.operations_without_launch_call =
            host.operations_without_launch_call.saturating_sub(launched.len());
        let all = AllGpuOperations::number_operations_of_trace(trace);
        let activity_of = |id| self.activity_index_by_stream[all.place_of_operation(id).0 as usize];
        let StreamedCallRow { thread_index, start_ns, end_ns, .. } = *call;
        let launch =
            OperationLaunchCall { call_start_ns: start_ns, call_end_ns: end_ns, thread_index };
        for (index, &id) in launched.iter().enumerate() {
            host.range_path_of_launch.replace_row(id as usize, path.unwrap_or(ROOT_RANGE_PATH));
            host.launches.set_launch_call_of_operation(&all, id, launch);
            if let Some(kept) = host.kept_ranges.range_and_call_of_operation.get_mut(id as usize) {
                let range = around.map_or(NO_LAUNCH_CALL, |around| around.range_number);
                *kept = (range, row_number_in_32_bits(host.calls));
            }
            let activity = activity_of(id);
            if all.kind_and_table_row(id).0 == GpuOperationKind::Kernel {
                host.launched_kernel_count_by_activity[activity] += 1;
                // One launch call of a graph launches many kernels, but its duration is added once
                // for each activity.
                if launched[..index].iter().all(|&other| activity_of(other) != activity) {
                    let row = row_number_in_32_bits(activity);
                    self.launch_call_ns_by_activity.push_value_of_group(row, end_ns - start_ns);
                }
            } else {
                let row = id as usize - trace.kernels.on_gpu.operation_count();
                host.launch_function_of_non_kernels[row] = Some(call.function_name);
            }
            host.count_operation_before_its_launch(call.start_ns - all.operation_start_ns(id));
            let next = &mut self.next_idle_gap_by_activity[activity];
            let gaps = &self.activities[activity].gaps;
            let Some(gap) = idle_gap_ended_by_operation(&all, gaps, next, id) else { continue };
            let late = GapAndItsEndingLaunch {
                launch: call,
                gap: &gap,
                activity,
                stream: trace.places[all.place_of_operation(id).0 as usize].stream,
                same_launch: all.correlation_id_of_operation(gap.operation_before_gap)
                    == call.correlation,
                pending: self.launched_operations_by_activity[activity]
                    .saturating_sub(gap.operations_started_before_gap as usize),
            };
            let split = self.past_events.split_gap_into_causes(trace, &self.activities, &late);
            host.causes_of_gaps.store_parts_of_gap(&gap, &split.parts);
            for &(wait, ns) in &split.waits {
                host.host_waits.add_idle_ns_saved_without_wait(wait, ns);
            }
        }
        for &id in launched {
            self.launched_operations_by_activity[activity_of(id)] += 1;
        }
        if !launched.is_empty() {
            let stream =
                |&id: &GpuOperationId| trace.places[all.place_of_operation(id).0 as usize].stream;
            self.past_events.forget_waits_of_streams(thread_index, launched.iter().map(stream));
        }
        let range = around.map(|it| (it.path, it.range_number));
        let wait = waits.then(|| host.host_waits.add_wait(call, range));
        if waits {
            let (wait_start_ns, wait_end_ns) = (start_ns, end_ns);
            let wait = HostCallThatWaitsForGpu { thread_index, wait_start_ns, wait_end_ns };
            host.wait_calls.push(wait);
        }
        if wait.is_none() && !launched.is_empty() {
            host.host_waits.count_launch_of_thread(call.thread_index);
        }
        let site = host.call_sums_by_function.entry((call.function_name, path)).or_default();
        let total_call_ns = end_ns - start_ns;
        site.add_other_calls(FunctionCallSum { calls: 1, total_call_ns, waits_for_gpu: waits });
        host.calls += 1;
        self.past_events.add_past_call(trace, &self.activities, call, wait);
    }

    /// Stores the open ranges for each graph node that was created before `time`.
    fn store_ranges_of_nodes_created_before(&mut self, trace: &Trace, time: i64) {
        let events = &trace.node_events;
        while let Some(event) = self.graph_node_events.take_earliest_event_before(trace, time) {
            let at = events.time_ns[event];
            let open =
                self.open_ranges.ranges_of_thread_open_at(events.thread_index[event], at, |_| ());
            self.open_ranges_by_graph_node[event] =
                open.iter().map(|range| InternedNameId(range.row.name_index)).collect();
        }
    }

    /// Returns the results of the pass: labels are replaced by names, and ranges that were never
    /// closed end at `last`.
    pub(in crate::diagnose) fn finish_pass_with_range_names(
        mut self,
        trace: &Trace,
        name_of: impl Fn(InternedNameId) -> InternedNameId,
        last: i64,
    ) -> (Vec<ProcessActivityOnGpu>, HostSummaryOfTrace) {
        self.store_ranges_of_nodes_created_before(trace, i64::MAX);
        for (path, start, depth) in std::mem::take(&mut self.path_start_depth_of_unclosed_ranges) {
            self.add_host_time_of_range(path, depth, last.max(start) - start);
        }
        let Self {
            summary: mut host,
            range_host_ns_by_path: mut lengths,
            open_ranges_by_graph_node: mut around_node,
            longest_ranges: repeating,
            ..
        } = self;
        let (mut paths, now) = host.paths.with_replaced_range_names(&name_of);
        let now_is = |path: RangePathId| now[path as usize];
        let launch_times = |process| host.launch_times_of_process(trace, process);
        let iterations =
            repeating.find_host_iterations_of_processes(trace, &paths, now_is, launch_times);
        host.range_path_of_launch =
            host.range_path_of_launch.iter_decoded_rows().map(now_is).collect();
        host.host_waits.replace_path_numbers(now_is);
        host.causes_of_gaps.replace_range_labels_by_names(&name_of);
        host.kept_ranges.ranges.iter_mut().for_each(|range| range.path = now_is(range.path));
        let mut of_path = vec![RangeCountAndHostTime::default(); paths.len()];
        for (&path, sum) in now.iter().zip(&host.count_and_time_of_path) {
            let all: &mut RangeCountAndHostTime = &mut of_path[path as usize];
            all.range_count += sum.range_count;
            all.total_host_ns += sum.total_host_ns;
        }
        let mut sites: HashMap<(InternedNameId, Option<RangePathId>), FunctionCallSum> =
            HashMap::new();
        for ((name, path), calls) in host.call_sums_by_function {
            sites.entry((name, path.map(now_is))).or_default().add_other_calls(calls);
        }
        lengths.renumber_and_merge_groups(&now);
        for range in &mut host.outermost {
            range.end_ns = range.end_ns.min(last.max(range.start_ns));
            range.range_name = name_of(range.range_name);
        }
        around_node.iter_mut().flatten().for_each(|name| *name = name_of(*name));
        let nodes = graph_nodes::graph_nodes_by_ranges_around_creation(trace, around_node);
        let inside = graph_nodes::launch_paths_extended_by_graph_node_ranges(
            trace,
            &nodes,
            &host.range_path_of_launch,
            &mut paths,
        );
        of_path.resize(paths.len(), RangeCountAndHostTime::default());
        let host = HostSummaryOfTrace {
            iterations,
            paths,
            count_and_time_of_path: of_path,
            call_sums_by_function: sites,
            range_host_ns_by_path: lengths.into_sorted_values_with_counts(),
            launch_call_ns_by_activity: self
                .launch_call_ns_by_activity
                .into_sorted_values_with_counts(),
            range_path_with_graph_ranges: inside,
            ..host
        };
        (self.activities, host)
    }
}

/// Returns the idle gap that an operation ended; `next` is the index to try first, because
/// operations are launched almost in the order in which they run.
fn idle_gap_ended_by_operation(
    all: &AllGpuOperations<'_>,
    gaps: &GpuIdleGaps,
    next: &mut usize,
    id: GpuOperationId,
) -> Option<GpuIdleGap> {
    if gaps.idle_gap_at_index(all, *next).is_none_or(|gap| gap.operation_after_gap != id) {
        *next = gaps.first_gap_index_where_not(all, |gap| gap.end_ns < all.operation_start_ns(id));
    }
    let gap = gaps.idle_gap_at_index(all, *next).filter(|gap| gap.operation_after_gap == id)?;
    *next += 1;
    Some(gap)
}

/// Converts a row number to 32 bits; panics if the number is larger.
fn row_number_in_32_bits(index: usize) -> u32 {
    u32::try_from(index).expect("fewer than 2^32 rows")
}
