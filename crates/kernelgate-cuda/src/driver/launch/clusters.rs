//! Thread-block clusters of a kernel: their size, how many of them a GPU runs at the same time, and
//! the permission for large clusters. This module does not launch kernels (the module `kernel`
//! does).

use cudarc::driver::{DriverError, result, sys};

use super::attributes;
use super::kernel::Kernel;
use super::shape::{Launch, product_of_extents};
use crate::BackendError;
use crate::driver::driver_error::error_for_failed_action;

/// Largest cluster size in blocks that every GPU with clusters supports; larger clusters need an
/// attribute of the kernel.
pub(crate) const MAX_PORTABLE_CLUSTER_BLOCKS: u64 = 8;

impl Kernel {
    /// Number of clusters of this launch that an idle GPU runs at the same time; 0 if the GPU does
    /// not support clusters of this size. Every GPU with clusters supports clusters of up to eight
    /// blocks.
    ///
    /// # Errors
    /// Fails if the driver cannot run even one cluster of eight or fewer blocks.
    pub(crate) fn max_clusters_at_once(
        &self,
        launch: &Launch,
        cluster: [u32; 3],
    ) -> Result<usize, BackendError> {
        let size = product_of_extents(cluster);
        let mut attribute = attributes::cluster_dimension_attribute(cluster);
        let config =
            launch.launch_config_for_driver(self.stream(), std::slice::from_mut(&mut attribute));
        let large = size > MAX_PORTABLE_CLUSTER_BLOCKS;
        let mut clusters = 0;
        // SAFETY: the launch configuration points to attributes that outlive the call; the kernel's
        // function belongs to a module that `self` keeps loaded.
        let counted = unsafe {
            sys::cuOccupancyMaxActiveClusters(
                &raw mut clusters,
                self.driver_function(),
                &raw const config,
            )
        };
        use sys::CUresult::{CUDA_ERROR_INVALID_CLUSTER_SIZE, CUDA_ERROR_INVALID_VALUE};
        match counted.result() {
            // For clusters of more than eight blocks, these driver errors mean that the GPU does
            // not support clusters of this size.
            Err(DriverError(CUDA_ERROR_INVALID_CLUSTER_SIZE | CUDA_ERROR_INVALID_VALUE))
                if large =>
            {
                Ok(0)
            }
            Err(error) => Err(error_for_failed_action(
                &format!("count the clusters of {}", self.kernel_name()),
                &error,
            )),
            Ok(()) if clusters <= 0 && !large => Err(BackendError::ComputationFailed(format!(
                "{}: not one cluster of {size} blocks of it runs: a block takes too many registers \
                 or threads",
                self.kernel_name()
            ))),
            Ok(()) => Ok(clusters.max(0) as usize),
        }
    }

    /// Cluster size in blocks in x, y and z with which the kernel was compiled
    /// (`__cluster_dims__`); `None` without this attribute.
    fn compiled_cluster_size(&self) -> Result<Option<[u32; 3]>, BackendError> {
        use sys::CUfunction_attribute_enum as Attribute;
        let cluster = [
            self.read_function_attribute(
                Attribute::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH,
                "cluster",
            )?,
            self.read_function_attribute(
                Attribute::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT,
                "cluster",
            )?,
            self.read_function_attribute(
                Attribute::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH,
                "cluster",
            )?,
        ];
        Ok((!cluster.contains(&0)).then_some(cluster))
    }

    /// Cluster size in blocks in x, y and z: the size in the launch, else the size with which the
    /// kernel was compiled. The caller must check that the GPU supports clusters.
    ///
    /// # Errors
    /// Fails if the kernel was compiled for clusters of another size than the launch states.
    pub(crate) fn cluster_size_of_launch(
        &self,
        said: Option<[u32; 3]>,
    ) -> Result<Option<[u32; 3]>, BackendError> {
        match (said, self.compiled_cluster_size()?) {
            (Some(said), Some(compiled)) if said != compiled => {
                Err(BackendError::ComputationFailed(format!(
                    "{}: it was compiled for clusters of {compiled:?} blocks (`__cluster_dims__`), \
                     and is launched in clusters of {said:?}",
                    self.kernel_name()
                )))
            }
            (said, compiled) => Ok(said.or(compiled)),
        }
    }

    /// Sets the kernel's attribute that allows clusters of more than eight blocks, which not every
    /// GPU with clusters supports.
    pub(crate) fn allow_clusters_above_eight_blocks(&self) -> Result<(), BackendError> {
        use sys::CUfunction_attribute_enum as attribute;
        const NON_PORTABLE_CLUSTER_ATTRIBUTE: attribute =
            attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
        // SAFETY: the kernel's function belongs to a module that `self` keeps loaded.
        unsafe {
            result::function::set_function_attribute(
                self.driver_function(),
                NON_PORTABLE_CLUSTER_ATTRIBUTE,
                1,
            )
        }
        .map_err(|error| {
            error_for_failed_action(
                &format!("allow large clusters of {}", self.kernel_name()),
                &error,
            )
        })
    }
}
