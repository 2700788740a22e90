//! Grid, block, cluster and shared memory of a launch, and what a GPU has for them.

use cudarc::driver::{CudaStream, sys};

/// How a kernel is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchDims {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
    /// Dynamic shared memory a block, bytes.
    pub shared_bytes: u32,
    /// Blocks of a cluster in x, y, z, where the launch says so and not `__cluster_dims__`.
    pub cluster: Option<[u32; 3]>,
    /// Whether its blocks wait for each other (`cooperative_groups`), so that all of them have to
    /// be resident at once.
    pub cooperative: bool,
    /// Whether its blocks may start while the kernel before it on the stream still runs
    /// (programmatic dependent launch).
    pub programmatic: bool,
}

/// Most threads of a block, and of a block in x, y, z: the same for every architecture.
const MAX_THREADS: u64 = 1024;
const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];
/// Most blocks of a grid in x, y, z: the same for every architecture.
pub(crate) const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// What a GPU has for a block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offered {
    /// Shared memory, bytes.
    pub shared_bytes: u32,
    /// Whether there are clusters.
    pub clusters: bool,
}

impl LaunchDims {
    /// So many blocks of so many threads, and nothing special.
    pub const fn new(grid: [u32; 3], block: [u32; 3]) -> Self {
        Self {
            grid,
            block,
            shared_bytes: 0,
            cluster: None,
            cooperative: false,
            programmatic: false,
        }
    }

    /// Whether a launch can have them.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Self { grid, block, cluster, .. } = *self;
        for (what, given, most) in [("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)] {
            if given.iter().zip(most).any(|(&given, most)| given == 0 || given > most) {
                return Err(format!("a {what} of {given:?}: each is 1 to {most:?}"));
            }
        }
        if count(block) > MAX_THREADS {
            return Err(format!("a block of {block:?}: it has at most {MAX_THREADS} threads"));
        }
        if let Some(cluster) = cluster
            && grid.iter().zip(cluster).any(|(&grid, of)| of == 0 || grid % of != 0)
        {
            return Err(format!("clusters of {cluster:?} do not divide a grid of {grid:?}"));
        }
        Ok(())
    }

    /// The driver's form of a launch on a stream, with these attributes.
    pub(crate) fn config(
        &self,
        stream: &CudaStream,
        attributes: &mut [sys::CUlaunchAttribute],
    ) -> sys::CUlaunchConfig {
        let Self { grid, block, shared_bytes, .. } = *self;
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

    /// What keeps a GPU from running a kernel with so much shared memory of its own and such
    /// clusters: a fragment.
    pub(crate) fn unmet(
        &self,
        static_shared: u32,
        cluster: Option<[u32; 3]>,
        has: Offered,
    ) -> Option<String> {
        if cluster.is_some() && !has.clusters {
            return Some("needs clusters, which this GPU has not".to_owned());
        }
        let needed = u64::from(static_shared) + u64::from(self.shared_bytes);
        (needed > u64::from(has.shared_bytes)).then(|| {
            let has = has.shared_bytes;
            format!("needs {needed} bytes of shared memory a block, this GPU has {has}")
        })
    }
}

/// Blocks, or threads, of three extents.
pub(crate) fn count(extents: [u32; 3]) -> u64 {
    extents.into_iter().map(u64::from).product()
}
