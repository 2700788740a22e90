//! Whether a GPU holds the blocks of a launch that have to be resident at once.

use super::attributes;
use super::clusters::MAX_PORTABLE_CLUSTER;
use super::dims::{LaunchDims, count};
use super::kernel::Kernel;
use crate::BackendError;
use crate::driver::device::Device;

/// Checks that the GPU runs a cluster of the kernel, where a launch has clusters, and all blocks at
/// once, where they wait for each other. `dims` names the cluster also where the kernel was compiled
/// for it.
///
/// # Errors
/// [`BackendError::Unsupported`] where it does not; when the driver refuses.
pub(crate) fn check(
    device: &Device,
    kernel: &Kernel,
    dims: &LaunchDims,
) -> Result<(), BackendError> {
    let blocks = count(dims.grid);
    let (needed, held, unit) = match dims.cluster {
        Some(cluster) => {
            let size = count(cluster);
            if size > MAX_PORTABLE_CLUSTER {
                kernel.allow_large_clusters()?;
            }
            let mut attribute = attributes::cluster(cluster);
            let config = dims.config(kernel.stream(), std::slice::from_mut(&mut attribute));
            let held = kernel.clusters_of(&config, size)? as u64;
            let needed = if dims.cooperative { blocks.div_ceil(size) } else { 1 };
            (needed, held, format!("clusters of {size} blocks"))
        }
        None if dims.cooperative => {
            let threads = count(dims.block) as u32;
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
        format!("its {needed} {unit} have to run at once, this GPU runs {held}")
    } else {
        format!("this GPU runs no {unit} of it")
    }))
}
