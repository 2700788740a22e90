//! Compares two traces of a program, and assigns the difference of their whole times to operations,
//! idle causes and ranges.
//!
//! The whole time of a trace lasts from the start of its first to the end of its last GPU
//! operation. The whole time is divided in two ways: by operation, with idle time by cause; and by
//! the range in which operations were launched. In both divisions the changes of all parts add up
//! to the change of the whole time; idle time without a recorded cause is the part "unexplained".
//! Two recordings of the same program may also differ; one trace of each program does not show by
//! how much.

mod json;
mod text;
mod trace_setup;
mod trace_totals;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::analyze::work::kernel_kinds::KernelWorkClass;
use crate::model::gpu::KernelLaunchShape;
pub use trace_setup::{DifferingSetupProperty, MachineAndRecorderOfTrace, TraceSetupProperty};
pub use trace_totals::{
    CalledFunctionAndRange, FunctionCallSum, RangePathTimes, SummedTimesOfTrace,
    TracePartCountAndTimes, TracePartKey, TracePartKind,
};

/// Differences of two traces, each list sorted by size of change, largest first.
#[derive(Debug, Clone)]
pub struct DifferenceOfTwoTraces {
    /// Differences of the machines, profilers and recording options of the two traces.
    pub setup_changes: Vec<DifferingSetupProperty>,
    /// Whole times of the first and of the second trace.
    pub wholes: [RecorderAndTotalsOfTrace; 2],
    /// Change of each operation name and of each cause of idle time, also if the change is zero.
    pub part_changes: Vec<TracePartComparison>,
    /// Change of each range path between the two traces.
    pub range_path_changes: Vec<RangePathTimesOfBothTraces>,
    /// Change of the host's calls of each CUDA function from each range.
    pub host_call_changes: Vec<FunctionCallsInBothTraces>,
    /// For each trace, findings that only this trace has: rule id and title.
    pub findings: [Vec<(&'static str, String)>; 2],
    /// Sentences that say why the two traces are hard to compare.
    pub comparability_notes: Vec<String>,
}

/// Recorder, whole time, busy time and number of kernels of one trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecorderAndTotalsOfTrace {
    pub recorder_program: String,
    /// The value of [`SummedTimesOfTrace::summed_whole_time_ns`].
    pub summed_whole_time_ns: i64,
    /// The value of [`SummedTimesOfTrace::summed_gpu_busy_ns`].
    pub summed_gpu_busy_ns: i64,
    /// Kernels that ran.
    pub kernel_count: usize,
}

/// How the time of a part (an operation name or an idle cause) changed from the first to the second
/// trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TracePartChangeKind {
    /// Only the second trace has operations of this trace part.
    OnlyInSecondTrace,
    /// Only the first trace has operations of this trace part.
    OnlyInFirstTrace,
    /// The trace part's time changed mostly because it has more operations.
    MoreOperations,
    /// The part's time changed mostly because it has fewer operations.
    FewerOperations,
    /// The part's time changed mostly because its operations take longer.
    LongerOperations,
    /// The part's time changed mostly because its operations are shorter.
    ShorterOperations,
    /// Neither the number nor the length of the trace part's operations changed.
    Unchanged,
}

impl TracePartChangeKind {
    /// Returns the label of the kind of change in printed output.
    pub fn printed_change_label(self) -> &'static str {
        match self {
            Self::OnlyInSecondTrace => "appeared",
            Self::OnlyInFirstTrace => "vanished",
            Self::MoreOperations => "more often",
            Self::FewerOperations => "less often",
            Self::LongerOperations => "longer",
            Self::ShorterOperations => "shorter",
            Self::Unchanged => "same",
        }
    }
}

/// Time of an operation name, or of a cause of idle time, in both traces.
#[derive(Debug, Clone)]
pub struct TracePartComparison {
    /// Key of the trace part: its kind and its name.
    pub part: TracePartKey,
    pub amounts: [TracePartCountAndTimes; 2],
}

impl TracePartComparison {
    /// Nanoseconds of the difference of the whole times that this trace part explains: second trace
    /// minus first.
    pub fn exclusive_time_change_ns(&self) -> i64 {
        self.amounts[1].exclusive_ns - self.amounts[0].exclusive_ns
    }

