//! Computes the GPU work launched in each NVTX range as a tree: time, share, number of operations,
//! and the bound of the time.

use hashbrown::HashMap;

use super::host::KeptNamedRanges;
use super::trace_facts::DiagnosisContext;
use crate::analyze::operations::GpuOperationId;
use crate::analyze::ranges::paths::{ROOT_RANGE_PATH, RangePathId};
use crate::analyze::timeline::idle_time::exclusive_busy_ns_of_operations;
use crate::analyze::timeline::span_union::UnionOfTimeSpans;
use crate::model::gpu::DeclaredWorkOfRange;
use crate::model::interned_names::replace_digits_by_number_sign;

/// Smallest share of a range's time in which the GPU must be busy for the range not to be
/// launch-bound.
const MIN_BUSY_SHARE_IF_NOT_LAUNCH_BOUND: f64 = 0.7;
/// Smallest reached share of a limit (memory bandwidth or operation rate) for which the limit
/// counts as bounding the time. The shares follow from declared work, which is only the work that
/// the mathematics needs. A kernel at its unit's limit reaches less than the whole limit, because
/// exponentials, addresses and repeated reads are not declared.
pub(super) const MIN_REACHED_SHARE_OF_BOUNDING_LIMIT: f64 = 0.4;
/// Smallest difference between the reached shares of memory and compute for which only the larger
/// one bounds the time.
const MIN_SHARE_DIFFERENCE_OF_BOUNDING_LIMIT: f64 = 0.1;

/// Bound of the time of a range's GPU work: launches, memory, compute, both, or latency.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeBoundOfRange {
    /// The GPU waits for the host to launch work.
    LaunchBound,
    /// The memory's bandwidth.
    MemoryBound,
    /// The operation rate of one of the GPU's compute units bounds the time.
    ComputeBound,
    /// Neither memory nor compute bounds the time: the kernels have dependencies, or too little
    /// parallel work.
    LatencyBound,
    /// Memory bandwidth and a compute unit bound the time about equally.
    MemoryAndComputeBound,
    /// The GPU is busy, and no work is declared, so the bound is not known.
    BusyWithoutKnownLimit,
}

impl TimeBoundOfRange {
    /// Returns the printed label of what bounds the time of a range.
    pub const fn printed_time_bound(self) -> &'static str {
        match self {
            Self::LaunchBound => "launch-bound",
            Self::MemoryBound => "memory-bound",
            Self::ComputeBound => "compute-bound",
            Self::LatencyBound => "latency-bound",
            Self::MemoryAndComputeBound => "memory and compute",
            Self::BusyWithoutKnownLimit => "busy",
        }
    }
}

/// A node of the range tree: the ranges of one path, and the GPU work that was launched in them.
#[derive(Debug, Clone, PartialEq)]
pub struct RangeTreeRow {
    /// Path of the ranges; `#` stands for numbers in which their names differ.
    pub range_path: String,
    /// Name of the innermost range on the path.
    pub range_name: String,
    /// Number of ranges that enclose these ranges.
    pub depth: usize,
    /// Number of these ranges in which operations were launched; for a range inside a graph
    /// capture, the number of launches of the graph.
    pub ranges_with_operations: usize,
    /// Total time that the ranges with operations lasted on the host, nanoseconds; `None` for
    /// ranges that were open while a graph was captured.
    pub total_host_ns: Option<i64>,
    /// Nanoseconds in which at least one operation that was launched in these ranges ran.
    pub gpu_busy_ns: i64,
    /// Nanoseconds in which an operation of these ranges ran while no operation of the trace that
    /// had started earlier ran; these times can be added.
    pub non_overlapping_gpu_ns: i64,
    /// Time from the first start to the last end of an operation, summed over the ranges,
    /// nanoseconds.
    pub total_gpu_span_ns: i64,
    /// Busy time of these ranges divided by the busy time of the GPU, 0 to 1.
    pub share_of_busy_time: f64,
    /// Number of kernels, copies, memsets and graph launches that were launched in these ranges.
    pub operations: usize,
    pub bound: TimeBoundOfRange,
    /// Reached share of each limit (memory bandwidth or operation rate), 0 to 1; empty if the work
    /// is not declared.
    pub reached_share_of_limits: Vec<(String, f64)>,
}

