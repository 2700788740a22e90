//! The device memory of a program: named regions, each with its purpose and its contents, and the
//! allocations that hold them.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::error::ProgramError;
use super::lanes::{Lane, LaneOrder, LaneStepPosition};
use super::operand::Pointer;
use crate::workload::{Dtype, Tensors};

/// The use of a region: a row of the table of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemoryPurpose {
    /// Parameters of the network, packed or unchanged.
    Weights,
    /// State of an optimiser.
    Momentum,
    /// Memory for results of the forward pass.
    Activations,
    /// Memory for gradients of activations and of parameters.
    Gradients,
    /// Scratch memory of kernels and libraries, which belongs to none of the other uses.
    Workspace,
    /// Memory for inputs that every launch reads.
    Inputs,
    /// Results.
    Outputs,
}

impl MemoryPurpose {
    /// Every use of memory, in the order of the table.
    pub const ALL: [Self; 7] = [
        Self::Weights,
        Self::Momentum,
        Self::Activations,
        Self::Gradients,
        Self::Workspace,
        Self::Inputs,
        Self::Outputs,
    ];

    /// Label of the purpose in the table of device memory.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Momentum => "momentum",
            Self::Activations => "activations",
            Self::Gradients => "gradients",
            Self::Workspace => "workspace",
            Self::Inputs | Self::Outputs => "inputs and outputs",
        }
    }
}

/// One element of a table of numbers and addresses in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableWord {
    /// A 64-bit value.
    Value(i64),
    /// The address of a memory region.
    Pointer(Pointer),
}

impl From<i64> for TableWord {
    fn from(value: i64) -> Self {
        Self::Value(value)
    }
}

impl From<Pointer> for TableWord {
    fn from(pointer: Pointer) -> Self {
        Self::Pointer(pointer)
    }
}

/// Makes the contents of a region from the inputs.
pub(super) type PackContents = Box<dyn Fn(&Tensors) -> Vec<u8>>;

/// Contents of a region when the program is loaded.
pub(super) enum RegionContents {
    /// 0xff in every byte.
    Unwritten,
    /// The input of the region's name, unchanged. Every launch reads the input if it is
    /// `replaceable`; otherwise it was read during the preparation.
    Input { replaceable: bool },
    /// The content is computed on the host from the inputs.
    Packed(PackContents),
    /// The input of the region's name, which launches update, and then an output.
    State { output: &'static str, shape: Vec<usize>, dtype: Dtype },
    /// Numbers and addresses.
    Table(Vec<TableWord>),
    /// The region is the output tensor of the same name.
    Output { name: &'static str, shape: Vec<usize>, dtype: Dtype },
}

/// A named piece of the program's device memory.
pub(super) struct MemoryRegion {
    pub name: Cow<'static, str>,
    pub bytes: usize,
    pub slot: usize,
    pub contents: RegionContents,
    freed: bool,
    /// Whether launches update the region's initial content.
    pub updated: bool,
    /// Whether a table points into the region.
    in_table: bool,
}

impl MemoryRegion {
    /// The bytes that the workload's inputs put in the region; `None` for scratch, tables and
    /// outputs.
    ///
    /// # Errors
    /// Fails if the number of bytes differs from the declared one.
    pub fn uploaded<'a>(&self, inputs: &'a Tensors) -> Result<Option<Cow<'a, [u8]>>, ProgramError> {
        let bytes: Cow<[u8]> = match &self.contents {
            RegionContents::Packed(pack) => pack(inputs).into(),
            RegionContents::Input { .. } | RegionContents::State { .. } => {
                inputs.tensor(&self.name).as_bytes().into()
            }
            RegionContents::Unwritten
            | RegionContents::Table(_)
            | RegionContents::Output { .. } => return Ok(None),
        };
        if bytes.len() == self.bytes {
            Ok(Some(bytes))
        } else {
            let (region, declared) = (self.name.to_string(), self.bytes);
            Err(ProgramError::ContentsSize { region, declared, found: bytes.len() })
        }
    }
}

/// An allocation: one region, or several whose lifetimes do not overlap.
pub(super) struct MemorySlot {
    pub bytes: usize,
    purpose: MemoryPurpose,
    free: bool,
    /// Last steps, by lane, of earlier regions in this memory.
    earlier: Vec<LaneStepPosition>,
    /// Last steps, by lane, of the present region in this memory.
    latest: Vec<LaneStepPosition>,
}

/// Regions and slots.
#[derive(Default)]
pub(super) struct ProgramMemoryPlan {
    pub regions: Vec<MemoryRegion>,
    pub slots: Vec<MemorySlot>,
    names: BTreeMap<Cow<'static, str>, usize>,
}

/// Region number of a pointer whose region name was unknown.
const UNKNOWN_REGION: usize = usize::MAX;

