//! Collective operations, such as all-reduce, and the words that identify collectives in kernel
//! names. The module `analyze::classes` decides which kernels are collectives.

/// A collective operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CollectiveKind {
    /// All-reduce: every rank gets the sum over all ranks.
    AllReduce,
    /// All-gather: every rank gets the parts of all ranks.
    AllGather,
    /// Reduce-scatter: every rank gets one part of the sum over all ranks.
    ReduceScatter,
    /// All-to-all: every rank sends a different part to every other rank.
    AllToAll,
    /// Broadcast: one rank sends its data to all ranks.
    Broadcast,
    /// Reduce: one rank gets the sum over all ranks.
    Reduce,
    /// Point-to-point: one rank sends to one other rank.
    SendRecv,
    /// Barrier: all ranks wait for each other.
    Barrier,
    /// The kernel is a collective, but its name does not show which one.
    Unknown,
}

impl CollectiveKind {
    /// Returns the printed label of a collective operation.
    pub const fn collective_label(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllToAll => "all-to-all",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::SendRecv => "send/receive",
            Self::Barrier => "barrier",
            Self::Unknown => "collective",
        }
    }

    /// Finds the collective that a kernel name mentions, without regard to separators and case.
    pub fn from_kernel_name(name: &str) -> CollectiveKind {
        let letters: String = name
            .chars()
            .filter(char::is_ascii_alphanumeric)
            .map(|letter| letter.to_ascii_lowercase())
            .collect();
        let mentioned = |(words, _): &&(&[&str], Self)| words.iter().any(|w| letters.contains(w));
        WORDS_OF_COLLECTIVE_KERNEL_NAMES
            .iter()
            .find(mentioned)
            .map_or(Self::Unknown, |(_, collective)| *collective)
    }
}

/// Words of kernel names that identify each collective; the first matching row decides.
const WORDS_OF_COLLECTIVE_KERNEL_NAMES: &[(&[&str], CollectiveKind)] = &[
    (&["reducescatter"], CollectiveKind::ReduceScatter),
    (&["allreduce", "crossdevicereduce"], CollectiveKind::AllReduce),
    (&["allgather"], CollectiveKind::AllGather),
    (&["alltoall", "all2all", "epinternode", "epintranode"], CollectiveKind::AllToAll),
    (&["sendrecv", "isend", "irecv", "putmem", "getmem", "send", "recv"], CollectiveKind::SendRecv),
    (&["broadcast", "bcast"], CollectiveKind::Broadcast),
    (&["barrier"], CollectiveKind::Barrier),
    (&["reduce"], CollectiveKind::Reduce),
];
