//! Times in which a GPU did nothing: classes, causes, operations before and after.

use hashbrown::HashMap;

use crate::analyze::ranges::paths::RangePathId;
use crate::analyze::timeline::idle_time::{DeviceActivity, IdleGap};
use crate::diagnose::host::gap_cause::{
    CauseAndName, IdleCauseKind, MAX_START_LATENCY_NS, MIN_GAP_WITH_OTHER_HOST_WORK_NS,
};
use crate::diagnose::trace_facts::DiagnosisContext;

/// Gaps below this are normal between kernels of one stream.
pub const MIN_WARNING_GAP_NS: i64 = MAX_START_LATENCY_NS;
/// Gaps above this mean that the GPU waits for the host.
pub const MIN_SEVERE_GAP_NS: i64 = 50_000;
const MAX_LISTED_TRANSITIONS: usize = 5;

/// A class of gaps by their length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GapLengthClass {
    /// How many.
    pub count: usize,
    /// Total duration, in nanoseconds.
    pub total_ns: i64,
}

/// The total idle time with one cause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdleCause {
    /// Why.
    pub kind: IdleCauseKind,
    /// The function of a wait or a call, or the range around most of the host code.
    pub function: Option<String>,
    /// In how many gaps.
    pub count: usize,
    /// Total duration, in nanoseconds.
    pub total_ns: i64,
    /// The most time of the cause in one gap, in nanoseconds.
    pub longest_ns: i64,
    /// The gap with the most time of this cause.
    pub longest: (i64, i64),
    /// Whether a single gap has nearly all of this idle time, as at start-up, so that it does not
    /// repeat with each step.
    pub once: bool,
}

/// Part of a cause's time in one gap from which it happened once.
const SINGLE_GAP_TIME_SHARE: f64 = 0.8;

impl IdleCause {
    /// Text of the cause, with its function.
    pub fn label(&self) -> String {
        match &self.function {
            Some(function) => format!("{}: {function}", self.kind.label()),
            None => self.kind.label().to_owned(),
        }
    }
}

/// The operations before and after idle gaps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperationsAroundGap {
    /// The operation that ended.
    pub before: String,
    /// The operation that started.
    pub after: String,
    /// The innermost range in which all the delayed operations were launched, if one range contains
    /// them.
    pub range: Option<String>,
    /// How many gaps.
    pub count: usize,
    /// Total duration, in nanoseconds.
    pub total_ns: i64,
    pub longest: (i64, i64),
}

/// The gaps of a process on a device.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct IdleGapReport {
    /// Gaps below 20 µs: launches follow each other.
    pub normal: GapLengthClass,
    /// Gaps of 20 to 50 µs: the host interferes.
    pub warning: GapLengthClass,
    /// Gaps above 50 µs: the GPU waits for the host.
    pub severe: GapLengthClass,
    /// The longest, in nanoseconds.
    pub longest_ns: i64,
    /// Idle time of gaps of at most 1 ms in which the host launched or was about to, in
    /// nanoseconds.
    pub launching_ns: i64,
    /// Idle time of longer gaps, in nanoseconds.
    pub long_ns: i64,
    /// Causes of idle time, the most expensive first.
    pub causes: Vec<IdleCause>,
    /// Operations before and after, the most expensive first.
    pub transitions: Vec<OperationsAroundGap>,
}

impl IdleGapReport {
    /// All gaps.
    pub fn gap_count(&self) -> usize {
        self.normal.count + self.warning.count + self.severe.count
    }

    /// Total duration, in nanoseconds.
    pub fn total_ns(&self) -> i64 {
        self.normal.total_ns + self.warning.total_ns + self.severe.total_ns
    }

    /// The mean length in nanoseconds; 0 without gaps.
    #[allow(clippy::cast_precision_loss)]
    pub fn mean_gap_ns(&self) -> f64 {
        self.total_ns() as f64 / self.gap_count().max(1) as f64
    }

    /// Idle time whose cause is one of these, in nanoseconds.
    pub fn idle_ns_of_causes(&self, kinds: &[IdleCauseKind]) -> i64 {
        self.causes.iter().filter(|of| kinds.contains(&of.kind)).map(|of| of.total_ns).sum()
    }
}

/// Parts of gaps that belong together: how many, how long, the longest.
#[derive(Clone, Copy)]
struct GapTotals {
    count: usize,
    total_ns: i64,
    longest_ns: i64,
    longest: IdleGap,
}

impl GapTotals {
    fn add<K: std::hash::Hash + Eq>(sums: &mut HashMap<K, Self>, key: K, gap: &IdleGap, ns: i64) {
        let first = Self { count: 0, total_ns: 0, longest_ns: 0, longest: *gap };
        let sum = sums.entry(key).or_insert(first);
        sum.count += 1;
        sum.total_ns += ns;
        if ns > sum.longest_ns {
            (sum.longest_ns, sum.longest) = (ns, *gap);
        }
    }

    fn longest_gap_span(&self) -> (i64, i64) {
        (self.longest.start, self.longest.end)
    }

    #[allow(clippy::cast_precision_loss)]
    fn has_nearly_all_time(&self) -> bool {
        self.longest_ns as f64 >= SINGLE_GAP_TIME_SHARE * self.total_ns as f64
    }
}

/// Causes with their functions and ranges as text. Causes are counted together if their ranges
/// differ only in the numbers of the names.
#[derive(Default)]
struct IdleCausesWithNames {
    blamed: Vec<(IdleCauseKind, Option<String>)>,
    numbers: HashMap<CauseAndName, usize>,
    sums: HashMap<usize, GapTotals>,
}

