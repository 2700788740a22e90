//! Buffers of the messages in the memory of their GPUs.

use crate::collective::definition::{ExchangeProblem, INPUT_NAMES, OUTPUT_NAMES};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::{CudaTask, DeviceBuffer, Input, Output};
use kernelgate::workload::Tensors;
use kernelgate_cuda::Devices;

/// Bytes of device memory that the messages take on one GPU.
pub fn message_bytes_per_gpu(problem: &ExchangeProblem) -> u64 {
    2 * problem.message_bytes() as u64
}

/// Input and output buffers by rank; `None` for a GPU without one.
pub struct MessageBuffers {
    pub inputs: Vec<Option<DeviceBuffer>>,
    pub outputs: Vec<Option<Output>>,
}

impl MessageBuffers {
    pub fn new(
        problem: &ExchangeProblem,
        inputs: &Tensors,
        devices: &Devices,
    ) -> Result<Self, BackendError> {
        let mut messages = Self { inputs: Vec::new(), outputs: Vec::new() };
        devices.for_each_device(|rank, device| {
            let upload = |_| device.upload(inputs.tensor(INPUT_NAMES[rank]).as_bytes());
            messages.inputs.push(problem.input_elements(rank).map(upload).transpose()?);
            let output = |len| Output::new(device, OUTPUT_NAMES[rank], [len], problem.dtype);
            messages.outputs.push(problem.output_elements(rank).map(output).transpose()?);
            Ok(())
        })?;
        Ok(messages)
    }

    /// Device addresses of the input messages; 0 for a GPU without an input.
    pub fn input_addresses(&self) -> Vec<u64> {
        self.inputs.iter().map(|input| input.as_ref().map_or(0, DeviceBuffer::address)).collect()
    }

    /// Device addresses of the output messages; 0 for a GPU without an output.
    pub fn output_addresses(&self) -> Vec<u64> {
        self.outputs.iter().map(|output| output.as_ref().map_or(0, Output::address)).collect()
    }

    /// Task whose launch enqueues the exchange on the streams of all GPUs.
    pub fn into_exchange_task(
        self,
        devices: &Devices,
        mut launch: impl FnMut() -> Result<(), BackendError> + 'static,
    ) -> CudaTask {
        let inputs = self.inputs.into_iter().zip(INPUT_NAMES);
        let inputs: Vec<Input> =
            inputs.filter_map(|(buffer, name)| Some(Input::new(name, &buffer?))).collect();
        let outputs = self.outputs.into_iter().flatten().collect();
        CudaTask::new(devices, inputs, outputs, move |_| launch())
    }
}