impl ProgramMemoryPlan {
    /// Adds a region; one without contents takes over the smallest freed slot of its use that is
    /// large enough.
    ///
    /// # Errors
    /// Fails if a live region has its name, or a table points outside a region.
    pub fn add(
        &mut self,
        name: Cow<'static, str>,
        purpose: MemoryPurpose,
        bytes: usize,
        contents: RegionContents,
    ) -> Result<Pointer, ProgramError> {
        let reuses = matches!(contents, RegionContents::Unwritten);
        if let RegionContents::Table(words) = &contents {
            for word in words {
                let TableWord::Pointer(pointer) = word else { continue };
                self.region_of_pointer(*pointer)?.in_table = true;
            }
        }
        let fitting = self.slots.iter_mut().enumerate().filter(|(_, slot)| {
            reuses && slot.free && slot.purpose == purpose && slot.bytes >= bytes
        });
        let slot = match fitting.min_by_key(|(_, slot)| slot.bytes) {
            Some((number, slot)) => {
                slot.free = false;
                number
            }
            None => {
                let (earlier, latest) = (Vec::new(), Vec::new());
                self.slots.push(MemorySlot { bytes, purpose, free: false, earlier, latest });
                self.slots.len() - 1
            }
        };
        let region = self.regions.len();
        let updated = matches!(contents, RegionContents::State { .. });
        let before = self.names.insert(name.clone(), region);
        let duplicate = before.is_some_and(|before| !self.regions[before].freed);
        let error = ProgramError::DuplicateRegion { name: name.to_string() };
        self.regions.push(MemoryRegion {
            name,
            bytes,
            slot,
            contents,
            freed: false,
            updated,
            in_table: false,
        });
        if duplicate { Err(error) } else { Ok(Pointer { region, offset: 0, skipped: 0 }) }
    }

    /// A pointer to the beginning of the region with a name.
    pub fn find(&self, name: &str) -> Option<Pointer> {
        self.names.get(name).map(|&region| Pointer { region, offset: 0, skipped: 0 })
    }

    /// A pointer for a name that no region has.
    pub const fn unknown_pointer() -> Pointer {
        Pointer { region: UNKNOWN_REGION, offset: 0, skipped: 0 }
    }

    /// Gives the memory of a region to later regions.
    ///
    /// # Errors
    /// Fails if the region is not scratch, or a table points into it.
    pub fn free(&mut self, pointer: Pointer) -> Result<(), ProgramError> {
        let region = self.region_of_pointer(pointer)?;
        if region.in_table || !matches!(region.contents, RegionContents::Unwritten) {
            return Err(ProgramError::NotFreeable { region: region.name.to_string() });
        }
        region.freed = true;
        let slot = region.slot;
        let slot = &mut self.slots[slot];
        slot.free = true;
        for position in std::mem::take(&mut slot.latest) {
            replace_positions(&mut slot.earlier, position);
        }
        Ok(())
    }

    /// Notes that launches update the contents of a region.
    ///
    /// # Errors
    /// Fails if the region was freed, or the pointer is outside it.
    pub fn mark_updated(&mut self, pointer: Pointer) -> Result<(), ProgramError> {
        self.region_of_pointer(pointer).map(|region| region.updated = true)
    }

    /// Notes that a step uses the region of a pointer.
    ///
    /// # Errors
    /// Fails if the region was freed, the pointer is outside it, or the step may run before steps
    /// that still use the memory for another region.
    pub fn note_use(
        &mut self,
        pointer: Pointer,
        step: LaneStepPosition,
        order: &LaneOrder,
    ) -> Result<(), ProgramError> {
        let (number, name) = {
            let region = self.region_of_pointer(pointer)?;
            (region.slot, region.name.clone())
        };
        let slot = &mut self.slots[number];
        let unordered = slot.earlier.iter().find(|before| !order.is_before(**before, step.lane));
        if let Some(LaneStepPosition { lane: Lane(lane), .. }) = unordered {
            return Err(ProgramError::UnorderedReuse { region: name.to_string(), lane: *lane });
        }
        replace_positions(&mut slot.latest, step);
        Ok(())
    }

    /// Notes that a GEMM writes the region of a pointer.
    ///
    /// # Errors
    /// Fails if the region's contents are uploaded once.
    pub fn note_gemm_output(&self, pointer: Pointer) -> Result<(), ProgramError> {
        match self.regions.get(pointer.region) {
            Some(MemoryRegion {
                contents: RegionContents::Unwritten | RegionContents::Output { .. },
                ..
            })
            | None => Ok(()),
            Some(MemoryRegion { name, .. }) => {
                Err(ProgramError::OverwritesContents { region: name.to_string() })
            }
        }
    }

    /// Returns the region that a pointer points into, after checking that the pointer is inside it.
    fn region_of_pointer(&mut self, pointer: Pointer) -> Result<&mut MemoryRegion, ProgramError> {
        let Some(region) = self.regions.get_mut(pointer.region) else {
            return Err(ProgramError::UnknownRegion { name: String::new() });
        };
        if region.freed {
            return Err(ProgramError::UsedAfterFree { region: region.name.to_string() });
        }
        if pointer.offset >= region.bytes.max(1) {
            let (region, bytes) = (region.name.to_string(), region.bytes);
            return Err(ProgramError::OutsideRegion { region, offset: pointer.offset, bytes });
        }
        Ok(region)
    }

    /// Bytes of every slot.
    pub fn bytes_of_slots(&self) -> usize {
        self.slots.iter().map(|slot| slot.bytes).sum()
    }

    /// Bytes of all memory with one use.
    pub fn bytes_for_purpose(&self, purpose: MemoryPurpose) -> usize {
        self.slots.iter().filter(|slot| slot.purpose == purpose).map(|slot| slot.bytes).sum()
    }
}

/// Puts a step in the place of the earlier one of its lane.
fn replace_positions(positions: &mut Vec<LaneStepPosition>, step: LaneStepPosition) {
    positions.retain(|position| position.lane != step.lane);
    positions.push(step);
}
