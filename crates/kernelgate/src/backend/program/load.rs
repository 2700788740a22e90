//! Loads a program (launch list) on a GPU: compiles kernels, allocates memory and uploads contents.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use kernelgate_cuda::architecture::supports_programmatic_dependent_launch;
use kernelgate_cuda::driver::CudaStream;
use kernelgate_cuda::driver::graph::ExecutableCudaGraph;
use kernelgate_cuda::driver::memory::access_window::L2AccessPolicyWindow;
use kernelgate_cuda::driver::memory::persistence::PersistingL2SetAside;
use kernelgate_cuda::driver::stream::event::StreamOrderingEvent;
use kernelgate_cuda::libraries::gemm::{
    CublasLtLanes, GemmOperandAddresses, GemmSpec, PreparedGemm,
};
use kernelgate_cuda::observe::range::NamedRangeGuard;
use kernelgate_cuda::{
    BackendError, Device, DeviceBuffer, KernelArgument, Launch, LoadedKernelWithLaunch,
};

use super::lanes::ProgramLane;
use super::memory::{MemoryRegion, RegionAndAllocationPlan, RegionContents, TableNumberOrAddress};
use super::operand::{LaunchArgument, RegionPointer};
use super::plan::LaunchProgram;
use super::step::{
    DeviceStreamAndAddresses, EnqueueStep, KeepOrReleaseL2Lines, KernelLaunchStep, ProgramStep,
};
use crate::backend::cuda::{CudaTask, DeviceInput, DeviceOutput};
use crate::workload::Tensors;

/// Maximum number of a program's GEMM launches that are timed to choose the algorithm of one GEMM
/// shape.
const MAX_GEMM_LAUNCHES_TIMED_PER_SHAPE: usize = 40;

/// How a program's steps reach the GPU: one by one, or as a CUDA graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramLaunchMode {
    /// The host enqueues the steps one by one at every launch.
    StepByStep,
    /// The steps are captured once as a CUDA graph, and every launch replays the graph.
    CapturedGraph,
}

/// A program on a GPU: kernels compiled, memory allocated, contents uploaded.
pub struct LoadedProgram {
    steps: Vec<LoadedProgramStep>,
    regions: Vec<(String, DeviceBuffer)>,
    inputs: Vec<DeviceInput>,
    outputs: Vec<DeviceOutput>,
    regions_updated_by_launches: RegionsUpdatedByLaunches,
    /// Address range of the GEMM workspaces, which every captured graph clears first.
    gemm_workspace_addresses: std::ops::Range<u64>,
    _set_aside: Option<PersistingL2SetAside>,
}

/// Memory regions that launches update, and the inputs from which their contents are restored.
#[derive(Default)]
struct RegionsUpdatedByLaunches {
    regions: Vec<(MemoryRegion, DeviceBuffer)>,
    inputs_for_restore: Tensors,
}

impl RegionsUpdatedByLaunches {
    fn restore_original_contents(&self) -> Result<(), BackendError> {
        for (region, buffer) in &self.regions {
            if let Some(bytes) = region.initial_bytes_from_inputs(&self.inputs_for_restore)? {
                buffer.overwrite_first_bytes_from_host(&bytes)?;
            }
        }
        Ok(())
    }
}

/// A step of a loaded program: a closure that enqueues the step, or the beginning or end of a
/// range.
enum LoadedProgramStep {
    Enqueue(EnqueueStep),
    BeginRange(String),
    EndRange,
}

