//! Buffers in device memory, and the error if device memory is too small.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, result};

use super::staged_copies::{self, PinnedStagingBuffer};
use crate::BackendError;
use crate::driver::driver_error::failed;

/// Device memory, freed with its last handle: a clone is another handle to the same memory.
#[derive(Clone)]
pub struct DeviceBuffer {
    slice: Arc<CudaSlice<u8>>,
    staging: Arc<PinnedStagingBuffer>,
}

impl DeviceBuffer {
    pub(crate) fn new(slice: CudaSlice<u8>, staging: Arc<PinnedStagingBuffer>) -> Self {
        Self { slice: Arc::new(slice), staging }
    }

    /// Returns the device address of the first byte of the buffer.
    pub fn address(&self) -> u64 {
        self.slice.device_ptr(self.slice.stream()).0
    }

    /// Ordinal of the GPU that holds the buffer.
    pub fn gpu_ordinal(&self) -> usize {
        self.slice.stream().context().ordinal()
    }

    /// Size of the device buffer, bytes.
    pub fn bytes(&self) -> usize {
        self.slice.num_bytes()
    }

    /// Sets every byte.
    pub fn fill(&self, byte: u8) -> Result<(), BackendError> {
        let stream = self.slice.stream();
        bind_context(stream.context())?;
        // SAFETY: the range is the whole allocation, which is alive.
        unsafe { result::memset_d8_async(self.address(), byte, self.bytes(), stream.cu_stream()) }
            .map_err(|error| failed("fill memory", &error))
    }

    /// Sets the bytes of a range, in the order of a stream.
    ///
    /// # Errors
    /// Fails if the range is not in the buffer, or the driver fails.
    pub fn fill_range(
        &self,
        stream: &CudaStream,
        range: Range<usize>,
        byte: u8,
    ) -> Result<(), BackendError> {
        let to = self.address_of_range(&range)?;
        // SAFETY: the range lies in the allocation, which is alive.
        unsafe { result::memset_d8_async(to, byte, range.len(), stream.cu_stream()) }
            .map_err(|error| failed("fill memory", &error))
    }

    /// Copies a range of another buffer over its own bytes from `offset` on, in the order of a
    /// stream. The source and target ranges do not overlap.
    ///
    /// # Errors
    /// Fails if a range is not in its buffer, or the driver fails.
    pub fn copy_range(
        &self,
        stream: &CudaStream,
        offset: usize,
        from: &Self,
        range: Range<usize>,
    ) -> Result<(), BackendError> {
        let to = self.address_of_range(&(offset..offset.saturating_add(range.len())))?;
        let source = from.address_of_range(&range)?;
        // SAFETY: both ranges lie in their allocations, which are alive.
        unsafe { result::memcpy_dtod_async(to, source, range.len(), stream.cu_stream()) }
            .map_err(|error| failed("copy on the GPU", &error))
    }

    /// Copies the first `bytes` bytes of another buffer, of this or of another GPU, in the order of
    /// a stream.
    ///
    /// # Errors
    /// Fails if either buffer is shorter than `bytes`, or the driver fails.
    pub fn copy_from(
        &self,
        stream: &CudaStream,
        from: &Self,
        bytes: usize,
    ) -> Result<(), BackendError> {
        let (to, source) =
            (self.address_of_range(&(0..bytes))?, from.address_of_range(&(0..bytes))?);
        // SAFETY: both ranges lie in their allocations, which are alive; addresses are unified.
        unsafe { result::memcpy_dtod_async(to, source, bytes, stream.cu_stream()) }
            .map_err(|error| failed("copy between GPUs", &error))
    }

    /// Address of a range.
    ///
    /// # Errors
    /// Fails if the range is not inside of the buffer.
    fn address_of_range(&self, range: &Range<usize>) -> Result<u64, BackendError> {
        if range.start > range.end || range.end > self.bytes() {
            return Err(BackendError::Launch(format!(
                "bytes {} to {} of a buffer of {}",
                range.start,
                range.end,
                self.bytes()
            )));
        }
        Ok(self.address() + range.start as u64)
    }

    /// Copies these bytes over its first ones, in the order of the stream, and waits for that.
    ///
    /// # Errors
    /// Fails if they are more than it has, or the copy, or anything launched before it, failed.
    pub fn overwrite_from_host(&self, bytes: &[u8]) -> Result<(), BackendError> {
        if bytes.len() > self.bytes() {
            return Err(BackendError::Launch(format!(
                "failed to copy {} bytes to a buffer of {}",
                bytes.len(),
                self.bytes()
            )));
        }
        let stream = self.slice.stream();
        bind_context(stream.context())?;
        if bytes.len() >= staged_copies::MIN_STAGED_BYTES {
            // SAFETY: the range lies in the allocation, which is alive.
            return unsafe { self.staging.upload_staged(stream, self.address(), bytes) };
        }
        let failed = |error| failed("copy to the GPU", &error);
        // SAFETY: the range lies in the allocation, which is alive; the source outlives the copy,
        // which has finished when this returns.
        unsafe { result::memcpy_htod_async(self.address(), bytes, stream.cu_stream()) }
            .map_err(failed)?;
        stream.synchronize().map_err(failed)
    }

    /// Copies bytes from `offset` on to the host by another stream: the present content, even if
    /// work is still queued on the device's own stream.
    ///
    /// # Errors
    /// Fails if the range is not in the buffer, or the copy failed.
    pub fn copy_to_host_on_stream(
        &self,
        stream: &CudaStream,
        offset: usize,
        target: &mut [u8],
    ) -> Result<(), BackendError> {
        if offset.checked_add(target.len()).is_none_or(|end| end > self.bytes()) {
            return Err(BackendError::Launch(format!(
                "failed to read {} bytes at {offset} of a buffer of {}",
                target.len(),
                self.bytes()
            )));
        }
        bind_context(stream.context())?;
        let failed = |error| failed("copy from the GPU", &error);
        let from = self.address() + offset as u64;
        // SAFETY: the range lies in the allocation, which is alive; the target outlives the copy,
        // which has finished when this returns.
        unsafe { result::memcpy_dtoh_async(target, from, stream.cu_stream()) }.map_err(failed)?;
        stream.synchronize().map_err(failed)
    }

    /// Copies the first bytes of the device buffer to the host and waits for the copy.
    pub fn download(&self, target: &mut [u8]) -> Result<(), BackendError> {
        let view = self.slice.slice(0..target.len());
        let stream = self.slice.stream();
        bind_context(stream.context())?;
        if target.len() >= staged_copies::MIN_STAGED_BYTES {
            // SAFETY: the range lies in the allocation, which is alive.
            return unsafe { self.staging.download_staged(stream, self.address(), target) };
        }
        stream.memcpy_dtoh(&view, target).map_err(|error| failed("copy from the GPU", &error))?;
        stream.synchronize().map_err(|error| failed("copy from the GPU", &error))
    }
}

/// Makes the context of a buffer current on the thread.
fn bind_context(context: &CudaContext) -> Result<(), BackendError> {
    context.bind_to_thread().map_err(|error| failed("make the context current", &error))
}

/// Error for too little device memory; `available` is set if the driver reports it.
pub fn out_of_memory_error(bytes: u64, available: Option<u64>) -> BackendError {
    BackendError::OutOfMemory { needed: bytes, available }
}
