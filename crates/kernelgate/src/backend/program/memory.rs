//! Plans a program's device memory: named regions with purpose and contents, and the allocations
//! that regions share.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::error::LaunchListError;
use super::lanes::{LaneStepPosition, OrderOfLaneSteps, ProgramLane};
use super::operand::RegionPointer;
use crate::workload::{Dtype, Tensors};

/// The purpose of a memory region; the table of device memory lists bytes by purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemoryPurpose {
    /// Parameters of the network, packed or unchanged.
    Weights,
    /// State of an optimiser, such as momentum.
    Momentum,
    /// Memory for results of the forward pass.
    Activations,
    /// Memory for gradients of activations and of parameters.
    Gradients,
    /// Scratch memory of kernels and libraries, if no other purpose fits.
    Workspace,
    /// Memory for inputs that every launch reads.
    Inputs,
    /// Results.
    Outputs,
}

impl MemoryPurpose {
    /// All purposes of memory, in the order of the table of device memory.
    pub const ALL_MEMORY_PURPOSES: [Self; 7] = [
        Self::Weights,
        Self::Momentum,
        Self::Activations,
        Self::Gradients,
        Self::Workspace,
        Self::Inputs,
        Self::Outputs,
    ];

    /// Label of the purpose in the table of device memory.
    pub const fn purpose_label(self) -> &'static str {
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

/// One element of a table in device memory: a number or an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableNumberOrAddress {
    /// A 64-bit value.
    Number(i64),
    /// The address of a pointer into a memory region.
    Pointer(RegionPointer),
}

impl From<i64> for TableNumberOrAddress {
    fn from(value: i64) -> Self {
        Self::Number(value)
    }
}

impl From<RegionPointer> for TableNumberOrAddress {
    fn from(pointer: RegionPointer) -> Self {
        Self::Pointer(pointer)
    }
}

/// Computes the initial bytes of a region from the problem's inputs.
pub(super) type ComputeRegionContents = Box<dyn Fn(&Tensors) -> Vec<u8>>;

/// Contents of a memory region at the time when the program is loaded.
pub(super) enum RegionContents {
    /// Scratch memory without defined contents; loading fills every byte with 0xff.
    Unwritten,
    /// The problem's input with the region's name, unchanged. If `replaceable`, every launch reads
    /// the input; otherwise only the preparation read it.
    ProblemInput { replaceable: bool },
    /// The contents are computed on the host from the inputs, such as packed weights.
    ComputedOnHost(ComputeRegionContents),
    /// The problem's input with the region's name, which launches update in place and which is also
    /// an output.
    StateUpdatedInPlace { output: &'static str, shape: Vec<usize>, dtype: Dtype },
    /// Numbers and addresses.
    Table(Vec<TableNumberOrAddress>),
    /// The region is the output tensor of the same name.
    ProblemOutput { name: &'static str, shape: Vec<usize>, dtype: Dtype },
}

/// A named part of the program's device memory.
pub(super) struct MemoryRegion {
    pub region_name: Cow<'static, str>,
    pub region_bytes: usize,
    pub allocation_index: usize,
    pub contents: RegionContents,
    is_freed: bool,
    /// Whether launches change the region's initial contents.
    pub changed_by_launches: bool,
    /// Whether a table contains an address in the region, so that the region cannot be freed.
    address_is_in_table: bool,
}

impl MemoryRegion {
    /// The initial bytes of the region, computed from the problem's inputs; `None` for scratch,
    /// tables and outputs.
    ///
    /// # Errors
    /// Fails if their size differs from the declared size.
    pub fn initial_bytes_from_inputs<'a>(
        &self,
        inputs: &'a Tensors,
    ) -> Result<Option<Cow<'a, [u8]>>, LaunchListError> {
        let bytes: Cow<[u8]> = match &self.contents {
            RegionContents::ComputedOnHost(pack) => pack(inputs).into(),
            RegionContents::ProblemInput { .. } | RegionContents::StateUpdatedInPlace { .. } => {
                inputs.tensor(&self.region_name).as_bytes().into()
            }
            RegionContents::Unwritten
            | RegionContents::Table(_)
            | RegionContents::ProblemOutput { .. } => return Ok(None),
        };
        if bytes.len() == self.region_bytes {
            Ok(Some(bytes))
        } else {
            let (region, declared) = (self.region_name.to_string(), self.region_bytes);
            Err(LaunchListError::ContentsSizeMismatch {
                region,
                declared_bytes: declared,
                found_bytes: bytes.len(),
            })
        }
    }
}

