//! Clusters of blocks: how many a GPU runs at once, and what large ones need. This module does not
//! launch kernels (`kernel` does).

use cudarc::driver::{DriverError, result, sys};

use super::attributes;
use super::kernel::Kernel;
use super::shape::{Launch, product_of_extents};
use crate::BackendError;
use crate::driver::driver_error::failed;

/// Maximum cluster size, in blocks, that every GPU with clusters supports; larger clusters need
/// permission.
pub(crate) const MAX_PORTABLE_CLUSTER: u64 = 8;

impl Kernel {
    /// Returns how many clusters of a launch an idle GPU runs at once; 0 if it does not support
    /// clusters of that size. Every GPU with clusters supports up to eight blocks.
    ///
    /// # Errors
    /// Fails if the driver refuses a launch with clusters of eight blocks or fewer, or runs none.
    pub(crate) fn max_resident_clusters(
        &self,
        launch: &Launch,
        cluster: [u32; 3],
    ) -> Result<usize, BackendError> {
        let size = product_of_extents(cluster);
        let mut attribute = attributes::cluster_attribute(cluster);
        let config =
            launch.driver_launch_config(self.stream(), std::slice::from_mut(&mut attribute));
        let large = size > MAX_PORTABLE_CLUSTER;
        let mut clusters = 0;
        // SAFETY: the configuration points to attributes that outlive the call; the function
        // belongs to a module that `self` keeps loaded.
        let counted = unsafe {
            sys::cuOccupancyMaxActiveClusters(&raw mut clusters, self.function(), &raw const config)
        };
        use sys::CUresult::{CUDA_ERROR_INVALID_CLUSTER_SIZE, CUDA_ERROR_INVALID_VALUE};
        match counted.result() {
            // These driver errors mean that the clusters are too large.
            Err(DriverError(CUDA_ERROR_INVALID_CLUSTER_SIZE | CUDA_ERROR_INVALID_VALUE))
                if large =>
            {
                Ok(0)
            }
            Err(error) => Err(failed(&format!("count the clusters of {}", self.name()), &error)),
            Ok(()) if clusters <= 0 && !large => Err(BackendError::Launch(format!(
                "{}: not one cluster of {size} blocks of it runs: a block takes too many registers \
                 or threads",
                self.name()
            ))),
            Ok(()) => Ok(clusters.max(0) as usize),
        }
    }

    /// Blocks of a cluster in x, y, z if it was compiled for clusters (`__cluster_dims__`).
    fn compiled_cluster_shape(&self) -> Result<Option<[u32; 3]>, BackendError> {
        use sys::CUfunction_attribute_enum as Attribute;
        let cluster = [
            self.function_attribute(
                Attribute::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH,
                "cluster",
            )?,
            self.function_attribute(
                Attribute::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT,
                "cluster",
            )?,
            self.function_attribute(
                Attribute::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH,
                "cluster",
            )?,
        ];
        Ok((!cluster.contains(&0)).then_some(cluster))
    }

    /// Cluster size in blocks in x, y, z: the size that the launch sets, else the size that the
    /// kernel was compiled for. The caller checks that the GPU supports clusters.
    ///
    /// # Errors
    /// Fails if the kernel was compiled for clusters of another size.
    pub(crate) fn cluster_shape(
        &self,
        said: Option<[u32; 3]>,
    ) -> Result<Option<[u32; 3]>, BackendError> {
        match (said, self.compiled_cluster_shape()?) {
            (Some(said), Some(compiled)) if said != compiled => Err(BackendError::Launch(format!(
                "{}: it was compiled for clusters of {compiled:?} blocks (`__cluster_dims__`), \
                     and is launched in clusters of {said:?}",
                self.name()
            ))),
            (said, compiled) => Ok(said.or(compiled)),
        }
    }

    /// Allows clusters of more blocks than every GPU with clusters runs: more than eight.
    pub(crate) fn allow_large_clusters(&self) -> Result<(), BackendError> {
        use sys::CUfunction_attribute_enum as attribute;
        const NON_PORTABLE_CLUSTER_ATTRIBUTE: attribute =
            attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
        // SAFETY: the function belongs to a module that `self` keeps loaded.
        unsafe {
            result::function::set_function_attribute(
                self.function(),
                NON_PORTABLE_CLUSTER_ATTRIBUTE,
                1,
            )
        }
        .map_err(|error| failed(&format!("allow large clusters of {}", self.name()), &error))
    }
}
