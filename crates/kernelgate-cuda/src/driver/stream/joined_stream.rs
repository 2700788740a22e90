//! A stream that other code made, joined with the device's own by events.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, sys};

use super::raw_stream::RawStream;
use super::thread_state::{bind, current_context};
use super::timed_stream::{TimedStream, context_of_stream};
use crate::BackendError;
use crate::driver::device::Device;
use crate::driver::driver_error::failed;

/// A stream that other code made, joined with the device's own: work on it runs between earlier and
/// later work on the device's stream.
pub struct JoinedStreams {
    ours: Arc<CudaStream>,
    theirs: RawStream,
    there: CudaEvent,
    back: CudaEvent,
}

impl JoinedStreams {
    /// Joins a stream of the device's own context.
    ///
    /// # Errors
    /// Fails if the handle is null or no stream, or the stream is of another context or GPU.
    pub fn new(device: &Device, stream: impl Into<RawStream>) -> Result<Self, BackendError> {
        let theirs = stream.into();
        let refused = |why: String| BackendError::Launch(format!("the stream to join {why}"));
        if theirs.is_null() {
            return Err(refused("has a null handle".to_owned()));
        }
        bind(device.context())?;
        let own = current_context()?;
        if !theirs.depends_on_current_context() {
            let context = context_of_stream(theirs)
                .map_err(|error| failed(&format!("query the context of {theirs:?}"), &error))?;
            if context != own {
                let ordinal = TimedStream::Theirs { stream: theirs, context }.device_of_stream();
                let ordinal = ordinal.map_or_else(|_| "?".to_owned(), |it| it.to_string());
                return Err(refused(format!(
                    "is of another context, on GPU {ordinal}: make it in the one that the row gets, on \
                     GPU {}",
                    device.facts().ordinal
                )));
            }
        }
        let event = || {
            let untimed = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
            let event = device.context().new_event(Some(untimed));
            event.map_err(|error| failed("make an event", &error))
        };
        Ok(Self { ours: Arc::clone(device.stream()), theirs, there: event()?, back: event()? })
    }

    /// Returns the row's own stream that was joined.
    pub const fn stream(&self) -> RawStream {
        self.theirs
    }

    /// Enqueues work on the joined stream, between the work that is already on the device's stream
    /// and the work that follows on the device's stream.
    ///
    /// # Errors
    /// Fails with the error of `enqueue`, or when the driver refuses.
    pub fn enqueue_between<E>(
        &self,
        enqueue: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), BackendError>
    where
        E: Into<BackendError>,
    {
        let failed = |action: &'static str| move |error| failed(action, &error);
        let theirs = self.theirs.cu();
        self.there.record(&self.ours).map_err(failed("record an event"))?;
        // SAFETY: the stream and the event are alive.
        unsafe { sys::cuStreamWaitEvent(theirs, self.there.cu_event(), 0) }
            .result()
            .map_err(failed("let the joined stream wait"))?;
        let enqueued = enqueue();
        // The streams are joined even after an error, because a capture cannot end otherwise.
        // SAFETY: as above.
        unsafe { sys::cuEventRecord(self.back.cu_event(), theirs) }
            .result()
            .map_err(failed("record an event on the joined stream"))?;
        self.ours.wait(&self.back).map_err(failed("wait for the joined stream"))?;
        enqueued.map_err(Into::into)
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;
    use crate::driver::graph::ExecutableGraph;
    use crate::instruments::spin_kernel::SpinKernel;
    use crate::library::{self, RequiredLibrary};
    use crate::testing::{lock_first_gpu, second_gpu_for_test};

    #[test]
    fn work_on_a_joined_stream_runs_between_work_on_the_timed_stream() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let other = device.create_stream().unwrap();
        let joined = JoinedStreams::new(&device, other.cu_stream()).unwrap();
        let spin = SpinKernel::new(&device).unwrap();
        let around = || joined.enqueue_between(|| spin.launch(1000));
        around().unwrap();
        device.synchronize().unwrap();
        // In this test the spin kernel runs on our own stream; it checks that fork and join can be
        // captured.
        assert!(ExecutableGraph::capture_graph(&device, around).unwrap().node_count() > 0);
    }

    /// The refusal of a stream on one GPU for a row on another one.
    fn another_context(stream: usize, row: usize) -> BackendError {
        BackendError::Launch(format!(
            "the stream to join is of another context, on GPU {stream}: make it in the one that \
             the row gets, on GPU {row}"
        ))
    }

    #[test]
    fn joining_a_stream_of_another_gpu_is_refused() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let Some(other) = second_gpu_for_test() else { return };
        let stream = other.create_stream().unwrap();
        let refused = JoinedStreams::new(&device, stream.cu_stream()).err().unwrap();
        eprintln!("{refused}");
        assert_eq!(refused, another_context(1, 0));
        // Each GPU uses its own context, even on a thread with another current context.
        bind(device.context()).unwrap();
        JoinedStreams::new(&other, stream.cu_stream()).unwrap();
        let own = device.create_stream().unwrap();
        JoinedStreams::new(&device, own.cu_stream()).unwrap();
        let back = JoinedStreams::new(&other, own.cu_stream()).err().unwrap();
        assert_eq!(back, another_context(0, 1));
    }

    #[test]
    fn joining_a_stream_of_another_context_or_a_null_handle_is_refused() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let null = JoinedStreams::new(&device, 0).err().unwrap();
        let why = "the stream to join has a null handle";
        assert_eq!(null, BackendError::Launch(why.to_owned()));
        let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
        type ContextCreateFunction =
            unsafe extern "C" fn(*mut sys::CUcontext, u32, i32) -> sys::CUresult;
        let create =
            library::function_of_library(RequiredLibrary::Driver, c"cuCtxCreate_v2").unwrap();
        // SAFETY: the function has that type; the pointers are valid; the context is destroyed
        // below.
        unsafe {
            let create: ContextCreateFunction = std::mem::transmute(create);
            create(&raw mut context, 0, device.context().cu_device()).result().unwrap();
            sys::cuStreamCreate(&raw mut stream, 1).result().unwrap();
        }
        let refused = JoinedStreams::new(&device, stream).err().unwrap();
        eprintln!("{refused}");
        assert_eq!(refused, another_context(0, 0));
        // SAFETY: made above.
        unsafe { sys::cuCtxDestroy_v2(context) }.result().unwrap();
        bind(device.context()).unwrap();
    }
}
