//! Checks whether a GPU can run a launch of a kernel that was compiled by NVRTC or by any other
//! compiler.

use super::clusters::MAX_PORTABLE_CLUSTER_BLOCKS;
use super::kernel::Kernel;
use super::shape::{BlockResourcesOfGpu, Launch, product_of_extents};
use crate::BackendError;
use crate::driver::device::Device;

impl Launch {
    /// Checks that a GPU can run this launch of a kernel, and sets the kernel's attributes that
    /// allow its dynamic shared memory and large clusters.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`] if this GPU lacks shared memory, clusters of this
    /// size, or room for all blocks of a cooperative launch; with another error if no GPU allows
    /// the dimensions.
    pub(crate) fn check_on_device_and_allow_resources(
        &self,
        device: &Device,
        kernel: &Kernel,
    ) -> Result<(), BackendError> {
        let offered = BlockResourcesOfGpu {
            max_shared_bytes_per_block: device.max_shared_bytes_per_block()?,
            supports_clusters: device.supports_thread_block_clusters()?,
        };
        let cluster = if offered.supports_clusters {
            kernel.cluster_size_of_launch(self.cluster)?
        } else {
            self.cluster
        };
        let launch = Self { cluster, ..*self };
        launch.check_dimensions().map_err(|problem| {
            BackendError::ComputationFailed(format!("{}: {problem}", kernel.kernel_name()))
        })?;
        if let Some(unmet) =
            launch.unmet_resource_need(kernel.static_shared_bytes_per_block()?, offered)
        {
            return Err(BackendError::Unsupported(unmet));
        }
        if self.dynamic_shared_bytes > 0 {
            kernel.allow_dynamic_shared_memory(self.dynamic_shared_bytes)?;
        }
        launch.check_resident_blocks_and_clusters(device, kernel)
    }

    /// Checks that the GPU can run at least one cluster of the kernel, and all blocks at the same
    /// time if the launch is cooperative.
    fn check_resident_blocks_and_clusters(
        &self,
        device: &Device,
        kernel: &Kernel,
    ) -> Result<(), BackendError> {
        let (needed, held, unit) = match self.cluster {
            Some(cluster) => {
                let size = product_of_extents(cluster);
                if size > MAX_PORTABLE_CLUSTER_BLOCKS {
                    kernel.allow_clusters_above_eight_blocks()?;
                }
                let held = kernel.max_clusters_at_once(self, cluster)? as u64;
                let needed =
                    if self.cooperative { self.blocks_in_grid().div_ceil(size) } else { 1 };
                (needed, held, format!("clusters of {size} blocks"))
            }
            None if self.cooperative => {
                let held = kernel.max_resident_blocks_per_multiprocessor(self)? as u64;
                let held = held * u64::from(device.gpu_properties().multiprocessor_count);
                (self.blocks_in_grid(), held, "blocks".to_owned())
            }
            None => return Ok(()),
        };
        if needed <= held {
            return Ok(());
        }
        Err(BackendError::Unsupported(if self.cooperative {
            format!("its {needed} {unit} have to run at once, this GPU runs {held}")
        } else {
            format!("this GPU runs no {unit} of it")
        }))
    }
}
