//! Buffers in device memory: allocation handles, fills, copies, and the error for too little device
//! memory.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, result};

use super::staged_copies::{self, PinnedStagingBlocks};
use crate::BackendError;
use crate::driver::driver_error::error_for_failed_action;

/// A buffer in device memory, which is freed with its last handle; a clone is another handle to the
/// same memory.
#[derive(Clone)]
pub struct DeviceBuffer {
    slice: Arc<CudaSlice<u8>>,
    staging_blocks: Arc<PinnedStagingBlocks>,
}

impl DeviceBuffer {
    pub(crate) fn from_device_slice(
        slice: CudaSlice<u8>,
        staging: Arc<PinnedStagingBlocks>,
    ) -> Self {
        Self { slice: Arc::new(slice), staging_blocks: staging }
    }

    /// Returns the device address of the first byte of the buffer.
    pub fn device_address(&self) -> u64 {
        self.slice.device_ptr(self.slice.stream()).0
    }

    /// Ordinal of the GPU that holds the buffer.
    pub fn ordinal_of_gpu(&self) -> usize {
        self.slice.stream().context().ordinal()
    }

    /// Size of the device buffer, bytes.
    pub fn size_in_bytes(&self) -> usize {
        self.slice.num_bytes()
    }

    /// Sets every byte.
    pub fn fill_all_bytes(&self, byte: u8) -> Result<(), BackendError> {
        let stream = self.slice.stream();
        make_buffer_context_current(stream.context())?;
        // SAFETY: the range is the whole allocation of the buffer, which is alive.
        unsafe {
            result::memset_d8_async(
                self.device_address(),
                byte,
                self.size_in_bytes(),
                stream.cu_stream(),
            )
        }
        .map_err(|error| error_for_failed_action("fill memory", &error))
    }

    /// Sets the bytes of a range of the buffer to a value, as an operation in the order of a
    /// stream.
    ///
    /// # Errors
    /// Fails if the range is not inside the buffer, or the driver returns an error.
    pub fn fill_byte_range(
        &self,
        stream: &CudaStream,
        range: Range<usize>,
        byte: u8,
    ) -> Result<(), BackendError> {
        let to = self.device_address_of_range(&range)?;
        // SAFETY: the range lies in the allocation, which is alive.
        unsafe { result::memset_d8_async(to, byte, range.len(), stream.cu_stream()) }
            .map_err(|error| error_for_failed_action("fill memory", &error))
    }

    /// Copies a range of another buffer into this buffer from byte `offset` on, as an operation in
    /// the order of a stream. The source range and the target range must not overlap.
    ///
    /// # Errors
    /// Fails if a range is not inside its buffer, or the driver returns an error.
    pub fn copy_range_from(
        &self,
        stream: &CudaStream,
        offset: usize,
        from: &Self,
        range: Range<usize>,
    ) -> Result<(), BackendError> {
        let to = self.device_address_of_range(&(offset..offset.saturating_add(range.len())))?;
        let source = from.device_address_of_range(&range)?;
        // SAFETY: both ranges lie in their allocations, which are alive.
        unsafe { result::memcpy_dtod_async(to, source, range.len(), stream.cu_stream()) }
            .map_err(|error| error_for_failed_action("copy on the GPU", &error))
    }

    /// Copies the first `bytes` bytes of another buffer, of the same or another GPU, into this
    /// buffer, as an operation in the order of a stream.
    ///
    /// # Errors
    /// Fails if either buffer is shorter than `bytes`, or the driver returns an error.
    pub fn copy_first_bytes_from(
        &self,
        stream: &CudaStream,
        from: &Self,
        bytes: usize,
    ) -> Result<(), BackendError> {
        let (to, source) = (
            self.device_address_of_range(&(0..bytes))?,
            from.device_address_of_range(&(0..bytes))?,
        );
        // SAFETY: both ranges lie in their allocations, which are alive; addresses are unique
        // across all GPUs.
        unsafe { result::memcpy_dtod_async(to, source, bytes, stream.cu_stream()) }
            .map_err(|error| error_for_failed_action("copy between GPUs", &error))
    }

