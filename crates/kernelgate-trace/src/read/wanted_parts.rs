//! Selects which parts of a trace file are read.

/// The parts of a trace that an analysis needs. Readers skip parts that are not selected, if the
/// file format allows skipping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WantedTraceParts {
    /// Whether to read kernels, copies, memsets and graph launches.
    pub reads_operations: bool,
    /// Whether to read grids, blocks, registers and shared memory of kernel launches.
    pub reads_launch_shapes: bool,
    /// Whether to read calls of CUDA functions by the host.
    pub reads_api_calls: bool,
    /// Named ranges.
    pub reads_ranges: bool,
    /// Whether to read everything else: waits, operating-system calls, allocations, counters and
    /// messages.
    pub reads_everything_else: bool,
    /// Whether digits may be removed from range names once there are very many distinct names.
    pub may_remove_digits_from_names: bool,
}

impl WantedTraceParts {
    /// Everything.
    pub const ALL: WantedTraceParts = Self {
        reads_operations: true,
        reads_launch_shapes: true,
        reads_api_calls: true,
        reads_ranges: true,
        reads_everything_else: true,
        may_remove_digits_from_names: false,
    };

    /// Selects the parts that at least one of two analyses needs.
    #[must_use]
    pub fn union_of_parts(self, other: Self) -> Self {
        Self {
            reads_operations: self.reads_operations || other.reads_operations,
            reads_launch_shapes: self.reads_launch_shapes || other.reads_launch_shapes,
            reads_api_calls: self.reads_api_calls || other.reads_api_calls,
            reads_ranges: self.reads_ranges || other.reads_ranges,
            reads_everything_else: self.reads_everything_else || other.reads_everything_else,
            may_remove_digits_from_names: self.may_remove_digits_from_names
                && other.may_remove_digits_from_names,
        }
    }
}
