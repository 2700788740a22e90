//! Specification of one CUDA kernel: source file, symbol, launch shape and requirements.

use std::fmt;

use super::required_architecture::RequiredArchitecture;
use crate::BackendError;
use crate::compiler::source::{KernelBuild, Source};
use crate::driver::launch::shape::Launch;

/// Specification of one CUDA kernel: all facts that its launches, its record of resources and its
/// tests need.
///
/// `P` is the type on which the macros and the grid of the kernel depend: the problem, or the part
/// of it that a kernel family shares. Specifications of one source file or kernel family share most
/// fields: write one constant `COMMON` and `..COMMON` in the others. [`KernelSpec::new`] sets
/// defaults.
pub struct KernelSpec<P: 'static> {
    /// CUDA source file of the kernel; a file may contain several kernels.
    pub source: Source,
    /// Name of the kernel's `extern "C"` function in the source file.
    pub kernel_symbol: &'static str,
    /// Returns the macros that select a variant of the source, `NAME` or `NAME=VALUE`; they are
    /// part of the build's name. A macro has the same value for all kernels of one source file.
    pub macro_definitions: fn(&P) -> Vec<String>,
    /// Returns numbers that Rust passes to the source as macros, so that they are written only in
    /// Rust: block sizes, tiles, capacities, shared bytes to assert. All kernels of one source file
    /// have the same constants. The build's name does not contain the constants, so equal names
    /// must mean equal constants.
    pub constant_macros: fn(&P) -> Vec<(&'static str, usize)>,
    /// Threads a block.
    pub threads_per_block: usize,
    /// Grid size in blocks in x, y and z.
    pub blocks: fn(&P) -> [usize; 3],
    /// Dynamic shared memory of a block, bytes.
    pub dynamic_shared_bytes: fn(&P) -> usize,
    /// Whether the kernel asks each multiprocessor for the largest shared memory while it runs (a
    /// carve-out of 100 %). Kernels run concurrently only with equal carve-outs: a kernel with
    /// another carve-out waits until the multiprocessor is empty.
    pub uses_max_shared_carveout: bool,
    /// Number of thread blocks of a cluster in x, as in `__cluster_dims__`; `None` if the kernel
    /// uses no clusters.
    pub cluster_blocks: Option<usize>,
    /// Whether blocks wait for each other across the grid, so that the launch must be cooperative:
    /// all blocks are resident at the same time. During a cooperative launch no other process may
    /// run kernels on the GPU.
    pub needs_cooperative_launch: bool,
    /// The least architecture.
    pub required_architecture: RequiredArchitecture,
    /// Returns one value of `P` for each build whose resources are recorded and tested; the grid
    /// that follows from `P` does not matter.
    pub listed_build_parameters: fn() -> Vec<P>,
    /// Names of the kernel's stages, in order, for kernels whose stages are timed separately: the
    /// source ends stage number i with `end_timed_stage(i)` of `common/stages.cuh`.
    pub stage_names: &'static [&'static str],
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
            .field("file", &self.source.kernel_file_name)
            .field("symbol", &self.kernel_symbol)
            .finish_non_exhaustive()
    }
}

impl<P> KernelSpec<P> {
    /// Specification with defaults: no macros, dynamic shared memory or clusters, sm_80 and later,
    /// and no build whose resources are recorded.
    pub const fn new(
        source: Source,
        symbol: &'static str,
        threads: usize,
        blocks: fn(&P) -> [usize; 3],
    ) -> Self {
        Self {
            source,
            kernel_symbol: symbol,
            macro_definitions: |_| Vec::new(),
            constant_macros: |_| Vec::new(),
            threads_per_block: threads,
            blocks,
            dynamic_shared_bytes: |_| 0,
            uses_max_shared_carveout: false,
            cluster_blocks: None,
            needs_cooperative_launch: false,
            required_architecture: RequiredArchitecture::AtLeastCapability(80),
            listed_build_parameters: Vec::new,
            stage_names: &[],
        }
    }

