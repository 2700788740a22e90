//! The host's work around the operations of a GPU, from one pass over its ranges and calls in order
//! of time. Ranges and calls are not kept, so that a trace of any length takes no more memory than
//! its operations. Absent: judgement.

pub mod gap_cause;
pub mod gpu_gaps;
pub mod host_waits;
mod repeated_ranges;

use hashbrown::HashMap;

use crate::analyze::classes::OperationClasses;
use crate::analyze::launches::NO_CALL;
use crate::analyze::launches::calls::{LaunchCall, LaunchCalls};
use crate::analyze::launches::graph_nodes;
use crate::analyze::launches::passing_calls::{LaunchedOperations, NodeEvents, OpenRangesByThread};
use crate::analyze::operations::{AllOperations, OperationId, OperationKind};
use crate::analyze::ranges::paths::{ROOT_PATH, RangePathId, RangePathTree};
use crate::analyze::replay::GpuWaitCall;
use crate::analyze::time_order::SortedOperations;
use crate::analyze::timeline::idle_time::{self, DeviceActivity, IdleGap, IdleGaps};
use crate::diagnose::host::gap_cause::{
    HOST_DEVICE_CLOCK_ERROR_NS, IdlePartsByCause, LateLaunchAndGap, RecentCallsByThread,
};
use crate::diagnose::host::host_waits::{HostWaits, names_that_wait};
use crate::diagnose::host::repeated_ranges::{HostIterationFinder, LongestRanges};
use crate::model::Trace;
use crate::model::interned_names::NameId;
use crate::model::packed_columns::PackedColumn;
use crate::read::{CallRow, RangeOrCall, RangeRow};
use crate::stats::{GroupedSamples, ValueCountsByGroup};

#[derive(Debug, Clone, Copy, Default)]
pub struct RangePathSum {
    /// Number of ranges.
    pub count: usize,
    /// Sum of the durations of the ranges, nanoseconds of the host.
    pub host_ns: i64,
}

/// Calls of a function at a place.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FunctionCalls {
    /// How many.
    pub count: usize,
    /// Sum of the durations, nanoseconds of the host.
    pub total_ns: i64,
    /// Whether the calls wait for the GPU.
    pub wait: bool,
}

impl FunctionCalls {
    /// Adds another sum of calls to this one.
    pub fn add(&mut self, other: Self) {
        self.count += other.count;
        self.total_ns += other.total_ns;
        self.wait |= other.wait;
    }
}

#[derive(Debug, Clone, Copy)]
pub struct OutermostRange {
    /// Index into [`Trace::processes`].
    pub process: u32,
    /// Time at which the range was opened, nanoseconds.
    pub start: i64,
    /// Time at which the range was closed, nanoseconds.
    pub end: i64,
    pub name: NameId,
}

/// A range, kept if the caller needs every range.
#[derive(Debug, Clone, Copy)]
pub struct KeptHostRange {
    pub path: RangePathId,
    /// Number of the innermost enclosing range, or [`NO_CALL`].
    pub around: u32,
    /// Host time, nanoseconds.
    pub host_ns: i64,
    /// Inputs of the operator that the range stands for, as in
    /// [`crate::model::host::HostRangeTable::inputs`].
    pub inputs: u32,
}

/// Ranges by number, for callers that need each range.
#[derive(Debug, Default)]
pub struct KeptRanges {
    /// Ranges in the order in which they were opened.
    pub ranges: Vec<KeptHostRange>,
    /// For each operation, the numbers of the innermost range around its launch, or [`NO_CALL`],
    /// and of the call.
    pub of_operation: Vec<(u32, u32)>,
}

/// The host's work.
#[derive(Debug, Default)]
pub struct HostActivitySummary {
    /// Number of host calls in the trace.
    pub calls: usize,
    /// Number of ranges in the trace.
    pub ranges: usize,
    pub paths: RangePathTree,
    /// Sum of the ranges of each path.
    pub of_path: Vec<RangePathSum>,
    /// Host times of ranges by path, for paths with at most one enclosing range.
    pub lengths: ValueCountsByGroup,
    /// Ranges that no other range encloses, in order of their start; stored if allocations were
    /// recorded.
    pub outermost: Vec<OutermostRange>,
    /// The path of the innermost range around the launch of each operation.
    pub launched_in: PackedColumn<RangePathId>,
    /// The path of each kernel with the ranges of its graph's capture; empty without such.
    pub inside_graph: PackedColumn<RangePathId>,
    /// The function that launched each operation behind the kernels.
    launched_by: Vec<Option<NameId>>,
    /// The launch call of each operation.
    pub launches: LaunchCalls,
    pub wait_calls: Vec<GpuWaitCall>,
    /// Iterations of each process, by its ranges or marks.
    pub iterations: Vec<Option<HostIterationFinder>>,
    /// Operations whose call is not in the trace.
    pub operations_without_call: usize,
    /// Lengths of the calls that launched kernels, by activity.
    pub launch_calls: ValueCountsByGroup,
    /// Kernels by activity whose call is in the trace.
    pub launched_kernels: Vec<usize>,
    /// Waits for the GPU.
    pub waits: HostWaits,
    /// Calls by function; calls that launch or wait are also separated by the range path around
    /// them.
    pub sites: HashMap<(NameId, Option<RangePathId>), FunctionCalls>,
    /// Empty where nobody asks.
    pub kept: KeptRanges,
    /// Why the GPU was idle in each gap.
    pub idle: IdlePartsByCause,
    /// Number of operations that start before their launch call, and the largest difference in
    /// nanoseconds.
    pub before_launch: (usize, i64),
}

