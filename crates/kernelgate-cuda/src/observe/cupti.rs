//! CUPTI's activity records, taken in process.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::CStr;
use std::sync::{Mutex, PoisonError};

use cudarc::cupti::result::{CuptiError, activity};
use cudarc::cupti::sys;
use cudarc::driver::sys::CUcontext;

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
        if library::load(Library::Cupti).is_none() {
            return Ok(None);
        }
        activity::register_callbacks(Some(give_buffer), Some(take_buffer))
            .map_err(failed("begin"))?;
        activity::enable(KIND).map_err(failed("record kernels"))?;
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
        // 1: also buffers that are not full.
        activity::flush_all(1).map_err(failed("hand over its records"))?;
        let mut records = take();
        records.sort_by_key(|record| record.start_ns);
        Ok(records)
    }
}

impl Drop for KernelTrace {
    fn drop(&mut self) {
        let _ = activity::disable(KIND);
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

extern "C" fn take_buffer(_: CUcontext, _: u32, buffer: *mut u8, _: usize, valid_bytes: usize) {
    if buffer.is_null() {
        return;
    }
    let mut records = RECORDS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut record: *mut sys::CUpti_Activity = std::ptr::null_mut();
    // SAFETY: the buffer is one of ours with `valid_bytes` of records, which this walks until CUPTI
    // says that there are no more; a record of that kind has that layout in CUDA 13, and its
    // name lives as long as its module.
    unsafe {
        while activity::get_next_record(buffer, valid_bytes, &raw mut record).is_ok() {
            if (*record).kind != KIND {
                continue;
            }
            let kernel = record.cast::<sys::CUpti_ActivityKernel10>().read_unaligned();
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

fn failed(action: &'static str) -> impl Fn(CuptiError) -> BackendError {
    move |error| BackendError::Launch(format!("CUPTI failed to {action}: {error}"))
}
