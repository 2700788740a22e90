//! A stream that is timed: one of a device that the harness opened, or one that other code made.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError, sys};

use super::raw_stream::RawStream;
use super::thread_state::bind;
use crate::BackendError;
use crate::driver::driver_error::failed;

/// A stream whose work is timed, with its context.
#[derive(Clone)]
pub(crate) enum TimedStream {
    /// Stream of an open device: its context stays current on the thread.
    Ours(Arc<CudaStream>),
    /// Stream of other code: the thread's context is restored after each call.
    Theirs { stream: RawStream, context: sys::CUcontext },
}

impl TimedStream {
    /// The stream handle in the driver's type.
    pub fn cu(&self) -> sys::CUstream {
        match self {
            Self::Ours(stream) => stream.cu_stream(),
            Self::Theirs { stream, .. } => stream.cu(),
        }
    }

    /// Ordinal of the GPU that the stream belongs to.
    pub fn device_of_stream(&self) -> Result<sys::CUdevice, BackendError> {
        let _entered = self.enter_context()?;
        let mut device = 0;
        // SAFETY: a context is current and the pointer is valid.
        unsafe { sys::cuCtxGetDevice(&raw mut device) }
            .result()
            .map_err(|error| failed("query the stream's GPU", &error))?;
        Ok(device)
    }

    /// Makes the stream's context current, until the result is dropped if the stream is of other
    /// code.
    pub fn enter_context(&self) -> Result<CurrentContext, BackendError> {
        match self {
            Self::Ours(stream) => {
                bind(stream.context())?;
                Ok(CurrentContext { pushed: false })
            }
            Self::Theirs { context, .. } => {
                // SAFETY: the context belongs to a stream that is alive.
                unsafe { sys::cuCtxPushCurrent_v2(*context) }
                    .result()
                    .map_err(|error| failed("make the stream's context current", &error))?;
                Ok(CurrentContext { pushed: true })
            }
        }
    }
}

/// The context of a stream that is not a default stream. The stream handle is trusted if the driver
/// cannot check it.
pub(crate) fn context_of_stream(stream: RawStream) -> Result<sys::CUcontext, DriverError> {
    let mut context = std::ptr::null_mut();
    // SAFETY: the pointer is valid; the handle is trusted.
    unsafe { sys::cuStreamGetCtx(stream.cu(), &raw mut context) }.result()?;
    Ok(context)
}

#[must_use = "the context is current until this is dropped"]
pub(crate) struct CurrentContext {
    pushed: bool,
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: the call gets a pointer to a local variable, which is valid during the call.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
        }
    }
}
