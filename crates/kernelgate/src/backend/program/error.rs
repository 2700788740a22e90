//! Mistakes in a program.

use kernelgate_cuda::BackendError;

/// A mistake in a program (the launch list of a network), found without a GPU. A program stores its
/// first error and ignores later ones.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LaunchListError {
    /// A launch names a memory region that the program does not declare.
    #[error("no region is called `{name}`")]
    UnknownRegion {
        /// The name that caused the error.
        name: String,
    },
    /// Another live memory region already has this name.
    #[error("two regions are called `{name}`")]
    DuplicateRegion {
        /// The name that caused the error.
        name: String,
    },
    /// A pointer is beyond the end of its memory region.
    #[error("an address {offset} bytes into `{region}`, which has {bytes}")]
    OutsideRegion {
        /// Name of the memory region with the mistake.
        region: String,
        /// Offset of the pointer in the region, in bytes.
        offset: usize,
        /// Size of the memory region, bytes.
        bytes: usize,
    },
    /// A step uses a memory region after the region was freed.
    #[error("`{region}` is used after it was freed")]
    UsedAfterFree {
        /// Name of the memory region with the mistake.
        region: String,
    },
    /// A memory region cannot be freed, because it has contents, is an output, or is the target of
    /// a table.
    #[error("`{region}` cannot be freed: it has contents, is an output, or a table points into it")]
    NotFreeable {
        /// Name of the memory region with the mistake.
        region: String,
    },
    /// A step uses memory in which another lane may still use an earlier region.
    #[error("`{region}` takes over memory that lane {lane} may still use")]
    UnorderedReuse {
        /// The region that reuses the memory.
        region: String,
        /// The lane that may still use the memory, because the step does not wait for it.
        lane: usize,
    },
    /// A side lane has a step before the lane waited for the first lane.
    #[error("lane {lane} starts before it waits for lane 0")]
    NotForked {
        /// The lane.
        lane: usize,
    },
    /// The first lane never waits for the last steps of a side lane.
    #[error("lane 0 does not wait for the end of lane {lane}")]
    NotJoined {
        /// The lane.
        lane: usize,
    },
    /// A named range is still open at the end of the program.
    #[error("range `{name}` does not end")]
    OpenRange {
        /// Name of the NVTX range around the launch.
        name: String,
    },
    /// A range is ended although no range is open.
    #[error("a range ends that did not begin")]
    NoOpenRange,
    /// A launch keeps or releases L2 lines, but the program declares no range to keep in L2.
    #[error("`{symbol}` keeps or releases lines of L2, and the program sets none aside")]
    NothingKept {
        /// Symbol of the kernel.
        symbol: &'static str,
    },
    /// A GEMM writes a memory region whose contents are uploaded only when the program is loaded.
    /// Timing GEMM algorithms while the program is loaded would destroy these contents.
    #[error("a GEMM writes `{region}`, whose contents are uploaded once")]
    OverwritesContents {
        /// Name of the memory region with the mistake.
        region: String,
    },
    /// The initial contents of a region differ in size from the region.
    #[error("`{region}` is declared with {declared} bytes, its contents have {found}")]
    ContentsSize {
        /// Name of the memory region with the mistake.
        region: String,
        /// Declared bytes.
        declared: usize,
        /// Bytes of the contents.
        found: usize,
    },
}

impl From<LaunchListError> for BackendError {
    fn from(error: LaunchListError) -> Self {
        Self::Launch(error.to_string())
    }
}
