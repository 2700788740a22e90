//! Writing a program.

use std::borrow::Cow;
use std::cell::OnceCell;

use kernelgate_cuda::KernelSpec;
use kernelgate_cuda::libraries::gemm::{GEMM_WORKSPACE_BYTES, GemmOperands, GemmSpec};

use super::error::ProgramError;
use super::lanes::{Lane, LaneOrder};
use super::memory::{MemoryPurpose, ProgramMemoryPlan, RegionContents, TableWord};
use super::operand::{Operand, Operands, Pointer};
use super::step::{EnqueueFunction, ForeignLaunchSite, KernelLaunch, ProgramStep};
use crate::workload::{Dtype, Tensors};
use kernelgate_cuda::BackendError;

/// A network as one list of launches, with the memory that they work on.
///
/// Writing never fails: the first mistake is kept and returned by [`Self::check`], and by
/// [`Self::into_task`] before anything is allocated.
#[derive(Default)]
pub struct Program {
    pub(super) memory: ProgramMemoryPlan,
    pub(super) steps: Vec<ProgramStep>,
    pub(super) order: LaneOrder,
    /// Pointer to the range that is kept in L2, and the number of its bytes.
    pub(super) kept: Option<(Pointer, usize)>,
    /// Lanes from the first one to the last one that has a GEMM.
    pub(super) gemm_lanes: usize,
    ranges: Vec<String>,
    mistake: OnceCell<ProgramError>,
}

impl Program {
    /// An empty program.
    pub fn new() -> Self {
        Self::default()
    }

    /// Keeps the first mistake.
    fn keep_first_error(&self, found: Result<(), ProgramError>) {
        if let Err(mistake) = found {
            // Only the first mistake in a program is kept, because later mistakes may follow from
            // it.
            let _ = self.mistake.set(mistake);
        }
    }

    fn add_region(
        &mut self,
        name: Cow<'static, str>,
        purpose: MemoryPurpose,
        bytes: usize,
        contents: RegionContents,
    ) -> Pointer {
        self.memory.add(name, purpose, bytes, contents).unwrap_or_else(|mistake| {
            self.keep_first_error(Err(mistake));
            ProgramMemoryPlan::unknown_pointer()
        })
    }

    /// Declares an input that every launch of the program reads, as it lies in the workload.
    pub fn add_input(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        purpose: MemoryPurpose,
        bytes: usize,
    ) -> Pointer {
        self.add_region(name.into(), purpose, bytes, RegionContents::Input { replaceable: true })
    }

    /// Declares a region with the workload's input of that name as it was when the program was
    /// loaded.
    pub fn add_loaded_input(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        purpose: MemoryPurpose,
        bytes: usize,
    ) -> Pointer {
        self.add_region(name.into(), purpose, bytes, RegionContents::Input { replaceable: false })
    }

    /// Declares a region whose contents are made from the inputs when the program is loaded, such
    /// as packed weights.
    pub fn add_packed(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        purpose: MemoryPurpose,
        bytes: usize,
        pack: impl Fn(&Tensors) -> Vec<u8> + 'static,
    ) -> Pointer {
        self.add_region(name.into(), purpose, bytes, RegionContents::Packed(Box::new(pack)))
    }

    /// Declares a state: the workload's input of that name when the program is loaded, updated in
    /// place by every launch, and the output `output`. Launches continue from each other while they
    /// are timed; before each comparison the input is copied back from host memory.
    pub fn add_state(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        output: &'static str,
        purpose: MemoryPurpose,
        shape: impl Into<Vec<usize>>,
        dtype: Dtype,
    ) -> Pointer {
        let shape = shape.into();
        let bytes = shape.iter().product::<usize>() * dtype.bytes();
        self.add_region(name.into(), purpose, bytes, RegionContents::State { output, shape, dtype })
    }

    /// Restores the packed contents of a region together with the state, because launches update
    /// them: a copy of a state in another form.
    pub fn mark_updated(&mut self, pointer: Pointer) {
        let marked = self.memory.mark_updated(pointer);
        self.keep_first_error(marked);
    }

    /// Declares a region of 64-bit numbers and addresses. Regions that the table points into live
    /// as long as the program.
    pub fn add_table(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        purpose: MemoryPurpose,
        words: Vec<TableWord>,
    ) -> Pointer {
        let bytes = size_of::<u64>() * words.len();
        self.add_region(name.into(), purpose, bytes, RegionContents::Table(words))
    }

    /// Declares a scratch region, which steps write before they read it. A scratch region may take
    /// over freed memory of the same purpose.
    pub fn add_scratch(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        purpose: MemoryPurpose,
        bytes: usize,
    ) -> Pointer {
        self.add_region(name.into(), purpose, bytes, RegionContents::Unwritten)
    }

