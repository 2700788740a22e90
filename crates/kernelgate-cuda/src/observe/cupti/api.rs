//! Functions of the CUPTI library that this process has opened.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use cudarc::cupti::sys;

use crate::BackendError;
use crate::library::{self, NvidiaLibrary};

/// Callback with which CUPTI requests a buffer for records; the callback writes its address, its
/// size in bytes and the largest number of records.
pub type BufferRequestedCallback = extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
/// Callback with which CUPTI returns a filled buffer; parameters: context, stream, address, size,
/// bytes that hold records.
pub type BufferCompletedCallback = extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);
/// Callback with which CUPTI reports an event; parameters: domain, event, and the event's data.
pub type CuptiEventCallback = extern "C" fn(*mut c_void, u32, u32, *const c_void);

/// Functions of CUPTI; each returns a status, of which 0 means success. CUPTI's enumerations are
/// passed as integers, because a later CUPTI may have more values.
pub struct CuptiFunctions {
    pub register_buffer_callbacks:
        unsafe extern "C" fn(BufferRequestedCallback, BufferCompletedCallback) -> c_int,
    pub activity_enable: unsafe extern "C" fn(u32) -> c_int,
    pub activity_disable: unsafe extern "C" fn(u32) -> c_int,
    pub flush_activity_buffers: unsafe extern "C" fn(u32) -> c_int,
    pub get_next_record: unsafe extern "C" fn(*mut u8, usize, *mut *mut u32) -> c_int,
    pub get_num_dropped_records: unsafe extern "C" fn(*mut c_void, u32, *mut usize) -> c_int,
    pub get_timestamp: unsafe extern "C" fn(*mut u64) -> c_int,
    pub set_thread_id_type: unsafe extern "C" fn(u32) -> c_int,
    pub get_callback_name: unsafe extern "C" fn(u32, u32, *mut *const c_char) -> c_int,
    pub subscribe: unsafe extern "C" fn(
        *mut sys::CUpti_SubscriberHandle,
        CuptiEventCallback,
        *mut c_void,
    ) -> c_int,
    pub unsubscribe: unsafe extern "C" fn(sys::CUpti_SubscriberHandle) -> c_int,
    pub enable_callback: unsafe extern "C" fn(u32, sys::CUpti_SubscriberHandle, u32, u32) -> c_int,
    pub get_graph_node_id: unsafe extern "C" fn(*mut c_void, *mut u64) -> c_int,
    pub cupti_finalize: unsafe extern "C" fn() -> c_int,
    get_error_string: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
}

/// Returns the functions of the CUPTI library; `None` if the library or one of the functions is
/// missing.
pub fn cupti_functions() -> Option<&'static CuptiFunctions> {
    static API: OnceLock<Option<CuptiFunctions>> = OnceLock::new();
    API.get_or_init(load_cupti_functions).as_ref()
}

fn load_cupti_functions() -> Option<CuptiFunctions> {
    let library = NvidiaLibrary::Cupti;
    // SAFETY: the function types are those of `cupti_activity.h` and `cupti_callbacks.h`, which are
    // the same from CUDA 12 to 13: results and other enumerations have the size of an int.
    unsafe {
        Some(CuptiFunctions {
            register_buffer_callbacks: library::typed_library_function(
                library,
                c"cuptiActivityRegisterCallbacks",
            )?,
            activity_enable: library::typed_library_function(library, c"cuptiActivityEnable")?,
            activity_disable: library::typed_library_function(library, c"cuptiActivityDisable")?,
            flush_activity_buffers: library::typed_library_function(
                library,
                c"cuptiActivityFlushAll",
            )?,
            get_next_record: library::typed_library_function(
                library,
                c"cuptiActivityGetNextRecord",
            )?,
            get_num_dropped_records: library::typed_library_function(
                library,
                c"cuptiActivityGetNumDroppedRecords",
            )?,
            get_timestamp: library::typed_library_function(library, c"cuptiGetTimestamp")?,
            set_thread_id_type: library::typed_library_function(library, c"cuptiSetThreadIdType")?,
            get_callback_name: library::typed_library_function(library, c"cuptiGetCallbackName")?,
            subscribe: library::typed_library_function(library, c"cuptiSubscribe")?,
            unsubscribe: library::typed_library_function(library, c"cuptiUnsubscribe")?,
            enable_callback: library::typed_library_function(library, c"cuptiEnableCallback")?,
            get_graph_node_id: library::typed_library_function(library, c"cuptiGetGraphNodeId")?,
            cupti_finalize: library::typed_library_function(library, c"cuptiFinalize")?,
            get_error_string: library::typed_library_function(library, c"cuptiGetResultString")?,
        })
    }
}

/// CUPTI's status if another CUPTI client, such as Nsight, has subscribed to this process.
pub(super) const ANOTHER_CUPTI_CLIENT_STATUS: c_int =
    sys::CUptiResult::CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED as c_int;

impl CuptiFunctions {
    /// Returns an error that names the failed action, unless CUPTI's status is success.
    pub fn check_cupti_status(&self, status: c_int, action: &str) -> Result<(), BackendError> {
        if status == 0 {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: the address for the text is valid; CUPTI's error texts live as long as the
        // library.
        let text = unsafe {
            let has_text = (self.get_error_string)(status, &raw mut text) == 0;
            if has_text { text_of_c_string(text) } else { String::new() }
        };
        Err(cupti_refusal_error(status, action, &text))
    }

    /// Current time of the clock that CUPTI's records use, nanoseconds.
    pub fn cupti_record_clock_ns(&self) -> u64 {
        let mut time = 0;
        // SAFETY: the call gets a pointer to a local variable, which is valid during the call.
        let has_time = unsafe { (self.get_timestamp)(&raw mut time) } == 0;
        if has_time { time } else { 0 }
    }
}

/// Makes the error that names the action and the status with which CUPTI refused it.
pub(super) fn cupti_refusal_error(status: c_int, action: &str, text: &str) -> BackendError {
    BackendError::ComputationFailed(if status == ANOTHER_CUPTI_CLIENT_STATUS {
        format!(
            "another program records this process through CUPTI (Nsight Systems, Nsight Compute, \
             compute-sanitizer, a profiler), and only one can: run without it (CUPTI error \
             {status})"
        )
    } else {
        format!("CUPTI failed to {action}: {text} ({status})")
    })
}

/// Copies a C string of CUPTI; returns an empty text if the address is null.
///
/// # Safety
/// The address is null or the address of a C string.
pub unsafe fn text_of_c_string(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the address is not null, and the caller guarantees that it is the address of a C
    // string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_cupti_client_is_named_in_the_error() {
        let other =
            cupti_refusal_error(39, "begin", "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED");
        assert_eq!(
            other.to_string(),
            "launch failed: another program records this process through CUPTI (Nsight Systems, Nsight Compute, compute-sanitizer, a profiler), and only one can: run without it (CUPTI error 39)"
        );
        let refused = cupti_refusal_error(999, "record", "CUPTI_ERROR_UNKNOWN");
        assert_eq!(
            refused.to_string(),
            "launch failed: CUPTI failed to record: CUPTI_ERROR_UNKNOWN (999)"
        );
    }
}