/// A node of the range tree while its operations are added up.
#[derive(Default)]
struct RangeTreeNodeInProgress {
    parent_node_index: Option<usize>,
    depth: usize,
    /// Name of the ranges; `#` stands for numbers in which several names differ.
    range_name: String,
    declared_work_index: Option<usize>,
    operations: usize,
    non_overlapping_gpu_ns: i64,
    operation_spans_ns: Vec<(i64, i64)>,
    /// First start and last end of operations for each range of the node, or for each launch of a
    /// graph that was captured inside the range.
    gpu_span_by_range_number: HashMap<u64, (i64, i64)>,
    total_host_ns: Option<i64>,
    gpu_idle_ns: i64,
    /// Idle time of the GPU inside the ranges in which the next operation was not launched yet,
    /// nanoseconds.
    idle_ns_before_launch: i64,
}

/// A range in which an operation was launched: its node, and the number of the range or graph
/// launch.
type NodeAndRangeNumber = (usize, u64);

#[derive(Default)]
struct RangeTreeInProgress<'a> {
    /// Names of ranges that are not merged with ranges whose names differ only in numbers.
    names_not_merged: &'a [&'a str],
    nodes: Vec<RangeTreeNodeInProgress>,
    node_of_path: HashMap<RangePathId, usize>,
    node_by_parent_and_pattern: HashMap<(Option<usize>, String), usize>,
}

/// Builds the range tree of a trace whose single ranges were kept.
pub(super) fn build_tree_of_gpu_work_by_range(
    context: &DiagnosisContext<'_>,
    apart: &[&str],
) -> Vec<RangeTreeRow> {
    let all = context.operations;
    let mut tree =
        RangeTreeInProgress { names_not_merged: apart, ..RangeTreeInProgress::default() };
    let own_ns = exclusive_busy_ns_of_operations(context.trace);
    let chains: Vec<Vec<NodeAndRangeNumber>> = all
        .all_operation_ids()
        .map(|id| tree.nodes_and_ranges_around_launch(context, id))
        .collect();
    for id in all.all_operation_ids() {
        let span = all.operation_start_and_end_ns(id);
        for &(node, instance) in &chains[id as usize] {
            let node = &mut tree.nodes[node];
            node.operations += 1;
            node.non_overlapping_gpu_ns += own_ns.at(id as usize);
            node.operation_spans_ns.push(span);
            let instance = node.gpu_span_by_range_number.entry(instance).or_insert(span);
            *instance = (instance.0.min(span.0), instance.1.max(span.1));
        }
    }
    let gaps =
        context.activities.iter().flat_map(|activity| activity.gaps.iter(&context.operations));
    for gap in gaps {
        let late = context
            .causes_and_ns_of_idle_gap(&gap)
            .filter(|((kind, _), _)| kind.is_before_or_right_after_launch());
        let late: i64 = late.map(|(_, ns)| ns).sum();
        let [before, after] =
            [gap.operation_before_gap, gap.operation_after_gap].map(|id| &chains[id as usize]);
        for (&(node, _), _) in
            after.iter().zip(before).take_while(|(after, before)| after == before)
        {
            tree.nodes[node].gpu_idle_ns += gap.idle_gap_length_ns();
            tree.nodes[node].idle_ns_before_launch += late;
        }
    }
    let busy_ns: i64 = context.activities.iter().map(|activity| activity.gpu_busy_ns).sum();
    tree.into_range_tree_rows(&context.trace.declared_work, busy_ns)
}