impl IdleCausesWithNames {
    fn add(&mut self, context: &DiagnosisContext<'_>, why: CauseAndName, gap: &IdleGap, ns: i64) {
        let number = *self.numbers.entry(why).or_insert_with(|| {
            let cause = (why.0, context.blamed_function_or_range(why));
            let place = self.blamed.iter().position(|other| *other == cause);
            place.unwrap_or_else(|| {
                self.blamed.push(cause);
                self.blamed.len() - 1
            })
        });
        GapTotals::add(&mut self.sums, number, gap, ns);
    }

    fn most_expensive_first(self) -> Vec<IdleCause> {
        let cause = |(number, sum): (usize, GapTotals)| IdleCause {
            kind: self.blamed[number].0,
            function: self.blamed[number].1.clone(),
            count: sum.count,
            total_ns: sum.total_ns,
            longest_ns: sum.longest_ns,
            longest: sum.longest_gap_span(),
            once: sum.has_nearly_all_time(),
        };
        let mut causes: Vec<IdleCause> = self.sums.into_iter().map(cause).collect();
        causes.sort_by(|a, b| {
            let name = (a.kind, &a.function).cmp(&(b.kind, &b.function));
            b.total_ns.cmp(&a.total_ns).then(name)
        });
        causes
    }
}

/// Pairs of the operations before and after gaps.
#[derive(Default)]
struct OperationPairsAroundGaps {
    sums: HashMap<(u64, u64), GapTotals>,
    ranges: HashMap<(u64, u64), RangePathId>,
}

impl OperationPairsAroundGaps {
    fn add(&mut self, context: &DiagnosisContext<'_>, gap: &IdleGap) {
        let kinds =
            (operation_name_key(context, gap.before), operation_name_key(context, gap.after));
        GapTotals::add(&mut self.sums, kinds, gap, gap.gap_ns());
        let range =
            self.ranges.entry(kinds).or_insert_with(|| context.path_id_of_operation(gap.after));
        *range = context.innermost_path_around(*range, gap.after);
    }

    fn most_expensive_first(self, context: &DiagnosisContext<'_>) -> Vec<OperationsAroundGap> {
        let mut sums: Vec<((u64, u64), GapTotals)> = self.sums.into_iter().collect();
        sums.sort_by_key(|&(kinds, sum)| (std::cmp::Reverse(sum.total_ns), kinds));
        sums.iter()
            .take(MAX_LISTED_TRANSITIONS)
            .map(|(kinds, sum)| OperationsAroundGap {
                before: context.all.name(sum.longest.before),
                after: context.all.name(sum.longest.after),
                range: context.range_path_text(self.ranges[kinds]),
                count: sum.count,
                total_ns: sum.total_ns,
                longest: sum.longest_gap_span(),
            })
            .collect()
    }
}

/// Causes of some gaps, and the operations before and after them, the most expensive first.
pub(in crate::diagnose) struct GapsWithCauses {
    pub causes: Vec<IdleCause>,
    pub transitions: Vec<OperationsAroundGap>,
}

/// Explains the idle gaps of a length class. Whether a cause happened once follows from the
/// `causes` of all gaps.
pub(in crate::diagnose) fn explain_gaps(
    context: &DiagnosisContext<'_>,
    activity: &DeviceActivity,
    causes: &[IdleCause],
    lengths: impl Fn(i64) -> bool,
) -> GapsWithCauses {
    let (mut found, mut transitions) =
        (IdleCausesWithNames::default(), OperationPairsAroundGaps::default());
    for gap in activity.gaps.iter(&context.all).filter(|gap| lengths(gap.gap_ns())) {
        context.causes_of_gap(&gap).for_each(|(why, ns)| found.add(context, why, &gap, ns));
        transitions.add(context, &gap);
    }
    let is_once = |label: &str| causes.iter().any(|cause| cause.once && cause.label() == label);
    let found = found.most_expensive_first().into_iter();
    GapsWithCauses {
        causes: found.map(|cause| IdleCause { once: is_once(&cause.label()), ..cause }).collect(),
        transitions: transitions.most_expensive_first(context),
    }
}

/// Reports the idle gaps of an activity by length and cause.
pub(in crate::diagnose) fn report_gaps(
    context: &DiagnosisContext<'_>,
    activity: &DeviceActivity,
) -> IdleGapReport {
    let mut report = IdleGapReport::default();
    let (mut causes, mut transitions) =
        (IdleCausesWithNames::default(), OperationPairsAroundGaps::default());
    for gap in activity.gaps.iter(&context.all) {
        let length = gap.gap_ns();
        let class = match length {
            _ if length < MIN_WARNING_GAP_NS => &mut report.normal,
            _ if length <= MIN_SEVERE_GAP_NS => &mut report.warning,
            _ => &mut report.severe,
        };
        class.count += 1;
        class.total_ns += length;
        report.longest_ns = report.longest_ns.max(length);
        let long = length > MIN_GAP_WITH_OTHER_HOST_WORK_NS;
        if long {
            report.long_ns += length;
        }
        for (why, ns) in context.causes_of_gap(&gap) {
            causes.add(context, why, &gap, ns);
            if !long && why.0.is_host_launching() {
                report.launching_ns += ns;
            }
        }
        transitions.add(context, &gap);
    }
    report.causes = causes.most_expensive_first();
    report.transitions = transitions.most_expensive_first(context);
    report
}

/// A number that operations of one name share.
fn operation_name_key(context: &DiagnosisContext<'_>, operation: u32) -> u64 {
    let (kind, index) = context.all.kind_and_row(operation);
    let name = match kind {
        crate::analyze::operations::OperationKind::Kernel => {
            context.trace.functions[context.trace.kernels.function.at(index) as usize].demangled.0
        }
        crate::analyze::operations::OperationKind::Copy => context.trace.copies.kind[index].0,
        _ => 0,
    };
    (kind as u64) << 32 | u64::from(name)
}
