//! Access of the GPUs of a set to each other's memory (peer access). This module has neither copies
//! nor kernels that use the peer access.

use cudarc::driver::sys::{
    self, CUdevice_P2PAttribute_enum as Attribute, CUmemAccess_flags_enum as Access,
};
use cudarc::driver::{DriverError, result};
use serde::{Deserialize, Serialize};

use super::device::{Device, GpuUnusableError};
use super::driver_error::driver_error_text;
use crate::BackendError;

/// How the GPUs of a set reach each other's memory: the weakest link of all pairs of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerLink {
    /// The GPUs can exchange data only through host memory.
    #[serde(rename = "host")]
    ThroughHostMemory,
    /// Kernels can load and store in the other GPU's memory, without atomic operations, as over
    /// PCIe.
    #[serde(rename = "peer")]
    PeerWithoutAtomics,
    /// Kernels can load, store and use atomic operations in the other GPU's memory, as over NVLink.
    #[serde(rename = "peer_atomic")]
    PeerWithAtomics,
}

impl PeerLink {
    /// The weakest link between any two GPUs of the set; `None` for a single GPU.
    pub(super) fn weakest_link_between(devices: &[&Device]) -> Option<PeerLink> {
        let between = |one: &Device, other: &Device| {
            if !pair_has_p2p_attribute(
                one,
                other,
                Attribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED,
            ) {
                return Self::ThroughHostMemory;
            }
            match pair_has_p2p_attribute(
                one,
                other,
                Attribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
            ) {
                true => Self::PeerWithAtomics,
                false => Self::PeerWithoutAtomics,
            }
        };
        ordered_pairs_of_gpus(devices).into_iter().map(|(one, other)| between(one, other)).min()
    }

    pub(super) fn require_access_to_peer_memory(self) -> Result<(), BackendError> {
        match self {
            Self::PeerWithoutAtomics | Self::PeerWithAtomics => Ok(()),
            Self::ThroughHostMemory => {
                let why = "needs GPUs that can access each other's memory (NVLink, or PCIe with \
                           peer access): `nvidia-smi topo -p2p r` shows which can";
                Err(BackendError::Unsupported(why.to_owned()))
            }
        }
    }

    /// Name of the kind of link in messages and records: "host", "peer" or "peer_atomic".
    pub const fn name_in_records(self) -> &'static str {
        match self {
            Self::ThroughHostMemory => "host",
            Self::PeerWithoutAtomics => "peer",
            Self::PeerWithAtomics => "peer_atomic",
        }
    }
}

/// All ordered pairs of two different GPUs.
fn ordered_pairs_of_gpus<'a>(devices: &[&'a Device]) -> Vec<(&'a Device, &'a Device)> {
    let mut pairs = Vec::new();
    for &one in devices {
        let ordinal = one.gpu_properties().gpu_ordinal;
        let others = devices.iter().filter(|other| other.gpu_properties().gpu_ordinal != ordinal);
        pairs.extend(others.map(|&other| (one, other)));
    }
    pairs
}

/// Whether an ordered pair of GPUs has this peer-to-peer attribute; false if the driver does not
/// know the attribute.
fn pair_has_p2p_attribute(one: &Device, other: &Device, attribute: Attribute) -> bool {
    let mut value = 0;
    let (one, other) = (one.context().cu_device(), other.context().cu_device());
    // SAFETY: both device handles came from the driver, and the pointer is valid.
    let status = unsafe { sys::cuDeviceGetP2PAttribute(&raw mut value, attribute, one, other) };
    status.result().is_ok() && value != 0
}

/// Lets every GPU access the memory of every other GPU if the hardware can: direct allocations and
/// memory pools. Enables access between all ordered pairs of GPUs, and at the end makes the context
/// of the first GPU current.
///
/// # Errors
/// Fails if the driver refuses peer access that it reports as possible.
pub(super) fn enable_access_between_all_gpus(devices: &[&Device]) -> Result<(), GpuUnusableError> {
    let failed = |error: DriverError| GpuUnusableError::DriverCallFailed {
        failed_action: "give GPUs access to each other's memory",
        driver_error_text: driver_error_text(&error),
    };
    for (one, other) in ordered_pairs_of_gpus(devices) {
        if !pair_has_p2p_attribute(one, other, Attribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)
        {
            continue;
        }
        one.context().bind_to_thread().map_err(failed)?;
        // SAFETY: the context of `one` is current, and the context of `other` lives as long as its
        // device.
        match unsafe { sys::cuCtxEnablePeerAccess(other.context().cu_ctx(), 0) }.result() {
            Ok(()) | Err(DriverError(sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)) => {}
            Err(error) => return Err(failed(error)),
        }
        give_access_to_memory_pool(one, other).map_err(failed)?;
    }
    devices.first().map_or(Ok(()), |first| first.context().bind_to_thread().map_err(failed))
}

/// Gives GPU `one` access to the memory pool of GPU `other`, if `other` has a pool.
fn give_access_to_memory_pool(one: &Device, other: &Device) -> Result<(), DriverError> {
    // SAFETY: the device handle belongs to an open context.
    let Ok(pool) = (unsafe { result::device::get_mem_pool(other.context().cu_device()) }) else {
        return Ok(());
    };
    let access = sys::CUmemAccessDesc {
        location: sys::CUmemLocation {
            type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE,
            id: one.context().cu_device(),
        },
        flags: Access::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: the pool belongs to the device, and one access description is passed.
    unsafe { sys::cuMemPoolSetAccess(pool, &raw const access, 1) }.result()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_without_peer_access_skip_the_case_with_the_reason() {
        for link in [PeerLink::PeerWithoutAtomics, PeerLink::PeerWithAtomics] {
            assert!(link.require_access_to_peer_memory().is_ok());
        }
        let error = PeerLink::ThroughHostMemory.require_access_to_peer_memory().unwrap_err();
        assert!(matches!(&error, BackendError::Unsupported(why) if why.contains("NVLink")));
    }
}
