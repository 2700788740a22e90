//! Settings that a launch of other code can change on the stream that it gets, and that later
//! launches would inherit: a window of memory that L2 keeps, how the host waits, the priority, the
//! memory synchronisation domain. Each case starts with the settings with which the stream was
//! made.
//!
//! This module does not change streams that foreign code created.

use std::ffi::c_char;

use cudarc::driver::sys::{self, CUstreamAttrID, CUstreamAttrValue};
use cudarc::driver::{CudaStream, DriverError};

use crate::BackendError;
use crate::driver::driver_error::failed;

const WINDOW_ATTRIBUTE: CUstreamAttrID = CUstreamAttrID::CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW;
/// Stream settings other than the access window, with their names.
const NAMED_SETTINGS: [(CUstreamAttrID, &str); 4] = [
    (CUstreamAttrID::CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, "way of the host to wait"),
    (CUstreamAttrID::CU_LAUNCH_ATTRIBUTE_PRIORITY, "priority"),
    (CUstreamAttrID::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, "map of synchronisation domains"),
    (CUstreamAttrID::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN, "synchronisation domain"),
];

/// Value of one stream setting as raw bytes.
type AttributeBytes = [c_char; 64];

/// The saved settings of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamSettings {
    /// Values of the stream settings, in the order of [`NAMED_SETTINGS`]; absent if the driver does
    /// not report them.
    others: [Option<AttributeBytes>; NAMED_SETTINGS.len()],
    /// The window; absent if no window is set, as on a new stream.
    window: Option<AttributeBytes>,
}

impl StreamSettings {
    pub(crate) fn read_current(stream: &CudaStream) -> StreamSettings {
        let read = |(id, _)| {
            get(stream, id).ok().map(|value| to_settable_attribute(id, attribute_bytes(value)))
        };
        let window = get(stream, WINDOW_ATTRIBUTE).ok().filter(|value| window_length(*value) != 0);
        Self { others: NAMED_SETTINGS.map(read), window: window.map(attribute_bytes) }
    }

    /// Restores the stream settings that differ now, and removes an L2 window that was not set
    /// before.
    ///
    /// # Errors
    /// Fails if the driver refuses: later cases would be measured under other conditions than
    /// earlier ones.
    pub(crate) fn restore(&self, stream: &CudaStream) -> Result<(), BackendError> {
        self.apply_changed(stream).map_err(|(name, error)| {
            let what = format!("restore the {name} of the stream, which an earlier case set");
            failed(&what, &error)
        })
    }

    fn apply_changed(&self, stream: &CudaStream) -> Result<(), (&'static str, DriverError)> {
        let now = Self::read_current(stream);
        if now.window != self.window {
            // If L2 keeps nothing, the driver reports neither, and both are absent.
            let mut value =
                CUstreamAttrValue { pad: self.window.or(now.window).unwrap_or([0; 64]) };
            if self.window.is_none() {
                value.accessPolicyWindow.num_bytes = 0;
            }
            set_attribute(stream, WINDOW_ATTRIBUTE, value)
                .map_err(|error| ("window of L2", error))?;
        }
        for (((id, name), before), now) in
            NAMED_SETTINGS.into_iter().zip(self.others).zip(now.others)
        {
            if let (Some(before), true) = (before, before != now) {
                let value = CUstreamAttrValue { pad: before };
                set_attribute(stream, id, value).map_err(|error| (name, error))?;
            }
        }
        Ok(())
    }
}

/// Converts a setting to a value that the driver accepts: it reports the wait policy of a stream
/// without one as -1, which cannot be set.
fn to_settable_attribute(id: CUstreamAttrID, value: AttributeBytes) -> AttributeBytes {
    // The type `c_char` is unsigned on some processors.
    let policy = i32::from_ne_bytes(std::array::from_fn(|index| value[index] as u8));
    if id != NAMED_SETTINGS[0].0 || policy != -1 {
        return value;
    }
    let mut value = CUstreamAttrValue { pad: [0; 64] };
    value.syncPolicy = sys::CUsynchronizationPolicy::CU_SYNC_POLICY_AUTO;
    attribute_bytes(value)
}

fn get(stream: &CudaStream, id: CUstreamAttrID) -> Result<CUstreamAttrValue, DriverError> {
    let mut value = CUstreamAttrValue { pad: [0; 64] };
    // SAFETY: the stream lives, and the pointer is valid.
    unsafe { sys::cuStreamGetAttribute(stream.cu_stream(), id, &raw mut value) }.result()?;
    Ok(value)
}

fn set_attribute(
    stream: &CudaStream,
    id: CUstreamAttrID,
    value: CUstreamAttrValue,
) -> Result<(), DriverError> {
    // SAFETY: the stream lives, and the pointer is valid.
    unsafe { sys::cuStreamSetAttribute(stream.cu_stream(), id, &raw const value) }.result()
}

const fn attribute_bytes(value: CUstreamAttrValue) -> AttributeBytes {
    // SAFETY: every byte was written when the value was made, and any is a byte.
    unsafe { value.pad }
}

/// Bytes of a window; 0 means that no window is set.
const fn window_length(value: CUstreamAttrValue) -> usize {
    // SAFETY: every byte was written when the value was made, and any are a number.
    unsafe { value.accessPolicyWindow.num_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::memory::access_window::{L2LineTreatment, L2Window};
    use crate::driver::memory::persistence;
    use crate::testing::lock_first_gpu;

    #[test]
    fn settings_of_a_stream_are_restored_after_a_change() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let stream = device.stream();
        let original = StreamSettings::read_current(stream);
        eprintln!("{original:?}");
        let kept = device.allocate(1 << 20).unwrap();
        let window =
            L2Window { address: kept.address(), bytes: 1 << 20, lines: L2LineTreatment::Keep(1.0) };
        let has_window =
            match set_attribute(stream, WINDOW_ATTRIBUTE, window.launch_attribute().value) {
                Ok(()) => {
                    assert_eq!(window_length(get(stream, WINDOW_ATTRIBUTE).unwrap()), 1 << 20);
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
        let (id, _) = NAMED_SETTINGS[0];
        set_attribute(stream, id, policy).unwrap();
        let with_policy = StreamSettings::read_current(stream);
        assert_ne!(with_policy, original);
        // The highest possible priority.
        let (id, _) = NAMED_SETTINGS[1];
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the context is current, and the pointers are valid.
        unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) }
            .result()
            .unwrap();
        assert!(greatest < least);
        set_attribute(stream, id, CUstreamAttrValue { priority: greatest }).unwrap();
        assert_ne!(StreamSettings::read_current(stream), with_policy);
        let case_settings = persistence::current_l2_settings(&device);
        assert_eq!(case_settings.stream.window.is_some(), has_window);
        persistence::restore_l2_state(&device).unwrap();
        assert_eq!(StreamSettings::read_current(stream), original);
        assert_eq!(get(stream, WINDOW_ATTRIBUTE).map_or(0, window_length), 0);
        // Restores the settings around a row with which another case is compared.
        persistence::restore_l2_settings(&device, &case_settings).unwrap();
        assert_eq!(persistence::current_l2_settings(&device), case_settings);
        persistence::restore_l2_state(&device).unwrap();
    }
}
