//! Interface of an attached row, whose closure launches kernels of other code: the closure gets
//! `RowContext` during preparation and returns `RowLaunchClosures`.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::backend::BackendError;
use crate::backend::cuda::{
    Device, ForeignStreamJoinedWithDevice, Kernel, KernelArgumentList, KernelImage, Launch,
    PreparedLaunch, RawContextHandle, RawStreamHandle, Source,
};
use crate::workload::Point;

/// Axis values, device, context and stream for which an attached row is prepared.
pub struct RowContext<'a> {
    pub(super) point: &'a Point,
    pub(super) device: &'a Arc<Device>,
}

pub(super) fn input_missing_in_definition_error(name: &str) -> BackendError {
    BackendError::ComputationFailed(format!("the definition has no input `{name}`"))
}

impl RowContext<'_> {
    /// Returns the value of a numeric axis for this problem.
    ///
    /// # Errors
    /// Fails if the axis does not exist or its values are not numbers.
    pub fn axis_number(&self, axis: &'static str) -> Result<usize, BackendError> {
        self.point.number(axis).map_err(|error| BackendError::ComputationFailed(error.to_string()))
    }

    /// The CUDA stream on which the row must enqueue all work: a `CUstream` other than the default
    /// stream.
    pub fn stream(&self) -> RawStreamHandle {
        self.device.raw_stream_handle()
    }

    /// The GPU's primary CUDA context, which is current during preparation and during every launch
    /// of the row.
    pub fn context(&self) -> RawContextHandle {
        self.device.raw_context_handle()
    }

    /// CUDA ordinal of the GPU, starting at 0.
    pub fn gpu_ordinal(&self) -> usize {
        self.device.gpu_properties().gpu_ordinal
    }

    /// Joins a stream that the row's own code created: work enqueued on it inside
    /// [`ForeignStreamJoinedWithDevice::enqueue_on_foreign_stream_in_order`] is ordered and timed
    /// as if enqueued on [`Self::stream`].
    ///
    /// # Errors
    /// Fails if the handle is null or no stream, or belongs to another context or GPU.
    pub fn join_stream(
        &self,
        stream: impl Into<RawStreamHandle>,
    ) -> Result<ForeignStreamJoinedWithDevice, BackendError> {
        ForeignStreamJoinedWithDevice::join_with_device_stream(self.device, stream)
    }

    /// Loads a kernel by its symbol from a compiled image (cubin, fatbin or PTX).
    ///
    /// # Errors
    /// Fails if the image is for another GPU architecture (the case is skipped), is invalid, or
    /// lacks the kernel.
    pub fn load_kernel(&self, image: &KernelImage, symbol: &str) -> Result<Kernel, BackendError> {
        self.device.load_kernel_image(image)?.kernel_by_symbol(symbol)
    }

    /// Compiles CUDA source with NVRTC and loads the kernel with this symbol.
    pub fn compile_kernel(
        &self,
        source: &'static str,
        symbol: &'static str,
    ) -> Result<Kernel, BackendError> {
        self.device.load_kernel(&Source::new(symbol, source).with_macros(&[]), symbol)
    }

    /// Compiles one kernel from CUDA source, and returns launches of this kernel with fixed
    /// arguments.
    ///
    /// # Errors
    /// Fails if the kernel does not compile or load, or cannot be launched with these arguments.
    pub fn compile_launch(
        &self,
        source: &'static str,
        symbol: &'static str,
        dims: Launch,
        parameters: KernelArgumentList,
    ) -> Result<RowLaunchClosures, BackendError> {
        let kernel = self.compile_kernel(source, symbol)?;
        let launch = PreparedLaunch::check_and_prepare(self.device, kernel, dims, parameters)?;
        Ok(RowLaunchClosures::new(move || launch.enqueue()))
    }

    /// The device, for scratch memory and for kernels with headers and macros.
    pub const fn device(&self) -> &Arc<Device> {
        self.device
    }
}

/// The closure that enqueues one launch of a row, and optionally a closure that resets the row's
/// state.
pub struct RowLaunchClosures {
    pub(super) launch: EnqueueClosure,
    pub(super) reset: Option<EnqueueClosure>,
    /// Names of the inputs that every launch reads; `None` means all inputs.
    pub(super) inputs_read_by_launches: Option<Vec<String>>,
}

pub(super) type EnqueueClosure = Box<dyn FnMut() -> Result<(), BackendError>>;

/// Boxes an enqueuing closure: a `BackendError` is kept, and any other error becomes a launch error
/// with its text.
fn boxed_enqueue_closure<E: fmt::Display + 'static>(
    mut enqueue: impl FnMut() -> Result<(), E> + 'static,
) -> EnqueueClosure {
    let backend_error = |error: E| match (&error as &dyn Any).downcast_ref::<BackendError>() {
        Some(error) => error.clone(),
        None => BackendError::ComputationFailed(error.to_string()),
    };
    Box::new(move || enqueue().map_err(backend_error))
}

impl RowLaunchClosures {
    /// The closure `launch` enqueues all work that overwrites the outputs, and returns without
    /// waiting for the GPU.
    pub fn new<E: fmt::Display + 'static>(launch: impl FnMut() -> Result<(), E> + 'static) -> Self {
        Self { launch: boxed_enqueue_closure(launch), reset: None, inputs_read_by_launches: None }
    }

    /// Declares that launches read only these inputs, because the row packed, quantised or copied
    /// the other inputs during preparation. After timing, the harness replaces the declared inputs
    /// only; the record marks a row that declares no input. Without this call, every launch is
    /// assumed to read all inputs.
    pub fn reading_only_inputs(self, inputs: &[&str]) -> Self {
        Self {
            inputs_read_by_launches: Some(inputs.iter().map(|&name| name.to_owned()).collect()),
            ..self
        }
    }

    /// Sets the closure that resets the state that one launch leaves for the next launch. The
    /// harness calls the reset before each launch, outside the measured time. The reset must not
    /// read inputs that launches read ([`Self::reading_only_inputs`]): after timing, the harness
    /// replaces these inputs between reset and launch.
    pub fn with_reset<E: fmt::Display + 'static>(
        self,
        reset: impl FnMut() -> Result<(), E> + 'static,
    ) -> RowLaunchClosures {
        Self { reset: Some(boxed_enqueue_closure(reset)), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_a_row_keep_their_text_and_kind() {
        let error = |mut row: RowLaunchClosures| (row.launch)().unwrap_err();
        let own = error(RowLaunchClosures::new(|| Err("no such stream")));
        assert_eq!(own.to_string(), "launch failed: no such stream");
        let failed = error(RowLaunchClosures::new(|| {
            Err(BackendError::ComputationFailed("bad size".to_owned()))
        }));
        assert_eq!(failed.to_string(), "launch failed: bad size");
        let lost = BackendError::DeviceLost("it fell off the bus".to_owned());
        let returned = lost.clone();
        assert_eq!(error(RowLaunchClosures::new(move || Err(returned.clone()))), lost);
    }
}
