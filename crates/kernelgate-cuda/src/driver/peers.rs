//! Access of GPUs to each other's memory. This module has neither copies nor kernels that use peer
//! access.

use cudarc::driver::sys::{
    self, CUdevice_P2PAttribute_enum as Attribute, CUmemAccess_flags_enum as Access,
};
use cudarc::driver::{DriverError, result};
use serde::{Deserialize, Serialize};

use super::device::{Device, DeviceError};
use super::driver_error::describe;
use crate::BackendError;

/// How the GPUs of a set reach each other's memory: the weakest of all pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerLink {
    /// The GPUs exchange data only through the memory of the host.
    Host,
    /// Kernels can load and store in the peer's memory, without atomic operations: PCIe.
    Peer,
    /// Kernels can load, store and use atomic operations in the peer's memory: NVLink.
    PeerAtomic,
}

impl PeerLink {
    /// The weakest link between the GPUs of a set; `None` for one GPU.
    pub(super) fn weakest_between(devices: &[&Device]) -> Option<PeerLink> {
        let between = |one: &Device, other: &Device| {
            if !peer_attribute(one, other, Attribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED) {
                return Self::Host;
            }
            match peer_attribute(
                one,
                other,
                Attribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
            ) {
                true => Self::PeerAtomic,
                false => Self::Peer,
            }
        };
        ordered_pairs(devices).into_iter().map(|(one, other)| between(one, other)).min()
    }

    pub(super) fn require_peer_access(self) -> Result<(), BackendError> {
        match self {
            Self::Peer | Self::PeerAtomic => Ok(()),
            Self::Host => {
                let why = "needs GPUs that can access each other's memory (NVLink, or PCIe with \
                           peer access): `nvidia-smi topo -p2p r` shows which can";
                Err(BackendError::Unsupported(why.to_owned()))
            }
        }
    }

    /// Name of the link kind in messages and records.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Peer => "peer",
            Self::PeerAtomic => "peer_atomic",
        }
    }
}

/// Returns all ordered pairs of two different GPUs.
fn ordered_pairs<'a>(devices: &[&'a Device]) -> Vec<(&'a Device, &'a Device)> {
    let mut pairs = Vec::new();
    for &one in devices {
        let ordinal = one.facts().ordinal;
        let others = devices.iter().filter(|other| other.facts().ordinal != ordinal);
        pairs.extend(others.map(|&other| (one, other)));
    }
    pairs
}

/// Returns whether a pair of GPUs has a property; a driver that does not answer counts as no.
fn peer_attribute(one: &Device, other: &Device, attribute: Attribute) -> bool {
    let mut value = 0;
    let (one, other) = (one.context().cu_device(), other.context().cu_device());
    // SAFETY: the driver gave both devices, and the pointer is valid.
    let status = unsafe { sys::cuDeviceGetP2PAttribute(&raw mut value, attribute, one, other) };
    status.result().is_ok() && value != 0
}

/// Lets every GPU access the memory of every other one, as far as the hardware can: memory that is
/// allocated directly, and from the pools. Enables access between all pairs of GPUs, and makes the
/// context of the first GPU current.
///
/// # Errors
/// Fails if the driver refuses access although it reports it as possible.
pub(super) fn enable_peer_access(devices: &[&Device]) -> Result<(), DeviceError> {
    let failed = |error: DriverError| DeviceError::Driver {
        action: "give GPUs access to each other's memory",
        error: describe(&error),
    };
    for (one, other) in ordered_pairs(devices) {
        if !peer_attribute(one, other, Attribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED) {
            continue;
        }
        one.context().bind_to_thread().map_err(failed)?;
        // SAFETY: the context of `one` is current, and the context of `other` lives as long as its
        // device.
        match unsafe { sys::cuCtxEnablePeerAccess(other.context().cu_ctx(), 0) }.result() {
            Ok(()) | Err(DriverError(sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)) => {}
            Err(error) => return Err(failed(error)),
        }
        share_memory_pool(one, other).map_err(failed)?;
    }
    devices.first().map_or(Ok(()), |first| first.context().bind_to_thread().map_err(failed))
}

/// Gives device `one` access to the memory pool of device `other`, if `other` has a pool.
fn share_memory_pool(one: &Device, other: &Device) -> Result<(), DriverError> {
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
        for link in [PeerLink::Peer, PeerLink::PeerAtomic] {
            assert!(link.require_peer_access().is_ok());
        }
        let error = PeerLink::Host.require_peer_access().unwrap_err();
        assert!(matches!(&error, BackendError::Unsupported(why) if why.contains("NVLink")));
    }
}
