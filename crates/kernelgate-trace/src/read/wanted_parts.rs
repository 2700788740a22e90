//! The parts of a trace file that are read.

/// The parts of a trace that a question needs. Parts that are not requested are skipped, if the
/// format allows skipping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WantedTraceParts {
    /// Whether to read kernels, copies, memsets and graph launches.
    pub operations: bool,
    /// Grids, blocks, registers and shared memory of launches.
    pub shapes: bool,
    /// Calls of CUDA.
    pub calls: bool,
    /// Named ranges.
    pub ranges: bool,
    /// Everything else: waits, the operating system, allocations, counters, messages.
    pub rest: bool,
    /// Whether ranges that differ in numbers only may share a name once there are very many names.
    pub few_names: bool,
}

impl WantedTraceParts {
    /// Everything.
    pub const ALL: WantedTraceParts = Self {
        operations: true,
        shapes: true,
        calls: true,
        ranges: true,
        rest: true,
        few_names: false,
    };

    /// The parts that either of two questions needs.
    #[must_use]
    pub fn wanted_by_either(self, other: Self) -> Self {
        Self {
            operations: self.operations || other.operations,
            shapes: self.shapes || other.shapes,
            calls: self.calls || other.calls,
            ranges: self.ranges || other.ranges,
            rest: self.rest || other.rest,
            few_names: self.few_names && other.few_names,
        }
    }
}