impl LaunchProgram {
    /// Loads the program, captures it as a CUDA graph if requested, and returns a task that can be
    /// timed.
    ///
    /// # Errors
    /// Fails with the program's first mistake, or if a kernel, library or GEMM algorithm is
    /// unavailable, device memory is insufficient, or a launch cannot be captured.
    pub fn into_task(
        self,
        device: &Arc<Device>,
        inputs: &Tensors,
        capture: ProgramLaunchMode,
    ) -> Result<CudaTask, BackendError> {
        let uses = self.device_bytes_by_purpose_label();
        let mut program = self.load_on_device(device, inputs)?;
        let (inputs, outputs) = program.take_inputs_and_outputs();
        let state = std::mem::take(&mut program.regions_updated_by_launches);
        let task = match capture {
            ProgramLaunchMode::StepByStep => {
                CudaTask::new(device, inputs, outputs, move |_| program.enqueue_all_steps())
            }
            ProgramLaunchMode::CapturedGraph => {
                // The program is launched once before the capture, because modules cannot be loaded
                // during a capture.
                program.enqueue_all_steps()?;
                device.synchronize()?;
                let cleared = program.gemm_workspaces_cleared_by_graph();
                let graph =
                    ExecutableCudaGraph::capture_with_clears_moved_first(device, cleared, || {
                        program.enqueue_all_steps()
                    })?;
                CudaTask::new(device, inputs, outputs, move |_| {
                    // The graph launches the program's kernels on the program's memory, so the
                    // closure keeps the program alive.
                    let _alive = &program;
                    graph.launch_graph_on_stream()
                })
            }
        };
        let task = task.with_device_memory_by_purpose(uses);
        match state.regions.is_empty() {
            true => Ok(task),
            false => {
                Ok(task.with_state_restored_in_outputs(move || state.restore_original_contents()))
            }
        }
    }

    /// Compiles and loads the program's kernels, allocates and fills its memory, and chooses an
    /// algorithm for each GEMM. The library of GEMMs (cuBLASLt) is opened only if the program
    /// contains a GEMM.
    pub fn load_on_device(
        self,
        device: &Arc<Device>,
        tensors: &Tensors,
    ) -> Result<LoadedProgram, BackendError> {
        self.check()?;
        let Self {
            memory,
            steps,
            lane_order: order,
            range_kept_in_l2: kept,
            lanes_up_to_last_gemm: gemm_lanes,
            ..
        } = self;
        let blas = (gemm_lanes > 0)
            .then(|| CublasLtLanes::open_cublaslt_with_default_workspace(device, gemm_lanes))
            .transpose()?;
        let set_aside = kept
            .map(|(_, bytes)| PersistingL2SetAside::set_aside_l2_bytes(device, bytes))
            .transpose()?;
        let streams = (0..order.lane_count()).map(|lane| match &blas {
            _ if lane == ProgramLane::MAIN_LANE.lane_number() => Ok(Arc::clone(device.stream())),
            Some(blas) if lane < gemm_lanes => Ok(Arc::clone(blas.cuda_stream_of_lane(lane))),
            _ => device.create_another_stream(),
        });
        let streams = streams.collect::<Result<Vec<_>, BackendError>>()?;
        let memory = LoadedProgramMemory::allocate_and_upload(memory, device, tensors)?;
        let window = match (&set_aside, kept) {
            (Some(set_aside), Some((from, bytes))) => Some(
                set_aside
                    .access_window_keeping_what_fits(memory.device_address_of_pointer(from), bytes),
            ),
            _ => None,
        };
        let mut loader = EnqueueClosureBuilder {
            device,
            blas,
            stream_of_lane: streams,
            memory,
            l2_window: window,
            kernels: BTreeMap::new(),
            gemms: vec![],
        };
        loader.prepare_gemms_and_choose_algorithms(&steps)?;
        let steps = steps.into_iter().map(|step| loader.closure_for_step(step));
        let steps = steps.collect::<Result<Vec<_>, _>>()?;
        let LoadedProgramMemory { regions, buffer_by_allocation: buffers, inputs, outputs } =
            loader.memory;
        let buffer = |region: &MemoryRegion| buffers[region.allocation_index].clone();
        let named =
            |region: &MemoryRegion| (region.region_name.clone().into_owned(), buffer(region));
        let named = regions.iter().map(named).collect();
        let updated =
            regions.into_iter().filter(|region| region.changed_by_launches).map(|region| {
                let buffer = buffer(&region);
                (region, buffer)
            });
        let regions: Vec<(MemoryRegion, DeviceBuffer)> = updated.collect();
        // Cloning shares the tensors' memory; a program without updated regions never reads the
        // inputs after loading.
        let inputs_of_state = if regions.is_empty() { Tensors::new() } else { tensors.clone() };
        let state = RegionsUpdatedByLaunches { regions, inputs_for_restore: inputs_of_state };
        let cleared = loader.blas.map_or(0..0, |blas| blas.address_range_of_workspace_pieces());
        Ok(LoadedProgram {
            steps,
            regions: named,
            inputs,
            outputs,
            regions_updated_by_launches: state,
            gemm_workspace_addresses: cleared,
            _set_aside: set_aside,
        })
    }
}

