//! Writing a program.

use std::borrow::Cow;
use std::cell::OnceCell;

use kernelgate_cuda::KernelSpec;
use kernelgate_cuda::libraries::gemm::{
    DEFAULT_GEMM_WORKSPACE_BYTES, GemmOperandAddresses, GemmSpec,
};

use super::error::LaunchListError;
use super::lanes::{OrderOfLaneSteps, ProgramLane};
use super::memory::{MemoryPurpose, RegionAndAllocationPlan, RegionContents, TableNumberOrAddress};
use super::operand::{LaunchArgument, LaunchArgumentList, RegionPointer};
use super::step::{DeviceStreamAndAddresses, EnqueueStep, KernelLaunchStep, ProgramStep};
use crate::workload::{Dtype, Tensors};
use kernelgate_cuda::BackendError;

/// A network as one list of launches, with the device memory that the launches use.
///
/// Methods that add steps never fail: the program stores the first mistake, which [`Self::check`]
/// and [`Self::into_task`] return before anything is allocated.
#[derive(Default)]
pub struct LaunchProgram {
    pub(super) memory: RegionAndAllocationPlan,
    pub(super) steps: Vec<ProgramStep>,
    pub(super) lane_order: OrderOfLaneSteps,
    /// The memory range that the program keeps in L2: pointer and bytes.
    pub(super) range_kept_in_l2: Option<(RegionPointer, usize)>,
    /// Number of lanes from the first lane to the last lane that contains a GEMM.
    pub(super) lanes_up_to_last_gemm: usize,
    open_range_names: Vec<String>,
    first_mistake: OnceCell<LaunchListError>,
}

impl LaunchProgram {
    /// An empty program.
    pub fn new() -> Self {
        Self::default()
    }

    /// Stores a mistake in the launch list, unless an earlier mistake is stored.
    fn store_first_mistake(&self, found: Result<(), LaunchListError>) {
        if let Err(mistake) = found {
            // Later mistakes are ignored, because they may follow from the first one.
            let _ = self.first_mistake.set(mistake);
        }
    }

    fn add_region_or_store_mistake(
        &mut self,
        name: Cow<'static, str>,
        purpose: MemoryPurpose,
        bytes: usize,
        contents: RegionContents,
    ) -> RegionPointer {
        self.memory.add_region_or_reuse_allocation(name, purpose, bytes, contents).unwrap_or_else(
            |mistake| {
                self.store_first_mistake(Err(mistake));
                RegionAndAllocationPlan::placeholder_for_missing_region_name()
            },
        )
    }

    /// Declares an input region that every launch reads, with the problem's input of this name in
    /// its original layout.
    pub fn add_input(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        purpose: MemoryPurpose,
        bytes: usize,
    ) -> RegionPointer {
        self.add_region_or_store_mistake(
            name.into(),
            purpose,
            bytes,
            RegionContents::ProblemInput { replaceable: true },
        )
    }

    /// Declares a region with the problem's input of this name as it is when the program is loaded;
    /// launches may read it, but it is not replaced after timing.
    pub fn add_input_fixed_at_loading(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        purpose: MemoryPurpose,
        bytes: usize,
    ) -> RegionPointer {
        self.add_region_or_store_mistake(
            name.into(),
            purpose,
            bytes,
            RegionContents::ProblemInput { replaceable: false },
        )
    }

    /// Declares a region whose contents are computed on the host from the inputs when the program
    /// is loaded, such as packed weights.
    pub fn add_packed_from_inputs(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        purpose: MemoryPurpose,
        bytes: usize,
        pack: impl Fn(&Tensors) -> Vec<u8> + 'static,
    ) -> RegionPointer {
        self.add_region_or_store_mistake(
            name.into(),
            purpose,
            bytes,
            RegionContents::ComputedOnHost(Box::new(pack)),
        )
    }

    /// Declares a state region: initially the problem's input `name`, updated in place by every
    /// launch, and also the output `output`. During timing, each launch continues from the previous
    /// launch's state; before each comparison, the state is copied again from host memory.
    pub fn add_state_updated_in_place(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        output: &'static str,
        purpose: MemoryPurpose,
        shape: impl Into<Vec<usize>>,
        dtype: Dtype,
    ) -> RegionPointer {
        let shape = shape.into();
        let bytes = shape.iter().product::<usize>() * dtype.bytes_per_element();
        self.add_region_or_store_mistake(
            name.into(),
            purpose,
            bytes,
            RegionContents::StateUpdatedInPlace { output, shape, dtype },
        )
    }

