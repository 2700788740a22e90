//! The handle of a stream that other code made: by another version of cudarc, by a C or C++
//! library, by another framework. All these types of handles stand for a `CUstream` of the driver.

use std::fmt;

use cudarc::driver::sys;

/// Handle of a stream, as the driver knows it: `CUstream`, `cudaStream_t`.
///
/// The driver cannot check a stream handle completely: the caller promises that the stream exists
/// and outlives this value. The driver recognises many invalid handles, but not all handles.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawStream(usize);

impl RawStream {
    /// The legacy default stream of the current context, by its explicit handle
    /// (`CU_STREAM_LEGACY`). The null handle means the default stream to the driver. A null handle
    /// is refused, because a handle that was never set is null as well.
    pub const LEGACY_DEFAULT_STREAM: RawStream = Self(1);
    /// The default stream of the calling thread in the context that is current
    /// (`CU_STREAM_PER_THREAD`).
    pub const PER_THREAD_DEFAULT: RawStream = Self(2);

    /// The stream handle as an integer, for interfaces that pass handles as integers.
    pub const fn address(self) -> usize {
        self.0
    }

    /// The stream handle as a pointer of the caller's binding:
    /// `stream.raw_pointer::<sys::CUstream_st>()`.
    pub const fn raw_pointer<T>(self) -> *mut T {
        self.0 as *mut T
    }

    /// Returns whether the stream handle is null.
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// Returns whether the handle means a default stream of the current context.
    pub(crate) fn depends_on_current_context(self) -> bool {
        self == Self::LEGACY_DEFAULT_STREAM || self == Self::PER_THREAD_DEFAULT
    }

    pub(crate) const fn cu(self) -> sys::CUstream {
        self.raw_pointer()
    }
}

impl fmt::Debug for RawStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Handle of a context, as the driver knows it: `CUcontext`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawContext(usize);

impl RawContext {
    pub(crate) fn new(context: sys::CUcontext) -> Self {
        Self(context as usize)
    }

    /// The stream handle as an integer.
    pub const fn address(self) -> usize {
        self.0
    }

    /// Returns the context handle as a pointer of the type that the caller's binding uses.
    pub const fn raw_pointer<T>(self) -> *mut T {
        self.0 as *mut T
    }
}

impl From<usize> for RawStream {
    fn from(handle: usize) -> Self {
        Self(handle)
    }
}

impl<T> From<*mut T> for RawStream {
    fn from(handle: *mut T) -> Self {
        Self(handle as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_handles_convert_from_numbers_and_from_pointers() {
        let pointer = 0x7f00_usize as *mut sys::CUstream_st;
        assert_eq!(RawStream::from(pointer), RawStream::from(0x7f00));
        assert_eq!(RawStream::from(0x7f00).raw_pointer::<u8>() as usize, 0x7f00);
        assert!(RawStream::from(std::ptr::null_mut::<u8>()).is_null());
        assert!(
            RawStream::from(1).depends_on_current_context()
                && !RawStream::from(0x10).depends_on_current_context()
        );
    }
}