    /// Returns the kernel's build for the parameters `p`: its source file, macros and constants.
    pub fn build_for_parameters(&self, p: &P) -> KernelBuild {
        KernelBuild {
            macros_in_build_name: (self.macro_definitions)(p),
            macros_outside_build_name: (self.constant_macros)(p),
            ..self.source.with_macros(&[])
        }
    }

    /// Returns the build that measures the time of each stage of the kernel, for a grid of the
    /// given number of blocks.
    pub(super) fn build_with_stage_clocks(&self, p: &P, blocks: u64) -> KernelBuild {
        let build = self.build_for_parameters(p);
        let clocks =
            [format!("STAGES={}", self.stage_names.len()), format!("STAGE_BLOCKS={blocks}")];
        KernelBuild {
            macros_in_build_name: [build.macros_in_build_name, clocks.to_vec()].concat(),
            ..build
        }
    }

    /// Returns grid, block and dynamic shared memory of the kernel's launch for `p`.
    ///
    /// # Errors
    /// Fails if the blocks do not fit into a grid.
    pub fn launch_shape_for(&self, p: &P) -> Result<Launch, BackendError> {
        let launch = Launch::with_grid_of_blocks((self.blocks)(p), self.threads_per_block as u32)?;
        Ok(Launch { dynamic_shared_bytes: (self.dynamic_shared_bytes)(p) as u32, ..launch })
    }

    /// Returns a phrase for a message why a GPU of this architecture and shared memory per block
    /// cannot run the kernel for `p`; `None` if it can.
    pub fn reason_gpu_cannot_run_kernel_for(
        &self,
        p: &P,
        arch: &str,
        shared_bytes: u32,
    ) -> Option<String> {
        reason_architecture_cannot_run_kernel(
            self.required_architecture,
            (self.dynamic_shared_bytes)(p) as u32,
            arch,
            Some(shared_bytes),
        )
    }
}

/// Returns the reason why an architecture cannot run a kernel; if the limit of shared memory is
/// unknown, it is not checked.
pub(super) fn reason_architecture_cannot_run_kernel(
    requires: RequiredArchitecture,
    needed: u32,
    arch: &str,
    shared_bytes: Option<u32>,
) -> Option<String> {
    if !requires.is_met_by_architecture(arch) {
        return Some(format!("needs {requires}"));
    }
    let most = shared_bytes.filter(|&most| needed > most)?;
    Some(format!("needs {needed} bytes of shared memory a block, {arch} has {most}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALVING_BLOCK_THREADS: usize = 128;
    const HALVING_KERNEL: KernelSpec<usize> = KernelSpec {
        macro_definitions: |n| vec![format!("EVEN={}", u8::from(n % 2 == 0))],
        constant_macros: |_| vec![("THREADS", HALVING_BLOCK_THREADS)],
        dynamic_shared_bytes: |_| 4 * HALVING_BLOCK_THREADS,
        ..KernelSpec::new(Source::new("mine/halve", "text"), "halve", HALVING_BLOCK_THREADS, |n| {
            [n.div_ceil(HALVING_BLOCK_THREADS), 1, 1]
        })
    };

    #[test]
    fn a_build_is_named_by_its_macros_and_not_by_its_constants() {
        let build = HALVING_KERNEL.build_for_parameters(&1000);
        assert_eq!(build.kernel_build_name(), "mine/halve EVEN=1");
        assert_eq!(build.nvrtc_options("sm_80").last().unwrap(), "-DTHREADS=128");
        assert_ne!(build, Source::new("mine/halve", "text").with_macros(&["EVEN=1"]));
    }

    #[test]
    fn a_launch_has_the_specified_blocks_threads_and_shared_memory() {
        let shape = HALVING_KERNEL.launch_shape_for(&1000).unwrap();
        assert_eq!(
            shape,
            Launch { dynamic_shared_bytes: 512, ..Launch::new([8, 1, 1], [128, 1, 1]) }
        );
        assert!(HALVING_KERNEL.launch_shape_for(&0).is_err());
    }
}