    /// Change that the different number of operations explains, nanoseconds: added operations times
    /// the mean time of one in the first trace.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    pub fn change_due_to_operation_count_ns(&self) -> i64 {
        let [base, head] = &self.amounts;
        if base.operation_count == 0 || head.operation_count == 0 {
            return self.exclusive_time_change_ns();
        }
        let added = head.operation_count as f64 - base.operation_count as f64;
        (added * base.exclusive_ns as f64 / base.operation_count as f64).round() as i64
    }

    /// Rest of the change, nanoseconds, which the number of operations does not explain: operations
    /// take longer, or overlap less.
    pub fn change_due_to_operation_length_ns(&self) -> i64 {
        self.exclusive_time_change_ns() - self.change_due_to_operation_count_ns()
    }

    pub fn kind_of_part_change(&self) -> TracePartChangeKind {
        let [base, head] = &self.amounts;
        let by_number = self.change_due_to_operation_count_ns().abs()
            >= self.change_due_to_operation_length_ns().abs();
        match (base.operation_count, head.operation_count) {
            (0, _) => TracePartChangeKind::OnlyInSecondTrace,
            (_, 0) => TracePartChangeKind::OnlyInFirstTrace,
            (a, b) if a < b && by_number => TracePartChangeKind::MoreOperations,
            (a, b) if a > b && by_number => TracePartChangeKind::FewerOperations,
            _ if self.change_due_to_operation_length_ns() > 0 => {
                TracePartChangeKind::LongerOperations
            }
            _ if self.change_due_to_operation_length_ns() < 0 => {
                TracePartChangeKind::ShorterOperations
            }
            _ => TracePartChangeKind::Unchanged,
        }
    }

    /// Describes how launch shape and metrics of the kernel differ between the traces: "registers
    /// 96 -> 128", "grid 8×1×1 -> 16×1×1".
    pub fn describe_launch_shape_and_metric_changes(&self) -> Vec<String> {
        let [base, head] = &self.amounts;
        let mut words = Vec::new();
        if base.launches_by_shape != head.launches_by_shape
            && let (Some(before), Some(now)) =
                (most_frequent_launch_shape(base), most_frequent_launch_shape(head))
        {
            append_launch_shape_changes(before, now, &mut words);
        }
        #[allow(clippy::cast_precision_loss)]
        let mean = |amount: &TracePartCountAndTimes, name| {
            amount.ncu_metric_sums.get(name).map(|sum| sum / amount.operation_count.max(1) as f64)
        };
        for name in base.ncu_metric_sums.keys() {
            if let (Some(before), Some(now)) = (mean(base, name), mean(head, name))
                && (now - before).abs() > 0.02 * before.abs()
            {
                words.push(format!("{name} {before:.1} -> {now:.1}"));
            }
        }
        words
    }
}

/// Returns the launch shape with which the kernel was launched most often.
fn most_frequent_launch_shape(amount: &TracePartCountAndTimes) -> Option<&KernelLaunchShape> {
    amount
        .launches_by_shape
        .iter()
        .max_by_key(|&(shape, &count)| (count, Reverse(shape)))
        .map(|(it, _)| it)
}

fn append_launch_shape_changes(
    base: &KernelLaunchShape,
    head: &KernelLaunchShape,
    words: &mut Vec<String>,
) {
    let size = |[x, y, z]: [u32; 3]| format!("{x}×{y}×{z}");
    for (what, base, head) in [("grid", base.grid, head.grid), ("block", base.block, head.block)] {
        if base != head {
            words.push(format!("{what} {} -> {}", size(base), size(head)));
        }
    }
    let shared = |shape: &KernelLaunchShape| shape.static_shared_bytes + shape.dynamic_shared_bytes;
    for (what, unit, base, head) in [
        ("registers", "", base.registers_per_thread, head.registers_per_thread),
        ("shared memory", " B", shared(base), shared(head)),
        (
            local_memory_change_words(base, head),
            " B a thread",
            base.local_bytes_per_thread,
            head.local_bytes_per_thread,
        ),
    ] {
        if base != head {
            words.push(format!("{what} {base} -> {head}{unit}"));
        }
    }
}

