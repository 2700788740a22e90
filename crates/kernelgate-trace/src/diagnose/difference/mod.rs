//! The changes between two traces, and the part of the whole difference that each explains.
//!
//! The whole time lasts from the first GPU operation to the last GPU operation. The whole time is
//! divided in two ways: by operation, with idle time by cause; and by the range of the launch. In
//! both divisions the changes of the parts add up to the change of the whole; idle time with an
//! unrecorded cause is the part "unexplained". This module cannot know whether two recordings of
//! one program would differ as much, because it has only one trace of each.

mod json;
mod text;
mod trace_setup;
mod trace_totals;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::analyze::work::kernel_kinds::KernelClass;
use crate::model::gpu::LaunchShape;
pub use trace_setup::{SetupProperty, SetupPropertyChange, TraceSetup};
pub use trace_totals::{
    CallSite, CountAndTimes, FunctionCalls, RangePathSums, TracePart, TracePartKind, TraceSums,
};

/// Two traces side by side, each list the largest change first.
#[derive(Debug, Clone)]
pub struct TraceDifference {
    /// Differences of machine, profiler and recording options.
    pub setup: Vec<SetupPropertyChange>,
    /// Total times of the first and of the second trace.
    pub wholes: [TraceTotals; 2],
    /// Changes of each operation and of each cause of idle time, also where the change is zero.
    pub parts: Vec<TracePartChange>,
    /// Changes of each range.
    pub places: Vec<RangePathChange>,
    /// Calls of CUDA.
    pub calls: Vec<FunctionCallChange>,
    /// Findings that only one trace has: rule and title.
    pub findings: [Vec<(&'static str, String)>; 2],
    /// Reasons why the traces are hard to compare, in sentences.
    pub notes: Vec<String>,
}

/// Total times of one trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceTotals {
    pub recorder: String,
    /// The value of [`TraceSums::whole_ns`].
    pub whole_ns: i64,
    /// The value of [`TraceSums::busy_ns`].
    pub busy_ns: i64,
    /// Kernels that ran.
    pub kernels: usize,
}

/// The change of a part from the first trace to the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AmountChange {
    /// Only the second trace has the part.
    Appeared,
    /// Only the first trace has the part.
    Vanished,
    /// Most of the change comes from more operations.
    More,
    /// Most of the change comes from fewer operations.
    Fewer,
    /// Most of the change comes from longer operations.
    Longer,
    /// Most of the change comes from shorter operations.
    Shorter,
    /// Neither the number of operations nor their length changed.
    Same,
}

impl AmountChange {
    /// Label in printed output.
    pub fn label(self) -> &'static str {
        match self {
            Self::Appeared => "appeared",
            Self::Vanished => "vanished",
            Self::More => "more often",
            Self::Fewer => "less often",
            Self::Longer => "longer",
            Self::Shorter => "shorter",
            Self::Same => "same",
        }
    }
}

/// A part of the whole in both traces, with its change.
#[derive(Debug, Clone)]
pub struct TracePartChange {
    /// Kind of the part.
    pub part: TracePart,
    pub amounts: [CountAndTimes; 2],
}

impl TracePartChange {
    /// The part's share of the whole difference, in nanoseconds.
    pub fn total_change_ns(&self) -> i64 {
        self.amounts[1].own_ns - self.amounts[0].own_ns
    }