/// The device memory of a loaded program.
struct LoadedProgramMemory {
    regions: Vec<MemoryRegion>,
    /// Buffers by slot.
    buffer_by_allocation: Vec<DeviceBuffer>,
    inputs: Vec<DeviceInput>,
    outputs: Vec<DeviceOutput>,
}

impl LoadedProgramMemory {
    /// Allocates every memory slot and uploads its contents, one region at a time.
    fn allocate_and_upload(
        plan: RegionAndAllocationPlan,
        device: &Device,
        tensors: &Tensors,
    ) -> Result<Self, BackendError> {
        let RegionAndAllocationPlan { regions, allocations: slots, .. } = plan;
        let mut buffers: Vec<Option<DeviceBuffer>> = vec![None; slots.len()];
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for region in &regions {
            let slot = &mut buffers[region.allocation_index];
            if let Some(bytes) = region.initial_bytes_from_inputs(tensors)? {
                let buffer = device.upload(&bytes)?;
                match &region.contents {
                    RegionContents::ProblemInput { replaceable: true } => {
                        inputs.push(DeviceInput::new(region.region_name.clone(), &buffer));
                    }
                    RegionContents::StateUpdatedInPlace { output, shape, dtype } => {
                        outputs.push(DeviceOutput::in_memory_updated_by_launches(
                            &buffer,
                            output,
                            shape.clone(),
                            *dtype,
                        ));
                    }
                    _ => {}
                }
                *slot = Some(buffer);
            } else if let RegionContents::ProblemOutput { name, shape, dtype } = &region.contents {
                let output = DeviceOutput::new(device, name, shape.clone(), *dtype)?;
                *slot = Some(output.device_buffer().clone());
                outputs.push(output);
            } else if slot.is_none() {
                // Scratch memory stays uninitialised; tables are uploaded after all addresses are
                // known.
                *slot = Some(device.allocate(slots[region.allocation_index].allocation_bytes)?);
            }
        }
        let buffers = buffers.into_iter().flatten().collect();
        let memory = Self { regions, buffer_by_allocation: buffers, inputs, outputs };
        for region in &memory.regions {
            if let RegionContents::Table(words) = &region.contents {
                let bytes: Vec<u8> = words
                    .iter()
                    .flat_map(|word| memory.table_word_value(*word).to_ne_bytes())
                    .collect();
                memory.buffer_by_allocation[region.allocation_index]
                    .overwrite_first_bytes_from_host(&bytes)?;
            }
        }
        Ok(memory)
    }

    fn table_word_value(&self, word: TableNumberOrAddress) -> u64 {
        match word {
            TableNumberOrAddress::Number(value) => value as u64,
            TableNumberOrAddress::Pointer(pointer) => self.device_address_of_pointer(pointer),
        }
    }

    fn buffer_of_pointer(&self, pointer: RegionPointer) -> &DeviceBuffer {
        &self.buffer_by_allocation[self.regions[pointer.region_index].allocation_index]
    }

    fn device_address_of_pointer(&self, pointer: RegionPointer) -> u64 {
        pointer.resolve_address(self.buffer_of_pointer(pointer).device_address())
    }

    fn resolve_argument(&self, operand: LaunchArgument) -> Result<KernelArgument, BackendError> {
        Ok(match operand {
            LaunchArgument::TmaTensorMap(pointer, boxes) => KernelArgument::from_struct_bytes(
                &boxes.encode_tensor_map_at(self.device_address_of_pointer(pointer))?,
            ),
            LaunchArgument::Pointer(pointer) => {
                KernelArgument::DeviceAddress(self.device_address_of_pointer(pointer))
            }
            LaunchArgument::Null => KernelArgument::DeviceAddress(0),
            LaunchArgument::I32(value) => KernelArgument::I32(value),
            LaunchArgument::I64(value) => KernelArgument::I64(value),
            LaunchArgument::F32(value) => KernelArgument::F32(value),
        })
    }
}

