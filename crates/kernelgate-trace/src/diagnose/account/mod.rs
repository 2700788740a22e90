//! Accounts for the time of a process on a GPU: one table whose lines add up to the whole span,
//! also for iterations and ranges.

mod json;
mod text;
mod transfers;

pub use transfers::TransfersOfOneKind;

use std::collections::BTreeMap;

use hashbrown::HashMap;

use super::host::gap_cause::IdleCauseKind;
use super::labels::shortened_kernel_name_for_readers;
use super::trace_facts::DiagnosisContext;
use crate::analyze::ranges::paths::ROOT_RANGE_PATH;
use crate::analyze::time_order::OperationsInOrder;
use crate::analyze::timeline::idle_time::{self, GpuIdleGap, ProcessActivityOnGpu};
use crate::analyze::timeline::iterations::{self, EvidenceOfIterations};
use crate::analyze::timeline::{self, BusyTimeCategoryOfGpu, GpuTimelinePiece};
use crate::model::interned_names::replace_digits_by_number_sign;

const MAX_LISTED_RANGE_PATHS: usize = 10;
/// Smallest ratio of an iteration's length to the median length at which the iteration is reported
/// as unusually long.
const UNUSUAL_ITERATION_LENGTH_RATIO: i64 = 2;

/// The time of a span on a GPU, divided into lines of busy and idle time that add up to the span.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuTimeAccount {
    busy: [i64; BusyTimeCategoryOfGpu::ALL_BUSY_TIME_CATEGORIES.len()],
    /// Idle time of the GPU by its cause, nanoseconds.
    pub idle_ns_by_cause: BTreeMap<IdleCauseKind, i64>,
}

impl GpuTimeAccount {
    /// Nanoseconds of the span that count for one line of busy time.
    pub fn busy_ns_of_category(&self, line: BusyTimeCategoryOfGpu) -> i64 {
        self.busy[line as usize]
    }

    /// Iterates over the lines of busy time that are not zero, with their nanoseconds.
    pub fn nonzero_busy_categories_and_ns(
        &self,
    ) -> impl Iterator<Item = (BusyTimeCategoryOfGpu, i64)> {
        BusyTimeCategoryOfGpu::ALL_BUSY_TIME_CATEGORIES
            .into_iter()
            .zip(self.busy)
            .filter(|&(_, ns)| ns != 0)
    }

    /// Nanoseconds of the span in which at least one operation ran.
    pub fn busy_time_ns(&self) -> i64 {
        self.busy.iter().sum()
    }

    /// Nanoseconds of the span in which no operation ran.
    pub fn idle_time_of_all_causes_ns(&self) -> i64 {
        self.idle_ns_by_cause.values().sum()
    }

    /// Length of the time span that the account divides, nanoseconds.
    pub fn span_length_ns(&self) -> i64 {
        self.busy_time_ns() + self.idle_time_of_all_causes_ns()
    }

    /// Nanoseconds of idle time whose cause the trace does not show.
    pub fn idle_time_without_known_cause_ns(&self) -> i64 {
        self.idle_ns_by_cause
            .iter()
            .filter(|(cause, _)| !cause.is_reason_in_trace())
            .map(|(_, ns)| ns)
            .sum()
    }

    fn add_piece_of_time(&mut self, part: &BusyOrIdleTimePiece) {
        match part {
            BusyOrIdleTimePiece::Busy(line, ns) => self.busy[*line as usize] += ns,
            BusyOrIdleTimePiece::Idle(cause, ns) => {
                *self.idle_ns_by_cause.entry(*cause).or_default() += ns
            }
        }
    }

    /// Adds another span.
    fn add_account(&mut self, other: &Self) {
        self.busy.iter_mut().zip(other.busy).for_each(|(sum, ns)| *sum += ns);
        other
            .idle_ns_by_cause
            .iter()
            .for_each(|(&cause, ns)| *self.idle_ns_by_cause.entry(cause).or_default() += ns);
    }
}

enum BusyOrIdleTimePiece {
    Busy(BusyTimeCategoryOfGpu, i64),
    Idle(IdleCauseKind, i64),
}

/// One iteration of a traced program on a GPU, with its time account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IterationOnGpu {
    /// Span of the iteration on the GPU: from the start of its first operation to the start of the
    /// next iteration.
    pub iteration_start_and_end_ns: (i64, i64),
    pub account: GpuTimeAccount,
}

