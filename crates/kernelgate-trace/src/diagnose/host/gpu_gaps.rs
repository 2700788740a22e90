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
pub const MIN_GAP_FOR_WARNING_NS: i64 = MAX_USUAL_START_LATENCY_NS;
/// Longest idle gap that is not severe, nanoseconds; in longer gaps the GPU waits for the host.
pub const MAX_GAP_OF_WARNING_NS: i64 = 50_000;
const MAX_LISTED_OPERATION_PAIRS: usize = 5;

/// Number and total length of the idle gaps in one class of lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GapsOfLengthClass {
    /// Number of idle gaps in this length class.
    pub gap_count: usize,
    /// Total duration, in nanoseconds.
    pub total_ns: i64,
}

/// Total idle time of a GPU with one cause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdleTimeOfCause {
    /// Why.
    pub kind: IdleCauseKind,
    /// Name of the waiting or called function, or path of the range around most of the host code.
    pub function: Option<String>,
    /// Number of gaps that have this cause.
    pub gap_count: usize,
    /// Total duration, in nanoseconds.
    pub total_ns: i64,
    /// Most nanoseconds of this cause in a single gap.
    pub longest_ns: i64,
    /// Start and end of the gap with the most time of this cause, nanoseconds.
    pub longest_start_and_end_ns: (i64, i64),
    /// Whether a single gap, as at start-up, has nearly all idle time of this cause, so that the
    /// cause does not repeat.
    pub occurs_once: bool,
}

/// Smallest share of a cause's idle time that a single gap must have for the cause to count as
/// occurring once.
const MIN_SHARE_OF_SINGLE_GAP: f64 = 0.8;

impl IdleTimeOfCause {
    /// Text of the idle cause with the name of the responsible function or range.
    pub fn printed_cause_with_name(&self) -> String {
        match &self.function {
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
    pub range: Option<String>,
    /// Number of gaps between these two operations.
    pub gap_count: usize,
    /// Total duration, in nanoseconds.
    pub total_ns: i64,
    pub longest_gap_start_and_end_ns: (i64, i64),
}

/// The idle gaps of one process on one GPU, by length, by cause and by the operations around them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct IdleGapsOfProcessOnGpu {
    /// Gaps below 20 µs, which are usual between consecutive launches.
    pub gaps_below_20_us: GapsOfLengthClass,
    /// Gaps of 20 to 50 µs, in which the host delays the GPU.
    pub gaps_of_20_to_50_us: GapsOfLengthClass,
    /// Gaps above 50 µs, in which the GPU waits for the host.
    pub gaps_above_50_us: GapsOfLengthClass,
    /// The longest, in nanoseconds.
    pub longest_ns: i64,
    /// Idle nanoseconds, in gaps of at most 1 ms, in which the host was launching or ran its own
    /// code before a launch.
    pub launching_ns: i64,
    /// Total length of the gaps above 1 ms, nanoseconds.
    pub long_ns: i64,
    /// Idle time by cause, most time first.
    pub idle_time_by_cause: Vec<IdleTimeOfCause>,
    /// Gaps by names of the operations before and after, most time first.
    pub transitions: Vec<GapsBetweenTwoOperations>,
}

impl IdleGapsOfProcessOnGpu {
    /// All gaps.
    pub fn number_of_gaps(&self) -> usize {
        self.gaps_below_20_us.gap_count
            + self.gaps_of_20_to_50_us.gap_count
            + self.gaps_above_50_us.gap_count
    }

    /// Total duration, in nanoseconds.
    pub fn total_length_of_gaps_ns(&self) -> i64 {
        self.gaps_below_20_us.total_ns
            + self.gaps_of_20_to_50_us.total_ns
            + self.gaps_above_50_us.total_ns
    }

    /// Mean length of the idle gaps, nanoseconds; 0 without gaps.
    #[allow(clippy::cast_precision_loss)]
    pub fn mean_length_of_gaps_ns(&self) -> f64 {
        self.total_length_of_gaps_ns() as f64 / self.number_of_gaps().max(1) as f64
    }

