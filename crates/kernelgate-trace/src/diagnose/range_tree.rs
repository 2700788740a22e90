//! The device's work in each range: time, share, launches, and its bound.

use hashbrown::HashMap;

use super::host::KeptRanges;
use super::trace_facts::DiagnosisContext;
use crate::analyze::operations::OperationId;
use crate::analyze::ranges::paths::{ROOT_PATH, RangePathId};
use crate::analyze::timeline::idle_time::exclusive_busy_times;
use crate::analyze::timeline::span_union::UnitedSpans;
use crate::model::gpu::DeclaredRangeWork;
use crate::model::interned_names::without_numbers_in_name;

/// Part of the time of a range in which the device must be busy for launches not to matter.
const BUSY_DEVICE_SHARE: f64 = 0.7;
/// Share of a limit from which on that limit counts as bounding. Declared work is what the
/// mathematics needs. A kernel at its unit's limit reaches less than the whole, because other work
/// (exponentials, addresses, repeated reads) is not included.
pub(super) const MIN_BOUNDING_LIMIT_SHARE: f64 = 0.4;
/// The larger of two limits bounds only if they differ by this share.
const DECISIVE_LIMIT_DIFFERENCE: f64 = 0.1;

/// The bound of a range's time: memory, compute, both, latency or launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeBound {
    /// The device waits for the host to launch.
    Launch,
    /// The memory's bandwidth.
    Memory,
    /// The operation rate of a compute unit bounds the range.
    Compute,
    /// Neither memory nor compute bounds the range: it has dependencies, or too little parallel
    /// work.
    Latency,
    /// Memory and a compute unit limit the range about equally.
    Mixed,
    /// The device is busy; no limit of the work is known.
    Busy,
}

impl TimeBound {
    /// Label in printed output.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Launch => "launch-bound",
            Self::Memory => "memory-bound",
            Self::Compute => "compute-bound",
            Self::Latency => "latency-bound",
            Self::Mixed => "memory and compute",
            Self::Busy => "busy",
        }
    }
}

/// A node of the range tree: the ranges of one path, and what was launched in them.
#[derive(Debug, Clone, PartialEq)]
pub struct RangeTreeNode {
    /// Path of the range; `#` where ranges differ in a number only.
    pub path: String,
    /// Last name of the node's path.
    pub name: String,
    /// Number of ranges that enclose the range.
    pub depth: usize,
    /// Number of times that the range was opened; inside a graph, number of times that the graph
    /// was launched.
    pub times: usize,
    /// Host time in the range, nanoseconds; `None` of a range that was open while a graph was
    /// captured.
    pub host_ns: Option<i64>,
    /// Nanoseconds in which at least one operation of the range ran.
    pub busy_ns: i64,
    /// The part of the busy time in which no operation that started earlier ran, in any range:
    /// these parts add up, also where a launch begins before the one ahead of it has ended.
    pub own_ns: i64,
    /// Time from the first start to the last end, over all instances, nanoseconds.
    pub span_ns: i64,
    /// The range's part of the time in which the device was busy, 0 to 1.
    pub share: f64,
    /// Number of kernels, copies, memsets and graph launches.
    pub operations: usize,
    pub bound: TimeBound,
    /// Share of each limit that the range reaches, 0 to 1, if its work is declared.
    pub of_limits: Vec<(String, f64)>,
}

/// A range while its operations are added up.
#[derive(Default)]
struct TreeNode {
    parent: Option<usize>,
    depth: usize,
    /// Name of the range, or the pattern of several names.
    name: String,
    work: Option<usize>,
    operations: usize,
    own_ns: i64,
    spans: Vec<(i64, i64)>,
    /// First start and last end of each instance: one range, or one path with the graph launch
    /// above it.
    instances: HashMap<u64, (i64, i64)>,
    host_ns: Option<i64>,
    idle_ns: i64,
    /// Idle time in which the next operation was not launched yet.
    waiting_ns: i64,
}

/// A range that holds an operation: its node, and which of its instances.
type RangeInstance = (usize, u64);

