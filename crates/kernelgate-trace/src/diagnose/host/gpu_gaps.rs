//! Reports the idle gaps of a GPU: lengths, causes, and the operations before and after.

use hashbrown::HashMap;

use crate::analyze::ranges::paths::RangePathId;
use crate::analyze::timeline::idle_time::{GpuIdleGap, ProcessActivityOnGpu};
use crate::diagnose::host::gap_cause::{
    IdleCauseAndBlamedName, IdleCauseKind, MAX_USUAL_START_LATENCY_NS,
    MIN_GAP_OF_OTHER_HOST_WORK_NS,
};
use crate::diagnose::trace_facts::DiagnosisContext;

/// Shortest idle gap that is a warning, nanoseconds; shorter gaps are normal between operations of
/// one stream.
pub const MIN_IDLE_GAP_FOR_WARNING_NS: i64 = MAX_USUAL_START_LATENCY_NS;
/// Longest idle gap that is not severe, nanoseconds; in longer gaps the GPU waits for the host.
pub const MAX_IDLE_GAP_FOR_WARNING_NS: i64 = 50_000;
const MAX_LISTED_OPERATION_PAIRS: usize = 5;

/// Number and total length of the idle gaps in one class of lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IdleGapsOfLengthClass {
    /// Number of idle gaps in this length class.
    pub gap_count: usize,
    /// Total length of these idle gaps, or of the parts that this cause explains, nanoseconds.
    pub total_gap_ns: i64,
}

/// Total idle time of a GPU with one cause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdleTimeOfCause {
    /// Why.
    pub kind: IdleCauseKind,
    /// Name of the waiting or called function, or path of the range around most of the host code.
    pub called_function_or_range_path: Option<String>,
    /// Number of gaps that have this cause.
    pub gap_count: usize,
    /// Total duration, in nanoseconds.
    pub total_idle_ns: i64,
    /// Longest idle time that this cause explains in a single gap, nanoseconds.
    pub longest_in_one_gap_ns: i64,
    /// Start and end of the gap with the most time of this cause, nanoseconds.
    pub longest_gap_start_and_end_ns: (i64, i64),
    /// Whether a single gap, as at start-up, has nearly all idle time of this cause, so that the
    /// cause does not repeat.
    pub occurs_in_one_gap: bool,
}

/// Smallest share of a cause's idle time that a single gap must have for the cause to count as
/// occurring once.
const MIN_SHARE_OF_SINGLE_GAP: f64 = 0.8;

impl IdleTimeOfCause {
    /// Text of the idle cause with the name of the responsible function or range.
    pub fn printed_cause_with_name(&self) -> String {
        match &self.called_function_or_range_path {
            Some(function) => format!("{}: {function}", self.kind.printed_idle_cause()),
            None => self.kind.printed_idle_cause().to_owned(),
        }
    }
}

/// Idle gaps between operations of the same two names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GapsBetweenTwoOperations {
    /// Name of the operation before the gap.
    pub operation_before: String,
    /// Name of the operation after the gap.
    pub operation_after: String,
    /// Path of the innermost range in which all operations after these gaps were launched, if there
    /// is one.
    pub common_range_path: Option<String>,
    /// Number of gaps between these two operations.
    pub gap_count: usize,
    /// Total duration, in nanoseconds.
    pub total_gap_ns: i64,
    pub longest_gap_start_and_end_ns: (i64, i64),
}