    /// Total idle time with one of the given causes, nanoseconds.
    pub fn idle_ns_with_any_cause_of(&self, kinds: &[IdleCauseKind]) -> i64 {
        self.idle_time_by_cause
            .iter()
            .filter(|of| kinds.contains(&of.kind))
            .map(|of| of.total_ns)
            .sum()
    }
}

/// Number and total length of parts of gaps that belong together, and the longest of them.
#[derive(Clone, Copy)]
struct GapPartSums {
    gap_count: usize,
    total_ns: i64,
    longest_ns: i64,
    longest_gap: GpuIdleGap,
}

impl GapPartSums {
    fn add_part_to_sum_of_key<K: std::hash::Hash + Eq>(
        sums: &mut HashMap<K, Self>,
        key: K,
        gap: &GpuIdleGap,
        ns: i64,
    ) {
        let first = Self { gap_count: 0, total_ns: 0, longest_ns: 0, longest_gap: *gap };
        let sum = sums.entry(key).or_insert(first);
        sum.gap_count += 1;
        sum.total_ns += ns;
        if ns > sum.longest_ns {
            (sum.longest_ns, sum.longest_gap) = (ns, *gap);
        }
    }

    fn span_of_gap_with_longest_part(&self) -> (i64, i64) {
        (self.longest_gap.start_ns, self.longest_gap.end)
    }

    #[allow(clippy::cast_precision_loss)]
    fn has_longest_part_nearly_all_time(&self) -> bool {
        self.longest_ns as f64 >= MIN_SHARE_OF_SINGLE_GAP * self.total_ns as f64
    }
}

/// Idle time by cause, with names of functions and ranges as text. Causes whose range names differ
/// only in numbers are summed together.
#[derive(Default)]
struct SumsByCauseWithName {
    causes_with_names: Vec<(IdleCauseKind, Option<String>)>,
    index_of_cause: HashMap<IdleCauseAndBlamedName, usize>,
    sums: HashMap<usize, GapPartSums>,
}

impl SumsByCauseWithName {
    fn add_part_with_cause(
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
        GapPartSums::add_part_to_sum_of_key(&mut self.sums, number, gap, ns);
    }

    fn into_causes_by_total_time(self) -> Vec<IdleTimeOfCause> {
        let cause = |(number, sum): (usize, GapPartSums)| IdleTimeOfCause {
            kind: self.causes_with_names[number].0,
            function: self.causes_with_names[number].1.clone(),
            gap_count: sum.gap_count,
            total_ns: sum.total_ns,
            longest_ns: sum.longest_ns,
            longest_start_and_end_ns: sum.span_of_gap_with_longest_part(),
            occurs_once: sum.has_longest_part_nearly_all_time(),
        };
        let mut causes: Vec<IdleTimeOfCause> = self.sums.into_iter().map(cause).collect();
        causes.sort_by(|a, b| {
            let name = (a.kind, &a.function).cmp(&(b.kind, &b.function));
            b.total_ns.cmp(&a.total_ns).then(name)
        });
        causes
    }
}

/// Sums of gaps by the names of the operations before and after them.
#[derive(Default)]
struct SumsByOperationPair {
    sums: HashMap<(u64, u64), GapPartSums>,
    ranges: HashMap<(u64, u64), RangePathId>,
}

impl SumsByOperationPair {
    fn add_gap_to_its_pair(&mut self, context: &DiagnosisContext<'_>, gap: &GpuIdleGap) {
        let kinds = (
            number_of_operation_name(context, gap.operation_before),
            number_of_operation_name(context, gap.operation_after),
        );
        GapPartSums::add_part_to_sum_of_key(&mut self.sums, kinds, gap, gap.idle_gap_length_ns());
        let range = self
            .ranges
            .entry(kinds)
            .or_insert_with(|| context.range_path_of_operation(gap.operation_after));
        *range = context.common_path_with_operation(*range, gap.operation_after);
    }

