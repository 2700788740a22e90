//! Pinned host memory through which host and device communicate.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use cudarc::driver::{result, sys};

use crate::BackendError;
use crate::driver::driver_error::failed;

/// Two words of pinned host memory that the device reads and writes, on cache lines of their own.
pub struct HostDeviceMailbox {
    words: NonNull<AtomicU32>,
}

/// Distance between the two words of a mailbox, in words of 4 bytes.
const MAILBOX_WORD_DISTANCE: usize = 64;

/// Allocates `count` words of pinned host memory, which are not initialised.
fn pin_words<T>(count: usize) -> Result<NonNull<T>, BackendError> {
    let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
    // SAFETY: a context is current on this thread: the device of the words was opened here.
    let memory = unsafe { result::malloc_host(count * size_of::<T>(), flags) }
        .map_err(|error| failed("pin host memory", &error))?;
    NonNull::new(memory.cast())
        .ok_or_else(|| BackendError::Launch("failed to pin host memory: no address".to_owned()))
}

impl HostDeviceMailbox {
    /// Allocates the mailbox.
    pub fn new() -> Result<Self, BackendError> {
        let mailbox = Self { words: pin_words(2 * MAILBOX_WORD_DISTANCE)? };
        mailbox.word_to_device().store(0, Ordering::Release);
        mailbox.word_from_device().store(0, Ordering::Release);
        Ok(mailbox)
    }

    /// The mailbox word that the device reads.
    pub fn word_to_device(&self) -> &AtomicU32 {
        // SAFETY: the allocation holds 2 * MAILBOX_WORD_DISTANCE words, lives as long as `self`,
        // and is only ever accessed atomically.
        unsafe { self.words.as_ref() }
    }

    /// The mailbox word that the device writes.
    pub fn word_from_device(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { self.words.add(MAILBOX_WORD_DISTANCE).as_ref() }
    }

    /// Addresses of the words to the device and from it; they are the same on the device.
    pub fn word_addresses(&self) -> (u64, u64) {
        let base = self.words.as_ptr() as u64;
        (base, base + (MAILBOX_WORD_DISTANCE * size_of::<AtomicU32>()) as u64)
    }
}

impl Drop for HostDeviceMailbox {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated by `malloc_host` and is not used again. If the context
        // is broken, the memory cannot be freed, and the process ends anyway.
        let _ = unsafe { result::free_host(self.words.as_ptr().cast()) };
    }
}

/// Pinned host memory into which kernels write 64-bit words. The host reads the words of a kernel
/// that has ended while later work runs on the device.
pub struct PinnedWords {
    words: NonNull<AtomicU64>,
    count: usize,
}

impl PinnedWords {
    /// Allocates `count` words, which are zero.
    pub fn new(count: usize) -> Result<Self, BackendError> {
        let pinned = Self { words: pin_words(count)?, count };
        (0..count).for_each(|index| pinned.word(index).store(0, Ordering::Release));
        Ok(pinned)
    }

    /// Returns one of the pinned words.
    ///
    /// # Panics
    /// If there are no more than `index` words.
    pub fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.count, "word {index} of {}", self.count);
        // SAFETY: the allocation holds `count` words, lives as long as `self`, and is only ever
        // accessed atomically by the host.
        unsafe { self.words.add(index).as_ref() }
    }

    /// Address of a word, which is the same on the device.
    pub fn address(&self, index: usize) -> u64 {
        std::ptr::from_ref(self.word(index)) as u64
    }
}

impl Drop for PinnedWords {
    fn drop(&mut self) {
        // SAFETY: as for the mailbox.
        let _ = unsafe { result::free_host(self.words.as_ptr().cast()) };
    }
}
