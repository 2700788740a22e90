//! L2 settings that one case could leave to the next case in the context and on the stream, and a
//! range of memory kept in L2 between kernels: the set-aside.
//!
//! The set-aside belongs to the whole context, so a value owns it and frees it when dropped. This
//! module sets no windows on a stream, because they would outlast the launches that need them.

use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUdevice_attribute_enum as Attribute,
    CUlimit_enum::CU_LIMIT_PERSISTING_L2_CACHE_SIZE as LIMIT,
};
use cudarc::driver::{CudaContext, DriverError};

use super::access_window::{L2LineTreatment, L2Window};
use crate::BackendError;
use crate::driver::context_settings::ContextSettings;
use crate::driver::device::Device;
use crate::driver::driver_error::failed;
use crate::driver::stream::stream_settings::StreamSettings;

/// The part of L2 that kept lines may fill, until dropped.
pub struct PersistingL2 {
    context: Arc<CudaContext>,
    room: PersistingL2Reserve,
    before: usize,
}

impl PersistingL2 {
    /// Sets aside the given bytes of L2 for persistent data, or the device's maximum if less.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`] if the device allows no set-aside: before compute
    /// capability 8, on a MIG slice, under MPS, or if the driver fails.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, BackendError> {
        let context = Arc::clone(device.context());
        let attribute = |attribute| {
            let value =
                context.attribute(attribute).map_err(|error| failed("describe L2", &error))?;
            Ok::<_, BackendError>(value.max(0) as usize)
        };
        let most_kept = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE)?;
        let most_window = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE)?;
        let none = || {
            BackendError::Unsupported(
                "this GPU sets no L2 aside for persisting accesses".to_owned(),
            )
        };
        if most_kept == 0 || most_window == 0 {
            return Err(none());
        }
        let before = persisting_l2_bytes(device)?;
        context.set_limit(LIMIT, bytes.min(most_kept)).map_err(|error| match error {
            DriverError(sys::CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT) => none(),
            error => failed("set L2 aside", &error),
        })?;
        // The driver rounds the size, and ignores it under MPS.
        let mut taken = Self {
            context: Arc::clone(&context),
            room: PersistingL2Reserve { kept: 0, window: most_window },
            before,
        };
        taken.room.kept = persisting_l2_bytes(device)?;
        if taken.room.kept == 0 { Err(none()) } else { Ok(taken) }
    }

    /// A window that keeps as much of that range as fits.
    pub fn access_policy_window(&self, address: u64, bytes: usize) -> L2Window {
        self.room.access_policy_window(address, bytes)
    }
}

/// Returns the bytes of L2 that are set aside for persisting lines.
pub fn persisting_l2_bytes(device: &Device) -> Result<usize, BackendError> {
    device.context().get_limit(LIMIT).map_err(|error| failed("query the set-aside of L2", &error))
}

/// Restores the L2 settings that an earlier case changed: the context's set-aside, and the stream's
/// window. Every case then starts with equal L2 settings.
pub fn restore_l2_state(device: &Device) -> Result<(), BackendError> {
    device.restore_settings()?;
    reset_persisting_l2(device)
}

/// L2 settings of the context and of the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct L2Settings {
    pub(crate) context: ContextSettings,
    pub(crate) stream: StreamSettings,
    /// Set-aside of L2, bytes; absent if the driver has no such limit.
    aside: Option<usize>,
}

/// Reads the current settings, made by the case that is alive.
pub fn current_l2_settings(device: &Device) -> L2Settings {
    L2Settings {
        context: device.current_settings(),
        stream: StreamSettings::read_current(device.stream()),
        aside: persisting_l2_bytes(device).ok(),
    }
}

/// Restores the L2 settings of the measured case after another row was prepared beside it.
pub fn restore_l2_settings(device: &Device, before: &L2Settings) -> Result<(), BackendError> {
    before.context.restore(device.context())?;
    if let (Some(aside), true) = (before.aside, persisting_l2_bytes(device).ok() != before.aside) {
        let set = device.context().set_limit(LIMIT, aside);
        set.map_err(|error| failed("restore the set-aside of L2", &error))?;
    }
    before.stream.restore(device.stream())
}

