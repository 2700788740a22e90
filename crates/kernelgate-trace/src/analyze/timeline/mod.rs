//! Cuts the time of a GPU wherever an operation starts or ends, and assigns each piece to one line
//! of busy time or to an idle gap.

pub mod idle_time;
pub mod iterations;
pub mod span_union;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::analyze::classes::{OperationClass, OperationClassesOfTrace};
use crate::analyze::operations::{AllGpuOperations, GpuOperationId};
use crate::analyze::timeline::idle_time::GpuIdleGap;

/// Kinds of busy time of a GPU, which are lines of a time account. Time in which several operations
/// run counts for one line: compute hides communication, and both hide copies, so that the lines
/// add up to the busy time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BusyTimeCategoryOfGpu {
    /// Time in which compute kernels run without communication, copy or migration.
    ComputeKernelsAlone,
    /// Time in which compute kernels and communication run at the same time, so that the
    /// communication is hidden.
    ComputeAndCommunication,
    /// Time in which compute kernels and page migrations run at the same time.
    ComputeAndMigration,
    /// Time in which compute kernels and copies run at the same time, so that the copies are
    /// hidden.
    ComputeAndCopy,
    /// Time in which a whole CUDA graph runs of which the trace does not record single kernels.
    WholeCudaGraph,
    /// Time in which communication runs without compute, so that the communication is exposed.
    ExposedCommunication,
    /// Time in which page migrations run without compute or communication.
    ExposedPageMigration,
    /// Time in which copies run without compute or communication, so that the copies are exposed.
    ExposedCopies,
    /// Time in which only memsets run.
    OnlyMemsets,
}

impl BusyTimeCategoryOfGpu {
    /// Every line.
    pub const ALL_BUSY_TIME_CATEGORIES: [Self; 9] = [
        Self::ComputeKernelsAlone,
        Self::ComputeAndCommunication,
        Self::ComputeAndMigration,
        Self::ComputeAndCopy,
        Self::WholeCudaGraph,
        Self::ExposedCommunication,
        Self::ExposedPageMigration,
        Self::ExposedCopies,
        Self::OnlyMemsets,
    ];

    /// Returns the label of the line of busy time in printed output.
    pub const fn printed_busy_category_label(self) -> &'static str {
        match self {
            Self::ComputeKernelsAlone => "compute",
            Self::ComputeAndCommunication => "compute, hides communication",
            Self::ComputeAndMigration => "compute, page migrations beside it",
            Self::ComputeAndCopy => "compute, hides copies",
            Self::WholeCudaGraph => "graphs, recorded whole",
            Self::ExposedCommunication => "exposed communication",
            Self::ExposedPageMigration => "exposed page migrations",
            Self::ExposedCopies => "exposed copies",
            Self::OnlyMemsets => "memsets",
        }
    }

    /// Key of the busy-time line in JSON.
    pub const fn busy_category_json_key(self) -> &'static str {
        match self {
            Self::ComputeKernelsAlone => "compute",
            Self::ComputeAndCommunication => "hidden_communication",
            Self::ComputeAndMigration => "compute_with_page_migrations",
            Self::ComputeAndCopy => "hidden_copies",
            Self::WholeCudaGraph => "graphs_recorded_whole",
            Self::ExposedCommunication => "exposed_communication",
            Self::ExposedPageMigration => "exposed_page_migrations",
            Self::ExposedCopies => "exposed_copies",
            Self::OnlyMemsets => "memsets",
        }
    }

    /// Returns the line of busy time to which a piece of time counts, from the numbers of running
    /// operations by class.
    fn busy_category_of_running_classes(
        running: &[usize; OPERATION_CLASS_COUNT],
    ) -> BusyTimeCategoryOfGpu {
        let runs = |class: OperationClass| running[class as usize] > 0;
        match runs(OperationClass::ComputeKernel) {
            true if runs(OperationClass::Communication) => Self::ComputeAndCommunication,
            true if runs(OperationClass::PageMigration) => Self::ComputeAndMigration,
            true if runs(OperationClass::Copy) => Self::ComputeAndCopy,
            true => Self::ComputeKernelsAlone,
            false if runs(OperationClass::CudaGraphLaunch) => Self::WholeCudaGraph,
            false if runs(OperationClass::Communication) => Self::ExposedCommunication,
            false if runs(OperationClass::PageMigration) => Self::ExposedPageMigration,
            false if runs(OperationClass::Copy) => Self::ExposedCopies,
            false => Self::OnlyMemsets,
        }
    }
}

const OPERATION_CLASS_COUNT: usize = OperationClass::ALL_OPERATION_CLASSES.len();

