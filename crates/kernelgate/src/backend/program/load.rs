//! Loads a program on a device: compiles its kernels and allocates its memory.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use kernelgate_cuda::architecture::supports_programmatic_launch;
use kernelgate_cuda::driver::CudaStream;
use kernelgate_cuda::driver::graph::ExecutableGraph;
use kernelgate_cuda::driver::memory::access_window::L2Window;
use kernelgate_cuda::driver::memory::persistence::PersistingL2;
use kernelgate_cuda::driver::stream::event::CrossingEvent;
use kernelgate_cuda::libraries::gemm::{CublasLtLanes, GemmOperands, GemmSpec, PreparedGemm};
use kernelgate_cuda::observe::range::RangeGuard;
use kernelgate_cuda::{BackendError, Device, DeviceBuffer, KernelArgument, Launch, LoadedKernel};

use super::lanes::Lane;
use super::memory::{MemoryRegion, ProgramMemoryPlan, RegionContents, TableWord};
use super::operand::{Operand, Pointer};
use super::plan::Program;
use super::step::{EnqueueFunction, ForeignLaunchSite, KeptL2Lines, KernelLaunch, ProgramStep};
use crate::backend::cuda::{CudaTask, Input, Output};
use crate::workload::Tensors;

/// Most launches of a GEMM by which its algorithm is chosen.
const MAX_LAUNCHES_TIMED_TO_CHOOSE: usize = 40;

/// How the launches of a program reach the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capture {
    /// Steps are enqueued one by one from the host.
    Stream,
    /// Steps are captured once as a CUDA graph, which is replayed.
    Graph,
}

/// A program on a device: everything compiled, allocated and uploaded.
pub struct LoadedProgram {
    steps: Vec<LoadedProgramStep>,
    regions: Vec<(String, DeviceBuffer)>,
    inputs: Vec<Input>,
    outputs: Vec<Output>,
    state: ProgramState,
    /// Addresses of the GEMM workspaces, which a captured graph clears before its first launch.
    cleared: std::ops::Range<u64>,
    _set_aside: Option<PersistingL2>,
}

/// Regions that launches update, and the inputs that their contents were made from.
#[derive(Default)]
struct ProgramState {
    regions: Vec<(MemoryRegion, DeviceBuffer)>,
    inputs: Tensors,
}

impl ProgramState {
    fn restore_contents(&self) -> Result<(), BackendError> {
        for (region, buffer) in &self.regions {
            if let Some(bytes) = region.uploaded(&self.inputs)? {
                buffer.overwrite_from_host(&bytes)?;
            }
        }
        Ok(())
    }
}

/// A step of the program, ready to be enqueued.
enum LoadedProgramStep {
    Enqueue(EnqueueFunction),
    Begin(String),
    End,
}

impl Program {
    /// Makes a timed task of a program: loads the program and, for a graph, captures it.
    ///
    /// # Errors
    /// The program's first mistake, or if a kernel does not compile, a library is missing or knows
    /// no algorithm, device memory is short, or a launch cannot be captured.
    pub fn into_task(
        self,
        device: &Arc<Device>,
        inputs: &Tensors,
        capture: Capture,
    ) -> Result<CudaTask, BackendError> {
        let uses = self.bytes_by_memory_purpose();
        let mut program = self.load_program(device, inputs)?;
        let (inputs, outputs) = program.take_tensors();
        let state = std::mem::take(&mut program.state);
        let task = match capture {
            Capture::Stream => {
                CudaTask::new(device, inputs, outputs, move |_| program.enqueue_program())
            }
            Capture::Graph => {
                // One launch first: modules that it loads cannot be loaded during a capture.
                program.enqueue_program()?;
                device.synchronize()?;
                let cleared = program.range_cleared_first();
                let graph = ExecutableGraph::capture_clearing_first(device, cleared, || {
                    program.enqueue_program()
                })?;
                CudaTask::new(device, inputs, outputs, move |_| {
                    // The graph launches the program's kernels on the program's memory, so the
                    // program must stay alive.
                    let _alive = &program;
                    graph.launch()
                })
            }
        };
        let task = task.with_memory_uses(uses);
        match state.regions.is_empty() {
            true => Ok(task),
            false => Ok(task.with_state_in_outputs(move || state.restore_contents())),
        }
    }

