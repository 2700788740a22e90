//! Checks whether a GPU can run a launch of a kernel, from any compiler.

use super::clusters::MAX_PORTABLE_CLUSTER;
use super::kernel::Kernel;
use super::shape::{BlockResourceUse, Launch, product_of_extents};
use crate::BackendError;
use crate::driver::device::Device;

impl Launch {
    /// Checks that a GPU can run this launch of a kernel, and allows the kernel the resources that
    /// it needs: shared memory and large clusters.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`] if the GPU has less shared memory per block, no
    /// clusters of that size, or room for fewer blocks than wait for each other; others when no
    /// launch can have these dimensions.
    pub(crate) fn check_launch(
        &self,
        device: &Device,
        kernel: &Kernel,
    ) -> Result<(), BackendError> {
        let offered = BlockResourceUse {
            shared_bytes: device.shared_bytes_a_block()?,
            clusters: device.supports_clusters()?,
        };
        let cluster =
            if offered.clusters { kernel.cluster_shape(self.cluster)? } else { self.cluster };
        let launch = Self { cluster, ..*self };
        launch
            .check()
            .map_err(|problem| BackendError::Launch(format!("{}: {problem}", kernel.name())))?;
        if let Some(unmet) = launch.unmet(kernel.static_shared_bytes()?, offered) {
            return Err(BackendError::Unsupported(unmet));
        }
        if self.shared_bytes > 0 {
            kernel.allow_dynamic_shared(self.shared_bytes)?;
        }
        launch.check_residency(device, kernel)
    }

    /// Checks that the GPU can run a cluster of the kernel, if it has clusters, and all blocks at
    /// once, if they wait for each other.
    fn check_residency(&self, device: &Device, kernel: &Kernel) -> Result<(), BackendError> {
        let (needed, held, unit) = match self.cluster {
            Some(cluster) => {
                let size = product_of_extents(cluster);
                if size > MAX_PORTABLE_CLUSTER {
                    kernel.allow_large_clusters()?;
                }
                let held = kernel.max_resident_clusters(self, cluster)? as u64;
                let needed = if self.cooperative { self.block_count().div_ceil(size) } else { 1 };
                (needed, held, format!("clusters of {size} blocks"))
            }
            None if self.cooperative => {
                let held = kernel.resident_blocks_per_multiprocessor(self)? as u64;
                let held = held * u64::from(device.facts().multiprocessors);
                (self.block_count(), held, "blocks".to_owned())
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
