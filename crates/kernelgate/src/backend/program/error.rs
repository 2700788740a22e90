//! Mistakes in a program.

use kernelgate_cuda::BackendError;

/// A mistake in a program (the launch list of a network), found without a device. A program keeps
/// its first error and ignores later ones.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// No memory region of the program has this name.
    #[error("no region is called `{name}`")]
    UnknownRegion {
        /// The name.
        name: String,
    },
    /// Another live memory region already has this name.
    #[error("two regions are called `{name}`")]
    DuplicateRegion {
        /// The name.
        name: String,
    },
    /// A pointer lies past the end of its region.
    #[error("an address {offset} bytes into `{region}`, which has {bytes}")]
    OutsideRegion {
        /// The region.
        region: String,
        /// Bytes from the beginning of the region.
        offset: usize,
        /// Size of the region.
        bytes: usize,
    },
    /// Error: a step uses a memory region after its memory was freed.
    #[error("`{region}` is used after it was freed")]
    UsedAfterFree {
        /// The region.
        region: String,
    },
    /// Error: a memory region was freed that must live as long as the program.
    #[error("`{region}` cannot be freed: it has contents, is an output, or a table points into it")]
    NotFreeable {
        /// The region.
        region: String,
    },
    /// Error: a step of one lane uses memory whose previous region another lane may still use.
    #[error("`{region}` takes over memory that lane {lane} may still use")]
    UnorderedReuse {
        /// The later region that uses the same memory.
        region: String,
        /// The lane whose earlier step is not waited for.
        lane: usize,
    },
    /// Error: a side lane has a step before it waited for the first lane.
    #[error("lane {lane} starts before it waits for lane 0")]
    NotForked {
        /// The lane.
        lane: usize,
    },
    /// The main lane never waits for the end of a side lane.
    #[error("lane 0 does not wait for the end of lane {lane}")]
    NotJoined {
        /// The lane.
        lane: usize,
    },
    /// Error: a named range is still open at the end of the program.
    #[error("range `{name}` does not end")]
    OpenRange {
        /// Name of the range.
        name: String,
    },
    /// Error: a named range ends that did not begin.
    #[error("a range ends that did not begin")]
    NoOpenRange,
    /// A launch refers to lines kept in L2, and the program keeps none.
    #[error("`{symbol}` keeps or releases lines of L2, and the program sets none aside")]
    NothingKept {
        /// The kernel.
        symbol: &'static str,
    },
    /// A GEMM writes a region that was filled when the program was loaded. Error: a GEMM would
    /// overwrite a region that was uploaded once, when its algorithm is chosen.
    #[error("a GEMM writes `{region}`, whose contents are uploaded once")]
    OverwritesContents {
        /// The region.
        region: String,
    },
    /// The initial content of a region has another size than the region.
    #[error("`{region}` is declared with {declared} bytes, its contents have {found}")]
    ContentsSize {
        /// The region.
        region: String,
        /// Declared bytes.
        declared: usize,
        /// Bytes of the contents.
        found: usize,
    },
}

impl From<ProgramError> for BackendError {
    fn from(error: ProgramError) -> Self {
        Self::Launch(error.to_string())
    }
}
