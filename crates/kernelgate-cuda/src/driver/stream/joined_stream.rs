//! Joins a stream that other code created with the device's own stream, by two events.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, sys};

use super::raw_stream::RawStreamHandle;
use super::thread_state::{context_current_on_thread, make_context_current_on_thread};
use super::timed_stream::{OwnOrForeignStream, context_of_stream};
use crate::BackendError;
use crate::driver::device::Device;
use crate::driver::driver_error::error_for_failed_action;

/// A foreign stream that is joined with the device's stream: its work runs between earlier and
/// later work on the device's stream.
pub struct ForeignStreamJoinedWithDevice {
    device_stream: Arc<CudaStream>,
    foreign_stream_handle: RawStreamHandle,
    event_before_foreign_work: CudaEvent,
    event_after_foreign_work: CudaEvent,
}

impl ForeignStreamJoinedWithDevice {
    /// Joins a foreign stream, which must belong to the device's own CUDA context.
    ///
    /// # Errors
    /// Fails if the handle is null or not a stream, or the stream belongs to another context or
    /// GPU.
    pub fn join_with_device_stream(
        device: &Device,
        stream: impl Into<RawStreamHandle>,
    ) -> Result<Self, BackendError> {
        let theirs = stream.into();
        let refused =
            |why: String| BackendError::ComputationFailed(format!("the stream to join {why}"));
        if theirs.is_null() {
            return Err(refused("has a null handle".to_owned()));
        }
        make_context_current_on_thread(device.context())?;
        let own = context_current_on_thread()?;
        if !theirs.is_default_stream() {
            let context = context_of_stream(theirs).map_err(|error| {
                error_for_failed_action(&format!("query the context of {theirs:?}"), &error)
            })?;
            if context != own {
                let ordinal =
                    OwnOrForeignStream::ForeignStream { stream: theirs, context }.gpu_of_stream();
                let ordinal = ordinal.map_or_else(|_| "?".to_owned(), |it| it.to_string());
                return Err(refused(format!(
                    "is of another context, on GPU {ordinal}: make it in the one that the row gets, on \
                     GPU {}",
                    device.gpu_properties().gpu_ordinal
                )));
            }
        }
        let event = || {
            let untimed = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
            let event = device.context().new_event(Some(untimed));
            event.map_err(|error| error_for_failed_action("make an event", &error))
        };
        Ok(Self {
            device_stream: Arc::clone(device.stream()),
            foreign_stream_handle: theirs,
            event_before_foreign_work: event()?,
            event_after_foreign_work: event()?,
        })
    }

    /// The handle of the joined foreign stream.
    pub const fn foreign_stream(&self) -> RawStreamHandle {
        self.foreign_stream_handle
    }

    /// Enqueues work on the foreign stream: it runs after all earlier work on the device's stream
    /// and before all later work on that stream.
    ///
    /// # Errors
    /// Fails with the error of `enqueue`, or if the driver cannot order the two streams.
    pub fn enqueue_on_foreign_stream_in_order<E>(
        &self,
        enqueue: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), BackendError>
    where
        E: Into<BackendError>,
    {
        let failed = |action: &'static str| move |error| error_for_failed_action(action, &error);
        let theirs = self.foreign_stream_handle.driver_handle();
        self.event_before_foreign_work
            .record(&self.device_stream)
            .map_err(failed("record an event"))?;
        // SAFETY: the stream and the event are alive.
        unsafe { sys::cuStreamWaitEvent(theirs, self.event_before_foreign_work.cu_event(), 0) }
            .result()
            .map_err(failed("let the joined stream wait"))?;
        let enqueued = enqueue();
        // The device's stream waits for the foreign stream even after an error, because otherwise a
        // capture could not end. SAFETY: as above.
        unsafe { sys::cuEventRecord(self.event_after_foreign_work.cu_event(), theirs) }
            .result()
            .map_err(failed("record an event on the joined stream"))?;
        self.device_stream
            .wait(&self.event_after_foreign_work)
            .map_err(failed("wait for the joined stream"))?;
        enqueued.map_err(Into::into)
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;
    use crate::driver::graph::ExecutableCudaGraph;
    use crate::instruments::spin_kernel::SpinKernel;
    use crate::library::{self, NvidiaLibrary};
    use crate::testing::{lock_first_gpu, open_second_gpu_or_print_skip};

    #[test]
    fn work_on_a_joined_stream_runs_between_work_on_the_timed_stream() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let other = device.create_another_stream().unwrap();
        let joined =
            ForeignStreamJoinedWithDevice::join_with_device_stream(&device, other.cu_stream())
                .unwrap();
        let spin = SpinKernel::compile_and_allocate_report(&device).unwrap();
        let around = || joined.enqueue_on_foreign_stream_in_order(|| spin.enqueue_spin(1000));
        around().unwrap();
        device.synchronize().unwrap();
        // In this test the spin kernel runs on the device's stream; the test checks that the fork
        // and join by events can be captured.
        assert!(
            ExecutableCudaGraph::capture_from_device_stream(&device, around)
                .unwrap()
                .node_count_without_separators()
                > 0
        );
    }