/// All iterations of a traced program on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IterationsOnGpu {
    /// The evidence by which the iterations were found: a range, a mark or a repeating operation.
    pub evidence: EvidenceOfIterations,
    /// Time account of the GPU before the first iteration.
    pub account_before_first_iteration: GpuTimeAccount,
    /// The first [`Self::MAX_LISTED_ITERATIONS`] iterations that ran operations on this GPU.
    pub listed_iterations: Vec<IterationOnGpu>,
    /// Lengths of all iterations on the GPU in order of time, nanoseconds.
    pub iteration_lengths_ns: Vec<i64>,
    /// Summed time account of all iterations except the first one.
    pub account_without_first_iteration: GpuTimeAccount,
    /// Time account of the GPU after the last iteration.
    pub account_after_last_iteration: GpuTimeAccount,
}

impl IterationsOnGpu {
    /// Largest number of iterations for which time accounts are stored one by one.
    pub const MAX_LISTED_ITERATIONS: usize = 1000;

    /// Sorted lengths of all iterations except the first one, nanoseconds.
    pub fn sorted_iteration_lengths_without_first(&self) -> Vec<i64> {
        let mut lengths: Vec<i64> = self.iteration_lengths_ns.iter().skip(1).copied().collect();
        lengths.sort_unstable();
        lengths
    }

    /// Numbers, from 1, of the iterations after the first one that are at least twice as long as
    /// the median.
    pub fn numbers_of_unusually_long_iterations(&self) -> Vec<usize> {
        let lengths = self.sorted_iteration_lengths_without_first();
        let Some(&median) = lengths.get(lengths.len() / 2) else { return Vec::new() };
        let long =
            |&(_, length): &(usize, &i64)| *length >= UNUSUAL_ITERATION_LENGTH_RATIO * median;
        self.iteration_lengths_ns
            .iter()
            .enumerate()
            .skip(1)
            .filter(long)
            .map(|(index, _)| index + 1)
            .collect()
    }
}

/// GPU time of the operations launched in ranges of one path, and of the idle time before these
/// operations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuTimeAccountOfRange {
    /// Path of the ranges; `#` stands for a number in a name.
    pub range_path: String,
    /// Number of ranges that enclose the range.
    pub enclosing_range_count: usize,
    pub account: GpuTimeAccount,
}

/// Time accounts of one process on one GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct ProcessTimeAccountOnGpu {
    /// Process id in the operating system.
    pub pid: i64,
    pub gpu_ordinal: u32,
    /// Time account of the GPU for the whole trace.
    pub whole_trace_account: GpuTimeAccount,
    /// Iterations of the program on this GPU, if at least two were found.
    pub iterations: Option<IterationsOnGpu>,
    /// Communication, copies and page migrations on this GPU by kind, most exposed time first.
    pub transfers: Vec<TransfersOfOneKind>,
    /// Time accounts of range paths of the outer two levels, longest time first.
    pub range_path_accounts: Vec<GpuTimeAccountOfRange>,
}

/// Returns the time accounts of every process on every GPU of a trace.
pub(super) fn account_time_of_processes_on_gpus(
    context: &DiagnosisContext<'_>,
) -> Vec<ProcessTimeAccountOnGpu> {
    let operations =
        idle_time::operations_by_process_and_gpu(context.trace, &context.operations, |_| true);
    let groups = OuterRangePathGroups::group_outer_range_paths(context);
    operations
        .iter()
        .zip(&context.activities)
        .map(|((_, operations), activity)| {
            account_time_of_process_on_gpu(context, activity, operations, &groups)
        })
        .collect()
}

