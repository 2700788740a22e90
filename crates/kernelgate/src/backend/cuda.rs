//! The GPU as a backend: a computation is outputs in device memory and the launches that fill them.

use std::sync::Arc;

use rayon::prelude::*;

use crate::backend::{BackendError, Executable};
use crate::workload::{Dtype, Tensor, Tensors};
pub use kernelgate_cuda::{
    Argument, Buffer, Device, Kernel, KernelSpec, LaunchShape, LoadedKernel, Requires, Source,
};

/// An output on the device.
pub struct Output {
    name: &'static str,
    shape: Vec<usize>,
    dtype: Dtype,
    buffer: Buffer,
    decode: Option<Decode>,
}

/// Turns a device's bytes into the workload's tensor of that shape.
pub type Decode = fn(&[u8], &[usize]) -> Tensor;

impl Output {
    /// An output that lies on the device as it does in the workload: row-major, of that dtype.
    ///
    /// # Errors
    /// When device memory is short.
    pub fn new(
        device: &Device,
        name: &'static str,
        shape: impl Into<Vec<usize>>,
        dtype: Dtype,
    ) -> Result<Self, BackendError> {
        let shape = shape.into();
        let buffer = device.allocate(shape.iter().product::<usize>() * dtype.bytes())?;
        Ok(Self { name, shape, dtype, buffer, decode: None })
    }

    /// An i8 output that lies on the device in another form, of so many bytes.
    ///
    /// # Errors
    /// When device memory is short.
    pub fn encoded(
        device: &Device,
        name: &'static str,
        shape: impl Into<Vec<usize>>,
        bytes: usize,
        decode: Decode,
    ) -> Result<Self, BackendError> {
        Ok(Self {
            name,
            shape: shape.into(),
            dtype: Dtype::I8,
            buffer: device.allocate(bytes)?,
            decode: Some(decode),
        })
    }

    /// Where a kernel writes it.
    pub fn argument(&self) -> Argument {
        Argument::from(&self.buffer)
    }

    /// NaN in every float format; in integers the byte of [`Tensor::poison`]; in encoded spikes the
    /// code that no spike has.
    const fn poison(&self) -> u8 {
        match (self.dtype, self.decode) {
            (_, Some(_)) => 0xaa,
            (Dtype::I8, None) => 0x7f,
            _ => 0xff,
        }
    }
}

/// Enqueues a computation that overwrites the outputs.
type LaunchFn = Box<dyn FnMut(&[Output]) -> Result<(), BackendError>>;

/// A computation on the GPU.
pub struct CudaTask {
    device: Arc<Device>,
    outputs: Vec<Output>,
    launch: LaunchFn,
    host: Tensors,
}

impl CudaTask {
    /// `launch` enqueues everything that overwrites the outputs, and never synchronises.
    pub fn new(
        device: &Arc<Device>,
        outputs: Vec<Output>,
        launch: impl FnMut(&[Output]) -> Result<(), BackendError> + 'static,
    ) -> Self {
        Self { device: Arc::clone(device), outputs, launch: Box::new(launch), host: Tensors::new() }
    }
}

impl Executable for CudaTask {
    fn poison_outputs(&mut self) -> Result<(), BackendError> {
        self.outputs.iter_mut().try_for_each(|output| output.buffer.fill(output.poison()))
    }

    fn launch(&mut self) -> Result<(), BackendError> {
        (self.launch)(&self.outputs)
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        self.device.synchronize()
    }

    fn outputs(&mut self) -> Result<&Tensors, BackendError> {
        for output in &self.outputs {
            let tensor = match output.decode {
                Some(decode) => {
                    let mut bytes = vec![0; output.buffer.bytes()];
                    output.buffer.download(&mut bytes)?;
                    decode(&bytes, &output.shape)
                }
                None => {
                    let mut tensor = Tensor::zeroed(output.shape.clone(), output.dtype);
                    // The system hands out pages when they are first touched: by all cores here, by
                    // one in the copy.
                    tensor.as_bytes_mut().par_chunks_mut(1 << 20).for_each(|part| part.fill(0));
                    output.buffer.download(tensor.as_bytes_mut())?;
                    tensor
                }
            };
            self.host.insert(output.name, tensor);
        }
        Ok(&self.host)
    }
}
