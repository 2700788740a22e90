//! The GPU backend, whose tasks consist of output tensors in device memory and a closure that
//! launches the kernels that fill the outputs.

use std::sync::Arc;

use rayon::prelude::*;

use super::executable::input_not_read_by_launches_error;
use crate::backend::{
    AllowedActionsOfTimedCode, BackendError, LaunchableProblem, OutputContentBeforeLaunch,
};
use crate::workload::{Dtype, Tensor, Tensors};
use kernelgate_cuda::driver::CudaStream;
use kernelgate_cuda::driver::stream::thread_state;
pub use kernelgate_cuda::{
    Device, DeviceBuffer, Devices, ForeignStreamJoinedWithDevice, Kernel, KernelArgument,
    KernelArgumentList, KernelImage, KernelSpec, Launch, LoadedKernelWithLaunch, PreparedLaunch,
    RawContextHandle, RawStreamHandle, RequiredArchitecture, Source,
};

/// An input tensor in device memory that every launch reads.
pub struct DeviceInput {
    input_name: String,
    buffer: DeviceBuffer,
}

impl DeviceInput {
    /// Declares that `buffer` contains the problem's input of this name in its original layout:
    /// row-major, with the input's dtype.
    pub fn new(name: impl Into<String>, buffer: &DeviceBuffer) -> Self {
        Self { input_name: name.into(), buffer: buffer.clone() }
    }

    /// Renames the input to the problem's name for the input of GPU number `rank`.
    pub(super) fn renamed_for_gpu_rank(
        self,
        name: fn(&str, usize) -> &'static str,
        rank: usize,
    ) -> Self {
        Self { input_name: name(&self.input_name, rank).to_owned(), ..self }
    }
}

/// Pairs buffers with the names of the problem's inputs that they contain.
pub fn named_inputs<const N: usize>(named: [(&str, &DeviceBuffer); N]) -> [DeviceInput; N] {
    named.map(|(name, buffer)| DeviceInput::new(name, buffer))
}

/// An output tensor in device memory.
pub struct DeviceOutput {
    output_name: &'static str,
    shape: Vec<usize>,
    dtype: Dtype,
    buffer: DeviceBuffer,
    decode: Option<DecodeDeviceBytes>,
}

/// Decodes the bytes of an output in device memory to a tensor of the problem's shape.
pub type DecodeDeviceBytes = fn(&[u8], &[usize]) -> Tensor;

impl DeviceOutput {
    /// Allocates an output that has the problem's layout in device memory: row-major, with the
    /// output's dtype.
    ///
    /// # Errors
    /// Fails if the device has too little free memory.
    pub fn new(
        device: &Device,
        name: &'static str,
        shape: impl Into<Vec<usize>>,
        dtype: Dtype,
    ) -> Result<Self, BackendError> {
        let shape = shape.into();
        let buffer =
            device.allocate(shape.iter().product::<usize>() * dtype.bytes_per_element())?;
        Ok(Self { output_name: name, shape, dtype, buffer, decode: None })
    }

    /// Makes an output in existing device memory that launches both read and write.
    pub(super) fn in_memory_updated_by_launches(
        buffer: &DeviceBuffer,
        name: &'static str,
        shape: Vec<usize>,
        dtype: Dtype,
    ) -> DeviceOutput {
        Self { output_name: name, shape, dtype, buffer: buffer.clone(), decode: None }
    }

    /// Allocates an i8 output that device memory stores in another encoding of `bytes` bytes;
    /// `decode` converts it to i8.
    ///
    /// # Errors
    /// Fails if the device has too little free memory.
    pub fn allocate_encoded_i8(
        device: &Device,
        name: &'static str,
        shape: impl Into<Vec<usize>>,
        bytes: usize,
        decode: DecodeDeviceBytes,
    ) -> Result<DeviceOutput, BackendError> {
        Ok(Self {
            output_name: name,
            shape: shape.into(),
            dtype: Dtype::I8,
            buffer: device.allocate(bytes)?,
            decode: Some(decode),
        })
    }

    /// Renames the output to the problem's name for the output of GPU number `rank`.
    pub(super) fn renamed_for_gpu_rank(
        self,
        name: fn(&str, usize) -> &'static str,
        rank: usize,
    ) -> Self {
        Self { output_name: name(self.output_name, rank), ..self }
    }

    /// Address of the output in device memory.
    pub fn address(&self) -> u64 {
        self.buffer.device_address()
    }

    /// The buffer in device memory that contains the output.
    pub(super) const fn device_buffer(&self) -> &DeviceBuffer {
        &self.buffer
    }

    /// Size of the output's device buffer in bytes.
    pub fn bytes(&self) -> usize {
        self.buffer.size_in_bytes()
    }