/// Returns words for the change of a kernel's local memory per thread. A kernel that had no local
/// memory before and has some now spills registers, or has an array that does not fit into
/// registers.
fn local_memory_change_words(base: &KernelLaunchShape, head: &KernelLaunchShape) -> &'static str {
    match (base.local_bytes_per_thread, head.local_bytes_per_thread) {
        (0, 1..) => "spill to local memory",
        (1.., 0) => "no spill to local memory any more:",
        _ => "local memory",
    }
}

/// Ranges of one path, with their times, in both traces.
#[derive(Debug, Clone)]
pub struct RangePathTimesOfBothTraces {
    /// Path of the ranges without numbers in names; "" stands for outside all ranges.
    pub range_path: String,
    pub places: [RangePathTimes; 2],
}

impl RangePathTimesOfBothTraces {
    /// Nanoseconds of the difference of the whole times that operations launched in these ranges
    /// explain: second trace minus first.
    pub fn launched_time_change_ns(&self) -> i64 {
        self.places[1].launched_operations.exclusive_ns
            - self.places[0].launched_operations.exclusive_ns
    }
}

/// Calls of one CUDA function from one range, in both traces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionCallsInBothTraces {
    /// The called CUDA function, and the innermost range around the calls.
    pub site: CalledFunctionAndRange,
    pub calls: [FunctionCallSum; 2],
}

impl FunctionCallsInBothTraces {
    /// Change of the host time of these calls, nanoseconds, which is not part of the difference of
    /// the whole times.
    pub fn host_call_time_change_ns(&self) -> i64 {
        self.calls[1].total_call_ns - self.calls[0].total_call_ns
    }
}

/// Compares two traces by their summed times; `base` is the first trace.
pub fn compare_summed_traces(
    base: SummedTimesOfTrace,
    head: SummedTimesOfTrace,
) -> DifferenceOfTwoTraces {
    let setup = trace_setup::differing_setup_properties(
        &base.machine_and_recorder,
        &head.machine_and_recorder,
    );
    let notes = notes_on_comparability(&base, &head);
    let only = |of: &SummedTimesOfTrace, other: &SummedTimesOfTrace| {
        let also = |id: &str| other.finding_ids_and_titles.iter().any(|(other, _)| *other == id);
        of.finding_ids_and_titles.iter().filter(|(id, _)| !also(id)).cloned().collect()
    };
    let findings = [only(&base, &head), only(&head, &base)];
    let wholes = [&base, &head].map(|sums| RecorderAndTotalsOfTrace {
        recorder_program: sums.recorder_program.clone(),
        summed_whole_time_ns: sums.summed_whole_time_ns,
        summed_gpu_busy_ns: sums.summed_gpu_busy_ns,
        kernel_count: sums
            .sums_by_part
            .iter()
            .filter(|(part, _)| part.kind == TracePartKind::Kernel)
            .map(|(_, amount)| amount.operation_count)
            .sum(),
    });
    let mut parts: Vec<TracePartComparison> =
        pair_values_by_key(base.sums_by_part, head.sums_by_part)
            .into_iter()
            .map(|(part, amounts)| TracePartComparison { part, amounts })
            .collect();
    parts.sort_by_key(|change| Reverse(change.exclusive_time_change_ns().abs()));
    let mut places: Vec<RangePathTimesOfBothTraces> =
        pair_values_by_key(base.times_by_range_path, head.times_by_range_path)
            .into_iter()
            .map(|(path, places)| RangePathTimesOfBothTraces { range_path: path, places })
            .collect();
    places.sort_by_key(|change| Reverse(change.launched_time_change_ns().abs()));
    let mut calls: Vec<FunctionCallsInBothTraces> =
        pair_values_by_key(base.sums_by_called_function, head.sums_by_called_function)
            .into_iter()
            .map(|(site, calls)| FunctionCallsInBothTraces { site, calls })
            .collect();
    calls.sort_by_key(|change| Reverse(change.host_call_time_change_ns().abs()));
    DifferenceOfTwoTraces {
        setup_changes: setup,
        wholes,
        part_changes: parts,
        range_path_changes: places,
        host_call_changes: calls,
        findings,
        comparability_notes: notes,
    }
}