    /// The change that the number of operations explains: the added or missing operations, each as
    /// long as an operation was on average.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    pub fn change_by_count_ns(&self) -> i64 {
        let [base, head] = &self.amounts;
        if base.count == 0 || head.count == 0 {
            return self.total_change_ns();
        }
        let added = head.count as f64 - base.count as f64;
        (added * base.own_ns as f64 / base.count as f64).round() as i64
    }

    /// The part of the change that is not due to their number: operations take longer, or overlap
    /// less.
    pub fn change_by_length_ns(&self) -> i64 {
        self.total_change_ns() - self.change_by_count_ns()
    }

    pub fn change(&self) -> AmountChange {
        let [base, head] = &self.amounts;
        let by_number = self.change_by_count_ns().abs() >= self.change_by_length_ns().abs();
        match (base.count, head.count) {
            (0, _) => AmountChange::Appeared,
            (_, 0) => AmountChange::Vanished,
            (a, b) if a < b && by_number => AmountChange::More,
            (a, b) if a > b && by_number => AmountChange::Fewer,
            _ if self.change_by_length_ns() > 0 => AmountChange::Longer,
            _ if self.change_by_length_ns() < 0 => AmountChange::Shorter,
            _ => AmountChange::Same,
        }
    }

    /// Describes how the part's launches differ: "registers 96 -> 128", "grid 8×1×1 -> 16×1×1".
    pub fn describe_launch_changes(&self) -> Vec<String> {
        let [base, head] = &self.amounts;
        let mut words = Vec::new();
        if base.shapes != head.shapes
            && let (Some(before), Some(now)) =
                (most_frequent_shape(base), most_frequent_shape(head))
        {
            describe_shape_changes(before, now, &mut words);
        }
        #[allow(clippy::cast_precision_loss)]
        let mean = |amount: &CountAndTimes, name| {
            amount.metrics.get(name).map(|sum| sum / amount.count.max(1) as f64)
        };
        for name in base.metrics.keys() {
            if let (Some(before), Some(now)) = (mean(base, name), mean(head, name))
                && (now - before).abs() > 0.02 * before.abs()
            {
                words.push(format!("{name} {before:.1} -> {now:.1}"));
            }
        }
        words
    }
}

/// The launch shape that most launches have.
fn most_frequent_shape(amount: &CountAndTimes) -> Option<&LaunchShape> {
    amount.shapes.iter().max_by_key(|&(shape, &count)| (count, Reverse(shape))).map(|(it, _)| it)
}

fn describe_shape_changes(base: &LaunchShape, head: &LaunchShape, words: &mut Vec<String>) {
    let size = |[x, y, z]: [u32; 3]| format!("{x}×{y}×{z}");
    for (what, base, head) in [("grid", base.grid, head.grid), ("block", base.block, head.block)] {
        if base != head {
            words.push(format!("{what} {} -> {}", size(base), size(head)));
        }
    }
    let shared = |shape: &LaunchShape| shape.static_shared + shape.dynamic_shared;
    for (what, unit, base, head) in [
        ("registers", "", base.registers, head.registers),
        ("shared memory", " B", shared(base), shared(head)),
        (describe_local_memory_change(base, head), " B a thread", base.local, head.local),
    ] {
        if base != head {
            words.push(format!("{what} {base} -> {head}{unit}"));
        }
    }
}

/// Describes how the local memory of a kernel changed. A kernel that had no local memory spills
/// now, or has an array that does not fit into registers.
fn describe_local_memory_change(base: &LaunchShape, head: &LaunchShape) -> &'static str {
    match (base.local, head.local) {
        (0, 1..) => "spill to local memory",
        (1.., 0) => "no spill to local memory any more:",
        _ => "local memory",
    }
}

/// Ranges of a path in both traces.
#[derive(Debug, Clone)]
pub struct RangePathChange {
    /// The path without numbers; "" is outside of all ranges.
    pub path: String,
    pub places: [RangePathSums; 2],
}

impl RangePathChange {
    /// Share of the whole difference of the operations launched in it, in nanoseconds.
    pub fn total_change_ns(&self) -> i64 {
        self.places[1].launched.own_ns - self.places[0].launched.own_ns
    }
}

/// Calls of a function in both traces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionCallChange {
    /// The called function, and the range around the calls.
    pub site: CallSite,
    pub calls: [FunctionCalls; 2],
}

impl FunctionCallChange {
    /// Change of a host call's time, nanoseconds; it is not part of the whole's difference.
    pub fn total_change_ns(&self) -> i64 {
        self.calls[1].total_ns - self.calls[0].total_ns
    }
}

