//! Launches that are settled before anything is timed: dimensions, attributes and parameters, of
//! any number and size.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::clusters::{MAX_PORTABLE_CLUSTER, cluster_attribute};
use super::device::Device;
use super::kernel::Kernel;
use super::status::failed;
use crate::BackendError;

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
/// Most blocks in x, y, z.
const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// What a GPU has for a block.
#[derive(Debug, Clone, Copy)]
struct Offered {
    /// Shared memory, bytes.
    shared_bytes: u32,
    /// Whether there are clusters.
    clusters: bool,
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

    fn count(of: [u32; 3]) -> u64 {
        of.into_iter().map(u64::from).product()
    }

    /// Whether a launch can have them.
    fn check(&self) -> Result<(), String> {
        let Self { grid, block, cluster, .. } = *self;
        for (what, given, most) in [("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)] {
            if given.iter().zip(most).any(|(&given, most)| given == 0 || given > most) {
                return Err(format!("a {what} of {given:?}: each is 1 to {most:?}"));
            }
        }
        if Self::count(block) > MAX_THREADS {
            return Err(format!("a block of {block:?}: it has at most {MAX_THREADS} threads"));
        }
        if let Some(cluster) = cluster
            && grid.iter().zip(cluster).any(|(&grid, of)| of == 0 || grid % of != 0)
        {
            return Err(format!("clusters of {cluster:?} do not divide a grid of {grid:?}"));
        }
        Ok(())
    }
}

impl LaunchDims {
    /// What keeps a GPU from running a kernel with so much shared memory of its own and such
    /// clusters: a fragment.
    fn unmet(&self, static_shared: u32, cluster: Option<[u32; 3]>, has: Offered) -> Option<String> {
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

/// Bytes as aligned as any parameter asks for: a tensor map (`CUtensorMap`) for 64.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Aligned([u8; 64]);

/// Parameters of a kernel by value, in order.
#[derive(Clone, Default)]
pub struct Parameters {
    /// Of each its bytes, and how many.
    each: Vec<(Vec<Aligned>, usize)>,
}

impl Parameters {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an address on the device.
    pub fn address(self, address: u64) -> Self {
        self.bytes(&address.to_ne_bytes())
    }

    /// Adds a number, or a struct without padding.
    pub fn value<T: bytemuck::NoUninit>(self, value: T) -> Self {
        self.bytes(bytemuck::bytes_of(&value))
    }

    /// Adds a struct by its bytes, such as a tensor map that the driver encoded.
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        let mut stored = vec![Aligned([0; 64]); bytes.len().div_ceil(64).max(1)];
        for (chunk, from) in stored.iter_mut().zip(bytes.chunks(64)) {
            chunk.0[..from.len()].copy_from_slice(from);
        }
        self.each.push((stored, bytes.len()));
        self
    }

    /// Bytes of each.
    pub fn sizes(&self) -> Vec<usize> {
        self.each.iter().map(|(_, bytes)| *bytes).collect()
    }

    /// Whether there is one of the right size for each parameter of a kernel.
    fn check(&self, expected: &[usize]) -> Result<(), String> {
        if self.each.len() != expected.len() {
            let (given, takes) = (self.each.len(), expected.len());
            return Err(format!("takes {takes} arguments, {given} were given"));
        }
        let pairs = self.each.iter().map(|(_, bytes)| *bytes).zip(expected);
        match pairs.enumerate().find(|(_, (given, bytes))| given != *bytes) {
            Some((index, (given, bytes))) => {
                Err(format!("argument {index} has {given} bytes, the parameter {bytes}"))
            }
            None => Ok(()),
        }
    }
}

/// A launch of which everything is settled.
pub struct PreparedLaunch {
    kernel: Kernel,
    dims: LaunchDims,
    parameters: Parameters,
}

impl PreparedLaunch {
    /// Settles a launch of a kernel on its stream.
    ///
    /// # Errors
    /// When the dimensions are none that a launch can have, or the parameters are not the kernel's;
    /// [`BackendError::Unsupported`] where the GPU has less shared memory a block, no clusters or
    /// none as large, or holds fewer blocks at once than wait for each other.
    pub fn new(
        device: &Device,
        kernel: Kernel,
        dims: LaunchDims,
        parameters: Parameters,
    ) -> Result<Self, BackendError> {
        let of_kernel =
            |problem: String| BackendError::Launch(format!("{}: {problem}", kernel.name()));
        parameters.check(kernel.parameter_bytes()).map_err(of_kernel)?;
        let has =
            Offered { shared_bytes: device.shared_bytes_a_block()?, clusters: device.clusters()? };
        let cluster = if has.clusters { kernel.cluster(dims.cluster)? } else { dims.cluster };
        LaunchDims { cluster, ..dims }.check().map_err(of_kernel)?;
        if let Some(unmet) = dims.unmet(kernel.static_shared_bytes()?, cluster, has) {
            return Err(BackendError::Unsupported(unmet));
        }
        if dims.shared_bytes > 0 {
            kernel.allow_shared(dims.shared_bytes)?;
        }
        let launch = Self { kernel, dims, parameters };
        launch.check_residency(device, cluster)?;
        Ok(launch)
    }

