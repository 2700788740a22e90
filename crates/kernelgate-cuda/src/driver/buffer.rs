//! Device memory, and the error where there is too little of it.

use cudarc::driver::{CudaSlice, DevicePtr, result};

use super::status::failed;
use crate::BackendError;

/// Device memory, freed when dropped.
pub struct Buffer {
    pub(super) slice: CudaSlice<u8>,
}

impl Buffer {
    /// Its address on the device.
    pub fn address(&self) -> u64 {
        self.slice.device_ptr(self.slice.stream()).0
    }

    /// Its size, bytes.
    pub fn bytes(&self) -> usize {
        self.slice.num_bytes()
    }

    /// Sets every byte.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn fill(&mut self, byte: u8) -> Result<(), BackendError> {
        let stream = self.slice.stream();
        // SAFETY: the range is the whole allocation, which is alive.
        unsafe { result::memset_d8_async(self.address(), byte, self.bytes(), stream.cu_stream()) }
            .map_err(|error| failed("fill memory", &error))
    }

    /// Copies its first bytes to the host and waits for them.
    ///
    /// # Errors
    /// When the copy, or anything launched before it, failed.
    pub fn download(&self, target: &mut [u8]) -> Result<(), BackendError> {
        let view = self.slice.slice(0..target.len());
        let stream = self.slice.stream();
        stream.memcpy_dtoh(&view, target).map_err(|error| failed("copy from the GPU", &error))?;
        stream.synchronize().map_err(|error| failed("copy from the GPU", &error))
    }
}

/// The error for bytes that are not there; `available` where the driver tells.
pub fn short(bytes: u64, available: Option<u64>) -> BackendError {
    let gigabytes = |bytes: u64| format!("{:.2} GB", bytes as f64 / 1e9);
    BackendError::OutOfMemory {
        needed: format!("{} on the GPU", gigabytes(bytes)),
        available: available.map_or_else(|| "an unknown amount".to_owned(), gigabytes),
    }
}
