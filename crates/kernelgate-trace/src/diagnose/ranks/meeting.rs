//! A collective with the ranks that joined it.

use crate::analyze::classes::Collective;
use crate::analyze::operations::OperationId;

/// A rank in a collective, in the job's time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrival {
    pub rank: usize,
    /// Operation of the collective in the trace of the rank.
    pub operation: OperationId,
    pub start: i64,
    pub end: i64,
}

/// A collective that all ranks of its communicator joined, in the job's time.
#[derive(Debug, Clone)]
pub(super) struct Meeting {
    pub collective: Collective,
    pub bytes: u64,
    pub bus_bytes: f64,
    pub ranks: Vec<Arrival>,
}

impl Meeting {
    /// The arrival of the last rank, and that rank.
    pub fn ready(&self) -> (i64, usize) {
        let last = self.ranks.iter().map(|of| (of.start, of.rank)).max();
        last.expect("a meeting has ranks")
    }

    /// Transfer time of a collective: from the arrival of the last rank to the end.
    pub fn transfer_ns(&self) -> i64 {
        let (ready, last) = self.ready();
        let end = self.ranks.iter().find(|of| of.rank == last).map_or(ready, |of| of.end);
        end - ready
    }
}
