//! Busy and idle times of a GPU for a process.

use crate::analyze::operations::{AllOperations, OperationId};
use crate::analyze::time_order::SortedOperations;
use crate::model::Trace;
use crate::model::packed_columns::{PackedColumn, PackedValue, partition_point};

/// A time without any operation, between two operations of one process on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdleGap {
    /// First idle nanosecond.
    pub start: i64,
    /// Nanosecond after the last.
    pub end: i64,
    /// The operation that ended last before the gap.
    pub before: OperationId,
    /// The operation that started after the gap.
    pub after: OperationId,
    /// Number of operations of the activity that had started before the gap.
    pub started: u32,
}

impl IdleGap {
    /// Length of the idle gap, nanoseconds.
    pub fn gap_ns(&self) -> i64 {
        self.end - self.start
    }
}

/// The idle gaps of an activity in order of time; their times are those of the operations around
/// them.
#[derive(Debug, Clone, Default)]
pub struct IdleGaps {
    /// The operation after each.
    after: PackedColumn<OperationId>,
    /// Difference of the numbers of the operations after and before the gap.
    step: PackedColumn<i64>,
    /// Number of the operation after the gap minus the number of operations that had started before
    /// the gap.
    ahead: PackedColumn<i64>,
}

impl IdleGaps {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.after.len()
    }

    /// Whether the activity has no idle gap.
    pub fn is_empty(&self) -> bool {
        self.after.is_empty()
    }

    pub fn get(&self, all: &AllOperations<'_>, index: usize) -> Option<IdleGap> {
        let after = self.after.get(index)?;
        let from = |of: &PackedColumn<i64>| OperationId::from_number(after.number() - of.at(index));
        let (before, started) = (from(&self.step), from(&self.ahead));
        let start = all.end(before).max(all.start(before));
        Some(IdleGap { start, end: all.start(after), before, after, started })
    }

    /// Returns all idle gaps from an index on.
    pub fn from<'a>(
        &'a self,
        all: &'a AllOperations<'_>,
        index: usize,
    ) -> impl Iterator<Item = IdleGap> + 'a {
        (index..self.len()).filter_map(|index| self.get(all, index))
    }

    pub fn iter<'a>(&'a self, all: &'a AllOperations<'_>) -> impl Iterator<Item = IdleGap> + 'a {
        self.from(all, 0)
    }

    /// The first index at which a condition no longer holds.
    pub fn partition_point(
        &self,
        all: &AllOperations<'_>,
        holds: impl Fn(&IdleGap) -> bool,
    ) -> usize {
        partition_point(self.len(), |index| self.get(all, index).is_some_and(|gap| holds(&gap)))
    }

    fn push(&mut self, before: OperationId, after: OperationId, started: u32) {
        self.after.push(after);
        self.step.push(after.number() - before.number());
        self.ahead.push(after.number() - started.number());
    }
}

/// The work of one process on one device: the union of kernels, copies, sets and graph launches, so
/// that operations that run at once count once.
#[derive(Debug, Clone)]
pub struct DeviceActivity {
    /// Index into [`Trace::processes`].
    pub process: u32,
    pub device: u32,
    /// Start of the first operation and end of the last operation of an activity.
    pub span: (i64, i64),
    /// Nanoseconds in which at least one operation ran.
    pub busy_ns: i64,
    /// Idle times, in order.
    pub gaps: IdleGaps,
    pub operations: usize,
}

impl DeviceActivity {
    /// Nanoseconds from the first to the last operation.
    pub fn span_of_gaps_ns(&self) -> i64 {
        self.span.1 - self.span.0
    }

    /// Nanoseconds without an operation.
    pub fn idle_ns(&self) -> i64 {
        self.span_of_gaps_ns() - self.busy_ns
    }
}

/// The activity of every process on every device, from the operations that are `wanted`.
pub fn activity_of_devices(
    trace: &Trace,
    wanted: impl Fn(OperationId) -> bool,
) -> Vec<DeviceActivity> {
    let all = AllOperations::new(trace);
    let devices = operations_by_device(trace, &all, wanted);
    devices
        .iter()
        .map(|(owner, operations)| device_activity(&all, *owner, operations, |_, _| {}))
        .collect()
}

/// The part of the busy time that is each operation's own, in nanoseconds by operation: the time in
/// which it ran and none that started earlier did. The parts add up to the busy time of all
/// activities.
pub fn exclusive_busy_times(trace: &Trace) -> PackedColumn<i64> {
    let all = AllOperations::new(trace);
    let mut own = PackedColumn::column_filled_with(all.len(), 0);
    for (owner, operations) in operations_by_device(trace, &all, |_| true) {
        device_activity(&all, owner, &operations, |id, own_ns| own.set_row(id as usize, own_ns));
    }
    own
}

/// Indices of a process and of a device.
pub type ProcessAndDevice = (u32, u32);

/// Processes and devices in order, each with its operations in the order of their start.
pub fn operations_by_device(
    trace: &Trace,
    all: &AllOperations<'_>,
    wanted: impl Fn(OperationId) -> bool,
) -> Vec<(ProcessAndDevice, SortedOperations)> {
    let owner_of = |place: &crate::model::gpu::OperationPlace| (place.process, place.device);
    let mut owners: Vec<ProcessAndDevice> = trace.places.iter().map(owner_of).collect();
    owners.sort_unstable();
    owners.dedup();
    let number = |place| owners.binary_search(&owner_of(place)).unwrap_or(0);
    let by_place: Vec<usize> = trace.places.iter().map(number).collect();
    let owner = |id: OperationId| by_place[all.place(id).0 as usize];
    let ids = || all.ids().filter(|&id| wanted(id));
    let start = |id| all.start(id);
    let mut counts = vec![0usize; owners.len()];
    ids().for_each(|id| counts[owner(id)] += 1);
    let mut used = (0..owners.len()).filter(|&number| counts[number] > 0);
    if let (Some(only), None) = (used.next(), used.next()) {
        return vec![(owners[only], SortedOperations::operations_by_key(ids(), start))];
    }
    // All operations are sorted in one pass, however many processes and devices there are.
    let mut lists: Vec<Vec<OperationId>> = counts.into_iter().map(Vec::with_capacity).collect();
    ids().for_each(|id| lists[owner(id)].push(id));
    let used = owners.into_iter().zip(lists).filter(|(_, list)| !list.is_empty());
    used.map(|(owner, list)| {
        (owner, SortedOperations::operations_by_key(list.iter().copied(), start))
    })
    .collect()
}

/// The activity of one process on one device; `own` gets each operation's own time.
fn device_activity(
    all: &AllOperations<'_>,
    (process, device): ProcessAndDevice,
    operations: &SortedOperations,
    mut own: impl FnMut(OperationId, i64),
) -> DeviceActivity {
    let id = operations.get(0).expect("an owner has operations");
    let first = all.start(id);
    let (mut busy_ns, mut until, mut last, mut gaps) = (0, first, id, IdleGaps::default());
    for (started, id) in (0u32..).zip(operations.iter()) {
        let (start, end) = (all.start(id), all.end(id));
        if start > until {
            gaps.push(last, id, started);
            (until, last) = (start, id);
        }
        if end > until {
            own(id, end - until);
            busy_ns += end - until;
            (until, last) = (end, id);
        }
    }
    let (span, operations) = ((first, until), operations.len());
    DeviceActivity { process, device, span, busy_ns, gaps, operations }
}
