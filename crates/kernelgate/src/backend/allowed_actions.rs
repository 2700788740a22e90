//! Actions, besides enqueueing work on the timed stream and its joined streams, that a row's
//! launches may take in a timed region. The audit (`measure`) refuses every action that is not
//! permitted here.

/// Permissions of the code that is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllowedActions {
    /// Allocate device memory.
    pub allocations: bool,
    /// Waits for the GPU. The host's time is then in the samples, and the record states that.
    pub waits: bool,
    /// Launches may leave another CUDA context current on the thread.
    pub contexts: bool,
}

impl AllowedActions {
    /// Permissions of a row that was written for this harness. A wait or an allocation in it is a
    /// choice of its author, and part of its time.
    pub const OWN_ROW: AllowedActions = Self { allocations: true, waits: true, contexts: true };
    /// A row that launches other code, about which nothing is known.
    pub const ATTACHED_ROW: Self = Self { allocations: false, waits: false, contexts: false };
    /// The routine of a Criterion bench: the host's work is part of what such a bench measures.
    pub const CRITERION_ROUTINE: Self = Self { allocations: true, waits: true, contexts: true };
}
