//! The GPU backend: a computation consists of output tensors in device memory and the launches that
//! fill them.

use std::sync::Arc;

use rayon::prelude::*;

use super::executable::unknown_input_error;
use crate::backend::{AllowedActions, BackendError, Executable, OutputContent};
use crate::workload::{Dtype, Tensor, Tensors};
use kernelgate_cuda::driver::CudaStream;
use kernelgate_cuda::driver::stream::thread_state;
pub use kernelgate_cuda::{
    Arguments, Device, DeviceBuffer, Devices, JoinedStreams, Kernel, KernelArgument, KernelImage,
    KernelSpec, Launch, LoadedKernel, PreparedLaunch, RawContext, RawStream, RequiredArchitecture,
    Source,
};

/// An input that every launch reads from device memory.
pub struct Input {
    name: String,
    buffer: DeviceBuffer,
}

impl Input {
    /// Declares that `buffer` holds the workload's input of that name as the workload has it:
    /// row-major, of its dtype.
    pub fn new(name: impl Into<String>, buffer: &DeviceBuffer) -> Self {
        Self { name: name.into(), buffer: buffer.clone() }
    }

    /// Returns this input buffer under the name that the workload gives the input of GPU number
    /// `rank`.
    pub(super) fn named_for_rank(self, name: fn(&str, usize) -> &'static str, rank: usize) -> Self {
        Self { name: name(&self.name, rank).to_owned(), ..self }
    }
}

/// Pairs buffers with the names of the workload's inputs that they hold.
pub fn named_inputs<const N: usize>(named: [(&str, &DeviceBuffer); N]) -> [Input; N] {
    named.map(|(name, buffer)| Input::new(name, buffer))
}

/// An output tensor in device memory.
pub struct Output {
    name: &'static str,
    shape: Vec<usize>,
    dtype: Dtype,
    buffer: DeviceBuffer,
    decode: Option<DecodeFunction>,
}

/// Turns a device's bytes into the workload's tensor of that shape.
pub type DecodeFunction = fn(&[u8], &[usize]) -> Tensor;

impl Output {
    /// An output that lies on the device as it does in the workload: row-major, of that dtype.
    ///
    /// # Errors
    /// Fails if the device has too little free memory for the output.
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

    /// An output that lies in memory which launches also read.
    pub(super) fn in_state_buffer(
        buffer: &DeviceBuffer,
        name: &'static str,
        shape: Vec<usize>,
        dtype: Dtype,
    ) -> Output {
        Self { name, shape, dtype, buffer: buffer.clone(), decode: None }
    }

    /// An i8 output that device memory holds in an encoded form of this many bytes.
    ///
    /// # Errors
    /// Fails if device memory is short.
    pub fn new_encoded(
        device: &Device,
        name: &'static str,
        shape: impl Into<Vec<usize>>,
        bytes: usize,
        decode: DecodeFunction,
    ) -> Result<Output, BackendError> {
        Ok(Self {
            name,
            shape: shape.into(),
            dtype: Dtype::I8,
            buffer: device.allocate(bytes)?,
            decode: Some(decode),
        })
    }

    /// Returns this output buffer under the name that the workload gives the output of GPU number
    /// `rank`.
    pub(super) fn named_for_rank(self, name: fn(&str, usize) -> &'static str, rank: usize) -> Self {
        Self { name: name(self.name, rank), ..self }
    }

    /// Address on the device.
    pub fn address(&self) -> u64 {
        self.buffer.address()
    }

    /// Device memory of the output.
    pub(super) const fn buffer(&self) -> &DeviceBuffer {
        &self.buffer
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes()
    }

    /// Address that a kernel writes to, as an argument.
    pub fn argument(&self) -> KernelArgument {
        KernelArgument::from(&self.buffer)
    }

    /// NaN in every float format; in integers the byte of [`Tensor::poison`]; in encoded spikes the
    /// code that no spike has.
    const fn poison_byte(&self) -> u8 {
        match (self.dtype, self.decode) {
            (_, Some(_)) => 0xaa,
            (Dtype::I8, None) => 0x80,
            _ => 0xff,
        }
    }