    /// Whether the GPU runs a cluster of it at all, and all of its blocks at once where they wait
    /// for each other.
    fn check_residency(
        &self,
        device: &Device,
        cluster: Option<[u32; 3]>,
    ) -> Result<(), BackendError> {
        let Self { kernel, dims, .. } = self;
        let blocks = LaunchDims::count(dims.grid);
        let (needed, held, what) = match cluster {
            Some(cluster) => {
                let size = LaunchDims::count(cluster);
                if size > MAX_PORTABLE_CLUSTER {
                    kernel.allow_large_clusters()?;
                }
                let mut attribute = cluster_attribute(cluster);
                let config = self.config(std::slice::from_mut(&mut attribute));
                let held = kernel.clusters_of(&config, size)? as u64;
                let needed = if dims.cooperative { blocks.div_ceil(size) } else { 1 };
                (needed, held, format!("clusters of {size} blocks"))
            }
            None if dims.cooperative => {
                let threads = LaunchDims::count(dims.block) as u32;
                let a_multiprocessor = kernel.blocks_held(threads, dims.shared_bytes)? as u64;
                let held = a_multiprocessor * u64::from(device.facts().multiprocessors);
                (blocks, held, "blocks".to_owned())
            }
            None => return Ok(()),
        };
        if needed <= held {
            return Ok(());
        }
        Err(BackendError::Unsupported(if dims.cooperative {
            format!("its {needed} {what} have to run at once, this GPU runs {held}")
        } else {
            format!("this GPU runs no {what} of it")
        }))
    }

    /// The launch, with these attributes.
    fn config(&self, attributes: &mut [sys::CUlaunchAttribute]) -> sys::CUlaunchConfig {
        let LaunchDims { grid, block, shared_bytes, .. } = self.dims;
        sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block[0],
            blockDimY: block[1],
            blockDimZ: block[2],
            sharedMemBytes: shared_bytes,
            hStream: self.kernel.stream().cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        }
    }

    /// Enqueues it; returns before it has run.
    ///
    /// # Errors
    /// When the driver refuses; the error names the kernel.
    pub fn launch(&self) -> Result<(), BackendError> {
        let LaunchDims { cluster, cooperative, programmatic, .. } = self.dims;
        self.kernel.note_launch();
        let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let cluster = cluster.map(cluster_attribute);
        let cooperative = cooperative.then(|| {
            let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
            attribute(id, sys::CUlaunchAttributeValue { cooperative: 1 })
        });
        let programmatic = programmatic.then(|| {
            let id =
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            let value = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
            attribute(id, value)
        });
        let mut attributes: Vec<_> =
            cluster.into_iter().chain(cooperative).chain(programmatic).collect();
        let config = self.config(&mut attributes);
        let mut pointers: Vec<*mut c_void> = self
            .parameters
            .each
            .iter()
            .map(|(stored, _)| stored.as_ptr().cast_mut().cast::<c_void>())
            .collect();
        // SAFETY: the pointers are to values that outlive the call, which copies them; there is one
        // of the right size for each parameter; what the kernel does with them happens on the
        // device. The attributes outlive the call too.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.kernel.function(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .map_err(|error| failed(&format!("launch {}", self.kernel.name()), &error))
    }
}

#[cfg(test)]
mod tests;