/// One allocation of device memory, for one region or for several regions whose lifetimes do not
/// overlap.
pub(super) struct SharedAllocation {
    pub allocation_bytes: usize,
    purpose: MemoryPurpose,
    is_free: bool,
    /// For each lane, the last step that used an earlier region in this allocation.
    last_steps_of_earlier_regions: Vec<LaneStepPosition>,
    /// For each lane, the last step that used the present region in this allocation.
    last_steps_of_this_region: Vec<LaneStepPosition>,
}

/// Regions and slots.
#[derive(Default)]
pub(super) struct RegionAndAllocationPlan {
    pub regions: Vec<MemoryRegion>,
    pub allocations: Vec<SharedAllocation>,
    region_by_name: BTreeMap<Cow<'static, str>, usize>,
}

/// Region number of a pointer that was requested for an unknown region name.
const REGION_NUMBER_OF_UNKNOWN_NAME: usize = usize::MAX;

impl RegionAndAllocationPlan {
    /// Adds a region; scratch reuses the smallest freed allocation of its purpose that is large
    /// enough.
    ///
    /// # Errors
    /// Fails if another live region has the name, or a table points outside a region.
    pub fn add_region_or_reuse_allocation(
        &mut self,
        name: Cow<'static, str>,
        purpose: MemoryPurpose,
        bytes: usize,
        contents: RegionContents,
    ) -> Result<RegionPointer, LaunchListError> {
        let reuses = matches!(contents, RegionContents::Unwritten);
        if let RegionContents::Table(words) = &contents {
            for word in words {
                let TableNumberOrAddress::Pointer(pointer) = word else { continue };
                self.live_region_of_pointer(*pointer)?.address_is_in_table = true;
            }
        }
        let fitting = self.allocations.iter_mut().enumerate().filter(|(_, slot)| {
            reuses && slot.is_free && slot.purpose == purpose && slot.allocation_bytes >= bytes
        });
        let slot = match fitting.min_by_key(|(_, slot)| slot.allocation_bytes) {
            Some((number, slot)) => {
                slot.is_free = false;
                number
            }
            None => {
                let (earlier, latest) = (Vec::new(), Vec::new());
                self.allocations.push(SharedAllocation {
                    allocation_bytes: bytes,
                    purpose,
                    is_free: false,
                    last_steps_of_earlier_regions: earlier,
                    last_steps_of_this_region: latest,
                });
                self.allocations.len() - 1
            }
        };
        let region = self.regions.len();
        let updated = matches!(contents, RegionContents::StateUpdatedInPlace { .. });
        let before = self.region_by_name.insert(name.clone(), region);
        let duplicate = before.is_some_and(|before| !self.regions[before].is_freed);
        let error = LaunchListError::DuplicateRegion { region_name: name.to_string() };
        self.regions.push(MemoryRegion {
            region_name: name,
            region_bytes: bytes,
            allocation_index: slot,
            contents,
            is_freed: false,
            changed_by_launches: updated,
            address_is_in_table: false,
        });
        if duplicate {
            Err(error)
        } else {
            Ok(RegionPointer {
                region_index: region,
                offset_bytes: 0,
                bytes_subtracted_from_offset: 0,
            })
        }
    }

    /// Returns a pointer to the beginning of the region with this name; `None` if no region has the
    /// name.
    pub fn pointer_to_region(&self, name: &str) -> Option<RegionPointer> {
        self.region_by_name.get(name).map(|&region| RegionPointer {
            region_index: region,
            offset_bytes: 0,
            bytes_subtracted_from_offset: 0,
        })
    }

    /// The placeholder pointer for a name that no region has.
    pub const fn placeholder_for_missing_region_name() -> RegionPointer {
        RegionPointer {
            region_index: REGION_NUMBER_OF_UNKNOWN_NAME,
            offset_bytes: 0,
            bytes_subtracted_from_offset: 0,
        }
    }