    /// Compiles and loads the program's kernels, allocates and fills its memory, and chooses an
    /// algorithm for each GEMM. The library of GEMMs is opened only if there are any.
    pub fn load_program(
        self,
        device: &Arc<Device>,
        tensors: &Tensors,
    ) -> Result<LoadedProgram, BackendError> {
        self.check()?;
        let Self { memory, steps, order, kept, gemm_lanes, .. } = self;
        let blas = (gemm_lanes > 0).then(|| CublasLtLanes::open(device, gemm_lanes)).transpose()?;
        let set_aside = kept.map(|(_, bytes)| PersistingL2::new(device, bytes)).transpose()?;
        let streams = (0..order.lane_count()).map(|lane| match &blas {
            _ if lane == Lane::MAIN_LANE.lane_number() => Ok(Arc::clone(device.stream())),
            Some(blas) if lane < gemm_lanes => Ok(Arc::clone(blas.stream_of_lane(lane))),
            _ => device.create_stream(),
        });
        let streams = streams.collect::<Result<Vec<_>, BackendError>>()?;
        let memory = LoadedProgramMemory::new(memory, device, tensors)?;
        let window = match (&set_aside, kept) {
            (Some(set_aside), Some((from, bytes))) => {
                Some(set_aside.access_policy_window(memory.address(from), bytes))
            }
            _ => None,
        };
        let mut loader = ProgramStepLoader {
            device,
            blas,
            streams,
            memory,
            window,
            kernels: BTreeMap::new(),
            gemms: vec![],
        };
        loader.load_all_gemms(&steps)?;
        let steps = steps.into_iter().map(|step| loader.step(step));
        let steps = steps.collect::<Result<Vec<_>, _>>()?;
        let LoadedProgramMemory { regions, buffers, inputs, outputs } = loader.memory;
        let buffer = |region: &MemoryRegion| buffers[region.slot].clone();
        let named = |region: &MemoryRegion| (region.name.clone().into_owned(), buffer(region));
        let named = regions.iter().map(named).collect();
        let updated = regions.into_iter().filter(|region| region.updated).map(|region| {
            let buffer = buffer(&region);
            (region, buffer)
        });
        let regions: Vec<(MemoryRegion, DeviceBuffer)> = updated.collect();
        // The tensors of the inputs are shared; without a state nothing reads them after loading.
        let inputs_of_state = if regions.is_empty() { Tensors::new() } else { tensors.clone() };
        let state = ProgramState { regions, inputs: inputs_of_state };
        let cleared = loader.blas.map_or(0..0, |blas| blas.workspace_memory());
        Ok(LoadedProgram {
            steps,
            regions: named,
            inputs,
            outputs,
            state,
            cleared,
            _set_aside: set_aside,
        })
    }
}

/// The memory of a loaded program on a device.
struct LoadedProgramMemory {
    regions: Vec<MemoryRegion>,
    /// Buffers by slot.
    buffers: Vec<DeviceBuffer>,
    inputs: Vec<Input>,
    outputs: Vec<Output>,
}

impl LoadedProgramMemory {
    /// Allocates every slot and fills it, one region's contents at a time.
    fn new(
        plan: ProgramMemoryPlan,
        device: &Device,
        tensors: &Tensors,
    ) -> Result<Self, BackendError> {
        let ProgramMemoryPlan { regions, slots, .. } = plan;
        let mut buffers: Vec<Option<DeviceBuffer>> = vec![None; slots.len()];
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for region in &regions {
            let slot = &mut buffers[region.slot];
            if let Some(bytes) = region.uploaded(tensors)? {
                let buffer = device.upload(&bytes)?;
                match &region.contents {
                    RegionContents::Input { replaceable: true } => {
                        inputs.push(Input::new(region.name.clone(), &buffer));
                    }
                    RegionContents::State { output, shape, dtype } => {
                        outputs.push(Output::in_state_buffer(
                            &buffer,
                            output,
                            shape.clone(),
                            *dtype,
                        ));
                    }
                    _ => {}
                }
                *slot = Some(buffer);
            } else if let RegionContents::Output { name, shape, dtype } = &region.contents {
                let output = Output::new(device, name, shape.clone(), *dtype)?;
                *slot = Some(output.buffer().clone());
                outputs.push(output);
            } else if slot.is_none() {
                // Scratch; and tables, which follow when every address is known.
                *slot = Some(device.allocate(slots[region.slot].bytes)?);
            }
        }
        let buffers = buffers.into_iter().flatten().collect();
        let memory = Self { regions, buffers, inputs, outputs };
        for region in &memory.regions {
            if let RegionContents::Table(words) = &region.contents {
                let bytes: Vec<u8> =
                    words.iter().flat_map(|word| memory.word(*word).to_ne_bytes()).collect();
                memory.buffers[region.slot].overwrite_from_host(&bytes)?;
            }
        }
        Ok(memory)
    }