impl HostActivitySummary {
    /// When the operations of a process were launched, in order.
    pub(in crate::diagnose) fn launch_times(
        &self,
        trace: &Trace,
        process: u32,
    ) -> PackedColumn<i64> {
        let all = AllOperations::new(trace);
        let launch = |id: OperationId| self.launches.get(&all, id);
        let own = |id: &OperationId| {
            let thread = launch(*id).and_then(|launch| trace.threads.get(launch.thread as usize));
            thread.is_some_and(|thread| thread.process == process)
        };
        let time = |id| launch(id).map_or(i64::MIN, |launch| launch.start);
        SortedOperations::operations_by_key(all.ids().filter(own), time).iter().map(time).collect()
    }

    /// The function that launched a copy, a set or a graph.
    pub fn function_that_launched(&self, trace: &Trace, operation: OperationId) -> Option<NameId> {
        let kernels = trace.kernels.on_gpu.len();
        self.launched_by[(operation as usize).checked_sub(kernels)?]
    }
}

/// Path and number of an open range.
#[derive(Debug, Clone, Copy)]
struct OpenRangePlace {
    path: RangePathId,
    /// Number of ranges that were opened before this one.
    number: u32,
    depth: u32,
}

/// State of the pass over ranges and calls. Open ranges are known by labels, and closed ranges by
/// names.
#[derive(Debug, Default)]
pub struct HostPassState {
    /// Whether every range is to be kept.
    keep_ranges: bool,
    host: HostActivitySummary,
    activities: Vec<DeviceActivity>,
    /// Index of the activity of each process and device.
    activity_of: Vec<usize>,
    /// For each activity, the index of the gap after the last gap found.
    next_gap: Vec<usize>,
    /// For each activity, the number of operations whose launch was read.
    launched_so_far: Vec<usize>,
    launched: LaunchedOperations,
    open: OpenRangesByThread<OpenRangePlace>,
    lately: RecentCallsByThread,
    /// Whether the call of each name waits for the GPU.
    waiting: Vec<bool>,
    lengths: GroupedSamples,
    launch_calls: GroupedSamples,
    /// Path, start and depth of ranges that were never closed.
    unclosed: Vec<(RangePathId, i64, u32)>,
    nodes: NodeEvents,
    /// The labels around each call that created a graph node.
    around_node: Vec<Vec<NameId>>,
    repeating: LongestRanges,
}

impl HostPassState {
    /// A pass that keeps every range for later questions, or none.
    pub fn new(keep_ranges: bool) -> Self {
        Self { keep_ranges, ..Self::default() }
    }

    /// The next row; the trace is all but ranges and calls.
    pub fn add(&mut self, trace: &Trace, row: RangeOrCall) {
        match row {
            RangeOrCall::Begin => *self = Self::begin_host_pass(trace, self.keep_ranges),
            RangeOrCall::Range(range) => self.add_range(trace, range),
            RangeOrCall::Call(call) => self.call(trace, &call),
        }
    }

    fn begin_host_pass(trace: &Trace, keep_ranges: bool) -> HostPassState {
        let all = AllOperations::new(trace);
        let kept = if keep_ranges { all.len() } else { 0 };
        let activities = idle_time::activity_of_devices(trace, |_| true);
        let activity_of = |place: &crate::model::gpu::OperationPlace| {
            let own =
                |of: &DeviceActivity| (of.process, of.device) == (place.process, place.device);
            activities.iter().position(own).unwrap_or(0)
        };
        let host = HostActivitySummary {
            launched_in: PackedColumn::column_filled_with(all.len(), ROOT_PATH),
            launched_by: vec![None; all.len() - trace.kernels.on_gpu.len()],
            launches: LaunchCalls::new(all.len()),
            launched_kernels: vec![0; activities.len()],
            // Page migrations do not count, because no call launches them.
            operations_without_call: all.len() - OperationClasses::new(trace).migration_count(),
            idle: IdlePartsByCause::new(all.len()),
            of_path: vec![RangePathSum::default()],
            kept: KeptRanges { ranges: Vec::new(), of_operation: vec![(NO_CALL, NO_CALL); kept] },
            ..HostActivitySummary::default()
        };
        let events = &trace.node_events;
        Self {
            keep_ranges,
            host,
            activity_of: trace.places.iter().map(activity_of).collect(),
            next_gap: vec![0; activities.len()],
            launched_so_far: vec![0; activities.len()],
            launched: LaunchedOperations::new(trace),
            lately: RecentCallsByThread::new(trace, &activities),
            waiting: names_that_wait(trace),
            nodes: NodeEvents::new(trace, |event| events.original[event] == 0),
            around_node: vec![Vec::new(); events.time.len()],
            activities,
            ..Self::default()
        }
    }

