//! One collective operation with the ranks that joined it.

use crate::analyze::classes::CollectiveKind;
use crate::analyze::operations::OperationId;

/// A rank's start and end in a collective, in the job's time.
#[derive(Debug, Clone, Copy)]
pub(super) struct RankArrival {
    pub rank: usize,
    /// Operation of the collective in the trace of the rank.
    pub operation: OperationId,
    pub start: i64,
    pub end: i64,
}

/// A collective that all ranks of its communicator joined, in the job's time.
#[derive(Debug, Clone)]
pub(super) struct CollectiveMeeting {
    pub collective: CollectiveKind,
    pub bytes: u64,
    pub bus_bytes: f64,
    pub ranks: Vec<RankArrival>,
}

impl CollectiveMeeting {
    /// Time at which the last rank arrived, and that rank.
    pub fn last_arrival(&self) -> (i64, usize) {
        let last = self.ranks.iter().map(|of| (of.start, of.rank)).max();
        last.expect("a meeting has ranks")
    }

    /// Transfer time of a collective: from the arrival of the last rank to the end.
    pub fn collective_transfer_ns(&self) -> i64 {
        let (ready, last) = self.last_arrival();
        let end = self.ranks.iter().find(|of| of.rank == last).map_or(ready, |of| of.end);
        end - ready
    }
}