/// Compares the summed times of two traces.
pub fn compare_sums(base: TraceSums, head: TraceSums) -> TraceDifference {
    let setup = trace_setup::setup_changes(&base.setup, &head.setup);
    let notes = comparison_notes(&base, &head);
    let only = |of: &TraceSums, other: &TraceSums| {
        let also = |id: &str| other.findings.iter().any(|(other, _)| *other == id);
        of.findings.iter().filter(|(id, _)| !also(id)).cloned().collect()
    };
    let findings = [only(&base, &head), only(&head, &base)];
    let wholes = [&base, &head].map(|sums| TraceTotals {
        recorder: sums.recorder.clone(),
        whole_ns: sums.whole_ns,
        busy_ns: sums.busy_ns,
        kernels: sums
            .parts
            .iter()
            .filter(|(part, _)| part.kind == TracePartKind::Kernel)
            .map(|(_, amount)| amount.count)
            .sum(),
    });
    let mut parts: Vec<TracePartChange> = joined(base.parts, head.parts)
        .into_iter()
        .map(|(part, amounts)| TracePartChange { part, amounts })
        .collect();
    parts.sort_by_key(|change| Reverse(change.total_change_ns().abs()));
    let mut places: Vec<RangePathChange> = joined(base.places, head.places)
        .into_iter()
        .map(|(path, places)| RangePathChange { path, places })
        .collect();
    places.sort_by_key(|change| Reverse(change.total_change_ns().abs()));
    let mut calls: Vec<FunctionCallChange> = joined(base.calls, head.calls)
        .into_iter()
        .map(|(site, calls)| FunctionCallChange { site, calls })
        .collect();
    calls.sort_by_key(|change| Reverse(change.total_change_ns().abs()));
    TraceDifference { setup, wholes, parts, places, calls, findings, notes }
}

impl TraceDifference {
    /// Whether the traces were recorded on unlike machines.
    pub fn is_other_machine(&self) -> bool {
        let machine = [SetupProperty::Device, SetupProperty::Capability, SetupProperty::Ranks];
        self.setup.iter().any(|change| machine.contains(&change.property))
    }

    /// Total time in the second trace minus total time in the first trace, nanoseconds.
    pub fn total_change_ns(&self) -> i64 {
        self.wholes[1].whole_ns - self.wholes[0].whole_ns
    }

    /// Kernel time by kind of work, by the kernels' names: nanoseconds in both traces, the
    /// largest first.
    pub fn kernel_time_by_class(&self) -> Vec<(KernelClass, [i64; 2])> {
        let mut kinds: BTreeMap<KernelClass, [i64; 2]> = BTreeMap::new();
        for change in self.parts.iter().filter(|change| change.part.kind == TracePartKind::Kernel) {
            let sums = kinds.entry(KernelClass::from_kernel_name(&change.part.name)).or_default();
            sums.iter_mut().zip(&change.amounts).for_each(|(sum, of)| *sum += of.total_ns);
        }
        let mut kinds: Vec<_> = kinds.into_iter().collect();
        kinds.sort_by_key(|&(kind, sums)| (Reverse(sums.into_iter().max()), kind));
        kinds
    }

    /// The part that is idle time whose cause is not in the traces.
    pub fn unexplained_idle_ns(&self) -> i64 {
        let unexplained =
            |change: &&TracePartChange| change.part.kind == TracePartKind::Unexplained;
        self.parts.iter().filter(unexplained).map(TracePartChange::total_change_ns).sum()
    }
}

/// Joins two maps by key; a key that one map lacks has the default value there.
fn joined<K: Ord, V: Default>(base: BTreeMap<K, V>, head: BTreeMap<K, V>) -> Vec<(K, [V; 2])> {
    let mut all: BTreeMap<K, [V; 2]> =
        base.into_iter().map(|(key, value)| (key, [value, V::default()])).collect();
    for (key, value) in head {
        all.entry(key).or_default()[1] = value;
    }
    all.into_iter().collect()
}

/// Ranges whose numbers are compared to see whether both traces hold the same work.
const MAX_RANGES_COMPARED_BY_COUNT: usize = 3;

fn comparison_notes(base: &TraceSums, head: &TraceSums) -> Vec<String> {
    let mut notes = Vec::new();
    if base.recorder != head.recorder {
        notes.push("two recorders: names may differ where nothing else does".to_owned());
    }
    if base.activities != head.activities {
        notes.push(format!(
            "{} and {} processes on devices: the wholes are sums over them",
            base.activities, head.activities
        ));
    }
    let whole_graphs =
        |sums: &TraceSums| sums.parts.keys().any(|part| part.kind == TracePartKind::Graph);
    if whole_graphs(base) != whole_graphs(head) {
        notes.push(
            "one trace has graphs that were recorded whole: their kernels are in no list; record \
             both with --cuda-graph-trace=node"
                .to_owned(),
        );
    }
    let repeated = base.places.iter().filter_map(|(path, place)| {
        let now = head.places.get(path)?.ranges;
        (!path.is_empty() && now != place.ranges).then(|| {
            format!(
                "the range {path} is there {} and {now} times: the traces hold different amounts \
                 of work",
                place.ranges
            )
        })
    });
    notes.extend(repeated.take(MAX_RANGES_COMPARED_BY_COUNT));
    notes
}
