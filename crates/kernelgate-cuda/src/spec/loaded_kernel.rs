//! A kernel's specification, loaded on a device.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::kernel_spec::KernelSpec;
use crate::BackendError;
use crate::driver::device::Device;
use crate::driver::launch::argument::{Arguments, KernelArgument};
use crate::driver::launch::kernel::Kernel;
use crate::driver::launch::prepared::PreparedLaunch;
use crate::driver::launch::shape::Launch;
use crate::driver::launch::stage_times::StageClockedKernel;

/// A loaded kernel with its launch, which is cooperative where its blocks wait for each other.
pub struct LoadedKernel {
    kernel: Kernel,
    launch: Launch,
}

impl<P> KernelSpec<P> {
    /// Compiles the kernel for `p` (or takes it from the cache), loads it, and gives it its shared
    /// memory.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`] if the GPU's architecture does not suit it, if the
    /// GPU has too little shared memory, or if it cannot hold all blocks at once although they must
    /// be co-resident; other errors when a grid cannot hold its blocks, or the kernel does not
    /// compile or load.
    pub fn compile_and_load(&self, device: &Device, p: &P) -> Result<LoadedKernel, BackendError> {
        let arch = &device.facts().arch;
        if let Some(unmet) = self.unmet_requirement_for(p, arch, device.shared_bytes_a_block()?) {
            let arch_fits = self.requires.is_met_by(arch);
            let reason = if arch_fits { unmet } else { format!("{unmet}, this GPU is {arch}") };
            return Err(BackendError::Unsupported(reason));
        }
        let shape = self.launch_for(p)?;
        let with_clocks = device.records_stage_clocks() && !self.stages.is_empty();
        let build = match with_clocks {
            true => self.build_with_stage_clocks(p, shape.block_count()),
            false => self.build_for_parameters(p),
        };
        let kernel = device.kernel(&build, self.symbol)?;
        let counters = with_clocks.then(|| device.stage_counters_of(&build)).transpose()?;
        let staged = (!self.stages.is_empty())
            .then(|| StageClockedKernel::new(self.symbol, self.stages, counters));
        device.record_used_kernel(&build.kernel_name(self.symbol), shape, staged);
        if self.whole_shared {
            kernel.prefer_shared_memory()?;
        }
        let launch = Launch { cooperative: self.co_resident, ..shape };
        let cluster = self.cluster.map(|blocks| [blocks as u32, 1, 1]);
        Launch { cluster, ..launch }.check_launch(device, &kernel)?;
        Ok(LoadedKernel { kernel, launch })
    }
}

impl LoadedKernel {
    /// A handle of the kernel that launches on another stream.
    pub fn on_stream(&self, stream: &Arc<CudaStream>) -> Self {
        Self { kernel: self.kernel.on_stream(stream), launch: self.launch }
    }

    /// Launches the kernel on the device's stream, as [`Kernel::launch`].
    ///
    /// # Errors
    /// Fails if the arguments are not the kernel's, or the launch is refused.
    pub fn launch_with(&self, arguments: &[KernelArgument]) -> Result<(), BackendError> {
        self.kernel.launch(self.launch, arguments)
    }

    /// Prepares a launch. If the device decides the number of blocks, `blocks` is the number of
    /// blocks in x.
    pub fn prepare_launch(
        self,
        device: &Device,
        blocks: Option<u32>,
        arguments: Arguments,
    ) -> Result<PreparedLaunch, BackendError> {
        let mut launch = self.launch;
        launch.grid[0] = blocks.unwrap_or(launch.grid[0]);
        PreparedLaunch::new(device, self.kernel, launch, arguments)
    }

    /// The loaded kernel, for launches of other shapes ([`KernelSpec::launch_for`]).
    pub const fn loaded_kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Returns the grid, block and shared memory that the specification gives the kernel.
    pub const fn launch_shape(&self) -> Launch {
        self.launch
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::lock_first_gpu;
    use crate::{RequiredArchitecture, Source};

    #[test]
    fn cooperative_blocks_are_launched_together_or_refused() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let source = r#"extern "C" __global__ void nothing() {}"#;
        let build = Source::new("nothing", source).build(&[]);
        let launch = |blocks, co_resident| {
            let kernel = device.kernel(&build, "nothing").unwrap();
            let launch =
                Launch { cooperative: co_resident, ..Launch::new([blocks, 1, 1], [32, 1, 1]) };
            LoadedKernel { kernel, launch }.launch_with(&[])
        };
        assert_eq!(launch(1 << 20, false), Ok(()));
        assert_eq!(launch(1, true), Ok(()));
        let refused = launch(1 << 20, true).unwrap_err().to_string();
        assert!(refused.contains("launch nothing"), "{refused}");
        device.synchronize().unwrap();
    }

    const LARGE_CLUSTER_KERNEL: KernelSpec<()> = KernelSpec {
        requires: RequiredArchitecture::Exactly("sm_90a"),
        cluster: Some(16),
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
    fn a_row_with_clusters_of_sixteen_blocks_is_launched_on_hopper() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let kernel = match LARGE_CLUSTER_KERNEL.compile_and_load(&device, &()) {
            Err(BackendError::Unsupported(reason)) => return eprintln!("skipped: {reason}"),
            kernel => kernel.unwrap(),
        };
        let out = device.allocate(4 * 32).unwrap();
        kernel.launch_with(&[KernelArgument::from(&out)]).unwrap();
        let mut blocks = vec![0; out.bytes()];
        out.download(&mut blocks).unwrap();
        assert!(blocks.chunks(4).all(|word| word == [16, 0, 0, 0]), "{blocks:?}");
    }

    const STAGED_SPIN_KERNEL: KernelSpec<()> = KernelSpec {
        stages: &["short", "long", "never"],
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
    stages_begin();
    for (int i = 0; i < 10; ++i) {
        spin(1000);
        stage_ends(0);
        spin(3000 * (blockIdx.x + 1));
        stage_ends(1);
    }
    stages_finish();
}"#,
            ),
            "spin_stages",
            64,
            |()| [3, 1, 1],
        )
    };

    #[test]
    fn stage_clocks_measure_the_time_that_blocks_spin() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let (view, loaded) = device.recording_view();
        STAGED_SPIN_KERNEL.compile_and_load(&view, &()).unwrap().launch_with(&[]).unwrap();
        let plain = loaded.stage_clocked_kernels();
        assert_eq!(plain.len(), 1);
        assert_eq!(plain[0].stage_cycles(), Ok(Vec::new()), "no clocks were asked for");

        let (clocked, loaded) = device.with_stage_clocks().recording_view();
        let kernel = STAGED_SPIN_KERNEL.compile_and_load(&clocked, &()).unwrap();
        STAGED_SPIN_KERNEL.compile_and_load(&clocked, &()).unwrap();
        let staged = loaded.stage_clocked_kernels();
        assert_eq!(staged.len(), 1, "one build is recorded once");
        for launches in [1, 2] {
            staged[0].clear_counters().unwrap();
            (0..launches).for_each(|_| kernel.launch_with(&[]).unwrap());
            let cycles = staged[0].stage_cycles().unwrap();
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