/// A piece of a GPU's time between two starts or ends of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuTimelinePiece {
    /// Operations run.
    Busy {
        /// First nanosecond.
        start_ns: i64,
        /// Exclusive end of the busy piece: the first nanosecond after its last one.
        end_ns: i64,
        busy_category: BusyTimeCategoryOfGpu,
        /// The operation to which the piece counts: of the running operations of the first class in
        /// [`OperationClass`] order, the one that started first.
        operation_owning_piece: GpuOperationId,
    },
    /// An idle piece, in which no operation runs on the device.
    Idle(GpuIdleGap),
}

/// A running operation as (end in nanoseconds, class, operation id), sorted by end.
type RunningOperationByEnd = (i64, OperationClass, GpuOperationId);

/// Cuts the time of a GPU into busy and idle pieces; `operations` come in order of their start. The
/// pieces of the GPU's time come in order of time, and cover the time from the first start to the
/// last end of an operation.
///
/// The time is proportional to the number of operations, times the logarithm of how many run at the
/// same time.
pub fn cut_gpu_time_into_pieces(
    all: &AllGpuOperations<'_>,
    classes: &OperationClassesOfTrace<'_>,
    operations: impl Iterator<Item = GpuOperationId>,
    mut each: impl FnMut(GpuTimelinePiece),
) {
    let mut sweep = GpuTimelineSweep::default();
    for (started, id) in (0u32..).zip(operations) {
        let (start, end, class) = (
            all.operation_start_ns(id),
            all.operation_end_exclusive_ns(id),
            classes.class_of_gpu_operation(id),
        );
        sweep.emit_busy_pieces_until(start, &mut each);
        if let Some(last) =
            sweep.last_ended_operation.filter(|_| sweep.running_operations.is_empty())
            && sweep.sweep_position_ns < start
        {
            let gap = GpuIdleGap {
                start_ns: sweep.sweep_position_ns,
                end_ns: start,
                operation_before_gap: last,
                operation_after_gap: id,
                operations_started_before_gap: started,
            };
            each(GpuTimelinePiece::Idle(gap));
        }
        sweep.sweep_position_ns = sweep.sweep_position_ns.max(start);
        if end > start {
            sweep.add_running_operation((end, class, id));
        } else if sweep.last_ended_operation.is_none() {
            sweep.last_ended_operation = Some(id);
        }
    }
    sweep.emit_busy_pieces_until(i64::MAX, &mut each);
}

struct GpuTimelineSweep {
    sweep_position_ns: i64,
    /// The operation that ended last before the current time, if any.
    last_ended_operation: Option<GpuOperationId>,
    running_operations: BinaryHeap<Reverse<RunningOperationByEnd>>,
    count: [usize; OPERATION_CLASS_COUNT],
    /// Running operations of each class in order of their start; ended operations are removed when
    /// they reach the front.
    order: [VecDeque<(i64, GpuOperationId)>; OPERATION_CLASS_COUNT],
}

impl Default for GpuTimelineSweep {
    fn default() -> Self {
        Self {
            sweep_position_ns: i64::MIN,
            last_ended_operation: None,
            running_operations: BinaryHeap::new(),
            count: [0; OPERATION_CLASS_COUNT],
            order: Default::default(),
        }
    }
}

impl GpuTimelineSweep {
    fn add_running_operation(&mut self, (end, class, id): RunningOperationByEnd) {
        self.running_operations.push(Reverse((end, class, id)));
        self.count[class as usize] += 1;
        self.order[class as usize].push_back((end, id));
    }

    /// Advances the sweep to `until`, and calls `each` with the busy pieces before.
    fn emit_busy_pieces_until(&mut self, until: i64, each: &mut impl FnMut(GpuTimelinePiece)) {
        while let Some(&Reverse((end, class, id))) = self.running_operations.peek() {
            let to = end.min(until);
            if to > self.sweep_position_ns {
                let line = BusyTimeCategoryOfGpu::busy_category_of_running_classes(&self.count);
                let owner = self.operation_that_owns_time_piece();
                each(GpuTimelinePiece::Busy {
                    start_ns: self.sweep_position_ns,
                    end_ns: to,
                    busy_category: line,
                    operation_owning_piece: owner,
                });
                self.sweep_position_ns = to;
            }
            if end > until {
                return;
            }
            self.running_operations.pop();
            self.count[class as usize] -= 1;
            self.last_ended_operation = Some(id);
        }
    }

    fn operation_that_owns_time_piece(&mut self) -> GpuOperationId {
        let class = self.count.iter().position(|&count| count > 0).expect("something runs");
        let order = &mut self.order[class];
        while order.front().is_some_and(|&(end, _)| end <= self.sweep_position_ns) {
            order.pop_front();
        }
        order.front().expect("what runs is in the order").1
    }
}