/// A kernel loaded for one lane, once per launch shape.
type LoadedKernelPerLaunchShape = Vec<(Launch, Rc<LoadedKernelWithLaunch>)>;

/// Turns the steps of a program into closures that enqueue them.
struct EnqueueClosureBuilder<'a> {
    device: &'a Arc<Device>,
    blas: Option<Rc<CublasLtLanes>>,
    /// Streams by lane.
    stream_of_lane: Vec<Arc<CudaStream>>,
    memory: LoadedProgramMemory,
    l2_window: Option<L2AccessPolicyWindow>,
    /// Loaded kernels by kernel name and lane, each for several launch shapes.
    kernels: BTreeMap<(String, ProgramLane), LoadedKernelPerLaunchShape>,
    gemms: Vec<(GemmSpec, Rc<PreparedGemm>)>,
}

impl EnqueueClosureBuilder<'_> {
    fn closure_for_step(&mut self, step: ProgramStep) -> Result<LoadedProgramStep, BackendError> {
        let enqueue: EnqueueStep = match step {
            ProgramStep::BeginNamedRange(name) => return Ok(LoadedProgramStep::BeginRange(name)),
            ProgramStep::EndNamedRange => return Ok(LoadedProgramStep::EndRange),
            ProgramStep::Launch(launch) => self.closure_for_kernel_launch(&launch)?,
            ProgramStep::Gemm { lane, spec, operands } => {
                let loaded = self.gemms.iter().find(|(other, _)| *other == spec);
                let gemm = Rc::clone(&loaded.expect("every GEMM of the program is loaded").1);
                let operands = operands.map_operand_addresses(|pointer| {
                    self.memory.device_address_of_pointer(pointer)
                });
                let operands = gemm.with_workspace_piece(&operands);
                Box::new(move || gemm.enqueue_gemm_in_lane(lane.lane_number(), &operands))
            }
            ProgramStep::DeviceCopy {
                lane,
                source: from,
                destination: to,
                copied_bytes: bytes,
            } => {
                let [source, target] =
                    [from, to].map(|pointer| self.memory.buffer_of_pointer(pointer).clone());
                let (stream, range) =
                    (self.stream_of_lane(lane), from.offset_bytes..from.offset_bytes + bytes);
                Box::new(move || {
                    target.copy_range_from(&stream, to.offset_bytes, &source, range.clone())
                })
            }
            ProgramStep::ByteFill {
                lane,
                destination: to,
                filled_bytes: bytes,
                fill_byte: value,
            } => {
                let (stream, buffer) =
                    (self.stream_of_lane(lane), self.memory.buffer_of_pointer(to).clone());
                Box::new(move || {
                    buffer.fill_byte_range(&stream, to.offset_bytes..to.offset_bytes + bytes, value)
                })
            }
            ProgramStep::LaunchOfOtherCode { lane, pointers, prepare } => {
                let addresses: Vec<u64> = pointers
                    .iter()
                    .map(|pointer| self.memory.device_address_of_pointer(*pointer))
                    .collect();
                let (device, stream) = (self.device, &self.stream_of_lane[lane.lane_number()]);
                prepare(DeviceStreamAndAddresses { device, stream, device_addresses: &addresses })?
            }
            ProgramStep::LaneWait { waiting_lane: waiting, awaited_lane: on } => {
                let crossing = StreamOrderingEvent::create_event_without_timing(self.device)?;
                let [waiting, on] = [waiting, on].map(|lane| self.stream_of_lane(lane));
                Box::new(move || {
                    crossing
                        .record_after_work_on_stream(&on)
                        .and_then(|()| crossing.make_stream_wait_for_recorded_work(&waiting))
                })
            }
        };
        Ok(LoadedProgramStep::Enqueue(enqueue))
    }

    fn stream_of_lane(&self, lane: ProgramLane) -> Arc<CudaStream> {
        Arc::clone(&self.stream_of_lane[lane.lane_number()])
    }

    fn closure_for_kernel_launch(
        &mut self,
        launch: &KernelLaunchStep,
    ) -> Result<EnqueueStep, BackendError> {
        let kernel = match &launch.alternative_kernel {
            Some((other, condition)) if condition(self.device)? => other,
            _ => launch.default_kernel(),
        };
        let name = kernel.build.record_name_of_kernel(kernel.kernel_symbol);
        let shape = kernel.launch_shape.clone()?;
        let loaded = self.kernels.entry((name, launch.lane)).or_default();
        let kernel = match loaded.iter().find(|(other, _)| *other == shape) {
            Some((_, kernel)) => Rc::clone(kernel),
            None => {
                let stream = &self.stream_of_lane[launch.lane.lane_number()];
                let kernel = Rc::new((kernel.load)(self.device)?.clone_launching_on_stream(stream));
                loaded.push((shape, Rc::clone(&kernel)));
                kernel
            }
        };
        let arguments =
            launch.arguments.iter().map(|operand| self.memory.resolve_argument(*operand));
        let arguments = arguments.collect::<Result<Vec<KernelArgument>, _>>()?;
        let window = launch.l2_line_policy.and_then(|lines| match lines {
            KeepOrReleaseL2Lines::MarkL2LinesPersisting => self.l2_window,
            KeepOrReleaseL2Lines::MarkL2LinesNormal => {
                self.l2_window.map(L2AccessPolicyWindow::with_normal_priority)
            }
        });
        let programmatic = launch.uses_programmatic_dependent_launch
            && supports_programmatic_dependent_launch(
                &self.device.gpu_properties().kernel_architecture,
            );
        let launch = Launch {
            programmatic_dependent_launch: programmatic,
            window,
            ..kernel.specified_launch_shape()
        };
        Ok(Box::new(move || kernel.loaded_kernel().launch(launch, &arguments)))
    }

    /// Prepares each distinct GEMM description of the program once. Algorithms of a GEMM are timed
    /// on the matrices of up to 40 of its launches, in the order of the program.
    fn prepare_gemms_and_choose_algorithms(
        &mut self,
        steps: &[ProgramStep],
    ) -> Result<(), BackendError> {
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
                .take(MAX_GEMM_LAUNCHES_TIMED_PER_SHAPE);
            let operands = alike.map(|(_, operands)| {
                operands
                    .map_operand_addresses(|pointer| self.memory.device_address_of_pointer(pointer))
            });
            let mut gemm = PreparedGemm::gemm_with_proposed_algorithms(blas, spec)?;
            gemm.time_and_choose_algorithm(&operands.collect::<Vec<GemmOperandAddresses>>())?;
            self.gemms.push((spec, Rc::new(gemm)));
        }
        Ok(())
    }
}

