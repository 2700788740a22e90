//! Large copies between host and device through two blocks of pinned host memory.
//!
//! By itself, the driver copies ordinary (pageable) host memory on one CPU core, through a pinned
//! block of its own. Here all CPU cores fill or empty one pinned block while the device copies the
//! other block.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaStream, result, sys};
use rayon::prelude::*;

use crate::BackendError;
use crate::driver::driver_error::error_for_failed_action;

const PINNED_STAGING_BLOCK_BYTES: usize = 16 << 20;
/// Number of bytes that each task of the thread pool copies on the host.
const BYTES_PER_COPY_TASK: usize = 1 << 19;
/// Smallest copy in bytes that goes through the pinned blocks; shorter copies are left to the
/// driver.
pub const MIN_BYTES_FOR_STAGED_COPY: usize = 4 << 20;

/// Two blocks of pinned host memory, allocated at the first large copy.
pub struct PinnedStagingBlocks {
    blocks: Mutex<Option<[PinnedStagingBlock; 2]>>,
    /// The CUDA context, which must live until the pinned blocks are freed.
    context: Arc<CudaContext>,
}

impl PinnedStagingBlocks {
    /// Makes the staging for copies to and from the context's device, without allocating the blocks
    /// yet.
    pub const fn for_context(context: Arc<CudaContext>) -> Self {
        Self { blocks: Mutex::new(None), context }
    }

    /// Copies host memory to a device address through the pinned blocks, in the order of the
    /// stream, and waits for the copy.
    ///
    /// # Safety
    /// The caller guarantees that `bytes.len()` bytes can be written at the device address.
    pub unsafe fn upload_through_pinned_blocks(
        &self,
        stream: &CudaStream,
        address: u64,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        self.with_lazily_allocated_blocks(|blocks| {
            for (i, from) in bytes.chunks(PINNED_STAGING_BLOCK_BYTES).enumerate() {
                let block = &mut blocks[i % 2].all_bytes_mut()[..from.len()];
                // While the CPU fills one pinned block, the device copies the other block.
                copy_with_all_cores(from, block);
                stream
                    .synchronize()
                    .map_err(|error| error_for_failed_action("copy to the GPU", &error))?;
                let to = address + (i * PINNED_STAGING_BLOCK_BYTES) as u64;
                // SAFETY: the caller guarantees the device range; a block is filled again only
                // after the stream was waited for.
                unsafe { result::memcpy_htod_async(to, block, stream.cu_stream()) }
                    .map_err(|error| error_for_failed_action("copy to the GPU", &error))?;
            }
            stream.synchronize().map_err(|error| error_for_failed_action("copy to the GPU", &error))
        })
    }

    /// Copies from a device address to host memory through the pinned blocks, in the order of the
    /// stream, and waits for the copy.
    ///
    /// # Safety
    /// The caller guarantees that `bytes.len()` bytes can be read at the device address.
    pub unsafe fn download_through_pinned_blocks(
        &self,
        stream: &CudaStream,
        address: u64,
        target: &mut [u8],
    ) -> Result<(), BackendError> {
        let wait = || {
            stream
                .synchronize()
                .map_err(|error| error_for_failed_action("copy from the GPU", &error))
        };
        self.with_lazily_allocated_blocks(|blocks| {
            let mut arrived: Option<(usize, &mut [u8])> = None;
            for (i, to) in target.chunks_mut(PINNED_STAGING_BLOCK_BYTES).enumerate() {
                let block = &mut blocks[i % 2].all_bytes_mut()[..to.len()];
                let from = address + (i * PINNED_STAGING_BLOCK_BYTES) as u64;
                // SAFETY: the caller guarantees the device range; the pinned block is read only
                // after the stream was waited for.
                unsafe { result::memcpy_dtoh_async(block, from, stream.cu_stream()) }
                    .map_err(|error| error_for_failed_action("copy from the GPU", &error))?;
                if let Some((before, to)) = arrived.take() {
                    copy_with_all_cores(&blocks[before].all_bytes()[..to.len()], to);
                }
                wait()?;
                arrived = Some((i % 2, to));
            }
            if let Some((before, to)) = arrived {
                copy_with_all_cores(&blocks[before].all_bytes()[..to.len()], to);
            }
            Ok(())
        })
    }

