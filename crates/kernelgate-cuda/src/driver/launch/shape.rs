//! Grid, block, cluster, shared memory and other attributes of a kernel launch. This module does
//! not decide whether a GPU can run the launch (the module `admission` does).

use cudarc::driver::{CudaStream, sys};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::attributes;
use crate::BackendError;
use crate::driver::memory::access_window::L2AccessPolicyWindow;

/// Grid, block, cluster, shared memory and other attributes of a kernel launch. JSON records of a
/// launch contain only the grid, the threads of a block in x, and the dynamic shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Launch {
    /// Number of blocks of the grid in x, y, z.
    pub grid: [u32; 3],
    /// Number of threads of a block in x, y, z.
    #[serde(
        serialize_with = "serialize_threads_in_x",
        deserialize_with = "deserialize_threads_in_x"
    )]
    pub block: [u32; 3],
    /// Dynamic shared memory of each block, bytes.
    #[serde(rename = "shared_bytes")]
    pub dynamic_shared_bytes: u32,
    /// Number of blocks of a cluster in x, y, z; `None` if the launch sets no cluster size.
    #[serde(skip)]
    pub cluster: Option<[u32; 3]>,
    /// Whether the launch is cooperative: its blocks wait for each other, so all of them must be
    /// resident at the same time. A cooperative launch starts only when the GPU has room for all
    /// its blocks.
    #[serde(skip)]
    pub cooperative: bool,
    /// Whether the launch's blocks may start while the previous kernel on the stream still runs
    /// (programmatic dependent launch).
    #[serde(skip)]
    pub programmatic_dependent_launch: bool,
    /// Range of device memory whose L2 cache lines get another priority during the launch.
    #[serde(skip)]
    pub window: Option<L2AccessPolicyWindow>,
}

/// Largest number of threads of a block, in total and in x, y, z; the same on every supported
/// architecture.
const MAX_THREADS_PER_BLOCK: u64 = 1024;
const MAX_BLOCK_DIMENSIONS: [u32; 3] = [1024, 1024, 64];
/// Largest number of blocks of a grid in x, y, z; the same on every supported architecture.
const MAX_GRID_DIMENSIONS: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// Resources that a GPU offers to a thread block of a launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockResourcesOfGpu {
    /// Shared memory, bytes.
    pub max_shared_bytes_per_block: u32,
    /// Whether the GPU supports thread-block clusters.
    pub supports_clusters: bool,
}

impl Launch {
    /// Makes a launch with this grid and block, without dynamic shared memory, clusters or other
    /// attributes.
    pub const fn new(grid: [u32; 3], block: [u32; 3]) -> Self {
        Self {
            grid,
            block,
            dynamic_shared_bytes: 0,
            cluster: None,
            cooperative: false,
            programmatic_dependent_launch: false,
            window: None,
        }
    }

    /// Makes a launch with a grid of these blocks in x, y and z, each of `threads` threads.
    ///
    /// # Errors
    /// Fails if CUDA allows no grid with so many blocks, or the number of blocks is zero.
    pub fn with_grid_of_blocks(blocks: [usize; 3], threads: u32) -> Result<Launch, BackendError> {
        if blocks.contains(&0) {
            return Err(BackendError::ComputationFailed("needs no block at all".to_owned()));
        }
        if blocks.iter().zip(MAX_GRID_DIMENSIONS).any(|(&blocks, most)| blocks > most as usize) {
            return Err(BackendError::ComputationFailed(
                "needs more blocks than a grid holds".to_owned(),
            ));
        }
        Ok(Self::new(blocks.map(|blocks| blocks as u32), [threads, 1, 1]))
    }

    /// Makes a launch with as many blocks of `threads` threads as `items` items need, with
    /// `per_thread` items for each thread.
    ///
    /// # Errors
    /// Fails if CUDA allows no grid with so many blocks, or the number of items is zero.
    pub fn for_number_of_items(
        items: usize,
        threads: u32,
        per_thread: usize,
    ) -> Result<Launch, BackendError> {
        Self::with_grid_of_blocks([items.div_ceil(threads as usize * per_thread), 1, 1], threads)
    }

    /// Number of blocks in the grid of the launch.
    pub fn blocks_in_grid(&self) -> u64 {
        product_of_extents(self.grid)
    }

    /// Checks that grid, block and cluster have sizes that CUDA allows on any GPU.
    pub(super) fn check_dimensions(&self) -> Result<(), String> {
        let Self { grid, block, cluster, .. } = *self;
        for (what, given, most) in
            [("grid", grid, MAX_GRID_DIMENSIONS), ("block", block, MAX_BLOCK_DIMENSIONS)]
        {
            if given.iter().zip(most).any(|(&given, most)| given == 0 || given > most) {
                return Err(format!("a {what} of {given:?}: each is 1 to {most:?}"));
            }
        }
        if product_of_extents(block) > MAX_THREADS_PER_BLOCK {
            return Err(format!(
                "a block of {block:?}: it has at most {MAX_THREADS_PER_BLOCK} threads"
            ));
        }
        if let Some(cluster) = cluster
            && grid.iter().zip(cluster).any(|(&grid, of)| of == 0 || grid % of != 0)
        {
            return Err(format!("clusters of {cluster:?} do not divide a grid of {grid:?}"));
        }
        Ok(())
    }

