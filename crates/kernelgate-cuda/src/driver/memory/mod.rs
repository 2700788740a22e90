//! Checks whether a case fits into free device memory before the case allocates any, and reads how
//! much device memory is in use.

pub mod access_window;
pub mod buffer;
pub mod mailbox;
pub mod persistence;
pub(crate) mod staged_copies;

use cudarc::driver::sys::{self, CUmemPool_attribute, CUmemPool_attribute_enum as PoolAttribute};
use cudarc::driver::{DriverError, result};

use super::device::Device;
use super::driver_error::error_for_failed_action;
use crate::BackendError;
use buffer::error_for_too_little_memory;

/// Bytes of device memory that a case must leave free for the driver and for the harness's own
/// buffers.
const BYTES_LEFT_FREE_FOR_DRIVER: u64 = 512 << 20;

/// Returns an error unless this many bytes of device memory can be allocated.
///
/// # Errors
/// Fails if the bytes do not fit into free device memory, or the driver returns an error.
pub fn require_free_device_memory(device: &Device, bytes: u64) -> Result<(), BackendError> {
    let (free, total) = free_and_total_after_launches(device)?;
    require_bytes_fit(bytes, free, total)
}

/// Waits for all launches, returns freed memory from the driver's pool, and then reads free and
/// total device memory, bytes.
pub fn free_and_total_after_launches(device: &Device) -> Result<(u64, u64), BackendError> {
    // The stream is first waited for with a timeout, because a hung kernel never finishes, and then
    // through the driver, which registers freed memory only then.
    device.synchronize()?;
    device
        .stream()
        .synchronize()
        .map_err(|error| error_for_failed_action("wait for the GPU", &error))?;
    // SAFETY: the device belongs to an open context, and the pool releases only unused memory. A
    // device without memory pools keeps no freed memory.
    unsafe {
        if let Ok(pool) = result::device::get_mem_pool(device.context().cu_device()) {
            result::mem_pool::trim_to(pool, 0)
                .map_err(|error| error_for_failed_action("return freed memory", &error))?;
        }
    }
    device.free_and_total_bytes()
}

/// Device memory of a GPU that is in use: in the pool now, in the pool at most, and outside the
/// pool, bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceMemoryInUse {
    /// Bytes allocated from the device's memory pool, as every
    /// [`DeviceBuffer`](crate::DeviceBuffer) is, without the unused part of the pool's 32 MiB
    /// pieces; 0 without a pool.
    pub allocated_pool_bytes: u64,
    /// Largest value of `allocated_pool_bytes` since the last [`restart_peak_of_pool`], bytes.
    pub peak_pool_bytes: u64,
    /// Bytes in use outside the pool, in pages of 2 MiB: other allocations, modules, memory of the
    /// context and of libraries, and other processes.
    pub bytes_outside_pool: u64,
}

/// Reads how much device memory is in use now, without waiting for enqueued work.
pub fn read_device_memory_usage(device: &Device) -> Result<DeviceMemoryInUse, BackendError> {
    let (free, total) = device.free_and_total_bytes()?;
    let of_pool = |attribute| {
        let bytes = read_memory_pool_attribute(device, attribute);
        bytes.map_err(|error| error_for_failed_action("query the memory of the pool", &error))
    };
    let pool = of_pool(PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
    let peak = of_pool(PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?;
    let reserved = of_pool(PoolAttribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
    let outside = total.saturating_sub(free).saturating_sub(reserved);
    Ok(DeviceMemoryInUse {
        allocated_pool_bytes: pool,
        peak_pool_bytes: peak.max(pool),
        bytes_outside_pool: outside,
    })
}

/// Reads an attribute, in bytes, of the device's memory pool; 0 if the device has no pool.
fn read_memory_pool_attribute(
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

/// Restarts the maximum of memory use in the device's pool ([`DeviceMemoryInUse::peak_pool_bytes`])
/// at the present use.
pub fn restart_peak_of_pool(device: &Device) -> Result<(), BackendError> {
    // SAFETY: the device handle belongs to an open context.
    let Ok(pool) = (unsafe { result::device::get_mem_pool(device.context().cu_device()) }) else {
        return Ok(());
    };
    let (peak, mut zero) = (PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0u64);
    // SAFETY: the pool lives as long as the device, and the pointer is to a 64-bit number; setting
    // the peak to zero restarts it.
    unsafe { sys::cuMemPoolSetAttribute(pool, peak, (&raw mut zero).cast()) }
        .result()
        .map_err(|error| error_for_failed_action("begin anew with the memory of the pool", &error))
}

fn require_bytes_fit(bytes: u64, free: u64, total: u64) -> Result<(), BackendError> {
    let available = free.min(total.saturating_sub(BYTES_LEFT_FREE_FOR_DRIVER));
    if bytes <= available {
        return Ok(());
    }
    Err(error_for_too_little_memory(bytes, Some(available)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_use_and_peak_use_of_the_pool_are_reported() {
        let Some((device, _alone)) = crate::testing::lock_first_gpu() else { return };
        const MIB: u64 = 1 << 20;
        free_and_total_after_launches(&device).unwrap();
        restart_peak_of_pool(&device).unwrap();
        let before = read_device_memory_usage(&device).unwrap();
        let kept = device.allocate((96 * MIB) as usize).unwrap();
        drop(device.allocate((64 * MIB) as usize).unwrap());
        free_and_total_after_launches(&device).unwrap();
        let now = read_device_memory_usage(&device).unwrap();
        eprintln!("{before:?} {now:?}");
        // The driver rounds an allocation up to a multiple of about 512 bytes.
        let is_about = |bytes: u64, expected: u64| (expected..expected + MIB).contains(&bytes);
        assert!(is_about(now.allocated_pool_bytes - before.allocated_pool_bytes, 96 * MIB));
        assert!(is_about(now.peak_pool_bytes - before.allocated_pool_bytes, 160 * MIB));
        // Other tests may open the device at the same time, which uses memory outside the pool.
        assert!(now.bytes_outside_pool.abs_diff(before.bytes_outside_pool) <= 32 * MIB);
        restart_peak_of_pool(&device).unwrap();
        assert_eq!(
            read_device_memory_usage(&device).unwrap().peak_pool_bytes,
            now.allocated_pool_bytes
        );
        drop(kept);
        free_and_total_after_launches(&device).unwrap();
        assert_eq!(
            read_device_memory_usage(&device).unwrap().allocated_pool_bytes,
            before.allocated_pool_bytes
        );
    }

    #[test]
    fn an_allocation_that_does_not_fit_reports_both_sizes() {
        assert_eq!(require_bytes_fit(1 << 30, 2 << 30, 80 << 30), Ok(()));
        let error = require_bytes_fit(18_000_000_000, 2_000_000_000, 80_000_000_000).unwrap_err();
        assert_eq!(error.to_string(), "needs 18.00 GB on the GPU of memory, 2.00 GB are free");
        assert!(require_bytes_fit(u64::MAX, 80 << 30, 80 << 30).is_err());
        assert!(require_bytes_fit(80 << 30, 80 << 30, 80 << 30).is_err());
    }
}