    fn with_lazily_allocated_blocks<T>(
        &self,
        work: impl FnOnce(&mut [PinnedStagingBlock; 2]) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        if blocks.is_none() {
            self.context
                .bind_to_thread()
                .map_err(|error| error_for_failed_action("pin host memory", &error))?;
            *blocks = Some([PinnedStagingBlock::allocate()?, PinnedStagingBlock::allocate()?]);
        }
        work(blocks.as_mut().expect("just made"))
    }
}

impl Drop for PinnedStagingBlocks {
    fn drop(&mut self) {
        // Freeing the pinned blocks needs the CUDA context, which may not be current on this
        // thread.
        let _ = self.context.bind_to_thread();
    }
}

/// Copies host memory to host memory on all CPU cores.
fn copy_with_all_cores(from: &[u8], to: &mut [u8]) {
    to.par_chunks_mut(BYTES_PER_COPY_TASK).zip(from.par_chunks(BYTES_PER_COPY_TASK)).for_each(
        |(to, from)| {
            to.copy_from_slice(from);
        },
    );
}

/// A block of pinned host memory for staged copies.
struct PinnedStagingBlock(NonNull<u8>);

// SAFETY: the block is plain memory of the process, which any thread may read, write and free.
unsafe impl Send for PinnedStagingBlock {}

impl PinnedStagingBlock {
    /// Allocates a pinned block in the CUDA context that is current on this thread.
    fn allocate() -> Result<Self, BackendError> {
        // SAFETY: the caller has bound a context to this thread.
        let memory = unsafe {
            result::malloc_host(PINNED_STAGING_BLOCK_BYTES, sys::CU_MEMHOSTALLOC_PORTABLE)
        }
        .map_err(|error| error_for_failed_action("pin host memory", &error))?;
        let memory = NonNull::new(memory.cast::<u8>()).ok_or_else(|| {
            BackendError::ComputationFailed("failed to pin host memory: no address".to_owned())
        })?;
        // SAFETY: the allocation has this many bytes, and all of them are initialised here.
        unsafe { memory.as_ptr().write_bytes(0, PINNED_STAGING_BLOCK_BYTES) };
        Ok(Self(memory))
    }

    fn all_bytes(&self) -> &[u8] {
        // SAFETY: the pinned allocation has this length, is initialised, and lives as long as
        // `self`.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), PINNED_STAGING_BLOCK_BYTES) }
    }

    fn all_bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the pinned allocation has this length and is initialised, and `self` is borrowed
        // exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), PINNED_STAGING_BLOCK_BYTES) }
    }
}

impl Drop for PinnedStagingBlock {
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
            MIN_BYTES_FOR_STAGED_COPY,
            PINNED_STAGING_BLOCK_BYTES,
            2 * PINNED_STAGING_BLOCK_BYTES + 1,
            3 * PINNED_STAGING_BLOCK_BYTES + 12_345,
        ] {
            let bytes: Vec<u8> = (0..len).map(|i| (i ^ (i >> 9) ^ (i >> 17)) as u8).collect();
            let buffer = device.upload(&bytes).unwrap();
            let mut back = vec![0; len];
            buffer.download_first_bytes(&mut back).unwrap();
            assert!(back == bytes, "{len} bytes");
            // Overwriting a part of the buffer leaves the other bytes unchanged.
            buffer.overwrite_first_bytes_from_host(&bytes[1..MIN_BYTES_FOR_STAGED_COPY]).unwrap();
            buffer.download_first_bytes(&mut back).unwrap();
            assert!(
                back[..MIN_BYTES_FOR_STAGED_COPY - 1] == bytes[1..MIN_BYTES_FOR_STAGED_COPY],
                "{len} bytes"
            );
            assert!(
                back[MIN_BYTES_FOR_STAGED_COPY - 1..] == bytes[MIN_BYTES_FOR_STAGED_COPY - 1..],
                "{len} bytes"
            );
        }
    }
}
