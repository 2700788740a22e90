//! When a GPU worked for a process, and when it did not.

use super::operations::{AllOperations, OperationId};
use crate::model::Trace;

/// A time without any operation, between two operations of one process on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gap {
    /// First idle nanosecond.
    pub start: i64,
    /// Nanosecond after the last.
    pub end: i64,
    /// The operation that ended last before it.
    pub before: OperationId,
    /// The operation that started after it.
    pub after: OperationId,
    /// How many operations of the activity had started before it.
    pub started: u32,
}

impl Gap {
    /// Its length in nanoseconds.
    pub fn length(&self) -> i64 {
        self.end - self.start
    }
}

/// What one process did on one device: the union of kernels, copies, sets and graph launches, so
/// that operations that run at once count once.
#[derive(Debug, Clone)]
pub struct Activity {
    /// Index into [`Trace::processes`].
    pub process: u32,
    /// The device.
    pub device: u32,
    /// First and last time of an operation.
    pub span: (i64, i64),
    /// Nanoseconds in which at least one operation ran.
    pub busy_ns: i64,
    /// Idle times, in order.
    pub gaps: Vec<Gap>,
    /// Its operations.
    pub operations: usize,
}

impl Activity {
    /// Nanoseconds from the first to the last operation.
    pub fn span_ns(&self) -> i64 {
        self.span.1 - self.span.0
    }

    /// Nanoseconds without an operation.
    pub fn idle_ns(&self) -> i64 {
        self.span_ns() - self.busy_ns
    }

    /// The part of the span in which an operation ran.
    #[allow(clippy::cast_precision_loss)]
    pub fn busy_share(&self) -> f64 {
        if self.span_ns() == 0 { 1.0 } else { self.busy_ns as f64 / self.span_ns() as f64 }
    }
}

/// The activity of every process on every device, of the operations that are wanted.
pub fn activities(trace: &Trace, wanted: impl Fn(OperationId) -> bool) -> Vec<Activity> {
    let all = AllOperations::of(trace);
    by_device(trace, &all, wanted)
        .chunk_by(|a, b| a.0 == b.0)
        .map(|operations| activity(&all, operations, |_, _| {}))
        .collect()
}

/// The part of the busy time that is each operation's own, in nanoseconds by operation: the time in
/// which it ran and none that started earlier did. They add up to the busy time of all activities.
pub fn own_times(trace: &Trace) -> Vec<i64> {
    let all = AllOperations::of(trace);
    let mut own = vec![0; all.len()];
    for operations in by_device(trace, &all, |_| true).chunk_by(|a, b| a.0 == b.0) {
        activity(&all, operations, |id, own_ns| own[id as usize] = own_ns);
    }
    own
}

/// A process and a device.
pub type Owner = (u32, u32);

/// Operations by process and device, in the order of their start.
pub fn by_device(
    trace: &Trace,
    all: &AllOperations<'_>,
    wanted: impl Fn(OperationId) -> bool,
) -> Vec<(Owner, OperationId)> {
    let owner = |id: OperationId| {
        let place = &trace.places[all.place(id).0 as usize];
        (place.process, place.device)
    };
    let mut order: Vec<(Owner, OperationId)> =
        all.ids().filter(|&id| wanted(id)).map(|id| (owner(id), id)).collect();
    let key = |&(owner, id): &(Owner, OperationId)| (owner, all.start(id));
    if !order.is_sorted_by_key(key) {
        order.sort_by_key(key);
    }
    order
}

/// The activity of one process on one device; `own` is told each operation's own time.
fn activity(
    all: &AllOperations<'_>,
    operations: &[(Owner, OperationId)],
    mut own: impl FnMut(OperationId, i64),
) -> Activity {
    let ((process, device), id) = operations[0];
    let first = all.start(id);
    let (mut busy_ns, mut until, mut last, mut gaps) = (0, first, id, Vec::new());
    for (started, &(_, id)) in (0u32..).zip(operations) {
        let (start, end) = (all.start(id), all.end(id));
        if start > until {
            gaps.push(Gap { start: until, end: start, before: last, after: id, started });
            until = start;
        }
        if end > until {
            own(id, end - until);
            busy_ns += end - until;
            until = end;
            last = id;
        }
    }
    Activity { process, device, span: (first, until), busy_ns, gaps, operations: operations.len() }
}
