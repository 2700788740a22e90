//! Whether a case fits on the device, asked before anything is allocated.

use cudarc::driver::result;

use super::buffer::short;
use super::device::Device;
use super::status::failed;
use crate::BackendError;

/// Memory of the device that a case leaves to the driver and to the harness' own buffers, bytes.
const RESERVE: u64 = 512 << 20;

/// Checks that so many bytes can be allocated.
///
/// # Errors
/// When they cannot, or the driver fails.
pub fn require(device: &Device, bytes: u64) -> Result<(), BackendError> {
    let (free, total) = settled(device)?;
    check(bytes, free, total)
}

/// Free and total device memory, bytes, once the launches have finished and what was freed has left
/// the driver's pool.
///
/// # Errors
/// When the driver fails.
pub fn settled(device: &Device) -> Result<(u64, u64), BackendError> {
    // First with a timeout, because a hung kernel never finishes; then through the driver, which
    // only then takes note of what was freed.
    device.synchronize()?;
    device.stream().synchronize().map_err(|error| failed("wait for the GPU", &error))?;
    // SAFETY: the device of an open context; the pool releases only what is not in use. A device
    // without pools keeps nothing back.
    unsafe {
        if let Ok(pool) = result::device::get_mem_pool(device.context().cu_device()) {
            result::mem_pool::trim_to(pool, 0)
                .map_err(|error| failed("return freed memory", &error))?;
        }
    }
    device.memory()
}

fn check(bytes: u64, free: u64, total: u64) -> Result<(), BackendError> {
    let available = free.min(total.saturating_sub(RESERVE));
    if bytes <= available {
        return Ok(());
    }
    Err(short(bytes, Some(available)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_named_with_both_sizes() {
        assert_eq!(check(1 << 30, 2 << 30, 80 << 30), Ok(()));
        let error = check(18_000_000_000, 2_000_000_000, 80_000_000_000).unwrap_err();
        assert_eq!(error.to_string(), "needs 18.00 GB on the GPU of memory, 2.00 GB are free");
        assert!(check(u64::MAX, 80 << 30, 80 << 30).is_err());
        assert!(check(80 << 30, 80 << 30, 80 << 30).is_err());
    }
}
