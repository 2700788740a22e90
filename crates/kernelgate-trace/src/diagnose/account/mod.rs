//! Time accounting of a device: one table whose lines add up to its span, also by iteration and
//! by range.

mod json;
mod text;
mod transfers;

pub use transfers::TransferSum;

use std::collections::BTreeMap;

use hashbrown::HashMap;

use super::host::gap_cause::IdleCauseKind;
use super::labels::readable_name;
use super::trace_facts::DiagnosisContext;
use crate::analyze::ranges::paths::ROOT_PATH;
use crate::analyze::time_order::SortedOperations;
use crate::analyze::timeline::idle_time::{self, DeviceActivity, IdleGap};
use crate::analyze::timeline::iterations::{self, IterationEvidence};
use crate::analyze::timeline::{self, BusyTimeLine, TimelinePiece};
use crate::model::interned_names::without_numbers_in_name;

const MAX_LISTED_RANGES: usize = 10;
/// An iteration that takes at least this multiple of the median is unusual.
const UNUSUAL_LENGTH_RATIO: i64 = 2;

/// The time of a span, divided into lines that add up to the whole span.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TimeAccount {
    busy: [i64; BusyTimeLine::ALL_LINES.len()],
    /// Idle time by its cause, nanoseconds.
    pub idle: BTreeMap<IdleCauseKind, i64>,
}

impl TimeAccount {
    /// Nanoseconds of a line of busy time.
    pub fn busy_ns_of_line(&self, line: BusyTimeLine) -> i64 {
        self.busy[line as usize]
    }

    /// All lines of busy time that are not zero.
    pub fn nonzero_busy_lines(&self) -> impl Iterator<Item = (BusyTimeLine, i64)> {
        BusyTimeLine::ALL_LINES.into_iter().zip(self.busy).filter(|&(_, ns)| ns != 0)
    }

    /// Nanoseconds in which at least one operation ran.
    pub fn busy_ns(&self) -> i64 {
        self.busy.iter().sum()
    }

    /// Nanoseconds in which no operation ran.
    pub fn total_idle_ns(&self) -> i64 {
        self.idle.values().sum()
    }

    /// The whole span, nanoseconds.
    pub fn total_ns(&self) -> i64 {
        self.busy_ns() + self.total_idle_ns()
    }

    /// Nanoseconds of idle time whose cause is not in the trace.
    pub fn unclassified_idle_ns(&self) -> i64 {
        self.idle.iter().filter(|(cause, _)| !cause.is_explained()).map(|(_, ns)| ns).sum()
    }

    fn add(&mut self, part: &AccountPart) {
        match part {
            AccountPart::Busy(line, ns) => self.busy[*line as usize] += ns,
            AccountPart::Idle(cause, ns) => *self.idle.entry(*cause).or_default() += ns,
        }
    }

    /// Adds another span.
    fn extend(&mut self, other: &Self) {
        self.busy.iter_mut().zip(other.busy).for_each(|(sum, ns)| *sum += ns);
        other.idle.iter().for_each(|(&cause, ns)| *self.idle.entry(cause).or_default() += ns);
    }
}

enum AccountPart {
    Busy(BusyTimeLine, i64),
    Idle(IdleCauseKind, i64),
}

/// One iteration of a program on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceIteration {
    /// Span of the iteration: from the start of its first operation to the start of the next
    /// iteration.
    pub span: (i64, i64),
    pub account: TimeAccount,
}

/// The iterations of a program on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceIterations {
    /// The sign by which iterations were found: a range or a mark.
    pub sign: IterationEvidence,
    /// Time account before the first iteration.
    pub before: TimeAccount,
    /// The first [`Self::MAX_LISTED_ITERATIONS`] iterations, without iterations that ran nothing on
    /// this device.
    pub each: Vec<DeviceIteration>,
    /// Length of every iteration in order of time, nanoseconds.
    pub lengths: Vec<i64>,
    /// Time account of all iterations after the first one.
    pub steady: TimeAccount,
    /// Time account after the last iteration.
    pub after: TimeAccount,
}

impl DeviceIterations {
    /// Largest number of iterations whose times are stored one by one.
    pub const MAX_LISTED_ITERATIONS: usize = 1000;

    /// Lengths of the steady state, which is all but the first one, in order of their length.
    pub fn sorted_steady_lengths(&self) -> Vec<i64> {
        let mut lengths: Vec<i64> = self.lengths.iter().skip(1).copied().collect();
        lengths.sort_unstable();
        lengths
    }

