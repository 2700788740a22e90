//! Collective operations (such as all-reduce) and the words of their names. Which kernels belong to
//! a collective is decided elsewhere (`analyze::classes`).

/// A collective operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CollectiveKind {
    /// All-reduce: every rank gets the sum over all ranks.
    AllReduce,
    /// All-gather: every rank gets the parts of all ranks.
    AllGather,
    /// Every rank gets a part of the sum.
    ReduceScatter,
    /// Every rank sends a part to each other.
    AllToAll,
    /// Broadcast: one rank sends its data to all ranks.
    Broadcast,
    /// Reduce: one rank gets the sum over all ranks.
    Reduce,
    /// Send and receive between single ranks.
    SendRecv,
    /// Barrier: the ranks wait for each other.
    Barrier,
    /// A collective whose kernel name does not show its kind.
    Unknown,
}

impl CollectiveKind {
    /// Label in printed output.
    pub const fn label(self) -> &'static str {
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

    /// The collective that a name mentions; separators and case do not matter.
    pub fn from_name(name: &str) -> CollectiveKind {
        let letters: String = name
            .chars()
            .filter(char::is_ascii_alphanumeric)
            .map(|letter| letter.to_ascii_lowercase())
            .collect();
        let mentioned = |(words, _): &&(&[&str], Self)| words.iter().any(|w| letters.contains(w));
        COLLECTIVE_NAME_WORDS
            .iter()
            .find(mentioned)
            .map_or(Self::Unknown, |(_, collective)| *collective)
    }
}

/// Words of names by collective; the first match decides.
const COLLECTIVE_NAME_WORDS: &[(&[&str], CollectiveKind)] = &[
    (&["reducescatter"], CollectiveKind::ReduceScatter),
    (&["allreduce", "crossdevicereduce"], CollectiveKind::AllReduce),
    (&["allgather"], CollectiveKind::AllGather),
    (&["alltoall", "all2all", "epinternode", "epintranode"], CollectiveKind::AllToAll),
    (&["sendrecv", "isend", "irecv", "putmem", "getmem", "send", "recv"], CollectiveKind::SendRecv),
    (&["broadcast", "bcast"], CollectiveKind::Broadcast),
    (&["barrier"], CollectiveKind::Barrier),
    (&["reduce"], CollectiveKind::Reduce),
];
