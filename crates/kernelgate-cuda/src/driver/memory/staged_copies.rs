//! Large copies between host and device by way of pinned memory.
//!
//! The driver copies ordinary host memory on one core, by way of a pinned block of its own. All CPU
//! cores fill or empty one pinned block while the device copies the other block.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaStream, result, sys};
use rayon::prelude::*;

use crate::BackendError;
use crate::driver::driver_error::failed;

const STAGING_BLOCK_BYTES: usize = 16 << 20;
/// Number of bytes that each task copies on the host.
const COPIED_PIECE_BYTES: usize = 1 << 19;
/// Smallest copy that is staged through pinned memory, bytes; the driver makes shorter copies.
pub const MIN_STAGED_BYTES: usize = 4 << 20;

/// Two blocks of pinned memory, made for the first large copy.
pub struct PinnedStagingBuffer {
    blocks: Mutex<Option<[PinnedBlock; 2]>>,
    /// The context, which must live until the blocks are freed.
    context: Arc<CudaContext>,
}

impl PinnedStagingBuffer {
    /// Makes a staging buffer for copies to and from the context's device.
    pub const fn new(context: Arc<CudaContext>) -> Self {
        Self { blocks: Mutex::new(None), context }
    }

    /// Copies host memory to a device address, in the order of the stream, and waits for the copy.
    ///
    /// # Safety
    /// `bytes.len()` bytes can be written at the address.
    pub unsafe fn upload_staged(
        &self,
        stream: &CudaStream,
        address: u64,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        self.with_blocks(|blocks| {
            for (i, from) in bytes.chunks(STAGING_BLOCK_BYTES).enumerate() {
                let block = &mut blocks[i % 2].staged_bytes_mut()[..from.len()];
                // While this block is filled, the device still copies the other block.
                copy_with_threads(from, block);
                stream.synchronize().map_err(|error| failed("copy to the GPU", &error))?;
                let to = address + (i * STAGING_BLOCK_BYTES) as u64;
                // SAFETY: the range lies in memory that the caller guarantees; the block is written
                // again only after the stream was waited for, two rounds later or with the next
                // copy.
                unsafe { result::memcpy_htod_async(to, block, stream.cu_stream()) }
                    .map_err(|error| failed("copy to the GPU", &error))?;
            }
            stream.synchronize().map_err(|error| failed("copy to the GPU", &error))
        })
    }

    /// Copies from a device address to host memory, in the order of the stream, and waits for the
    /// copy.
    ///
    /// # Safety
    /// `bytes.len()` bytes can be read at the address.
    pub unsafe fn download_staged(
        &self,
        stream: &CudaStream,
        address: u64,
        target: &mut [u8],
    ) -> Result<(), BackendError> {
        let wait = || stream.synchronize().map_err(|error| failed("copy from the GPU", &error));
        self.with_blocks(|blocks| {
            let mut arrived: Option<(usize, &mut [u8])> = None;
            for (i, to) in target.chunks_mut(STAGING_BLOCK_BYTES).enumerate() {
                let block = &mut blocks[i % 2].staged_bytes_mut()[..to.len()];
                let from = address + (i * STAGING_BLOCK_BYTES) as u64;
                // SAFETY: the range lies in memory that the caller guarantees; the block is read
                // only after the stream was waited for.
                unsafe { result::memcpy_dtoh_async(block, from, stream.cu_stream()) }
                    .map_err(|error| failed("copy from the GPU", &error))?;
                if let Some((before, to)) = arrived.take() {
                    copy_with_threads(&blocks[before].bytes()[..to.len()], to);
                }
                wait()?;
                arrived = Some((i % 2, to));
            }
            if let Some((before, to)) = arrived {
                copy_with_threads(&blocks[before].bytes()[..to.len()], to);
            }
            Ok(())
        })
    }

    fn with_blocks<T>(
        &self,
        work: impl FnOnce(&mut [PinnedBlock; 2]) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        if blocks.is_none() {
            self.context.bind_to_thread().map_err(|error| failed("pin host memory", &error))?;
            *blocks = Some([PinnedBlock::new()?, PinnedBlock::new()?]);
        }
        work(blocks.as_mut().expect("just made"))
    }
}

impl Drop for PinnedStagingBuffer {
    fn drop(&mut self) {
        // Freeing the blocks needs the context, which may be current on another thread.
        let _ = self.context.bind_to_thread();
    }
}

/// Copies on all cores.
fn copy_with_threads(from: &[u8], to: &mut [u8]) {
    to.par_chunks_mut(COPIED_PIECE_BYTES).zip(from.par_chunks(COPIED_PIECE_BYTES)).for_each(
        |(to, from)| {
            to.copy_from_slice(from);
        },
    );
}

/// A block of pinned host memory for copies.
struct PinnedBlock(NonNull<u8>);

// SAFETY: plain memory of the process, which any thread may read, write and free.
unsafe impl Send for PinnedBlock {}

impl PinnedBlock {
    /// Allocates a pinned block in the current context.
    fn new() -> Result<Self, BackendError> {
        // SAFETY: the caller has bound a context to this thread.
        let memory =
            unsafe { result::malloc_host(STAGING_BLOCK_BYTES, sys::CU_MEMHOSTALLOC_PORTABLE) }
                .map_err(|error| failed("pin host memory", &error))?;
        let memory = NonNull::new(memory.cast::<u8>()).ok_or_else(|| {
            BackendError::Launch("failed to pin host memory: no address".to_owned())
        })?;
        // SAFETY: as long as that; from here on every byte is initialised.
        unsafe { memory.as_ptr().write_bytes(0, STAGING_BLOCK_BYTES) };
        Ok(Self(memory))
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the pinned allocation has this length, is initialised, and lives as long as
        // `self`.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), STAGING_BLOCK_BYTES) }
    }

    fn staged_bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the pinned allocation has this length and is initialised, and `self` is borrowed
        // exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), STAGING_BLOCK_BYTES) }
    }
}

impl Drop for PinnedBlock {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated by `malloc_host` and is not used again. If the context
        // is broken, the memory cannot be freed, and the process ends anyway.
        let _ = unsafe { result::free_host(self.0.as_ptr().cast()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::lock_first_gpu;

    #[test]
    fn large_copies_to_the_device_and_back_keep_every_bit() {
        let Some((device, _one_at_a_time)) = lock_first_gpu() else { return };
        for len in [
            MIN_STAGED_BYTES,
            STAGING_BLOCK_BYTES,
            2 * STAGING_BLOCK_BYTES + 1,
            3 * STAGING_BLOCK_BYTES + 12_345,
        ] {
            let bytes: Vec<u8> = (0..len).map(|i| (i ^ (i >> 9) ^ (i >> 17)) as u8).collect();
            let buffer = device.upload(&bytes).unwrap();
            let mut back = vec![0; len];
            buffer.download(&mut back).unwrap();
            assert!(back == bytes, "{len} bytes");
            // Overwriting a part leaves the rest unchanged.
            buffer.overwrite_from_host(&bytes[1..MIN_STAGED_BYTES]).unwrap();
            buffer.download(&mut back).unwrap();
            assert!(back[..MIN_STAGED_BYTES - 1] == bytes[1..MIN_STAGED_BYTES], "{len} bytes");
            assert!(back[MIN_STAGED_BYTES - 1..] == bytes[MIN_STAGED_BYTES - 1..], "{len} bytes");
        }
    }
}