    fn word(&self, word: TableWord) -> u64 {
        match word {
            TableWord::Value(value) => value as u64,
            TableWord::Pointer(pointer) => self.address(pointer),
        }
    }

    fn buffer_of_pointer(&self, pointer: Pointer) -> &DeviceBuffer {
        &self.buffers[self.regions[pointer.region].slot]
    }

    fn address(&self, pointer: Pointer) -> u64 {
        pointer.resolve_address(self.buffer_of_pointer(pointer).address())
    }

    fn resolve_argument(&self, operand: Operand) -> Result<KernelArgument, BackendError> {
        Ok(match operand {
            Operand::Boxes(pointer, boxes) => {
                KernelArgument::bytes(&boxes.encode_map(self.address(pointer))?)
            }
            Operand::Pointer(pointer) => KernelArgument::Address(self.address(pointer)),
            Operand::Null => KernelArgument::Address(0),
            Operand::I32(value) => KernelArgument::I32(value),
            Operand::I64(value) => KernelArgument::I64(value),
            Operand::F32(value) => KernelArgument::F32(value),
        })
    }
}

/// A kernel loaded for several launch shapes.
type KernelByLaunchShape = Vec<(Launch, Rc<LoadedKernel>)>;

/// Turns the steps of a program into functions that enqueue them.
struct ProgramStepLoader<'a> {
    device: &'a Arc<Device>,
    blas: Option<Rc<CublasLtLanes>>,
    /// Streams by lane.
    streams: Vec<Arc<CudaStream>>,
    memory: LoadedProgramMemory,
    window: Option<L2Window>,
    /// Loaded kernels by kernel name and lane.
    kernels: BTreeMap<(String, Lane), KernelByLaunchShape>,
    gemms: Vec<(GemmSpec, Rc<PreparedGemm>)>,
}

