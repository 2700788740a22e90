//! Saves and restores settings of a stream that other code can change during a launch, which are
//! the L2 access-policy window, wait policy of the host, priority, and memory synchronisation
//! domain. Each case starts with the settings that the stream had when it was created.
//!
//! This module does not change foreign streams.

use std::ffi::c_char;

use cudarc::driver::sys::{self, CUstreamAttrID, CUstreamAttrValue};
use cudarc::driver::{CudaStream, DriverError};

use crate::BackendError;
use crate::driver::driver_error::error_for_failed_action;

const ACCESS_POLICY_WINDOW_ATTRIBUTE: CUstreamAttrID =
    CUstreamAttrID::CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW;
/// Attributes of a stream other than the L2 access-policy window, with their names in messages.
const RESTORED_STREAM_ATTRIBUTES: [(CUstreamAttrID, &str); 4] = [
    (CUstreamAttrID::CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, "way of the host to wait"),
    (CUstreamAttrID::CU_LAUNCH_ATTRIBUTE_PRIORITY, "priority"),
    (CUstreamAttrID::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, "map of synchronisation domains"),
    (CUstreamAttrID::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN, "synchronisation domain"),
];

/// Value of a stream attribute as raw bytes.
type StreamAttributeBytes = [c_char; 64];

/// Settings of a CUDA stream at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaStreamSettings {
    /// Values of the stream attributes in the order of [`RESTORED_STREAM_ATTRIBUTES`]; `None` if
    /// the driver does not report a value.
    others: [Option<StreamAttributeBytes>; RESTORED_STREAM_ATTRIBUTES.len()],
    /// The L2 access-policy window of the stream; `None` if no window is set, as on a new stream.
    l2_access_policy_window: Option<StreamAttributeBytes>,
}

impl CudaStreamSettings {
    pub(crate) fn read_from_stream(stream: &CudaStream) -> CudaStreamSettings {
        let read = |(id, _)| {
            read_stream_attribute(stream, id)
                .ok()
                .map(|value| as_settable_attribute(id, bytes_of_attribute(value)))
        };
        let window = read_stream_attribute(stream, ACCESS_POLICY_WINDOW_ATTRIBUTE)
            .ok()
            .filter(|value| access_window_bytes(*value) != 0);
        Self {
            others: RESTORED_STREAM_ATTRIBUTES.map(read),
            l2_access_policy_window: window.map(bytes_of_attribute),
        }
    }

    /// Restores those attributes of the stream that now differ from the saved ones, and removes an
    /// L2 window that was not set before.
    ///
    /// # Errors
    /// Fails if the driver refuses a setting, because later cases would be measured under other
    /// conditions than earlier ones.
    pub(crate) fn restore_on_stream(&self, stream: &CudaStream) -> Result<(), BackendError> {
        self.set_changed_attributes_on_stream(stream).map_err(|(name, error)| {
            let what = format!("restore the {name} of the stream, which an earlier case set");
            error_for_failed_action(&what, &error)
        })
    }

    fn set_changed_attributes_on_stream(
        &self,
        stream: &CudaStream,
    ) -> Result<(), (&'static str, DriverError)> {
        let now = Self::read_from_stream(stream);
        if now.l2_access_policy_window != self.l2_access_policy_window {
            // If L2 has no set-aside, the driver does not report a window, so both windows are
            // `None`.
            let mut value = CUstreamAttrValue {
                pad: self
                    .l2_access_policy_window
                    .or(now.l2_access_policy_window)
                    .unwrap_or([0; 64]),
            };
            if self.l2_access_policy_window.is_none() {
                value.accessPolicyWindow.num_bytes = 0;
            }
            set_stream_attribute(stream, ACCESS_POLICY_WINDOW_ATTRIBUTE, value)
                .map_err(|error| ("window of L2", error))?;
        }
        for (((id, name), before), now) in
            RESTORED_STREAM_ATTRIBUTES.into_iter().zip(self.others).zip(now.others)
        {
            if let (Some(before), true) = (before, before != now) {
                let value = CUstreamAttrValue { pad: before };
                set_stream_attribute(stream, id, value).map_err(|error| (name, error))?;
            }
        }
        Ok(())
    }
}