impl RangeTreeInProgress<'_> {
    /// Returns the ranges in which an operation was launched, the outermost first.
    fn nodes_and_ranges_around_launch(
        &mut self,
        context: &DiagnosisContext<'_>,
        id: GpuOperationId,
    ) -> Vec<NodeAndRangeNumber> {
        let KeptNamedRanges { ranges, range_and_call_of_operation: of_operation } =
            &context.host_summary.kept_ranges;
        let (mut range, call) = of_operation[id as usize];
        let launched_in = context.host_summary.range_path_of_launch.at(id as usize);
        // Ranges that were open while a graph was captured count as inside the ranges around the
        // graph's launch.
        let (mut path, mut chain) = (context.range_path_of_operation(id), Vec::new());
        while path != launched_in {
            let node = self.node_of_range_path(context, path);
            chain.push((node, u64::from(path) << 32 | u64::from(call)));
            path = context.host_summary.paths.parent_of_range_path(path);
        }
        while let Some(of) = ranges.get(range as usize) {
            let node = self.node_of_range_path(context, of.path);
            chain.push((node, u64::from(range)));
            range = of.enclosing_range_number;
        }
        chain.reverse();
        for &(node, instance) in &chain {
            let node = &mut self.nodes[node];
            if instance >> 32 == 0 && !node.gpu_span_by_range_number.contains_key(&instance) {
                *node.total_host_ns.get_or_insert(0) += ranges[instance as usize].host_duration_ns;
                node.gpu_span_by_range_number.insert(instance, (i64::MAX, i64::MIN));
            }
        }
        chain
    }

    /// Returns the tree node of a range path; paths whose names differ only in numbers share a
    /// node.
    fn node_of_range_path(&mut self, context: &DiagnosisContext<'_>, path: RangePathId) -> usize {
        if let Some(&known) = self.node_of_path.get(&path) {
            return known;
        }
        let parent = context.host_summary.paths.parent_of_range_path(path);
        let parent = (parent != ROOT_RANGE_PATH).then(|| self.node_of_range_path(context, parent));
        let name =
            context.trace.names.text_of_name(context.host_summary.paths.last_name_of_path(path));
        let itself = self.names_not_merged.contains(&name);
        let pattern = if itself { name.to_owned() } else { replace_digits_by_number_sign(name) };
        let text = context.host_summary.paths.path_text_with_slashes(context.trace, path);
        let work = context.trace.declared_work.iter().position(|work| work.range_path == text);
        let new = self.nodes.len();
        let node = *self.node_by_parent_and_pattern.entry((parent, pattern.clone())).or_insert(new);
        if node == new {
            let depth = parent.map_or(0, |parent| self.nodes[parent].depth + 1);
            let name = name.to_owned();
            self.nodes.push(RangeTreeNodeInProgress {
                parent_node_index: parent,
                depth,
                range_name: name,
                declared_work_index: work,
                ..RangeTreeNodeInProgress::default()
            });
        } else if self.nodes[node].range_name != name {
            self.nodes[node].range_name = pattern;
        }
        self.node_of_path.insert(path, node);
        node
    }

    /// Returns the nodes as rows, in order of their first start, each before the nodes inside it.
    fn into_range_tree_rows(
        mut self,
        work: &[DeclaredWorkOfRange],
        busy_ns: i64,
    ) -> Vec<RangeTreeRow> {
        let order = self.nodes_in_depth_first_order();
        let paths: Vec<String> =
            (0..self.nodes.len()).map(|node| self.path_text_of_node(node)).collect();
        order
            .into_iter()
            .map(|index| {
                let spans = std::mem::take(&mut self.nodes[index].operation_spans_ns);
                let own_busy_ns = UnionOfTimeSpans::union_of_spans(spans).total_covered_ns();
                let node = &self.nodes[index];
                let span_ns =
                    node.gpu_span_by_range_number.values().map(|(start, end)| end - start).sum();
                let of_limits = mean_reached_share_of_limits(
                    node.declared_work_index.map(|index| &work[index]),
                    node,
                    span_ns,
                );
                RangeTreeRow {
                    range_path: paths[index].clone(),
                    range_name: node.range_name.clone(),
                    depth: node.depth,
                    ranges_with_operations: node.gpu_span_by_range_number.len(),
                    total_host_ns: node.total_host_ns,
                    gpu_busy_ns: own_busy_ns,
                    non_overlapping_gpu_ns: node.non_overlapping_gpu_ns,
                    total_gpu_span_ns: span_ns,
                    share_of_busy_time: part_divided_by_whole(own_busy_ns, busy_ns),
                    operations: node.operations,
                    bound: time_bound_of_range_node(node, span_ns, &of_limits),
                    reached_share_of_limits: of_limits,
                }
            })
            .collect()
    }

    fn path_text_of_node(&self, node: usize) -> String {
        let own = &self.nodes[node];
        match own.parent_node_index {
            Some(parent) => format!("{}/{}", self.path_text_of_node(parent), own.range_name),
            None => own.range_name.clone(),
        }
    }

    fn nodes_in_depth_first_order(&self) -> Vec<usize> {
        let mut inside: HashMap<Option<usize>, Vec<usize>> = HashMap::new();
        for (index, node) in self.nodes.iter().enumerate() {
            inside.entry(node.parent_node_index).or_default().push(index);
        }
        let first =
            |node: &usize| self.nodes[*node].operation_spans_ns.iter().map(|span| span.0).min();
        inside.values_mut().for_each(|nodes| nodes.sort_by_cached_key(first));
        let mut order = Vec::with_capacity(self.nodes.len());
        let mut open: Vec<usize> = inside.remove(&None).unwrap_or_default();
        open.reverse();
        while let Some(node) = open.pop() {
            order.push(node);
            open.extend(inside.remove(&Some(node)).unwrap_or_default().into_iter().rev());
        }
        order
    }
}