#[derive(Default)]
struct RangeTree<'a> {
    /// Names of ranges that are not merged with others.
    apart: &'a [&'a str],
    nodes: Vec<TreeNode>,
    of_path: HashMap<RangePathId, usize>,
    of_pattern: HashMap<(Option<usize>, String), usize>,
}

/// The tree of a trace whose ranges were kept.
pub(super) fn build_range_tree(
    context: &DiagnosisContext<'_>,
    apart: &[&str],
) -> Vec<RangeTreeNode> {
    let all = context.all;
    let mut tree = RangeTree { apart, ..RangeTree::default() };
    let own_ns = exclusive_busy_times(context.trace);
    let chains: Vec<Vec<RangeInstance>> =
        all.ids().map(|id| tree.ranges_around_operation(context, id)).collect();
    for id in all.ids() {
        let span = all.span(id);
        for &(node, instance) in &chains[id as usize] {
            let node = &mut tree.nodes[node];
            node.operations += 1;
            node.own_ns += own_ns.at(id as usize);
            node.spans.push(span);
            let instance = node.instances.entry(instance).or_insert(span);
            *instance = (instance.0.min(span.0), instance.1.max(span.1));
        }
    }
    let gaps = context.activities.iter().flat_map(|activity| activity.gaps.iter(&context.all));
    for gap in gaps {
        let late = context.causes_of_gap(&gap).filter(|((kind, _), _)| kind.is_before_launch());
        let late: i64 = late.map(|(_, ns)| ns).sum();
        let [before, after] = [gap.before, gap.after].map(|id| &chains[id as usize]);
        for (&(node, _), _) in
            after.iter().zip(before).take_while(|(after, before)| after == before)
        {
            tree.nodes[node].idle_ns += gap.gap_ns();
            tree.nodes[node].waiting_ns += late;
        }
    }
    let busy_ns: i64 = context.activities.iter().map(|activity| activity.busy_ns).sum();
    tree.into_rows(&context.trace.work, busy_ns)
}