/// The idle gaps of one process on one GPU, by length, by cause and by the operations around them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct IdleGapsOfProcessOnGpu {
    /// Gaps below 20 µs, which are usual between consecutive launches.
    pub gaps_below_20_us: IdleGapsOfLengthClass,
    /// Gaps of 20 to 50 µs, in which the host delays the GPU.
    pub gaps_of_20_to_50_us: IdleGapsOfLengthClass,
    /// Gaps above 50 µs, in which the GPU waits for the host.
    pub gaps_above_50_us: IdleGapsOfLengthClass,
    /// Length of the longest idle gap, nanoseconds.
    pub longest_gap_ns: i64,
    /// Idle nanoseconds, in gaps of at most 1 ms, in which the host was launching or ran its own
    /// code before a launch.
    pub host_launching_idle_ns: i64,
    /// Total length of the gaps above 1 ms, nanoseconds.
    pub gaps_above_1_ms_total_ns: i64,
    /// Idle time by cause, most time first.
    pub idle_time_by_cause: Vec<IdleTimeOfCause>,
    /// Gaps by names of the operations before and after, most time first.
    pub gaps_by_operation_pair: Vec<GapsBetweenTwoOperations>,
}

impl IdleGapsOfProcessOnGpu {
    /// All gaps.
    pub fn number_of_idle_gaps(&self) -> usize {
        self.gaps_below_20_us.gap_count
            + self.gaps_of_20_to_50_us.gap_count
            + self.gaps_above_50_us.gap_count
    }

    /// Total duration, in nanoseconds.
    pub fn total_length_of_gaps_ns(&self) -> i64 {
        self.gaps_below_20_us.total_gap_ns
            + self.gaps_of_20_to_50_us.total_gap_ns
            + self.gaps_above_50_us.total_gap_ns
    }

    /// Mean length of the idle gaps, nanoseconds; 0 without gaps.
    #[allow(clippy::cast_precision_loss)]
    pub fn mean_length_of_gaps_ns(&self) -> f64 {
        self.total_length_of_gaps_ns() as f64 / self.number_of_idle_gaps().max(1) as f64
    }

    /// Total idle time with one of the given causes, nanoseconds.
    pub fn idle_ns_with_any_cause_of(&self, kinds: &[IdleCauseKind]) -> i64 {
        self.idle_time_by_cause
            .iter()
            .filter(|of| kinds.contains(&of.kind))
            .map(|of| of.total_idle_ns)
            .sum()
    }
}

/// Number and total length of parts of gaps that belong together, and the longest of them.
#[derive(Clone, Copy)]
struct GapPartSums {
    gap_count: usize,
    total_gap_part_ns: i64,
    longest_gap_part_ns: i64,
    longest_gap: GpuIdleGap,
}

impl GapPartSums {
    fn add_part_to_sum_of_key<K: std::hash::Hash + Eq>(
        sums: &mut HashMap<K, Self>,
        key: K,
        gap: &GpuIdleGap,
        ns: i64,
    ) {
        let first =
            Self { gap_count: 0, total_gap_part_ns: 0, longest_gap_part_ns: 0, longest_gap: *gap };
        let sum = sums.entry(key).or_insert(first);
        sum.gap_count += 1;
        sum.total_gap_part_ns += ns;
        if ns > sum.longest_gap_part_ns {
            (sum.longest_gap_part_ns, sum.longest_gap) = (ns, *gap);
        }
    }

    fn span_of_gap_with_longest_part(&self) -> (i64, i64) {
        (self.longest_gap.start_ns, self.longest_gap.end_ns)
    }

    #[allow(clippy::cast_precision_loss)]
    fn has_longest_part_nearly_all_time(&self) -> bool {
        self.longest_gap_part_ns as f64 >= MIN_SHARE_OF_SINGLE_GAP * self.total_gap_part_ns as f64
    }
}

/// Idle time by cause, with names of functions and ranges as text. Causes whose range names differ
/// only in numbers are summed together.
#[derive(Default)]
struct IdleTimeSumsByCause {
    causes_with_names: Vec<(IdleCauseKind, Option<String>)>,
    index_of_cause: HashMap<IdleCauseAndBlamedName, usize>,
    sums_by_cause_index: HashMap<usize, GapPartSums>,
}