    fn add_range(&mut self, trace: &Trace, row: RangeRow) {
        self.note_nodes_created_before(trace, row.start);
        self.lately.add_range(trace, &self.activities, &row);
        let around =
            self.open.innermost_around(row.thread, (row.start, row.end)).map(|open| open.state);
        let (parent, depth) =
            around.map_or((ROOT_PATH, 0), |around| (around.path, around.depth + 1));
        let path = self.host.paths.path_inside(parent, NameId(row.label));
        self.host.of_path.resize(self.host.paths.len(), RangePathSum::default());
        self.host.of_path[path as usize].count += 1;
        if row.end == RangeRow::UNCLOSED_RANGE_END {
            self.unclosed.push((path, row.start, depth));
        } else {
            self.add_range_length(path, depth, row.end - row.start);
            self.repeating.add(path, row, depth);
        }
        if around.is_none() && !trace.allocations.time.is_empty() {
            let process = trace.threads[row.thread as usize].process;
            let RangeRow { start, end, label, .. } = row;
            self.host.outermost.push(OutermostRange { process, start, end, name: NameId(label) });
        }
        if self.keep_ranges {
            let around = around.map_or(NO_CALL, |around| around.number);
            let host_ns = row.end - row.start;
            let range = KeptHostRange { path, around, host_ns, inputs: row.inputs };
            self.host.kept.ranges.push(range);
        }
        let number = row_number(self.host.ranges);
        self.open.add(row, OpenRangePlace { path, number, depth }, |_| ());
        self.host.ranges += 1;
    }

    fn add_range_length(&mut self, path: RangePathId, depth: u32, ns: i64) {
        self.host.of_path[path as usize].host_ns += ns;
        if depth < 2 {
            self.lengths.push(path, ns);
        }
    }

    fn call(&mut self, trace: &Trace, call: &CallRow) {
        self.note_nodes_created_before(trace, call.start);
        let waits = self.waiting[call.name.0 as usize];
        let launched = self.launched.by(trace, call);
        let around = match waits || !launched.is_empty() {
            true => self
                .open
                .innermost_around(call.thread, (call.start, call.end))
                .map(|open| open.state),
            false => None,
        };
        let path = around.map(|around| around.path);
        let host = &mut self.host;
        host.operations_without_call = host.operations_without_call.saturating_sub(launched.len());
        let all = AllOperations::new(trace);
        let activity_of = |id| self.activity_of[all.place(id).0 as usize];
        let launch = LaunchCall { start: call.start, end: call.end, thread: call.thread };
        for (index, &id) in launched.iter().enumerate() {
            host.launched_in.set_row(id as usize, path.unwrap_or(ROOT_PATH));
            host.launches.set_launch_call(&all, id, launch);
            if let Some(kept) = host.kept.of_operation.get_mut(id as usize) {
                *kept = (around.map_or(NO_CALL, |around| around.number), row_number(host.calls));
            }
            let activity = activity_of(id);
            if all.kind_and_row(id).0 == OperationKind::Kernel {
                host.launched_kernels[activity] += 1;
                // One launch call of a graph launches many kernels.
                if launched[..index].iter().all(|&other| activity_of(other) != activity) {
                    self.launch_calls.push(row_number(activity), call.end - call.start);
                }
            } else {
                host.launched_by[id as usize - trace.kernels.on_gpu.len()] = Some(call.name);
            }
            let early = call.start - all.start(id);
            if early > HOST_DEVICE_CLOCK_ERROR_NS {
                let (count, most) = &mut host.before_launch;
                *count += 1;
                *most = early.max(*most);
            }
            let next = &mut self.next_gap[activity];
            let gaps = &self.activities[activity].gaps;
            let Some(gap) = gap_before_operation(&all, gaps, next, id) else { continue };
            let late = LateLaunchAndGap {
                launch: call,
                gap: &gap,
                activity,
                stream: trace.places[all.place(id).0 as usize].stream,
                same_launch: all.correlation(gap.before) == call.correlation,
                pending: self.launched_so_far[activity].saturating_sub(gap.started as usize),
            };
            let split = self.lately.split_gap(trace, &self.activities, &late);
            host.idle.set(&gap, &split.parts);
            split.waits.iter().for_each(|&(wait, ns)| host.waits.add_saved_time(wait, ns));
        }
        for &id in launched {
            self.launched_so_far[activity_of(id)] += 1;
        }
        if !launched.is_empty() {
            let stream = |&id: &OperationId| trace.places[all.place(id).0 as usize].stream;
            self.lately.forget_stream_causes(call.thread, launched.iter().map(stream));
        }
        let wait =
            waits.then(|| host.waits.add(call, around.map(|around| (around.path, around.number))));
        if waits {
            let CallRow { thread, start, end, .. } = *call;
            host.wait_calls.push(GpuWaitCall { thread, start, end });
        }
        if wait.is_none() && !launched.is_empty() {
            host.waits.count_launch(call.thread);
        }
        let site = host.sites.entry((call.name, path)).or_default();
        site.add(FunctionCalls { count: 1, total_ns: call.end - call.start, wait: waits });
        host.calls += 1;
        self.lately.add(trace, &self.activities, call, wait);
    }