    /// The reason why a GPU cannot run this launch of a kernel with this static shared memory, as a
    /// phrase; `None` if it can.
    pub(super) fn unmet_resource_need(
        &self,
        static_shared: u32,
        offered: BlockResourcesOfGpu,
    ) -> Option<String> {
        if self.cluster.is_some() && !offered.supports_clusters {
            return Some("needs clusters, which this GPU has not".to_owned());
        }
        let needed = u64::from(static_shared) + u64::from(self.dynamic_shared_bytes);
        let has = offered.max_shared_bytes_per_block;
        (needed > u64::from(has))
            .then(|| format!("needs {needed} bytes of shared memory a block, this GPU has {has}"))
    }

    /// The attributes of the launch as structs of the driver API.
    pub(crate) fn launch_attributes_for_driver(&self) -> Vec<sys::CUlaunchAttribute> {
        let cluster = self.cluster.map(attributes::cluster_dimension_attribute);
        let cooperative = self.cooperative.then(attributes::cooperative_launch_attribute);
        let programmatic = self
            .programmatic_dependent_launch
            .then(attributes::programmatic_dependent_launch_attribute);
        let window = self.window.map(L2AccessPolicyWindow::as_launch_attribute);
        cluster.into_iter().chain(cooperative).chain(programmatic).chain(window).collect()
    }

    /// The launch on a stream, with these attributes, as a struct of the driver API.
    pub(crate) fn launch_config_for_driver(
        &self,
        stream: &CudaStream,
        attributes: &mut [sys::CUlaunchAttribute],
    ) -> sys::CUlaunchConfig {
        let Self { grid, block, dynamic_shared_bytes: shared_bytes, .. } = *self;
        sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block[0],
            blockDimY: block[1],
            blockDimZ: block[2],
            sharedMemBytes: shared_bytes,
            hStream: stream.cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        }
    }
}

/// Product of the extents in x, y and z: a number of blocks or threads.
pub(crate) fn product_of_extents(extents: [u32; 3]) -> u64 {
    extents.into_iter().map(u64::from).product()
}

fn serialize_threads_in_x<S: Serializer>(
    block: &[u32; 3],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    block[0].serialize(serializer)
}

fn deserialize_threads_in_x<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<[u32; 3], D::Error> {
    Ok([u32::deserialize(deserializer)?, 1, 1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_beyond_the_limits_is_refused() {
        let shape =
            |blocks| Launch::with_grid_of_blocks(blocks, 64).map(|launch| launch.blocks_in_grid());
        assert_eq!(shape([3, 2, 1]), Ok(6));
        assert_eq!(shape([i32::MAX as usize, 1, 1]), Ok(i32::MAX as u64));
        for many in [[1 << 31, 1, 1], [1, 70_000, 1], [1, 1, 70_000], [1 << 40, 1, 1]] {
            assert_eq!(
                shape(many),
                Err(BackendError::ComputationFailed(
                    "needs more blocks than a grid holds".to_owned()
                ))
            );
        }
        assert_eq!(
            shape([0, 1, 1]),
            Err(BackendError::ComputationFailed("needs no block at all".to_owned()))
        );
        assert_eq!(Launch::for_number_of_items(1000, 64, 4).map(|shape| shape.grid), Ok([4, 1, 1]));
    }

    #[test]
    fn block_dimensions_beyond_the_limits_are_refused() {
        let check = |grid, block| Launch::new(grid, block).check_dimensions();
        assert_eq!(check([7, 65_535, 1], [8, 8, 16]), Ok(()));
        for (grid, block, words) in [
            ([0, 1, 1], [1, 1, 1], "a grid of [0, 1, 1]: each is 1 to [2147483647, 65535, 65535]"),
            (
                [1, 1, 70_000],
                [1, 1, 1],
                "a grid of [1, 1, 70000]: each is 1 to [2147483647, 65535, 65535]",
            ),
            ([1, 1, 1], [1, 1, 65], "a block of [1, 1, 65]: each is 1 to [1024, 1024, 64]"),
            ([1, 1, 1], [33, 32, 1], "a block of [33, 32, 1]: it has at most 1024 threads"),
        ] {
            assert_eq!(check(grid, block).unwrap_err(), words);
        }
        let clusters = |cluster| {
            Launch { cluster: Some(cluster), ..Launch::new([8, 6, 1], [32, 1, 1]) }
                .check_dimensions()
        };
        assert_eq!(clusters([4, 2, 1]), Ok(()));
        assert_eq!(
            clusters([3, 1, 1]).unwrap_err(),
            "clusters of [3, 1, 1] do not divide a grid of [8, 6, 1]"
        );
        assert!(clusters([0, 1, 1]).is_err());
    }

    #[test]
    fn resources_that_a_gpu_lacks_for_a_launch_are_named() {
        let launch = Launch { dynamic_shared_bytes: 90_000, ..Launch::new([16, 1, 1], [32, 1, 1]) };
        let ampere =
            BlockResourcesOfGpu { max_shared_bytes_per_block: 101_376, supports_clusters: false };
        assert_eq!(launch.unmet_resource_need(11_376, ampere), None);
        assert_eq!(
            launch.unmet_resource_need(11_377, ampere).unwrap(),
            "needs 101377 bytes of shared memory a block, this GPU has 101376"
        );
        let clustered = Launch { cluster: Some([2, 1, 1]), ..launch };
        assert!(clustered.unmet_resource_need(0, ampere).unwrap().contains("needs clusters"));
        assert_eq!(
            clustered
                .unmet_resource_need(0, BlockResourcesOfGpu { supports_clusters: true, ..ampere }),
            None
        );
    }
}