    /// The output's device address as a kernel argument.
    pub fn argument(&self) -> KernelArgument {
        KernelArgument::from(&self.buffer)
    }

    /// The byte with which poisoning fills the output: NaN in all float formats, -128 in i8, and an
    /// invalid code in encoded spikes.
    const fn poison_fill_byte(&self) -> u8 {
        match (self.dtype, self.decode) {
            (_, Some(_)) => 0xaa,
            (Dtype::I8, None) => 0x80,
            _ => 0xff,
        }
    }

    /// Whether samples of the output, spread from its beginning to its end and copied on `stream`,
    /// contain only the poison byte.
    fn samples_are_still_poisoned(&self, stream: &CudaStream) -> Result<bool, BackendError> {
        let (bytes, poison) = (self.buffer.size_in_bytes(), self.poison_fill_byte());
        let length = POISON_SAMPLE_BYTES.min(bytes);
        let mut sample = [0; POISON_SAMPLE_BYTES];
        for i in 0..=POISON_SAMPLE_INTERVALS {
            let offset = (bytes - length) / POISON_SAMPLE_INTERVALS * i;
            self.buffer.copy_to_host_on_other_stream(stream, offset, &mut sample[..length])?;
            if sample[..length].iter().any(|&byte| byte != poison) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Number of intervals between the samples that are checked for poison; there is one more sample
/// than intervals.
const POISON_SAMPLE_INTERVALS: usize = 16;
const POISON_SAMPLE_BYTES: usize = 256;

/// Closure that enqueues kernels which overwrite the outputs.
type EnqueueCudaLaunch = Box<dyn FnMut(&[DeviceOutput]) -> Result<(), BackendError>>;

/// A problem prepared on one or several GPUs: inputs, outputs and the closure that enqueues one
/// launch.
pub struct CudaTask {
    devices: Devices,
    /// One stream per GPU that can read device memory while the GPU's timed stream is blocked.
    memory_observer_streams: Vec<Arc<CudaStream>>,
    inputs: Vec<DeviceInput>,
    outputs: Vec<DeviceOutput>,
    /// For each output, device copies of its results and of poison, from which the output is
    /// rewritten; allocated at first use.
    results_and_poison: Vec<ResultsAndPoisonOfOutput>,
    enqueue_launch: EnqueueCudaLaunch,
    state_between_launches: StateBetweenLaunches,
    allowed_actions: AllowedActionsOfTimedCode,
    /// Number of launches so far after which the host thread's CUDA state was checked.
    launches_with_checked_thread_state: u32,
    device_bytes_by_purpose: Vec<(&'static str, u64)>,
    host_outputs: Tensors,
}

/// Two device buffers for one output: a copy of its results, and poison.
struct ResultsAndPoisonOfOutput {
    copy_of_results: DeviceBuffer,
    poison: DeviceBuffer,
}

/// Closure that enqueues work which restores the state that launches change.
type EnqueueReset = Box<dyn FnMut() -> Result<(), BackendError>>;

/// Whether a launch changes state that the next launch reads, and how the state is restored.
enum StateBetweenLaunches {
    /// Launches change no state, so each launch repeats the previous one.
    NoState,
    /// The closure restores the changed state before each launch.
    ResetBeforeEachLaunch(EnqueueReset),
    /// The state is in the outputs: each launch continues from the outputs of the previous launch.
    /// `restore` runs only after the outputs were poisoned, so that verified outputs come from one
    /// launch on the original state.
    StateInOutputs { restore: EnqueueReset, poisoned: bool },
}

/// Number of launches after which the host thread's CUDA state is checked, enough for verification
/// and the first timed launches.
const LAUNCHES_WITH_THREAD_STATE_CHECK: u32 = 8;

impl CudaTask {
    /// The closure `launch` enqueues all work that overwrites the outputs on the device's stream,
    /// and never waits for the GPU. `inputs` are the inputs that every launch reads from device
    /// memory, without inputs that were packed during preparation or are passed by value.
    pub fn new(
        devices: impl Into<Devices>,
        inputs: impl IntoIterator<Item = DeviceInput>,
        outputs: Vec<DeviceOutput>,
        launch: impl FnMut(&[DeviceOutput]) -> Result<(), BackendError> + 'static,
    ) -> Self {
        Self {
            devices: devices.into(),
            memory_observer_streams: Vec::new(),
            inputs: inputs.into_iter().collect(),
            outputs,
            results_and_poison: Vec::new(),
            enqueue_launch: Box::new(launch),
            state_between_launches: StateBetweenLaunches::NoState,
            allowed_actions: AllowedActionsOfTimedCode::ALLOWED_IN_OWN_ROW,
            launches_with_checked_thread_state: 0,
            device_bytes_by_purpose: Vec::new(),
            host_outputs: Tensors::new(),
        }
    }

    /// Sets the closure that restores the state which a launch changes, so that every launch
    /// computes the reference outputs. The harness calls the reset before each launch outside the
    /// measured time, and measures launches one by one instead of in batches. The reset must not
    /// read inputs that launches read: after timing, the harness replaces these inputs between
    /// reset and launch.
    pub fn with_reset(self, reset: impl FnMut() -> Result<(), BackendError> + 'static) -> Self {
        Self {
            state_between_launches: StateBetweenLaunches::ResetBeforeEachLaunch(Box::new(reset)),
            ..self
        }
    }

    /// Declares that launches update a state that is in the outputs. Launches may follow each other
    /// without reset; `restore` copies the original state back after the outputs were poisoned.
    pub(super) fn with_state_restored_in_outputs(
        self,
        restore: impl FnMut() -> Result<(), BackendError> + 'static,
    ) -> Self {
        Self {
            state_between_launches: StateBetweenLaunches::StateInOutputs {
                restore: Box::new(restore),
                poisoned: false,
            },
            ..self
        }
    }

    /// Declares the bytes of device memory for each purpose, such as `weights` or `activations`;
    /// each purpose occurs once.
    pub fn with_device_memory_by_purpose(self, memory_uses: Vec<(&'static str, u64)>) -> Self {
        Self { device_bytes_by_purpose: memory_uses, ..self }
    }

    /// Marks a `launch` that calls other code: waits, allocations, context changes and open
    /// captures become errors ([`AllowedActionsOfTimedCode::ALLOWED_IN_ATTACHED_ROW`]).
    pub fn marked_as_attached_code(self) -> Self {
        Self { allowed_actions: AllowedActionsOfTimedCode::ALLOWED_IN_ATTACHED_ROW, ..self }
    }

    /// The GPU whose memory contains the output.
    fn gpu_of_output(&self, output: &DeviceOutput) -> &Arc<Device> {
        let ordinal = output.buffer.ordinal_of_gpu();
        let own = self.devices.iter().find(|device| device.gpu_properties().gpu_ordinal == ordinal);
        own.unwrap_or_else(|| self.devices.first_device())
    }

    /// Makes the first GPU's context current again after work on several GPUs.
    fn make_first_gpu_context_current(&self) -> Result<(), BackendError> {
        if self.devices.device_count() > 1 {
            self.devices.first_device().make_context_current()
        } else {
            Ok(())
        }
    }
}

impl LaunchableProblem for CudaTask {
    fn poison_outputs(&mut self) -> Result<(), BackendError> {
        if let StateBetweenLaunches::StateInOutputs { poisoned, .. } =
            &mut self.state_between_launches
        {
            *poisoned = true;
        }
        self.outputs
            .iter()
            .try_for_each(|output| output.buffer.fill_all_bytes(output.poison_fill_byte()))?;
        self.make_first_gpu_context_current()
    }

    fn overwrite_outputs_before_launch(
        &mut self,
        with: OutputContentBeforeLaunch,
    ) -> Result<(), BackendError> {
        if self.results_and_poison.is_empty() {
            let copies_of = |output: &DeviceOutput| {
                let allocate = || self.gpu_of_output(output).allocate(output.bytes());
                Ok::<_, BackendError>(ResultsAndPoisonOfOutput {
                    copy_of_results: allocate()?,
                    poison: allocate()?,
                })
            };
            self.results_and_poison =
                self.outputs.iter().map(copies_of).collect::<Result<_, _>>()?;
        }
        if let (
            StateBetweenLaunches::StateInOutputs { poisoned, .. },
            OutputContentBeforeLaunch::Poison,
        ) = (&mut self.state_between_launches, with)
        {
            *poisoned = true;
        }
        for (copies, output) in
            self.results_and_poison.iter().zip(&self.outputs).filter(|(_, o)| o.bytes() > 0)
        {
            let (device, all) = (self.gpu_of_output(output), 0..output.bytes());
            device.make_context_current()?;
            copies.copy_of_results.copy_range_from(
                device.stream(),
                0,
                &output.buffer,
                all.clone(),
            )?;
            copies.poison.fill_all_bytes(output.poison_fill_byte())?;
            let from = match with {
                OutputContentBeforeLaunch::Poison => &copies.poison,
                OutputContentBeforeLaunch::PreviousResults => &copies.copy_of_results,
            };
            output.buffer.copy_range_from(device.stream(), 0, from, all)?;
        }
        self.make_first_gpu_context_current()
    }

    fn reset_state(&mut self) -> Result<(), BackendError> {
        match &mut self.state_between_launches {
            StateBetweenLaunches::NoState
            | StateBetweenLaunches::StateInOutputs { poisoned: false, .. } => Ok(()),
            StateBetweenLaunches::ResetBeforeEachLaunch(reset) => reset(),
            StateBetweenLaunches::StateInOutputs { restore, poisoned } => {
                restore()?;
                *poisoned = false;
                Ok(())
            }
        }
    }

    fn launches_carry_state(&self) -> bool {
        !matches!(self.state_between_launches, StateBetweenLaunches::NoState)
    }

    fn gpus_used_by_launch(&self) -> usize {
        self.devices.device_count()
    }

    fn actions_allowed_to_launches(&self) -> AllowedActionsOfTimedCode {
        self.allowed_actions
    }

    fn launch_once(&mut self) -> Result<(), BackendError> {
        let launched = if !self.allowed_actions.may_change_current_context
            && self.launches_with_checked_thread_state < LAUNCHES_WITH_THREAD_STATE_CHECK
        {
            self.launches_with_checked_thread_state += 1;
            thread_state::launch_and_restore_thread_state(self.devices.first_device(), || {
                (self.enqueue_launch)(&self.outputs)
            })
        } else {
            (self.enqueue_launch)(&self.outputs)
        };
        // Errors of attached code are plain texts, so synchronizing shows whether the device was
        // lost.
        launched.map_err(|error| match self.wait_for_launches() {
            Err(lost @ BackendError::DeviceLost(_)) => lost,
            _ => error,
        })
    }

    fn wait_for_launches(&mut self) -> Result<(), BackendError> {
        if self.devices.device_count() == 1 {
            return self.devices.first_device().synchronize();
        }
        self.devices.for_each_with_context_current(|rank, device| {
            device.synchronize().map_err(|error| match error {
                BackendError::DeviceLost(why) => {
                    let ordinal = device.gpu_properties().gpu_ordinal;
                    BackendError::DeviceLost(format!("rank {rank} on GPU {ordinal}: {why}"))
                }
                error => error,
            })
        })
    }

    fn outputs_on_host(&mut self) -> Result<&Tensors, BackendError> {
        for output in &self.outputs {
            let tensor = match output.decode {
                Some(decode) => {
                    let mut bytes = vec![0; output.buffer.size_in_bytes()];
                    output.buffer.download_first_bytes(&mut bytes)?;
                    decode(&bytes, &output.shape)
                }
                None => {
                    let mut tensor =
                        self.host_outputs.take(output.output_name).unwrap_or_else(|| {
                            let mut tensor =
                                Tensor::filled_with_zeros(output.shape.clone(), output.dtype);
                            // Memory pages are allocated at the first write; writing zeros from all
                            // cores is faster than the single-threaded copy.
                            tensor
                                .as_bytes_mut()
                                .par_chunks_mut(1 << 20)
                                .for_each(|part| part.fill(0));
                            tensor
                        });
                    output.buffer.download_first_bytes(tensor.as_bytes_mut())?;
                    tensor
                }
            };
            self.host_outputs.insert(output.output_name, tensor);
        }
        self.make_first_gpu_context_current()?;
        Ok(&self.host_outputs)
    }

    fn names_of_inputs_read_by_launches(&self) -> Vec<&str> {
        self.inputs.iter().map(|input| input.input_name.as_str()).collect()
    }

    fn device_memory_by_purpose(&self) -> &[(&'static str, u64)] {
        &self.device_bytes_by_purpose
    }

    fn replace_input(&mut self, name: &str, values: &Tensor) -> Result<(), BackendError> {
        // Several GPUs may have an input of this name, and all of them are overwritten.
        let mut copies = self.inputs.iter().filter(|input| input.input_name == name).peekable();
        copies.peek().ok_or_else(|| input_not_read_by_launches_error(name))?;
        copies.try_for_each(|input| {
            input.buffer.overwrite_first_bytes_from_host(values.as_bytes())
        })?;
        self.make_first_gpu_context_current()
    }

    fn outputs_are_still_poisoned(&mut self) -> Result<Vec<bool>, BackendError> {
        if self.memory_observer_streams.is_empty() {
            let streams = self.devices.iter().map(|device| device.create_another_stream());
            self.memory_observer_streams = streams.collect::<Result<_, _>>()?;
        }
        let observer_of = |output: &DeviceOutput| {
            let ordinal = output.buffer.ordinal_of_gpu();
            let rank = self
                .devices
                .iter()
                .position(|device| device.gpu_properties().gpu_ordinal == ordinal);
            &self.memory_observer_streams[rank.unwrap_or(0)]
        };
        let poisoned = self
            .outputs
            .iter()
            .map(|output| output.samples_are_still_poisoned(observer_of(output)))
            .collect();
        self.make_first_gpu_context_current()?;
        poisoned
    }
}
