//! CUPTI's functions, of the library that was opened.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use cudarc::cupti::sys;

use crate::BackendError;
use crate::library::{self, RequiredLibrary};

/// Callback with which CUPTI requests a buffer: its address, its size, and the most records for it.
pub type GiveBufferFunction = extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
/// Takes a buffer back: context, stream, address, size, bytes that hold records.
pub type TakeBufferFunction = extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);
/// Callback with which CUPTI reports an event: domain, event, and the event's data.
pub type CuptiCallbackFunction = extern "C" fn(*mut c_void, u32, u32, *const c_void);

/// Functions of CUPTI; a result of 0 means success. Enumerations are passed as integers: a later
/// CUPTI may know more values.
pub struct CuptiApi {
    pub register: unsafe extern "C" fn(GiveBufferFunction, TakeBufferFunction) -> c_int,
    pub enable: unsafe extern "C" fn(u32) -> c_int,
    pub disable: unsafe extern "C" fn(u32) -> c_int,
    pub flush: unsafe extern "C" fn(u32) -> c_int,
    pub next: unsafe extern "C" fn(*mut u8, usize, *mut *mut u32) -> c_int,
    pub dropped: unsafe extern "C" fn(*mut c_void, u32, *mut usize) -> c_int,
    pub timestamp: unsafe extern "C" fn(*mut u64) -> c_int,
    pub thread_ids: unsafe extern "C" fn(u32) -> c_int,
    pub call_name: unsafe extern "C" fn(u32, u32, *mut *const c_char) -> c_int,
    pub subscribe: unsafe extern "C" fn(
        *mut sys::CUpti_SubscriberHandle,
        CuptiCallbackFunction,
        *mut c_void,
    ) -> c_int,
    pub unsubscribe: unsafe extern "C" fn(sys::CUpti_SubscriberHandle) -> c_int,
    pub enable_callback: unsafe extern "C" fn(u32, sys::CUpti_SubscriberHandle, u32, u32) -> c_int,
    pub graph_node_id: unsafe extern "C" fn(*mut c_void, *mut u64) -> c_int,
    pub finalize: unsafe extern "C" fn() -> c_int,
    error_string: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
}

/// Functions of the CUPTI library; `None` if the library or one of the functions is missing.
pub fn cupti_api() -> Option<&'static CuptiApi> {
    static API: OnceLock<Option<CuptiApi>> = OnceLock::new();
    API.get_or_init(load_cupti).as_ref()
}

fn load_cupti() -> Option<CuptiApi> {
    let library = RequiredLibrary::Cupti;
    // SAFETY: the function types are those of `cupti_activity.h` and `cupti_callbacks.h`, which are
    // the same from CUDA 12 to 13: results and other enumerations have the size of an int.
    unsafe {
        Some(CuptiApi {
            register: library::typed_function(library, c"cuptiActivityRegisterCallbacks")?,
            enable: library::typed_function(library, c"cuptiActivityEnable")?,
            disable: library::typed_function(library, c"cuptiActivityDisable")?,
            flush: library::typed_function(library, c"cuptiActivityFlushAll")?,
            next: library::typed_function(library, c"cuptiActivityGetNextRecord")?,
            dropped: library::typed_function(library, c"cuptiActivityGetNumDroppedRecords")?,
            timestamp: library::typed_function(library, c"cuptiGetTimestamp")?,
            thread_ids: library::typed_function(library, c"cuptiSetThreadIdType")?,
            call_name: library::typed_function(library, c"cuptiGetCallbackName")?,
            subscribe: library::typed_function(library, c"cuptiSubscribe")?,
            unsubscribe: library::typed_function(library, c"cuptiUnsubscribe")?,
            enable_callback: library::typed_function(library, c"cuptiEnableCallback")?,
            graph_node_id: library::typed_function(library, c"cuptiGetGraphNodeId")?,
            finalize: library::typed_function(library, c"cuptiFinalize")?,
            error_string: library::typed_function(library, c"cuptiGetResultString")?,
        })
    }
}

/// CUPTI's status when another client holds the process.
pub(super) const ANOTHER_CLIENT_STATUS: c_int =
    sys::CUptiResult::CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED as c_int;

impl CuptiApi {
    /// Converts a CUPTI status code to an error, unless it is success.
    pub fn check(&self, status: c_int, action: &str) -> Result<(), BackendError> {
        if status == 0 {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: the address is valid; CUPTI's texts live as long as the library.
        let text = unsafe {
            let has_text = (self.error_string)(status, &raw mut text) == 0;
            if has_text { text_of(text) } else { String::new() }
        };
        Err(cupti_refusal(status, action, &text))
    }

    /// Nanoseconds of the clock that CUPTI's records use.
    pub fn record_clock_ns(&self) -> u64 {
        let mut time = 0;
        // SAFETY: the call gets a pointer to a local variable, which is valid during the call.
        let has_time = unsafe { (self.timestamp)(&raw mut time) } == 0;
        if has_time { time } else { 0 }
    }
}

/// The error for a status with which CUPTI refuses an action.
pub(super) fn cupti_refusal(status: c_int, action: &str, text: &str) -> BackendError {
    BackendError::Launch(if status == ANOTHER_CLIENT_STATUS {
        format!(
            "another program records this process through CUPTI (Nsight Systems, Nsight Compute, \
             compute-sanitizer, a profiler), and only one can: run without it (CUPTI error \
             {status})"
        )
    } else {
        format!("CUPTI failed to {action}: {text} ({status})")
    })
}

/// A text from CUPTI; empty if the address is null.
///
/// # Safety
/// The address is null or the address of a C string.
pub unsafe fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_cupti_client_is_named_and_other_errors_keep_their_text() {
        let other = cupti_refusal(39, "begin", "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED");
        assert_eq!(
            other.to_string(),
            "launch failed: another program records this process through CUPTI (Nsight Systems, Nsight Compute, compute-sanitizer, a profiler), and only one can: run without it (CUPTI error 39)"
        );
        let refused = cupti_refusal(999, "record", "CUPTI_ERROR_UNKNOWN");
        assert_eq!(
            refused.to_string(),
            "launch failed: CUPTI failed to record: CUPTI_ERROR_UNKNOWN (999)"
        );
    }
}
