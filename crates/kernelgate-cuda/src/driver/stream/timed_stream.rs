//! A CUDA stream that is timed: the stream of a device that kernelgate opened, or a foreign stream.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError, sys};

use super::raw_stream::RawStreamHandle;
use super::thread_state::make_context_current_on_thread;
use crate::BackendError;
use crate::driver::driver_error::error_for_failed_action;

/// A CUDA stream whose work is timed, with its context.
#[derive(Clone)]
pub(crate) enum OwnOrForeignStream {
    /// Stream of a device that kernelgate opened: its context stays current on the thread after a
    /// call.
    StreamOfOwnDevice(Arc<CudaStream>),
    /// Stream created by other code: the context that was current on the thread is restored after
    /// each call.
    ForeignStream { stream: RawStreamHandle, context: sys::CUcontext },
}

impl OwnOrForeignStream {
    /// Returns the CUDA driver's handle of the stream.
    pub fn driver_handle(&self) -> sys::CUstream {
        match self {
            Self::StreamOfOwnDevice(stream) => stream.cu_stream(),
            Self::ForeignStream { stream, .. } => stream.driver_handle(),
        }
    }

    /// The driver's handle of the GPU to which the stream belongs.
    pub fn gpu_of_stream(&self) -> Result<sys::CUdevice, BackendError> {
        let _entered = self.enter_stream_context()?;
        let mut device = 0;
        // SAFETY: a context is current and the pointer is valid.
        unsafe { sys::cuCtxGetDevice(&raw mut device) }
            .result()
            .map_err(|error| error_for_failed_action("query the stream's GPU", &error))?;
        Ok(device)
    }

    /// Makes the stream's CUDA context current; for a foreign stream, dropping the result restores
    /// the former context.
    pub fn enter_stream_context(&self) -> Result<CurrentCudaContextGuard, BackendError> {
        match self {
            Self::StreamOfOwnDevice(stream) => {
                make_context_current_on_thread(stream.context())?;
                Ok(CurrentCudaContextGuard { context_was_pushed: false })
            }
            Self::ForeignStream { context, .. } => {
                // SAFETY: the context belongs to a stream that is alive.
                unsafe { sys::cuCtxPushCurrent_v2(*context) }.result().map_err(|error| {
                    error_for_failed_action("make the stream's context current", &error)
                })?;
                Ok(CurrentCudaContextGuard { context_was_pushed: true })
            }
        }
    }
}

/// The CUDA context of a stream that is not a default stream. The driver cannot always check the
/// stream handle, which is then trusted.
pub(crate) fn context_of_stream(stream: RawStreamHandle) -> Result<sys::CUcontext, DriverError> {
    let mut context = std::ptr::null_mut();
    // SAFETY: the pointer is valid, and the caller guarantees the stream handle.
    unsafe { sys::cuStreamGetCtx(stream.driver_handle(), &raw mut context) }.result()?;
    Ok(context)
}

#[must_use = "the context is current until this is dropped"]
pub(crate) struct CurrentCudaContextGuard {
    context_was_pushed: bool,
}

impl Drop for CurrentCudaContextGuard {
    fn drop(&mut self) {
        if self.context_was_pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: the call gets a pointer to a local variable, which is valid during the call.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
        }
    }
}