    /// Declares that launches update the packed contents of a region, such as a second form of a
    /// state, so that they are restored with the state.
    pub fn mark_packed_contents_updated(&mut self, pointer: RegionPointer) {
        let marked = self.memory.mark_contents_changed_by_launches(pointer);
        self.store_first_mistake(marked);
    }

    /// Declares a region that contains a table of 64-bit numbers and addresses. Regions whose
    /// addresses are in the table are never freed.
    pub fn add_table_of_numbers_and_addresses(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        purpose: MemoryPurpose,
        words: Vec<TableNumberOrAddress>,
    ) -> RegionPointer {
        let bytes = size_of::<u64>() * words.len();
        self.add_region_or_store_mistake(name.into(), purpose, bytes, RegionContents::Table(words))
    }

    /// Declares a scratch region, which steps must write before they read it. A scratch region may
    /// reuse freed memory of the same purpose.
    pub fn add_scratch(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        purpose: MemoryPurpose,
        bytes: usize,
    ) -> RegionPointer {
        self.add_region_or_store_mistake(name.into(), purpose, bytes, RegionContents::Unwritten)
    }

    /// Declares an output region in the problem's original layout.
    pub fn add_output(
        &mut self,
        name: &'static str,
        shape: impl Into<Vec<usize>>,
        dtype: Dtype,
    ) -> RegionPointer {
        let shape = shape.into();
        let bytes = shape.iter().product::<usize>() * dtype.bytes_per_element();
        let contents = RegionContents::ProblemOutput { name, shape, dtype };
        self.add_region_or_store_mistake(name.into(), MemoryPurpose::Outputs, bytes, contents)
    }

    /// Ends the life of a scratch region: later scratch of the same purpose may reuse its memory,
    /// and later steps that use the region are mistakes.
    pub fn free_scratch(&mut self, pointer: RegionPointer) {
        let freed = self.memory.free_scratch_region(pointer);
        self.store_first_mistake(freed);
    }

    /// Returns a pointer to the beginning of the region with this name; an unknown name is a
    /// mistake.
    pub fn pointer_to(&self, name: &str) -> RegionPointer {
        self.memory.pointer_to_region(name).unwrap_or_else(|| {
            self.store_first_mistake(Err(LaunchListError::UnknownRegion {
                region_name: name.to_owned(),
            }));
            RegionAndAllocationPlan::placeholder_for_missing_region_name()
        })
    }

    /// Returns a pointer to the beginning of the region with this name; `None` if no region has the
    /// name.
    pub fn pointer_if_declared(&self, name: &str) -> Option<RegionPointer> {
        self.memory.pointer_to_region(name)
    }

    /// Returns the number of bytes of the region with this name.
    pub fn bytes_of_region(&self, name: &str) -> usize {
        self.memory
            .regions
            .get(self.pointer_to(name).region_index)
            .map_or(0, |region| region.region_bytes)
    }

    /// Name and bytes of every region, in the order of declaration.
    pub fn names_and_bytes_of_regions(&self) -> impl Iterator<Item = (&str, usize)> {
        self.memory.regions.iter().map(|region| (&*region.region_name, region.region_bytes))
    }