impl IdleTimeSumsByCause {
    fn add_gap_part_with_cause(
        &mut self,
        context: &DiagnosisContext<'_>,
        why: IdleCauseAndBlamedName,
        gap: &GpuIdleGap,
        ns: i64,
    ) {
        let number = *self.index_of_cause.entry(why).or_insert_with(|| {
            let cause = (why.0, context.text_of_blamed_function_or_range(why));
            let place = self.causes_with_names.iter().position(|other| *other == cause);
            place.unwrap_or_else(|| {
                self.causes_with_names.push(cause);
                self.causes_with_names.len() - 1
            })
        });
        GapPartSums::add_part_to_sum_of_key(&mut self.sums_by_cause_index, number, gap, ns);
    }

    fn into_causes_by_total_time(self) -> Vec<IdleTimeOfCause> {
        let cause = |(number, sum): (usize, GapPartSums)| IdleTimeOfCause {
            kind: self.causes_with_names[number].0,
            called_function_or_range_path: self.causes_with_names[number].1.clone(),
            gap_count: sum.gap_count,
            total_idle_ns: sum.total_gap_part_ns,
            longest_in_one_gap_ns: sum.longest_gap_part_ns,
            longest_gap_start_and_end_ns: sum.span_of_gap_with_longest_part(),
            occurs_in_one_gap: sum.has_longest_part_nearly_all_time(),
        };
        let mut causes: Vec<IdleTimeOfCause> =
            self.sums_by_cause_index.into_iter().map(cause).collect();
        causes.sort_by(|a, b| {
            let name = (a.kind, &a.called_function_or_range_path)
                .cmp(&(b.kind, &b.called_function_or_range_path));
            b.total_idle_ns.cmp(&a.total_idle_ns).then(name)
        });
        causes
    }
}

/// Sums of gaps by the names of the operations before and after them.
#[derive(Default)]
struct GapSumsByOperationPair {
    sums_by_operation_pair: HashMap<(u64, u64), GapPartSums>,
    common_range_path_by_pair: HashMap<(u64, u64), RangePathId>,
}

impl GapSumsByOperationPair {
    fn add_gap_to_its_pair(&mut self, context: &DiagnosisContext<'_>, gap: &GpuIdleGap) {
        let kinds = (
            key_of_operation_kind_and_name(context, gap.operation_before_gap),
            key_of_operation_kind_and_name(context, gap.operation_after_gap),
        );
        GapPartSums::add_part_to_sum_of_key(
            &mut self.sums_by_operation_pair,
            kinds,
            gap,
            gap.idle_gap_length_ns(),
        );
        let range = self
            .common_range_path_by_pair
            .entry(kinds)
            .or_insert_with(|| context.range_path_of_operation(gap.operation_after_gap));
        *range = context.common_path_with_operation(*range, gap.operation_after_gap);
    }

    fn into_pairs_by_total_time(
        self,
        context: &DiagnosisContext<'_>,
    ) -> Vec<GapsBetweenTwoOperations> {
        let mut sums: Vec<((u64, u64), GapPartSums)> =
            self.sums_by_operation_pair.into_iter().collect();
        sums.sort_by_key(|&(kinds, sum)| (std::cmp::Reverse(sum.total_gap_part_ns), kinds));
        sums.iter()
            .take(MAX_LISTED_OPERATION_PAIRS)
            .map(|(kinds, sum)| GapsBetweenTwoOperations {
                operation_before: context
                    .operations
                    .printed_operation_name(sum.longest_gap.operation_before_gap),
                operation_after: context
                    .operations
                    .printed_operation_name(sum.longest_gap.operation_after_gap),
                common_range_path: context
                    .range_path_text_unless_root(self.common_range_path_by_pair[kinds]),
                gap_count: sum.gap_count,
                total_gap_ns: sum.total_gap_part_ns,
                longest_gap_start_and_end_ns: sum.span_of_gap_with_longest_part(),
            })
            .collect()
    }
}

/// Causes of selected gaps, and the operations before and after them, most time first.
pub(in crate::diagnose) struct CausesAndPairsOfGaps {
    pub causes: Vec<IdleTimeOfCause>,
    pub transitions: Vec<GapsBetweenTwoOperations>,
}

