//! A kernel that was compiled from its specification and loaded on a device.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::kernel_spec::KernelSpec;
use crate::BackendError;
use crate::driver::device::Device;
use crate::driver::launch::argument::{KernelArgument, KernelArgumentList};
use crate::driver::launch::kernel::Kernel;
use crate::driver::launch::prepared::PreparedLaunch;
use crate::driver::launch::shape::Launch;
use crate::driver::launch::stage_times::KernelWithStages;

/// A kernel that is loaded on a device, with its launch shape; the launch is cooperative if the
/// kernel's blocks wait for each other.
pub struct LoadedKernelWithLaunch {
    kernel: Kernel,
    launch: Launch,
}

impl<P> KernelSpec<P> {
    /// Compiles the kernel for `p`, or takes its machine code from the cache, loads it on the
    /// device, and sets its shared memory.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`] if the kernel does not support the GPU's
    /// architecture, if the GPU has too little shared memory, or if it cannot hold all blocks at
    /// once although they must be co-resident; other errors when a grid cannot hold its blocks, or
    /// the kernel does not compile or load.
    pub fn compile_and_load(
        &self,
        device: &Device,
        p: &P,
    ) -> Result<LoadedKernelWithLaunch, BackendError> {
        let arch = &device.gpu_properties().kernel_architecture;
        if let Some(unmet) =
            self.reason_gpu_cannot_run_kernel_for(p, arch, device.max_shared_bytes_per_block()?)
        {
            let arch_fits = self.required_architecture.is_met_by_architecture(arch);
            let reason = if arch_fits { unmet } else { format!("{unmet}, this GPU is {arch}") };
            return Err(BackendError::Unsupported(reason));
        }
        let shape = self.launch_shape_for(p)?;
        let with_clocks = device.compiles_stage_clocks() && !self.stage_names.is_empty();
        let build = match with_clocks {
            true => self.build_with_stage_clocks(p, shape.blocks_in_grid()),
            false => self.build_for_parameters(p),
        };
        let kernel = device.load_kernel(&build, self.kernel_symbol)?;
        let counters =
            with_clocks.then(|| device.stage_counters_of_loaded_build(&build)).transpose()?;
        let staged = (!self.stage_names.is_empty()).then(|| {
            KernelWithStages::with_stages_and_counters(
                self.kernel_symbol,
                self.stage_names,
                counters,
            )
        });
        device.record_shape_and_stages_of_kernel(
            &build.record_name_of_kernel(self.kernel_symbol),
            shape,
            staged,
        );
        if self.uses_max_shared_carveout {
            kernel.set_full_shared_carve_out()?;
        }
        let launch = Launch { cooperative: self.needs_cooperative_launch, ..shape };
        let cluster = self.cluster_blocks.map(|blocks| [blocks as u32, 1, 1]);
        Launch { cluster, ..launch }.check_on_device_and_allow_resources(device, &kernel)?;
        Ok(LoadedKernelWithLaunch { kernel, launch })
    }
}

impl LoadedKernelWithLaunch {
    /// Returns a handle of the same loaded kernel that launches on the given stream.
    pub fn clone_launching_on_stream(&self, stream: &Arc<CudaStream>) -> Self {
        Self { kernel: self.kernel.clone_for_stream(stream), launch: self.launch }
    }

    /// Enqueues the kernel with its launch shape on the device's stream, as [`Kernel::launch`].
    ///
    /// # Errors
    /// Fails if the arguments are not the kernel's, or the launch is refused.
    pub fn launch_with(&self, arguments: &[KernelArgument]) -> Result<(), BackendError> {
        self.kernel.launch(self.launch, arguments)
    }

    /// Prepares a launch. If `blocks` is given, it replaces the number of blocks in x.
    pub fn prepare_launch_with_blocks(
        self,
        device: &Device,
        blocks: Option<u32>,
        arguments: KernelArgumentList,
    ) -> Result<PreparedLaunch, BackendError> {
        let mut launch = self.launch;
        launch.grid[0] = blocks.unwrap_or(launch.grid[0]);
        PreparedLaunch::check_and_prepare(device, self.kernel, launch, arguments)
    }

