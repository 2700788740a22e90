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
    let key = |id: OperationId| {
        let place = &trace.places[all.place(id).0 as usize];
        (place.process, place.device, all.start(id))
    };
    let mut order: Vec<OperationId> = all.ids().filter(|&id| wanted(id)).collect();
    if !order.is_sorted_by_key(|&id| key(id)) {
        order.sort_by_key(|&id| key(id));
    }
    let group = |id: &OperationId| (key(*id).0, key(*id).1);
    order
        .chunk_by(|a, b| group(a) == group(b))
        .map(|ids| activity(&all, ids, group(&ids[0])))
        .collect()
}

fn activity(
    all: &AllOperations<'_>,
    ids: &[OperationId],
    (process, device): (u32, u32),
) -> Activity {
    let first = all.start(ids[0]);
    let (mut busy_ns, mut until, mut last, mut gaps) = (0, first, ids[0], Vec::new());
    for &id in ids {
        let (start, end) = (all.start(id), all.end(id));
        if start > until {
            gaps.push(Gap { start: until, end: start, before: last, after: id });
            until = start;
        }
        if end > until {
            busy_ns += end - until;
            until = end;
            last = id;
        }
    }
    Activity { process, device, span: (first, until), busy_ns, gaps, operations: ids.len() }
}