impl LoadedProgram {
    /// Whether launches update memory regions that have contents, so that launches carry state.
    pub(super) const fn launches_update_region_contents(&self) -> bool {
        !self.regions_updated_by_launches.regions.is_empty()
    }

    /// Moves the inputs and outputs out of the loaded program into a task.
    pub(super) fn take_inputs_and_outputs(&mut self) -> (Vec<DeviceInput>, Vec<DeviceOutput>) {
        (std::mem::take(&mut self.inputs), std::mem::take(&mut self.outputs))
    }

    /// Address range of the GEMM workspaces, which every captured graph clears first.
    pub(super) fn gemm_workspaces_cleared_by_graph(&self) -> std::ops::Range<u64> {
        self.gemm_workspace_addresses.clone()
    }

    /// Enqueues the whole program.
    pub fn enqueue_all_steps(&self) -> Result<(), BackendError> {
        let mut ranges = Vec::new();
        for step in &self.steps {
            match step {
                LoadedProgramStep::Enqueue(enqueue) => enqueue()?,
                LoadedProgramStep::BeginRange(name) => {
                    ranges.push(NamedRangeGuard::open_named_range(name))
                }
                LoadedProgramStep::EndRange => drop(ranges.pop()),
            }
        }
        Ok(())
    }

    /// Device memory of the region with this name; of several, the one declared last.
    pub fn buffer_of_region(&self, name: &str) -> Option<&DeviceBuffer> {
        self.regions.iter().rfind(|(known, _)| known == name).map(|(_, buffer)| buffer)
    }
}