    /// The expected error for a foreign stream on GPU `stream` and an implementation on GPU `row`.
    fn error_for_stream_of_other_gpu(stream: usize, row: usize) -> BackendError {
        BackendError::ComputationFailed(format!(
            "the stream to join is of another context, on GPU {stream}: make it in the one that \
             the row gets, on GPU {row}"
        ))
    }

    #[test]
    fn joining_a_stream_of_another_gpu_is_refused() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let Some(other) = open_second_gpu_or_print_skip() else { return };
        let stream = other.create_another_stream().unwrap();
        let refused =
            ForeignStreamJoinedWithDevice::join_with_device_stream(&device, stream.cu_stream())
                .err()
                .unwrap();
        eprintln!("{refused}");
        assert_eq!(refused, error_for_stream_of_other_gpu(1, 0));
        // Each device joins within its own CUDA context, even if another context is current on the
        // thread.
        make_context_current_on_thread(device.context()).unwrap();
        ForeignStreamJoinedWithDevice::join_with_device_stream(&other, stream.cu_stream()).unwrap();
        let own = device.create_another_stream().unwrap();
        ForeignStreamJoinedWithDevice::join_with_device_stream(&device, own.cu_stream()).unwrap();
        let back = ForeignStreamJoinedWithDevice::join_with_device_stream(&other, own.cu_stream())
            .err()
            .unwrap();
        assert_eq!(back, error_for_stream_of_other_gpu(0, 1));
    }

    #[test]
    fn joining_a_stream_of_another_context_or_a_null_handle_is_refused() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let null =
            ForeignStreamJoinedWithDevice::join_with_device_stream(&device, 0).err().unwrap();
        let why = "the stream to join has a null handle";
        assert_eq!(null, BackendError::ComputationFailed(why.to_owned()));
        let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
        type CuCtxCreateFunction =
            unsafe extern "C" fn(*mut sys::CUcontext, u32, i32) -> sys::CUresult;
        let create =
            library::library_function_address(NvidiaLibrary::CudaDriver, c"cuCtxCreate_v2")
                .unwrap();
        // SAFETY: the function has this type, the pointers are valid, and the context is destroyed
        // below.
        unsafe {
            let create: CuCtxCreateFunction = std::mem::transmute(create);
            create(&raw mut context, 0, device.context().cu_device()).result().unwrap();
            sys::cuStreamCreate(&raw mut stream, 1).result().unwrap();
        }
        let refused =
            ForeignStreamJoinedWithDevice::join_with_device_stream(&device, stream).err().unwrap();
        eprintln!("{refused}");
        assert_eq!(refused, error_for_stream_of_other_gpu(0, 0));
        // SAFETY: made above.
        unsafe { sys::cuCtxDestroy_v2(context) }.result().unwrap();
        make_context_current_on_thread(device.context()).unwrap();
    }
}