    /// Declares an output that lies on the device as it does in the workload.
    pub fn add_output(
        &mut self,
        name: &'static str,
        shape: impl Into<Vec<usize>>,
        dtype: Dtype,
    ) -> Pointer {
        let shape = shape.into();
        let bytes = shape.iter().product::<usize>() * dtype.bytes();
        let contents = RegionContents::Output { name, shape, dtype };
        self.add_region(name.into(), MemoryPurpose::Outputs, bytes, contents)
    }

    /// Ends the life of a scratch region: later scratch of the same use may take over its memory,
    /// and steps that use it from here on are mistakes.
    pub fn free(&mut self, pointer: Pointer) {
        let freed = self.memory.free(pointer);
        self.keep_first_error(freed);
    }

    /// Pointer to the beginning of the region with this name.
    pub fn at(&self, name: &str) -> Pointer {
        self.memory.find(name).unwrap_or_else(|| {
            self.keep_first_error(Err(ProgramError::UnknownRegion { name: name.to_owned() }));
            ProgramMemoryPlan::unknown_pointer()
        })
    }

    /// The beginning of a region, if there is one of that name.
    pub fn find(&self, name: &str) -> Option<Pointer> {
        self.memory.find(name)
    }

    /// Bytes of a region.
    pub fn bytes(&self, name: &str) -> usize {
        self.memory.regions.get(self.at(name).region).map_or(0, |region| region.bytes)
    }

    /// Every region in the order of declaration: its name and bytes.
    pub fn regions(&self) -> impl Iterator<Item = (&str, usize)> {
        self.memory.regions.iter().map(|region| (&*region.name, region.bytes))
    }