    /// Notes the ranges around nodes that were created before a time.
    fn note_nodes_created_before(&mut self, trace: &Trace, time: i64) {
        let events = &trace.node_events;
        while let Some(event) = self.nodes.next_if_before(trace, time) {
            let at = events.time[event];
            let open = self.open.at(events.thread[event], at, |_| ());
            self.around_node[event] = open.iter().map(|range| NameId(range.row.label)).collect();
        }
    }

    /// Results at the end: names in place of labels, and the end of ranges that were never closed.
    pub(in crate::diagnose) fn finish_host_pass(
        mut self,
        trace: &Trace,
        name_of: impl Fn(NameId) -> NameId,
        last: i64,
    ) -> (Vec<DeviceActivity>, HostActivitySummary) {
        self.note_nodes_created_before(trace, i64::MAX);
        for (path, start, depth) in std::mem::take(&mut self.unclosed) {
            self.add_range_length(path, depth, last.max(start) - start);
        }
        let Self { mut host, mut lengths, mut around_node, repeating, .. } = self;
        let (mut paths, now) = host.paths.renamed(&name_of);
        let now_is = |path: RangePathId| now[path as usize];
        let launch_times = |process| host.launch_times(trace, process);
        let iterations = repeating.host_iterations(trace, &paths, now_is, launch_times);
        host.launched_in = host.launched_in.iter().map(now_is).collect();
        host.waits.renumber_paths(now_is);
        host.idle.rename_range_labels(&name_of);
        host.kept.ranges.iter_mut().for_each(|range| range.path = now_is(range.path));
        let mut of_path = vec![RangePathSum::default(); paths.len()];
        for (&path, sum) in now.iter().zip(&host.of_path) {
            let all: &mut RangePathSum = &mut of_path[path as usize];
            all.count += sum.count;
            all.host_ns += sum.host_ns;
        }
        let mut sites: HashMap<(NameId, Option<RangePathId>), FunctionCalls> = HashMap::new();
        for ((name, path), calls) in host.sites {
            sites.entry((name, path.map(now_is))).or_default().add(calls);
        }
        lengths.merge_value_groups(&now);
        for range in &mut host.outermost {
            range.end = range.end.min(last.max(range.start));
            range.name = name_of(range.name);
        }
        around_node.iter_mut().flatten().for_each(|name| *name = name_of(*name));
        let nodes = graph_nodes::graph_nodes_in_ranges(trace, around_node);
        let inside = graph_nodes::kernel_paths_inside(trace, &nodes, &host.launched_in, &mut paths);
        of_path.resize(paths.len(), RangePathSum::default());
        let host = HostActivitySummary {
            iterations,
            paths,
            of_path,
            sites,
            lengths: lengths.into_counted_values(),
            launch_calls: self.launch_calls.into_counted_values(),
            inside_graph: inside,
            ..host
        };
        (self.activities, host)
    }
}

/// The idle gap that an operation ended; `next` is the index after the gap found last, since
/// operations are launched almost in the order in which they run.
fn gap_before_operation(
    all: &AllOperations<'_>,
    gaps: &IdleGaps,
    next: &mut usize,
    id: OperationId,
) -> Option<IdleGap> {
    if gaps.get(all, *next).is_none_or(|gap| gap.after != id) {
        *next = gaps.partition_point(all, |gap| gap.end < all.start(id));
    }
    let gap = gaps.get(all, *next).filter(|gap| gap.after == id)?;
    *next += 1;
    Some(gap)
}

/// Row numbers are stored in 32 bits.
fn row_number(index: usize) -> u32 {
    u32::try_from(index).expect("fewer than 2^32 rows")
}
