//! The specification of a kernel: source, symbol, launch shape, requirements.

use std::fmt;

use super::required_architecture::RequiredArchitecture;
use crate::BackendError;
use crate::compiler::source::{KernelBuild, Source};
use crate::driver::launch::shape::Launch;

/// Specification of a kernel: all facts that its launches, its record of resources and its tests
/// need.
///
/// `P` is the type on which variants and grids depend: the problem, or the part of it that a
/// family's kernels share. Specifications of one source file, or of one kernel family, differ in
/// few fields: write one constant with the common fields and `..COMMON` in the others.
/// [`KernelSpec::new`] is a specification with default fields.
pub struct KernelSpec<P: 'static> {
    /// The source file of the kernel; a file may hold several kernels.
    pub source: Source,
    /// The `extern "C"` symbol of the kernel.
    pub symbol: &'static str,
    /// Macros that select the variant, `NAME` or `NAME=VALUE`: part of the build's name. The macro
    /// has the same value for all kernels of a source file.
    pub defines: fn(&P) -> Vec<String>,
    /// Numbers that the source gets as macros, so that they are written on this side only: block
    /// sizes, tiles, capacities, shared bytes to assert. All kernels of a source file share these
    /// constants. The values of constants are not in the build's name, but must follow from the
    /// build's name.
    pub constants: fn(&P) -> Vec<(&'static str, usize)>,
    /// Threads a block.
    pub threads: usize,
    /// Grid size in blocks in x, y and z.
    pub blocks: fn(&P) -> [usize; 3],
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: fn(&P) -> usize,
    /// Whether the multiprocessors keep the whole shared memory while it runs (a carve-out of 100
    /// %). Kernels run concurrently only with equal carve-outs: a kernel with another carve-out
    /// waits until the multiprocessor is empty.
    pub whole_shared: bool,
    /// Blocks of a cluster, in x, as in `__cluster_dims__`; `None` without clusters.
    pub cluster: Option<usize>,
    /// Whether blocks wait for each other across the grid, so that the launch must be cooperative:
    /// all blocks are resident at once. No other process may compute on the GPU during a
    /// cooperative launch.
    pub co_resident: bool,
    /// The least architecture.
    pub requires: RequiredArchitecture,
    /// One parameter value `P` for each build that is recorded and tested; the grid of `P` does not
    /// matter.
    pub variants: fn() -> Vec<P>,
    /// Names of the kernel's stages, in order, if one launch is too large to understand as a whole:
    /// the stages that the source ends with `stage_ends` of `common/stages.cuh`, by their numbers
    /// there.
    pub stages: &'static [&'static str],
}

impl<P> Clone for KernelSpec<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for KernelSpec<P> {}

impl<P> fmt::Debug for KernelSpec<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelSpec")
            .field("file", &self.source.file)
            .field("symbol", &self.symbol)
            .finish_non_exhaustive()
    }
}

impl<P> KernelSpec<P> {
    /// A kernel without macros, dynamic shared memory or clusters, for sm_80 and later, of which no
    /// build is recorded.
    pub const fn new(
        source: Source,
        symbol: &'static str,
        threads: usize,
        blocks: fn(&P) -> [usize; 3],
    ) -> Self {
        Self {
            source,
            symbol,
            defines: |_| Vec::new(),
            constants: |_| Vec::new(),
            threads,
            blocks,
            shared_bytes: |_| 0,
            whole_shared: false,
            cluster: None,
            co_resident: false,
            requires: RequiredArchitecture::AtLeast(80),
            variants: Vec::new,
            stages: &[],
        }
    }

    /// The build for `p`.
    pub fn build_for_parameters(&self, p: &P) -> KernelBuild {
        KernelBuild {
            defines: (self.defines)(p),
            constants: (self.constants)(p),
            ..self.source.build(&[])
        }
    }

    /// The build whose kernel clocks its stages, for a grid of the given number of blocks.
    pub(super) fn build_with_stage_clocks(&self, p: &P, blocks: u64) -> KernelBuild {
        let build = self.build_for_parameters(p);
        let clocks = [format!("STAGES={}", self.stages.len()), format!("STAGE_BLOCKS={blocks}")];
        KernelBuild { defines: [build.defines, clocks.to_vec()].concat(), ..build }
    }

    /// How the kernel is launched for `p`.
    ///
    /// # Errors
    /// Fails if the blocks do not fit into a grid.
    pub fn launch_for(&self, p: &P) -> Result<Launch, BackendError> {
        let launch = Launch::with_blocks((self.blocks)(p), self.threads as u32)?;
        Ok(Launch { shared_bytes: (self.shared_bytes)(p) as u32, ..launch })
    }

    /// Reason why a GPU of the given architecture and shared memory per block cannot run the kernel
    /// for `p`: a phrase for a message.
    pub fn unmet_requirement_for(&self, p: &P, arch: &str, shared_bytes: u32) -> Option<String> {
        unmet_requirement(self.requires, (self.shared_bytes)(p) as u32, arch, Some(shared_bytes))
    }
}

/// Reason why an architecture cannot run a kernel; an unknown shared-memory limit excludes nothing.
pub(super) fn unmet_requirement(
    requires: RequiredArchitecture,
    needed: u32,
    arch: &str,
    shared_bytes: Option<u32>,
) -> Option<String> {
    if !requires.is_met_by(arch) {
        return Some(format!("needs {requires}"));
    }
    let most = shared_bytes.filter(|&most| needed > most)?;
    Some(format!("needs {needed} bytes of shared memory a block, {arch} has {most}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK_SIZE: usize = 128;
    const HALVING_KERNEL: KernelSpec<usize> = KernelSpec {
        defines: |n| vec![format!("EVEN={}", u8::from(n % 2 == 0))],
        constants: |_| vec![("THREADS", BLOCK_SIZE)],
        shared_bytes: |_| 4 * BLOCK_SIZE,
        ..KernelSpec::new(Source::new("mine/halve", "text"), "halve", BLOCK_SIZE, |n| {
            [n.div_ceil(BLOCK_SIZE), 1, 1]
        })
    };

    #[test]
    fn a_build_is_named_by_its_selecting_macros_and_compiled_with_all_constants() {
        let build = HALVING_KERNEL.build_for_parameters(&1000);
        assert_eq!(build.name(), "mine/halve EVEN=1");
        assert_eq!(build.compiler_options("sm_80").last().unwrap(), "-DTHREADS=128");
        assert_ne!(build, Source::new("mine/halve", "text").build(&["EVEN=1"]));
    }

    #[test]
    fn a_launch_shape_has_the_specified_blocks_threads_and_shared_memory() {
        let shape = HALVING_KERNEL.launch_for(&1000).unwrap();
        assert_eq!(shape, Launch { shared_bytes: 512, ..Launch::new([8, 1, 1], [128, 1, 1]) });
        assert!(HALVING_KERNEL.launch_for(&0).is_err());
    }
}
