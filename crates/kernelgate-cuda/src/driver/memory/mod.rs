//! Checks whether a case fits into device memory before it allocates any, and reads how much memory
//! is used.

pub mod access_window;
pub mod buffer;
pub mod mailbox;
pub mod persistence;
pub(crate) mod staged_copies;

use cudarc::driver::sys::{self, CUmemPool_attribute, CUmemPool_attribute_enum as PoolAttribute};
use cudarc::driver::{DriverError, result};

use super::device::Device;
use super::driver_error::failed;
use crate::BackendError;
use buffer::out_of_memory_error;

/// Memory of the device that a case leaves to the driver and to the harness' own buffers, bytes.
const RESERVED_DEVICE_BYTES: u64 = 512 << 20;

/// Checks that the given number of bytes of device memory can be allocated.
///
/// # Errors
/// Fails if the bytes do not fit into free memory, or the driver fails.
pub fn require_free_memory(device: &Device, bytes: u64) -> Result<(), BackendError> {
    let (free, total) = memory_after_launches(device)?;
    check_memory_fits(bytes, free, total)
}

/// Free and total device memory, bytes, once the launches have finished and freed memory has left
/// the driver's pool.
pub fn memory_after_launches(device: &Device) -> Result<(u64, u64), BackendError> {
    // The stream is waited for with a timeout first, because a hung kernel never finishes; then
    // through the driver, which registers freed memory only then.
    device.synchronize()?;
    device.stream().synchronize().map_err(|error| failed("wait for the GPU", &error))?;
    // SAFETY: the device of an open context; the pool releases only unused memory. A device without
    // memory pools keeps no freed memory.
    unsafe {
        if let Ok(pool) = result::device::get_mem_pool(device.context().cu_device()) {
            result::mem_pool::trim_to(pool, 0)
                .map_err(|error| failed("return freed memory", &error))?;
        }
    }
    device.free_and_total()
}

/// Memory of a GPU that is in use, bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceMemoryUsage {
    /// Allocated from the device's pool, as every [`DeviceBuffer`](crate::DeviceBuffer) is: the
    /// requested bytes, without the unused part of the pool's pieces of 32 MiB. 0 if there is no
    /// pool.
    pub pool: u64,
    /// Largest value of `pool` since [`reset_peak_usage`], bytes.
    pub pool_peak: u64,
    /// Device memory in use outside the pool, in pages of 2 MiB: other allocations, modules, memory
    /// of the context and of libraries, other processes.
    pub outside: u64,
}

/// Reads the current memory use, without waiting for enqueued work.
pub fn device_memory_usage(device: &Device) -> Result<DeviceMemoryUsage, BackendError> {
    let (free, total) = device.free_and_total()?;
    let of_pool = |attribute| {
        let bytes = memory_pool_attribute(device, attribute);
        bytes.map_err(|error| failed("query the memory of the pool", &error))
    };
    let pool = of_pool(PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
    let peak = of_pool(PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?;
    let reserved = of_pool(PoolAttribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
    let outside = total.saturating_sub(free).saturating_sub(reserved);
    Ok(DeviceMemoryUsage { pool, pool_peak: peak.max(pool), outside })
}

/// Reads an attribute of the device's memory pool; 0 if there is no pool.
fn memory_pool_attribute(
    device: &Device,
    attribute: CUmemPool_attribute,
) -> Result<u64, DriverError> {
    // SAFETY: the device handle belongs to an open context.
    let Ok(pool) = (unsafe { result::device::get_mem_pool(device.context().cu_device()) }) else {
        return Ok(0);
    };
    let mut bytes = 0u64;
    // SAFETY: the memory pool of a device lives as long as the device; these attributes are 64-bit
    // numbers, and the pointer is to a 64-bit number.
    unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast()) }.result()?;
    Ok(bytes)
}

/// Resets the maximum of memory use ([`DeviceMemoryUsage::pool_peak`]).
pub fn reset_peak_usage(device: &Device) -> Result<(), BackendError> {
    // SAFETY: the device of an open context.
    let Ok(pool) = (unsafe { result::device::get_mem_pool(device.context().cu_device()) }) else {
        return Ok(());
    };
    let (peak, mut zero) = (PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0u64);
    // SAFETY: as in `pool_attribute`; the peak may be set to zero, which begins it anew.
    unsafe { sys::cuMemPoolSetAttribute(pool, peak, (&raw mut zero).cast()) }
        .result()
        .map_err(|error| failed("begin anew with the memory of the pool", &error))
}

fn check_memory_fits(bytes: u64, free: u64, total: u64) -> Result<(), BackendError> {
    let available = free.min(total.saturating_sub(RESERVED_DEVICE_BYTES));
    if bytes <= available {
        return Ok(());
    }
    Err(out_of_memory_error(bytes, Some(available)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_use_and_peak_use_of_the_pool_are_reported() {
        let Some((device, _alone)) = crate::testing::lock_first_gpu() else { return };
        const MIB: u64 = 1 << 20;
        memory_after_launches(&device).unwrap();
        reset_peak_usage(&device).unwrap();
        let before = device_memory_usage(&device).unwrap();
        let kept = device.allocate((96 * MIB) as usize).unwrap();
        drop(device.allocate((64 * MIB) as usize).unwrap());
        memory_after_launches(&device).unwrap();
        let now = device_memory_usage(&device).unwrap();
        eprintln!("{before:?} {now:?}");
        // The driver rounds an allocation up to a multiple of about 512 bytes.
        let is_about = |bytes: u64, expected: u64| (expected..expected + MIB).contains(&bytes);
        assert!(is_about(now.pool - before.pool, 96 * MIB));
        assert!(is_about(now.pool_peak - before.pool, 160 * MIB));
        // Tests that are about to begin may open the device meanwhile.
        assert!(now.outside.abs_diff(before.outside) <= 32 * MIB);
        reset_peak_usage(&device).unwrap();
        assert_eq!(device_memory_usage(&device).unwrap().pool_peak, now.pool);
        drop(kept);
        memory_after_launches(&device).unwrap();
        assert_eq!(device_memory_usage(&device).unwrap().pool, before.pool);
    }

    #[test]
    fn an_allocation_that_does_not_fit_reports_both_sizes() {
        assert_eq!(check_memory_fits(1 << 30, 2 << 30, 80 << 30), Ok(()));
        let error = check_memory_fits(18_000_000_000, 2_000_000_000, 80_000_000_000).unwrap_err();
        assert_eq!(error.to_string(), "needs 18.00 GB on the GPU of memory, 2.00 GB are free");
        assert!(check_memory_fits(u64::MAX, 80 << 30, 80 << 30).is_err());
        assert!(check_memory_fits(80 << 30, 80 << 30, 80 << 30).is_err());
    }
}
