//! Raw handles of CUDA streams and contexts that other code created, such as another version of
//! cudarc, a C++ library or a framework. All types of stream handles stand for the driver's
//! `CUstream`.

use std::fmt;

use cudarc::driver::sys;

/// Handle of a CUDA stream as the driver knows it (`CUstream`, which is also `cudaStream_t`).
///
/// The caller promises that the stream exists and outlives this value, because the driver cannot
/// check a handle completely. The driver recognises many invalid stream handles, but not all.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawStreamHandle(usize);

impl RawStreamHandle {
    /// Explicit handle of the legacy default stream (`CU_STREAM_LEGACY`) of the CUDA context that
    /// is current. To the driver, a null handle also means the legacy default stream. Kernelgate
    /// refuses a null handle, because a handle that was never set is null too.
    pub const LEGACY_DEFAULT_STREAM: RawStreamHandle = Self(1);
    /// Explicit handle of the calling thread's default stream (`CU_STREAM_PER_THREAD`) in the CUDA
    /// context that is current.
    pub const PER_THREAD_DEFAULT_STREAM: RawStreamHandle = Self(2);

    /// Returns the stream handle as an integer, for code that passes handles as integers.
    pub const fn handle_as_integer(self) -> usize {
        self.0
    }

    /// The stream handle as a pointer of the type that the caller's binding uses, as in
    /// `stream.raw_pointer::<sys::CUstream_st>()`.
    pub const fn raw_pointer<T>(self) -> *mut T {
        self.0 as *mut T
    }

    /// Whether the stream handle is null.
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// Whether the handle means one of the two default streams, which belong to the context that is
    /// current.
    pub(crate) fn is_default_stream(self) -> bool {
        self == Self::LEGACY_DEFAULT_STREAM || self == Self::PER_THREAD_DEFAULT_STREAM
    }

    pub(crate) const fn driver_handle(self) -> sys::CUstream {
        self.raw_pointer()
    }
}

impl fmt::Debug for RawStreamHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Handle of a CUDA context as the driver knows it (`CUcontext`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawContextHandle(usize);

impl RawContextHandle {
    pub(crate) fn from_driver_handle(context: sys::CUcontext) -> Self {
        Self(context as usize)
    }

    /// Returns the context handle as an integer.
    pub const fn handle_as_integer(self) -> usize {
        self.0
    }

    /// The context handle as a pointer of the type that the caller's binding uses.
    pub const fn raw_pointer<T>(self) -> *mut T {
        self.0 as *mut T
    }
}

impl From<usize> for RawStreamHandle {
    fn from(handle: usize) -> Self {
        Self(handle)
    }
}

impl<T> From<*mut T> for RawStreamHandle {
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
        assert_eq!(RawStreamHandle::from(pointer), RawStreamHandle::from(0x7f00));
        assert_eq!(RawStreamHandle::from(0x7f00).raw_pointer::<u8>() as usize, 0x7f00);
        assert!(RawStreamHandle::from(std::ptr::null_mut::<u8>()).is_null());
        assert!(
            RawStreamHandle::from(1).is_default_stream()
                && !RawStreamHandle::from(0x10).is_default_stream()
        );
    }
}
