//! Pinned host memory by which the host and kernels on the device communicate.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use cudarc::driver::{result, sys};

use crate::BackendError;
use crate::driver::driver_error::error_for_failed_action;

/// Two words of pinned host memory on separate cache lines: one that the host writes and the device
/// reads, and one in the other direction.
pub struct PinnedHostDeviceMailbox {
    words: NonNull<AtomicU32>,
}

/// Distance between the two words of a mailbox, in 4-byte words.
const MAILBOX_WORD_DISTANCE_IN_WORDS: usize = 64;

/// Allocates `count` values in pinned host memory, which are not initialised.
fn allocate_pinned_words<T>(count: usize) -> Result<NonNull<T>, BackendError> {
    let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
    // SAFETY: a CUDA context is current on this thread, because the device that uses the words was
    // opened on it.
    let memory = unsafe { result::malloc_host(count * size_of::<T>(), flags) }
        .map_err(|error| error_for_failed_action("pin host memory", &error))?;
    NonNull::new(memory.cast()).ok_or_else(|| {
        BackendError::ComputationFailed("failed to pin host memory: no address".to_owned())
    })
}

impl PinnedHostDeviceMailbox {
    /// Allocates the mailbox.
    pub fn new() -> Result<Self, BackendError> {
        let mailbox = Self { words: allocate_pinned_words(2 * MAILBOX_WORD_DISTANCE_IN_WORDS)? };
        mailbox.word_read_by_device().store(0, Ordering::Release);
        mailbox.word_written_by_device().store(0, Ordering::Release);
        Ok(mailbox)
    }

    /// The mailbox word that the host writes and the device reads.
    pub fn word_read_by_device(&self) -> &AtomicU32 {
        // SAFETY: the allocation holds 2 * MAILBOX_WORDS_APART words, lives as long as `self`,
        // and is only ever accessed atomically.
        unsafe { self.words.as_ref() }
    }

    /// The mailbox word that the device writes and the host reads.
    pub fn word_written_by_device(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { self.words.add(MAILBOX_WORD_DISTANCE_IN_WORDS).as_ref() }
    }

    /// Addresses of the word that the device reads and of the word that the device writes; host and
    /// device use the same addresses.
    pub fn addresses_of_both_words(&self) -> (u64, u64) {
        let base = self.words.as_ptr() as u64;
        (base, base + (MAILBOX_WORD_DISTANCE_IN_WORDS * size_of::<AtomicU32>()) as u64)
    }
}

impl Drop for PinnedHostDeviceMailbox {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated by `malloc_host` and is not used again. If the context
        // is broken, the memory cannot be freed, and the process ends anyway.
        let _ = unsafe { result::free_host(self.words.as_ptr().cast()) };
    }
}

/// 64-bit words in pinned host memory that kernels write. The host can read the words of a kernel
/// that has ended while later work still runs on the device.
pub struct PinnedWordsFromDevice {
    words: NonNull<AtomicU64>,
    word_count: usize,
}

impl PinnedWordsFromDevice {
    /// Allocates `count` pinned 64-bit words with the value zero.
    pub fn with_zeroed_words(count: usize) -> Result<Self, BackendError> {
        let pinned = Self { words: allocate_pinned_words(count)?, word_count: count };
        (0..count).for_each(|index| pinned.word_at(index).store(0, Ordering::Release));
        Ok(pinned)
    }

    /// Returns the pinned word with this index.
    ///
    /// # Panics
    /// Panics if `index` is not less than the number of words.
    pub fn word_at(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.word_count, "word {index} of {}", self.word_count);
        // SAFETY: the allocation holds `word_count` words, lives as long as `self`, and is only
        // ever accessed atomically by the host.
        unsafe { self.words.add(index).as_ref() }
    }

    /// Address of a pinned word, which is the same for host and device.
    pub fn address_of_word(&self, index: usize) -> u64 {
        std::ptr::from_ref(self.word_at(index)) as u64
    }
}

impl Drop for PinnedWordsFromDevice {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated by `malloc_host` and is not used again.
        let _ = unsafe { result::free_host(self.words.as_ptr().cast()) };
    }
}
