//! Selects which parts of a trace file are read.

/// The parts of a trace that an analysis needs. Readers skip parts that are not selected, if the
/// file format allows skipping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WantedTraceParts {
    /// Whether to read kernels, copies, memsets and graph launches.
    pub operations: bool,
    /// Whether to read grids, blocks, registers and shared memory of kernel launches.
    pub shapes: bool,
    /// Calls of CUDA functions by the host.
    pub calls: bool,
    /// Named ranges.
    pub ranges: bool,
    /// Whether to read everything else: waits, operating-system calls, allocations, counters and
    /// messages.
    pub everything_else: bool,
    /// Whether digits may be removed from range names once there are very many distinct names.
    pub merges_numbered_names: bool,
}

impl WantedTraceParts {
    /// Everything.
    pub const ALL: WantedTraceParts = Self {
        operations: true,
        shapes: true,
        calls: true,
        ranges: true,
        everything_else: true,
        merges_numbered_names: false,
    };

    /// Selects the parts that at least one of two analyses needs.
    #[must_use]
    pub fn union_of_parts(self, other: Self) -> Self {
        Self {
            operations: self.operations || other.operations,
            shapes: self.shapes || other.shapes,
            calls: self.calls || other.calls,
            ranges: self.ranges || other.ranges,
            everything_else: self.everything_else || other.everything_else,
            merges_numbered_names: self.merges_numbered_names && other.merges_numbered_names,
        }
    }
}