    /// The bytes that the inputs put in the region of a pointer; `None` for scratch, tables and
    /// outputs.
    ///
    /// # Errors
    /// Fails if the number of bytes differs from the declared one.
    pub fn uploaded_bytes<'a>(
        &self,
        pointer: Pointer,
        inputs: &'a Tensors,
    ) -> Result<Option<Cow<'a, [u8]>>, ProgramError> {
        let region = self.memory.regions.get(pointer.region);
        region.map_or(Ok(None), |region| region.uploaded(inputs))
    }

    /// Device memory of the loaded program: every region, and the library's workspaces.
    pub fn device_bytes(&self) -> u64 {
        (self.memory.bytes_of_slots() + self.gemm_workspace_bytes()) as u64
    }

    fn gemm_workspace_bytes(&self) -> usize {
        GEMM_WORKSPACE_BYTES * self.gemm_lanes
    }

    /// Bytes of each row of the table of device memory.
    pub fn bytes_by_memory_purpose(&self) -> Vec<(&'static str, u64)> {
        let mut rows: Vec<(&'static str, u64)> = Vec::new();
        for purpose in MemoryPurpose::ALL {
            let library =
                if purpose == MemoryPurpose::Workspace { self.gemm_workspace_bytes() } else { 0 };
            let bytes = (self.memory.bytes_for_purpose(purpose) + library) as u64;
            match rows.last_mut() {
                Some((label, sum)) if *label == purpose.label() => *sum += bytes,
                _ => rows.push((purpose.label(), bytes)),
            }
        }
        rows.retain(|(_, bytes)| *bytes > 0);
        rows
    }

    /// Adds a lane. The lane's first step waits for the first lane, and the first lane waits for
    /// its last one ([`Self::wait`]).
    pub fn lane(&mut self) -> Lane {
        self.order.add_lane()
    }

    /// Makes later steps of lane `waiting` wait for the steps that lane `on` has so far.
    pub fn wait(&mut self, waiting: Lane, on: Lane) {
        self.order.wait(waiting, on);
        self.steps.push(ProgramStep::Wait { waiting, on });
    }

    /// Keeps as much of a range in L2 as fits, beginning with the launches that keep its lines
    /// ([`KernelLaunch::with_kept_lines`]). The program sets L2 aside while it is loaded.
    pub fn keep_range_in_l2(&mut self, from: Pointer, bytes: usize) {
        self.kept = Some((from, bytes));
    }

    /// Returns a launch of `kernel` with parameters `p`, which the caller may change before it is
    /// added.
    pub fn kernel_launch<P: Clone + 'static>(
        &self,
        kernel: &KernelSpec<P>,
        p: &P,
        arguments: impl Operands,
    ) -> KernelLaunch {
        let mut operands = Vec::new();
        arguments.append(&|name| self.at(name), &mut operands);
        KernelLaunch::new(kernel, p, operands)
    }

    /// Adds a kernel for `p` to the first lane.
    pub fn add_launch<P: Clone + 'static>(
        &mut self,
        kernel: &KernelSpec<P>,
        p: &P,
        arguments: impl Operands,
    ) {
        let launch = self.kernel_launch(kernel, p, arguments);
        self.add(launch);
    }

    /// Adds a kernel launch to the program.
    pub fn add(&mut self, launch: KernelLaunch) {
        let pointers = launch.arguments.iter().filter_map(|operand| match operand {
            Operand::Pointer(pointer) | Operand::Boxes(pointer, _) => Some(*pointer),
            _ => None,
        });
        let pointers: Vec<Pointer> = pointers.collect();
        if launch.lines.is_some() && self.kept.is_none() {
            let symbol = launch.kernel().symbol;
            self.keep_first_error(Err(ProgramError::NothingKept { symbol }));
        }
        self.step(launch.lane, &pointers);
        self.steps.push(ProgramStep::Launch(launch));
    }

    /// Adds a GEMM; the operands are A, B and D, or all that its description needs. The result of
    /// the GEMM must be scratch or an output, because choosing an algorithm overwrites it.
    pub fn gemm(&mut self, lane: Lane, spec: GemmSpec, operands: impl Into<GemmOperands<Pointer>>) {
        let operands = operands.into();
        let mut pointers = Vec::new();
        operands.map_addresses(|pointer| pointers.push(pointer));
        self.step(lane, &pointers);
        let written = [Some(operands.d), operands.aux, operands.amax_d];
        for pointer in written.into_iter().flatten() {
            let written = self.memory.note_gemm_output(pointer);
            self.keep_first_error(written);
        }
        self.gemm_lanes = self.gemm_lanes.max(lane.lane_number() + 1);
        self.steps.push(ProgramStep::Gemm { lane, spec, operands });
    }

    /// Adds a copy between two regions of device memory.
    pub fn copy(&mut self, lane: Lane, from: Pointer, to: Pointer, bytes: usize) {
        let last = bytes.saturating_sub(1);
        self.step(lane, &[from.offset_by(last), to.offset_by(last)]);
        self.steps.push(ProgramStep::Copy { lane, from, to, bytes });
    }

    /// Sets bytes of a region to one value.
    pub fn fill(&mut self, lane: Lane, to: Pointer, bytes: usize, value: u8) {
        self.step(lane, &[to.offset_by(bytes.saturating_sub(1))]);
        self.steps.push(ProgramStep::Fill { lane, to, bytes, value });
    }

    /// Adds a launch of a kernel that other code enqueues: `prepare` gets the addresses of
    /// `pointers` and the stream of the lane once, when the program is loaded, and returns a
    /// closure that enqueues the launch on that stream. The closure allocates nothing and can be
    /// captured.
    pub fn call(
        &mut self,
        lane: Lane,
        pointers: &[Pointer],
        prepare: impl FnOnce(ForeignLaunchSite<'_>) -> Result<EnqueueFunction, BackendError> + 'static,
    ) {
        self.step(lane, pointers);
        let (pointers, prepare) = (pointers.to_vec(), Box::new(prepare));
        self.steps.push(ProgramStep::Call { lane, pointers, prepare });
    }

    /// Notes that the next step of a lane uses these addresses.
    fn step(&mut self, lane: Lane, pointers: &[Pointer]) {
        if !self.order.is_forked(lane) {
            self.keep_first_error(Err(ProgramError::NotForked { lane: lane.lane_number() }));
        }
        // The step waits for everything that its lane was made to wait for.
        let step = self.order.add_step(lane);
        for pointer in pointers {
            let used = self.memory.note_use(*pointer, step, &self.order);
            self.keep_first_error(used);
        }
    }

    /// Begins a named range.
    pub fn begin_range(&mut self, name: impl Into<String>) {
        let name = name.into();
        self.ranges.push(name.clone());
        self.steps.push(ProgramStep::Begin(name));
    }

    /// Ends the named range that was opened last.
    pub fn end_range(&mut self) {
        let ended = self.ranges.pop().map(drop).ok_or(ProgramError::NoOpenRange);
        self.keep_first_error(ended);
        self.steps.push(ProgramStep::End);
    }

    /// Adds all steps of a closure inside a named range.
    pub fn in_range(&mut self, name: impl Into<String>, write: impl FnOnce(&mut Self)) {
        self.begin_range(name);
        write(self);
        self.end_range();
    }

    /// Steps of the program.
    pub fn steps(&self) -> &[ProgramStep] {
        &self.steps
    }

    /// Returns the first mistake that was made while the program was written.
    ///
    /// # Errors
    /// The mistake.
    pub fn check(&self) -> Result<(), ProgramError> {
        if let Some(mistake) = self.mistake.get() {
            return Err(mistake.clone());
        }
        if let Some(name) = self.ranges.last() {
            return Err(ProgramError::OpenRange { name: name.clone() });
        }
        match self.order.unjoined_lane() {
            Some(lane) => Err(ProgramError::NotJoined { lane: lane.lane_number() }),
            None => Ok(()),
        }
    }
}
