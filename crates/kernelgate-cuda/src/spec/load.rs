//! A row on a device.

use super::row::KernelSpec;
use crate::BackendError;
use crate::driver::argument::Argument;
use crate::driver::device::Device;
use crate::driver::kernel::{Kernel, LaunchAttributes, LaunchShape};
use crate::driver::prepared::{LaunchDims, Parameters, PreparedLaunch};

/// A loaded kernel with its launch shape.
pub struct LoadedKernel {
    kernel: Kernel,
    shape: LaunchShape,
    /// Whether its blocks wait for each other across the grid: launches are cooperative.
    co_resident: bool,
}

impl<P> KernelSpec<P> {
    /// Compiles it for `p` (or takes it from the cache), loads it, gives it its shared memory.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] where the GPU is not of an architecture that it runs on, has
    /// less shared memory than it needs, or does not hold all of its blocks at once where they
    /// have to be; others when a grid does not hold its blocks, or it does not compile or load.
    pub fn load(&self, device: &Device, p: &P) -> Result<LoadedKernel, BackendError> {
        let arch = &device.facts().arch;
        if let Some(unmet) = self.unmet_by(p, arch, device.shared_bytes_a_block()?) {
            let known = self.requires.met_by(arch);
            let told = if known { unmet } else { format!("{unmet}, this GPU is {arch}") };
            return Err(BackendError::Unsupported(told));
        }
        if self.cluster.is_some() && !device.clusters()? {
            return Err(BackendError::Unsupported(
                "needs clusters, which this GPU has not".to_owned(),
            ));
        }
        let shape = self.shape(p)?;
        let build = self.build(p);
        let kernel = device.kernel(&build, self.symbol)?;
        device.note_shape(&build.kernel_name(self.symbol), shape);
        if shape.shared_bytes > 0 {
            kernel.allow_shared(shape.shared_bytes)?;
        }
        if self.whole_shared {
            kernel.prefer_shared()?;
        }
        if self.co_resident {
            self.check_residency(device, &kernel, shape)?;
        }
        Ok(LoadedKernel { kernel, shape, co_resident: self.co_resident })
    }

    /// Whether the device holds all blocks at once where nothing else runs.
    fn check_residency(
        &self,
        device: &Device,
        kernel: &Kernel,
        shape: LaunchShape,
    ) -> Result<(), BackendError> {
        let (needed, held, what) = match self.cluster {
            Some(cluster) => {
                let needed = shape.blocks().div_ceil(cluster as u64);
                (
                    needed,
                    kernel.clusters_at_once(shape, cluster as u32)?,
                    format!("clusters of {cluster} blocks"),
                )
            }
            None => {
                let multiprocessors = device.facts().multiprocessors as usize;
                (
                    shape.blocks(),
                    multiprocessors * kernel.blocks_a_multiprocessor(shape)?,
                    "blocks".to_owned(),
                )
            }
        };
        if held as u64 >= needed {
            return Ok(());
        }
        Err(BackendError::Unsupported(format!(
            "its {needed} {what} have to run at once, this GPU runs {held}"
        )))
    }
}

impl LoadedKernel {
    /// Launches it on the device's stream, as [`Kernel::launch`].
    ///
    /// # Errors
    /// As there.
    pub fn launch(&self, arguments: &[Argument]) -> Result<(), BackendError> {
        self.launch_with(LaunchAttributes::default(), arguments)
    }

    /// The same, with other attributes.
    ///
    /// # Errors
    /// As [`Kernel::launch_with`].
    pub fn launch_with(
        &self,
        attributes: LaunchAttributes,
        arguments: &[Argument],
    ) -> Result<(), BackendError> {
        let cooperative = attributes.cooperative || self.co_resident;
        let attributes = LaunchAttributes { cooperative, ..attributes };
        self.kernel.launch_with(attributes, self.shape, arguments)
    }

    /// Settles a launch with parameters of any kind by value, tensor maps among them. Where the
    /// device decides how many blocks there are, so many in x.
    ///
    /// # Errors
    /// As [`PreparedLaunch::new`].
    pub fn settled(
        self,
        device: &Device,
        blocks: Option<u32>,
        parameters: Parameters,
    ) -> Result<PreparedLaunch, BackendError> {
        let LaunchShape { grid: (x, y, z), block, shared_bytes } = self.shape;
        let grid = [blocks.unwrap_or(x), y, z];
        let dims = LaunchDims {
            shared_bytes,
            cooperative: self.co_resident,
            ..LaunchDims::new(grid, [block, 1, 1])
        };
        PreparedLaunch::new(device, self.kernel, dims, parameters)
    }

    /// The kernel, for launches of other shapes ([`KernelSpec::shape`]).
    pub const fn kernel(&self) -> &Kernel {
        &self.kernel
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Source;
    use crate::testing::gpu;

    #[test]
    fn blocks_that_wait_for_each_other_are_launched_together_or_not_at_all() {
        let Some((device, _alone)) = gpu() else { return };
        let source = r#"extern "C" __global__ void nothing() {}"#;
        let build = Source::new("nothing", source).build(&[]);
        let launch = |blocks, co_resident| {
            let kernel = device.kernel(&build, "nothing").unwrap();
            let shape = LaunchShape::new([blocks, 1, 1], 32, 0).unwrap();
            LoadedKernel { kernel, shape, co_resident }.launch(&[])
        };
        assert_eq!(launch(1 << 20, false), Ok(()));
        assert_eq!(launch(1, true), Ok(()));
        let refused = launch(1 << 20, true).unwrap_err().to_string();
        assert!(refused.contains("launch nothing"), "{refused}");
        device.synchronize().unwrap();
    }
}