fn account_time_of_process_on_gpu(
    context: &DiagnosisContext<'_>,
    activity: &ProcessActivityOnGpu,
    operations: &OperationsInOrder,
    groups: &OuterRangePathGroups,
) -> ProcessTimeAccountOnGpu {
    let (sign, cuts) = find_iterations_on_gpu(context, activity, operations).unzip();
    let cuts = cuts.unwrap_or_default();
    let mut cut =
        IterationAccounting { iteration_starts_and_end: &cuts, ..IterationAccounting::default() };
    let mut ranges = vec![GpuTimeAccount::default(); groups.path_texts_and_depths.len()];
    let mut transfers =
        transfers::TransferSummation::sum_transfers_of_operations(context, operations);
    timeline::cut_gpu_time_into_pieces(
        &context.operations,
        &context.classes,
        operations.iter(),
        |piece| {
            let (start, operation) = match piece {
                GpuTimelinePiece::Busy {
                    start_ns: start, operation_owning_piece: owner, ..
                } => (start, owner),
                GpuTimelinePiece::Idle(gap) => (gap.start_ns, gap.operation_after_gap),
            };
            cut.complete_iterations_until(start);
            let groups = groups.of_path[context.range_path_of_operation(operation) as usize];
            let mut add = |part: &BusyOrIdleTimePiece| {
                cut.account_since_iteration_start.add_piece_of_time(part);
                groups.iter().filter(|&&group| group != NO_RANGE_PATH_GROUP).for_each(|&group| {
                    ranges[group as usize].add_piece_of_time(part);
                });
            };
            match piece {
                GpuTimelinePiece::Busy {
                    start_ns: start,
                    end_ns: end,
                    busy_category: line,
                    operation_owning_piece: owner,
                } => {
                    add(&BusyOrIdleTimePiece::Busy(line, end - start));
                    transfers.add_exposed_time_of_operation(owner, end - start);
                }
                GpuTimelinePiece::Idle(gap) => visit_causes_of_gap(context, &gap, |cause, ns| {
                    add(&BusyOrIdleTimePiece::Idle(cause, ns))
                }),
            }
        },
    );
    let IterationAccounting {
        total_account: total,
        account_since_iteration_start: after,
        account_before_first_iteration,
        listed_iterations: each,
        iteration_lengths_ns: lengths,
        account_without_first_iteration,
        ..
    } = cut.with_time_after_last_iteration();
    let iterations = sign.map(|sign| IterationsOnGpu {
        evidence: sign,
        account_before_first_iteration,
        listed_iterations: each,
        iteration_lengths_ns: lengths,
        account_without_first_iteration,
        account_after_last_iteration: after,
    });
    ProcessTimeAccountOnGpu {
        pid: context.trace.processes[activity.process_index as usize].pid,
        gpu_ordinal: activity.gpu_ordinal,
        whole_trace_account: total,
        transfers: transfers.into_transfers_by_exposed_time(),
        iterations: iterations.filter(|of| of.iteration_lengths_ns.len() > 1),
        range_path_accounts: groups.sorted_accounts_of_range_groups(ranges),
    }
}

/// State while a GPU's time is distributed to iterations.
#[derive(Default)]
struct IterationAccounting<'a> {
    /// Start times of the iterations on the GPU, followed by the end of the last iteration.
    iteration_starts_and_end: &'a [i64],
    completed_iteration_count: usize,
    /// Account of the time since the last iteration start.
    account_since_iteration_start: GpuTimeAccount,
    total_account: GpuTimeAccount,
    account_before_first_iteration: GpuTimeAccount,
    listed_iterations: Vec<IterationOnGpu>,
    iteration_lengths_ns: Vec<i64>,
    account_without_first_iteration: GpuTimeAccount,
}

impl IterationAccounting<'_> {
    /// Completes the accounts of all iterations that end at or before `time`.
    fn complete_iterations_until(&mut self, time: i64) {
        while let Some(&end) = self
            .iteration_starts_and_end
            .get(self.completed_iteration_count)
            .filter(|&&cut| cut <= time)
        {
            let account = std::mem::take(&mut self.account_since_iteration_start);
            self.total_account.add_account(&account);
            let start = self
                .completed_iteration_count
                .checked_sub(1)
                .map(|before| self.iteration_starts_and_end[before]);
            self.completed_iteration_count += 1;
            match start {
                None => self.account_before_first_iteration = account,
                Some(start) if start < end => self.store_completed_iteration(IterationOnGpu {
                    iteration_start_and_end_ns: (start, end),
                    account,
                }),
                Some(_) => {}
            }
        }
    }

    fn store_completed_iteration(&mut self, iteration: IterationOnGpu) {
        if !self.iteration_lengths_ns.is_empty() {
            self.account_without_first_iteration.add_account(&iteration.account);
        }
        self.iteration_lengths_ns
            .push(iteration.iteration_start_and_end_ns.1 - iteration.iteration_start_and_end_ns.0);
        if self.listed_iterations.len() < IterationsOnGpu::MAX_LISTED_ITERATIONS {
            self.listed_iterations.push(iteration);
        }
    }

    /// Adds the GPU time after the last iteration.
    fn with_time_after_last_iteration(mut self) -> Self {
        self.complete_iterations_until(i64::MAX);
        self.total_account.add_account(&self.account_since_iteration_start);
        self
    }
}

/// Calls `each` with every cause of a GPU's idle gap and the nanoseconds of the gap that it
/// explains.
fn visit_causes_of_gap(
    context: &DiagnosisContext<'_>,
    gap: &GpuIdleGap,
    mut each: impl FnMut(IdleCauseKind, i64),
) {
    context.causes_and_ns_of_idle_gap(gap).for_each(|((cause, _), ns)| each(cause, ns));
}