/// Returns the share of each limit that one range reaches on average, from the declared work of the
/// range.
#[allow(clippy::cast_precision_loss)]
fn mean_reached_share_of_limits(
    work: Option<&DeclaredWorkOfRange>,
    node: &RangeTreeNodeInProgress,
    span_ns: i64,
) -> Vec<(String, f64)> {
    let each = span_ns as f64 / node.gpu_span_by_range_number.len().max(1) as f64;
    let reached = |(by, limit): &(String, f64)| (by.clone(), limit / each.max(1.0));
    work.map_or(Vec::new(), |work| work.min_ns_by_resource.iter().map(reached).collect())
}

fn time_bound_of_range_node(
    node: &RangeTreeNodeInProgress,
    span_ns: i64,
    of_limits: &[(String, f64)],
) -> TimeBoundOfRange {
    let idle = part_divided_by_whole(node.gpu_idle_ns, span_ns);
    if idle > 1.0 - MIN_BUSY_SHARE_IF_NOT_LAUNCH_BOUND
        && node.idle_ns_before_launch * 2 > node.gpu_idle_ns
    {
        return TimeBoundOfRange::LaunchBound;
    }
    let most = |memory: bool| {
        let of_kind = of_limits
            .iter()
            .filter(|(by, _)| (by == DeclaredWorkOfRange::MEMORY_BANDWIDTH_LIMIT_NAME) == memory);
        of_kind.map(|(_, reached)| *reached).fold(0.0, f64::max)
    };
    let (memory, compute) = (most(true), most(false));
    match () {
        () if of_limits.is_empty() && idle <= 1.0 - MIN_BUSY_SHARE_IF_NOT_LAUNCH_BOUND => {
            TimeBoundOfRange::BusyWithoutKnownLimit
        }
        () if memory.max(compute) < MIN_REACHED_SHARE_OF_BOUNDING_LIMIT => {
            TimeBoundOfRange::LatencyBound
        }
        () if memory - compute >= MIN_SHARE_DIFFERENCE_OF_BOUNDING_LIMIT => {
            TimeBoundOfRange::MemoryBound
        }
        () if compute - memory >= MIN_SHARE_DIFFERENCE_OF_BOUNDING_LIMIT => {
            TimeBoundOfRange::ComputeBound
        }
        () => TimeBoundOfRange::MemoryAndComputeBound,
    }
}

#[allow(clippy::cast_precision_loss)]
fn part_divided_by_whole(part: i64, whole: i64) -> f64 {
    part as f64 / whole.max(1) as f64
}