/// Frees the set-aside of L2 that earlier launches made and releases the lines that they kept, so
/// that every case begins with the same L2.
fn reset_persisting_l2(device: &Device) -> Result<(), BackendError> {
    match return_persisting_l2(device.context(), 0) {
        // Before compute capability 8, on a MIG slice or under MPS, no L2 can be set aside.
        Err(DriverError(sys::CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT)) => Ok(()),
        given => given.map_err(|error| failed("give back the set-aside of L2", &error)),
    }
}

/// Makes the lines that launches kept in L2 like any others, which the next launches replace. All
/// work on the stream must have ended before.
pub fn reset_persisting_lines(device: &Device) -> Result<(), BackendError> {
    let released = device.context().bind_to_thread().and_then(|()| {
        // SAFETY: the context is this thread's; no memory is involved.
        unsafe { sys::cuCtxResetPersistingL2Cache() }.result()
    });
    released.map_err(|error| failed("release the lines that are kept in L2", &error))
}

/// Restores the set-aside to `before` bytes, and releases the kept lines.
fn return_persisting_l2(context: &CudaContext, before: usize) -> Result<(), DriverError> {
    context.set_limit(LIMIT, before)?;
    // SAFETY: setting the limit made the context this thread's; no memory is involved.
    unsafe { sys::cuCtxResetPersistingL2Cache() }.result()
}

impl Drop for PersistingL2 {
    fn drop(&mut self) {
        // A broken context refuses, and the process then ends anyway.
        let _ = return_persisting_l2(&self.context, self.before);
    }
}

/// Bytes that are set aside, and that a window may have.
#[derive(Debug, Clone, Copy)]
struct PersistingL2Reserve {
    kept: usize,
    window: usize,
}

impl PersistingL2Reserve {
    /// A window larger than the set-aside would evict its own lines before they are used again, so
    /// only a share of the window is kept.
    fn access_policy_window(self, address: u64, bytes: usize) -> L2Window {
        let bytes = bytes.min(self.window);
        L2Window {
            address,
            bytes,
            lines: L2LineTreatment::Keep((self.kept as f64 / bytes.max(1) as f64).min(1.0) as f32),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::lock_first_gpu;

    #[test]
    fn an_l2_window_keeps_the_share_that_fits_into_the_set_aside() {
        let room = PersistingL2Reserve { kept: 30 << 20, window: 128 << 20 };
        let window = |bytes| room.access_policy_window(4096, bytes);
        assert_eq!(
            window(18 << 20),
            L2Window { address: 4096, bytes: 18 << 20, lines: L2LineTreatment::Keep(1.0) }
        );
        assert_eq!(window(60 << 20).lines, L2LineTreatment::Keep(0.5));
        // Bytes beyond the largest window are not controlled.
        assert_eq!(
            window(1 << 30),
            L2Window {
                address: 4096,
                bytes: 128 << 20,
                lines: L2LineTreatment::Keep(30.0 / 128.0)
            }
        );
        assert_eq!(window(0).lines, L2LineTreatment::Keep(1.0));
        assert_eq!(
            window(1 << 20).without_persistence(),
            L2Window { address: 4096, bytes: 1 << 20, lines: L2LineTreatment::Release }
        );
    }

    #[test]
    fn dropping_the_set_aside_of_l2_frees_it() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let limit = || device.context().get_limit(LIMIT).unwrap();
        let before = limit();
        match PersistingL2::new(&device, 8 << 20) {
            Ok(taken) => {
                eprintln!(
                    "8388608 bytes asked for, {} set aside, windows up to {}",
                    taken.room.kept, taken.room.window
                );
                assert_eq!(limit(), taken.room.kept);
                drop(taken);
            }
            Err(BackendError::Unsupported(reason)) => eprintln!("skipped: {reason}"),
            Err(error) => panic!("{error}"),
        }
        assert_eq!(limit(), before);
    }
}