impl DifferenceOfTwoTraces {
    /// Returns whether the two traces were recorded on different GPU models, or with different
    /// numbers of ranks.
    pub fn are_machines_different(&self) -> bool {
        let machine = [
            TraceSetupProperty::DeviceNames,
            TraceSetupProperty::ComputeCapability,
            TraceSetupProperty::RankCount,
        ];
        self.setup_changes.iter().any(|change| machine.contains(&change.property))
    }

    /// Whole time of the second trace minus whole time of the first trace, nanoseconds.
    pub fn whole_time_change_ns(&self) -> i64 {
        self.wholes[1].summed_whole_time_ns - self.wholes[0].summed_whole_time_ns
    }

    /// Kernel time of both traces by kind of work, as the kernels' names show it, in nanoseconds;
    /// the largest first.
    pub fn kernel_time_of_both_by_work_class(&self) -> Vec<(KernelWorkClass, [i64; 2])> {
        let mut kinds: BTreeMap<KernelWorkClass, [i64; 2]> = BTreeMap::new();
        for change in
            self.part_changes.iter().filter(|change| change.part.kind == TracePartKind::Kernel)
        {
            let sums = kinds
                .entry(KernelWorkClass::work_class_from_kernel_name(&change.part.part_name))
                .or_default();
            sums.iter_mut()
                .zip(&change.amounts)
                .for_each(|(sum, of)| *sum += of.total_operation_ns);
        }
        let mut kinds: Vec<_> = kinds.into_iter().collect();
        kinds.sort_by_key(|&(kind, sums)| (Reverse(sums.into_iter().max()), kind));
        kinds
    }

    /// Change of the idle time whose cause the traces do not show, nanoseconds.
    pub fn change_of_unexplained_idle_ns(&self) -> i64 {
        let unexplained =
            |change: &&TracePartComparison| change.part.kind == TracePartKind::UnexplainedIdleTime;
        self.part_changes
            .iter()
            .filter(unexplained)
            .map(TracePartComparison::exclusive_time_change_ns)
            .sum()
    }
}

/// Pairs the values of two maps by key; if one map lacks a key, its value is the default.
fn pair_values_by_key<K: Ord, V: Default>(
    base: BTreeMap<K, V>,
    head: BTreeMap<K, V>,
) -> Vec<(K, [V; 2])> {
    let mut all: BTreeMap<K, [V; 2]> =
        base.into_iter().map(|(key, value)| (key, [value, V::default()])).collect();
    for (key, value) in head {
        all.entry(key).or_default()[1] = value;
    }
    all.into_iter().collect()
}

/// Largest number of range paths for which different numbers of ranges are noted, as a sign that
/// the traces contain different amounts of work.
const MAX_RANGE_PATHS_IN_NOTES: usize = 3;

fn notes_on_comparability(base: &SummedTimesOfTrace, head: &SummedTimesOfTrace) -> Vec<String> {
    let mut notes = Vec::new();
    if base.recorder_program != head.recorder_program {
        notes.push("two recorders: names may differ where nothing else does".to_owned());
    }
    if base.process_gpu_pair_count != head.process_gpu_pair_count {
        notes.push(format!(
            "{} and {} processes on devices: the wholes are sums over them",
            base.process_gpu_pair_count, head.process_gpu_pair_count
        ));
    }
    let whole_graphs = |sums: &SummedTimesOfTrace| {
        sums.sums_by_part.keys().any(|part| part.kind == TracePartKind::CudaGraphLaunch)
    };
    if whole_graphs(base) != whole_graphs(head) {
        notes.push(
            "one trace has graphs that were recorded whole: their kernels are in no list; record \
             both with --cuda-graph-trace=node"
                .to_owned(),
        );
    }
    let repeated = base.times_by_range_path.iter().filter_map(|(path, place)| {
        let now = head.times_by_range_path.get(path)?.range_count;
        (!path.is_empty() && now != place.range_count).then(|| {
            format!(
                "the range {path} is there {} and {now} times: the traces hold different amounts \
                 of work",
                place.range_count
            )
        })
    });
    notes.extend(repeated.take(MAX_RANGE_PATHS_IN_NOTES));
    notes
}