    /// Device address at which a byte range of the buffer begins.
    ///
    /// # Errors
    /// Fails if the range is not inside the buffer.
    fn device_address_of_range(&self, range: &Range<usize>) -> Result<u64, BackendError> {
        if range.start > range.end || range.end > self.size_in_bytes() {
            return Err(BackendError::ComputationFailed(format!(
                "bytes {} to {} of a buffer of {}",
                range.start,
                range.end,
                self.size_in_bytes()
            )));
        }
        Ok(self.device_address() + range.start as u64)
    }

    /// Copies bytes of the host into the first bytes of the buffer, in the order of the device's
    /// stream, and waits for the copy.
    ///
    /// # Errors
    /// Fails if the buffer is shorter than `bytes`, or if the copy or earlier work on the stream
    /// failed.
    pub fn overwrite_first_bytes_from_host(&self, bytes: &[u8]) -> Result<(), BackendError> {
        if bytes.len() > self.size_in_bytes() {
            return Err(BackendError::ComputationFailed(format!(
                "failed to copy {} bytes to a buffer of {}",
                bytes.len(),
                self.size_in_bytes()
            )));
        }
        let stream = self.slice.stream();
        make_buffer_context_current(stream.context())?;
        if bytes.len() >= staged_copies::MIN_BYTES_FOR_STAGED_COPY {
            // SAFETY: the range lies in the allocation, which is alive.
            return unsafe {
                self.staging_blocks.upload_through_pinned_blocks(
                    stream,
                    self.device_address(),
                    bytes,
                )
            };
        }
        let failed = |error| error_for_failed_action("copy to the GPU", &error);
        // SAFETY: the range lies in the allocation, which is alive; the source outlives the copy,
        // which has finished when this returns.
        unsafe { result::memcpy_htod_async(self.device_address(), bytes, stream.cu_stream()) }
            .map_err(failed)?;
        stream.synchronize().map_err(failed)
    }

    /// Copies bytes of the buffer from `offset` on to the host by another stream, which does not
    /// wait for work that is queued on the device's stream.
    ///
    /// # Errors
    /// Fails if the range is not inside the buffer, or the copy failed.
    pub fn copy_to_host_on_other_stream(
        &self,
        stream: &CudaStream,
        offset: usize,
        target: &mut [u8],
    ) -> Result<(), BackendError> {
        if offset.checked_add(target.len()).is_none_or(|end| end > self.size_in_bytes()) {
            return Err(BackendError::ComputationFailed(format!(
                "failed to read {} bytes at {offset} of a buffer of {}",
                target.len(),
                self.size_in_bytes()
            )));
        }
        make_buffer_context_current(stream.context())?;
        let failed = |error| error_for_failed_action("copy from the GPU", &error);
        let from = self.device_address() + offset as u64;
        // SAFETY: the range lies in the allocation, which is alive; the target outlives the copy,
        // which has finished when this returns.
        unsafe { result::memcpy_dtoh_async(target, from, stream.cu_stream()) }.map_err(failed)?;
        stream.synchronize().map_err(failed)
    }

    /// Copies the first bytes of the buffer to the host, in the order of the device's stream, and
    /// waits for the copy.
    pub fn download_first_bytes(&self, target: &mut [u8]) -> Result<(), BackendError> {
        let view = self.slice.slice(0..target.len());
        let stream = self.slice.stream();
        make_buffer_context_current(stream.context())?;
        if target.len() >= staged_copies::MIN_BYTES_FOR_STAGED_COPY {
            // SAFETY: the range lies in the allocation, which is alive.
            return unsafe {
                self.staging_blocks.download_through_pinned_blocks(
                    stream,
                    self.device_address(),
                    target,
                )
            };
        }
        stream
            .memcpy_dtoh(&view, target)
            .map_err(|error| error_for_failed_action("copy from the GPU", &error))?;
        stream.synchronize().map_err(|error| error_for_failed_action("copy from the GPU", &error))
    }
}

/// Makes the CUDA context of a buffer current on the calling thread.
fn make_buffer_context_current(context: &CudaContext) -> Result<(), BackendError> {
    context
        .bind_to_thread()
        .map_err(|error| error_for_failed_action("make the context current", &error))
}

/// The error for an allocation that needs more device memory than is free; `available` is `None` if
/// the driver does not report the free memory.
pub fn error_for_too_little_memory(bytes: u64, available: Option<u64>) -> BackendError {
    BackendError::OutOfMemory { needed_bytes: bytes, free_bytes: available }
}