    /// Returns the loaded kernel, for launches of other shapes ([`KernelSpec::launch_shape_for`]).
    pub const fn loaded_kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Returns the grid, block and dynamic shared memory that the specification gives the kernel.
    pub const fn specified_launch_shape(&self) -> Launch {
        self.launch
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::lock_first_gpu;
    use crate::{RequiredArchitecture, Source};

    #[test]
    fn a_cooperative_launch_of_too_many_blocks_is_refused() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let source = r#"extern "C" __global__ void nothing() {}"#;
        let build = Source::new("nothing", source).with_macros(&[]);
        let launch = |blocks, co_resident| {
            let kernel = device.load_kernel(&build, "nothing").unwrap();
            let launch =
                Launch { cooperative: co_resident, ..Launch::new([blocks, 1, 1], [32, 1, 1]) };
            LoadedKernelWithLaunch { kernel, launch }.launch_with(&[])
        };
        assert_eq!(launch(1 << 20, false), Ok(()));
        assert_eq!(launch(1, true), Ok(()));
        let refused = launch(1 << 20, true).unwrap_err().to_string();
        assert!(refused.contains("launch nothing"), "{refused}");
        device.synchronize().unwrap();
    }

    const CLUSTER_OF_SIXTEEN_KERNEL: KernelSpec<()> = KernelSpec {
        required_architecture: RequiredArchitecture::ExactArchitecture("sm_90a"),
        cluster_blocks: Some(16),
        ..KernelSpec::new(
            Source::new(
                "large_cluster",
                r#"
extern "C" __global__ void __cluster_dims__(16, 1, 1) large_cluster(unsigned* out) {
    unsigned blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    if (threadIdx.x == 0) out[blockIdx.x] = blocks;
}"#,
            ),
            "large_cluster",
            32,
            |()| [32, 1, 1],
        )
    };

    #[test]
    fn a_kernel_with_clusters_of_sixteen_blocks_runs_on_hopper() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let kernel = match CLUSTER_OF_SIXTEEN_KERNEL.compile_and_load(&device, &()) {
            Err(BackendError::Unsupported(reason)) => return eprintln!("skipped: {reason}"),
            kernel => kernel.unwrap(),
        };
        let out = device.allocate(4 * 32).unwrap();
        kernel.launch_with(&[KernelArgument::from(&out)]).unwrap();
        let mut blocks = vec![0; out.size_in_bytes()];
        out.download_first_bytes(&mut blocks).unwrap();
        assert!(blocks.chunks(4).all(|word| word == [16, 0, 0, 0]), "{blocks:?}");
    }

    const STAGED_SPIN_KERNEL: KernelSpec<()> = KernelSpec {
        stage_names: &["short", "long", "never"],
        ..KernelSpec::new(
            Source::new(
                "spin_stages",
                r#"
#include "common/stages.cuh"
__device__ void spin(long long cycles) {
    const long long begun = clock64();
    while (clock64() - begun < cycles) {}
}
extern "C" __global__ void spin_stages() {
    begin_stage_clocks();
    for (int i = 0; i < 10; ++i) {
        spin(1000);
        end_timed_stage(0);
        spin(3000 * (blockIdx.x + 1));
        end_timed_stage(1);
    }
    store_stage_clocks();
}"#,
            ),
            "spin_stages",
            64,
            |()| [3, 1, 1],
        )
    };

    #[test]
    fn stage_clocks_measure_the_cycles_that_each_block_spins() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let (view, loaded) = device.view_recording_kernels();
        STAGED_SPIN_KERNEL.compile_and_load(&view, &()).unwrap().launch_with(&[]).unwrap();
        let plain = loaded.kernels_with_stages();
        assert_eq!(plain.len(), 1);
        assert_eq!(
            plain[0].read_stage_cycles_by_block(),
            Ok(Vec::new()),
            "no clocks were asked for"
        );

        let (clocked, loaded) = device.view_with_stage_clocks().view_recording_kernels();
        let kernel = STAGED_SPIN_KERNEL.compile_and_load(&clocked, &()).unwrap();
        STAGED_SPIN_KERNEL.compile_and_load(&clocked, &()).unwrap();
        let staged = loaded.kernels_with_stages();
        assert_eq!(staged.len(), 1, "one build is recorded once");
        for launches in [1, 2] {
            staged[0].clear_stage_counters().unwrap();
            (0..launches).for_each(|_| kernel.launch_with(&[]).unwrap());
            let cycles = staged[0].read_stage_cycles_by_block().unwrap();
            assert_eq!(cycles.len(), 3, "blocks");
            for (block, cycles) in cycles.iter().enumerate() {
                let spun = [10_000, 30_000 * (block as u64 + 1), 0].map(|cycles| launches * cycles);
                for (&found, spun) in cycles.iter().zip(spun) {
                    assert!(found >= spun && found <= spun * 5 / 4, "{cycles:?}");
                }
            }
        }
    }
}