impl RangeTree<'_> {
    /// The ranges around an operation, the outermost first.
    fn ranges_around_operation(
        &mut self,
        context: &DiagnosisContext<'_>,
        id: OperationId,
    ) -> Vec<RangeInstance> {
        let KeptRanges { ranges, of_operation } = &context.host.kept;
        let (mut range, call) = of_operation[id as usize];
        let launched_in = context.host.launched_in.at(id as usize);
        // Ranges of a graph's capture count as inside the ranges of its launch.
        let (mut path, mut chain) = (context.path_id_of_operation(id), Vec::new());
        while path != launched_in {
            let node = self.node_of_path(context, path);
            chain.push((node, u64::from(path) << 32 | u64::from(call)));
            path = context.host.paths.parent_path(path);
        }
        while let Some(of) = ranges.get(range as usize) {
            let node = self.node_of_path(context, of.path);
            chain.push((node, u64::from(range)));
            range = of.around;
        }
        chain.reverse();
        for &(node, instance) in &chain {
            let node = &mut self.nodes[node];
            if instance >> 32 == 0 && !node.instances.contains_key(&instance) {
                *node.host_ns.get_or_insert(0) += ranges[instance as usize].host_ns;
                node.instances.insert(instance, (i64::MAX, i64::MIN));
            }
        }
        chain
    }

    /// The tree node of a path; paths whose names differ only in numbers share a node.
    fn node_of_path(&mut self, context: &DiagnosisContext<'_>, path: RangePathId) -> usize {
        if let Some(&known) = self.of_path.get(&path) {
            return known;
        }
        let parent = context.host.paths.parent_path(path);
        let parent = (parent != ROOT_PATH).then(|| self.node_of_path(context, parent));
        let name = context.trace.names.text(context.host.paths.name(path));
        let itself = self.apart.contains(&name);
        let pattern = if itself { name.to_owned() } else { without_numbers_in_name(name) };
        let text = context.host.paths.text(context.trace, path);
        let work = context.trace.work.iter().position(|work| work.path == text);
        let new = self.nodes.len();
        let node = *self.of_pattern.entry((parent, pattern.clone())).or_insert(new);
        if node == new {
            let depth = parent.map_or(0, |parent| self.nodes[parent].depth + 1);
            let name = name.to_owned();
            self.nodes.push(TreeNode { parent, depth, name, work, ..TreeNode::default() });
        } else if self.nodes[node].name != name {
            self.nodes[node].name = pattern;
        }
        self.of_path.insert(path, node);
        node
    }

    /// The nodes as rows, each before those inside it, by their first start.
    fn into_rows(mut self, work: &[DeclaredRangeWork], busy_ns: i64) -> Vec<RangeTreeNode> {
        let order = self.nodes_in_order();
        let paths: Vec<String> = (0..self.nodes.len()).map(|node| self.path(node)).collect();
        order
            .into_iter()
            .map(|index| {
                let spans = std::mem::take(&mut self.nodes[index].spans);
                let own_busy_ns = UnitedSpans::new(spans).covered_ns();
                let node = &self.nodes[index];
                let span_ns = node.instances.values().map(|(start, end)| end - start).sum();
                let of_limits =
                    reached_share_of_limits(node.work.map(|index| &work[index]), node, span_ns);
                RangeTreeNode {
                    path: paths[index].clone(),
                    name: node.name.clone(),
                    depth: node.depth,
                    times: node.instances.len(),
                    host_ns: node.host_ns,
                    busy_ns: own_busy_ns,
                    own_ns: node.own_ns,
                    span_ns,
                    share: time_ratio_of_whole(own_busy_ns, busy_ns),
                    operations: node.operations,
                    bound: time_bound_of_node(node, span_ns, &of_limits),
                    of_limits,
                }
            })
            .collect()
    }

    fn path(&self, node: usize) -> String {
        let own = &self.nodes[node];
        match own.parent {
            Some(parent) => format!("{}/{}", self.path(parent), own.name),
            None => own.name.clone(),
        }
    }

    fn nodes_in_order(&self) -> Vec<usize> {
        let mut inside: HashMap<Option<usize>, Vec<usize>> = HashMap::new();
        for (index, node) in self.nodes.iter().enumerate() {
            inside.entry(node.parent).or_default().push(index);
        }
        let first = |node: &usize| self.nodes[*node].spans.iter().map(|span| span.0).min();
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

/// The part of the declared limits that a range reaches, each time it is open on average.
#[allow(clippy::cast_precision_loss)]
fn reached_share_of_limits(
    work: Option<&DeclaredRangeWork>,
    node: &TreeNode,
    span_ns: i64,
) -> Vec<(String, f64)> {
    let each = span_ns as f64 / node.instances.len().max(1) as f64;
    let reached = |(by, limit): &(String, f64)| (by.clone(), limit / each.max(1.0));
    work.map_or(Vec::new(), |work| work.limits.iter().map(reached).collect())
}

fn time_bound_of_node(node: &TreeNode, span_ns: i64, of_limits: &[(String, f64)]) -> TimeBound {
    let idle = time_ratio_of_whole(node.idle_ns, span_ns);
    if idle > 1.0 - BUSY_DEVICE_SHARE && node.waiting_ns * 2 > node.idle_ns {
        return TimeBound::Launch;
    }
    let most = |memory: bool| {
        let of_kind = of_limits
            .iter()
            .filter(|(by, _)| (by == DeclaredRangeWork::MEMORY_LIMIT_NAME) == memory);
        of_kind.map(|(_, reached)| *reached).fold(0.0, f64::max)
    };
    let (memory, compute) = (most(true), most(false));
    match () {
        () if of_limits.is_empty() && idle <= 1.0 - BUSY_DEVICE_SHARE => TimeBound::Busy,
        () if memory.max(compute) < MIN_BOUNDING_LIMIT_SHARE => TimeBound::Latency,
        () if memory - compute >= DECISIVE_LIMIT_DIFFERENCE => TimeBound::Memory,
        () if compute - memory >= DECISIVE_LIMIT_DIFFERENCE => TimeBound::Compute,
        () => TimeBound::Mixed,
    }
}

#[allow(clippy::cast_precision_loss)]
fn time_ratio_of_whole(part: i64, whole: i64) -> f64 {
    part as f64 / whole.max(1) as f64
}