    fn into_pairs_by_total_time(
        self,
        context: &DiagnosisContext<'_>,
    ) -> Vec<GapsBetweenTwoOperations> {
        let mut sums: Vec<((u64, u64), GapPartSums)> = self.sums.into_iter().collect();
        sums.sort_by_key(|&(kinds, sum)| (std::cmp::Reverse(sum.total_ns), kinds));
        sums.iter()
            .take(MAX_LISTED_OPERATION_PAIRS)
            .map(|(kinds, sum)| GapsBetweenTwoOperations {
                operation_before: context
                    .operations
                    .printed_operation_name(sum.longest_gap.operation_before),
                operation_after: context
                    .operations
                    .printed_operation_name(sum.longest_gap.operation_after),
                range: context.range_path_text_unless_root(self.ranges[kinds]),
                gap_count: sum.gap_count,
                total_ns: sum.total_ns,
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
/// `idle_time_by_cause`, which are of all gaps, say whether a cause occurred once.
pub(in crate::diagnose) fn explain_gaps_of_lengths(
    context: &DiagnosisContext<'_>,
    activity: &ProcessActivityOnGpu,
    causes: &[IdleTimeOfCause],
    lengths: impl Fn(i64) -> bool,
) -> CausesAndPairsOfGaps {
    let (mut found, mut transitions) =
        (SumsByCauseWithName::default(), SumsByOperationPair::default());
    for gap in
        activity.gaps.iter(&context.operations).filter(|gap| lengths(gap.idle_gap_length_ns()))
    {
        context
            .causes_and_ns_of_idle_gap(&gap)
            .for_each(|(why, ns)| found.add_part_with_cause(context, why, &gap, ns));
        transitions.add_gap_to_its_pair(context, &gap);
    }
    let is_once = |label: &str| {
        causes.iter().any(|cause| cause.occurs_once && cause.printed_cause_with_name() == label)
    };
    let found = found.into_causes_by_total_time().into_iter();
    CausesAndPairsOfGaps {
        causes: found
            .map(|cause| IdleTimeOfCause {
                occurs_once: is_once(&cause.printed_cause_with_name()),
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
        (SumsByCauseWithName::default(), SumsByOperationPair::default());
    for gap in activity.gaps.iter(&context.operations) {
        let length = gap.idle_gap_length_ns();
        let class = match length {
            _ if length < MIN_GAP_FOR_WARNING_NS => &mut report.gaps_below_20_us,
            _ if length <= MAX_GAP_OF_WARNING_NS => &mut report.gaps_of_20_to_50_us,
            _ => &mut report.gaps_above_50_us,
        };
        class.gap_count += 1;
        class.total_ns += length;
        report.longest_ns = report.longest_ns.max(length);
        let long = length > MIN_GAP_OF_OTHER_HOST_WORK_NS;
        if long {
            report.long_ns += length;
        }
        for (why, ns) in context.causes_and_ns_of_idle_gap(&gap) {
            causes.add_part_with_cause(context, why, &gap, ns);
            if !long && why.0.is_launching_or_own_host_code() {
                report.launching_ns += ns;
            }
        }
        transitions.add_gap_to_its_pair(context, &gap);
    }
    report.idle_time_by_cause = causes.into_causes_by_total_time();
    report.transitions = transitions.into_pairs_by_total_time(context);
    report
}

/// Returns a number that is equal for operations of one kind and name.
fn number_of_operation_name(context: &DiagnosisContext<'_>, operation: u32) -> u64 {
    let (kind, index) = context.operations.kind_and_table_row(operation);
    let name = match kind {
        crate::analyze::operations::GpuOperationKind::Kernel => {
            context.trace.functions[context.trace.kernels.function.at(index) as usize].demangled.0
        }
        crate::analyze::operations::GpuOperationKind::Copy => context.trace.copies.kind[index].0,
        _ => 0,
    };
    (kind as u64) << 32 | u64::from(name)
}
