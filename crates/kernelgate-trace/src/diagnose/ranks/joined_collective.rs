//! One collective operation that was joined across the ranks of its communicator.

use crate::analyze::classes::CollectiveKind;
use crate::analyze::operations::GpuOperationId;

/// Start and end of a collective on one rank, in the job's common time, nanoseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct CollectiveOnRank {
    pub rank_index: usize,
    /// Operation id of the collective in the rank's trace.
    pub operation: GpuOperationId,
    pub start_ns: i64,
    pub end_ns: i64,
}

/// A collective with its times on all ranks of its communicator, in the job's common time.
#[derive(Debug, Clone)]
pub(super) struct CollectiveOnAllRanks {
    pub collective: CollectiveKind,
    pub larger_buffer_bytes: u64,
    pub bus_bytes: f64,
    pub ranks: Vec<CollectiveOnRank>,
}

impl CollectiveOnAllRanks {
    /// Returns the time at which the last rank arrived at the collective, and that rank.
    pub fn time_and_rank_of_last_arrival(&self) -> (i64, usize) {
        let last = self.ranks.iter().map(|of| (of.start_ns, of.rank_index)).max();
        last.expect("a meeting has ranks")
    }

    /// Transfer time of the collective, nanoseconds: from the arrival of the last rank to the end
    /// on that rank.
    pub fn transfer_after_last_arrival_ns(&self) -> i64 {
        let (ready, last) = self.time_and_rank_of_last_arrival();
        let end = self.ranks.iter().find(|of| of.rank_index == last).map_or(ready, |of| of.end_ns);
        end - ready
    }
}