    /// Ends the life of a scratch region, so that later scratch regions can reuse its memory.
    ///
    /// # Errors
    /// Fails if the region is not scratch, or a table points into it.
    pub fn free_scratch_region(&mut self, pointer: RegionPointer) -> Result<(), LaunchListError> {
        let region = self.live_region_of_pointer(pointer)?;
        if region.address_is_in_table || !matches!(region.contents, RegionContents::Unwritten) {
            return Err(LaunchListError::RegionNotFreeable {
                region: region.region_name.to_string(),
            });
        }
        region.is_freed = true;
        let slot = region.allocation_index;
        let slot = &mut self.allocations[slot];
        slot.is_free = true;
        for position in std::mem::take(&mut slot.last_steps_of_this_region) {
            replace_position_of_lane(&mut slot.last_steps_of_earlier_regions, position);
        }
        Ok(())
    }

    /// Marks the contents of a region as changed by launches, so that they are restored with the
    /// state.
    ///
    /// # Errors
    /// Fails if the region was freed, or the pointer is outside it.
    pub fn mark_contents_changed_by_launches(
        &mut self,
        pointer: RegionPointer,
    ) -> Result<(), LaunchListError> {
        self.live_region_of_pointer(pointer).map(|region| region.changed_by_launches = true)
    }

    /// Records that a step uses the region of a pointer.
    ///
    /// # Errors
    /// Fails if the region was freed, the pointer is outside it, or the step may run before steps
    /// that use the same memory for an earlier region.
    pub fn record_use_by_step(
        &mut self,
        pointer: RegionPointer,
        step: LaneStepPosition,
        order: &OrderOfLaneSteps,
    ) -> Result<(), LaunchListError> {
        let (number, name) = {
            let region = self.live_region_of_pointer(pointer)?;
            (region.allocation_index, region.region_name.clone())
        };
        let slot = &mut self.allocations[number];
        let unordered = slot
            .last_steps_of_earlier_regions
            .iter()
            .find(|before| !order.finishes_before_next_step_of_lane(**before, step.lane));
        if let Some(LaneStepPosition { lane: ProgramLane(lane), .. }) = unordered {
            return Err(LaunchListError::UnorderedMemoryReuse {
                region: name.to_string(),
                lane_number: *lane,
            });
        }
        replace_position_of_lane(&mut slot.last_steps_of_this_region, step);
        Ok(())
    }

    /// Checks that a GEMM may write the region of a pointer.
    ///
    /// # Errors
    /// Fails if the region has contents that are uploaded once.
    pub fn check_gemm_may_write_region(
        &self,
        pointer: RegionPointer,
    ) -> Result<(), LaunchListError> {
        match self.regions.get(pointer.region_index) {
            Some(MemoryRegion {
                contents: RegionContents::Unwritten | RegionContents::ProblemOutput { .. },
                ..
            })
            | None => Ok(()),
            Some(MemoryRegion { region_name: name, .. }) => {
                Err(LaunchListError::GemmOverwritesContents { region: name.to_string() })
            }
        }
    }

    /// Returns the region that a pointer points into, after checking that the pointer is inside it.
    fn live_region_of_pointer(
        &mut self,
        pointer: RegionPointer,
    ) -> Result<&mut MemoryRegion, LaunchListError> {
        let Some(region) = self.regions.get_mut(pointer.region_index) else {
            return Err(LaunchListError::UnknownRegion { region_name: String::new() });
        };
        if region.is_freed {
            return Err(LaunchListError::RegionUsedAfterFree {
                region: region.region_name.to_string(),
            });
        }
        if pointer.offset_bytes >= region.region_bytes.max(1) {
            let (region, bytes) = (region.region_name.to_string(), region.region_bytes);
            return Err(LaunchListError::PointerOutsideRegion {
                region_name: region,
                offset_bytes: pointer.offset_bytes,
                region_bytes: bytes,
            });
        }
        Ok(region)
    }

    /// Total size in bytes of all allocations of the program.
    pub fn allocated_bytes(&self) -> usize {
        self.allocations.iter().map(|slot| slot.allocation_bytes).sum()
    }

    /// Sum of the allocations for one purpose, in bytes.
    pub fn allocated_bytes_for_purpose(&self, purpose: MemoryPurpose) -> usize {
        self.allocations
            .iter()
            .filter(|slot| slot.purpose == purpose)
            .map(|slot| slot.allocation_bytes)
            .sum()
    }
}

/// Replaces the recorded position of the step's lane by this later step.
fn replace_position_of_lane(positions: &mut Vec<LaneStepPosition>, step: LaneStepPosition) {
    positions.retain(|position| position.lane != step.lane);
    positions.push(step);
}
