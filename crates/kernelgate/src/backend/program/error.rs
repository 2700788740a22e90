//! Mistakes that kernelgate finds in a program (the launch list of a network).

use kernelgate_cuda::BackendError;

/// A mistake in a program (the launch list of a network), found without a GPU. A program stores its
/// first error and ignores later ones.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LaunchListError {
    /// A launch names a memory region that the program does not declare.
    #[error("no region is called `{region_name}`")]
    UnknownRegion {
        /// The region name that no declared region has.
        region_name: String,
    },
    /// Another live memory region already has this name.
    #[error("two regions are called `{region_name}`")]
    DuplicateRegion {
        /// The name that two regions share.
        region_name: String,
    },
    /// A pointer is beyond the end of its memory region.
    #[error("an address {offset_bytes} bytes into `{region_name}`, which has {region_bytes}")]
    PointerOutsideRegion {
        /// Name of the memory region that cannot be freed.
        region_name: String,
        /// Offset of the pointer in the region, in bytes.
        offset_bytes: usize,
        /// Size of the memory region, bytes.
        region_bytes: usize,
    },
    /// A step uses a memory region after the region was freed.
    #[error("`{region}` is used after it was freed")]
    RegionUsedAfterFree {
        /// Name of the freed memory region.
        region: String,
    },
    /// A memory region cannot be freed, because it has contents, is an output, or is the target of
    /// a table.
    #[error("`{region}` cannot be freed: it has contents, is an output, or a table points into it")]
    RegionNotFreeable {
        /// Name of the region that the GEMM would overwrite.
        region: String,
    },
    /// A step uses memory in which another lane may still use an earlier region.
    #[error("`{region}` takes over memory that lane {lane_number} may still use")]
    UnorderedMemoryReuse {
        /// The region that reuses the memory.
        region: String,
        /// The lane that may still use the memory, because the step does not wait for it.
        lane_number: usize,
    },
    /// A side lane has a step before the lane waited for the first lane.
    #[error("lane {lane} starts before it waits for lane 0")]
    LaneNotForked {
        /// The lane.
        lane: usize,
    },
    /// The first lane never waits for the last steps of a side lane.
    #[error("lane 0 does not wait for the end of lane {lane}")]
    LaneNotJoined {
        /// The lane.
        lane: usize,
    },
    /// A named range is still open at the end of the program.
    #[error("range `{range_name}` does not end")]
    RangeNotEnded {
        /// Name of the NVTX range that does not end.
        range_name: String,
    },
    /// A range is ended although no range is open.
    #[error("a range ends that did not begin")]
    NoOpenRange,
    /// A launch keeps or releases L2 lines, but the program declares no range to keep in L2.
    #[error("`{kernel_symbol}` keeps or releases lines of L2, and the program sets none aside")]
    NoRangeKeptInL2 {
        /// Symbol of the kernel whose launch keeps or releases L2 lines.
        kernel_symbol: &'static str,
    },
    /// A GEMM writes a memory region whose contents are uploaded only when the program is loaded.
    /// Timing GEMM algorithms while the program is loaded would destroy these contents.
    #[error("a GEMM writes `{region}`, whose contents are uploaded once")]
    GemmOverwritesContents {
        /// Name of the region whose contents have another size.
        region: String,
    },
    /// The initial contents of a region differ in size from the region.
    #[error("`{region}` is declared with {declared_bytes} bytes, its contents have {found_bytes}")]
    ContentsSizeMismatch {
        /// Name of the memory region that the pointer leaves.
        region: String,
        /// Declared bytes.
        declared_bytes: usize,
        /// Size in bytes of the given contents.
        found_bytes: usize,
    },
}

impl From<LaunchListError> for BackendError {
    fn from(error: LaunchListError) -> Self {
        Self::ComputationFailed(error.to_string())
    }
}