/// Sums the causes of, and the operations around, those idle gaps whose length `lengths` accepts.
/// Whether a cause occurred once is decided by `idle_time_by_cause`, which covers the gaps of all
/// lengths.
pub(in crate::diagnose) fn explain_gaps_of_lengths(
    context: &DiagnosisContext<'_>,
    activity: &ProcessActivityOnGpu,
    causes: &[IdleTimeOfCause],
    lengths: impl Fn(i64) -> bool,
) -> CausesAndPairsOfGaps {
    let (mut found, mut transitions) =
        (IdleTimeSumsByCause::default(), GapSumsByOperationPair::default());
    for gap in
        activity.gaps.iter(&context.operations).filter(|gap| lengths(gap.idle_gap_length_ns()))
    {
        context
            .causes_and_ns_of_idle_gap(&gap)
            .for_each(|(why, ns)| found.add_gap_part_with_cause(context, why, &gap, ns));
        transitions.add_gap_to_its_pair(context, &gap);
    }
    let is_once = |label: &str| {
        causes
            .iter()
            .any(|cause| cause.occurs_in_one_gap && cause.printed_cause_with_name() == label)
    };
    let found = found.into_causes_by_total_time().into_iter();
    CausesAndPairsOfGaps {
        causes: found
            .map(|cause| IdleTimeOfCause {
                occurs_in_one_gap: is_once(&cause.printed_cause_with_name()),
                ..cause
            })
            .collect(),
        transitions: transitions.into_pairs_by_total_time(context),
    }
}

/// Reports the idle gaps of a process on a GPU by length, by cause and by the operations around
/// them.
pub(in crate::diagnose) fn report_idle_gaps_of_activity(
    context: &DiagnosisContext<'_>,
    activity: &ProcessActivityOnGpu,
) -> IdleGapsOfProcessOnGpu {
    let mut report = IdleGapsOfProcessOnGpu::default();
    let (mut causes, mut transitions) =
        (IdleTimeSumsByCause::default(), GapSumsByOperationPair::default());
    for gap in activity.gaps.iter(&context.operations) {
        let length = gap.idle_gap_length_ns();
        let class = match length {
            _ if length < MIN_IDLE_GAP_FOR_WARNING_NS => &mut report.gaps_below_20_us,
            _ if length <= MAX_IDLE_GAP_FOR_WARNING_NS => &mut report.gaps_of_20_to_50_us,
            _ => &mut report.gaps_above_50_us,
        };
        class.gap_count += 1;
        class.total_gap_ns += length;
        report.longest_gap_ns = report.longest_gap_ns.max(length);
        let long = length > MIN_GAP_OF_OTHER_HOST_WORK_NS;
        if long {
            report.gaps_above_1_ms_total_ns += length;
        }
        for (why, ns) in context.causes_and_ns_of_idle_gap(&gap) {
            causes.add_gap_part_with_cause(context, why, &gap, ns);
            if !long && why.0.is_launching_or_own_host_code() {
                report.host_launching_idle_ns += ns;
            }
        }
        transitions.add_gap_to_its_pair(context, &gap);
    }
    report.idle_time_by_cause = causes.into_causes_by_total_time();
    report.gaps_by_operation_pair = transitions.into_pairs_by_total_time(context);
    report
}

/// Returns a number that is equal for operations of one kind and name.
fn key_of_operation_kind_and_name(context: &DiagnosisContext<'_>, operation: u32) -> u64 {
    let (kind, index) = context.operations.kind_and_table_row(operation);
    let name = match kind {
        crate::analyze::operations::GpuOperationKind::Kernel => {
            context.trace.functions[context.trace.kernels.function_index.at(index) as usize]
                .demangled_name
                .0
        }
        crate::analyze::operations::GpuOperationKind::Copy => {
            context.trace.copies.direction_label[index].0
        }
        _ => 0,
    };
    (kind as u64) << 32 | u64::from(name)
}
