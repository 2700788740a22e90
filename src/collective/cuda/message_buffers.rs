//! Device buffers of a collective's input and output messages, each in the memory of its GPU.

use crate::collective::definition::{ExchangeProblem, INPUT_NAMES, OUTPUT_NAMES};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::{CudaTask, DeviceBuffer, DeviceInput, DeviceOutput};
use kernelgate::workload::Tensors;
use kernelgate_cuda::Devices;

/// Bytes of device memory that the input and output messages of a collective take on one GPU.
pub fn input_and_output_bytes_per_gpu(problem: &ExchangeProblem) -> u64 {
    2 * problem.longer_message_bytes() as u64
}

/// Input and output message buffers, indexed by rank; `None` for a GPU without that message.
pub struct ExchangeMessageBuffers {
    pub inputs_by_rank: Vec<Option<DeviceBuffer>>,
    pub outputs_by_rank: Vec<Option<DeviceOutput>>,
}

impl ExchangeMessageBuffers {
    pub fn upload_inputs_and_allocate_outputs(
        problem: &ExchangeProblem,
        inputs: &Tensors,
        devices: &Devices,
    ) -> Result<Self, BackendError> {
        let mut messages = Self { inputs_by_rank: Vec::new(), outputs_by_rank: Vec::new() };
        devices.for_each_with_context_current(|rank, device| {
            let upload = |_| device.upload(inputs.tensor(INPUT_NAMES[rank]).as_bytes());
            messages
                .inputs_by_rank
                .push(problem.input_elements_of_rank(rank).map(upload).transpose()?);
            let output = |len| DeviceOutput::new(device, OUTPUT_NAMES[rank], [len], problem.dtype);
            messages
                .outputs_by_rank
                .push(problem.output_elements_of_rank(rank).map(output).transpose()?);
            Ok(())
        })?;
        Ok(messages)
    }

    /// Device addresses of the input messages, indexed by rank; 0 for a GPU without an input.
    pub fn input_addresses_by_rank(&self) -> Vec<u64> {
        self.inputs_by_rank
            .iter()
            .map(|input| input.as_ref().map_or(0, DeviceBuffer::device_address))
            .collect()
    }

    /// Device addresses of the output messages, indexed by rank; 0 for a GPU without an output.
    pub fn output_addresses_by_rank(&self) -> Vec<u64> {
        self.outputs_by_rank
            .iter()
            .map(|output| output.as_ref().map_or(0, DeviceOutput::address))
            .collect()
    }

    /// Makes a timed task from the message buffers of a collective and a function that enqueues the
    /// collective on the streams of all GPUs.
    pub fn into_task_that_enqueues_exchange(
        self,
        devices: &Devices,
        mut launch: impl FnMut() -> Result<(), BackendError> + 'static,
    ) -> CudaTask {
        let inputs = self.inputs_by_rank.into_iter().zip(INPUT_NAMES);
        let inputs: Vec<DeviceInput> =
            inputs.filter_map(|(buffer, name)| Some(DeviceInput::new(name, &buffer?))).collect();
        let outputs = self.outputs_by_rank.into_iter().flatten().collect();
        CudaTask::new(devices, inputs, outputs, move |_| launch())
    }
}
