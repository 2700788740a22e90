//! A collective with the ranks that joined it.

use crate::analyze::classes::Collective;

/// A collective that all ranks of its communicator joined, in the job's time.
#[derive(Debug, Clone)]
pub(super) struct Meeting {
    pub collective: Collective,
    pub bytes: u64,
    pub bus_bytes: f64,
    /// Rank, arrival and end.
    pub ranks: Vec<(usize, i64, i64)>,
}

impl Meeting {
    /// The arrival of the last rank, and that rank.
    pub fn ready(&self) -> (i64, usize) {
        let last = self.ranks.iter().map(|&(rank, start, _)| (start, rank)).max();
        last.expect("a meeting has ranks")
    }

    /// From the arrival of the last rank to its end.
    pub fn transfer_ns(&self) -> i64 {
        let (ready, last) = self.ready();
        let end = self.ranks.iter().find(|of| of.0 == last).map_or(ready, |of| of.2);
        end - ready
    }
}