    /// Iterations of the steady state, numbered from 1, that are twice as long as the median.
    pub fn unusually_long_iterations(&self) -> Vec<usize> {
        let lengths = self.sorted_steady_lengths();
        let Some(&median) = lengths.get(lengths.len() / 2) else { return Vec::new() };
        let long = |&(_, length): &(usize, &i64)| *length >= UNUSUAL_LENGTH_RATIO * median;
        self.lengths.iter().enumerate().skip(1).filter(long).map(|(index, _)| index + 1).collect()
    }
}

/// Time of the operations launched in a range, and of the idle time before these operations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangeTimeAccount {
    /// Path of the range; `#` stands for numbers.
    pub path: String,
    /// Ranges around the range.
    pub depth: usize,
    pub account: TimeAccount,
}

/// The time of a process on a device.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceTimeAccount {
    /// Process id in the operating system.
    pub pid: i64,
    pub device: u32,
    /// Time account of the whole trace on the device.
    pub total: TimeAccount,
    /// Iterations on the device, if some were found.
    pub iterations: Option<DeviceIterations>,
    /// Communication, copies and page migrations by kind, most exposed time first.
    pub transfers: Vec<TransferSum>,
    /// The outer two levels of ranges, the most expensive first.
    pub ranges: Vec<RangeTimeAccount>,
}

/// The accounts of every process on every device.
pub(super) fn device_time_accounts(context: &DiagnosisContext<'_>) -> Vec<DeviceTimeAccount> {
    let operations = idle_time::operations_by_device(context.trace, &context.all, |_| true);
    let groups = RangePathGroups::new(context);
    operations
        .iter()
        .zip(&context.activities)
        .map(|((_, operations), activity)| {
            account_of_device(context, activity, operations, &groups)
        })
        .collect()
}

fn account_of_device(
    context: &DiagnosisContext<'_>,
    activity: &DeviceActivity,
    operations: &SortedOperations,
    groups: &RangePathGroups,
) -> DeviceTimeAccount {
    let (sign, cuts) = find_iterations(context, activity, operations).unzip();
    let cuts = cuts.unwrap_or_default();
    let mut cut = IterationCut { cuts: &cuts, ..IterationCut::default() };
    let mut ranges = vec![TimeAccount::default(); groups.names.len()];
    let mut transfers = transfers::DeviceTransfers::new(context, operations);
    timeline::cut_into_pieces(&context.all, &context.classes, operations.iter(), |piece| {
        let (start, operation) = match piece {
            TimelinePiece::Busy { start, owner, .. } => (start, owner),
            TimelinePiece::Idle(gap) => (gap.start, gap.after),
        };
        cut.end_iterations_until(start);
        let groups = groups.of_path[context.path_id_of_operation(operation) as usize];
        let mut add = |part: &AccountPart| {
            cut.now.add(part);
            groups.iter().filter(|&&group| group != NO_PATH_GROUP).for_each(|&group| {
                ranges[group as usize].add(part);
            });
        };
        match piece {
            TimelinePiece::Busy { start, end, line, owner } => {
                add(&AccountPart::Busy(line, end - start));
                transfers.add_exposed_time(owner, end - start);
            }
            TimelinePiece::Idle(gap) => {
                split_gap_by_cause(context, &gap, |cause, ns| add(&AccountPart::Idle(cause, ns)))
            }
        }
    });
    let IterationCut { total, now: after, before, each, lengths, steady, .. } =
        cut.with_remaining_time();
    let iterations =
        sign.map(|sign| DeviceIterations { sign, before, each, lengths, steady, after });
    DeviceTimeAccount {
        pid: context.trace.processes[activity.process as usize].pid,
        device: activity.device,
        total,
        transfers: transfers.into_sorted_transfers(),
        iterations: iterations.filter(|of| of.lengths.len() > 1),
        ranges: groups.range_time_accounts(ranges),
    }
}

/// A device's time while it is cut into iterations.
#[derive(Default)]
struct IterationCut<'a> {
    /// Start times of the iterations, and the end of the last iteration.
    cuts: &'a [i64],
    over: usize,
    /// Since the last cut.
    now: TimeAccount,
    total: TimeAccount,
    before: TimeAccount,
    each: Vec<DeviceIteration>,
    lengths: Vec<i64>,
    steady: TimeAccount,
}

impl IterationCut<'_> {
    /// Ends all iterations that end by a time.
    fn end_iterations_until(&mut self, time: i64) {
        while let Some(&end) = self.cuts.get(self.over).filter(|&&cut| cut <= time) {
            let account = std::mem::take(&mut self.now);
            self.total.extend(&account);
            let start = self.over.checked_sub(1).map(|before| self.cuts[before]);
            self.over += 1;
            match start {
                None => self.before = account,
                Some(start) if start < end => {
                    self.end_device_iteration(DeviceIteration { span: (start, end), account })
                }
                Some(_) => {}
            }
        }
    }

    fn end_device_iteration(&mut self, iteration: DeviceIteration) {
        if !self.lengths.is_empty() {
            self.steady.extend(&iteration.account);
        }
        self.lengths.push(iteration.span.1 - iteration.span.0);
        if self.each.len() < DeviceIterations::MAX_LISTED_ITERATIONS {
            self.each.push(iteration);
        }
    }

    /// Adds the time after the last cut.
    fn with_remaining_time(mut self) -> Self {
        self.end_iterations_until(i64::MAX);
        self.total.extend(&self.now);
        self
    }
}

