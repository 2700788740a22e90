//! Concurrent work on a device: its time is cut where an operation starts or ends, and each piece
//! has the classes of work in it.

pub mod idle_time;
pub mod iterations;
pub mod span_union;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::analyze::classes::{OperationClass, OperationClasses};
use crate::analyze::operations::{AllOperations, OperationId};
use crate::analyze::timeline::idle_time::IdleGap;

/// Lines of busy time. Concurrent work counts once: compute hides communication, and both hide
/// copies, so that the lines add up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BusyTimeLine {
    /// Time in which compute kernels run without communication, copy or migration.
    Compute,
    /// Compute and communication run in parallel: the communication is hidden.
    ComputeAndCommunication,
    /// Time in which compute kernels and page migrations run at once.
    ComputeAndMigration,
    /// Compute and copies run in parallel: the copies are hidden.
    ComputeAndCopy,
    /// A graph whose kernels were not recorded.
    Graph,
    /// Communication without compute: exposed.
    Communication,
    /// Time in which page migrations run without compute or communication.
    Migration,
    /// Copies run without compute or communication: the copies are exposed.
    Copy,
    /// Time in which only memsets run.
    Set,
}

impl BusyTimeLine {
    /// Every line.
    pub const ALL_LINES: [Self; 9] = [
        Self::Compute,
        Self::ComputeAndCommunication,
        Self::ComputeAndMigration,
        Self::ComputeAndCopy,
        Self::Graph,
        Self::Communication,
        Self::Migration,
        Self::Copy,
        Self::Set,
    ];

    /// Label in printed output.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::ComputeAndCommunication => "compute, hides communication",
            Self::ComputeAndMigration => "compute, page migrations beside it",
            Self::ComputeAndCopy => "compute, hides copies",
            Self::Graph => "graphs, recorded whole",
            Self::Communication => "exposed communication",
            Self::Migration => "exposed page migrations",
            Self::Copy => "exposed copies",
            Self::Set => "memsets",
        }
    }

    /// A name for programs.
    pub const fn json_key(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::ComputeAndCommunication => "hidden_communication",
            Self::ComputeAndMigration => "compute_with_page_migrations",
            Self::ComputeAndCopy => "hidden_copies",
            Self::Graph => "graphs_recorded_whole",
            Self::Communication => "exposed_communication",
            Self::Migration => "exposed_page_migrations",
            Self::Copy => "exposed_copies",
            Self::Set => "memsets",
        }
    }

    /// Returns the line of busy time for the classes of operations that run at once.
    fn line_of_running_classes(running: &[usize; OPERATION_CLASSES]) -> BusyTimeLine {
        let runs = |class: OperationClass| running[class as usize] > 0;
        match runs(OperationClass::Compute) {
            true if runs(OperationClass::Communication) => Self::ComputeAndCommunication,
            true if runs(OperationClass::Migration) => Self::ComputeAndMigration,
            true if runs(OperationClass::Copy) => Self::ComputeAndCopy,
            true => Self::Compute,
            false if runs(OperationClass::Graph) => Self::Graph,
            false if runs(OperationClass::Communication) => Self::Communication,
            false if runs(OperationClass::Migration) => Self::Migration,
            false if runs(OperationClass::Copy) => Self::Copy,
            false => Self::Set,
        }
    }
}

const OPERATION_CLASSES: usize = OperationClass::ALL_CLASSES.len();

/// A piece of a device's time between two starts or ends of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimelinePiece {
    /// Operations run.
    Busy {
        /// First nanosecond.
        start: i64,
        /// Nanosecond after the last.
        end: i64,
        line: BusyTimeLine,
        /// The operation that determines the class of the piece: the earliest started one of that
        /// class.
        owner: OperationId,
    },
    /// An idle piece, in which no operation runs on the device.
    Idle(IdleGap),
}

/// A running operation: its end, its class and its number.
type RunningOperation = (i64, OperationClass, OperationId);

/// Cuts the time of a device, whose operations are in order of their start. The pieces come in
/// order, without a hole from the first start to the last end.
///
/// Time is proportional to the operations, times the logarithm of how many run at once.
pub fn cut_into_pieces(
    all: &AllOperations<'_>,
    classes: &OperationClasses<'_>,
    operations: impl Iterator<Item = OperationId>,
    mut each: impl FnMut(TimelinePiece),
) {
    let mut sweep = TimelineSweep::default();
    for (started, id) in (0u32..).zip(operations) {
        let (start, end, class) = (all.start(id), all.end(id), classes.class_of_operation(id));
        sweep.pass_time_to(start, &mut each);
        if let Some(last) = sweep.last.filter(|_| sweep.running.is_empty())
            && sweep.time < start
        {
            let gap = IdleGap { start: sweep.time, end: start, before: last, after: id, started };
            each(TimelinePiece::Idle(gap));
        }
        sweep.time = sweep.time.max(start);
        if end > start {
            sweep.begin_operation((end, class, id));
        } else if sweep.last.is_none() {
            sweep.last = Some(id);
        }
    }
    sweep.pass_time_to(i64::MAX, &mut each);
}

struct TimelineSweep {
    time: i64,
    /// The operation that ended last, if any.
    last: Option<OperationId>,
    running: BinaryHeap<Reverse<RunningOperation>>,
    count: [usize; OPERATION_CLASSES],
    /// Running operations of each class in the order of their start; an ended one is dropped at the
    /// front.
    order: [VecDeque<(i64, OperationId)>; OPERATION_CLASSES],
}

impl Default for TimelineSweep {
    fn default() -> Self {
        Self {
            time: i64::MIN,
            last: None,
            running: BinaryHeap::new(),
            count: [0; OPERATION_CLASSES],
            order: Default::default(),
        }
    }
}

impl TimelineSweep {
    fn begin_operation(&mut self, (end, class, id): RunningOperation) {
        self.running.push(Reverse((end, class, id)));
        self.count[class as usize] += 1;
        self.order[class as usize].push_back((end, id));
    }

    /// Hands out the time until `until` as far as operations run.
    fn pass_time_to(&mut self, until: i64, each: &mut impl FnMut(TimelinePiece)) {
        while let Some(&Reverse((end, class, id))) = self.running.peek() {
            let to = end.min(until);
            if to > self.time {
                let line = BusyTimeLine::line_of_running_classes(&self.count);
                let owner = self.operation_that_owns_time();
                each(TimelinePiece::Busy { start: self.time, end: to, line, owner });
                self.time = to;
            }
            if end > until {
                return;
            }
            self.running.pop();
            self.count[class as usize] -= 1;
            self.last = Some(id);
        }
    }

    fn operation_that_owns_time(&mut self) -> OperationId {
        let class = self.count.iter().position(|&count| count > 0).expect("something runs");
        let order = &mut self.order[class];
        while order.front().is_some_and(|&(end, _)| end <= self.time) {
            order.pop_front();
        }
        order.front().expect("what runs is in the order").1
    }
}