    /// The initial bytes of a pointer's region, computed from the problem's inputs; `None` for
    /// scratch, tables and outputs.
    ///
    /// # Errors
    /// Fails if the size of the initial bytes differs from the region's declared size.
    pub fn initial_bytes_of_region<'a>(
        &self,
        pointer: RegionPointer,
        inputs: &'a Tensors,
    ) -> Result<Option<Cow<'a, [u8]>>, LaunchListError> {
        let region = self.memory.regions.get(pointer.region_index);
        region.map_or(Ok(None), |region| region.initial_bytes_from_inputs(inputs))
    }

    /// Bytes of device memory of the loaded program: all allocations, and the workspaces of the
    /// GEMM library.
    pub fn device_bytes(&self) -> u64 {
        (self.memory.allocated_bytes() + self.gemm_library_workspace_bytes()) as u64
    }

    fn gemm_library_workspace_bytes(&self) -> usize {
        DEFAULT_GEMM_WORKSPACE_BYTES * self.lanes_up_to_last_gemm
    }

    /// Bytes of device memory by purpose label, without purposes that need none.
    pub fn device_bytes_by_purpose_label(&self) -> Vec<(&'static str, u64)> {
        let mut rows: Vec<(&'static str, u64)> = Vec::new();
        for purpose in MemoryPurpose::ALL_MEMORY_PURPOSES {
            let library = if purpose == MemoryPurpose::Workspace {
                self.gemm_library_workspace_bytes()
            } else {
                0
            };
            let bytes = (self.memory.allocated_bytes_for_purpose(purpose) + library) as u64;
            match rows.last_mut() {
                Some((label, sum)) if *label == purpose.purpose_label() => *sum += bytes,
                _ => rows.push((purpose.purpose_label(), bytes)),
            }
        }
        rows.retain(|(_, bytes)| *bytes > 0);
        rows
    }

    /// Adds a lane. Before its first step, the new lane must wait for the first lane; after the new
    /// lane's last step, the first lane must wait for it ([`Self::make_lane_wait_for_lane`]).
    pub fn add_lane(&mut self) -> ProgramLane {
        self.lane_order.add_lane()
    }

    /// Makes later steps of lane `waiting` wait for all steps that lane `on` has so far.
    pub fn make_lane_wait_for_lane(&mut self, waiting: ProgramLane, on: ProgramLane) {
        self.lane_order.make_lane_wait_for_lane(waiting, on);
        self.steps.push(ProgramStep::LaneWait { waiting_lane: waiting, awaited_lane: on });
    }

    /// Declares a memory range that launches with
    /// [`KernelLaunchStep::with_kept_or_released_l2_lines`] keep in L2, as far as it fits. Loading
    /// the program sets aside persisting L2 cache for the range.
    pub fn keep_range_in_l2(&mut self, from: RegionPointer, bytes: usize) {
        self.range_kept_in_l2 = Some((from, bytes));
    }

    /// Makes a launch of `kernel` with parameters `p`; the caller can change the launch before
    /// adding it.
    pub fn make_kernel_launch<P: Clone + 'static>(
        &self,
        kernel: &KernelSpec<P>,
        p: &P,
        arguments: impl LaunchArgumentList,
    ) -> KernelLaunchStep {
        let mut operands = Vec::new();
        arguments.append_launch_arguments_to(&|name| self.pointer_to(name), &mut operands);
        KernelLaunchStep::for_kernel_with_arguments(kernel, p, operands)
    }

    /// Adds a launch of `kernel` with parameters `p` to the first lane.
    pub fn add_launch<P: Clone + 'static>(
        &mut self,
        kernel: &KernelSpec<P>,
        p: &P,
        arguments: impl LaunchArgumentList,
    ) {
        let launch = self.make_kernel_launch(kernel, p, arguments);
        self.add_prepared_launch(launch);
    }

    /// Adds a kernel launch to the program.
    pub fn add_prepared_launch(&mut self, launch: KernelLaunchStep) {
        let pointers = launch.arguments.iter().filter_map(|operand| match operand {
            LaunchArgument::Pointer(pointer) | LaunchArgument::TmaTensorMap(pointer, _) => {
                Some(*pointer)
            }
            _ => None,
        });
        let pointers: Vec<RegionPointer> = pointers.collect();
        if launch.l2_line_policy.is_some() && self.range_kept_in_l2.is_none() {
            let symbol = launch.default_kernel().kernel_symbol;
            self.store_first_mistake(Err(LaunchListError::NoRangeKeptInL2 {
                kernel_symbol: symbol,
            }));
        }
        self.record_step_of_lane(launch.lane, &pointers);
        self.steps.push(ProgramStep::Launch(launch));
    }

    /// Adds a cuBLASLt GEMM; the operands are A, B and D, or all operands that the description
    /// needs. The GEMM must write scratch or an output, because timing algorithms at loading
    /// overwrites the result.
    pub fn add_gemm(
        &mut self,
        lane: ProgramLane,
        spec: GemmSpec,
        operands: impl Into<GemmOperandAddresses<RegionPointer>>,
    ) {
        let operands = operands.into();
        let mut pointers = Vec::new();
        operands.map_operand_addresses(|pointer| pointers.push(pointer));
        self.record_step_of_lane(lane, &pointers);
        let written = [Some(operands.matrix_d), operands.aux_matrix, operands.amax_d];
        for pointer in written.into_iter().flatten() {
            let written = self.memory.check_gemm_may_write_region(pointer);
            self.store_first_mistake(written);
        }
        self.lanes_up_to_last_gemm = self.lanes_up_to_last_gemm.max(lane.lane_number() + 1);
        self.steps.push(ProgramStep::Gemm { lane, spec, operands });
    }

    /// Adds a copy between two regions of device memory.
    pub fn add_device_copy(
        &mut self,
        lane: ProgramLane,
        from: RegionPointer,
        to: RegionPointer,
        bytes: usize,
    ) {
        let last = bytes.saturating_sub(1);
        self.record_step_of_lane(lane, &[from.offset_by(last), to.offset_by(last)]);
        self.steps.push(ProgramStep::DeviceCopy {
            lane,
            source: from,
            destination: to,
            copied_bytes: bytes,
        });
    }

    /// Adds a step that sets the bytes of a memory range to one value.
    pub fn add_byte_fill(&mut self, lane: ProgramLane, to: RegionPointer, bytes: usize, value: u8) {
        self.record_step_of_lane(lane, &[to.offset_by(bytes.saturating_sub(1))]);
        self.steps.push(ProgramStep::ByteFill {
            lane,
            destination: to,
            filled_bytes: bytes,
            fill_byte: value,
        });
    }

    /// Adds a launch that other code, such as a library, enqueues: when the program is loaded,
    /// `prepare` gets the addresses of `pointers` and the lane's stream once, and returns a closure
    /// that enqueues the launch on the stream. The closure `launch` must not allocate, and must be
    /// capturable.
    pub fn add_launch_of_other_code(
        &mut self,
        lane: ProgramLane,
        pointers: &[RegionPointer],
        prepare: impl FnOnce(DeviceStreamAndAddresses<'_>) -> Result<EnqueueStep, BackendError>
        + 'static,
    ) {
        self.record_step_of_lane(lane, pointers);
        let (pointers, prepare) = (pointers.to_vec(), Box::new(prepare));
        self.steps.push(ProgramStep::LaunchOfOtherCode { lane, pointers, prepare });
    }

    /// Records that the next step of a lane uses these pointers.
    fn record_step_of_lane(&mut self, lane: ProgramLane, pointers: &[RegionPointer]) {
        if !self.lane_order.has_waited_for_main_lane(lane) {
            self.store_first_mistake(Err(LaunchListError::LaneNotForked {
                lane: lane.lane_number(),
            }));
        }
        // The new step waits for all steps for which its lane was made to wait.
        let step = self.lane_order.add_step(lane);
        for pointer in pointers {
            let used = self.memory.record_use_by_step(*pointer, step, &self.lane_order);
            self.store_first_mistake(used);
        }
    }

    /// Begins a named range.
    pub fn begin_named_range(&mut self, name: impl Into<String>) {
        let name = name.into();
        self.open_range_names.push(name.clone());
        self.steps.push(ProgramStep::BeginNamedRange(name));
    }

    /// Ends the named range that was opened last.
    pub fn end_innermost_range(&mut self) {
        let ended = self.open_range_names.pop().map(drop).ok_or(LaunchListError::NoOpenRange);
        self.store_first_mistake(ended);
        self.steps.push(ProgramStep::EndNamedRange);
    }

    /// Adds all steps of a closure inside a named range.
    pub fn add_steps_in_named_range(
        &mut self,
        name: impl Into<String>,
        write: impl FnOnce(&mut Self),
    ) {
        self.begin_named_range(name);
        write(self);
        self.end_innermost_range();
    }

    /// Steps of the program.
    pub fn steps(&self) -> &[ProgramStep] {
        &self.steps
    }

    /// Returns the first mistake that was made while the program was written.
    ///
    /// # Errors
    /// Fails with the first mistake that was made while the program was written.
    pub fn check(&self) -> Result<(), LaunchListError> {
        if let Some(mistake) = self.first_mistake.get() {
            return Err(mistake.clone());
        }
        if let Some(name) = self.open_range_names.last() {
            return Err(LaunchListError::RangeNotEnded { range_name: name.clone() });
        }
        match self.lane_order.lane_not_awaited_by_main_lane() {
            Some(lane) => Err(LaunchListError::LaneNotJoined { lane: lane.lane_number() }),
            None => Ok(()),
        }
    }
}