/// Splits an idle gap into parts by their cause.
fn split_gap_by_cause(
    context: &DiagnosisContext<'_>,
    gap: &IdleGap,
    mut each: impl FnMut(IdleCauseKind, i64),
) {
    context.causes_of_gap(gap).for_each(|((cause, _), ns)| each(cause, ns));
}

/// The sign of the iterations of a device, and its cuts: where each starts, and where the last one
/// ends.
fn find_iterations(
    context: &DiagnosisContext<'_>,
    activity: &DeviceActivity,
    operations: &SortedOperations,
) -> Option<(IterationEvidence, Vec<i64>)> {
    let by_host = context.host.iterations.get(activity.process as usize)?.as_ref();
    if let Some(found) = by_host {
        let launched = operations
            .iter()
            .filter_map(|id| Some((context.launch_call(id)?.start, context.all.start(id))));
        let cuts = iterations::device_iteration_starts(
            &found.starts,
            found.end,
            activity.span.1,
            launched,
        );
        return Some((found.sign.clone(), cuts));
    }
    let firsts = iterations::repeating_first_operations(context.trace, &context.all, operations)?;
    let sign = IterationEvidence::Repetition(readable_name(&context.all.name(*firsts.first()?)));
    let mut cuts: Vec<i64> = firsts.iter().map(|&id| context.all.start(id)).collect();
    // The last iteration counts as long as the iteration before it, if an operation starts in that
    // time.
    if let [.., before, last] = cuts[..] {
        let after = operations.partition_point(|id| context.all.start(id) < 2 * last - before);
        cuts.push(operations.get(after).map_or(activity.span.1, |id| context.all.start(id)));
    }
    Some((sign, cuts))
}

const NO_PATH_GROUP: u32 = u32::MAX;

/// Groups of range paths of the outer two levels; paths that differ only in numbers form one group.
struct RangePathGroups {
    /// Text and depth.
    names: Vec<(String, usize)>,
    /// Group of the outermost range of each path, and of the range directly inside it.
    of_path: Vec<[u32; 2]>,
}

impl RangePathGroups {
    fn new(context: &DiagnosisContext<'_>) -> Self {
        let paths = &context.host.paths;
        let mut names: Vec<(String, usize)> = Vec::new();
        let mut numbers: HashMap<(u32, String), u32> = HashMap::new();
        let mut of_path: Vec<[u32; 2]> = Vec::with_capacity(paths.len());
        for path in (0..).take(paths.len()) {
            if path == ROOT_PATH {
                of_path.push([NO_PATH_GROUP; 2]);
                continue;
            }
            // A path has a larger number than its parent path.
            let around = of_path[paths.parent_path(path) as usize];
            if around[1] != NO_PATH_GROUP {
                of_path.push(around);
                continue;
            }
            let own = without_numbers_in_name(context.trace.names.text(paths.name(path)));
            let group = *numbers.entry((around[0], own)).or_insert_with_key(|(outer, own)| {
                let outer = names.get(*outer as usize).map(|(name, _)| format!("{name}/"));
                let depth = usize::from(outer.is_some());
                names.push((format!("{}{own}", outer.unwrap_or_default()), depth));
                u32::try_from(names.len() - 1).expect("fewer than 2^32 names")
            });
            of_path.push(if around[0] == NO_PATH_GROUP {
                [group, NO_PATH_GROUP]
            } else {
                [around[0], group]
            });
        }
        Self { names, of_path }
    }

    fn range_time_accounts(&self, accounts: Vec<TimeAccount>) -> Vec<RangeTimeAccount> {
        let mut all: Vec<RangeTimeAccount> = self
            .names
            .iter()
            .zip(accounts)
            .filter(|(_, account)| account.total_ns() > 0)
            .map(|((path, depth), account)| RangeTimeAccount {
                path: path.clone(),
                depth: *depth,
                account,
            })
            .collect();
        all.sort_by(|a, b| {
            let time = |of: &RangeTimeAccount| std::cmp::Reverse(of.account.total_ns());
            (time(a), &a.path).cmp(&(time(b), &b.path))
        });
        all.truncate(MAX_LISTED_RANGES);
        all
    }
}
