//! Restores L2 settings that one case could leave to the next one, in the context and on the
//! stream, and manages the set-aside of L2 for persisting lines.
//!
//! The set-aside belongs to the whole context, so a [`PersistingL2SetAside`] owns it and frees it
//! when dropped. This module sets no access-policy windows on a stream, because such a window would
//! outlast the launches that need it.

use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUdevice_attribute_enum as Attribute,
    CUlimit_enum::CU_LIMIT_PERSISTING_L2_CACHE_SIZE as LIMIT,
};
use cudarc::driver::{CudaContext, DriverError};

use super::access_window::{L2AccessPolicyWindow, L2LinePriority};
use crate::BackendError;
use crate::driver::context_settings::CudaContextSettings;
use crate::driver::device::Device;
use crate::driver::driver_error::error_for_failed_action;
use crate::driver::stream::stream_settings::CudaStreamSettings;

/// Owner of the context's set-aside: the part of the L2 cache that persisting lines may fill, freed
/// when the value is dropped.
pub struct PersistingL2SetAside {
    context: Arc<CudaContext>,
    set_aside_and_max_window: SetAsideAndMaxWindow,
    previous_l2_set_aside_bytes: usize,
}

impl PersistingL2SetAside {
    /// Sets aside this many bytes of L2 for persisting lines, or the device's maximum if that is
    /// less.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`] if the device allows no set-aside (before compute
    /// capability 8, on a MIG slice, under MPS), or with another error of the driver.
    pub fn set_aside_l2_bytes(device: &Device, bytes: usize) -> Result<Self, BackendError> {
        let context = Arc::clone(device.context());
        let attribute = |attribute| {
            let value = context
                .attribute(attribute)
                .map_err(|error| error_for_failed_action("describe L2", &error))?;
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
        let before = read_persisting_l2_bytes(device)?;
        context.set_limit(LIMIT, bytes.min(most_kept)).map_err(|error| match error {
            DriverError(sys::CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT) => none(),
            error => error_for_failed_action("set L2 aside", &error),
        })?;
        // The driver rounds the size of the set-aside, and ignores the request under MPS.
        let mut taken = Self {
            context: Arc::clone(&context),
            set_aside_and_max_window: SetAsideAndMaxWindow {
                l2_set_aside_bytes: 0,
                max_access_window_bytes: most_window,
            },
            previous_l2_set_aside_bytes: before,
        };
        taken.set_aside_and_max_window.l2_set_aside_bytes = read_persisting_l2_bytes(device)?;
        if taken.set_aside_and_max_window.l2_set_aside_bytes == 0 { Err(none()) } else { Ok(taken) }
    }

    /// An access-policy window for this address range that keeps as large a share of its lines as
    /// the set-aside can hold.
    pub fn access_window_keeping_what_fits(
        &self,
        address: u64,
        bytes: usize,
    ) -> L2AccessPolicyWindow {
        self.set_aside_and_max_window.access_policy_window(address, bytes)
    }
}

/// Reads how many bytes of L2 the context sets aside for persisting lines.
pub fn read_persisting_l2_bytes(device: &Device) -> Result<usize, BackendError> {
    device
        .context()
        .get_limit(LIMIT)
        .map_err(|error| error_for_failed_action("query the set-aside of L2", &error))
}

/// Restores the L2 settings that an earlier case changed: the context's set-aside and the stream's
/// access-policy window. After this call, every case starts with the same L2 settings.
pub fn restore_l2_to_state_when_opened(device: &Device) -> Result<(), BackendError> {
    device.restore_context_and_stream_settings()?;
    free_l2_set_aside_and_release_lines(device)
}

/// Settings of the context, of the stream and of L2 at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextStreamAndL2Settings {
    pub(crate) context: CudaContextSettings,
    pub(crate) stream: CudaStreamSettings,
    /// Set-aside of L2 in bytes; `None` if the driver has no such limit.
    l2_set_aside_bytes: Option<usize>,
}

/// Reads the settings of context, stream and L2 that the current case has made.
pub fn read_context_stream_and_l2_settings(device: &Device) -> ContextStreamAndL2Settings {
    ContextStreamAndL2Settings {
        context: device.read_context_settings(),
        stream: CudaStreamSettings::read_from_stream(device.stream()),
        l2_set_aside_bytes: read_persisting_l2_bytes(device).ok(),
    }
}

/// Restores the settings of the measured case after another implementation was prepared, which may
/// have changed them.
pub fn restore_context_stream_and_l2_settings(
    device: &Device,
    before: &ContextStreamAndL2Settings,
) -> Result<(), BackendError> {
    before.context.restore_settings_in_context(device.context())?;
    if let (Some(aside), true) = (
        before.l2_set_aside_bytes,
        read_persisting_l2_bytes(device).ok() != before.l2_set_aside_bytes,
    ) {
        let set = device.context().set_limit(LIMIT, aside);
        set.map_err(|error| error_for_failed_action("restore the set-aside of L2", &error))?;
    }
    before.stream.restore_on_stream(device.stream())
}