/// Converts an attribute to a value that the driver accepts: the driver reports a missing wait
/// policy as -1, which cannot be set.
fn as_settable_attribute(id: CUstreamAttrID, value: StreamAttributeBytes) -> StreamAttributeBytes {
    // The type `c_char` is unsigned on some processors, so its bytes are converted first.
    let policy = i32::from_ne_bytes(std::array::from_fn(|index| value[index] as u8));
    if id != RESTORED_STREAM_ATTRIBUTES[0].0 || policy != -1 {
        return value;
    }
    let mut value = CUstreamAttrValue { pad: [0; 64] };
    value.syncPolicy = sys::CUsynchronizationPolicy::CU_SYNC_POLICY_AUTO;
    bytes_of_attribute(value)
}

fn read_stream_attribute(
    stream: &CudaStream,
    id: CUstreamAttrID,
) -> Result<CUstreamAttrValue, DriverError> {
    let mut value = CUstreamAttrValue { pad: [0; 64] };
    // SAFETY: the stream lives, and the pointer is valid.
    unsafe { sys::cuStreamGetAttribute(stream.cu_stream(), id, &raw mut value) }.result()?;
    Ok(value)
}

fn set_stream_attribute(
    stream: &CudaStream,
    id: CUstreamAttrID,
    value: CUstreamAttrValue,
) -> Result<(), DriverError> {
    // SAFETY: the stream lives, and the pointer is valid.
    unsafe { sys::cuStreamSetAttribute(stream.cu_stream(), id, &raw const value) }.result()
}

const fn bytes_of_attribute(value: CUstreamAttrValue) -> StreamAttributeBytes {
    // SAFETY: every byte of the union was written when the value was made, and any bit pattern is a
    // valid byte.
    unsafe { value.pad }
}

/// Length of an L2 access-policy window in bytes; 0 means that no window is set.
const fn access_window_bytes(value: CUstreamAttrValue) -> usize {
    // SAFETY: every byte of the union was written when the value was made, and any bit pattern is a
    // valid number.
    unsafe { value.accessPolicyWindow.num_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::memory::access_window::{L2AccessPolicyWindow, L2LinePriority};
    use crate::driver::memory::persistence;
    use crate::testing::lock_first_gpu;

    #[test]
    fn settings_of_a_stream_are_restored_after_a_change() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let stream = device.stream();
        let original = CudaStreamSettings::read_from_stream(stream);
        eprintln!("{original:?}");
        let kept = device.allocate(1 << 20).unwrap();
        let window = L2AccessPolicyWindow {
            start_address: kept.device_address(),
            window_bytes: 1 << 20,
            line_priority: L2LinePriority::PersistShareOfLines(1.0),
        };
        let has_window = match set_stream_attribute(
            stream,
            ACCESS_POLICY_WINDOW_ATTRIBUTE,
            window.as_launch_attribute().value,
        ) {
            Ok(()) => {
                assert_eq!(
                    access_window_bytes(
                        read_stream_attribute(stream, ACCESS_POLICY_WINDOW_ATTRIBUTE).unwrap()
                    ),
                    1 << 20
                );
                true
            }
            Err(error) => {
                eprintln!("the window is not set: {error:?}");
                false
            }
        };
        let policy = CUstreamAttrValue {
            syncPolicy: sys::CUsynchronizationPolicy::CU_SYNC_POLICY_BLOCKING_SYNC,
        };
        let (id, _) = RESTORED_STREAM_ATTRIBUTES[0];
        set_stream_attribute(stream, id, policy).unwrap();
        let with_policy = CudaStreamSettings::read_from_stream(stream);
        assert_ne!(with_policy, original);
        // The stream gets the highest priority that the context allows.
        let (id, _) = RESTORED_STREAM_ATTRIBUTES[1];
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the context is current, and the pointers are valid.
        unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) }
            .result()
            .unwrap();
        assert!(greatest < least);
        set_stream_attribute(stream, id, CUstreamAttrValue { priority: greatest }).unwrap();
        assert_ne!(CudaStreamSettings::read_from_stream(stream), with_policy);
        let case_settings = persistence::read_context_stream_and_l2_settings(&device);
        assert_eq!(case_settings.stream.l2_access_policy_window.is_some(), has_window);
        persistence::restore_l2_to_state_when_opened(&device).unwrap();
        assert_eq!(CudaStreamSettings::read_from_stream(stream), original);
        assert_eq!(
            read_stream_attribute(stream, ACCESS_POLICY_WINDOW_ATTRIBUTE)
                .map_or(0, access_window_bytes),
            0
        );
        // The settings of the measured case are restored after another implementation, for
        // comparison, has changed them.
        persistence::restore_context_stream_and_l2_settings(&device, &case_settings).unwrap();
        assert_eq!(persistence::read_context_stream_and_l2_settings(&device), case_settings);
        persistence::restore_l2_to_state_when_opened(&device).unwrap();
    }
}
