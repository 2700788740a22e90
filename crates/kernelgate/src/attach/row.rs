//! Interface of an attached row, whose closure launches kernels of other code: `At`, which it gets
//! while it is prepared, and `Launches`, which it returns.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::backend::BackendError;
use crate::backend::cuda::{
    Arguments, Device, JoinedStreams, Kernel, KernelImage, Launch, PreparedLaunch, RawContext,
    RawStream, Source,
};
use crate::workload::Point;

/// The problem's point, and the stream, context and device on which a row is prepared.
pub struct At<'a> {
    pub(super) point: &'a Point,
    pub(super) device: &'a Arc<Device>,
}

pub(super) fn missing_input(name: &str) -> BackendError {
    BackendError::Launch(format!("the definition has no input `{name}`"))
}

impl At<'_> {
    /// The value of a number axis at this point.
    ///
    /// # Errors
    /// Fails if there is no such axis, or its values are not numbers.
    pub fn number(&self, axis: &'static str) -> Result<usize, BackendError> {
        self.point.number(axis).map_err(|error| BackendError::Launch(error.to_string()))
    }

    /// The CUDA stream on which a row enqueues everything: a `CUstream` that is not the default
    /// stream.
    pub fn stream(&self) -> RawStream {
        self.device.raw_stream()
    }

    /// Primary context of the GPU, which is current now and whenever the row launches.
    pub fn context(&self) -> RawContext {
        self.device.raw_context()
    }

    /// Number of the GPU, counted from 0.
    pub fn gpu_ordinal(&self) -> usize {
        self.device.facts().ordinal
    }

    /// Joins a stream of the row's own code, made in this context: work that is enqueued inside
    /// [`JoinedStreams::enqueue_between`] counts as if it were enqueued on [`Self::stream`].
    ///
    /// # Errors
    /// Fails if the handle is null or no stream, or of another context or GPU.
    pub fn join(&self, stream: impl Into<RawStream>) -> Result<JoinedStreams, BackendError> {
        JoinedStreams::new(self.device, stream)
    }

    /// Loads a kernel of a compiled image by its symbol.
    ///
    /// # Errors
    /// Fails if the image does not fit the GPU (the case is skipped) or is invalid, or lacks the
    /// kernel.
    pub fn kernel(&self, image: &KernelImage, symbol: &str) -> Result<Kernel, BackendError> {
        self.device.load_module(image)?.kernel_of_symbol(symbol)
    }

    /// Compiles a kernel from CUDA source with NVRTC.
    pub fn compile(
        &self,
        source: &'static str,
        symbol: &'static str,
    ) -> Result<Kernel, BackendError> {
        self.device.kernel(&Source::new(symbol, source).build(&[]), symbol)
    }

    /// Makes a row's launches from one kernel of CUDA source.
    ///
    /// # Errors
    /// Fails if the kernel does not compile or load, or cannot be launched with these arguments.
    pub fn launch(
        &self,
        source: &'static str,
        symbol: &'static str,
        dims: Launch,
        parameters: Arguments,
    ) -> Result<RowLaunches, BackendError> {
        let kernel = self.compile(source, symbol)?;
        let launch = PreparedLaunch::new(self.device, kernel, dims, parameters)?;
        Ok(RowLaunches::new(move || launch.launch()))
    }

    /// The device, for what else a row needs: scratch memory, kernels with headers and macros.
    pub const fn device(&self) -> &Arc<Device> {
        self.device
    }
}

/// Closures that enqueue one launch and its reset.
pub struct RowLaunches {
    pub(super) launch: EnqueueLaunch,
    pub(super) reset: Option<EnqueueLaunch>,
    /// Inputs that every launch reads; `None` means all.
    pub(super) reads: Option<Vec<String>>,
}

pub(super) type EnqueueLaunch = Box<dyn FnMut() -> Result<(), BackendError>>;

/// Wraps a closure: a `BackendError` stays as it is, an error of the row's own code keeps its text.
fn box_enqueue_closure<E: fmt::Display + 'static>(
    mut enqueue: impl FnMut() -> Result<(), E> + 'static,
) -> EnqueueLaunch {
    let backend_error = |error: E| match (&error as &dyn Any).downcast_ref::<BackendError>() {
        Some(error) => error.clone(),
        None => BackendError::Launch(error.to_string()),
    };
    Box::new(move || enqueue().map_err(backend_error))
}

impl RowLaunches {
    /// `launch` enqueues everything that overwrites the outputs, and returns without waiting.
    pub fn new<E: fmt::Display + 'static>(launch: impl FnMut() -> Result<(), E> + 'static) -> Self {
        Self { launch: box_enqueue_closure(launch), reset: None, reads: None }
    }

    /// Names the only inputs that launches read from the harness's memory, because the row packed,
    /// quantised or copied the others while it was prepared. After timing, the named inputs are
    /// replaced and all other inputs stay; the record marks a row that names no input. By default
    /// every launch reads all inputs.
    pub fn reading(self, inputs: &[&str]) -> Self {
        Self { reads: Some(inputs.iter().map(|&name| name.to_owned()).collect()), ..self }
    }

    /// Sets the closure that restores the state which one launch leaves for the next launch. The
    /// reset is called before each launch, outside of the measured time. The reset must not read an
    /// input that launches read ([`Self::reading`]): after timing these inputs are replaced between
    /// the reset and the launch.
    pub fn with_reset<E: fmt::Display + 'static>(
        self,
        reset: impl FnMut() -> Result<(), E> + 'static,
    ) -> RowLaunches {
        Self { reset: Some(box_enqueue_closure(reset)), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_a_row_are_named_once_and_keep_their_kind() {
        let error = |mut row: RowLaunches| (row.launch)().unwrap_err();
        let own = error(RowLaunches::new(|| Err("no such stream")));
        assert_eq!(own.to_string(), "launch failed: no such stream");
        let failed = error(RowLaunches::new(|| Err(BackendError::Launch("bad size".to_owned()))));
        assert_eq!(failed.to_string(), "launch failed: bad size");
        let lost = BackendError::Lost("it fell off the bus".to_owned());
        let returned = lost.clone();
        assert_eq!(error(RowLaunches::new(move || Err(returned.clone()))), lost);
    }
}