/// Frees the set-aside of L2 and releases the lines that earlier launches kept, so that every case
/// begins with the same L2.
fn free_l2_set_aside_and_release_lines(device: &Device) -> Result<(), BackendError> {
    match restore_l2_set_aside_and_release_lines(device.context(), 0) {
        // On compute capability below 8, on a MIG slice or under MPS, no L2 can be set aside, so
        // there is nothing to free.
        Err(DriverError(sys::CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT)) => Ok(()),
        given => {
            given.map_err(|error| error_for_failed_action("give back the set-aside of L2", &error))
        }
    }
}

/// Gives the lines that launches kept in L2 normal priority again, so that later launches can evict
/// them. All work on the stream must have ended before this call.
pub fn release_persisting_l2_lines(device: &Device) -> Result<(), BackendError> {
    let released = device.context().bind_to_thread().and_then(|()| {
        // SAFETY: the context is current on this thread, and the call accesses no memory.
        unsafe { sys::cuCtxResetPersistingL2Cache() }.result()
    });
    released
        .map_err(|error| error_for_failed_action("release the lines that are kept in L2", &error))
}

/// Sets the set-aside of L2 back to `before` bytes, and releases the lines that were kept.
fn restore_l2_set_aside_and_release_lines(
    context: &CudaContext,
    before: usize,
) -> Result<(), DriverError> {
    context.set_limit(LIMIT, before)?;
    // SAFETY: setting the limit made the context current on this thread, and the call accesses no
    // memory.
    unsafe { sys::cuCtxResetPersistingL2Cache() }.result()
}

impl Drop for PersistingL2SetAside {
    fn drop(&mut self) {
        // A broken context refuses this call, and then the process ends anyway.
        let _ =
            restore_l2_set_aside_and_release_lines(&self.context, self.previous_l2_set_aside_bytes);
    }
}

/// Bytes of L2 that are set aside, and the largest number of bytes of an access-policy window.
#[derive(Debug, Clone, Copy)]
struct SetAsideAndMaxWindow {
    l2_set_aside_bytes: usize,
    max_access_window_bytes: usize,
}

impl SetAsideAndMaxWindow {
    /// If a window kept all lines of a range larger than the set-aside, the lines would evict each
    /// other before reuse, so only a share of them is kept.
    fn access_policy_window(self, address: u64, bytes: usize) -> L2AccessPolicyWindow {
        let bytes = bytes.min(self.max_access_window_bytes);
        L2AccessPolicyWindow {
            start_address: address,
            window_bytes: bytes,
            line_priority: L2LinePriority::PersistShareOfLines(
                (self.l2_set_aside_bytes as f64 / bytes.max(1) as f64).min(1.0) as f32,
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::lock_first_gpu;

    #[test]
    fn an_l2_window_keeps_the_share_that_fits_into_the_set_aside() {
        let room = SetAsideAndMaxWindow {
            l2_set_aside_bytes: 30 << 20,
            max_access_window_bytes: 128 << 20,
        };
        let window = |bytes| room.access_policy_window(4096, bytes);
        assert_eq!(
            window(18 << 20),
            L2AccessPolicyWindow {
                start_address: 4096,
                window_bytes: 18 << 20,
                line_priority: L2LinePriority::PersistShareOfLines(1.0)
            }
        );
        assert_eq!(window(60 << 20).line_priority, L2LinePriority::PersistShareOfLines(0.5));
        // Lines beyond the largest window keep normal priority.
        assert_eq!(
            window(1 << 30),
            L2AccessPolicyWindow {
                start_address: 4096,
                window_bytes: 128 << 20,
                line_priority: L2LinePriority::PersistShareOfLines(30.0 / 128.0)
            }
        );
        assert_eq!(window(0).line_priority, L2LinePriority::PersistShareOfLines(1.0));
        assert_eq!(
            window(1 << 20).with_normal_priority(),
            L2AccessPolicyWindow {
                start_address: 4096,
                window_bytes: 1 << 20,
                line_priority: L2LinePriority::NormalPriority
            }
        );
    }

    #[test]
    fn dropping_the_l2_set_aside_frees_it() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let limit = || device.context().get_limit(LIMIT).unwrap();
        let before = limit();
        match PersistingL2SetAside::set_aside_l2_bytes(&device, 8 << 20) {
            Ok(taken) => {
                eprintln!(
                    "8388608 bytes asked for, {} set aside, windows up to {}",
                    taken.set_aside_and_max_window.l2_set_aside_bytes,
                    taken.set_aside_and_max_window.max_access_window_bytes
                );
                assert_eq!(limit(), taken.set_aside_and_max_window.l2_set_aside_bytes);
                drop(taken);
            }
            Err(BackendError::Unsupported(reason)) => eprintln!("skipped: {reason}"),
            Err(error) => panic!("{error}"),
        }
        assert_eq!(limit(), before);
    }
}