    /// Returns whether samples of the output buffer, from beginning to end, hold only poison as
    /// `stream` sees them.
    fn still_poisoned(&self, stream: &CudaStream) -> Result<bool, BackendError> {
        let (bytes, poison) = (self.buffer.bytes(), self.poison_byte());
        let length = POISON_SAMPLE_BYTES.min(bytes);
        let mut sample = [0; POISON_SAMPLE_BYTES];
        for i in 0..=POISON_SAMPLE_INTERVALS {
            let offset = (bytes - length) / POISON_SAMPLE_INTERVALS * i;
            self.buffer.copy_to_host_on_stream(stream, offset, &mut sample[..length])?;
            if sample[..length].iter().any(|&byte| byte != poison) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Number of intervals between the samples of an output that are checked for poison.
const POISON_SAMPLE_INTERVALS: usize = 16;
const POISON_SAMPLE_BYTES: usize = 256;

/// Enqueues a computation that overwrites the outputs.
type LaunchFunction = Box<dyn FnMut(&[Output]) -> Result<(), BackendError>>;

/// A prepared computation on the GPU: its inputs, its outputs and the closure that launches it.
pub struct CudaTask {
    devices: Devices,
    /// Streams that see the memory of each GPU while its own stream is held.
    observers: Vec<Arc<CudaStream>>,
    inputs: Vec<Input>,
    outputs: Vec<Output>,
    /// Copies of each output in device memory, from which outputs are rewritten; allocated when
    /// first used.
    copies: Vec<OutputCopies>,
    launch: LaunchFunction,
    state: CudaTaskState,
    allowed: AllowedActions,
    /// Number of launches after which the thread's state was checked so far.
    checked: u32,
    memory_uses: Vec<(&'static str, u64)>,
    host: Tensors,
}

/// Device memory for two copies of one output.
struct OutputCopies {
    results: DeviceBuffer,
    poison: DeviceBuffer,
}

/// Closure that enqueues the restoring of the state which launches change.
type ResetFunction = Box<dyn FnMut() -> Result<(), BackendError>>;

/// State that a launch leaves for the next launch.
enum CudaTaskState {
    /// Launches keep no state, so each repeats the one before.
    Absent,
    /// Restored before each launch.
    BeforeEachLaunch(ResetFunction),
    /// The state lies in outputs, and a launch continues from the results of the one before. State
    /// is restored after the outputs were poisoned, so every comparison follows one launch from the
    /// original state.
    InOutputs { restore: ResetFunction, poisoned: bool },
}

/// Number of launches after which the thread's state is checked: those that verify, and the first
/// timed ones.
const LAUNCHES_WITH_STATE_CHECK: u32 = 8;

impl CudaTask {
    /// `launch` enqueues everything that overwrites the outputs on the device's stream, and never
    /// synchronises. `inputs` are the inputs that every launch reads, without those that were
    /// packed or passed by value.
    pub fn new(
        devices: impl Into<Devices>,
        inputs: impl IntoIterator<Item = Input>,
        outputs: Vec<Output>,
        launch: impl FnMut(&[Output]) -> Result<(), BackendError> + 'static,
    ) -> Self {
        Self {
            devices: devices.into(),
            observers: Vec::new(),
            inputs: inputs.into_iter().collect(),
            outputs,
            copies: Vec::new(),
            launch: Box::new(launch),
            state: CudaTaskState::Absent,
            allowed: AllowedActions::OWN_ROW,
            checked: 0,
            memory_uses: Vec::new(),
            host: Tensors::new(),
        }
    }

    /// Sets the closure that restores the state which one launch leaves for the next, so that the
    /// next launch computes the reference again. The reset is called before each launch, outside of
    /// the measured time, and launches are not batched. The reset must not read an input that
    /// launches read: after timing these inputs are replaced between the reset and the launch.
    pub fn with_reset(self, reset: impl FnMut() -> Result<(), BackendError> + 'static) -> Self {
        Self { state: CudaTaskState::BeforeEachLaunch(Box::new(reset)), ..self }
    }

    /// A task whose launches update a state that lies in outputs. Any number of launches may follow
    /// each other; `restore` copies the original state back after the outputs were poisoned.
    pub(super) fn with_state_in_outputs(
        self,
        restore: impl FnMut() -> Result<(), BackendError> + 'static,
    ) -> Self {
        Self {
            state: CudaTaskState::InOutputs { restore: Box::new(restore), poisoned: false },
            ..self
        }
    }

    /// Declares the purposes of the row's device memory: uses such as `weights` or `activations`
    /// with their bytes, each use once.
    pub fn with_memory_uses(self, memory_uses: Vec<(&'static str, u64)>) -> Self {
        Self { memory_uses, ..self }
    }

    /// Marks a `launch` that calls other code: it is an error if that code waits, allocates,
    /// changes the current context or leaves a capture open ([`AllowedActions::ATTACHED_ROW`]).
    pub fn attached(self) -> Self {
        Self { allowed: AllowedActions::ATTACHED_ROW, ..self }
    }

    /// The GPU that an output lies on.
    fn device_of_output(&self, output: &Output) -> &Arc<Device> {
        let ordinal = output.buffer.gpu_ordinal();
        let own = self.devices.iter().find(|device| device.facts().ordinal == ordinal);
        own.unwrap_or_else(|| self.devices.first_device())
    }

    /// Makes the first GPU current again, after work on several.
    fn make_first_gpu_current(&self) -> Result<(), BackendError> {
        if self.devices.device_count() > 1 {
            self.devices.first_device().make_current()
        } else {
            Ok(())
        }
    }
}

impl Executable for CudaTask {
    fn poison_outputs(&mut self) -> Result<(), BackendError> {
        if let CudaTaskState::InOutputs { poisoned, .. } = &mut self.state {
            *poisoned = true;
        }
        self.outputs.iter().try_for_each(|output| output.buffer.fill(output.poison_byte()))?;
        self.make_first_gpu_current()
    }

    fn rewrite_outputs(&mut self, with: OutputContent) -> Result<(), BackendError> {
        if self.copies.is_empty() {
            let copies_of = |output: &Output| {
                let allocate = || self.device_of_output(output).allocate(output.bytes());
                Ok::<_, BackendError>(OutputCopies { results: allocate()?, poison: allocate()? })
            };
            self.copies = self.outputs.iter().map(copies_of).collect::<Result<_, _>>()?;
        }
        if let (CudaTaskState::InOutputs { poisoned, .. }, OutputContent::Poison) =
            (&mut self.state, with)
        {
            *poisoned = true;
        }
        for (copies, output) in self.copies.iter().zip(&self.outputs).filter(|(_, o)| o.bytes() > 0)
        {
            let (device, all) = (self.device_of_output(output), 0..output.bytes());
            device.make_current()?;
            copies.results.copy_range(device.stream(), 0, &output.buffer, all.clone())?;
            copies.poison.fill(output.poison_byte())?;
            let from = match with {
                OutputContent::Poison => &copies.poison,
                OutputContent::Results => &copies.results,
            };
            output.buffer.copy_range(device.stream(), 0, from, all)?;
        }
        self.make_first_gpu_current()
    }

    fn reset(&mut self) -> Result<(), BackendError> {
        match &mut self.state {
            CudaTaskState::Absent | CudaTaskState::InOutputs { poisoned: false, .. } => Ok(()),
            CudaTaskState::BeforeEachLaunch(reset) => reset(),
            CudaTaskState::InOutputs { restore, poisoned } => {
                restore()?;
                *poisoned = false;
                Ok(())
            }
        }
    }

    fn carries_state(&self) -> bool {
        !matches!(self.state, CudaTaskState::Absent)
    }

    fn gpus(&self) -> usize {
        self.devices.device_count()
    }

    fn allowed(&self) -> AllowedActions {
        self.allowed
    }

    fn launch(&mut self) -> Result<(), BackendError> {
        let launched = if !self.allowed.contexts && self.checked < LAUNCHES_WITH_STATE_CHECK {
            self.checked += 1;
            thread_state::restore_after_launch(self.devices.first_device(), || {
                (self.launch)(&self.outputs)
            })
        } else {
            (self.launch)(&self.outputs)
        };
        // The errors of other code are its own texts and do not report whether the device is lost.
        launched.map_err(|error| match self.synchronize() {
            Err(lost @ BackendError::Lost(_)) => lost,
            _ => error,
        })
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        if self.devices.device_count() == 1 {
            return self.devices.first_device().synchronize();
        }
        self.devices.for_each_device(|rank, device| {
            device.synchronize().map_err(|error| match error {
                BackendError::Lost(why) => {
                    let ordinal = device.facts().ordinal;
                    BackendError::Lost(format!("rank {rank} on GPU {ordinal}: {why}"))
                }
                error => error,
            })
        })
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
                    let mut tensor = self.host.take(output.name).unwrap_or_else(|| {
                        let mut tensor = Tensor::zeroed(output.shape.clone(), output.dtype);
                        // The system hands out pages when they are first touched: by all cores
                        // here, by one in the copy.
                        tensor.as_bytes_mut().par_chunks_mut(1 << 20).for_each(|part| part.fill(0));
                        tensor
                    });
                    output.buffer.download(tensor.as_bytes_mut())?;
                    tensor
                }
            };
            self.host.insert(output.name, tensor);
        }
        self.make_first_gpu_current()?;
        Ok(&self.host)
    }

    fn launch_inputs(&self) -> Vec<&str> {
        self.inputs.iter().map(|input| input.name.as_str()).collect()
    }

    fn memory_uses(&self) -> &[(&'static str, u64)] {
        &self.memory_uses
    }

    fn replace_input(&mut self, name: &str, values: &Tensor) -> Result<(), BackendError> {
        // Several GPUs may have an input of this name.
        let mut copies = self.inputs.iter().filter(|input| input.name == name).peekable();
        copies.peek().ok_or_else(|| unknown_input_error(name))?;
        copies.try_for_each(|input| input.buffer.overwrite_from_host(values.as_bytes()))?;
        self.make_first_gpu_current()
    }

    fn still_poisoned(&mut self) -> Result<Vec<bool>, BackendError> {
        if self.observers.is_empty() {
            let streams = self.devices.iter().map(|device| device.create_stream());
            self.observers = streams.collect::<Result<_, _>>()?;
        }
        let observer_of = |output: &Output| {
            let ordinal = output.buffer.gpu_ordinal();
            let rank = self.devices.iter().position(|device| device.facts().ordinal == ordinal);
            &self.observers[rank.unwrap_or(0)]
        };
        let poisoned =
            self.outputs.iter().map(|output| output.still_poisoned(observer_of(output))).collect();
        self.make_first_gpu_current()?;
        poisoned
    }
}