impl ProgramStepLoader<'_> {
    fn step(&mut self, step: ProgramStep) -> Result<LoadedProgramStep, BackendError> {
        let enqueue: EnqueueFunction = match step {
            ProgramStep::Begin(name) => return Ok(LoadedProgramStep::Begin(name)),
            ProgramStep::End => return Ok(LoadedProgramStep::End),
            ProgramStep::Launch(launch) => self.launch(&launch)?,
            ProgramStep::Gemm { lane, spec, operands } => {
                let loaded = self.gemms.iter().find(|(other, _)| *other == spec);
                let gemm = Rc::clone(&loaded.expect("every GEMM of the program is loaded").1);
                let operands = operands.map_addresses(|pointer| self.memory.address(pointer));
                let operands = gemm.with_own_workspace(&operands);
                Box::new(move || gemm.launch_in_lane(lane.lane_number(), &operands))
            }
            ProgramStep::Copy { lane, from, to, bytes } => {
                let [source, target] =
                    [from, to].map(|pointer| self.memory.buffer_of_pointer(pointer).clone());
                let (stream, range) = (self.stream(lane), from.offset..from.offset + bytes);
                Box::new(move || target.copy_range(&stream, to.offset, &source, range.clone()))
            }
            ProgramStep::Fill { lane, to, bytes, value } => {
                let (stream, buffer) =
                    (self.stream(lane), self.memory.buffer_of_pointer(to).clone());
                Box::new(move || buffer.fill_range(&stream, to.offset..to.offset + bytes, value))
            }
            ProgramStep::Call { lane, pointers, prepare } => {
                let addresses: Vec<u64> =
                    pointers.iter().map(|pointer| self.memory.address(*pointer)).collect();
                let (device, stream) = (self.device, &self.streams[lane.lane_number()]);
                prepare(ForeignLaunchSite { device, stream, addresses: &addresses })?
            }
            ProgramStep::Wait { waiting, on } => {
                let crossing = CrossingEvent::new(self.device)?;
                let [waiting, on] = [waiting, on].map(|lane| self.stream(lane));
                Box::new(move || {
                    crossing
                        .record_on_stream(&on)
                        .and_then(|()| crossing.make_stream_wait(&waiting))
                })
            }
        };
        Ok(LoadedProgramStep::Enqueue(enqueue))
    }

    fn stream(&self, lane: Lane) -> Arc<CudaStream> {
        Arc::clone(&self.streams[lane.lane_number()])
    }

    fn launch(&mut self, launch: &KernelLaunch) -> Result<EnqueueFunction, BackendError> {
        let kernel = match &launch.other {
            Some((other, condition)) if condition(self.device)? => other,
            _ => launch.kernel(),
        };
        let name = kernel.build.kernel_name(kernel.symbol);
        let shape = kernel.shape.clone()?;
        let loaded = self.kernels.entry((name, launch.lane)).or_default();
        let kernel = match loaded.iter().find(|(other, _)| *other == shape) {
            Some((_, kernel)) => Rc::clone(kernel),
            None => {
                let stream = &self.streams[launch.lane.lane_number()];
                let kernel = Rc::new((kernel.load)(self.device)?.on_stream(stream));
                loaded.push((shape, Rc::clone(&kernel)));
                kernel
            }
        };
        let arguments =
            launch.arguments.iter().map(|operand| self.memory.resolve_argument(*operand));
        let arguments = arguments.collect::<Result<Vec<KernelArgument>, _>>()?;
        let window = launch.lines.and_then(|lines| match lines {
            KeptL2Lines::Keep => self.window,
            KeptL2Lines::Release => self.window.map(L2Window::without_persistence),
        });
        let programmatic =
            launch.programmatic && supports_programmatic_launch(&self.device.facts().arch);
        let launch = Launch { programmatic, window, ..kernel.launch_shape() };
        Ok(Box::new(move || kernel.loaded_kernel().launch(launch, &arguments)))
    }

    /// Describes every GEMM of a program once. The GEMM's algorithm is chosen with the matrices of
    /// all its launches, in the order of the program's layers.
    fn load_all_gemms(&mut self, steps: &[ProgramStep]) -> Result<(), BackendError> {
        let Some(blas) = &self.blas else { return Ok(()) };
        let launches = steps.iter().filter_map(|step| match step {
            ProgramStep::Gemm { spec, operands, .. } => Some((*spec, *operands)),
            _ => None,
        });
        for (spec, _) in launches.clone() {
            if self.gemms.iter().any(|(other, _)| *other == spec) {
                continue;
            }
            let alike = launches
                .clone()
                .filter(|(other, _)| *other == spec)
                .take(MAX_LAUNCHES_TIMED_TO_CHOOSE);
            let operands = alike.map(|(_, operands)| {
                operands.map_addresses(|pointer| self.memory.address(pointer))
            });
            let mut gemm = PreparedGemm::new(blas, spec)?;
            gemm.choose_fastest_algorithm(&operands.collect::<Vec<GemmOperands>>())?;
            self.gemms.push((spec, Rc::new(gemm)));
        }
        Ok(())
    }
}

impl LoadedProgram {
    /// Whether launches update regions that have contents.
    pub(super) const fn updates_contents(&self) -> bool {
        !self.state.regions.is_empty()
    }

    /// Takes the loaded program's inputs and outputs, to make a task of them.
    pub(super) fn take_tensors(&mut self) -> (Vec<Input>, Vec<Output>) {
        (std::mem::take(&mut self.inputs), std::mem::take(&mut self.outputs))
    }

    /// Addresses of the GEMM workspaces, which a captured graph clears before its first launch.
    pub(super) fn range_cleared_first(&self) -> std::ops::Range<u64> {
        self.cleared.clone()
    }

    /// Enqueues the whole program.
    pub fn enqueue_program(&self) -> Result<(), BackendError> {
        let mut ranges = Vec::new();
        for step in &self.steps {
            match step {
                LoadedProgramStep::Enqueue(enqueue) => enqueue()?,
                LoadedProgramStep::Begin(name) => ranges.push(RangeGuard::new(name)),
                LoadedProgramStep::End => drop(ranges.pop()),
            }
        }
        Ok(())
    }

    /// The device memory of the last region that was declared with this name.
    pub fn buffer_of_pointer(&self, name: &str) -> Option<&DeviceBuffer> {
        self.regions.iter().rfind(|(known, _)| known == name).map(|(_, buffer)| buffer)
    }
}