/// Finds the iterations of a process on a GPU: their evidence, the start of each, and the end of
/// the last.
fn find_iterations_on_gpu(
    context: &DiagnosisContext<'_>,
    activity: &ProcessActivityOnGpu,
    operations: &OperationsInOrder,
) -> Option<(EvidenceOfIterations, Vec<i64>)> {
    let by_host = context.host_summary.iterations.get(activity.process_index as usize)?.as_ref();
    if let Some(found) = by_host {
        let launched = operations.iter().filter_map(|id| {
            Some((
                context.launch_call_of_gpu_operation(id)?.call_start_ns,
                context.operations.operation_start_ns(id),
            ))
        });
        let cuts = iterations::start_times_of_iterations_on_gpu(
            &found.iteration_starts_ns,
            found.last_iteration_end_ns,
            activity.first_start_and_last_end_ns.1,
            launched,
        );
        return Some((found.evidence.clone(), cuts));
    }
    let firsts = iterations::first_operations_of_repeated_sequences(
        context.trace,
        &context.operations,
        operations,
    )?;
    let sign = EvidenceOfIterations::RepeatedOperationNamed(shortened_kernel_name_for_readers(
        &context.operations.printed_operation_name(*firsts.first()?),
    ));
    let mut cuts: Vec<i64> =
        firsts.iter().map(|&id| context.operations.operation_start_ns(id)).collect();
    // The last iteration is taken to be as long as the one before it, if operations start after
    // that time.
    if let [.., before, last] = cuts[..] {
        let after = operations.first_position_where_not(|id| {
            context.operations.operation_start_ns(id) < 2 * last - before
        });
        cuts.push(operations.get(after).map_or(activity.first_start_and_last_end_ns.1, |id| {
            context.operations.operation_start_ns(id)
        }));
    }
    Some((sign, cuts))
}

const NO_RANGE_PATH_GROUP: u32 = u32::MAX;

/// Groups of the range paths of the outer two levels; paths that differ only in numbers form one
/// group.
struct OuterRangePathGroups {
    /// Text and depth.
    path_texts_and_depths: Vec<(String, usize)>,
    /// For each range path, the group of its outermost range, and the group of the range directly
    /// inside that range.
    of_path: Vec<[u32; 2]>,
}

impl OuterRangePathGroups {
    fn group_outer_range_paths(context: &DiagnosisContext<'_>) -> Self {
        let paths = &context.host_summary.paths;
        let mut names: Vec<(String, usize)> = Vec::new();
        let mut numbers: HashMap<(u32, String), u32> = HashMap::new();
        let mut of_path: Vec<[u32; 2]> = Vec::with_capacity(paths.len());
        for path in (0..).take(paths.len()) {
            if path == ROOT_RANGE_PATH {
                of_path.push([NO_RANGE_PATH_GROUP; 2]);
                continue;
            }
            // A path has a larger number than its parent path, so the parent's groups are already
            // known.
            let around = of_path[paths.parent_of_range_path(path) as usize];
            if around[1] != NO_RANGE_PATH_GROUP {
                of_path.push(around);
                continue;
            }
            let own = replace_digits_by_number_sign(
                context.trace.names.text_of_name(paths.last_name_of_path(path)),
            );
            let group = *numbers.entry((around[0], own)).or_insert_with_key(|(outer, own)| {
                let outer = names.get(*outer as usize).map(|(name, _)| format!("{name}/"));
                let depth = usize::from(outer.is_some());
                names.push((format!("{}{own}", outer.unwrap_or_default()), depth));
                u32::try_from(names.len() - 1).expect("fewer than 2^32 names")
            });
            of_path.push(if around[0] == NO_RANGE_PATH_GROUP {
                [group, NO_RANGE_PATH_GROUP]
            } else {
                [around[0], group]
            });
        }
        Self { path_texts_and_depths: names, of_path }
    }

    fn sorted_accounts_of_range_groups(
        &self,
        accounts: Vec<GpuTimeAccount>,
    ) -> Vec<GpuTimeAccountOfRange> {
        let mut all: Vec<GpuTimeAccountOfRange> = self
            .path_texts_and_depths
            .iter()
            .zip(accounts)
            .filter(|(_, account)| account.span_length_ns() > 0)
            .map(|((path, depth), account)| GpuTimeAccountOfRange {
                range_path: path.clone(),
                enclosing_range_count: *depth,
                account,
            })
            .collect();
        all.sort_by(|a, b| {
            let time = |of: &GpuTimeAccountOfRange| std::cmp::Reverse(of.account.span_length_ns());
            (time(a), &a.range_path).cmp(&(time(b), &b.range_path))
        });
        all.truncate(MAX_LISTED_RANGE_PATHS);
        all
    }
}
