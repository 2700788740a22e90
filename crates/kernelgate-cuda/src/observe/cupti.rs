//! CUPTI's activity records, taken in process.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::cupti::sys;

use crate::BackendError;
use crate::Device;
use crate::library::{self, Library};

/// A kernel as the hardware saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelRecord {
    /// Its symbol.
    pub name: String,
    /// When it began, nanoseconds of the device's clock.
    pub start_ns: u64,
    /// When it had finished, nanoseconds of the device's clock.
    pub end_ns: u64,
}

impl KernelRecord {
    /// How long it ran, nanoseconds.
    pub const fn elapsed_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }
}

/// What CUPTI fills and hands back.
const BUFFER_BYTES: usize = 4 << 20;
const BUFFER_ALIGN: usize = 8;
const KIND: sys::CUpti_ActivityKind =
    sys::CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;

/// Records that arrived and were not taken yet. One a process, because CUPTI's callbacks are.
static RECORDS: Mutex<Vec<KernelRecord>> = Mutex::new(Vec::new());

/// Kernels are being recorded until this is stopped or dropped. It slows launches: never while
/// timing for a result.
pub struct KernelTrace(());

impl KernelTrace {
    /// Begins; `None` where CUPTI is missing.
    ///
    /// # Errors
    /// When CUPTI refuses, for example because another profiler holds the device.
    pub fn start() -> Result<Option<Self>, BackendError> {
        let Some(api) = api() else { return Ok(None) };
        // SAFETY: the callbacks live as long as the process.
        let begun = unsafe { (api.register)(give_buffer, take_buffer) };
        api.check(begun, "begin")?;
        // SAFETY: a kind that every version has.
        api.check(unsafe { (api.enable)(KIND) }, "record kernels")?;
        take();
        Ok(Some(Self(())))
    }

    /// Waits for the device and returns what ran since the start or the last call, in order of
    /// their start.
    ///
    /// # Errors
    /// When the device or CUPTI fails.
    pub fn take(&self, device: &Device) -> Result<Vec<KernelRecord>, BackendError> {
        device.synchronize()?;
        if let Some(api) = api() {
            // 1: also buffers that are not full.
            // SAFETY: the callbacks were registered.
            api.check(unsafe { (api.flush)(1) }, "hand over its records")?;
        }
        let mut records = take();
        records.sort_by_key(|record| record.start_ns);
        Ok(records)
    }
}

impl Drop for KernelTrace {
    fn drop(&mut self) {
        // SAFETY: a kind that every version has.
        let _ = api().map(|api| unsafe { (api.disable)(KIND) });
    }
}

fn take() -> Vec<KernelRecord> {
    std::mem::take(&mut *RECORDS.lock().unwrap_or_else(PoisonError::into_inner))
}

fn layout() -> Layout {
    Layout::from_size_align(BUFFER_BYTES, BUFFER_ALIGN)
        .expect("the size and alignment are constants")
}

extern "C" fn give_buffer(buffer: *mut *mut u8, size: *mut usize, most_records: *mut usize) {
    // SAFETY: CUPTI passes three valid addresses. A null buffer is its documented answer to no
    // memory. It is freed below.
    unsafe {
        *buffer = alloc(layout());
        *size = if (*buffer).is_null() { 0 } else { BUFFER_BYTES };
        // As many as fit.
        *most_records = 0;
    }
}

extern "C" fn take_buffer(_: *mut c_void, _: u32, buffer: *mut u8, _: usize, valid_bytes: usize) {
    let (false, Some(api)) = (buffer.is_null(), api()) else { return };
    let mut records = RECORDS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut record: *mut sys::CUpti_Activity = std::ptr::null_mut();
    // SAFETY: the buffer is one of ours with `valid_bytes` of records, which this walks until CUPTI
    // says that there are no more; a record of that kind has that layout in CUDA 12, of which that
    // of CUDA 13 is a continuation, and its name lives as long as its module.
    unsafe {
        while (api.next)(buffer, valid_bytes, &raw mut record) == 0 {
            if (*record).kind != KIND {
                continue;
            }
            let kernel = record.cast::<sys::CUpti_ActivityKernel9>().read_unaligned();
            let name = if kernel.name.is_null() {
                "".into()
            } else {
                CStr::from_ptr(kernel.name).to_string_lossy()
            };
            records.push(KernelRecord {
                name: name.into_owned(),
                start_ns: kernel.start,
                end_ns: kernel.end,
            });
        }
        dealloc(buffer, layout());
    }
}

type GiveBuffer = extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type TakeBuffer = extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

/// CUPTI's functions, of the library that was opened; a result of 0 is success.
struct Api {
    register: unsafe extern "C" fn(GiveBuffer, TakeBuffer) -> c_int,
    enable: unsafe extern "C" fn(sys::CUpti_ActivityKind) -> c_int,
    disable: unsafe extern "C" fn(sys::CUpti_ActivityKind) -> c_int,
    flush: unsafe extern "C" fn(u32) -> c_int,
    next: unsafe extern "C" fn(*mut u8, usize, *mut *mut sys::CUpti_Activity) -> c_int,
    error_string: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
}

fn api() -> Option<&'static Api> {
    static API: OnceLock<Option<Api>> = OnceLock::new();
    API.get_or_init(load).as_ref()
}

fn load() -> Option<Api> {
    let library = Library::Cupti;
    // SAFETY: the types are those of `cupti_activity.h`, the same from CUDA 12 to 13, where results
    // are enumerations of the size of an int.
    unsafe {
        Some(Api {
            register: library::typed(library, c"cuptiActivityRegisterCallbacks")?,
            enable: library::typed(library, c"cuptiActivityEnable")?,
            disable: library::typed(library, c"cuptiActivityDisable")?,
            flush: library::typed(library, c"cuptiActivityFlushAll")?,
            next: library::typed(library, c"cuptiActivityGetNextRecord")?,
            error_string: library::typed(library, c"cuptiGetResultString")?,
        })
    }
}

impl Api {
    fn check(&self, status: c_int, action: &str) -> Result<(), BackendError> {
        if status == 0 {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: the address is valid; CUPTI's texts live as long as the library.
        let text = unsafe {
            let told = (self.error_string)(status, &raw mut text) == 0 && !text.is_null();
            if told { CStr::from_ptr(text).to_string_lossy() } else { "unknown".into() }
        };
        Err(BackendError::Launch(format!("CUPTI failed to {action}: {text} ({status})")))
    }
}
